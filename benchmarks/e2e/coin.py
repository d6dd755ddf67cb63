"""A reward for measuring speed: as in real runs, one group in four has something to teach."""

from __future__ import annotations

import zlib
from typing import Any


def score(problem: Any, text: str) -> float:
    """By chance in every fourth group, 0 in the others."""
    number = int(problem.problem_id.rsplit("/", 1)[-1])
    return float(zlib.crc32(text.encode()) % 2) if number % 4 == 1 else 0.0
