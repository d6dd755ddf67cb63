"""One batch, two sources: every request gets the better draft, and the same tokens as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from workloads import EngineFactory, random_prompts

from tlt.contracts import SamplingSpec, StepReport
from tlt.errors import ConfigError

pytestmark = pytest.mark.vllm

GREEDY = SamplingSpec(max_tokens=26, temperature=0, ignore_eos=True)
OFF = {"kind": "off"}
KNOWN, NEW = random_prompts(6, seed=31), random_prompts(6, seed=32)


def fixed(drafter: str, num_draft_tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "drafter": drafter, "num_draft_tokens": num_draft_tokens}


def run(
    engine: EngineProcess, strategy: dict[str, Any]
) -> tuple[list[tuple[int, ...]], list[StepReport]]:
    """Generate for prompts that the history knows and for others; return tokens and steps."""
    engine.call("reset_prefix_cache")
    engine.call("set_strategy", OFF)
    engine.generate(KNOWN, GREEDY)
    engine.call("take_trace")
    engine.call("set_strategy", strategy)
    samples = engine.generate([p for pair in zip(KNOWN, NEW, strict=True) for p in pair], GREEDY)
    return [sample.token_ids for sample in samples], engine.call("take_trace")


def test_each_request_gets_the_better_draft(
    engines: EngineFactory, tiny: Path, tiny_drafter: Path
) -> None:
    engine = engines(model=str(tiny), drafter=str(tiny_drafter), max_draft_tokens=8)
    plain, _ = run(engine, OFF)
    # The first mixed rollouts teach the engine which matches are good.
    arms = [("ngram", 8), ("eagle3", 3), *[("mixed", 3)] * 4]
    gained: dict[str, float] = {}
    steps: list[StepReport] = []
    for drafter, length in arms:
        before = engine.stats()
        tokens, steps = run(engine, fixed(drafter, length))
        assert tokens == plain, drafter
        after = engine.stats()
        decodes = sum(step.num_decodes for step in steps if step.num_decodes)
        gained[drafter] = sum(step.num_accepted_tokens for step in steps) / decodes
        model_drafts = after.model_drafts - before.model_drafts
        assert (model_drafts > 0) == (drafter != "ngram")
    # Both sources draft in one engine step, and drafts from the history are longer.
    assert any(0 < step.history_drafts < step.num_drafts for step in steps)
    assert max(len(step.history_accepted_at) for step in steps) > 3
    assert sum(step.history_drafts for step in steps) + model_drafts == sum(
        step.num_drafts for step in steps
    )
    assert gained["mixed"] > max(gained["ngram"], gained["eagle3"]), gained


def test_without_a_history_there_is_nothing_to_mix(
    engines: EngineFactory, tiny: Path, tiny_drafter: Path
) -> None:
    engine = engines(model=str(tiny), drafter=str(tiny_drafter), ngram={"history_tokens": 0})
    with pytest.raises(ConfigError, match=r"engine\.ngram\.history_tokens"):
        engine.call("set_strategy", fixed("mixed", 1))
