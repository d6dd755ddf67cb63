"""A coordinator that fails inside the driver: the run gets its workers back and goes on."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from drafter_fixtures import drafter  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tlt.drafter.checkpoint import MOMENTS, load_drafter, save_drafter  # noqa: E402
from tlt.errors import EngineError  # noqa: E402
from tlt.harvest import session  # noqa: E402
from tlt.harvest.actor import TrainerPlace, pack  # noqa: E402
from tlt.harvest.coordinator import Coordinator, CoordinatorSettings  # noqa: E402
from tlt.harvest.leases import Leases, LeaseSettings  # noqa: E402
from tlt.harvest.rounds import Evaluation, Trained, TrainerGone, Weights  # noqa: E402
from tlt.harvest.session import MAX_RESTARTS, Harvest  # noqa: E402
from tlt.harvest.trainer import EMBEDDING  # noqa: E402

SETTINGS = CoordinatorSettings(
    LeaseSettings(min_s=0.0, lease_s=30, stop_timeout_s=0.1, max_leases=8, resend_s=0.02),
    session_s=0.02,
    publish=True,
)
ENGINES = ("engine-0", "engine-1")


class FakeTrainer:
    """Trains until it is told to stop, or is killed."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.stop = asyncio.Event()
        self.working = self.dead = False

    async def start(self) -> None: ...

    async def release(self) -> None:
        if self.world.release_error is not None:
            raise self.world.release_error

    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None: ...

    async def begin(self, lease: int, seconds: float) -> bool:
        self.stop.clear()
        return True

    async def end(self, lease: int) -> None:
        if not self.world.deaf:
            self.stop.set()

    async def train(self, lease: int, seconds: float) -> Trained:
        self.working = True
        try:
            async with asyncio.timeout(None if self.world.deaf else seconds):
                await self.stop.wait()
        except TimeoutError:
            pass
        finally:
            self.working = False
        if self.dead:
            raise TrainerGone(self.name)
        return Trained(1, 100, 0.5, False)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        if self.world.round_error is not None:
            raise self.world.round_error
        return Evaluation(self.world.better, 2.0, 2.0)

    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float, seconds: float
    ) -> bool:
        return True

    async def export(self) -> Any:
        self.world.num_exported += 1
        return Blob(self.world.num_exported, self.world.lost_blobs)

    async def moments(self) -> Any:
        if self.world.moments_error is not None:
            raise self.world.moments_error
        return pack({"optimizer.w.exp_avg": torch.tensor([3.0]), "step": torch.tensor(7)})

    async def kill(self) -> None:
        if self.world.immortal:
            await asyncio.sleep(1000)
        self.dead = True
        self.stop.set()


class Blob:
    """A reference to weights, which may never come."""

    def __init__(self, number: int, lost: bool) -> None:
        self.number, self.lost = number, lost

    def __await__(self) -> Any:
        yield from asyncio.sleep(1e6 if self.lost else 0).__await__()
        return pack({"w": torch.tensor([float(self.number)])})


class World:
    def __init__(self) -> None:
        self.trainers: list[FakeTrainer] = []
        self.round_error: Exception | None = None
        self.release_error: Exception | None = None
        self.moments_error: Exception | None = None
        self.deaf = self.immortal = self.better = self.lost_blobs = False
        self.num_exported = 0
        self.pool: Any = SimpleNamespace(engines=self.ready)
        self.harvest = self.make()

    ready: tuple[str, ...] = tuple(ENGINES)
    """Engines of the pool that are ready."""

    def make(self, colocated: bool = True, min_s: float = 0.0) -> Harvest:
        return Harvest(
            replace(SETTINGS, leases=replace(SETTINGS.leases, min_s=min_s)),
            cast(Any, None),
            self.pool,
            lambda engine: {},
            on_gpu=False,
            colocated=colocated,
            spawn=self.spawn,
            share=lambda packed: packed,
        )

    def spawn(self, settings: object, place: TrainerPlace) -> FakeTrainer:
        self.trainers.append(FakeTrainer(self, f"trainer-{len(self.trainers)}"))
        return self.trainers[-1]

    def idle(self) -> None:
        for engine in ENGINES:
            self.harvest.idle(engine)

    def is_lost(self) -> bool:
        """Whether the first coordinator's trainers are dead."""
        return all(trainer.dead for trainer in self.trainers[: len(ENGINES)])

    async def until(self, true: Callable[[], object], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                await asyncio.sleep(0.005)

    async def trains(self) -> None:
        """Idle workers train, then the run has them back."""
        before = self.harvest.metrics()["trained_steps"]
        self.idle()
        await self.until(lambda: self.harvest.metrics()["trained_steps"] > before)
        await self.all_needed()

    async def all_needed(self, within_s: float = 1.0) -> None:
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(self.harvest.needed(engine) for engine in ENGINES))
        assert not any(t.working for t in self.trainers if not t.dead), "a device is not free"


