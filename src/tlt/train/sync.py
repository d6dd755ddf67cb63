"""The weight sync: the learner's policy into all engines, and the memory of shared GPUs meanwhile.

`HostSync` writes the policy to shared memory, and engines load it from there: the way of CPU
engines. `DeviceSync` lets the learner send it from GPU to GPU, by vLLM's own transfer: `ipc` where
learner and engines share GPUs, `nccl` where they do not. Both leave the device's memory in the same
order: the learner frees its caches, the engines take the memory of their weights, the new policy
comes, the learner frees its caches again, and the engines take the memory of the KV cache.
"""

from __future__ import annotations

from tlt.config.train import TrainConfig, transfer
from tlt.harvest.published import EMBEDDING, HEAD
from tlt.learner.group import LearnerGroup
from tlt.node.weights import SharedWeights
from tlt.rollout.actor import policy_route
from tlt.rollout.client import Engine
from tlt.rollout.pool import RolloutPool


def weight_sync(config: TrainConfig, pool: RolloutPool, learner: LearnerGroup) -> HostSync:
    """Return the weight sync of a run."""
    on_gpu = bool(config.engine.num_gpus or config.emulate.hardware)
    shares_gpus = on_gpu and config.placement.kind == "colocated"
    sleeps = shares_gpus or (on_gpu and config.tlt.harvests)
    way = transfer(config)
    if way == "shared_memory":
        return HostSync(pool, learner, config.policy.dtype, shares_gpus, sleeps)
    return DeviceSync(pool, learner, config.policy.dtype, shares_gpus, sleeps, way)


class HostSync:
    """The weight sync through shared memory."""

    def __init__(
        self,
        pool: RolloutPool,
        learner: LearnerGroup,
        dtype: str,
        shares_gpus: bool,
        sleeps: bool,
    ) -> None:
        self._pool = pool
        self._learner = learner
        self._dtype = dtype
        self._shares_gpus = shares_gpus
        self._sleeps = sleeps
        """Whether engines may be asleep: for a learner on their GPUs, or for trainers."""

    async def engines_sleep(self) -> None:
        """Hand the memory of shared GPUs to the learner; engines drop their policy."""
        if self._shares_gpus:
            await self._pool.call_all(Engine.sleep, keep_policy=False)

    async def sync(self, version: int) -> SharedWeights:
        """Load the learner's policy into all engines, and wake them.

        Return the policy in shared memory, or at least its embedding and head.
        """
        weights = await self._learner.publish(self._dtype)  # ranks then free their caches
        if self._sleeps:
            await self._pool.call_all(Engine.wake_weights)
        await self._pool.update_policy(weights, version)
        if self._sleeps:
            await self._pool.call_all(Engine.wake)
        return weights

    def close(self) -> None:
        """Do nothing: the pool removes the file."""


class DeviceSync(HostSync):
    """The weight sync from GPU to GPU."""

    def __init__(
        self,
        pool: RolloutPool,
        learner: LearnerGroup,
        dtype: str,
        shares_gpus: bool,
        sleeps: bool,
        way: str,
    ) -> None:
        super().__init__(pool, learner, dtype, shares_gpus, sleeps)
        self._way = way
        self._ends: SharedWeights | None = None

    async def sync(self, version: int) -> SharedWeights:
        """Load the learner's policy into all engines, and wake them."""
        await self._learner.free_cache()
        if self._sleeps:
            await self._pool.call_all(Engine.wake_weights)
        async with self._pool.policy_comes(version, self._publish) as processes:
            route = policy_route(self._way, processes)
            ends = await self._learner.send(route, self._dtype, version, (EMBEDDING, HEAD))
        self.close()
        self._ends = ends
        if self._sleeps:
            await self._pool.call_all(Engine.wake)  # the learner has freed its caches
        return ends

    def close(self) -> None:
        """Remove the file with the policy's embedding and head."""
        if self._ends is not None:
            self._ends.close()

    async def _publish(self) -> SharedWeights:
        """Write the present policy for an engine that replaces a lost one."""
        return await self._learner.publish(self._dtype)
