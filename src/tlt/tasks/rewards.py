"""Score responses as they end: in parallel, each within a time limit, without risk to the run.

A reward is a plain function of the problem and the response's text. It runs in worker processes
(`processes`). A reward that hangs or crashes leaves the sample without a reward, with one log line
and a count by kind.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tlt.errors import ConfigError
from tlt.tasks import gym
from tlt.tasks.gym import Problem, answer_in
from tlt.tasks.processes import Fault, Processes
from tlt.user_code import chosen_function

logger = logging.getLogger(__name__)

RewardFunction = Callable[[Problem, str], float]

MAX_DEATHS = 2
"""Worker deaths that make a response a crash: the first may have been a kill from outside."""
LARGEST = 1e15
"""Largest reward: the squares of larger ones, summed in float32, leave no gradient."""


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
        functions = [self._function, *map(_pickled, others)]
        self.processes = Processes(
            *("rewards", num_workers, timeout_s, _prepare, [functions]), max_deaths=MAX_DEATHS
        )
        self.faults: Counter[str] = Counter()

    async def score(
        self, problem: Problem, response: str, function: RewardFunction | None = None
    ) -> Reward:
        chosen = self._function if function is None else _pickled(function)
        try:
            payload = pickle.dumps((chosen, problem, response))
        except Exception as error:  # an entry may hold any object
            return self._fault("error", problem, f"cannot be sent to a process: {error}")
        try:
            value, what = await self.processes.call(_call, payload)
        except Fault as fault:
            return self._fault(fault.kind, problem, str(fault))
        return self.checked(problem, value, what)

    def checked(self, problem: Problem, value: float | None, what: str) -> Reward:
        """Return a reward, or why there is none: `what` is the error, or the value that is not a
        number."""
        if value is None:
            return self._fault("error", problem, what)
        if not math.isfinite(value):
            return self._fault("not a number", problem, f"returned {what}")
        if abs(value) > LARGEST:
            what = f"returned {value:g}, and a reward is at most {LARGEST:g}"
            return self._fault("too large", problem, what)
        return Reward(value)

    def close(self) -> None:
        """End the processes. No caller may still wait for a score."""
        self.processes.close()

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


def _prepare(functions: Iterable[bytes]) -> None:
    """Import a new worker's libraries before any time limit runs."""
    for function in functions:
        with contextlib.suppress(Exception):  # the first call will report it
            library = LIBRARIES.get(pickle.loads(function))
            if library is not None:
                importlib.import_module(library)


def _call(payload: bytes) -> tuple[float | None, str]:
    """Return a reward and ''; None and the error; or NaN and a result that is not a number."""
    try:
        function, problem, response = pickle.loads(payload)
        value = pickle.loads(function)(problem, response)
        return (float(value), "") if is_number(value) else (math.nan, repr(value)[:200])
    except BaseException as error:  # also SystemExit, which would end the process
        return None, f"{type(error).__name__}: {error}"[:500]
