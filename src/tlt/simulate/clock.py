"""Simulated time for asyncio code.

The coordinator, its leases, timers and timeouts are asyncio; on this loop they run unchanged, and
waiting costs nothing: when nobody can go on, the clock jumps to the next timer. That is all a
discrete-event core does, so there is no other one.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Everybody waits, and nothing will ever happen."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting, moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("no timer is set and nobody can go on")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in simulated time from 0."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()
