"""Problems of `reasoning-gym`, by task name, in heavy-tailed sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tlt.errors import ConfigError
from tlt.tasks.tail import HeavyTail
from tlt.tasks.worked import WORKED, worked_solution

SIZE_PARAMETERS: dict[str, tuple[str, str]] = {
    "chain_sum": ("min_terms", "max_terms"),
    "gcd": ("min_numbers", "max_numbers"),
    "letter_counting": ("min_words", "max_words"),
}
"""Which two parameters of a task bound the number of its steps."""

FIXED_PARAMETERS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_digits": 1, "max_digits": 2},
    "gcd": {"max_value": 200},
}

DEFAULT_SIZES = HeavyTail(median=6, p95=30, longest=60)


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    answer: str
    solution: str
    """A worked solution, as the supervised start teaches it."""


def problems(
    task: str, count: int, seed: int = 0, purpose: str = "", sizes: HeavyTail = DEFAULT_SIZES
) -> list[Problem]:
    """The first `count` problems of an endless sequence, another one for each seed and purpose.

    Purposes keep what one part learns from apart from what another is measured on.
    """
    if task not in WORKED:
        raise ConfigError(f"task {task!r} has no worked solutions; known: {', '.join(WORKED)}")
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "tasks come from reasoning-gym, which is not installed; run: "
            "pip install 'tlt-rl[train]'"
        ) from error

    rng = random.Random("/".join(filter(None, (task, str(seed), purpose))))
    low, high = SIZE_PARAMETERS[task]
    made = []
    for _ in range(count):
        size = max(2, sizes.draw(rng))
        entry = reasoning_gym.create_dataset(
            task,
            size=1,
            seed=rng.randrange(2**31),
            **{low: size, high: size},
            **FIXED_PARAMETERS.get(task, {}),
        )[0]
        solution = worked_solution(task, entry["metadata"], entry["answer"])
        made.append(Problem(entry["question"], entry["answer"], solution))
    return made
