"""A time limit on code that users bring: task parameters, reward modules, chat templates.

Such code is a program, and may never end. The limit works in the main thread of a process, where
all commands check their input; in other threads there is none. Code that hangs inside a C function
without returning to Python is not stopped.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tlt.errors import ConfigError

AGAIN_S = 1.0
"""Seconds after which code that caught the end is ended again."""


class OutOfTime(BaseException):
    """The time is over. Not an `Exception`, which users' code may catch."""


@contextmanager
def time_limit(seconds: float, refusal: str) -> Iterator[None]:
    """Raise `ConfigError` with this refusal if the block takes longer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    active = True

    def end(number: int, frame: FrameType | None) -> None:
        if active:
            raise OutOfTime

    handler = signal.signal(signal.SIGALRM, end)
    started_s = time.monotonic()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    except OutOfTime:
        raise ConfigError(refusal) from None
    finally:
        active = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # somebody else's timer goes on
            rest_s = max(left_s - (time.monotonic() - started_s), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, rest_s, interval_s)
