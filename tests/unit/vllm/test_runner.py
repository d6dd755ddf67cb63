"""Our side of vLLM's model runners, without an engine."""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.worker.gpu import model_runner

from tlt.config.rollout import EngineConfig
from tlt.contracts import DRAFTERS, Arm, Drafter
from tlt.errors import EngineError
from tlt.strategy.spec import build_strategy
from tlt.vllm import compat
from tlt.vllm.args import engine_args, strategy_spec
from tlt.vllm.runner import Lookup, Texts
from tlt.vllm.v1.runner import RunnerV1
from tlt.vllm.v2.runner import RunnerV2


@pytest.mark.parametrize(("rule", "drafts"), [("standard", "greedy"), ("block", "probabilistic")])
def test_only_the_ratio_test_keeps_the_logits_of_drafts(
    monkeypatch: pytest.MonkeyPatch, rule: str, drafts: str
) -> None:
    """vLLM allocates logits of all drafts if they are sampled; the keyed sampler reads none."""
    speculative = SimpleNamespace(
        method="mtp", draft_sample_method="probabilistic", rejection_sample_method=rule
    )
    config: Any = SimpleNamespace(
        speculative_config=speculative, additional_config={"tlt": {"ngram": None}}
    )
    built: list[str] = []

    def build(config: Any, *rest: Any) -> None:
        built.append(config.speculative_config.draft_sample_method)

    monkeypatch.setattr(model_runner, "init_speculator", build)
    with RunnerV2(config).installing():
        model_runner.init_speculator(config, torch.device("cpu"), None)
    assert built == [drafts]
    assert model_runner.init_speculator is build


@pytest.fixture
def without_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM be 0.31 in the one respect that its V2 speculators always draft the most."""
    monkeypatch.setattr(compat, "counts_drafts", lambda: False)


@pytest.mark.usefixtures("without_count")
def test_vllm_0_31_learns_the_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = {"ngram": Repeat()}
    monkeypatch.setattr(RunnerV2, "_lookups", lambda self, *args: lookups)
    config: Any = SimpleNamespace(additional_config={"tlt": {}})
    seen: list[int] = []
    handler = SimpleNamespace(set_draft_tokens=lambda batch, drafts: seen.append(drafts.shape[1]))
    drafting = SimpleNamespace(drafter="eagle3", lookups={}, num_drafts=None)
    ours = RunnerV2(config)
    ours.install(
        SimpleNamespace(
            speculator=drafting, draft_tokens_handler=handler, device="cpu", req_states=None
        )
    )
    assert drafting.lookups is lookups, "made when the states of requests are there"
    warm_up = SimpleNamespace(num_spec_tokens_to_schedule=0, finished_req_ids=set())
    step = SimpleNamespace(
        num_spec_tokens_to_schedule=2, finished_req_ids=set(), tlt_drafter="eagle3"
    )
    for output in (warm_up, step):
        ours.begin_step(output, ())
        handler.set_draft_tokens(None, torch.zeros(1, 4))
    assert seen == [4, 2]


@pytest.mark.usefixtures("without_count")
@pytest.mark.parametrize(("method", "fault"), [("ngram_gpu", "engine.drafter"), ("eagle3", "RUN")])
def test_vllm_0_31_has_no_ngrams_alone(method: str, fault: str) -> None:
    from tlt.vllm.worker import AdaptiveWorker

    worker: Any = AdaptiveWorker()
    worker.use_v2_model_runner = False  # vLLM's choice for "ngram_gpu"
    worker.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method),
        additional_config={"tlt": {"runner": "v2"}},
    )
    with pytest.raises(EngineError, match=fault):
        worker._make_runner()


@pytest.mark.usefixtures("without_count")
def test_vllm_0_31_has_no_lookup_in_the_own_text() -> None:
    from tlt.vllm.ngram.v2 import OwnTextV2

    with pytest.raises(EngineError, match="history_tokens"):
        OwnTextV2(None, torch.device("cpu"), None)


class Repeat(Lookup):
    """Drafts the last token over and over, and notes what it could learn from."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.dropped: set[str] = set()

    def propose(
        self, num_speculative_tokens: int, sampled_token_ids: Sequence[Sequence[int]], *texts: Any
    ) -> list[list[int]]:
        return [tokens[-1:] * num_speculative_tokens for tokens in map(list, sampled_token_ids)]

    def requests_ended(self, texts: Texts) -> None:
        self.ended += texts

    def drop(self, request_ids: Any) -> None:
        self.dropped |= set(request_ids)


def test_a_new_drafter_is_a_module_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Repeat()
    module: Any = ModuleType("repeat_drafter")
    module.on_v1 = lambda config, runner, settings: made
    monkeypatch.setitem(sys.modules, "repeat_drafter", module)
    entry = Drafter("repeats", prior=0.5, draft_lengths=(2, 3), module="repeat_drafter")
    monkeypatch.setitem(DRAFTERS, "repeat", entry)

    config = EngineConfig(model="m", ngram=None, strategy={"kind": "adaptive"})
    arms = build_strategy(strategy_spec(config)).arms()
    assert arms == {Arm(), Arm("repeat", 2), Arm("repeat", 3)}
    args = engine_args(config)
    ours = RunnerV1(
        SimpleNamespace(
            additional_config=args["additional_config"],
            speculative_config=SimpleNamespace(**args["speculative_config"]),
        )
    )
    theirs: Any = SimpleNamespace(drafter=None)
    ours.install(theirs)
    step = {
        "tlt_drafter": "repeat",
        "finished_req_ids": {"ended", "recheck"},
        "tlt_ended": {"ended": (1, [3, 4]), "recheck": (1, [3, 4])},
    }
    ours.begin_step(SimpleNamespace(**step), unlearned={"recheck"})
    assert (made.ended, made.dropped) == (["ended"], {"recheck"})
    lengths, texts = np.array([1, 1]), np.array([[5], [6]])
    assert theirs.drafter.propose(2, [[5], []], lengths, texts) == [[5, 5], []]
    assert theirs.drafter.propose(0, [[5], []], lengths, texts) == [[], []]
