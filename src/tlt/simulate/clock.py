"""Simulated time for asyncio code.

The coordinator, its leases, timers and timeouts are asyncio code and run unchanged on this loop.
Waiting costs no time: when no task can continue, the clock jumps to the next timer. The simulator
needs no other discrete-event core.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """All tasks wait, and no timer will wake one."""


class _Jump(selectors.SelectSelector):
    """A selector that moves the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("no timer is set and no task can continue")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in simulated time from 0."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def now_s() -> float:
    """Return the simulated time in seconds."""
    return asyncio.get_running_loop().time()
