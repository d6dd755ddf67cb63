"""Leases whose trainers hear late, twice, in another order or never; forecasts of the tail."""

import math
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.harvest.forecast import TailForecast
from tlt.harvest.leases import (
    Begin,
    End,
    Freed,
    Holder,
    Kill,
    Leases,
    LeaseSettings,
    State,
)

SETTINGS = LeaseSettings(min_s=1, lease_s=20, resend_s=1, stop_timeout_s=4, max_leases=3)


# --- one worker, step by step ---------------------------------------------------------------------


def ready(*workers: str, settings: LeaseSettings = SETTINGS) -> Leases:
    leases = Leases(settings)
    for worker in workers:
        leases.set_ready(worker, True)
    return leases


def only(actions: list[Any]) -> Any:
    assert len(actions) == 1, actions
    return actions[0]


def test_an_idle_worker_is_leased_and_given_back_when_needed() -> None:
    leases = ready("a")
    leases.idle("a", 0.0)
    begin = only(leases.actions(0.0))
    assert isinstance(begin, Begin)
    assert leases.may_publish("a", begin.lease, 1.0)
    leases.needed("a", 5.0)
    assert leases.actions(5.0) == [End("a", begin.lease)]
    assert not leases.may_publish("a", begin.lease, 5.0)
    leases.ended("a", begin.lease, 5.1)
    assert leases.actions(5.1) == [Freed("a")]
    assert leases.state("a") is State.BUSY
    assert leases.counts.leased_s == pytest.approx(5.1)
    assert leases.counts.coverable_s == pytest.approx(5.1)


def test_a_worker_that_was_never_idle_is_free_at_once() -> None:
    leases = Leases(SETTINGS)
    leases.needed("a", 0.0)
    assert leases.actions(0.0) == [Freed("a")]


def test_a_worker_is_not_idle_before_it_was_freed() -> None:
    leases = ready("a")
    leases.idle("a", 0.0)
    leases.actions(0.0)
    leases.needed("a", 1.0)
    with pytest.raises(AssertionError):
        leases.idle("a", 2.0)


def test_no_lease_for_a_spell_too_short_to_be_worth_it() -> None:
    leases = ready("a", "b")
    leases.idle("a", 10.0, until_s=10.5)
    leases.idle("b", 10.0, until_s=12.0)
    assert [action.worker for action in leases.actions(10.0)] == ["b"]


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
    leases = ready("a")
    leases.idle("a", 0.0)
    first = only(leases.actions(0.0))
    leases.tick(SETTINGS.lease_s)
    assert leases.actions(20.0) == [End("a", first.lease)]
    leases.ended("a", first.lease, 20.1)
    second = only(leases.actions(20.1))
    assert isinstance(second, Begin)
    assert second.lease > first.lease


def test_who_does_not_answer_is_told_again_and_then_killed() -> None:
    leases = ready("a")
    leases.idle("a", 0.0)
    lease = only(leases.actions(0.0)).lease
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
    leases = ready("a")
    leases.idle("a", 0.0)
    lease = only(leases.actions(0.0)).lease
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


def test_leases_of_a_later_coordinator_outrank_all_earlier_ones() -> None:
    holder = Holder()
    early, late = Leases(SETTINGS), Leases(SETTINGS)
    numbers = []
    for leases in (early, late):
        leases.set_ready("a", True)
        leases.idle("a", 0.0)
        numbers.append(only(leases.actions(0.0)).lease)
    assert holder.begin(numbers[1], 10, 0.0)
    assert not holder.begin(numbers[0], 10, 0.0)


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


def test_a_lease_that_the_trainer_gave_back_is_not_worked_under() -> None:
    holder = Holder()
    assert holder.begin(8, 10, 0.0)
    holder.end_current()
    assert not holder.holds(8, 1.0)
    assert holder.begin(9, 10, 1.0)


# --- many workers and a bad network ---------------------------------------------------------------


@dataclass
class Trainer:
    incarnation: int = 0
    holder: Holder = field(default_factory=Holder)
    lease: int | None = None
    """What it is working under."""
    hung: bool = False


