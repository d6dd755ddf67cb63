"""Writes a run's timeline: where the time of every RL step went.

Engines and coordinator keep their spans themselves; the timekeeper takes them between two RL steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tlt.observe.stopwatch import Stopwatch
from tlt.observe.timeline import TimelineLog, max_engine_spans, step_timeline
from tlt.spans import Span

logger = logging.getLogger(__name__)

TAKE_S = 10.0
"""How long engines and coordinator may take to hand over their spans."""


class Engines(Protocol):
    """The pool, as far as it knows what its engines did."""

    @property
    def places(self) -> Sequence[str]: ...
    async def take_spans(self, max_spans: int) -> Mapping[str, list[Span]]: ...


class ToolWaits(Protocol):
    """The pool's idle time, as far as it knows when trajectories waited for tools."""

    def take_tool_spans(self) -> Mapping[str, list[Span]]: ...


class Leases(Protocol):
    """Harvest, as far as it knows when workers trained."""

    def take_spans(self) -> Mapping[str, list[Span]]: ...


class Timekeeper:
    """Logs a warning, and nothing worse, when the timeline cannot be written."""

    def __init__(
        self, path: Path, engines: Engines, tools: ToolWaits, leases: Leases, own_learner: bool
    ) -> None:
        self._engines = engines
        self._tools = tools
        self._leases = leases
        self._own_learner = own_learner
        self._log = TimelineLog(path, engines.places)
        self._last_s: float | None = None

    def rewind(self, step: int) -> None:
        """Drop the RL steps after this one."""
        try:
            last_s = self._log.rewind(step)
        except Exception as error:
            logger.warning("the timeline could not be taken back to step %d (%r)", step, error)
            return
        if self._last_s is not None:  # in the same process: dropped steps are time spent
            self._last_s = last_s if last_s is not None else self._last_s

    async def step_ended(self, step: int, watch: Stopwatch, streamed: Sequence[Span]) -> None:
        """Write the timeline of an RL step.

        `streamed` are the learner's updates during the rollout, by the clock of the watch.
        """
        max_spans = max_engine_spans(len(self._engines.places))
        try:
            async with asyncio.timeout(TAKE_S):
                spans = await self._engines.take_spans(max_spans)
                leases, tools = self._leases.take_spans(), self._tools.take_tool_spans()
            end_s = time.time()
            shift_s = end_s - time.monotonic()
            start_s = watch.started_s + shift_s if self._last_s is None else self._last_s
            self._last_s = max(start_s, end_s)
            if end_s <= start_s:
                return  # the machine's clock was set back
            stages = [(stage, a + shift_s, b + shift_s) for stage, a, b in watch.laps]
            updates = [span.shifted(shift_s) for span in streamed] if self._own_learner else None
            self._log.append(
                step_timeline(step, start_s, end_s, stages, spans, leases, updates, tools)
            )
        except Exception as error:
            logger.warning("the timeline of step %d could not be written (%r)", step, error)


class NoTimekeeper:
    """Timeline disabled; deletes the one of an earlier attempt."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def rewind(self, step: int) -> None: ...
    async def step_ended(self, step: int, watch: Stopwatch, streamed: Sequence[Span]) -> None: ...
