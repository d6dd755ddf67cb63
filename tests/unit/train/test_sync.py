"""The weight sync: who frees and takes the memory of a GPU when, and who gets which policy."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from small_run import small_run

torch = pytest.importorskip("torch")

from tlt.config.rollout import PoolConfig  # noqa: E402
from tlt.config.train import TrainConfig, transfer  # noqa: E402
from tlt.errors import ConfigError, EngineGone, LearnerLost  # noqa: E402
from tlt.node.weights import SharedWeights  # noqa: E402
from tlt.rollout.client import Engine as Commands  # noqa: E402
from tlt.rollout.pool import RolloutPool  # noqa: E402
from tlt.train.sync import DeviceSync, HostSync, weight_sync  # noqa: E402


class Engine:
    """An engine that notes its calls; one that ends fails its next `take_finished`."""

    num_gpus = 2

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log
        self.actor = f"actor of {name}"
        self.dead = False

    async def start(self) -> dict[str, Any]:
        return {"slots": 1}

    async def call(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if command is Commands.take_finished:
            await asyncio.sleep(0.001)
            if self.dead:
                raise EngineGone("gone")
            return []
        given = [a for a in (*args, *kwargs.values()) if not isinstance(a, dict)]
        self._log.append(" ".join([self.name, command.__name__, *map(str, given)]))
        return 0.0

    async def stop(self, graceful: bool) -> None:
        self.dead = True


class Learner:
    """A learner that notes its calls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.routes: list[Any] = []
        self.made: list[SharedWeights] = []
        self.error: Exception | None = None

    def _weights(self) -> SharedWeights:
        self.made.append(SharedWeights([("model.embed_tokens.weight", torch.ones(2, 2))]))
        return self.made[-1]

    async def publish(self, dtype: str) -> SharedWeights:
        self._log.append("learner publish")
        return self._weights()

    async def free_cache(self) -> None:
        self._log.append("learner free_cache")

    async def send(self, route: Any, dtype: str, version: int, keep: Any) -> SharedWeights:
        self._log.append(f"learner send {version}")
        self.routes.append(route)
        if self.error is not None:
            raise self.error
        return self._weights()


class World:
    def __init__(self, num_engines: int) -> None:
        self.log: list[str] = []
        self.engines: dict[str, Engine] = {}
        self.learner = Learner(self.log)
        self.pool = RolloutPool(PoolConfig(num_engines=num_engines), self._spawn)

    def _spawn(self, name: str) -> Engine:
        self.engines[name] = Engine(name, self.log)
        return self.engines[name]

    def host(self) -> HostSync:
        return HostSync(
            self.pool, cast(Any, self.learner), "float32", shares_gpus=True, sleeps=True
        )

    def device(self, shares_gpus: bool = True, sleeps: bool | None = None) -> DeviceSync:
        way = "ipc" if shares_gpus else "nccl"
        sleeps = shares_gpus if sleeps is None else sleeps
        return DeviceSync(self.pool, cast(Any, self.learner), "float32", shares_gpus, sleeps, way)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(num_engines=1)
    yield world
    for weights in world.learner.made:
        weights.close()


async def test_order_through_shared_memory(world: World) -> None:
    async with world.pool:
        await world.host().engines_sleep()
        await world.host().sync(3)
        assert world.log == [
            "engine-0 sleep False",
            "learner publish",  # which ends with free caches
            "engine-0 wake_weights",
            "engine-0 update_policy 3",
            "engine-0 wake",
        ]


async def test_emulated_engines_sleep_and_wake_as_on_shared_gpus(world: World) -> None:
    for emulate, slept in (({}, False), ({"hardware": "h100"}, True)):
        world.log.clear()
        config = small_run(emulate=emulate)
        async with World(num_engines=1).pool as pool:
            sync = weight_sync(config, pool, cast(Any, world.learner))
            await sync.engines_sleep()
        assert (sync._shares_gpus, type(sync)) == (slept, HostSync)


