"""What TLT changes of the settings that vLLM's V2 runner builds its speculator from."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.worker.gpu import model_runner

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
