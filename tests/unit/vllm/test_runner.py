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
from tlt.strategy.spec import build_strategy
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