async def test_order_from_gpu_to_gpu(world: World) -> None:
    async with world.pool:
        sync = world.device()
        await sync.engines_sleep()
        first = await sync.sync(3)
        assert world.log == [
            "engine-0 sleep False",
            "learner free_cache",
            "engine-0 wake_weights",
            "learner send 3",  # which ends with free caches
            "engine-0 wake",
        ]
        second = await sync.sync(4)
    assert not Path(first.path).exists()
    assert Path(second.path).exists()
    route, again = world.learner.routes
    assert (route.backend, route.engines, route.num_workers) == ("ipc", ("engine-0",), (2,))
    assert route.actors == ("actor of engine-0",)
    assert route.engines == again.engines


async def test_engines_with_gpus_of_their_own_do_not_sleep(world: World) -> None:
    async with world.pool:
        await world.device(shares_gpus=False).engines_sleep()
        await world.device(shares_gpus=False).sync(1)
        assert world.log == ["learner free_cache", "learner send 1"]
    assert world.learner.routes[0].backend == "nccl"


async def test_engines_that_slept_for_trainers_wake_for_the_policy(world: World) -> None:
    made = weight_sync(
        small_run(
            placement={"kind": "separate"},
            engine={"num_gpus": 1},
            learner={"num_gpus": 1},
            tlt={"enabled": True},
        ),
        cast(Any, None),
        cast(Any, None),
    )
    assert (made._shares_gpus, made._sleeps) == (False, True)
    async with world.pool:
        sync = world.device(shares_gpus=False, sleeps=True)
        await sync.engines_sleep()
        await sync.sync(1)
        assert world.log == [
            "learner free_cache",
            "engine-0 wake_weights",
            "learner send 1",
            "engine-0 wake",
        ]


async def test_a_successor_gets_the_policy_that_was_sent(world: World) -> None:
    async with world.pool:
        await world.device().sync(5)
        world.engines["engine-0"].dead = True
        await until(lambda: "engine-0.1 update_policy 5" in world.log)
        await world.pool.wait_ready(1)
        assert world.log.count("learner publish") == 1
        world.engines["engine-0.1"].dead = True
        await until(lambda: "engine-0.2 update_policy 5" in world.log)
        assert world.log.count("learner publish") == 1  # the file is still there
        (file,) = world.learner.made[1:]
        await world.pool.wait_ready(1)
        await world.device().sync(6)
        assert not file.path.exists()
        assert world.learner.routes[-1].engines == ("engine-0.2",)


async def test_engines_with_a_part_of_a_policy_are_replaced(world: World) -> None:
    async with world.pool:
        world.learner.error = LearnerLost("a rank died")
        with pytest.raises(LearnerLost):
            await world.device().sync(5)
        await until(lambda: "engine-0.1" in world.engines)
        assert world.engines["engine-0"].dead


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.002)


def config(kind: str, engine_gpus: int, learner_gpus: int, weights: str = "auto") -> TrainConfig:
    return small_run(
        placement={"kind": kind, "weights": weights},
        engine={"num_gpus": engine_gpus},
        learner={"num_gpus": learner_gpus},
    )


@pytest.mark.parametrize(
    ("kind", "gpus", "way"),
    [
        ("colocated", (0, 0), "shared_memory"),
        ("separate", (0, 1), "shared_memory"),
        ("colocated", (1, 1), "ipc"),
        ("separate", (2, 1), "nccl"),
    ],
)
def test_the_way_follows_from_the_devices(kind: str, gpus: tuple[int, int], way: str) -> None:
    assert transfer(config(kind, *gpus)) == way
    assert transfer(config(kind, *gpus, weights="shared_memory")) == "shared_memory"
    made = weight_sync(config(kind, *gpus), cast(Any, None), cast(Any, None))
    assert isinstance(made, DeviceSync) == (way != "shared_memory")


@pytest.mark.parametrize(
    ("kind", "gpus", "weights"),
    [("colocated", (0, 0), "ipc"), ("colocated", (1, 1), "nccl"), ("separate", (1, 1), "ipc")],
)
def test_a_way_that_cannot_work_is_refused(kind: str, gpus: tuple[int, int], weights: str) -> None:
    with pytest.raises(ConfigError, match=r"placement\.weights"):
        transfer(config(kind, *gpus, weights=weights))
