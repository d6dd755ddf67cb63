"""A reward for measuring speed: as in real runs, half of the groups have something to teach."""

from __future__ import annotations

import zlib
from typing import Any


def score(problem: Any, text: str) -> float:
    """By chance in every second group, 0 in the others."""
    number = int(problem.problem_id.rsplit("/", 1)[-1])
    return float(zlib.crc32(text.encode()) % 2) if number % 2 else 0.0
