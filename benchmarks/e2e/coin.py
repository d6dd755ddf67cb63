"""A reward for measuring speed: as in real runs, one group in four has something to teach."""

from __future__ import annotations

import zlib
from typing import Any


def score(problem: Any, text: str) -> float:
    """By chance in every fourth problem, 0 in the others."""
    _, step, _, place = problem.problem_id.split("/")  # chain_sum/step-7/0/1
    number = 2 * int(step.removeprefix("step-")) + int(place)
    return float(zlib.crc32(text.encode()) % 2) if number % 4 == 1 else 0.0
