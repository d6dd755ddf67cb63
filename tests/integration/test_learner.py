"""The learner as Ray actors: ranks agree, states are captured, checkpoints give back what was."""

import math
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from workloads import load_policy

from tlt.config.train import AlgorithmConfig, LearnerConfig, LoraConfig
from tlt.errors import LearnerLost
from tlt.learner.actor import LearnerPlan
from tlt.learner.batch import TrainSample, Weighting
from tlt.learner.group import LearnerGroup
from tlt.learner.rank import RankSettings
from tlt.node.weights import read_weights
from tlt.states.buffer import BufferSettings, SampleBuffer

pytestmark = [pytest.mark.ray, pytest.mark.two_cores, pytest.mark.usefixtures("local_ray")]


@asynccontextmanager
async def started(plan: LearnerPlan, saved: Path | None = None) -> AsyncIterator[LearnerGroup]:
    learner = LearnerGroup(plan)
    try:
        await learner.start(saved)
        yield learner
    finally:
        await learner.stop()


def plan(tiny: Path, num_ranks: int = 1, **changes: object) -> LearnerPlan:
    rank = RankSettings(
        model=str(tiny),
        dtype="float32",
        temperature=1.0,
        weighting=Weighting("tokens", 64),
        algorithm=AlgorithmConfig(),
        learner=LearnerConfig(lr=1e-3),
    )
    settings = LearnerPlan(
        num_ranks=num_ranks,
        row_tokens=256,
        rank=rank,
        on_gpu=False,
        num_cores=1,
        core_group=f"test-learner-{os.getpid()}",
        timeout_s=120,
        buffer=None,
        captures=True,
    )
    return replace(settings, **changes)  # type: ignore[arg-type]


def batch(seed: int, num_groups: int = 5) -> list[TrainSample]:
    rng = random.Random(seed)
    samples = []
    for group in range(num_groups):
        prompt = tuple(rng.randrange(5, 250) for _ in range(rng.randint(4, 30)))
        for place in range(4):
            response = tuple(rng.randrange(5, 250) for _ in range(rng.randint(1, 60)))
            logprobs = tuple(rng.uniform(-2, 0) for _ in response)
            samples.append(
                TrainSample(
                    f"{group}/{place}", group, prompt, response, logprobs, rng.uniform(-1, 1)
                )
            )
    return samples


def denominator(samples: list[TrainSample]) -> float:
    return Weighting("tokens", 64).denominator([len(s.response_ids) for s in samples])


async def weights(learner: LearnerGroup) -> dict[str, torch.Tensor]:
    shared = await learner.publish("float32")
    assert not isinstance(shared, list)
    found = {name: tensor.clone() for name, tensor in read_weights(str(shared.path))}
    shared.close()
    return found


async def train(
    learner: LearnerGroup, seeds: range, cut: int | None = None, num_groups: int = 5
) -> list[float]:
    """Updates, each batch handed over whole or in two parts; the gradients' norms."""
    norms = []
    for seed in seeds:
        samples = batch(seed, num_groups)
        for part in [samples] if cut is None else [samples[:cut], samples[cut:]]:
            await learner.accumulate(part, seed)
        report, _ = await learner.step(denominator(samples), math.inf)
        norms.append(report.grad_norm)
    return norms


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


async def test_one_rank_and_two_ranks_and_any_split_give_the_same_update(tiny: Path) -> None:
    async def run(num_ranks: int, cut: int | None, row_tokens: int) -> dict[str, torch.Tensor]:
        async with started(plan(tiny, num_ranks, row_tokens=row_tokens)) as learner:
            norms.append(await train(learner, range(3), cut))
            return await weights(learner)

    norms: list[list[float]] = []
    reference = await run(1, None, 4096)
    for num_ranks, cut, row_tokens in ((1, 7, 100), (2, 11, 128)):
        other = await run(num_ranks, cut, row_tokens)
        assert norms[-1] == pytest.approx(norms[0], rel=1e-4)
        for name, tensor in reference.items():
            # Adam divides by the gradient's size: where that is rounding noise, lr is the bound.
            difference = (tensor - other[name]).abs()
            assert difference.max() < 3e-3, name
            assert difference.mean() < 1e-5, name


@pytest.mark.gate
async def test_two_threads_make_the_same_update_bit_for_bit(tiny: Path) -> None:
    """Threads must not add up the gradients of a shared prompt in the order of their arrival."""

    async def run() -> tuple[list[float], dict[str, torch.Tensor]]:
        async with started(plan(tiny, num_cores=2, row_tokens=8192)) as learner:
            return await train(learner, range(3), num_groups=100), await weights(learner)

    norms, first = await run()
    norms_again, second = await run()
    assert norms == norms_again
    check_same(first, second)


@pytest.mark.gate
async def test_samples_of_another_policy_and_gradients_that_are_not_finite_change_nothing(
    tiny: Path,
) -> None:
    """The made-up log-probabilities of the batch are far from the learner's own."""
    async with started(plan(tiny)) as learner:
        before = await weights(learner)
        samples = batch(0)
        await learner.accumulate(samples, 0)
        refused, _ = await learner.step(denominator(samples), max_gap=1e-3)
        assert refused.refused
        assert refused.sums.gap / refused.sums.learned_tokens > 1
        check_same(before, await weights(learner))
        await learner.accumulate([replace(s, advantage=math.inf) for s in samples], 1)
        skipped, _ = await learner.step(denominator(samples), math.inf)
        assert skipped.skipped
        check_same(before, await weights(learner))
        await learner.accumulate(samples, 2)
        taken, _ = await learner.step(denominator(samples), max_gap=100.0)
        assert not taken.refused
        assert taken.grad_norm == pytest.approx(refused.grad_norm, rel=1e-5)
        after = await weights(learner)
        assert not all(torch.equal(tensor, after[name]) for name, tensor in before.items())


