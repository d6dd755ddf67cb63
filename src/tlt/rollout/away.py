"""Turns whose environment is answering: which engines get their trajectories back, and when. Pure.

An engine without requests is not idle for long if its trajectories come back from their tools. How
long the last calls took says when.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from tlt.spans import Span

NUM_CALLS = 50
"""Last calls of tools that tell how long the next one takes."""


class Away:
    """The trajectories that wait for their environment, by engine."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._left: dict[str, tuple[str, float]] = {}
        """Engine of each turn, and when it ended; oldest first."""
        self._took: deque[float] = deque(maxlen=NUM_CALLS)
        self._spans: dict[str, list[Span]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def left(self, engine: str, turn: str) -> None:
        """Note that a turn has ended, and its environment is asked."""
        self._left[turn] = engine, self._clock()

    def back(self, turn: str, by_tool: bool) -> None:
        """Note the environment's answer, and whether a tool was called."""
        engine, left_s = self._left.pop(turn)
        seconds = self._clock() - left_s
        if by_tool:
            self._took.append(seconds)
            now_s = self._wall()
            self._spans.setdefault(engine, []).append(Span("tools", now_s - seconds, now_s))

    def returns_s(self, engine: str) -> float:
        """Return the seconds until a trajectory of an engine probably comes back."""
        left_s = next((at for own, at in self._left.values() if own == engine), None)
        if left_s is None:
            return math.inf
        # Nothing is known of a first call: it may be short.
        return max(0.0, median(self._took) - (self._clock() - left_s)) if self._took else 0.0

    def take_spans(self) -> dict[str, list[Span]]:
        """Return when trajectories of each engine waited since the last call."""
        spans, self._spans = self._spans, {}
        return {engine: _joined(own) for engine, own in spans.items()}


def _joined(spans: list[Span]) -> list[Span]:
    """Return spans that do not overlap."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        if joined and span.start_s <= joined[-1].end_s:
            joined[-1].end_s = max(joined[-1].end_s, span.end_s)
        else:
            joined.append(span)
    return joined
