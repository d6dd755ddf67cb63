"""Groups, weights and rows: pure."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.contracts import Sample, SampleRequest, SamplingSpec, Scored
from tlt.learner.advantage import ADVANTAGES, Advantage, grpo
from tlt.learner.batch import (
    Groups,
    TrainSample,
    Weighting,
    block_tokens,
    blocks,
    rows_by_rank,
)
from tlt.tasks.rewards import LARGEST


def scored(number: int, place: int, reward: float, fault: str | None = None) -> Scored:
    request = SampleRequest(f"1/{number}/{place}", (1, 2), SamplingSpec(max_tokens=1))
    sample = Sample(request.sample_id, (3,), (-0.5,), "stop", "engine-0", 0, 0.0, 0.0, 0.0)
    return Scored(number, place, request, sample, "", reward, fault)


def test_a_group_comes_out_once_and_complete_whatever_the_order() -> None:
    samples = [scored(g, k, float(k % 2)) for g in range(5) for k in range(4)]
    random.Random(0).shuffle(samples)
    groups = Groups(4, grpo)
    out = [group for sample in samples if (group := groups.add(sample))]
    assert len(out) == groups.num_groups == groups.num_with_signal == 5
    for group in out:
        assert [s.advantage for s in group] == pytest.approx([-1, 1, -1, 1], abs=1e-5)
        assert len({s.problem_number for s in group}) == 1
        assert [s.sample_id[-1] for s in group] == ["0", "1", "2", "3"]


def test_an_advantage_over_the_step_sees_all_groups_in_order() -> None:
    samples = [scored(g, k, float(g + k)) for g in range(3) for k in range(2)]
    samples[3] = scored(1, 1, 0.0, "timeout")
    samples += [scored(3, k, 0.0, "timeout") for k in range(2)]
    random.Random(0).shuffle(samples)
    seen = []

    def advantage(rewards: list[list[float]]) -> list[list[float]]:
        seen.append(rewards)
        return [[10 * reward for reward in group] for group in rewards]

    groups = Groups(2, advantage, over_step=True)
    assert [groups.add(sample) for sample in samples] == [[]] * len(samples)
    out = groups.rest()
    assert seen == [[[0.0, 1.0], [1.0], [2.0, 3.0]]]
    assert [[s.advantage for s in group] for group in out] == [[0, 10], [10], [20, 30]]
    assert [s.sample_id for s in out[1]] == ["1/1/0"]
    assert (groups.num_groups, groups.num_with_signal) == (4, 3)
    assert groups.rest() == [], "each group comes out once"


def test_samples_without_a_reward_are_not_trained_on() -> None:
    """They are no zeros: the others are compared as if the group were smaller."""
    groups = Groups(4, grpo)
    for place, reward in enumerate((1.0, 0.0, 1.0)):
        groups.add(scored(0, place, reward, "timeout" if place == 2 else None))
    out = groups.add(scored(0, 3, 0.0, "crash"))
    assert [s.sample_id for s in out] == ["1/0/0", "1/0/1"]
    assert [s.advantage for s in out] == pytest.approx([1, -1], abs=1e-5)
    for place in range(3):
        groups.add(scored(1, place, 0.0, "error"))
    assert [s.advantage for s in groups.add(scored(1, 3, 1.0))] == [0.0], "nothing to compare with"
    for place in range(3):
        groups.add(scored(2, place, 0.0, "error"))
    assert groups.add(scored(2, 3, 0.0, "error")) == []
    assert (groups.num_groups, groups.num_with_signal) == (3, 1)
    for mean_over in ("tokens", "samples", "limit"):
        assert Weighting(mean_over, 64).denominator([]) > 0


def test_groups_without_a_signal_can_be_discarded() -> None:
    groups = Groups(2, grpo, only_signal=True)
    kept = []
    for number, rewards in enumerate([(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)]):
        for place, reward in enumerate(rewards):
            kept += groups.add(scored(number, place, reward))
    for place in range(2):
        assert groups.add(scored(3, place, 0.0, "error")) == []
    assert {s.problem_number for s in kept} == {1}
    assert groups.discarded == {0, 2, 3}
    assert (groups.num_groups, groups.num_with_signal) == (4, 1)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
def test_the_largest_rewards_have_finite_advantages(advantage: Advantage) -> None:
    assert all(map(math.isfinite, advantage([LARGEST, 0.0, 1.0, -LARGEST])))


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.sampled_from(["tokens", "samples", "limit"]), st.integers(0, 40))
def test_weights_add_up_over_any_split(lengths: list[int], mean_over: str, cut: int) -> None:
    weighting = Weighting(mean_over, 64)
    whole = weighting.denominator(lengths)
    parts = [part for part in (lengths[:cut], lengths[cut:]) if part]
    assert sum(weighting.denominator(part) for part in parts) == pytest.approx(whole)
    if mean_over != "limit":  # a mean: all weights over the denominator are 1
        total = sum(weighting.token_weight(n) * n for n in lengths)
        assert total / whole == pytest.approx(1.0)


@st.composite
def batches(draw: st.DrawFn) -> list[TrainSample]:
    samples = []
    for group in range(draw(st.integers(1, 8))):
        prompt = (group,) * draw(st.integers(1, 20))
        for place in range(draw(st.integers(1, 6))):
            response = (1,) * draw(st.integers(1, 40))
            samples.append(TrainSample(f"{group}/{place}", group, prompt, response, (), 1.0))
    return samples


@given(batches(), st.integers(1, 100))
def test_blocks_hold_every_sample_once_under_the_budget(
    samples: list[TrainSample], budget: int
) -> None:
    found = blocks(samples, budget)
    assert sorted(s.sample_id for b in found for s in b) == sorted(s.sample_id for s in samples)
    for block in found:
        assert len({s.prompt_ids for s in block}) == 1
        assert block_tokens(block) <= budget or len(block) == 1


@given(batches(), st.integers(1, 100), st.integers(1, 5))
def test_ranks_get_the_same_number_of_rows(
    samples: list[TrainSample], budget: int, num_ranks: int
) -> None:
    dealt = rows_by_rank(samples, budget, num_ranks)
    assert len({len(rows) for rows in dealt}) == 1
    everything = [s.sample_id for rows in dealt for row in rows for s in row]
    assert sorted(everything) == sorted(s.sample_id for s in samples)
    empty = sum(not row for rows in dealt for row in rows)
    assert empty < num_ranks
