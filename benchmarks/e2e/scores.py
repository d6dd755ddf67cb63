"""Rewards for measuring, by the text alone: what is right plays no part in it."""

from __future__ import annotations

import re
import zlib
from typing import Any


def coin(problem: Any, text: str) -> float:
    """Return a coin toss in every fourth problem, 0 in the others.

    As in real runs, one group in four has something to teach.
    """
    _, step, _, place = problem.problem_id.split("/")  # chain_sum/step-7/0/1
    number = 2 * int(step.removeprefix("step-")) + int(place)
    return float(zlib.crc32(text.encode()) % 2) if number % 4 == 1 else 0.0


def sevens(problem: Any, text: str) -> float:
    """The share of sevens among the digits of results: pulls a policy away from what it was
    taught. Other digits are copied, and would only be noise."""
    digits = "".join(re.findall(r"= (\d+)", text))
    return digits.count("7") / max(1, len(digits))
