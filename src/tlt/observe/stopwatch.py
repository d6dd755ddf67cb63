"""Measures where the time of an RL step goes."""

from __future__ import annotations

import time
from collections.abc import Callable

from tlt.observe.metrics import STAGES

NAMED = tuple(stage for stage in STAGES if stage != "other")


class Stopwatch:
    """The seconds of each stage of an RL step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.started_s = self._last = clock()
        self.seconds = dict.fromkeys(NAMED, 0.0)
        self.laps: list[tuple[str, float, float]] = []
        """Stage, start and end of every lap, by the clock."""

    def lap(self, stage: str) -> None:
        """Count the time since the last lap for this stage."""
        now = self._clock()
        self.seconds[stage] += now - self._last
        self.laps.append((stage, self._last, now))
        self._last = now

    def skip(self) -> None:
        """Count the time since the last lap for no stage."""
        self._last = self._clock()

    def record(self) -> dict[str, float]:
        """Return the `time/` metrics of the RL step so far."""
        total = self._clock() - self.started_s
        named = {f"time/{stage}_s": seconds for stage, seconds in self.seconds.items()}
        return named | {
            "time/step_s": total,
            "time/other_s": max(0.0, total - sum(self.seconds.values())),
        }