async def test_a_restored_learner_goes_on_as_if_nothing_had_happened(
    tiny: Path, tmp_path: Path
) -> None:
    async with started(plan(tiny)) as learner:
        await train(learner, range(2))
        await learner.save(tmp_path)
        expected = await train(learner, range(2, 4))  # beside the writing
        await learner.wait_saved(tmp_path, None, 2)
        reference = await weights(learner)
    async with started(plan(tiny), tmp_path) as learner:
        assert await train(learner, range(2, 4)) == expected
        check_same(reference, await weights(learner))


async def test_a_checkpoint_of_two_ranks_is_restored_by_one(tiny: Path, tmp_path: Path) -> None:
    async with started(plan(tiny, 2)) as two:
        await train(two, range(2))
        await two.save(tmp_path)
        await two.wait_saved(tmp_path, None, 2)
        reference = await weights(two)
    async with started(plan(tiny, 1), tmp_path) as one:
        check_same(reference, await weights(one))


async def test_adapters_of_two_ranks_are_those_of_one_and_go_on_after_a_restore(
    tiny: Path, tmp_path: Path
) -> None:
    """Ranks begin with the same adapters, and merge the same weights."""
    base = plan(tiny).rank
    rank = replace(base, learner=LearnerConfig(lr=1e-3, lora=LoraConfig(rank=4)))
    async with started(plan(tiny, 2, rank=rank)) as two:
        norms = await train(two, range(2))
        await two.save(tmp_path)
        await two.wait_saved(tmp_path, None, 2)
        saved = await weights(two)
        await two.save_policy(tmp_path / "policy", "float32")
    async with started(plan(tiny, rank=rank)) as one:
        assert await train(one, range(2)) == pytest.approx(norms, rel=1e-4)
        for name, tensor in (await weights(one)).items():
            assert (tensor - saved[name]).abs().mean() < 1e-5, name
    async with started(plan(tiny, rank=replace(rank, seed=1)), tmp_path) as one:
        check_same(saved, await weights(one))
    check_same(saved, dict(load_policy(tmp_path / "policy").named_parameters()))


async def test_states_of_the_training_pass_reach_the_buffer_and_its_checkpoint(
    tiny: Path, tmp_path: Path
) -> None:
    from tlt.states.captured import capture

    layers = (1, 2, 3)
    settings = BufferSettings(
        str(tmp_path / "states"), capacity_bytes=2**26, max_sample_tokens=4096
    )
    base = plan(tiny, buffer=settings)
    base = replace(base, rank=replace(base.rank, aux_layer_ids=layers))
    samples = batch(0)
    saved = tmp_path / "saved"
    async with started(base) as learner:
        await learner.accumulate(samples, 7)
        _, stored = await learner.step(denominator(samples), math.inf)
        await learner.save(saved)
        await learner.accumulate(samples, 8)  # not of the checkpoint's step: not in its copy
        await learner.wait_saved(saved, None, 7)
    SampleBuffer(settings).clear()
    async with started(base, saved):
        pass
    assert stored.num_bytes > 0
    assert stored.num_samples <= len(samples)
    buffer = SampleBuffer(settings)
    entries = buffer.entries()
    assert len(entries) == len(samples)
    assert {entry.rl_step for entry in entries} == {7}
    policy = load_policy(tiny)
    num_prompt_tokens = {s.prompt_ids + s.response_ids: len(s.prompt_ids) for s in samples}
    for entry in entries:
        found = buffer.read(entry.name)
        assert found is not None
        text = tuple(found.token_ids_T.tolist())
        expected = capture(policy, text, num_prompt_tokens[text], layers)
        torch.testing.assert_close(found.aux_TA, expected.aux_TA, atol=5e-2, rtol=2e-2)
        torch.testing.assert_close(found.final_TH, expected.final_TH, atol=5e-2, rtol=2e-2)
        assert torch.equal(found.loss_mask_T, expected.loss_mask_T)


async def test_several_updates_of_one_batch_clip_against_the_first_policy(tiny: Path) -> None:
    base = plan(tiny, num_ranks=2)
    rank = replace(base.rank, learner=LearnerConfig(lr=3e-2))
    samples, others = batch(0), [replace(s, sample_id=f"x{s.sample_id}") for s in batch(1)]

    async def clipped_tokens() -> float:
        await learner.accumulate(samples, 1)
        report, _ = await learner.step(denominator(samples), math.inf)
        return report.sums.clipped_tokens

    async with started(replace(base, rank=rank)) as learner:
        for part in (samples, others):
            await learner.remember_logprobs(part)
        assert await clipped_tokens() == 0  # nothing has moved yet
        assert await clipped_tokens() > 0
        await learner.forget_logprobs()
        assert await clipped_tokens() == 0


async def test_a_killed_rank_is_a_lost_learner_that_starts_again(tiny: Path) -> None:
    learner = LearnerGroup(plan(tiny, 2))
    pids = await learner.start()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(LearnerLost):
        await train(learner, range(1))
    await learner.stop()
    await learner.start()
    await train(learner, range(1))
    await learner.stop()
