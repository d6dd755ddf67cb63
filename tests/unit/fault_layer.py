"""A layer of seeded faults between the driver and its actors, in simulated time.

`Layer.call` takes a call to an actor. The call may be dropped, delayed, delivered twice, answered
by an error, delivered and never answered, or the actor may die of it. Work goes on in the actor
whatever becomes of the caller, and every call to a dead actor fails: as in Ray.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar, cast

from tlt.simulate import clock

T = TypeVar("T")

NUM_SEEDS = int(os.environ.get("TLT_FAULT_SEEDS", "50"))
FAULTS = ("drop", "delay", "duplicate", "fail", "fail_late", "hang", "die")


class Actor:
    """The life of an actor: `dead` is set when its process has ended."""

    def __init__(self, kill_s: float = 0.0) -> None:
        self.dead = asyncio.Event()
        self._kill_s = kill_s

    async def kill(self) -> None:
        await asyncio.sleep(self._kill_s)
        self.dead.set()


class Layer:
    """What happens to the calls of one seed: each one has a fault with probability `rate`."""

    def __init__(self, seed: int | str, rate: float, max_delay_s: float = 1.0) -> None:
        self.rng = random.Random(seed)
        self.rate = rate
        self.left = math.inf
        """Faults that may still happen."""
        self.num_faults = 0
        self.wrong: list[BaseException] = []
        """Rules that were broken inside an actor."""
        self._max_delay_s = max_delay_s
        self._work: set[asyncio.Future[Any]] = set()

    def fault(self) -> str:
        """Return the fault of the next call; usually none."""
        if self.rng.random() >= self.rate or self.left <= 0:
            return ""
        self.num_faults += 1
        self.left -= 1
        return self.rng.choice(FAULTS)

    async def call(
        self,
        actor: Actor,
        work: Callable[[], Coroutine[Any, Any, T]],
        failed: Callable[[str], Exception],
        gone: Callable[[str], Exception],
    ) -> T:
        """Deliver a call to the actor, or do not; return its answer, or do not."""
        fault = self.fault()
        if fault == "delay":
            with suppress(TimeoutError):  # a death is known at once, whatever is on its way
                await asyncio.wait_for(actor.dead.wait(), self.rng.uniform(0, self._max_delay_s))
        if fault == "die":
            await actor.kill()
        if actor.dead.is_set():
            raise gone("the process is gone")
        if fault == "fail":
            raise failed("the call did not arrive")
        never = asyncio.ensure_future(asyncio.Event().wait())
        answer = never if fault == "drop" else self._begun(work())
        if fault == "duplicate":
            self._begun(work())
        death = asyncio.ensure_future(actor.dead.wait())
        try:
            waited = {death, never if fault == "hang" else answer}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if fault == "hang" or not answer.done():
                raise gone("the process is gone")
            if fault == "fail_late":
                raise failed("the answer did not arrive")
            return cast(T, answer.result())
        finally:
            never.cancel()
            death.cancel()

    def _begun(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start work in the actor, which ends by itself even if nobody waits for it."""
        begun = asyncio.ensure_future(work)
        self._work.add(begun)
        begun.add_done_callback(self._ended)
        return begun

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._work.discard(work)
        error = None if work.cancelled() else work.exception()  # its caller may have gone
        if isinstance(error, AssertionError):
            self.wrong.append(error)


class _Inline(ThreadPoolExecutor):
    """Runs what is handed to a thread at once: simulated time knows no threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Run a scene in simulated time; fail if it takes longer than `limit_s` of it."""

    async def scene() -> T:
        asyncio.get_running_loop().set_default_executor(_Inline())
        return await asyncio.wait_for(work, limit_s)

    return clock.run(scene())


def batches(at_once: int) -> Sequence[range]:
    """Return all seeds in ranges of `at_once`: one test each."""
    return [range(first, min(first + at_once, NUM_SEEDS)) for first in range(0, NUM_SEEDS, at_once)]
