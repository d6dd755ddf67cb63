"""An alarm on the gap between what engines and learner say of the same tokens. Pure.

Engines and learner compute the log-probabilities of every sampled token with the same weights and
other code, so they differ a little: by 1e-7 in float32, by 1e-2 in bfloat16. A gap far above the
run's own history means that samples came from other weights than the learner's, or from a wrong
sampler. The learner then makes no update of them.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

HISTORY_STEPS = 20
FIRST_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest gap of a run's first step, by the dtype of the engines, when there is no history yet; at
temperature 1, with a factor of 4."""
FLOOR = 1e-5
"""A gap below this is never alarming: float32 kernels differ that much at times."""


MAX_IN_A_ROW = 5
"""So many alarming steps in a row are no accident: dropping more of them would train nothing."""


class GapWatch:
    """Knows the gap of earlier RL steps, and from which gap on the next step is alarming."""

    def __init__(self, factor: float, dtype: str, temperature: float = 1.0) -> None:
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
        """Take note of the gap of an update that was made."""
        if math.isfinite(gap):
            self._history.append(gap)

    def step_ended(self, alarming: bool) -> int:
        """Take note of a whole step; how many in a row were alarming."""
        self._in_a_row = self._in_a_row + 1 if alarming else 0
        return self._in_a_row
