"""Code that users bring: functions that settings name as `module:function`, and a time limit.

Task parameters, modules and chat templates are programs, and may never end. The limit works in the
main thread of a process, where all commands check their input; in other threads there is none. Code
that hangs inside a C function without returning to Python is not stopped.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tlt.errors import ConfigError, Terminated

F = TypeVar("F", bound=Callable[..., Any])

IMPORT_S = 60.0
"""Seconds that a user's module may take to be imported."""
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
        if left_s:  # restart the timer that ran before
            rest_s = max(left_s - (time.monotonic() - started_s), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, rest_s, interval_s)


def chosen_function(key: str, name: str, known: Mapping[str, F], example: str) -> F:
    """Return the function that a setting names: a known one, or a user's as `module:function`.

    The user's module may lie in the current folder. Errors name the setting.
    """
    if name in known:
        return known[name]
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(
            f"{key}: {name!r} is not {', '.join(known)} or module:function; e.g. {example}"
        )
    here = import_from(Path.cwd())
    too_slow = (
        f"{key}: {name!r}: importing {module_name} takes more than {IMPORT_S:g} s; its top "
        "level should only define things; do slow work inside the function"
    )
    with time_limit(IMPORT_S, too_slow):
        try:
            module = importlib.import_module(module_name)
        except (KeyboardInterrupt, Terminated, OutOfTime):
            raise
        except BaseException as error:  # a user's module may raise anything, and call sys.exit
            raise ConfigError(
                f"{key}: {name!r}: cannot import {module_name}: {type(error).__name__}: {error}; "
                f"install it, or put it into {here}"
            ) from error
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        there = [each for each, value in vars(module).items() if callable(value)]
        there = [each for each in there if not each.startswith("_")][:10]
        raise ConfigError(
            f"{key}: {name!r}: {module_name} has no function {function_name}; "
            f"it has: {', '.join(there) or 'none'}"
        )
    return function


def import_from(folder: Path) -> str:
    """Make modules in a folder importable; last in order, so that no file there hides a library."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return str(folder)
