"""Harvest in a run: engines, updates, drafters on their way, checkpoints. Simulated time."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from drafter_fixtures import drafter  # noqa: E402
from fault_layer import run  # noqa: E402
from light_trainers import ScriptedTrainer  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tlt.drafter.checkpoint import MOMENTS, load_drafter, save_drafter  # noqa: E402
from tlt.errors import EngineError  # noqa: E402
from tlt.harvest.actor import TrainerPlace, pack  # noqa: E402
from tlt.harvest.contract import TrainerGone  # noqa: E402
from tlt.harvest.coordinator import CoordinatorSettings  # noqa: E402
from tlt.harvest.leases import Leases, LeaseSettings  # noqa: E402
from tlt.harvest.published import EMBEDDING, version_of  # noqa: E402
from tlt.harvest.session import FETCH_S, HarvestSession  # noqa: E402

SETTINGS = CoordinatorSettings(
    LeaseSettings(min_s=0.0, lease_s=30, stop_timeout_s=0.1, max_leases=8, resend_s=0.02),
    session_s=0.02,
    publish=True,
)
ENGINES = ("engine-0", "engine-1")
FIRST_VERSION = 5


class Blob:
    """A reference to weights, which may never come."""

    def __init__(self, weights: float, lost: bool) -> None:
        self.weights, self.lost = weights, lost

    def __await__(self) -> Any:
        yield from asyncio.sleep(1e6 if self.lost else 0).__await__()
        return pack({"w": torch.tensor([self.weights])})


class Trainer(ScriptedTrainer):
    def __init__(self, world: "World", name: str) -> None:
        super().__init__(name)
        self.world, self.better = world, False
        self.exported = 0

    async def take(self, *weights: Any) -> None: ...

    async def export(self) -> Any:
        self.exported += 1
        return Blob(float(self.exported), self.world.loses_blobs)

    async def merge(self, *args: Any) -> bool:
        return True

    async def optimizer_state(self) -> Any:
        if self.world.is_broken:
            raise TrainerGone("a bug")
        return pack({"optimizer.w.exp_avg": torch.tensor([3.0]), "step": torch.tensor(7)})


class World:
    """A session, its trainers, and a pool whose engines sleep, wake and take drafters slowly."""

    def __init__(
        self, start: Path, on_gpu: bool = False, colocated: bool = True, min_s: float = 0.0
    ) -> None:
        self.engines = list(ENGINES)
        self.trainers: list[Trainer] = []
        self.loses_blobs = self.is_broken = False
        self.path = start.parent
        self.asleep: set[str] = set()
        self.calls: list[str] = []
        self.swapped: list[int] = []
        """Numbers of the drafters that engines were given."""
        self.skipped: set[str] = set()
        """Engines that the last drafter was not for."""
        self.may_swap = asyncio.Event()
        self.may_swap.set()
        self.refusal: EngineError | None = None
        self.harvest = HarvestSession(
            replace(SETTINGS, leases=replace(SETTINGS.leases, min_s=min_s)),
            cast(Any, SimpleNamespace(drafter=str(start))),
            cast(Any, self),
            lambda engine: {},
            on_gpu=on_gpu,
            colocated=colocated,
            first_version=FIRST_VERSION,
            spawn=self.spawn,
            share=lambda packed: packed,
        )

    def spawn(self, settings: object, place: TrainerPlace) -> Trainer:
        self.trainers.append(Trainer(self, f"trainer-{len(self.trainers)}"))
        return self.trainers[-1]

    # --- the pool
    async def sleep_engine(self, engine: str) -> None:
        await asyncio.sleep(0.02)
        self.calls.append("sleep")
        self.asleep.add(engine)

    async def wake_engine(self, engine: str) -> None:
        await asyncio.sleep(0.02)
        self.calls.append("wake")
        self.asleep.discard(engine)

    async def refresh_drafter(self, engine: str) -> None:
        assert engine not in self.asleep
        self.calls.append("refresh_drafter")

    async def update_drafter(self, weights: Any, version: int, skip: set[str]) -> list[float]:
        weights.close()
        self.skipped = set(skip)
        if self.refusal is not None:
            raise self.refusal
        self.swapped.append(version)
        await self.may_swap.wait()
        return [0.0]

    # --- the run
    def publishes(self) -> None:
        for trainer in self.trainers:
            trainer.better = True

    def idle(self) -> None:
        for engine in ENGINES:
            self.harvest.idle(engine)

    async def until(self, true: Callable[[], object], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                await asyncio.sleep(0.005)

    async def trains(self) -> None:
        """Idle workers train, then the run has them back."""
        before = self.harvest.coordinator.metrics()["trained_steps"]
        self.idle()
        await self.until(lambda: self.harvest.coordinator.metrics()["trained_steps"] > before)
        await self.all_needed()

    async def all_needed(self, within_s: float = 1.0) -> None:
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(self.harvest.needed(engine) for engine in ENGINES))
        assert not any(trainer.working for trainer in self.trainers), "a device is not free"

    async def is_off(self) -> None:
        """Harvest is off for good, and the run has all it needs."""
        await self.all_needed()
        assert not self.harvest.coordinator.enabled
        assert self.harvest.record()["harvest/enabled"] == 0.0
        assert all(trainer.dead for trainer in self.trainers)
        assert len(self.trainers) == len(ENGINES)
        self.idle()
        await self.all_needed()
        await self.harvest.rollout_ended()
        assert not self.harvest.leased()


Scene = Callable[[World], Coroutine[Any, Any, None]]


async def play(scene: Scene, path: Path, **settings: Any) -> None:
    """Play a scene with a session whose trainers have trained once."""
    world = World(save_drafter(drafter(), path / "start", torch.float32), **settings)
    for core, engine in enumerate(ENGINES):
        world.harvest.ready(engine, {"cores": [core]})
    await world.harvest.start()
    world.harvest.rollout_started(8)
    world.harvest.policy_changed([(EMBEDDING, torch.ones(2, 2))], 1)
    await world.trains()
    world.calls.clear()
    await scene(world)
    await world.harvest.stop()
    assert all(trainer.dead for trainer in world.trainers), "a trainer outlives harvest"


def simulated(**settings: Any) -> Callable[[Scene], Callable[[Path], None]]:
    """Make a test of a scene in simulated time, in a world with these settings."""

    def test_of(scene: Scene) -> Callable[[Path], None]:
        return lambda tmp_path: run(play(scene, tmp_path, **settings), limit_s=1000.0)

    return test_of


def test_an_error_turns_harvest_off_with_one_line_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(leases: Leases, worker: str, now_s: float) -> None:
        raise ZeroDivisionError("a bug")

    @simulated()
    async def scene(world: World) -> None:
        world.idle()
        await asyncio.sleep(0.05)
        monkeypatch.setattr(Leases, "needed", breaks)
        await world.harvest.needed(ENGINES[0])
        await world.is_off()

    scene(tmp_path)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.exc_info is not None


@simulated()
async def test_a_drafter_that_all_engines_refuse_turns_harvest_off(world: World) -> None:
    world.publishes()
    world.refusal = EngineError("another vocabulary")
    world.idle()
    await world.until(lambda: not world.harvest.coordinator.enabled)
    await world.is_off()


@simulated()
async def test_drafters_reach_the_engines_in_order_and_only_in_rollouts(world: World) -> None:
    world.publishes()
    world.may_swap.clear()
    world.idle()
    await world.until(lambda: world.swapped)
    ended = asyncio.create_task(world.harvest.rollout_ended())
    await asyncio.sleep(0.5)
    assert not ended.done(), "a swap is under way"
    world.may_swap.set()
    await ended
    first = len(world.swapped)
    await world.trains()
    assert len(world.swapped) == first
    world.harvest.rollout_started(8)
    world.idle()
    await world.until(lambda: len(world.swapped) > first + 1)
    assert world.swapped == sorted(set(world.swapped))
    assert world.swapped[0] == FIRST_VERSION + 1
    await world.all_needed()


@simulated()
async def test_a_published_drafter_that_never_comes_is_skipped(world: World) -> None:
    world.loses_blobs = True
    world.publishes()
    world.idle()
    await world.until(lambda: world.harvest.coordinator.metrics()["published"])
    world.loses_blobs = False
    await world.until(lambda: world.swapped, FETCH_S + 5)
    assert world.harvest.coordinator.enabled
    assert world.harvest.record()["harvest/faults"] == 1
    await world.all_needed()


@simulated()
async def test_idle_is_told_only_once_the_worker_was_freed(world: World) -> None:
    for trainer in world.trainers:
        trainer.deaf = True  # it takes a while to be free
    world.idle()
    await world.until(lambda: all(trainer.working for trainer in world.trainers))
    needed = asyncio.create_task(world.harvest.needed(ENGINES[0]))
    await asyncio.sleep(0.01)
    world.harvest.idle(ENGINES[0])
    assert not needed.done()
    await needed
    assert world.harvest.coordinator.enabled
    await world.all_needed()


# --- updates on other devices ---------------------------------------------------------------------


@simulated(colocated=False)
async def test_trainers_work_during_an_update_on_other_devices(world: World) -> None:
    await world.harvest.rollout_ended()
    world.harvest.update_started()
    await world.until(lambda: len(world.harvest.leased()) == len(ENGINES))
    await world.until(lambda: all(trainer.working for trainer in world.trainers))
    await world.harvest.update_ended()
    assert not any(trainer.working for trainer in world.trainers), "engines take the policy now"
    assert not world.harvest.leased()
    world.engines.pop()  # its successor is starting
    world.harvest.update_started()
    await asyncio.sleep(0.05)
    assert len(world.harvest.leased()) == 1
    await world.harvest.rollout_ended()  # of a run that is cancelled in the update
    assert not world.harvest.leased()


@simulated()
async def test_no_trainer_works_during_an_update_on_the_same_devices(world: World) -> None:
    await world.harvest.rollout_ended()
    world.harvest.update_started()
    await asyncio.sleep(0.05)
    assert not world.harvest.leased()
    await world.harvest.update_ended()
    world.harvest.rollout_started(8)
    await world.trains()


@simulated(colocated=False, min_s=2.0)
async def test_a_short_update_is_left_to_the_engines(world: World) -> None:
    for _ in range(3):
        world.harvest.update_started()
        await world.harvest.update_ended()
    world.harvest.update_started()
    await asyncio.sleep(0.05)
    assert not world.harvest.leased(), "shorter than the shortest lease"
    await world.harvest.update_ended()


# --- checkpoints, and engines that sleep ----------------------------------------------------------


@simulated()
async def test_a_drafter_to_resume_from_comes_with_its_optimizer(world: World) -> None:
    await world.harvest.save(world.path / "checkpoint", to_resume=True)
    await world.harvest.save(world.path / "result", to_resume=False)
    assert load_file(world.path / "checkpoint" / MOMENTS)["step"].item() == 7
    assert not (world.path / "result" / MOMENTS).exists()
    world.is_broken = True
    await world.harvest.save(world.path / "without", to_resume=True)
    assert load_drafter(world.path / "without") is not None
    assert version_of(world.path / "without") == FIRST_VERSION


@simulated(on_gpu=True)
async def test_every_send_to_a_sleeping_engine_waits_until_it_is_awake(world: World) -> None:
    world.harvest.idle(ENGINES[0])
    await asyncio.sleep(0.05)
    assert world.asleep == {ENGINES[0]}

    async def send() -> bool:
        await world.harvest.needed(ENGINES[0])
        return ENGINES[0] in world.asleep

    assert not any(await asyncio.gather(send(), send(), send()))
    assert world.calls == ["sleep", "wake", "refresh_drafter"]


@simulated(on_gpu=True)
async def test_an_engine_that_is_falling_asleep_wakes_for_a_send(world: World) -> None:
    world.harvest.idle(ENGINES[0])
    await asyncio.sleep(0.005)  # the engine does not sleep yet
    await world.harvest.needed(ENGINES[0])
    assert not world.asleep
    assert world.calls == ["sleep", "wake", "refresh_drafter"]
    world.harvest.idle(ENGINES[0])
    await world.harvest.needed(ENGINES[0])  # before the engine was told to sleep
    await asyncio.sleep(0.1)
    assert not world.asleep


@simulated(on_gpu=True)
async def test_a_swap_leaves_out_engines_that_fall_asleep_or_wake(world: World) -> None:
    async with world.harvest._moving.setdefault(ENGINES[0], asyncio.Lock()):
        world.publishes()
        world.harvest.idle(ENGINES[1])
        await world.until(lambda: world.swapped)
        assert world.skipped == set(ENGINES)
    await world.all_needed()


@simulated(on_gpu=True)
async def test_no_engine_sleeps_for_a_harvest_that_is_off(world: World) -> None:
    world.harvest.coordinator.fail(ValueError("a bug"))
    await world.all_needed()
    world.calls.clear()
    world.idle()
    await asyncio.sleep(0.1)
    assert not world.calls
