"""Which samples are generated again, and what a difference means."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest

from tlt.contracts import LARGEST_SHORTFALL, Recheck, Sample, SampleRequest, SamplingSpec
from tlt.rollout.recheck import Rechecks, Verdict, compare


def request(index: int, **sampling: Any) -> SampleRequest:
    settings = {"max_tokens": 50, "seed": index} | sampling
    return SampleRequest(f"1/{index}", (1, 2), SamplingSpec(**settings), rl_step=1)


def sample(index: int, num_tokens: int = 4) -> Sample:
    tokens = tuple(range(num_tokens))
    return Sample(f"1/{index}", tokens, (0.0,) * num_tokens, "stop", "engine-0", 7, 0.0, 0.0, 0.0)


def rechecks(share: float = 1.0, max_tokens: int = 100, dtype: str = "float32") -> Rechecks:
    return Rechecks(share, max_tokens, dtype)


def due(of: Rechecks, num: int) -> list[str]:
    of.rollout_started(request(index) for index in range(num))
    for index in range(num):
        of.finished(sample(index))
    found = []
    while (recheck := of.next()) is not None:
        found.append(recheck.request.sample_id)
    return found


def one(of: Rechecks, **sampling: Any) -> Recheck:
    of.rollout_started([request(0, **sampling)])
    of.finished(sample(0))
    recheck = of.next()
    assert recheck is not None
    return recheck


def test_the_share_is_kept_and_the_choice_is_repeatable() -> None:
    chosen = due(rechecks(0.1), 4000)
    assert len(chosen) == pytest.approx(400, abs=60)
    assert due(rechecks(0.1), 4000) == chosen
    assert due(rechecks(0.0), 40) == []
    assert set(chosen) <= set(due(rechecks(0.2), 4000))


def test_a_recheck_has_the_samples_prompt_seed_and_temperature_and_nothing_else() -> None:
    recheck = one(rechecks(max_tokens=3), temperature=0.7, seed=5)
    assert (recheck.token_ids, recheck.policy_version) == ((0, 1, 2), 7)
    again = recheck.request
    assert again.sample_id != "1/0"
    assert again.rl_step is None, "its hidden states are not stored"
    assert again.prompt_token_ids == (1, 2)
    assert again.sampling == SamplingSpec(3, 0.7, seed=5, logprobs=False)


@pytest.mark.parametrize(
    "changes", [{"seed": None}, {"top_p": 0.9}, {"top_k": 5}, {"extra": {"min_tokens": 3}}]
)
def test_only_samples_with_a_seed_and_no_setting_but_temperature(changes: dict[str, Any]) -> None:
    of = rechecks()
    of.rollout_started([request(0, **changes)])
    of.finished(sample(0))
    of.finished(sample(3))  # unknown
    of.rollout_started([request(4)])
    of.finished(replace(sample(4), token_ids=()))
    assert of.next() is None


def test_nothing_of_a_rollout_is_left_when_it_ends() -> None:
    of = rechecks()
    of.rollout_started([request(0), request(1)])
    of.finished(sample(0))
    of.rollout_ended()
    of.finished(sample(1))
    assert of.next() is None
    assert of.record()["recheck/left_out"] == 2


def test_tokens_are_compared_up_to_the_first_difference() -> None:
    missed = {1: 0.5, 2: 9.0}
    assert compare((1, 2, 3), (1, 2, 3), {}) == Verdict(None, 0.0)
    assert compare((1, 2, 3), (1, 4, 5), missed) == Verdict(1, 0.5)
    # One of the two goes on after its end token: no draw says by how much.
    assert compare((1, 2, 3), (1, 2), {}) == Verdict(2, LARGEST_SHORTFALL)
    assert compare((1, 2), (3, 2), {0: math.inf}) == Verdict(0, LARGEST_SHORTFALL)


@pytest.mark.parametrize(
    ("dtype", "temperature", "shortfall", "faults"),
    [
        ("float32", 1.0, 1e-2, 1),
        ("float32", 0.1, 5e-3, 0),
        ("bfloat16", 1.0, 0.1, 0),
        ("bfloat16", 0.0, 0.1, 0),
        ("bfloat16", 0.0, 2.0, 1),
    ],
)
def test_only_a_difference_that_is_no_near_tie_is_a_fault(
    dtype: str, temperature: float, shortfall: float, faults: int, caplog: pytest.LogCaptureFixture
) -> None:
    of = rechecks(dtype=dtype)
    recheck = one(of, temperature=temperature)
    with caplog.at_level(logging.ERROR):
        of.ended(recheck, Verdict(2, shortfall), "engine-1", 0.5)
    assert of.num_faults == faults
    assert ("recheck/1/0" in caplog.text and "engine-1" in caplog.text) == faults
    record = of.record()
    assert record["recheck/differing"] == 1
    assert record["recheck/faults"] == faults
    assert record["recheck/shortfall_max"] == shortfall


def test_a_fault_counts_for_the_whole_step_also_when_extra_problems_follow() -> None:
    of = rechecks()
    of.ended(one(of), Verdict(2, 9.0), "engine-1", 0.5)
    of.rollout_started([request(1)])
    assert of.num_faults == 1
    of.step_started()
    assert of.num_faults == 0


def test_a_record_has_the_counts_since_the_last_one() -> None:
    of = rechecks()
    recheck = one(of)
    of.ended(recheck, Verdict(None, 0.0), "engine-0", 0.5)
    of.ended(recheck, None, "engine-0", 0.25)
    record = of.record()
    assert record["recheck/samples"] == record["recheck/ended_early"] == 1
    assert (record["recheck/tokens"], record["recheck/engine_s"]) == (4, 0.75)
    assert record["recheck/differing"] == record["recheck/faults"] == 0
    assert not any(of.record().values())
    assert rechecks(share=0.0).record() == {}
