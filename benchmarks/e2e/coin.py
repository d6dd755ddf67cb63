"""A reward for measuring speed: as in real runs, one group in four has something to teach."""

from __future__ import annotations

import zlib
from typing import Any


def score(problem: Any, text: str) -> float:
    """By chance in every fourth problem, 0 in the others."""
    teaches = int(problem.problem_id.split("/")[-1]) % 4 == 1
    return float(zlib.crc32(text.encode()) % 2) if teaches else 0.0
