"""The coordinator with trainers that can be made to hang, fail and die, in simulated time."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from light_trainers import ScriptedTrainer

from tlt.harvest.contract import Version
from tlt.harvest.coordinator import ANSWER_S, RETRY_S, START_S, Coordinator, CoordinatorSettings
from tlt.harvest.leases import Leases, LeaseSettings
from tlt.simulate import clock

SETTINGS = CoordinatorSettings(
    LeaseSettings(min_s=0.01, lease_s=30, stop_timeout_s=0.2, max_leases=8, resend_s=0.05),
    session_s=0.05,
    publish=True,
)


Scene = Callable[["Setting"], Coroutine[Any, Any, None]]


class Setting:
    def __init__(
        self,
        settings: CoordinatorSettings = SETTINGS,
        workers: str = "ab",
        policy: bool = True,
    ) -> None:
        self.trainers: dict[str, list[ScriptedTrainer]] = {}
        self.errors: list[BaseException] = []
        self.coordinator = Coordinator(settings, self._spawn, self.errors.append)
        for worker in workers:
            self.coordinator.join(worker)
        if policy:
            self.coordinator.policy_changed(1, "policy")

    def _spawn(self, worker: str) -> ScriptedTrainer:
        trainer = ScriptedTrainer(worker)
        self.trainers.setdefault(worker, []).append(trainer)
        return trainer

    def __getitem__(self, worker: str) -> ScriptedTrainer:
        return self.trainers[worker][-1]

    def idle(self, worker: str, for_s: float = 100.0) -> None:
        self.coordinator.idle(worker, for_s)

    async def needed(self, worker: str, within_s: float = 0.15) -> None:
        async with asyncio.timeout(within_s):
            await self.coordinator.needed(worker)
        assert not self[worker].working

    async def version(self) -> Version:
        """Return the next drafter that is published."""
        version = await self.coordinator.next_version(2.0)
        assert version is not None
        return version

    async def __aenter__(self) -> "Setting":
        await asyncio.sleep(0.01)  # trainers get ready
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.coordinator.shutdown()


def simulated(*args: Any, **kwargs: Any) -> Callable[[Scene], Callable[[], None]]:
    """Make a test of a scene in simulated time, in a setting with these arguments."""

    async def play(scene: Scene) -> None:
        async with Setting(*args, **kwargs) as setting:
            await scene(setting)

    def test_of(scene: Scene) -> Callable[[], None]:
        return lambda: clock.run(asyncio.wait_for(play(scene), 2 * START_S))

    return test_of


@simulated()
async def test_an_idle_worker_trains_and_what_is_better_is_published(s: Setting) -> None:
    s.idle("a")
    first = await s.version()
    second = await s.version()
    assert (first.number, second.number) == (1, 2)
    assert second.weights.blob > first.weights.blob
    await s.needed("a")
    metrics = s.coordinator.metrics()
    assert metrics["published"] >= 2
    assert metrics["trainers"] == 0
    assert metrics["used_s"] > 0.05
    assert s.coordinator.tally.stop_max_s < 0.1


@simulated(replace(SETTINGS, session_s=0.3))
async def test_what_takes_several_short_leases_to_learn_is_evaluated_in_the_next(
    s: Setting,
) -> None:
    for _ in range(4):
        s.idle("a")
        await asyncio.sleep(0.1)
        await s.needed("a")
    assert s.coordinator.tally.published >= 1


@simulated()
async def test_where_leases_are_too_short_to_evaluate_in_there_is_training_all_the_same(
    s: Setting,
) -> None:
    s["a"].breaks_off = True
    s.idle("a")
    await asyncio.sleep(8 * SETTINGS.session_s)
    await s.needed("a")
    whole = [seconds > SETTINGS.session_s / 2 for seconds in s["a"].asked_s]
    assert whole[:3] == [True, False, True], "the evaluation again, then more training"
    assert s.coordinator.tally.published == 0


@simulated()
async def test_evaluating_takes_a_small_share_of_the_time_however_slow_it_is(s: Setting) -> None:
    s["a"].evaluates_s = SETTINGS.session_s
    s.idle("a")
    await asyncio.sleep(60 * SETTINGS.session_s)
    await s.needed("a")
    tally = s.coordinator.tally
    assert tally.published > 3
    assert tally.evaluated_s < 0.2 * tally.used_s


@simulated()
async def test_the_optimizer_state_is_that_of_the_newest_weights(s: Setting) -> None:
    assert await s.coordinator.optimizer_state() is None
    s.idle("b")
    await asyncio.sleep(2 * SETTINGS.session_s)
    await s.needed("b")
    assert await s.coordinator.optimizer_state() == "state of b"


@pytest.mark.parametrize("publish", [True, False])
def test_what_is_not_better_or_not_wanted_is_not_published(publish: bool) -> None:
    @simulated(replace(SETTINGS, publish=publish))
    async def scene(s: Setting) -> None:
        s["a"].better = not publish
        s.idle("a")
        assert await s.coordinator.next_version(0.2) is None
        assert s.coordinator.tally.trained_steps > 1
        assert bool(s.coordinator.tally.refused) == publish

    scene()


@simulated(workers="", policy=False)
async def test_no_lease_before_there_are_states_to_learn_from(s: Setting) -> None:
    s.coordinator.join("a")
    s.idle("a")
    await asyncio.sleep(0.05)
    assert s.coordinator.metrics()["leases"] == 0
    s.coordinator.policy_changed(1, "policy")
    assert s.coordinator.metrics()["leases"] == 1


@simulated()
async def test_results_of_several_are_merged_by_what_they_learned(s: Setting) -> None:
    s.idle("a")
    s.idle("b")
    await s.version()
    assert s["a"].merged_with == [[(1.0, 100.0)]]
    assert s.coordinator.tally.merges == 1


@simulated(workers="abc")
async def test_the_dead_and_the_called_back_are_left_out_of_a_merge(s: Setting) -> None:
    for worker in "abc":
        s.idle(worker)
    await asyncio.sleep(0.01)
    await s["b"].kill()
    await s.needed("c")
    version = await s.version()
    assert version.weights.blob == 1.0
    assert s["a"].merged_with == []


@simulated()
async def test_another_worker_goes_on_where_the_last_one_stopped(s: Setting) -> None:
    s["a"].better = s["b"].better = False
    s.idle("a")
    await asyncio.sleep(0.18)
    await s.needed("a")
    learned = s["a"].weights
    assert learned >= 3
    s.idle("b")
    await asyncio.sleep(0.03)
    assert s["b"].taken[0] == (learned, None, "policy"), "not only what was evaluated"


@simulated()
async def test_a_worker_called_back_while_others_evaluate_is_free_at_once(s: Setting) -> None:
    s["a"].evaluates_s = 0.5
    s.idle("a")
    s.idle("b")
    await asyncio.sleep(0.12)
    await s.needed("b", within_s=0.1)


@simulated()
async def test_weights_that_do_not_come_are_not_waited_for(s: Setting) -> None:
    """The core of whoever learned last may be busy: others go on from what is known."""
    s.idle("a")
    version = await s.version()
    await asyncio.sleep(0.02)
    await s.needed("a")  # in the middle: what it has now, only it has

    s["a"].answers_s = 100.0
    s.idle("b")
    await asyncio.sleep(0.1)
    await s.needed("b", within_s=0.1)
    s.idle("b")
    await asyncio.sleep(1.3)
    assert version.weights.blob in [base for base, _, _ in s["b"].taken]
    assert not s["b"].dead


# --- failures -------------------------------------------------------------------------------------


@simulated()
async def test_a_trainer_that_cannot_be_killed_turns_harvest_off(s: Setting) -> None:
    s.idle("a")
    s.idle("b")
    await asyncio.sleep(0.02)
    s["a"].deaf = True
    waits = asyncio.create_task(s.coordinator.needed("a"))
    await asyncio.sleep(0.01)
    await s["a"].kill()  # dies by itself
    s["a"].cannot_be_killed = True
    await waits
    (error,) = s.errors
    assert isinstance(error, ZeroDivisionError)
    assert not s.coordinator.enabled
    assert s["b"].dead
    assert not s.coordinator.leased()


@simulated()
async def test_a_worker_that_does_not_come_back_in_time_turns_harvest_off(s: Setting) -> None:
    s["a"].deaf = s["a"].outlives_kills = True
    s.idle("a")
    s.idle("b")
    await asyncio.sleep(0.02)
    async with asyncio.timeout(SETTINGS.leases.stop_timeout_s + 2 * ANSWER_S + 0.1):
        await s.coordinator.needed("a")
    assert not s.coordinator.enabled
    assert s["b"].dead
    async with asyncio.timeout(0.1):
        await s.coordinator.needed("a")
        await s.coordinator.needed("b")
    assert len(s.errors) == 1


@pytest.mark.parametrize("method", ["idle", "needed", "tick", "actions"])
def test_an_error_in_a_decision_turns_harvest_off_and_frees_all_workers(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    @simulated()
    async def scene(s: Setting) -> None:
        s.idle("a")
        await asyncio.sleep(0.02)
        with monkeypatch.context() as patch:
            patch.setattr(Leases, method, breaks)
            s.idle("b")
            s["a"].deaf = True  # a timer comes, to remind it
            await s.coordinator.needed("a")
            await s.coordinator.needed("b")
            s.coordinator.join("c")
            await asyncio.sleep(1.0)
        assert len(s.errors) == 1
        assert s.trainers["a"][0].dead
        assert s["b"].dead
        assert await s.coordinator.next_version(0.1) is None

    scene()


@simulated(workers="")
async def test_a_trainer_that_never_starts_is_replaced(s: Setting) -> None:
    s.coordinator.join("a")
    s["a"].answers_s = 1e9
    await asyncio.sleep(START_S + RETRY_S + 1)
    assert s.trainers["a"][0].dead
    assert s.coordinator.metrics()["ready"] == 1
    assert s.coordinator.tally.faults == s.coordinator.tally.trainer_restarts == 1
