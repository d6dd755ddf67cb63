"""Rewards for measuring, by the text alone: what is right plays no part in it."""

from __future__ import annotations

import zlib
from typing import Any


def coin(problem: Any, text: str) -> float:
    """Return a coin toss in every fourth problem, 0 in the others.

    As in real runs, one group in four has something to teach.
    """
    _, step, _, place = problem.problem_id.split("/")  # word_problems/step-7/0/1
    number = 2 * int(step.removeprefix("step-")) + int(place)
    return float(zlib.crc32(text.encode()) % 2) if number % 4 == 1 else 0.0
