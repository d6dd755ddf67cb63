"""An engine as the pool holds it: a handle that can be condemned.

The pool replaces an engine that it no longer trusts, such as one that did not take its requests.
It condemns the engine: every call to it, also one under way, raises `EngineGone`, and the engine's
task in the pool starts a successor. That does not depend on what the engine still answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tlt.contracts import Sample, SampleRequest
from tlt.errors import EngineGone
from tlt.rollout.handle import EngineHandle

T = TypeVar("T")


class WatchedEngine:
    """An `EngineHandle` on an engine that can be condemned."""

    def __init__(self, name: str, engine: EngineHandle, health_timeout_s: float) -> None:
        self.name = name
        self.engine = engine
        self._health_timeout_s = health_timeout_s
        self._condemned = asyncio.Event()
        self._why = ""

    def condemn(self, why: str) -> None:
        """Let all calls fail from now on, so that the pool replaces the engine."""
        self._why = self._why or why
        self._condemned.set()

    async def start(self) -> dict[str, Any]:
        return await self.engine.start()

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        await self._call("submit", self.engine.submit(requests))

    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        return await self._call("withdraw", self.engine.withdraw(sample_ids))

    async def take_finished(self) -> list[Sample]:
        limit_s = self._health_timeout_s
        return await self._call("take_finished", self.engine.take_finished(), limit_s)

    async def call(self, method: str, *args: Any) -> Any:
        return await self._call(method, self.engine.call(method, *args))

    async def stop(self, graceful: bool) -> None:
        await self.engine.stop(graceful)

    async def _call(
        self, method: str, call: Coroutine[Any, Any, T], limit_s: float | None = None
    ) -> T:
        """Return the answer, or raise when the engine is condemned or the time is over."""
        answer = asyncio.ensure_future(call)
        condemned = asyncio.ensure_future(self._condemned.wait())
        try:
            both: set[asyncio.Future[Any]] = {answer, condemned}
            await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if not condemned.done():
                self.condemn(f"no answer to {method} within {limit_s:g} s")
            raise EngineGone(f"{self.name} is replaced: {self._why}")
        finally:
            answer.cancel()
            condemned.cancel()
