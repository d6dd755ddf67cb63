"""Samples are the same with and without drafts on vLLM's V2 runner, under Triton's interpreter.

The engines are whole ones in float32. Prompts come in chunks, and the second run of a prompt reads
its beginning from the prefix cache.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreter import InterpretedEngine
from workloads import TINY_ARGS, random_prompts, seeded

from tlt.config.rollout import EngineConfig, NgramConfig
from tlt.contracts import Recheck, Sample, Text
from tlt.rollout.recheck import NEAR_TIES

pytestmark = pytest.mark.vllm

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "extra": {"min_tokens": 4}, "stop_token_ids": (5, 6, 7)},
]
WORK = seeded(random_prompts(len(SETTINGS), seed=5), SETTINGS, max_tokens=10)
SWITCHING = {
    "kind": "random",
    "arms": [["off", 0], ["eagle3", 1], ["eagle3", 3], ["ngram", 2]],
    "seed": 1,
}


def start(tiny: Path, drafter: Path, *, is_async: bool) -> InterpretedEngine:
    args: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "async_scheduling": is_async,
    }
    config = EngineConfig(
        model=str(tiny),
        drafter=str(drafter),
        max_draft_tokens=3,
        ngram=NgramConfig(min_match=1, max_match=3),
        strategy={"kind": "off"},
        kv_cache_gib=0.1,
        core_group=f"lossless-v2-{is_async}",
        engine_args=TINY_ARGS | args,
    )
    engine = InterpretedEngine(config)
    report = engine.start()
    assert report["faults"] == []
    assert report["proposer"] == "SwitchingSpeculator"
    assert report["sampler"] == "KeyedVerifier"
    return engine


def samples_of(engine: InterpretedEngine, strategy: dict[str, Any]) -> list[Sample]:
    engine.call("set_strategy", strategy)
    engine.call("submit", WORK)
    return engine.collect([request.sample_id for request in WORK])


@pytest.fixture(scope="module")
def engine(tiny: Path, tiny_drafter: Path) -> Iterator[InterpretedEngine]:
    engine = start(tiny, tiny_drafter, is_async=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(engine: InterpretedEngine) -> list[Sample]:
    return samples_of(engine, {"kind": "off"})


def check_equal(engine: InterpretedEngine, reference: list[Sample]) -> None:
    before = engine.stats()
    samples = samples_of(engine, SWITCHING)
    after = engine.stats()
    accepted = after.accepted_tokens - before.accepted_tokens
    assert accepted > 3
    assert after.draft_tokens - before.draft_tokens - accepted > 3
    assert [s.token_ids for s in samples] == [s.token_ids for s in reference]
    for sample, other in zip(samples, reference, strict=True):
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def check_rechecks(engine: InterpretedEngine, reference: list[Sample]) -> None:
    """Samples generated again without drafts are the same; a changed token is found."""
    for request, sample, change in zip(WORK[:3], reference[:3], (None, None, 3), strict=True):
        tokens = list(sample.token_ids)
        if change is not None:
            tokens[change] = (tokens[change] + 1) % 100
        name = f"recheck/{request.sample_id}"
        again = replace(request, sample_id=name, sampling=replace(request.sampling, logprobs=False))
        before = engine.stats()
        verdict = engine.call("recheck", Recheck(again, tuple(tokens), 0))
        assert verdict is not None
        assert verdict.differs_at == change
        assert (verdict.shortfall > NEAR_TIES["float32"]) == (change is not None)
        assert engine.stats() == before, "rechecks are not counted"


@pytest.mark.gate
def test_same_samples_while_drafters_and_draft_lengths_switch(
    engine: InterpretedEngine, reference: list[Sample]
) -> None:
    assert len({s.token_ids for s in reference}) == len(WORK)
    check_equal(engine, reference)


@pytest.mark.gate
def test_a_sample_that_another_engine_began_is_continued(
    engine: InterpretedEngine, reference: list[Sample]
) -> None:
    engine.call("set_strategy", SWITCHING)
    work, wanted = [], []
    for number, (request, sample) in enumerate(zip(WORK, reference, strict=True)):
        size = min(1 + 3 * (number % 3), len(sample.token_ids) - 1)
        if not request.sampling.extra:
            begun = Text(sample.token_ids[:size], sample.logprobs[:size], policy_version=0)
            work.append(replace(request, begun=begun))
            wanted.append(sample)
    engine.call("submit", work)
    again = engine.collect([request.sample_id for request in work])
    assert [s.token_ids for s in again] == [s.token_ids for s in wanted]
    for one, other in zip(again, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_samples_are_rechecked(engine: InterpretedEngine, reference: list[Sample]) -> None:
    check_rechecks(engine, reference)


def test_same_samples_with_asynchronous_scheduling(
    reference: list[Sample], tiny: Path, tiny_drafter: Path
) -> None:
    """The engine runs a step ahead of the tokens; without drafts it gives the same samples too."""
    engine = start(tiny, tiny_drafter, is_async=True)
    check_equal(engine, reference)
    check_rechecks(engine, reference)
    engine.close()
