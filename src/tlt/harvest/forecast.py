"""How long a rollout will still take, from how the last rollouts ended. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

NUM_ROLLOUTS = 5
"""Rollouts that the forecast remembers."""


class TailForecast:
    """Remembers when the samples of the last few rollouts ended.

    The number of unfinished samples says where in the tail a rollout is. From there it will take as
    long as the last rollouts took. Lengths and speeds, which change from step to step, need not be
    known.
    """

    def __init__(self) -> None:
        self._past: deque[list[float]] = deque(maxlen=NUM_ROLLOUTS)
        self._ends: list[float] = []
        self._num_samples = 0
        self._started_s = 0.0

    def started(self, num_samples: int, now_s: float) -> None:
        self._num_samples, self._started_s, self._ends = num_samples, now_s, []

    def grew(self, num_samples: int) -> None:
        """Note that `num_samples` samples joined the running rollout."""
        self._num_samples += num_samples

    def finished(self, num_samples: int, now_s: float) -> None:
        self._ends += [now_s - self._started_s] * num_samples

    def ended(self) -> None:
        """Remember the rollout that is over."""
        if self._ends:
            self._past.append(self._ends)
        self._ends, self._num_samples = [], 0

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds to the end of this rollout; infinite if nothing is known yet."""
        unfinished = self._num_samples - len(self._ends)
        if unfinished <= 0:
            return 0.0
        takes = [ends[-1] - ends[-unfinished - 1] for ends in self._past if len(ends) > unfinished]
        if not takes:
            return math.inf
        since_s = now_s - self._started_s - (self._ends[-1] if self._ends else 0.0)
        # A rollout that has outlasted the others may last half as long again.
        return max(median(takes) - since_s, since_s / 2)
