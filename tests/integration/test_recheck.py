"""Samples generated again without drafts: equal on a healthy engine, and a broken one is caught."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_process import EngineProcess
from workloads import SWITCHING_ARMS, EngineFactory, random_prompts

from broken_verification import break_engine
from tlt.contracts import LARGEST_SHORTFALL, Recheck, Sample, SampleRequest, SamplingSpec
from tlt.rollout.recheck import NEAR_TIES, Rechecks, Verdict

pytestmark = pytest.mark.vllm

NUM_SAMPLES = 24
NUM_TOKENS = 48
SWITCHING = {"kind": "random", "arms": SWITCHING_ARMS, "seed": 2}
NGRAM = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4}


@pytest.fixture(scope="module")
def engine(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> EngineProcess:
    return engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        max_draft_tokens=8,
        strategy=SWITCHING,
        ngram={"min_match": 1, "max_match": 3},
    )


def requests(label: str, temperature: float) -> list[SampleRequest]:
    return [
        SampleRequest(
            f"{label}/{index}",
            tuple(prompt),
            SamplingSpec(NUM_TOKENS, temperature, seed=index, ignore_eos=index % 2 == 0),
            rl_step=1,
        )
        for index, prompt in enumerate(random_prompts(NUM_SAMPLES))
    ]


def generate(engine: EngineProcess, wanted: Sequence[SampleRequest]) -> list[Sample]:
    engine.call("submit", list(wanted))
    return engine.collect([r.sample_id for r in wanted])


def rechecks_of(wanted: Sequence[SampleRequest], samples: Sequence[Sample]) -> list[Recheck]:
    chooser = Rechecks(1.0, NUM_TOKENS, "float32")
    chooser.rollout_started(wanted)
    found = []
    for sample in samples:
        chooser.finished(sample)
        recheck = chooser.next()
        assert recheck is not None
        found.append(recheck)
    return found


def verdicts(engine: EngineProcess, rechecks: Sequence[Recheck]) -> list[Verdict]:
    found = [engine.call("recheck", recheck) for recheck in rechecks]
    assert None not in found
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_samples_with_drafts_are_the_same_without(
    engine: EngineProcess, temperature: float
) -> None:
    wanted = requests(f"good-{temperature}", temperature)
    samples, accepted = engine.accepted_during(lambda: generate(engine, wanted))
    assert accepted > 0
    before = engine.stats()
    found = verdicts(engine, rechecks_of(wanted, samples))
    assert engine.stats() == before, "rechecks are not counted"
    assert engine.call("take_finished", 0.0) == []
    # The batch was larger: rounding may decide between two tokens that are nearly tied.
    assert max(v.shortfall for v in found) < NEAR_TIES["float32"]
    assert sum(v.differs_at is None for v in found) >= NUM_SAMPLES - 2


def test_no_ngrams_are_learned_from_a_recheck(engine: EngineProcess) -> None:
    engine.call("set_strategy", NGRAM)
    wanted = requests("ngram", 1.0)[:1]
    [recheck] = rechecks_of(wanted, generate(engine, wanted))

    def drafted(rechecks: Sequence[Recheck]) -> int:
        engine.call("reset_prefix_cache")  # forgets the history, too
        verdicts(engine, rechecks)
        before = engine.stats().accepted_tokens
        generate(engine, [SampleRequest("same", wanted[0].prompt_token_ids, wanted[0].sampling)])
        return engine.stats().accepted_tokens - before

    assert drafted([recheck]) == drafted([])


def test_a_verification_that_changes_samples_is_caught(engine: EngineProcess) -> None:
    """The engine breaks after it has passed its self-test; no later test uses it."""
    engine.call("set_strategy", {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 1})
    engine.call(break_engine)
    wanted = requests("broken", 1.0)
    found = verdicts(engine, rechecks_of(wanted, generate(engine, wanted)))
    caught = [v for v in found if v.shortfall > NEAR_TIES["float32"]]
    assert len(caught) >= 0.9 * NUM_SAMPLES
    assert any(1.0 < v.shortfall < LARGEST_SHORTFALL for v in found)
