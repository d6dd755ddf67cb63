"""The bootstrap interval of a figure: how much it depends on which values were measured. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")

RESAMPLES = 4000
LEVEL = 0.95


def interval(
    compute: Callable[[Sequence[Value]], float],
    values: Sequence[Value],
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Return the range that holds `compute(values)` with 95% confidence.

    The same number of values is drawn with replacement each time, and always the same ones: two
    figures of the same values are computed from the same draws.
    """
    draw = random.Random(0)
    found = sorted(compute(draw.choices(values, k=len(values))) for _ in range(resamples))
    low, high = (round(share * (resamples - 1)) for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return found[low], found[high]
