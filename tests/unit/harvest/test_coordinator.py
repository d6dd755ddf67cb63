"""The coordinator with trainers that can be made to hang, fail and die, in simulated time."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from speed import limit
from tlt.harvest.coordinator import RETRY_S, START_S, Coordinator, CoordinatorSettings
from tlt.harvest.leases import LeaseSettings
from tlt.harvest.rounds import Evaluation, Trained, TrainerFailed, TrainerGone, Weights
from tlt.simulate import clock

SETTINGS = CoordinatorSettings(
    LeaseSettings(min_s=0.01, lease_s=30, stop_timeout_s=0.2, max_leases=8, resend_s=0.05),
    session_s=0.05,
    publish=True,
)


class FakeTrainer:
    """Weights are a number: how many sessions were learned, of all trainers it goes back to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights = 0.0
        self.has: int | None = 0
        self.ended = 0
        self.working = False
        self.dead = False
        self.deaf = False
        self.better = True
        self.fails: Exception | None = None
        self.starved = False
        self.at_evaluation: Callable[[], Awaitable[None]] | None = None
        self.at_training: Callable[[], Awaitable[None]] | None = None
        self.breaks_off = False
        self.asked_s: list[float] = []
        self.merged_with: list[list[tuple[float, float]]] = []
        self.taken: list[tuple[Any, ...]] = []
        self.refuses_published = False
        """Whether the next call with a published drafter and nothing else fails."""
        self.cannot_be_killed = False
        self._death = asyncio.Event()

    async def _alive(self) -> None:
        await asyncio.sleep(0)
        if self.dead:
            raise TrainerGone

    async def start(self) -> None:
        await self._alive()

    async def begin(self, lease: int, seconds: float) -> bool:
        await self._alive()
        return lease > self.ended

    async def end(self, lease: int) -> None:
        await self._alive()
        if not self.deaf:
            self.ended = max(self.ended, lease)

    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None:
        await self._alive()
        if self.refuses_published and published is not None and base is None and policy is None:
            self.refuses_published = False
            raise TrainerFailed("out of memory")
        self.taken.append(tuple(w if w is None else w.blob for w in (base, published, policy)))
        if base is not None:
            assert base.version != self.has, "it has these weights already"
            self.has, self.weights = base.version, base.blob if base.version else 0.0

    async def train(self, lease: int, seconds: float) -> Trained:
        await self._alive()
        self.asked_s.append(seconds)
        if self.at_training is not None:
            await self.at_training()
        if self.fails is not None:
            raise self.fails
        if self.starved:
            return Trained(0, 0, 0.0, True)
        self.working = True
        ends = asyncio.get_running_loop().time() + seconds
        while self.deaf or (
            asyncio.get_running_loop().time() < ends and lease > self.ended and not self.dead
        ):
            try:
                async with asyncio.timeout(0.002):
                    await self._death.wait()
                break
            except TimeoutError:
                pass
        self.working = False
        await self._alive()
        self.weights += 1
        self.has = None
        return Trained(1, 100, 0.5, False)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        await self._alive()
        if self.at_evaluation is not None:
            await self.at_evaluation()
        if self.breaks_off:
            return None
        return None if lease <= self.ended else Evaluation(self.better, 2.0 + self.weights, 2.0)

    async def merge(self, lease: int, others: list[Any], own_weight: float, seconds: float) -> bool:
        await self._alive()
        self.merged_with.append(others)
        total = own_weight + sum(share for _, share in others)
        self.weights = (self.weights * own_weight + sum(w * s for w, s in others)) / total
        return True

    async def export(self) -> float:
        await self._alive()
        return self.weights

    async def moments(self) -> str:
        await self._alive()
        return f"moments of {self.name}"

    async def release(self) -> None:
        await self._alive()

    async def kill(self) -> None:
        if self.cannot_be_killed:
            raise ZeroDivisionError("no cluster")
        self.dead, self.working = True, False
        self._death.set()
        await asyncio.sleep(0)


