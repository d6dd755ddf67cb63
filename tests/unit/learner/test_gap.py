"""The alarm on the gap between engines and learner."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tlt.config.train import AlarmConfig
from tlt.errors import EngineError
from tlt.learner.gap import FLOOR, MAX_IN_A_ROW, GapAlarm, GapWatch


def test_a_drafter_swap_that_changed_the_policy_is_alarming() -> None:
    """An observed fault: float32 gaps of 4.5e-7, but at least 1e-4 after a drafter swap."""
    watch = GapWatch(4.0, "float32", temperature=1.0)
    for _ in range(5):
        watch.observe(4.5e-7)
    assert watch.limit() == FLOOR < 1e-4


def test_the_noise_of_bfloat16_is_not_alarming() -> None:
    """Gaps of a SmolLM2 run (benchmarks/results/train/metrics.jsonl) raise no alarm."""
    watch = GapWatch(4.0, "bfloat16", temperature=1.0)
    for gap in (0.0064, 0.0100, 0.0069, 0.0062, 0.0081, 0.0102, 0.0044, 0.0108, 0.0043, 0.0111):
        assert gap < watch.limit()
        watch.observe(gap)
    assert watch.limit() < 0.04


def test_what_is_no_number_does_not_become_history() -> None:
    watch = GapWatch(4.0, "bfloat16", temperature=1.0)
    watch.observe(0.01)
    watch.observe(float("nan"))
    assert watch.limit() == 0.04


def test_the_first_limit_follows_the_settings() -> None:
    assert GapWatch(4.0, "float32", temperature=1.0).limit() == 1e-3
    assert GapWatch(8.0, "float32", temperature=1.0).limit() == 2e-3
    assert GapWatch(4.0, "bfloat16", temperature=0.5).limit() == 0.2
    assert GapWatch(4.0, "bfloat16", temperature=1.5).limit() == 0.1


def test_history_follows_a_policy_that_changes() -> None:
    watch = GapWatch(4.0, "bfloat16", temperature=1.0)
    gap = 0.002
    for _ in range(60):
        assert gap < watch.limit()
        watch.observe(gap)
        gap *= 1.06
    assert gap > 0.06


def updates(*gaps: float) -> Any:
    return [
        SimpleNamespace(sums=SimpleNamespace(gap=10 * gap, learned_tokens=10.0), refused=True)
        for gap in gaps
    ]


def alarm(then: str) -> GapAlarm:
    config = AlarmConfig.model_validate({"then": then})
    return GapAlarm(config, "float32", 1.0)


def test_drop_refuses_alarming_updates_and_ends_the_run_after_five_steps_of_them() -> None:
    drop = alarm("drop")
    assert drop.max_gap(0) == 1e-3
    assert drop.check(1, updates(1e-6, 1.0), 0) == 1
    assert drop.max_gap(0) == FLOOR  # the alarming gap is not in the history
    for step in range(2, MAX_IN_A_ROW):
        assert drop.check(step, updates(1.0), 0) == 1
    with pytest.raises(EngineError, match=r"alarm\.gap_factor"):
        drop.check(5, updates(1.0), 0)


def test_samples_that_failed_their_recheck_are_an_alarm_too() -> None:
    drop = alarm("drop")
    assert drop.max_gap(1) < 0, "no update passes"
    for step in range(1, MAX_IN_A_ROW):
        assert drop.check(step, updates(1e-6), 1) == 0, "the gap itself is fine"
    with pytest.raises(EngineError, match="2 of the samples"):
        drop.check(5, updates(1e-6), 2)
    assert alarm("warn").max_gap(1) == math.inf
    with pytest.raises(EngineError, match=r"alarm\.then"):
        alarm("stop").check(1, updates(1e-6), 1)


def test_warn_refuses_nothing_and_stop_ends_the_run_at_once() -> None:
    warn = alarm("warn")
    assert warn.max_gap(0) == math.inf
    for step in range(2 * MAX_IN_A_ROW):
        warn.check(step, updates(1.0), 0)
    with pytest.raises(EngineError, match=r"alarm\.then"):
        alarm("stop").check(1, updates(1.0), 0)


def test_a_resumed_run_takes_its_history_from_the_records_without_alarms() -> None:
    drop = alarm("drop")
    drop.recall(
        [
            {"learner/gap_mean": 1e-4},
            {"learner/gap_mean": 9.0, "learner/gap_alarms": 1},
            {"eval/reward_mean": 0.5},
        ]
    )
    assert drop.max_gap(0) == pytest.approx(4e-4)
