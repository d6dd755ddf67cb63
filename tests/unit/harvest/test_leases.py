"""Who may train and until when, what trainers remember of their leases, forecasts of the tail.

`test_fault_layer` has trainers that hear late, twice, in another order or never.
"""

import math
from typing import Any

import pytest

from tlt.harvest.forecast import TailForecast
from tlt.harvest.leases import Begin, End, Freed, Holder, Kill, Leases, LeaseSettings

SETTINGS = LeaseSettings(min_s=1, lease_s=20, resend_s=1, stop_timeout_s=4, max_leases=3)


# --- one worker, step by step ---------------------------------------------------------------------


def ready(*workers: str) -> Leases:
    leases = Leases(SETTINGS)
    for worker in workers:
        leases.set_ready(worker, True)
    return leases


def leased() -> tuple[Leases, int]:
    """Return leases of which "a" has one since 0 s, and its number."""
    leases = ready("a")
    leases.idle("a", 0.0)
    begin = only(leases.actions(0.0))
    assert isinstance(begin, Begin)
    return leases, begin.lease


def only(actions: list[Any]) -> Any:
    assert len(actions) == 1, actions
    return actions[0]


def test_an_idle_worker_is_leased_and_given_back_when_needed() -> None:
    leases, lease = leased()
    assert leases.may_publish("a", lease, 1.0)
    leases.needed("a", 5.0)
    assert leases.actions(5.0) == [End("a", lease)]
    assert not leases.may_publish("a", lease, 5.0)
    leases.ended("a", lease, 5.1)
    assert leases.actions(5.1) == [Freed("a")]
    assert leases.counts.leased_s == pytest.approx(5.1)
    assert leases.counts.coverable_s == pytest.approx(5.1)


def test_the_run_says_idle_and_needed_in_order() -> None:
    leases = ready("a")
    leases.needed("a", 0.0)
    assert leases.actions(0.0) == [Freed("a")], "it was never idle"
    leases.idle("a", 0.0)
    leases.actions(0.0)
    leases.needed("a", 1.0)
    with pytest.raises(AssertionError):
        leases.idle("a", 2.0)


def test_no_lease_for_an_idle_period_too_short_to_be_worth_it() -> None:
    leases = ready("a", "b")
    leases.idle("a", 10.0, until_s=10.5)
    leases.idle("b", 10.0, until_s=12.0)
    assert [action.worker for action in leases.actions(10.0)] == ["b"]


def test_a_worker_that_outlasts_its_forecast_is_leased() -> None:
    leases = ready("a", "b")
    leases.idle("a", 0.0, 0.5)
    leases.idle("b", 0.0, 0.5)
    assert leases.actions(0.0) == []
    leases.needed("b", 0.6)
    leases.actions(0.6)
    assert leases.next_s() == SETTINGS.min_s
    leases.tick(SETTINGS.min_s)
    assert only(leases.actions(SETTINGS.min_s)).worker == "a"


def test_no_lease_without_a_trainer_or_anything_to_learn() -> None:
    leases = Leases(SETTINGS)
    leases.enabled = False
    leases.idle("a", 0.0)
    assert leases.actions(0.0) == []
    leases.set_ready("a", True)
    assert leases.actions(0.0) == []
    leases.enabled = True
    assert isinstance(only(leases.actions(0.0)), Begin)


def test_a_lease_runs_out_and_a_worker_that_is_still_idle_gets_another() -> None:
    leases, first = leased()
    leases.tick(SETTINGS.lease_s)
    assert leases.actions(20.0) == [End("a", first)]
    leases.ended("a", first, 20.1)
    second = only(leases.actions(20.1))
    assert isinstance(second, Begin)
    assert second.lease > first


def test_who_does_not_answer_is_told_again_and_then_killed() -> None:
    leases, lease = leased()
    leases.needed("a", 1.0)
    seen = leases.actions(1.0)
    now = 1.0
    while not any(isinstance(action, Kill) for action in seen):
        now = leases.next_s()
        leases.tick(now)
        seen += leases.actions(now)
    assert seen[:-1] == [End("a", lease)] * (len(seen) - 1)
    assert len(seen) > 2
    assert now == pytest.approx(1.0 + SETTINGS.stop_timeout_s)
    leases.ended("a", lease, now)
    assert leases.actions(now) == [Freed("a")]


def test_a_trainer_with_nothing_to_do_rests() -> None:
    leases, lease = leased()
    leases.ended("a", lease, 1.0, rest_s=5.0)
    assert leases.actions(1.0) == []
    assert leases.next_s() == 6.0
    leases.tick(6.0)
    assert isinstance(only(leases.actions(6.0)), Begin)


def test_at_most_so_many_at_once() -> None:
    leases = ready(*"abcde")
    for worker in "abcde":
        leases.idle(worker, 0.0)
    begun: list[Any] = leases.actions(0.0)
    assert len(begun) == SETTINGS.max_leases
    leases.ended("a", begun[0].lease, 1.0, rest_s=9.0)
    assert [action.worker for action in leases.actions(1.0)] == ["d"]


def test_a_lease_that_was_called_back_before_it_came_is_not_taken_up() -> None:
    holder = Holder()
    holder.end(7)
    assert not holder.begin(7, 10, 0.0)
    assert holder.begin(8, 10, 0.0)
    assert holder.begin(8, 10, 5.0), "the same message twice: the trainer does hold this lease"
    assert holder.holds(8, 9.9)
    assert not holder.holds(8, 10.0), "the second message makes the lease no longer"
    holder.end(8)
    assert not holder.begin(8, 10, 5.0)
    assert holder.begin(9, 10, 5.0)
    holder.end_current()
    assert not holder.holds(9, 6.0), "the trainer gave it back"
    assert holder.begin(10, 10, 6.0)


# --- forecasts ------------------------------------------------------------------------------------


def rollout(forecast: TailForecast, ends: list[float], at: float = 0.0) -> None:
    forecast.started(len(ends), at)
    for end in ends:
        forecast.finished(1, at + end)
    forecast.ended()


def test_the_tail_takes_as_long_as_it_took_before() -> None:
    forecast = TailForecast()
    for _ in range(3):
        rollout(forecast, [1.0, 2.0, 3.0, 20.0])
    forecast.started(4, 100.0)
    for end in (1.0, 2.0, 3.0):
        forecast.finished(1, 100.0 + end)
    assert forecast.remaining_s(103.0) == pytest.approx(17.0)
    assert forecast.remaining_s(110.0) == pytest.approx(10.0)
    assert forecast.remaining_s(143.0) == pytest.approx(20.0), "it has outlasted the others"
    forecast.finished(1, 144.0)
    assert forecast.remaining_s(144.0) == 0.0


def test_nothing_is_known_before_a_rollout_with_as_many_samples() -> None:
    forecast = TailForecast()
    forecast.started(4, 0.0)
    assert forecast.remaining_s(1.0) == math.inf
    rollout(forecast, [1.0, 2.0])
    forecast.started(50, 0.0)
    assert forecast.remaining_s(0.5) == math.inf