class Setting:
    def __init__(self, settings: CoordinatorSettings = SETTINGS, workers: str = "ab") -> None:
        self.trainers: dict[str, list[FakeTrainer]] = {}
        self.coordinator = Coordinator(settings, self._spawn)
        for worker in workers:
            self.coordinator.join(worker)
        self.coordinator.policy_changed(1, "policy")

    def _spawn(self, worker: str) -> FakeTrainer:
        trainer = FakeTrainer(worker)
        self.trainers.setdefault(worker, []).append(trainer)
        return trainer

    def __getitem__(self, worker: str) -> FakeTrainer:
        return self.trainers[worker][-1]

    def idle(self, worker: str, for_s: float = 100.0) -> None:
        self.coordinator.idle(worker, for_s)

    async def needed(self, worker: str, within_s: float = 0.15) -> None:
        async with asyncio.timeout(within_s):
            await self.coordinator.needed(worker)
        assert not self[worker].working

    async def __aenter__(self) -> "Setting":
        await asyncio.sleep(0.01)  # trainers get ready
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.coordinator.shutdown()


def run(test: Callable[[], Awaitable[None]]) -> None:
    clock.run(asyncio.wait_for(test(), 10))


def test_an_idle_worker_trains_and_what_is_better_is_published() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s.idle("a")
            first = await s.coordinator.next_version(2.0)
            second = await s.coordinator.next_version(2.0)
            assert first is not None
            assert second is not None
            assert (first.number, second.number) == (1, 2)
            assert second.weights.blob > first.weights.blob
            await s.needed("a")
            metrics = s.coordinator.metrics()
            assert metrics["published"] >= 2
            assert metrics["trainers"] == 0
            assert metrics["used_s"] > 0.05
            assert s.coordinator.tally.stop_max_s < 0.1

    run(scene)


def test_what_takes_several_short_leases_to_learn_is_evaluated_in_the_next() -> None:
    async def scene() -> None:
        long = CoordinatorSettings(SETTINGS.leases, session_s=0.3, publish=True)
        async with Setting(long) as s:
            for _ in range(4):
                s.idle("a")
                await asyncio.sleep(0.1)
                await s.needed("a")
            assert s.coordinator.tally.published >= 1

    run(scene)


def test_where_leases_are_too_short_to_evaluate_in_there_is_training_all_the_same() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s["a"].breaks_off = True
            s.idle("a")
            await asyncio.sleep(8 * SETTINGS.session_s)
            await s.needed("a")
            whole = [seconds > SETTINGS.session_s / 2 for seconds in s["a"].asked_s]
            assert whole[:3] == [True, False, True], "the evaluation again, then more training"
            assert s.coordinator.tally.published == 0

    run(scene)


def test_evaluating_takes_a_small_share_of_the_time_however_slow_it_is() -> None:
    async def scene() -> None:
        async with Setting() as s:

            async def slow() -> None:
                await asyncio.sleep(SETTINGS.session_s)

            s["a"].at_evaluation = slow
            s.idle("a")
            await asyncio.sleep(60 * SETTINGS.session_s)
            await s.needed("a")
            tally = s.coordinator.tally
            assert tally.published > 3
            assert tally.evaluated_s < 0.2 * tally.used_s

    run(scene)


def test_the_moments_are_those_of_the_newest_weights() -> None:
    async def scene() -> None:
        async with Setting() as s:
            assert await s.coordinator.moments() is None
            s.idle("b")
            await asyncio.sleep(2 * SETTINGS.session_s)
            await s.needed("b")
            assert await s.coordinator.moments() == "moments of b"

    run(scene)


def test_what_is_not_better_or_not_to_be_published_stays_here() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s["a"].better = False
            s.idle("a")
            assert await s.coordinator.next_version(0.2) is None
            assert s.coordinator.tally.refused > 0
        quiet = CoordinatorSettings(SETTINGS.leases, SETTINGS.session_s, publish=False)
        async with Setting(quiet) as s:
            s.idle("a")
            assert await s.coordinator.next_version(0.2) is None
            assert s.coordinator.tally.trained_steps > 1

    run(scene)


def test_a_trainer_that_does_not_stop_is_killed_and_the_run_has_its_worker() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s["a"].deaf = True
            s.idle("a")
            await asyncio.sleep(0.05)
            assert s["a"].working
            await s.needed("a", within_s=0.4)
            assert s.trainers["a"][0].dead
            assert len(s.trainers["a"]) == 2, "another one took its place"
            assert s.coordinator.metrics()["kills"] >= 1

    run(scene)


def test_a_trainer_that_dies_or_fails_costs_nothing_but_its_work() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s.idle("a")
            await asyncio.sleep(0.02)
            await s["a"].kill()
            await asyncio.sleep(0.05)
            assert s.coordinator.tally.faults == 1
            assert s.coordinator.tally.trainer_restarts == 1
            s["b"].fails = TrainerFailed("disk full")
            s.idle("b")
            await asyncio.sleep(0.05)
            assert s.coordinator.tally.faults == 2
            assert s.coordinator.tally.trainer_restarts == 2
            await s.needed("a")
            await s.needed("b")

    run(scene)


