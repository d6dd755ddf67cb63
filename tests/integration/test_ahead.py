"""Texts generated ahead: the same samples in every bit, fewer engine steps, and an engine that is
free at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, PooledEngine, interrupt_look_ahead
from workloads import TINY_ARGS, EngineFactory, random_prompts

from tlt.config.rollout import PoolConfig
from tlt.contracts import EngineStats, SampleRequest, SamplingSpec
from tlt.rollout.ahead import AheadText, LookAhead, common_length
from tlt.rollout.lengths import LengthForecast
from tlt.rollout.pool import RolloutPool
from tlt.rollout.texts import Lesson
from tlt.states.buffer import BufferSettings, SampleBuffer

pytestmark = pytest.mark.vllm

OFF = {"kind": "off"}
NGRAM = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 8}
LIMIT_S = 60.0
Bits = dict[str, tuple[tuple[int, ...], tuple[float, ...]]]


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> BufferSettings:
    return BufferSettings(str(tmp_path_factory.mktemp("states") / "buffer"), 2**30, 4096)


@pytest.fixture(scope="module")
def engine(
    engines: EngineFactory, tiny: Path, fresh_drafter: Path, buffer: BufferSettings
) -> EngineProcess:
    return engines(
        model=str(tiny),
        drafter=str(fresh_drafter),
        strategy=NGRAM,
        capture=asdict(buffer),
        engine_args=TINY_ARGS | {"max_num_seqs": 8},
    )


def samples_of(step: int, max_tokens: int = 48) -> list[SampleRequest]:
    """Return four prompts with four samples each; those of one prompt have other noise."""
    return [
        SampleRequest(
            f"{step}/{place}/{index}",
            tuple(prompt),
            SamplingSpec(max_tokens, ignore_eos=True, seed=100 * step + 4 * place + index),
            rl_step=step,
        )
        for place, prompt in enumerate(random_prompts(4, seed=step))
        for index in range(4)
    ]


def ahead_of(requests: Sequence[SampleRequest]) -> list[SampleRequest]:
    """Return the requests of look-ahead, as the pool sends them."""
    ahead = LookAhead(LengthForecast(), lambda: 0.0)
    ahead.plan(requests)
    return ahead.next(len(requests))


def look_ahead(
    engine: EngineProcess, turn: int, requests: Sequence[SampleRequest]
) -> dict[str, array[int]]:
    """Return the texts of samples that an engine generates ahead, by their names."""
    found: list[AheadText] = []
    new = ahead_of(requests)
    while len(found) < len(requests):
        texts, is_over = engine.call("look_ahead", turn, new, LIMIT_S)
        assert texts
        assert not is_over
        found += texts
        new = []
    engine.call("end_look_ahead", turn)
    assert engine.call("look_ahead", turn, [], LIMIT_S) == ([], True)
    return {text.name.removeprefix("ahead/"): text.tokens for text in found}


def generate(
    engine: EngineProcess,
    strategy: dict[str, Any],
    requests: Sequence[SampleRequest],
    texts: dict[str, array[int]] | None = None,
) -> tuple[Bits, EngineStats]:
    """Return the samples in every bit, and what the engine counted; it knows only the texts."""
    engine.call("reset_prefix_cache")
    engine.call("set_strategy", strategy)
    before = engine.stats()
    lessons = [
        Lesson(r.prompt_token_ids, texts[r.sample_id], sample_id=r.sample_id)
        for r in requests
        if texts and r.sample_id in texts
    ]
    engine.call("learn", lessons)
    engine.call("submit", list(requests))
    samples = engine.collect([r.sample_id for r in requests])
    bits = {s.sample_id: (s.token_ids, s.logprobs) for s in samples}
    return bits, EngineStats.difference([before], [engine.stats()])


@contextmanager
def moved_policy(tiny: Path, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the manifest of a policy whose parameters differ a little from the folder's."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.node.weights import SharedWeights

    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    with SharedWeights(policy.named_parameters()) as weights:
        yield weights.manifest()


def test_the_same_policy_draws_its_own_text_again(engine: EngineProcess) -> None:
    requests = samples_of(1)
    plain, _ = generate(engine, OFF, requests)
    before = engine.stats()
    texts = look_ahead(engine, 1, requests)
    assert {name: tuple(text) for name, text in texts.items()} == {
        name: tokens for name, (tokens, _) in plain.items()
    }
    assert engine.stats() == before, "look-ahead is not counted, and keeps no states"
    assert engine.call("take_finished", 0.0) == []
    without, alone = generate(engine, NGRAM, requests)
    drafted, own = generate(engine, NGRAM, requests, texts)
    assert drafted == without == plain
    assert own.acceptance_length > 7.0, "of 8, but for the end of a text"
    assert own.acceptance_length > alone.acceptance_length + 2
    assert own.steps < 0.5 * alone.steps


def test_a_moved_policy_gives_its_own_samples_in_fewer_engine_steps(
    engine: EngineProcess, tiny: Path
) -> None:
    requests = samples_of(2)
    texts = look_ahead(engine, 2, requests)
    with moved_policy(tiny, 3e-4) as manifest:
        engine.call("update_policy", manifest, 1)
    plain, _ = generate(engine, OFF, requests)
    repeated = sum(common_length(texts[name], tokens) for name, (tokens, _) in plain.items())
    assert 0.2 < repeated / sum(map(len, texts.values())) < 1.0, "it has moved, and not far"
    without, alone = generate(engine, NGRAM, requests)
    drafted, own = generate(engine, NGRAM, requests, texts)
    assert drafted == without == plain
    assert own.acceptance_length > alone.acceptance_length + 1
    assert own.steps < alone.steps
    wrong = {name: array("i", [9, 10**9, -1] * 9) for name in texts}
    assert generate(engine, NGRAM, requests, wrong)[0] == plain
    swapped = dict(zip(texts, [*texts.values()][::-1], strict=True))
    assert generate(engine, NGRAM, requests, swapped)[0] == plain


def test_a_request_and_a_policy_update_free_the_engine_in_the_middle_of_look_ahead(
    engine: EngineProcess, tiny: Path, buffer: BufferSettings
) -> None:
    [wanted] = samples_of(3, max_tokens=40)[:1]
    plain, _ = generate(engine, OFF, [wanted])
    engine.call("reset_prefix_cache")
    engine.call("set_strategy", NGRAM)
    before = engine.stats()
    ahead = ahead_of(samples_of(4, max_tokens=400))
    texts, is_over = engine.call(interrupt_look_ahead, 5, ahead, wanted)
    assert is_over
    assert len(texts) == 8, "as many as the engine runs at once"
    assert all(0 < len(text.tokens) < 400 for text in texts)
    [sample] = engine.collect([wanted.sample_id])
    assert {sample.sample_id: (sample.token_ids, sample.logprobs)} == plain
    counted = EngineStats.difference([before], [engine.stats()])
    assert counted.output_tokens == 40
    # The policy update that follows a rollout, before any message of the pool has come.
    assert engine.call("look_ahead", 6, ahead, 0.0) == ([], False)
    with moved_policy(tiny, 3e-4) as manifest:
        engine.call("update_policy", manifest, 2)
    texts, is_over = engine.call("look_ahead", 6, [], LIMIT_S)
    assert is_over
    assert {text.name for text in texts} <= {r.sample_id for r in ahead}
    assert not {e.rl_step for e in SampleBuffer(buffer).entries()} - {1, 2, 3}


def with_a_long_one(step: int) -> list[SampleRequest]:
    """Return samples of which one is long, so that an engine is idle meanwhile."""
    first, *others = samples_of(step, max_tokens=24)
    return [replace(first, sampling=replace(first.sampling, max_tokens=300)), *others]


async def test_engines_that_look_ahead_give_the_same_samples(
    engines: EngineFactory, engine: EngineProcess, tiny: Path
) -> None:
    """In every bit, over RL steps with a policy update in between."""
    other = engines(model=str(tiny), strategy=NGRAM, engine_args=TINY_ARGS | {"max_num_seqs": 8})
    own = [engine, other]
    engine.call("set_strategy", NGRAM)

    async def steps(look_ahead: bool) -> tuple[Bits, int, dict[str, float]]:
        config = PoolConfig(num_engines=2, look_ahead=look_ahead)
        found: Bits = {}
        for each in own:
            each.call("reset_prefix_cache")
        async with RolloutPool(config, lambda name: PooledEngine(name, own[int(name[-1])])) as pool:
            before = await pool.stats()
            record: dict[str, float] = {}
            for step in (11, 12, 13):
                with moved_policy(tiny, 1e-4 * step) as manifest:
                    await pool.call_all("update_policy", manifest, step)
                pool_is_told = False
                async for sample in pool.generate(with_a_long_one(step)):
                    if not pool_is_told:
                        pool.look_ahead_on(with_a_long_one(step + 1))
                        pool_is_told = True
                    assert sample.sample_id not in found
                    found[sample.sample_id] = (sample.token_ids, sample.logprobs)
                record = pool.ahead.record()
            work = EngineStats.difference(before, await pool.stats())
        return found, work.accepted_tokens, record

    plain, accepted, nothing = await steps(look_ahead=False)
    ahead, accepted_ahead, record = await steps(look_ahead=True)
    assert len(plain) == 48
    assert ahead == plain
    assert nothing["ahead/texts"] == 0
    assert record["ahead/texts"] > 0
    assert record["ahead/repeated_share"] > 0.2
    assert accepted_ahead > 1.1 * accepted
