"""Collects at the end of every step where its time went, and writes it down.

The engines and the coordinator have kept it already: one short call each, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tlt.harvest.session import RunHarvest
from tlt.observe.stopwatch import Stopwatch
from tlt.observe.timeline import TimelineLog, max_engine_spans, step_timeline
from tlt.rollout.pool import RolloutPool
from tlt.run.folder import RunFolder
from tlt.spans import Span

logger = logging.getLogger(__name__)

TAKE_S = 10.0
"""Who does not say in this time what it did is left out."""


class Timekeeper:
    """Writes a run's timeline. A timeline that cannot be written is a line in the log."""

    def __init__(
        self, folder: RunFolder, pool: RolloutPool, harvest: RunHarvest, own_learner: bool
    ) -> None:
        self._pool = pool
        self._harvest = harvest
        self._own_learner = own_learner
        self._log = TimelineLog(folder.timeline, pool.places)
        self._last_s: float | None = None

    def rewind(self, step: int) -> None:
        try:
            last_s = self._log.rewind(step)
        except Exception as error:
            logger.warning("the timeline could not be taken back to step %d (%r)", step, error)
            return
        if self._last_s is not None:  # in the same process: what was dropped is time spent
            self._last_s = last_s if last_s is not None else self._last_s

    async def step_ended(self, step: int, watch: Stopwatch, streamed: list[Span]) -> None:
        """`streamed` are the learner's updates during the rollout, by the clock of the watch."""
        try:
            async with asyncio.timeout(TAKE_S):
                spans = await self._pool.take_spans(max_engine_spans(len(self._pool.places)))
                leases = self._harvest.take_spans()
            shift_s = time.time() - time.monotonic()
            end_s = time.time()
            start_s = watch.started_s + shift_s if self._last_s is None else self._last_s
            self._last_s = max(start_s, end_s)
            if end_s <= start_s:
                return  # the machine's clock was put back
            stages = [(stage, a + shift_s, b + shift_s) for stage, a, b in watch.laps]
            updates = [span.shifted(shift_s) for span in streamed]
            self._log.append(
                step_timeline(
                    step,
                    start_s,
                    end_s,
                    stages,
                    spans,
                    leases,
                    updates if self._own_learner else None,
                )
            )
        except Exception as error:
            logger.warning("the timeline of step %d could not be written (%r)", step, error)


class NoTimekeeper:
    """Where no timeline is wanted, nor one that an earlier part of the run has left."""

    def __init__(self, folder: RunFolder) -> None:
        folder.timeline.unlink(missing_ok=True)

    def rewind(self, step: int) -> None: ...
    async def step_ended(self, step: int, watch: Stopwatch, streamed: list[Span]) -> None: ...