def test_with_nothing_to_learn_nothing_is_leased_for_a_while() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s["a"].starved = True
            s.idle("a")
            await asyncio.sleep(0.2)
            assert s.coordinator.metrics()["leases"] == 1
            await s.needed("a")

    run(scene)


def test_no_lease_before_there_are_states_to_learn_from() -> None:
    async def scene() -> None:
        coordinator = Coordinator(SETTINGS, FakeTrainer)
        coordinator.join("a")
        await asyncio.sleep(0.01)
        coordinator.idle("a")
        await asyncio.sleep(0.05)
        assert coordinator.metrics()["leases"] == 0
        coordinator.policy_changed(1, "policy")
        await asyncio.sleep(0.02)
        assert coordinator.metrics()["leases"] == 1
        await coordinator.shutdown()

    run(scene)


def test_results_of_several_are_merged_by_what_they_learned() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s.idle("a")
            s.idle("b")
            version = await s.coordinator.next_version(2.0)
            assert version is not None
            assert s["a"].merged_with == [[(1.0, 100.0)]]
            assert s.coordinator.tally.merges == 1
            await s.needed("a")
            await s.needed("b")

    run(scene)


def test_the_dead_and_the_called_back_are_left_out_of_a_merge() -> None:
    async def scene() -> None:
        async with Setting(workers="abc") as s:
            for worker in "abc":
                s.idle(worker)
            await asyncio.sleep(0.01)
            await s["b"].kill()
            await s.needed("c")
            version = await s.coordinator.next_version(2.0)
            assert version is not None
            assert version.weights.blob == 1.0
            assert s["a"].merged_with == []

    run(scene)


def test_what_was_called_back_while_it_was_evaluated_is_not_published() -> None:
    async def scene() -> None:
        async with Setting() as s:
            asked: list[asyncio.Task[None]] = []

            async def called_back() -> None:
                if not asked:
                    asked.append(asyncio.create_task(s.needed("a")))
                    s["a"].ended = -1  # it has not heard of it, and evaluates as if nothing was
                    await asyncio.sleep(0.02)

            s["a"].at_evaluation = called_back
            s.idle("a")
            assert await s.coordinator.next_version(0.3) is None
            assert s.coordinator.tally.published == 0
            await asked[0]

    run(scene)


def test_another_worker_goes_on_where_the_last_one_stopped() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s["a"].better = s["b"].better = False
            s.idle("a")
            await asyncio.sleep(0.18)
            await s.needed("a")
            learned = s["a"].weights
            assert learned >= 3
            s.idle("b")
            await asyncio.sleep(0.03)
            assert s["b"].taken[0] == (learned, None, "policy"), "not only what was evaluated"
            await s.needed("b")

    run(scene)


def test_after_a_death_training_goes_on_from_the_published_drafter() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s.idle("a")
            version = await s.coordinator.next_version(2.0)
            assert version is not None
            await s.needed("a")
            await s["a"].kill()
            s.idle("b")
            await asyncio.sleep(0.03)
            assert s["b"].taken[0][0] == version.weights.blob
            await s.needed("b")

    run(scene)


def test_a_worker_called_back_while_others_evaluate_is_free_at_once() -> None:
    async def scene() -> None:
        async with Setting() as s:

            async def slowly() -> None:
                await asyncio.sleep(0.5)

            s["a"].at_evaluation = slowly
            s.idle("a")
            s.idle("b")
            await asyncio.sleep(0.12)
            await s.needed("b", within_s=0.1)

    run(scene)


def test_weights_that_do_not_come_are_not_waited_for() -> None:
    """The core of whoever learned last may be busy: others go on from what is known."""

    async def scene() -> None:
        async with Setting() as s:
            s.idle("a")
            version = await s.coordinator.next_version(2.0)
            assert version is not None
            await asyncio.sleep(0.02)
            await s.needed("a")  # in the middle: what it has now, only it has

            async def never() -> float:
                await asyncio.sleep(100)
                return 0.0

            s["a"].export = never  # type: ignore[method-assign]
            s.idle("b")
            await asyncio.sleep(0.1)
            await s.needed("b", within_s=0.1)
            s.idle("b")
            await asyncio.sleep(1.3)
            assert version.weights.blob in [base for base, _, _ in s["b"].taken]
            assert not s["b"].dead
            await s.needed("b")

    run(scene)


