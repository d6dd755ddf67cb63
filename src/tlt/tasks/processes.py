"""Processes in which users' code runs: in parallel, each call within a time limit.

A call that hangs is killed at its limit, with all processes it started, and one that crashes ends
only its own process. Arguments
and results are bytes, text and numbers, because what users' code raises or returns may not survive
pickling. Workers are spawned, so each imports `__main__` again. That is cheap for `tlt`, which
imports little before it has parsed its command line. A Ray actor's `__main__` imports ray, so the
processes belong to the driver.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tlt.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_BREAKDOWNS = 5
"""Breakdowns of all processes after which a call counts as a crash: other calls may have caused
some."""
START_UP_S = 60.0
"""Seconds a worker may take to start."""


class Fault(Exception):
    """A call without a result; `kind` is `timeout` or `crash`."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class Processes:
    """Worker processes for one event loop.

    `prepare` is called in every new worker, before any time limit runs. `max_deaths` is the number
    of worker deaths that make a call a crash. `what` names the workers in messages. Calls that
    `outlive` the caller end in time even if the caller is cancelled or killed.
    """

    def __init__(
        self,
        what: str,
        num_workers: int,
        timeout_s: float,
        prepare: Callable[..., None],
        prepare_args: Sequence[Any],
        max_deaths: int,
        outlive: bool = False,
    ) -> None:
        self._what = what
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._prepare = prepare
        self._prepare_args = prepare_args
        self._max_deaths = max_deaths
        self._outlive = outlive
        # Further calls wait here: a pool that breaks down loses all calls it holds.
        self._places = asyncio.Semaphore(2 * num_workers)
        self.stall_timeout_s = 3 * timeout_s + START_UP_S
        """Seconds without an answer after which the processes count as broken."""
        self._pool = self._started()
        self._closed = False

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns in a worker; `Fault` if it does not return."""
        async with self._places:
            return await self._call(function, args)

    async def _call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        from pebble import ProcessExpired

        deaths = breakdowns = 0
        while True:
            pool = self._pool
            try:
                return await self._answer(pool, function, args)
            except TimeoutError:
                raise Fault("timeout", f"took more than {self._timeout_s:g} s") from None
            except ProcessExpired as error:
                deaths += 1
                if deaths == self._max_deaths:
                    times = " twice" if deaths > 1 else ""
                    what = f"its process ended{times}, with {error.exitcode}"
                    raise Fault("crash", what) from None
            except RuntimeError as error:  # a broken pool raises one too
                if self._closed:
                    raise
                breakdowns += 1
                if breakdowns == MAX_BREAKDOWNS:
                    raise Fault("crash", f"its processes do not start: {error}") from None
                self._replace(pool, error)

    async def _answer(self, pool: Any, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        scheduled = pool.schedule(
            _run, args=[function, self._timeout_s, args], timeout=self._timeout_s
        )
        future = asyncio.wrap_future(scheduled)
        try:
            # A task's time limit counts from its start, and a pool never starts a task it has lost.
            await asyncio.wait({future}, timeout=self.stall_timeout_s)
            if not future.done():
                raise BrokenProcessPool(f"no answer in {self.stall_timeout_s:g} s")
            return future.result()
        finally:
            if self._outlive:  # a call may run before the pool knows that it does
                future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            else:
                future.cancel()  # and kill its process if it runs

    def close(self, wait_s: float = 0.0) -> None:
        """End the processes, calls under way after `wait_s`. No caller may still wait."""
        self._closed = True
        if wait_s:
            self._pool.close()
            try:
                self._pool.join(wait_s)
                return
            except TimeoutError:
                pass
        self._pool.stop()
        self._pool.join()

    def _started(self) -> Any:
        try:
            from pebble import ProcessPool
        except ImportError as error:
            raise ConfigError(
                f"{self._what} are run by pebble, which is not installed; run: "
                "pip install 'tlt-rl[train]'"
            ) from error
        # Spawned, because a fork would inherit the threads and locks of torch and Ray.
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=_start,
            initargs=[os.getpid(), self._outlive, self._prepare, self._prepare_args],
            context=multiprocessing.get_context("spawn"),
        )

    def _replace(self, broken: Any, error: RuntimeError) -> None:
        """Replace a pool, which breaks down when one of its idle processes is killed.

        The first caller that notices replaces the pool; later ones find a new one.
        """
        if broken is not self._pool:
            return
        logger.warning("processes of %s are started again: %s", self._what, error or "all ended")
        self._pool = self._started()
        broken.stop()
        # In a thread, because `join` waits for threads and processes.
        threading.Thread(target=broken.join, daemon=True).start()


_busy = threading.Lock()
"""Held in a worker while it runs a call."""


def _start(parent: int, outlive: bool, prepare: Callable[..., None], args: Sequence[Any]) -> None:
    os.setsid()  # a group of its own, with all that its calls start
    signal.signal(signal.SIGTERM, _end_group)
    threading.Thread(target=_end_with, args=[parent, outlive], daemon=True).start()
    prepare(*args)


def _end_group(*_: Any) -> None:
    os.killpg(0, signal.SIGKILL)


def _end_with(parent: int, outlive: bool) -> None:
    """End this process once its parent has ended, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    if outlive:
        _busy.acquire()  # a running call has its own time limit
    _end_group()


def _run(function: Callable[..., Any], timeout_s: float, args: Sequence[Any]) -> Any:
    # `_end_with` needs the interpreter lock, which a regular expression may hold forever.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + 10.0)
    try:
        with _busy:
            return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
