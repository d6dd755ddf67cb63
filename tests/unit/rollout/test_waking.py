"""Engines of a pool that sleep, and wake with the policy that they dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engines import Engines, generate, started, until

from tlt.config.rollout import PoolConfig
from tlt.errors import LearnerLost
from tlt.rollout.pool import RolloutPool


class Weights:
    """A policy in shared memory."""

    def __init__(self, version: int) -> None:
        self.version = version

    def manifest(self) -> dict[str, Any]:
        return {"policy": self.version}

    def close(self) -> None:
        pass


async def test_a_sleeping_engine_keeps_only_a_policy_that_the_pool_cannot_load_again() -> None:
    made = Engines()
    async with started(made, num_engines=1) as pool:
        engine = made["engine-0"]

        async def nap() -> list[str]:
            engine.calls.clear()
            await pool.sleep_engine("engine-0")
            await pool.wake_engine("engine-0")
            return [name for name, _ in engine.calls]

        assert await nap() == ["sleep", "wake"]
        assert engine.options["sleep"] == {"keep_policy": True}

        async def publish() -> Any:
            return Weights(1)

        async with pool.policy_comes(1, publish):
            pass
        assert await nap() == ["sleep", "update_policy", "wake"]
        assert engine.options["sleep"] == {"keep_policy": False}
        assert ("update_policy", ({"policy": 1}, 1)) in engine.calls

        await pool.sleep_engine("engine-0")
        async with pool.policy_comes(2, publish):  # loads the engine's next policy
            pass
        engine.calls.clear()
        await pool.wake_engine("engine-0")
        assert [name for name, _ in engine.calls] == ["wake"]


async def test_engines_that_wake_together_share_one_written_policy() -> None:
    made, written = Engines(), []
    async with started(made, num_engines=4) as pool:

        async def publish() -> Any:
            await asyncio.sleep(0.01)
            written.append(Weights(1))
            return written[-1]

        async with pool.policy_comes(1, publish):
            pass
        await asyncio.gather(*map(pool.sleep_engine, pool.engines))
        await asyncio.gather(*map(pool.wake_engine, pool.engines))
        assert len(written) == 1
        assert len(made.commands("update_policy")) == 4


async def test_samples_whose_engine_is_waking_are_not_lost() -> None:
    made, awake = Engines(), asyncio.Event()

    class Harvest:
        def ready(self, *_: Any) -> None: ...

        def idle(self, *_: Any) -> None: ...

        async def needed(self, engine: str) -> None:
            await awake.wait()

    pool = RolloutPool(PoolConfig(num_engines=1, health_timeout_s=0.05), made)
    pool.idle.listener = Harvest()
    async with asyncio.timeout(30), pool:
        rollout = asyncio.create_task(generate(pool, 2))
        await asyncio.sleep(0.3)
        awake.set()
        await rollout
        assert pool.num_restarts == 0


async def test_without_a_learner_new_engines_wait_for_the_next_policy() -> None:
    made, lost = Engines(), [True]
    async with started(made, num_engines=1, max_restarts=1) as pool:

        async def publish() -> Any:
            if lost:
                raise LearnerLost("rank 0 is gone")
            return Weights(2)

        async with pool.policy_comes(1, publish):
            pass
        await pool.sleep_engine("engine-0")
        rollout = asyncio.create_task(generate(pool, 2))
        with pytest.raises(LearnerLost):
            await pool.wake_engine("engine-0")
        made.set(dead=True)
        await until(lambda: "engine-0.1" in made)
        await asyncio.sleep(0.05)
        assert pool.num_restarts == 1
        lost.clear()
        async with pool._weights.policy_comes(2, publish):
            pass
        await rollout
        assert made.commands("update_policy") == [("engine-0.1", {"policy": 2})]
