"""Rewards as samples end: in parallel, each with a time limit, none able to end a run.

A reward is a plain function of the problem and the response's text. It runs in worker processes:
one that hangs is killed at its time limit, one that crashes takes only its own process along, and
either counts as a zero, with one log line and a count by kind.

Only bytes, text and floats cross to a worker and back: what a user's function raises or returns
need not survive pickling. Workers are spawned, which imports `__main__` again in each: cheap for
`tlt`, which imports little before it has parsed its command line, but a Ray actor's `__main__`
imports ray, so a pool belongs into the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError
from tlt.tasks import gym
from tlt.tasks.gym import Problem, answer_in

logger = logging.getLogger(__name__)

RewardFunction = Callable[[Problem, str], float]

MAX_DEATHS = 2
"""Of processes that score a response: the first may have been killed from outside."""
MAX_BREAKDOWNS = 5
"""Of the whole pool while a response waits: others may have caused them."""
START_UP_S = 60.0
"""What a worker may take to start."""


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    fault: str | None = None
    """Why the value is a zero the response did not earn: timeout, crash, error, not a number."""
    detail: str = ""
    """What exactly happened."""


class RewardPool:
    """Worker processes that score responses, for one event loop."""

    def __init__(
        self, function: RewardFunction, num_workers: int = 1, timeout_s: float = 10.0
    ) -> None:
        try:
            self._function = pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"reward.function: other processes cannot import {function!r}: {error}; define "
                "it at the top level of a module, e.g. my_rewards:score"
            ) from error
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        # The rest waits here: what a pool was given is lost with it when it breaks down.
        self._places = asyncio.Semaphore(2 * num_workers)
        self._stalled_s = 3 * timeout_s + START_UP_S
        self._pool = self._started()
        self._closed = False
        self.faults: Counter[str] = Counter()

    async def score(self, problem: Problem, response: str) -> Reward:
        try:
            payload = pickle.dumps((self._function, problem, response))
        except Exception as error:  # whatever objects an entry holds
            return self._fault("error", problem, f"cannot be sent to a process: {error}")
        async with self._places:
            return await self._score(problem, payload)

    async def _score(self, problem: Problem, payload: bytes) -> Reward:
        from pebble import ProcessExpired

        deaths = breakdowns = 0
        while True:
            pool = self._pool
            try:
                value, what = await self._answer(pool, payload)
                break
            except TimeoutError:
                return self._fault("timeout", problem, f"took more than {self._timeout_s:g} s")
            except ProcessExpired as error:
                deaths += 1
                if deaths == MAX_DEATHS:
                    what = f"its process ended twice, with {error.exitcode}"
                    return self._fault("crash", problem, what)
            except RuntimeError as error:  # also of a pool that was found broken
                if self._closed:
                    raise
                breakdowns += 1
                if breakdowns == MAX_BREAKDOWNS:
                    return self._fault("crash", problem, f"its processes do not start: {error}")
                self._replace(pool, error)
        if value is None:
            return self._fault("error", problem, what)
        if not math.isfinite(value):
            return self._fault("not a number", problem, f"returned {what}")
        return Reward(value)

    async def _answer(self, pool: Any, payload: bytes) -> tuple[float | None, str]:
        future = asyncio.wrap_future(
            pool.schedule(_call, args=[payload, self._timeout_s], timeout=self._timeout_s)
        )
        try:
            # The limit of a task counts from its start; a pool that lost it never starts it.
            await asyncio.wait({future}, timeout=self._stalled_s)
            if not future.done():
                raise BrokenProcessPool(f"no answer in {self._stalled_s:g} s")
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the processes. Nothing may be waiting for a score."""
        self._closed = True
        self._pool.stop()
        self._pool.join()

    def _started(self) -> Any:
        try:
            from pebble import ProcessPool
        except ImportError as error:
            raise ConfigError(
                "rewards are computed by pebble, which is not installed; run: "
                "pip install 'tlt-rl[train]'"
            ) from error
        # Spawned: a fork would inherit the threads and locks of a process full of torch and Ray.
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=_prepare,
            initargs=[os.getpid(), self._function],
            context=multiprocessing.get_context("spawn"),
        )

    def _replace(self, broken: Any, error: RuntimeError) -> None:
        """A pool breaks down when an idle process of it is killed. The first to see it acts."""
        if broken is not self._pool:
            return
        logger.warning("reward processes are started again: %s", error or "all ended")
        self._pool = self._started()
        broken.stop()
        # Not here: it waits for threads and processes.
        threading.Thread(target=broken.join, daemon=True).start()

    def _fault(self, kind: str, problem: Problem, what: str) -> Reward:
        self.faults[kind] += 1
        logger.warning("reward of %s counts as 0: %s", problem.problem_id, what)
        return Reward(0.0, kind, what)


