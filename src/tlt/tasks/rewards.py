"""Score responses as they end: in parallel, each within a time limit, without risk to the run.

A reward is a plain function of the problem and the response's text. It runs in worker processes. A
reward that hangs is killed at its time limit, and a reward that crashes ends only its own process.
Either leaves the sample without a reward, with one log line and a count by kind.

Only bytes, text and floats cross to a worker and back, because what a user's function raises or
returns may not survive pickling. Workers are spawned, so each imports `__main__` again. That is
cheap for `tlt`, which imports little before it has parsed its command line. A Ray actor's
`__main__` imports ray, so the pool belongs into the driver.
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from tlt.errors import ConfigError
from tlt.tasks import gym
from tlt.tasks.gym import Problem, answer_in
from tlt.user_code import chosen_function

logger = logging.getLogger(__name__)

RewardFunction = Callable[[Problem, str], float]

MAX_DEATHS = 2
"""Worker deaths that make a response a crash: the first may have been a kill from outside."""
MAX_BREAKDOWNS = 5
"""Breakdowns of the whole pool that make a response a crash: others may have caused some."""
LARGEST = 1e15
"""Largest reward: the squares of larger ones, summed in float32, leave no gradient."""
START_UP_S = 60.0
"""Seconds a worker may take to start."""


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    fault: str | None = None
    """Why the response has no score: timeout, crash, error, not a number, or too large."""
    detail: str = ""
    """The fault in words."""


class RewardPool:
    """Worker processes that score responses, for one event loop."""

    def __init__(
        self,
        function: RewardFunction,
        num_workers: int,
        timeout_s: float,
        others: Iterable[RewardFunction] = (),
    ) -> None:
        """`function` scores what names no other; workers prepare for `others` as well."""
        self._function = _pickled(function)
        self._functions = [self._function, *map(_pickled, others)]
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        # Further responses wait here: a pool that breaks down loses all responses it holds.
        self._places = asyncio.Semaphore(2 * num_workers)
        self.stall_timeout_s = 3 * timeout_s + START_UP_S
        """Seconds without an answer after which a pool counts as broken."""
        self._pool = self._started()
        self._closed = False
        self.faults: Counter[str] = Counter()

    async def score(
        self, problem: Problem, response: str, function: RewardFunction | None = None
    ) -> Reward:
        chosen = self._function if function is None else _pickled(function)
        try:
            payload = pickle.dumps((chosen, problem, response))
        except Exception as error:  # an entry may hold any object
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
            except RuntimeError as error:  # a broken pool raises one too
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
        if abs(value) > LARGEST:
            what = f"returned {value:g}, and a reward is at most {LARGEST:g}"
            return self._fault("too large", problem, what)
        return Reward(value)

    async def _answer(self, pool: Any, payload: bytes) -> tuple[float | None, str]:
        future = asyncio.wrap_future(
            pool.schedule(_call, args=[payload, self._timeout_s], timeout=self._timeout_s)
        )
        try:
            # A task's time limit counts from its start, and a pool never starts a task it has lost.
            await asyncio.wait({future}, timeout=self.stall_timeout_s)
            if not future.done():
                raise BrokenProcessPool(f"no answer in {self.stall_timeout_s:g} s")
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the processes. No caller may still wait for a score."""
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
        # Spawned, because a fork would inherit the threads and locks of torch and Ray.
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=_prepare,
            initargs=[os.getpid(), self._functions],
            context=multiprocessing.get_context("spawn"),
        )

    def _replace(self, broken: Any, error: RuntimeError) -> None:
        """Replace a pool, which breaks down when one of its idle processes is killed.

        The first caller that notices replaces the pool; later ones find a new one.
        """
        if broken is not self._pool:
            return
        logger.warning("reward processes are started again: %s", error or "all ended")
        self._pool = self._started()
        broken.stop()
        # In a thread, because `join` waits for threads and processes.
        threading.Thread(target=broken.join, daemon=True).start()

    def _fault(self, kind: str, problem: Problem, what: str) -> Reward:
        self.faults[kind] += 1
        logger.warning("a sample of %s has no reward: %s", problem.problem_id, what)
        return Reward(0.0, kind, what)


def reward_function(name: str, from_file: bool) -> RewardFunction:
    """Return the function that `reward.function` names, for problems of a task or of a file."""
    if name == "auto":
        name = "math" if from_file else "gym"
    if name == "gym" and from_file:
        raise ConfigError(
            "reward.function: gym scores tasks of reasoning-gym, not files; e.g. math"
        )
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "reward.function: math needs math-verify, which is not installed; run: "
            "pip install 'tlt-rl[train]'"
        )
    return chosen_function("reward.function", name, REWARDS, "my_rewards:score")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def exact_score(problem: Problem, text: str) -> float:
    """Return 1 if the text in the last <answer> tags equals the answer, else 0.

    Many reasoning-gym tasks give part of the reward to answers that merely contain the right one,
    which a policy learns to exploit.
    """
    return float(answer_in(text) == problem.answer)


def math_score(problem: Problem, text: str) -> float:
    """Return 1 if math-verify finds the response equal to the answer, else 0.

    math-verify reads boxed LaTeX best: unboxed, it takes 10^{20} for 10 and ignores <answer> tags.
    """
    from math_verify import parse, verify

    # math-verify warns that its own time limits are off; the pool has its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"\\boxed{{{problem.answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the right answer {problem.answer!r}")
    answer = answer_in(text)
    said = text if answer is None else f"\\boxed{{{answer}}}"
    return float(verify(gold, parse(said, parsing_timeout=None), timeout_seconds=None))


REWARDS: dict[str, RewardFunction] = {"gym": gym.score, "exact": exact_score, "math": math_score}
LIBRARIES: dict[RewardFunction, str] = {gym.score: "reasoning_gym", math_score: "math_verify"}
"""Libraries that our own rewards import at their first call."""


def _pickled(function: RewardFunction) -> bytes:
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"reward.function: other processes cannot import {function!r}: {error}; define "
            "it at the top level of a module, e.g. my_rewards:score"
        ) from error


def _prepare(parent: int, functions: Iterable[bytes]) -> None:
    """Import a new worker's libraries before any time limit runs."""
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    for function in functions:
        with contextlib.suppress(Exception):  # the first call will report it
            library = LIBRARIES.get(pickle.loads(function))
            if library is not None:
                importlib.import_module(library)


def _end_with(parent: int) -> None:
    """End this process once its parent has ended, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _call(payload: bytes, timeout_s: float) -> tuple[float | None, str]:
    """Return a reward and ''; None and the error; or NaN and a result that is not a number."""
    # `_end_with` needs the interpreter lock, which a regular expression may hold forever.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + 10.0)
    try:
        function, problem, response = pickle.loads(payload)
        value = pickle.loads(function)(problem, response)
        return (float(value), "") if is_number(value) else (math.nan, repr(value)[:200])
    except BaseException as error:  # also SystemExit, which would end the process
        return None, f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
