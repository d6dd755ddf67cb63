"""Samples generated again without drafts: equal on a healthy engine, and a broken one is caught."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_process import EngineProcess, interrupt_recheck
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


def rechecks_of(
    wanted: Sequence[SampleRequest], samples: Sequence[Sample], max_tokens: int = NUM_TOKENS
) -> list[Recheck]:
    chooser = Rechecks(1.0, max_tokens, "float32")
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


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
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


def test_a_recheck_may_be_shorter_than_the_sample(engine: EngineProcess) -> None:
    wanted = requests("short", 1.0)[:4]
    short = rechecks_of(wanted, generate(engine, wanted), max_tokens=5)
    assert [len(recheck.token_ids) for recheck in short] == [5] * 4
    assert [v.differs_at for v in verdicts(engine, short)] == [None] * 4


def test_a_request_ends_a_recheck_and_is_as_it_would_be_without(engine: EngineProcess) -> None:
    wanted = [
        SampleRequest(
            f"long/{index}", (5, 6, 7), SamplingSpec(400, seed=index, ignore_eos=True), rl_step=1
        )
        for index in range(2)
    ]
    samples = generate(engine, wanted)
    first, second = rechecks_of(wanted, samples, max_tokens=400)
    again = SampleRequest("again", wanted[1].prompt_token_ids, wanted[1].sampling)
    before = engine.stats()
    assert engine.call(interrupt_recheck, first, again) is None
    [sample] = engine.collect(["again"])
    assert sample.token_ids == samples[1].token_ids
    counted = engine.stats().output_tokens - before.output_tokens
    assert 400 <= counted < 410, "the recheck's tokens are not counted"
    assert verdicts(engine, [second])[0].shortfall < NEAR_TIES["float32"], "rechecks go on"


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
    engine.call("set_strategy", SWITCHING)


def test_a_verification_that_changes_samples_is_caught(
    engines: EngineFactory, tiny: Path, tiny_drafter: Path
) -> None:
    """The control: an engine that breaks after it has passed its self-test."""
    engine = engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        max_draft_tokens=4,
        strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 1},
    )
    engine.call(break_engine)
    wanted = requests("broken", 1.0)
    found = verdicts(engine, rechecks_of(wanted, generate(engine, wanted)))
    caught = [v for v in found if v.shortfall > NEAR_TIES["float32"]]
    assert len(caught) >= 0.9 * NUM_SAMPLES
    assert any(1.0 < v.shortfall < LARGEST_SHORTFALL for v in found)