def reward_function(name: str, from_file: bool) -> RewardFunction:
    """What `reward.function` names, for problems of a task or of a file."""
    if name == "auto":
        name = "math" if from_file else "gym"
    if name == "gym":
        if from_file:
            raise ConfigError(
                "reward.function: gym scores tasks of reasoning-gym, not files; e.g. math"
            )
        return gym.score
    if name == "exact":
        return exact_score
    if name == "math":
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "reward.function: math needs math-verify, which is not installed; run: "
                "pip install 'tlt-rl[train]'"
            )
        return math_score
    return named_function(name)


def named_function(name: str) -> RewardFunction:
    """A user's reward function, given as `module:function`."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(
            f"reward.function: {name!r} is not gym, exact, math or module:function; "
            "e.g. my_rewards:score"
        )
    # Last, so that no file there hides a library. Workers get this path when they start.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(
            f"reward.function: {name!r}: cannot import {module_name}: "
            f"{type(error).__name__}: {error}; it must be installed or stand in {here}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if callable(value)]
        known = [each for each in known if not each.startswith("_")][:10]
        raise ConfigError(
            f"reward.function: {name!r}: {module_name} has no function {function_name}; "
            f"it has: {', '.join(known) or 'none'}"
        )
    return function


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def exact_score(problem: Problem, text: str) -> float:
    """1 if what stands in the last <answer> tags is the answer, to the letter.

    The scoring of many reasoning-gym tasks gives part of the reward for answers that merely contain
    the right one, which a policy learns to exploit.
    """
    return float(answer_in(text) == problem.answer)


def math_score(problem: Problem, text: str) -> float:
    """1 if the response is mathematically equal to the answer, as math-verify sees it.

    It reads boxed LaTeX best: unboxed it takes 10^{20} for 10, and passes over <answer> tags.
    """
    from math_verify import parse, verify

    # It warns that its own time limits, which need signals, are off: the pool has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"\\boxed{{{problem.answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the right answer {problem.answer!r}")
    answer = answer_in(text)
    said = text if answer is None else f"\\boxed{{{answer}}}"
    return float(verify(gold, parse(said, parsing_timeout=None), timeout_seconds=None))


LIBRARIES: dict[RewardFunction, str] = {gym.score: "reasoning_gym", math_score: "math_verify"}
"""What our own rewards import when they are first called."""


def _prepare(parent: int, function: bytes) -> None:
    """In a worker, as it starts: import what it needs before any time limit runs."""
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    with contextlib.suppress(Exception):  # a call will say what it is
        library = LIBRARIES.get(pickle.loads(function))
        if library is not None:
            importlib.import_module(library)


def _end_with(parent: int) -> None:
    """End this process with its parent, also when that is killed and can tell nobody."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _call(payload: bytes, timeout_s: float) -> tuple[float | None, str]:
    """In a worker: the value, or none and what was raised; nan for what is not a number."""
    # The watch above needs the interpreter lock, which a regular expression may hold for ever.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + 10.0)
    try:
        function, problem, response = pickle.loads(payload)
        value = pickle.loads(function)(problem, response)
        return (float(value), "") if is_number(value) else (math.nan, repr(value)[:200])
    except BaseException as error:  # SystemExit too: it would end the process
        return None, f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