def test_a_drafter_is_compared_with_the_one_published_meanwhile() -> None:
    async def scene() -> None:
        async with Setting() as s:

            async def slowly() -> None:
                await asyncio.sleep(0.2)

            s["a"].at_evaluation = slowly
            s.idle("a")
            await asyncio.sleep(0.08)
            s.idle("b")  # its round begins while a's is being evaluated
            first = await s.coordinator.next_version(2.0)
            second = await s.coordinator.next_version(2.0)
            assert first is not None
            assert second is not None
            told = [published for _, published, _ in s["b"].taken if published is not None]
            assert told[:1] == [first.weights.blob]
            await s.needed("a", within_s=0.5)
            await s.needed("b")

    run(scene)


def test_a_published_drafter_that_did_not_arrive_is_sent_again() -> None:
    """Otherwise its trainer would compare itself with an older one, and publish what is worse."""

    async def scene() -> None:
        async with Setting() as s:
            s.idle("a")
            await asyncio.sleep(1.0)  # earns time to evaluate in
            evaluated, trained = asyncio.Event(), asyncio.Event()

            async def until_evaluated() -> None:
                await evaluated.wait()

            async def until_trained() -> None:
                await trained.wait()

            s["a"].at_evaluation, s["b"].at_training = until_evaluated, until_trained
            await asyncio.sleep(0.08)
            assert await s.coordinator.next_version(0.001) is not None
            s.idle("b")  # has the drafter that was published last, and trains
            await asyncio.sleep(0.01)
            has = s["b"].taken[-1][1]
            evaluated.set()
            version = await s.coordinator.next_version(0.01)
            assert version is not None
            assert has != version.weights.blob
            await s.needed("a")
            s["b"].refuses_published = True
            trained.set()  # its result is to be compared with the drafter published meanwhile
            await asyncio.sleep(0.2)
            assert not s["b"].refuses_published
            assert s.coordinator.tally.faults == 1
            told = [published for _, published, _ in s["b"].taken[1:] if published is not None]
            assert told[:1] == [version.weights.blob]
            await s.needed("b")

    run(scene)


def test_a_trainer_that_cannot_be_killed_is_not_said_to_be_gone() -> None:
    async def scene() -> None:
        async with Setting() as s:
            s.idle("a")
            await asyncio.sleep(0.02)
            s["a"].deaf = True
            waits = asyncio.create_task(s.coordinator.needed("a"))
            await asyncio.sleep(0.01)
            await s["a"].kill()  # dies by itself
            s["a"].cannot_be_killed = True
            with pytest.raises(ZeroDivisionError, match="no cluster"):
                await waits

    run(scene)


def test_a_trainer_that_never_starts_is_replaced() -> None:
    async def never() -> None:
        await asyncio.sleep(1e9)

    async def scene() -> None:
        async with Setting(workers="") as s:
            slow = FakeTrainer("a")
            slow.start = never  # type: ignore[method-assign]
            made = iter([slow, FakeTrainer("a")])
            coordinator = Coordinator(SETTINGS, lambda worker: next(made))
            coordinator.join("a")
            await asyncio.sleep(START_S + RETRY_S + 1)
            assert slow.dead
            assert coordinator.metrics()["ready"] == 1
            assert coordinator.tally.faults == 1
            await coordinator.shutdown()
            await s.coordinator.shutdown()

    clock.run(asyncio.wait_for(scene(), 2 * START_S))


@pytest.mark.parametrize("num_workers", [512])
def test_many_workers_come_and_go(num_workers: int) -> None:
    """No worker is lost, and no turn of the event loop is long, by the processor's time."""

    async def scene() -> None:
        workers = [f"w{i}" for i in range(num_workers)]
        s = Setting(workers=workers)  # type: ignore[arg-type]
        async with s:
            longest, stop = 0.0, False

            async def watch() -> None:
                nonlocal longest
                while not stop:
                    before_s = time.thread_time()
                    await asyncio.sleep(0)
                    longest = max(longest, time.thread_time() - before_s)

            gc.collect()  # else a collection of all that other tests left may fall into a turn
            watching = asyncio.create_task(watch())
            for worker in workers:
                s.idle(worker)
            await asyncio.sleep(0.1)
            await asyncio.gather(*(s.needed(worker, within_s=60.0) for worker in workers))
            stop = True
            await watching
            assert longest < limit(0.25)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scene(), 120))  # as fast as it can, not as simulated
    finally:
        gc.enable()
