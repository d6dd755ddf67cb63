"""An engine as the pool holds it: every call has a time limit, and a late one condemns the engine.

The pool replaces an engine that it no longer trusts: one that did not answer in time, or did not
take its requests. It condemns the engine: every call to it, also one under way, raises
`EngineGone`, and the engine's task in the pool starts a successor. That does not depend on what the
engine still answers. Commands get `pool.command_timeout_s`, all else `pool.health_timeout_s`.
`Progress` finds samples that were lost although every call was answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from tlt.config.rollout import PoolConfig
from tlt.contracts import Sample, SampleRequest
from tlt.errors import EngineError, EngineGone
from tlt.rollout.handle import EngineHandle

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedEngine:
    """An `EngineHandle` whose calls end in time, with an answer or with an `EngineError`."""

    def __init__(self, name: str, engine: EngineHandle, limits: PoolConfig) -> None:
        self.name = name
        self.engine = engine
        self._limits = limits
        self._condemned = asyncio.Event()
        self._why = ""

    def mark_failed(self, why: str) -> None:
        """Let all calls fail from now on, so that the pool replaces the engine."""
        self._why = self._why or why
        self._condemned.set()

    async def start(self) -> dict[str, Any]:
        """Start the engine; one that does not start in time would not start again."""
        limit_s = self._limits.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self.engine.start()
        except TimeoutError:
            raise EngineError(
                f"{self.name} did not start within {limit_s:.0f} s; are enough cores or GPUs free "
                "in the cluster? Start fewer engines, or raise pool.start_timeout_s"
            ) from None

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        await self._call("submit", self.engine.submit(requests))

    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        return await self._call("withdraw", self.engine.withdraw(sample_ids))

    async def take_finished(self) -> list[Sample]:
        return await self._call("take_finished", self.engine.take_finished())

    async def call(self, method: str, *args: Any, limit_s: float | None = None) -> Any:
        most_s = self._limits.command_timeout_s
        limit_s = most_s if limit_s is None else min(limit_s, most_s)
        return await self._call(method, self.engine.call(method, *args), limit_s)

    async def stop(self, graceful: bool) -> None:
        """End the engine; go on after the time limit, because its place needs a successor."""
        self.mark_failed("it is stopped")  # its last answers would be refusals, and blame the call
        try:
            async with asyncio.timeout(self._limits.health_timeout_s):
                await self.engine.stop(graceful)
        except TimeoutError:
            logger.warning("%s did not stop in time, and may still hold its device", self.name)

    async def _call(
        self, method: str, call: Coroutine[Any, Any, T], limit_s: float | None = None
    ) -> T:
        """Return the answer, or raise when the engine is condemned or the time is over."""
        limit_s = limit_s or self._limits.health_timeout_s
        answer = asyncio.ensure_future(call)
        answer.add_done_callback(_consume_exception)
        condemned = asyncio.ensure_future(self._condemned.wait())
        try:
            both: set[asyncio.Future[Any]] = {answer, condemned}
            await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            # First: what an engine says that is being replaced does not count, also if it comes in
            # the same moment. Its samples may be those of an old policy.
            if not self._condemned.is_set():
                if answer.done():
                    return answer.result()
                self.mark_failed(f"no answer to {method} within {limit_s:g} s")
            raise EngineGone(f"{self.name} is replaced: {self._why}")
        finally:
            answer.cancel()
            condemned.cancel()


def _consume_exception(answer: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not answer.cancelled():
        answer.exception()


class Progress:
    """Finds samples that the pool waits for and that the engine does not have.

    An engine that delivers nothing for `every_s` is asked what it holds. A sample that is missing
    twice in a row was lost on the way: a request under way arrives in the meantime, or condemns the
    engine.
    """

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._since_s = clock()
        self._missing: set[str] = set()

    def is_due(self, has_delivered: bool) -> bool:
        """Return whether to ask the engine; call this after every answer of `take_finished`."""
        now_s = self._clock()
        if has_delivered:
            self._since_s, self._missing = now_s, set()
        if now_s - self._since_s < self._every_s:
            return False
        self._since_s = now_s
        return True

    def compare(self, name: str, expected: Collection[str], held: Collection[str]) -> None:
        """Raise if the engine still does not have what the pool waits for."""
        missing = set(expected) - set(held)
        lost, self._missing = missing & self._missing, missing
        if lost:
            raise EngineError(
                f"the pool waits for {len(lost)} samples of {name}, such as {min(lost)}, and the "
                f"engine, which holds {len(held)} others, does not have them"
            )
