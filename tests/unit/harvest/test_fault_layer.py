"""Seeded faults between the real coordinator and light trainers, in simulated time.

Whatever the seed: the run has a worker back within the limit, and no trainer works on it then.
Every lease ends. A drafter is published once, by a trainer whose lease is good. When the faults
end, every worker trains again. `TLT_FAULT_SEEDS` sets the number of seeds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress

import pytest
from fault_layer import Layer, batches, run
from light_trainers import Trainers

from tlt.harvest.contract import TrainerFailed, Version
from tlt.harvest.coordinator import RETRY_S, START_S, Coordinator, CoordinatorSettings
from tlt.harvest.leases import LeaseSettings
from tlt.simulate.clock import now_s

LEASES = LeaseSettings(min_s=0.1, lease_s=12.0, stop_timeout_s=2.0, max_leases=3)
SETTINGS = CoordinatorSettings(LEASES, session_s=2.0, publish=True)
WORKERS = ("a", "b", "c", "d")
RATE = 0.06
"""Share of calls with a fault."""
KILL_S = 0.3
FREE_S = LEASES.stop_timeout_s + LEASES.resend_s + 3 * KILL_S
"""Seconds in which the run has a worker back: a trainer that does not stop is killed."""
ROUNDS = 12
KNOWN = (104, 453, 797)
"""Later seeds that have found something: a call that is delayed while its trainer dies, and two
drafters that are published in one moment."""


class World:
    def __init__(self, seed: int) -> None:
        self.layer = Layer(f"harvest/{seed}", RATE, max_delay_s=3.0)
        self.used: set[str] = set(WORKERS)
        """Workers that the run uses."""
        self.trainers = Trainers(self.layer, self.used.__contains__, KILL_S)
        self.published: list[Version] = []
        self.errors: list[BaseException] = []
        self.coordinator = Coordinator(SETTINGS, self.trainers.spawn, self.errors.append)

    async def watch(self) -> None:
        """Take published drafters at the moment at which they are published."""
        while True:
            version = await self.coordinator.next_version(1000.0)
            assert version is not None, self.errors
            lease = self.trainers.lease_of[version.weights.blob]
            assert now_s() < self.trainers.expires_s[lease], "published after the lease ran out"
            called_back_s = self.trainers.called_back_s.get(lease, now_s())
            assert called_back_s >= now_s(), "published by a fenced trainer"
            self.published.append(version)

    async def free(self, worker: str) -> None:
        """Have a worker back in time."""
        started_s = now_s()
        await self.coordinator.needed(worker)
        assert now_s() - started_s <= FREE_S, "the run waits too long for a worker"
        assert not self.trainers.working(worker), "a device is not free"
        self.used.add(worker)

    async def use(self, worker: str) -> None:
        """Let a worker be idle and needed again and again."""
        rng = self.layer.rng
        for _ in range(ROUNDS):
            await asyncio.sleep(rng.uniform(0, 3))
            self.used.discard(worker)
            self.coordinator.idle(worker, rng.choice([5.0, 100.0]))
            await asyncio.sleep(rng.choice([0.0, 0.3, rng.uniform(0, 20)]))
            if rng.random() < 0.05:
                self.coordinator.join(worker)  # the engine has moved
            await self.free(worker)

    async def follow(self) -> None:
        """Change the policy, and write checkpoints."""
        for version in itertools.count(2):
            await asyncio.sleep(self.layer.rng.uniform(1, 20))
            self.coordinator.policy_changed(version, "policy")
            with suppress(TrainerFailed, TimeoutError):
                async with asyncio.timeout(5):
                    await self.coordinator.optimizer_state()

    async def all_train(self) -> None:
        """Without faults, every worker trains."""
        self.layer.rate = 0.0
        for worker in WORKERS:
            before = self.coordinator.metrics()["trained_steps"]
            self.used.discard(worker)
            self.coordinator.idle(worker)
            async with asyncio.timeout(START_S + RETRY_S + 20):
                while self.coordinator.metrics()["trained_steps"] == before:
                    await asyncio.sleep(0.5)
            await self.free(worker)


async def one_seed(seed: int) -> None:
    world = World(seed)
    for worker in WORKERS:
        world.coordinator.join(worker)
    world.coordinator.policy_changed(1, "policy")
    watching = asyncio.ensure_future(world.watch())
    following = asyncio.ensure_future(world.follow())
    await asyncio.gather(*(world.use(worker) for worker in WORKERS))
    await world.all_train()
    assert world.coordinator.metrics()["trainers"] == 0, "a lease never ended"
    for task in (watching, following):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await world.coordinator.shutdown()
    assert all(trainer.dead.is_set() for trainer in world.trainers.all), (
        "a trainer outlives harvest"
    )
    assert not world.errors, "the coordinator failed of a trainer's fault"
    numbers = [version.number for version in world.published]
    assert numbers == sorted(set(numbers)), "a drafter twice, or an older one"
    # Of two in one moment only the newer one comes.
    assert max(numbers, default=0) == world.coordinator.metrics()["published"], "one is left out"
    blobs = [version.weights.blob for version in world.published]
    assert len(set(blobs)) == len(blobs), "the same drafter published twice"
    assert world.layer.num_faults
    assert not world.layer.wrong


@pytest.mark.parametrize("seeds", [*batches(25), KNOWN], ids=str)
def test_a_worker_is_back_in_time_and_a_drafter_is_published_once(seeds: Sequence[int]) -> None:
    for seed in seeds:
        try:
            run(one_seed(seed), limit_s=5000.0)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
