"""Makes work take as long as on emulated hardware, and counts what took longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

JITTER = 0.02
"""Share of its time by which work may be late without counting as an overrun."""
SLICE_S = 0.02
"""Longest wait that cannot be interrupted."""


class Pace:
    """Waits for the end of emulated time. Without a dilation, nothing waits or counts."""

    def __init__(
        self,
        dilation: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._dilation = dilation
        self._clock = clock
        self._sleep = sleep
        self.late = 0
        """Pieces of work that took longer than their time."""
        self.late_s = 0.0

    def wait(
        self, started_s: float, seconds: float, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when work that began at `started_s` has taken its `seconds`, dilated."""
        if not self._dilation:
            return
        due_s = seconds * self._dilation
        while (left_s := started_s + due_s - self._clock()) > 0 and not should_stop():
            self._sleep(min(left_s, SLICE_S))
        self._count(self._clock() - started_s - due_s, due_s)

    @contextmanager
    def takes(self, seconds: float) -> Iterator[None]:
        """Let the work inside take its `seconds`, dilated."""
        started_s = self._clock()
        yield
        self.wait(started_s, seconds)

    def left_s(self, taken_s: float, seconds: float) -> float:
        """Return how long to wait after work that took `taken_s`, for callers that wait
        elsewhere."""
        due_s = seconds * self._dilation
        if self._dilation:
            self._count(taken_s - due_s, due_s)
        return max(0.0, due_s - taken_s)

    def _count(self, over_s: float, due_s: float) -> None:
        self.late += over_s > JITTER * due_s
        self.late_s += max(0.0, over_s)
