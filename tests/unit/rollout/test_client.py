"""Engines that the pool no longer trusts, and samples that it waits for and no engine has."""

import asyncio
import inspect
from typing import Any, cast

import pytest

from tlt.config.rollout import PoolConfig
from tlt.errors import EngineError, EngineGone
from tlt.rollout.client import Engine, EngineClient, Progress
from tlt.rollout.engine import RolloutEngine


class Slow:
    """An engine whose answers come when the test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def call(self, command: Any, *args: Any) -> Any:
        return await self.answer

    async def stop(self, graceful: bool) -> None:
        self.answer.set_exception(EngineError("engine-0 is shut down"))


async def under_way(call: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_what_an_engine_says_that_is_being_replaced_does_not_count() -> None:
    """It may have failed to take the new policy, and then has samples of the old one."""
    slow = Slow()
    engine = EngineClient("engine-0", cast(Any, slow), PoolConfig(num_engines=1))
    taking = await under_way(engine.call(Engine.take_finished, 1.0))
    engine.mark_failed("it did not take new weights")
    slow.answer.set_result(["a sample of the old policy"])
    with pytest.raises(EngineGone, match="new weights"):
        await taking


async def test_a_stopped_engine_does_not_speak_against_the_call() -> None:
    """Otherwise new weights that all engines miss, because all are replaced, would be wrong."""
    engine = EngineClient("engine-0", cast(Any, Slow()), PoolConfig(num_engines=1))
    loading = await under_way(engine.call(Engine.update_policy, {}, 1))
    await engine.stop(graceful=False)
    with pytest.raises(EngineGone, match="it is stopped"):
        await loading


def test_a_sample_that_is_missing_twice_is_lost() -> None:
    now_s = -5.0
    progress = Progress(every_s=10.0, clock=lambda: now_s)
    now_s = 0.0
    assert not progress.is_due(has_delivered=True)
    now_s = 9.0
    assert not progress.is_due(has_delivered=False)
    now_s = 10.0
    assert progress.is_due(has_delivered=False)
    progress.compare("engine-0", {"a", "b"}, ["a"])  # b may be on its way
    assert not progress.is_due(has_delivered=False)
    now_s = 20.0
    assert progress.is_due(has_delivered=False)
    progress.compare("engine-0", {"a", "b", "c"}, ["a", "b"])
    now_s = 30.0
    assert progress.is_due(has_delivered=False)
    with pytest.raises(EngineError, match="engine-0 lost 1 samples"):
        progress.compare("engine-0", {"a", "c"}, ["a"])


def test_every_command_has_a_deadline_and_every_engine_has_every_command() -> None:
    commands = {name: f for name, f in vars(Engine).items() if not name.startswith("_")}
    assert len(commands) > 20
    for name, command in commands.items():
        assert command.deadline in ("health", "command", "swap"), name
        own = inspect.signature(getattr(RolloutEngine, name))
        assert own == inspect.signature(command), name


async def test_a_drafter_swap_has_a_shorter_limit_than_other_commands() -> None:
    slow = Slow()
    limits = PoolConfig(health_timeout_s=0.01, command_timeout_s=0.02)
    engine = EngineClient("engine-0", cast(Any, slow), limits)
    with pytest.raises(EngineGone, match=r"update_drafter within 0\.02 s"):
        await engine.call(Engine.update_drafter, {}, 1)