@asynccontextmanager
async def running(colocated: bool = True, min_s: float = 0.0) -> AsyncIterator[World]:
    world = World()
    world.harvest = world.make(colocated, min_s)
    for core, engine in enumerate(ENGINES):
        world.harvest.ready(engine, {"cores": [core]})
    await world.harvest.start()
    world.harvest.rollout_started(8)
    world.harvest.policy_changed([(EMBEDDING, torch.ones(2, 2))], 1)
    try:
        await world.trains()
        yield world
    finally:
        world.immortal = False
        await world.harvest.stop()
        assert all(trainer.dead for trainer in world.trainers), "a trainer outlives harvest"


async def assert_contained(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """One log line with a traceback, a metric, free workers, and training by new trainers."""
    await world.all_needed()
    await world.until(lambda: world.is_lost() and world.harvest.metrics())
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.exc_info is not None
    record = world.harvest.record()
    assert record["harvest/coordinator_restarts"] == 1
    assert record["harvest/enabled"] == 1.0
    assert len(world.trainers) == 2 * len(ENGINES)
    world.round_error = None
    await world.trains()
    assert world.harvest.record()["harvest/trained_tokens"] > 0


async def run(scene: Callable[[], Any]) -> None:
    await asyncio.wait_for(scene(), 20)


async def test_an_exception_in_a_round(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with running() as world:
            world.round_error = ZeroDivisionError("a bug")
            world.idle()
            await world.until(world.is_lost)
            await assert_contained(world, caplog)

    await run(scene)


async def test_an_exception_in_a_lease_frees_no_device_before_its_trainer_is_dead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        async with running() as world:
            world.idle()
            await world.until(lambda: all(t.working for t in world.trainers))
            world.release_error = ZeroDivisionError("in a lease")
            trainers = list(world.trainers)
            async with asyncio.timeout(2):
                await world.harvest.needed(ENGINES[0])
            assert all(trainer.dead for trainer in trainers), "the device is not free"
            world.release_error = None
            await assert_contained(world, caplog)

    await run(scene)


async def test_an_exception_in_a_timer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tick(leases: Leases, now_s: float) -> None:
        raise ZeroDivisionError("a bug")

    async def scene() -> None:
        async with running() as world:
            with monkeypatch.context() as patch:
                patch.setattr(Leases, "tick", tick)
                world.deaf = True  # so that a timer comes, to tell it again
                world.idle()
                await asyncio.sleep(0.05)
                needed = asyncio.create_task(world.all_needed())
                await world.until(world.is_lost)
                await needed
            world.deaf = False
            await assert_contained(world, caplog)

    await run(scene)


@pytest.mark.parametrize("method", ["idle", "needed", "leased", "policy_changed", "take_spans"])
async def test_an_exception_in_a_direct_call(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = getattr(Coordinator, method)
    errors = [ZeroDivisionError("a bug")]

    def fails(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return works(*args)

    async def scene() -> None:
        async with running() as world:
            with monkeypatch.context() as patch:
                world.idle()
                patch.setattr(Coordinator, method, fails)
                world.harvest.idle(ENGINES[0])
                world.harvest.leased()
                world.harvest.take_spans()
                world.harvest.policy_changed([(EMBEDDING, torch.ones(2, 2))], 2)
                await world.all_needed()
                await world.until(world.is_lost)
            await assert_contained(world, caplog)

    await run(scene)


async def test_a_worker_that_never_comes_back_is_waited_for_within_a_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer neither hears nor dies: harvest takes the coordinator for lost, and goes on."""
    monkeypatch.setattr(session, "ANSWER_S", 0.1)

    async def scene() -> None:
        async with running() as world:
            world.deaf = world.immortal = True
            world.idle()
            await world.until(lambda: all(trainer.working for trainer in world.trainers))
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(world.harvest.needed(engine) for engine in ENGINES))
            lines = [r.message for r in caplog.records if r.levelno >= logging.ERROR]
            assert len(lines) == 2, "the coordinator is lost, and its trainers do not end"
            assert world.harvest.record()["harvest/coordinator_restarts"] == 1
            world.deaf = world.immortal = False
            for trainer in world.trainers[:2]:
                await trainer.kill()
            await world.trains()

    await run(scene)


async def test_too_many_losses_without_training_turn_harvest_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    async def lose(world: World) -> None:
        """Lose a coordinator; nobody trains before the next one is lost."""
        await world.until(world.harvest.metrics)
        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "idle", fails)
            world.harvest.idle(ENGINES[0])
        assert not world.harvest.metrics()
        await world.all_needed()

    async def scene() -> None:
        async with running() as world:
            for _ in range(MAX_RESTARTS):
                await lose(world)
            await world.until(world.harvest.metrics)
            await world.trains()
            assert world.harvest.record()["harvest/coordinator_restarts"] == MAX_RESTARTS
            for _ in range(MAX_RESTARTS):  # training in between counts
                await lose(world)
                assert world.harvest.enabled
            await lose(world)
            assert not world.harvest.enabled
            assert "off for the rest of the run" in caplog.records[-1].message
            record = world.harvest.record()
            assert record["harvest/enabled"] == 0.0
            assert record["harvest/coordinator_restarts"] == MAX_RESTARTS + 1
            world.idle()
            await world.all_needed()
            await world.harvest.rollout_ended()
            await world.until(lambda: all(trainer.dead for trainer in world.trainers))
            assert not world.harvest.leased()

    await run(scene)


async def test_idle_is_told_only_once_the_worker_was_freed() -> None:
    async def scene() -> None:
        async with running() as world:
            world.deaf = True  # it takes a while to be free
            world.idle()
            await world.until(lambda: all(trainer.working for trainer in world.trainers))
            needed = asyncio.create_task(world.harvest.needed(ENGINES[0]))
            await asyncio.sleep(0.01)
            world.harvest.idle(ENGINES[0])
            assert not needed.done()
            await needed
            world.deaf = False
            assert world.harvest.enabled
            assert world.harvest.record()["harvest/coordinator_restarts"] == 0
            await world.all_needed()

    await run(scene)


async def test_trainers_work_during_an_update_on_other_devices() -> None:
    async with running(colocated=False) as world:
        await world.harvest.rollout_ended()
        world.harvest.update_started()
        await world.until(lambda: len(world.harvest.leased()) == len(ENGINES))
        await world.until(lambda: all(trainer.working for trainer in world.trainers))
        await world.harvest.update_ended()
        assert not any(trainer.working for trainer in world.trainers), "engines take the policy now"
        assert not world.harvest.leased()
        world.harvest.update_started()
        await asyncio.sleep(0.05)
        await world.harvest.rollout_ended()  # of a run that is cancelled in the update
        assert not world.harvest.leased()


async def test_no_trainer_works_where_an_engine_is_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(World, "ready", (ENGINES[0],))
    async with running(colocated=False) as world:
        await world.harvest.rollout_ended()
        world.harvest.update_started()
        await world.until(lambda: len(world.harvest.leased()) == 1)
        await asyncio.sleep(0.05)
        assert len(world.harvest.leased()) == 1
        await world.harvest.update_ended()


async def test_no_trainer_works_during_an_update_on_the_same_devices() -> None:
    async with running(colocated=True) as world:
        await world.harvest.rollout_ended()
        world.harvest.update_started()
        await asyncio.sleep(0.05)
        assert not world.harvest.leased()
        await world.harvest.update_ended()
        world.harvest.rollout_started(8)
        await world.trains()


async def test_a_short_update_is_left_to_the_engines() -> None:
    async with running(colocated=False, min_s=2.0) as world:
        for _ in range(3):
            world.harvest.update_started()
            await world.harvest.update_ended()
        world.harvest.update_started()
        await asyncio.sleep(0.05)
        assert not world.harvest.leased(), "shorter than the shortest lease"
        await world.harvest.update_ended()


async def test_a_drafter_to_resume_from_comes_with_its_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = save_drafter(drafter(), tmp_path / "start", torch.float32)
    async with running() as world:
        world.harvest._trainer = cast(Any, SimpleNamespace(drafter=str(start)))
        await world.harvest.save(tmp_path / "checkpoint", to_resume=True)
        await world.harvest.save(tmp_path / "result", to_resume=False)
        assert load_file(tmp_path / "checkpoint" / MOMENTS)["step"].item() == 7
        assert not (tmp_path / "result" / MOMENTS).exists()
        world.moments_error = TrainerGone("a bug")
        await world.harvest.save(tmp_path / "without", to_resume=True)
        assert load_drafter(tmp_path / "without") is not None
        assert "lacks the state of the drafter's optimizer" in caplog.text


class SlowSwap:
    """The part of the pool that takes drafters, when it may."""

    engines = ENGINES

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.begun: list[tuple[int, float]] = []
        """Number and weights of every drafter that engines were given."""
        self.refusal: EngineError | None = None

    async def update_drafter(self, weights: Any, version: int, skip: object) -> list[float]:
        if self.refusal is not None:
            raise self.refusal
        self.begun.append((version, dict(weights)["w"].item()))
        await self.may_end.wait()
        return [0.0]


def publishes(world: World, folder: Path) -> SlowSwap:
    """Let the world's trainers publish all that they learn, to a pool that takes its time."""
    pool = SlowSwap()
    start = save_drafter(drafter(), folder / "start", torch.float32)
    world.harvest._trainer = cast(Any, SimpleNamespace(drafter=str(start)))
    world.harvest._pool = cast(Any, pool)
    world.better = True
    return pool


async def test_a_drafter_on_its_way_when_the_coordinator_is_lost_keeps_its_number(
    tmp_path: Path,
) -> None:
    """The next coordinator starts from it: no other drafter gets the same number."""

    async def scene() -> None:
        async with running() as world:
            pool = publishes(world, tmp_path)
            world.idle()
            await world.until(lambda: pool.begun)
            world.round_error = ZeroDivisionError("a bug")
            await world.until(world.is_lost)
            world.round_error = None
            await world.all_needed()
            await asyncio.sleep(0.1)
            assert len(world.trainers) == len(ENGINES), "the next coordinator waits for the swap"
            pool.may_end.set()
            await world.until(world.harvest.metrics)
            world.idle()
            await world.until(lambda: len(pool.begun) > 2)
            numbers = [number for number, _ in pool.begun]
            assert numbers == sorted(set(numbers)), "a number twice"
            await world.all_needed()

    await run(scene)


async def test_a_published_drafter_that_never_comes_is_waited_for_within_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FETCH_S", 0.05)

    async def scene() -> None:
        async with running() as world:
            pool = publishes(world, tmp_path)
            pool.may_end.set()
            world.lost_blobs = True
            world.idle()
            await world.until(world.is_lost)
            world.lost_blobs = False
            await world.all_needed()
            await world.until(world.harvest.metrics)
            world.idle()
            await world.until(lambda: pool.begun)
            await world.all_needed()

    await run(scene)


async def test_a_drafter_that_all_engines_refuse_turns_harvest_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with running() as world:
            publishes(world, tmp_path).refusal = EngineError("another vocabulary")
            world.idle()
            await world.until(lambda: not world.harvest.enabled)
            await world.all_needed()
            await world.harvest.rollout_ended()
            await world.until(lambda: all(trainer.dead for trainer in world.trainers))
            assert "the engines do not take a new drafter" in caplog.text
            assert len(world.trainers) == len(ENGINES)

    await run(scene)


class SlowMemory:
    """The part of the pool that harvest calls on GPUs; engines sleep and wake slowly."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.calls: list[str] = []

    async def call_engine(self, engine: str, method: str) -> None:
        await asyncio.sleep(0.02)
        self.calls.append(method)
        if method == "sleep":
            self.asleep.add(engine)
        else:
            self.asleep.discard(engine)

    async def refresh_drafter(self, engine: str) -> None:
        assert engine not in self.asleep
        self.calls.append("refresh_drafter")


def on_gpu(pool: SlowMemory) -> Harvest:
    nothing = cast(Any, None)
    return Harvest(SETTINGS, nothing, cast(Any, pool), lambda engine: {}, on_gpu=True)


async def test_every_send_to_a_sleeping_engine_waits_until_it_is_awake() -> None:
    pool = SlowMemory()
    harvest = on_gpu(pool)
    harvest.idle(ENGINES[0])
    await asyncio.sleep(0.05)
    assert pool.asleep == {ENGINES[0]}

    async def send() -> bool:
        await harvest.needed(ENGINES[0])
        return ENGINES[0] in pool.asleep

    assert not any(await asyncio.gather(send(), send(), send()))
    assert pool.calls == ["sleep", "wake", "refresh_drafter"]


async def test_an_engine_that_is_falling_asleep_wakes_for_a_send() -> None:
    pool = SlowMemory()
    harvest = on_gpu(pool)
    harvest.idle(ENGINES[0])
    await asyncio.sleep(0.005)  # the engine does not sleep yet
    await harvest.needed(ENGINES[0])
    assert not pool.asleep
    assert pool.calls == ["sleep", "wake", "refresh_drafter"]
    harvest.idle(ENGINES[0])
    await harvest.needed(ENGINES[0])  # before the engine was told to sleep
    await asyncio.sleep(0.1)
    assert not pool.asleep
