"""The alarm on the gap between the log-probabilities of engines and learner. Pure.

Engines and learner compute the log-probability of every sampled token from the same weights with
different code. The results differ by about 1e-7 in float32 and 1e-2 in bfloat16. A gap far above
the run's own history means that the samples came from other weights than the learner's, or from a
wrong sampler. The learner then makes no update on these samples.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

HISTORY_STEPS = 20
"""Updates whose median gap is the history."""
FIRST_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest gap of a run's first update, which has no history, by the engines' dtype; for temperature
1 and a factor of 4."""
FLOOR = 1e-5
"""A gap below this never raises an alarm: float32 kernels sometimes differ that much."""

MAX_IN_A_ROW = 5
"""Alarming RL steps in a row that end the run: dropping more of them would train nothing."""


class GapWatch:
    """The gaps of earlier updates, and the largest gap that the next update may have."""

    def __init__(self, factor: float, dtype: str, temperature: float) -> None:
        self._factor = factor
        # A low temperature multiplies all differences of logits.
        self._first_limit = FIRST_LIMITS[dtype] * (factor / 4) / min(1.0, temperature)
        self._history: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._in_a_row = 0

    def limit(self) -> float:
        """Return the largest gap that an update may have."""
        if not self._history:
            return self._first_limit
        return max(FLOOR, self._factor * median(self._history))

    def observe(self, gap: float) -> None:
        """Add the gap of an update to the history."""
        if math.isfinite(gap):
            self._history.append(gap)

    def step_ended(self, alarming: bool) -> int:
        """Count an RL step, and return how many alarming ones in a row there were."""
        self._in_a_row = self._in_a_row + 1 if alarming else 0
        return self._in_a_row
