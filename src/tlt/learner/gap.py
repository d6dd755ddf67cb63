"""An alarm on the gap between the log-probabilities of engines and learner.

Engines and learner compute the log-probabilities of every sampled token with the same weights and
other code, so they differ a little: by 1e-7 in float32, by 1e-2 in bfloat16. A gap far above the
run's own history means that samples came from other weights than the learner's, or from a wrong
sampler. `GapWatch` knows that history; `GapAlarm` does what `alarm.then` says. It does the same if
samples came out different when they were generated again (`tlt.rollout.recheck`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from tlt.config.train import AlarmConfig
from tlt.errors import EngineError

if TYPE_CHECKING:
    from tlt.learner.rank import UpdateReport

logger = logging.getLogger(__name__)

HISTORY_STEPS = 20
"""Updates whose median gap is the history."""
FIRST_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest gap of a run's first update, which has no history, by the engines' dtype; for temperature
1 and a factor of 4."""
FLOOR = 1e-5
"""A gap below this is never alarming: float32 kernels differ that much at times."""
MAX_IN_A_ROW = 5
"""Alarming RL steps in a row that end the run: they are not an accident, and train nothing."""


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
        """Take note of a whole RL step; return how many in a row were alarming."""
        self._in_a_row = self._in_a_row + 1 if alarming else 0
        return self._in_a_row


class GapAlarm:
    """Checks every update of a run."""

    def __init__(self, config: AlarmConfig, dtype: str, temperature: float) -> None:
        self._config = config
        self._watch = GapWatch(config.gap_factor, dtype, temperature)

    def recall(self, records: Iterable[Mapping[str, float]]) -> None:
        """Take the history from the records of a resumed run."""
        for record in records:
            gap = record.get("learner/gap_mean", 0.0)
            if gap and not record.get("learner/gap_alarms"):
                self._watch.observe(gap)

    def max_gap(self, num_faults: int) -> float:
        """Return the gap from which on the learner must refuse the next updates.

        It must refuse every update if samples failed their recheck.
        """
        if self._config.then == "warn":
            return math.inf
        return -1.0 if num_faults else self._watch.limit()

    def check(self, step: int, updates: Sequence[UpdateReport], num_faults: int) -> int:
        """Return how many updates of an RL step had an alarming gap, or raise to end the run."""
        then, alarms, text = self._config.then, 0, ""
        advice = (
            "See run.log in run.out for engines that were replaced; if engines and learner differ "
            f"on purpose, raise alarm.gap_factor (now {self._config.gap_factor:g})"
        )
        limit = self._watch.limit()
        for update in updates:
            gap = update.sums.gap / max(1.0, update.sums.learned_tokens)
            if not update.sums.learned_tokens:
                continue
            if then == "warn" or (gap <= limit and not num_faults):
                self._watch.observe(gap)
            if gap <= limit:
                continue
            alarms += 1
            text = (
                f"step {step}: engines and learner differ by {gap:.2g} in the log-probability of a "
                f"token, more than {limit:.2g}: these samples may come from another policy"
            )
            self._log(text)
        if num_faults:
            text = (
                f"step {step}: {num_faults} of the samples generated again without drafts came out "
                "different: samples of this step may come from another distribution"
            )
            advice = "See run.log in run.out for these samples, and run `tlt doctor`"
            self._log(text)
        in_a_row = self._watch.step_ended(bool(text))
        if text and then == "stop":
            raise EngineError(f"{text}; alarm.then = 'stop' ends the run here")
        if then == "drop" and in_a_row >= MAX_IN_A_ROW:
            raise EngineError(
                f"{text}. This happened in {in_a_row} steps in a row. {advice}, or set "
                "alarm.then = 'warn'"
            )
        return alarms

    def _log(self, text: str) -> None:
        then = self._config.then
        follows = "trained on nevertheless" if then == "warn" else "no update was made from them"
        logger.error("%s; %s (alarm.then = %r)", text, follows, then)
