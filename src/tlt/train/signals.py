"""The end of a run by a signal: SIGTERM, which Slurm and Kubernetes send, or SIGINT (Ctrl-C).

1. The first signal asks the run to end. An RL step whose policy update has begun is finished; an
   earlier one is abandoned, and a resumed run takes it again from its start.
2. The run then finishes a checkpoint that is being written, and writes one of the last finished RL
   step if `run.checkpoint_on_term` asks for it.
3. The process ends with 128 + the signal's number: 143 or 130.
4. After `run.term_timeout_s` the process ends with that code, even with work unfinished. A second
   signal ends it immediately. Half-written checkpoints are hidden, and the next start removes them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tlt.errors import Terminated

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Termination:
    """Handles the signals while its context lasts. Enter it in the main thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._received: int | None = None
        self._callback: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Termination:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals over, also from a library that installed its own handlers."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def raise_if_requested(self, done: str = "") -> None:
        """Raise `Terminated` if a signal has come; `done` says how far the run came."""
        if self._received is not None:
            raise Terminated(self._received, done)

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Answer a signal by a call in the running event loop, instead of an exception.

        A signal that came earlier is handled immediately.
        """
        loop, outer = asyncio.get_running_loop(), self._callback
        self._callback = lambda: loop.call_soon_threadsafe(callback)
        if self._received is not None:
            callback()
        try:
            yield
        finally:
            self._callback = outer

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code = 128 + number
        if self._received is not None:
            os._exit(code)
        self._received = number
        watchdog = threading.Timer(self._timeout_s, os._exit, [code])
        watchdog.daemon = True
        watchdog.start()
        if self._callback is None:
            raise Terminated(number)
        self._callback()


async def finish_or_abandon(
    work: Coroutine[Any, Any, None], stop: asyncio.Event, may_abandon: Callable[[], bool]
) -> bool:
    """Do the work and return True; return False if it was abandoned because of `stop`.

    Work that must not be abandoned when `stop` is set continues to its end.
    """
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done() and may_abandon():
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)
            if doing.cancelled():
                return False
        await doing
        return True
    finally:
        stopping.cancel()
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