class World:
    """Driver, coordinator and trainers; messages to and from trainers are at the network's mercy.

    The driver calls the coordinator directly. Killing is the one thing that works for certain, and
    answers only when the process is gone.
    """

    def __init__(self, seed: int, num_workers: int, loss: float) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.leases = Leases(SETTINGS)
        self.workers = [f"w{i}" for i in range(num_workers)]
        self.trainers = {worker: Trainer() for worker in self.workers}
        self.generating = dict.fromkeys(self.workers, True)
        self.messages: list[tuple[Any, ...]] = []
        self.called_back: set[int] = set()
        self.published: list[tuple[str, int]] = []
        self.num_begun = 0
        for worker in self.workers:
            self.leases.set_ready(worker, True)

    def send(self, *message: object) -> None:
        if self.rng.random() >= self.loss:
            self.messages.append(message)
            if self.rng.random() < self.loss:
                self.messages.append(message)

    def act(self) -> None:
        for action in self.leases.actions(self.now):
            incarnation = self.trainers[action.worker].incarnation
            if isinstance(action, End):
                self.called_back.add(action.lease)
            if isinstance(action, Kill):
                self.called_back.add(action.lease)
                self.messages.append(("kill", action))
            elif isinstance(action, Freed):
                self.generating[action.worker] = True
            else:
                self.send("trainer", action, incarnation)

    def deliver(self) -> None:
        place = self.rng.randrange(len(self.messages))
        self.messages[place], self.messages[-1] = self.messages[-1], self.messages[place]
        kind, *content = self.messages.pop()
        getattr(self, f"on_{kind}")(*content)
        self.act()

    # --- coordinator's side
    def on_ended(self, worker: str, lease: int) -> None:
        self.leases.ended(worker, lease, self.now)

    def on_publish(self, worker: str, lease: int) -> None:
        if self.leases.may_publish(worker, lease, self.now):
            assert lease not in self.called_back, "published after it was fenced off"
            assert self.leases.lease_of(worker) == lease
            self.published.append((worker, lease))

    # --- trainer's side
    def on_trainer(self, action: Begin | End, incarnation: int) -> None:
        trainer = self.trainers[action.worker]
        if trainer.incarnation != incarnation or trainer.hung:
            return
        if isinstance(action, Begin):
            if trainer.holder.begin(action.lease, action.seconds, self.now):
                trainer.lease = action.lease
                self.num_begun += 1
            elif trainer.lease != action.lease:  # not just the same message twice
                self.send("ended", action.worker, action.lease)
        else:
            trainer.holder.end(action.lease)
            if trainer.lease != action.lease:
                self.send("ended", action.worker, action.lease)

    def on_kill(self, action: Kill) -> None:
        old = self.trainers[action.worker]
        self.trainers[action.worker] = Trainer(old.incarnation + 1)
        self.messages.append(("ended", action.worker, action.lease))

    def trainer_turn(self, worker: str) -> None:
        """Check between two passes whether the lease still holds."""
        trainer = self.trainers[worker]
        if trainer.lease is None or trainer.hung:
            return
        if trainer.holder.holds(trainer.lease, self.now):
            self.send("publish", worker, trainer.lease)
        else:
            self.send("ended", worker, trainer.lease)
            trainer.lease = None

    # --- driver's side
    def driver_turn(self, worker: str) -> None:
        if self.generating[worker]:
            self.generating[worker] = False
            self.leases.idle(worker, self.now)
        else:
            self.leases.needed(worker, self.now)
        self.act()

    def check(self) -> None:
        for worker in self.workers:
            working = self.trainers[worker].lease is not None
            assert not (working and self.generating[worker]), f"{worker} generates and trains"
            if self.generating[worker]:
                assert self.leases.state(worker) in (State.BUSY, State.IDLE)
        assert len(self.leases.leased()) <= SETTINGS.max_leases

    def event(self) -> None:
        kind = self.rng.random()
        if self.messages and kind < 0.6:
            self.deliver()
        elif kind < 0.7:
            self.now += self.rng.expovariate(1.0)
            self.leases.tick(self.now)
            self.act()
        elif kind < 0.8:
            self.driver_turn(self.rng.choice(self.workers))
        elif kind < 0.98:
            self.trainer_turn(self.rng.choice(self.workers))
        else:
            self.trainers[self.rng.choice(self.workers)].hung = True
        self.check()

    def settle(self) -> None:
        """The network works again, and the run wants everything back."""
        self.loss = 0.0
        for _ in range(60):
            for worker in self.workers:
                if not self.generating[worker]:
                    self.driver_turn(worker)
            while self.messages:
                self.deliver()
                self.check()
            for worker in self.workers:
                self.trainer_turn(worker)
            self.now += 0.5
            self.leases.tick(self.now)
            self.act()
            self.check()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 6),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_safe_and_live_whatever_the_network_does(seed: int, num_workers: int, loss: float) -> None:
    world = World(seed, num_workers, loss)
    for _ in range(300):
        world.event()
    world.settle()
    assert all(world.generating.values()), "a worker was lost"
    assert not world.leases.leased(), "a lease did not end"
    assert all(trainer.lease is None for trainer in world.trainers.values())


def test_the_world_leases_and_publishes_at_all() -> None:
    """Otherwise the property above would hold of a coordinator that does nothing."""
    worlds = [World(seed, 4, 0.1) for seed in range(10)]
    for world in worlds:
        for _ in range(500):
            world.event()
    assert sum(world.num_begun for world in worlds) > 50
    assert sum(len(world.published) for world in worlds) > 50
    assert sum(world.leases.counts.kills for world in worlds) > 0


def test_four_thousand_workers() -> None:
    """Events cost the same however many workers there are, within a logarithm."""

    def seconds_per_event(num_workers: int) -> float:
        leases = Leases(replace(SETTINGS, max_leases=num_workers))
        for index in range(num_workers):
            leases.set_ready(str(index), True)
        started, events = time.thread_time(), 0
        for turn in range(1, 4, 2):
            for index in range(num_workers):
                leases.idle(str(index), float(turn))
                for action in leases.actions(float(turn)):
                    assert isinstance(action, Begin)
                leases.needed(str(index), turn + 0.5)
                end = only(leases.actions(turn + 0.5))
                leases.ended(str(index), end.lease, turn + 0.6)
                leases.actions(turn + 0.6)
                events += 3
        return (time.thread_time() - started) / events

    small, large = seconds_per_event(64), seconds_per_event(4096)
    assert large < 1e-3
    assert large < 20 * small


# --- forecasts ------------------------------------------------------------------------------------


def rollout(forecast: TailForecast, ends: list[float], at: float = 0.0) -> None:
    forecast.started(len(ends), at)
    for end in ends:
        forecast.finished(1, at + end)
    forecast.ended()


def test_nothing_is_known_before_the_first_rollout() -> None:
    forecast = TailForecast()
    forecast.started(4, 0.0)
    assert forecast.remaining_s(1.0) == math.inf


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


def test_rollouts_with_fewer_samples_than_are_left_say_nothing() -> None:
    forecast = TailForecast()
    rollout(forecast, [1.0, 2.0])
    forecast.started(50, 0.0)
    assert forecast.remaining_s(0.5) == math.inf
