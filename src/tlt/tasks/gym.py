"""Generate and score problems of `reasoning-gym` tasks.

Task, seed, purpose and parameters determine the problems. `generate` makes problems of any task.
`problems` makes problems with worked solutions, in the sizes of the supervised start and of
drafter training.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from tlt.config.tasks import SizesConfig
from tlt.errors import ConfigError
from tlt.tasks.tail import HeavyTail
from tlt.tasks.worked import WORKED, worked_solution
from tlt.user_code import time_limit

SIZE_PARAMETERS: dict[str, tuple[str, str]] = {
    "chain_sum": ("min_terms", "max_terms"),
    "gcd": ("min_numbers", "max_numbers"),
    "letter_counting": ("min_words", "max_words"),
    "word_problems": ("min_events", "max_events"),
}
"""The two parameters of a task that bound the number of its steps."""

FIXED_PARAMETERS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_digits": 1, "max_digits": 2},
    "gcd": {"max_value": 200},
}
"""Parameters that `problems` sets besides the size."""

SMALLEST_SIZES = {"word_problems": 1}
"""Smallest size of a task if the median of the sizes is below 2; else, and elsewhere, it is 2."""

PROBLEM_S = 10.0
"""Seconds in which a task must make a problem."""

DEFAULT_SIZES = HeavyTail(**SizesConfig().model_dump())
TASK_SIZES = {"word_problems": HeavyTail(median=2, p95=6, longest=14)}
"""Default sizes of tasks whose steps are longer than a line of numbers."""

# Errors of scorers on an answer they cannot read, such as "x" for prime_factorization.
_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, SyntaxError)
# Errors of tasks on parameters they cannot use.
_UNUSABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


Message = dict[str, str]
"""A message of a conversation: its `role` and its `content`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, and what a reward needs to score a response to it."""

    problem_id: str
    question: str
    answer: str
    """The right answer; empty for tasks that can only recognize a right answer."""
    solution: str = ""
    """A worked solution, for the supervised start."""
    entry: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)
    """All columns of the file's row, or the entry of reasoning-gym with the metadata for scoring.
    """
    history: tuple[Message, ...] = field(default=(), hash=False)
    """Messages before the question, the system prompt first."""


def problems(
    task: str,
    count: int,
    seed: int = 0,
    purpose: str = "",
    sizes: HeavyTail | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Return the first `count` problems of an endless sequence, with worked solutions.

    Without `sizes`, the task's default sizes are drawn.

    Every seed and purpose has its own sequence. Purposes separate problems for training from
    problems for measurements.
    """
    if task not in WORKED:
        raise ConfigError(f"task {task!r} has no worked solutions; known: {', '.join(WORKED)}")
    sizes = sizes or TASK_SIZES.get(task, DEFAULT_SIZES)
    chosen = {**FIXED_PARAMETERS.get(task, {}), **(parameters or {})}
    return [
        replace(problem, solution=worked_solution(task, problem.entry["metadata"], problem.answer))
        for problem in generate(task, count, seed, purpose, chosen, sizes)
    ]


def generate(
    task: str,
    count: int,
    seed: int,
    purpose: str,
    parameters: Mapping[str, Any],
    sizes: HeavyTail | None = None,
    spread: bool = False,
) -> list[Problem]:
    """Return `count` problems of any task, with sizes drawn from `sizes` if given.

    `spread` gives every batch its share of the tail; without it, sizes are drawn one by one.
    """
    check(task, parameters, sized=sizes is not None)
    rng = random.Random("/".join(filter(None, (task, str(seed), purpose))))
    if sizes is None:
        # One dataset for all problems: for some tasks, making a dataset is slow.
        entries = _entries(task, count, rng.randrange(2**31), parameters)
    else:
        low, high = SIZE_PARAMETERS[task]
        entries = []
        drawn = iter(sizes.spread(count, rng)) if spread else None
        smallest = SMALLEST_SIZES.get(task, 2) if sizes.median < 2 else 2
        for _ in range(count):
            size = max(smallest, next(drawn) if drawn else sizes.draw(rng))
            bounds = {low: size, high: size}
            entries += _entries(task, 1, rng.randrange(2**31), {**parameters, **bounds})
    return [
        Problem(
            problem_id=f"{task}/{purpose or 'train'}/{seed}/{index}",
            question=entry["question"],
            answer="" if entry["answer"] is None else str(entry["answer"]),
            entry=entry,
        )
        for index, entry in enumerate(entries)
    ]


def check(task: str, parameters: Mapping[str, Any], sized: bool) -> None:
    """Refuse unknown tasks, unknown parameters, and parameters that the run itself sets."""
    known = _datasets()
    if task not in known:
        close = difflib.get_close_matches(task, known, n=3) or ["chain_sum"]
        raise ConfigError(f"task.name: reasoning-gym has no task {task!r}; e.g. {', '.join(close)}")
    if sized and task not in SIZE_PARAMETERS:
        raise ConfigError(
            f"task.sizes: {task} has no size to draw, only {', '.join(SIZE_PARAMETERS)} have; "
            "leave it out and set task.parameters"
        )
    ours = {"seed", "size", *(SIZE_PARAMETERS[task] if sized else ())}
    names = sorted({each.name for each in fields(known[task][1])} - ours)
    for name in parameters:
        if name in names:
            continue
        why = "is set by the run" if name in ours else f"is not a parameter of {task}"
        close = difflib.get_close_matches(name, names, n=1) or names
        raise ConfigError(f"task.parameters: {name} {why}; e.g. {', '.join(close)}")


def score(problem: Problem, text: str) -> float:
    """Return the task's own score, from 0 to 1, of the text in the last <answer> tags."""
    answer = answer_in(text)
    if answer is None:
        return 0.0
    scorer = _scorer(problem.entry["metadata"]["source_dataset"])
    try:
        value = float(scorer(answer, problem.entry))
    except _UNREADABLE:
        return 0.0
    return min(1.0, max(0.0, value))


def answer_in(text: str) -> str | None:
    """Return the text in the last <answer> tags, without surrounding space."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def _entries(
    task: str, count: int, seed: int, parameters: Mapping[str, Any]
) -> list[dict[str, Any]]:
    import reasoning_gym

    too_slow = (
        f"task.parameters: {task} with {dict(parameters)} makes no problem in {PROBLEM_S:g} s; "
        "smaller values work, e.g. the defaults"
    )
    entries = []
    try:
        with time_limit(PROBLEM_S, too_slow):
            dataset = reasoning_gym.create_dataset(task, size=count, seed=seed, **parameters)
        for index in range(count):
            with time_limit(PROBLEM_S, too_slow):
                entries.append(dataset[index])
        return entries
    except ConfigError:
        raise
    except _UNUSABLE as error:
        raise ConfigError(
            f"task.parameters: {task} cannot use {dict(parameters)}: "
            f"{str(error) or type(error).__name__}; without any, its defaults work"
        ) from error


def _datasets() -> dict[str, tuple[type, type]]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "tasks come from reasoning-gym, which is not installed; run: "
            "pip install 'tlt-rl[train]'"
        ) from error
    import tlt.tasks.word_problems  # noqa: F401, registers our own task

    return DATASETS


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """Return a task's scorer, cached: it makes a dataset, which can take half a second."""
    import reasoning_gym

    _datasets()  # in a worker process, our own task is not registered yet
    return reasoning_gym.get_score_answer_fn(task)
