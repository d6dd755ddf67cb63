"""Spans: stretches of a worker's time in one state. Pure; standard library only.

Each engine logs its engine steps and merges similar ones, so that hours of decoding fit into a few
hundred spans. `covered` fills the rest of the time from other sources (leases, updates), until
every moment has one state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

State = Literal[
    "generating", "tools", "idle", "training", "swapping", "updating", "waiting", "lost"
]

STATES: dict[State, str] = {
    "generating": "the engine decodes",
    "tools": "all trajectories of the engine wait for tools",
    "training": "the worker is leased and trains the drafter",
    "idle": "nothing left to generate while others still do",
    "updating": "the policy is updated on the worker's device",
    "swapping": "weight sync or drafter swap",
    "waiting": "the worker waits for rewards, the learner or a checkpoint",
    "lost": "the engine died, and another one starts",
}
"""Every state of a worker, and its description."""

GAP_S = 0.03
"""Engine steps closer together than this follow each other without a pause."""
MAX_SPANS = 256
"""Spans that one engine keeps between two calls of `take`."""


@dataclass(slots=True)
class Span:
    """A stretch of time in one state. Only an engine that generates fills in the counts."""

    state: State
    start_s: float
    """Wall-clock time of the start, in seconds since the epoch; the same for `end_s`."""
    end_s: float
    running: float = 0.0
    """Mean number of running requests."""
    arm: str = ""
    """Arm that decoded most of the time."""
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    mixed: bool = False
    """Whether other arms decoded some of the time."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def shifted(self, by_s: float) -> Span:
        """Return this span shifted by `by_s` seconds."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)


class SpanLog:
    """The log of one engine.

    Similar engine steps become one span. When there are too many spans, short ones join their
    neighbours.
    """

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self._max_spans = max_spans
        self._spans: list[Span] = []
        self._shortest_s = 0.0
        """Length below which spans have joined their neighbours."""

    def add(self, span: Span) -> None:
        """Add a span that starts after all earlier ones."""
        if self._spans and _alike(self._spans[-1], span, self._shortest_s):
            _join(self._spans[-1], span)
            return
        if self._spans and 0 < span.start_s - self._spans[-1].end_s <= GAP_S:
            self._spans[-1].end_s = span.start_s  # a short gap belongs to the earlier span
        self._spans.append(span)
        if len(self._spans) > self._max_spans:
            self._thin_out(self._max_spans)

    def take(self, max_spans: int | None = None) -> list[Span]:
        """Return all spans since the last call, joined to `max_spans` where possible."""
        if max_spans is not None:
            self._thin_out(max_spans)
        spans, self._spans, self._shortest_s = self._spans, [], 0.0
        return spans

    def _thin_out(self, max_spans: int) -> None:
        while len(self._spans) > max_spans and self._shortest_s < 3600:
            self._shortest_s = max(0.01, self._shortest_s * 2)
            kept: list[Span] = []
            for span in self._spans:
                if kept and _alike(kept[-1], span, self._shortest_s):
                    _join(kept[-1], span)
                else:
                    kept.append(span)
            self._spans = kept


def _alike(last: Span, new: Span, shortest_s: float) -> bool:
    if last.state != new.state or new.start_s - last.end_s > GAP_S:
        return False
    same = last.arm == new.arm and round(last.running) == round(new.running)
    return same or last.seconds < shortest_s


def _join(last: Span, new: Span) -> None:
    last.mixed = last.mixed or new.mixed or last.arm != new.arm
    new_s = new.end_s - new.start_s
    seconds = last.end_s - last.start_s + new_s
    if seconds > 0:
        share = new_s / seconds
        last.running += (new.running - last.running) * share
        last.arm = new.arm if share > 0.5 else last.arm
    last.end_s = max(last.end_s, new.end_s)
    last.tokens += new.tokens
    last.drafts += new.drafts
    last.accepted += new.accepted


def covered(start_s: float, end_s: float, layers: Sequence[Iterable[Span]]) -> list[Span]:
    """Return one state at a time from start to end; earlier layers hide later ones.

    The last layer should cover the whole time. Neighbouring spans in the same state become one when
    neither of them counts requests.
    """
    found: list[Span] = []
    for layer in layers:
        taken = sorted((span.start_s, span.end_s) for span in found)
        free_s = start_s  # clocks of several machines may make a layer overlap itself
        for span in sorted(layer, key=lambda s: s.start_s):
            found += _uncovered(span, max(free_s, span.start_s), min(end_s, span.end_s), taken)
            free_s = max(free_s, span.end_s)
    merged: list[Span] = []
    for span in sorted(found, key=lambda s: s.start_s):
        last = merged[-1] if merged else None
        if last and last.state == span.state and not last.running and not span.running:
            last.end_s = span.end_s
        else:
            merged.append(span)
    return merged


def _uncovered(
    span: Span, start_s: float, end_s: float, taken: Sequence[tuple[float, float]]
) -> list[Span]:
    """Return the pieces of a span that are not taken; the first one carries the counts."""
    pieces: list[Span] = []
    index = max(0, bisect_left(taken, (start_s,)) - 1)
    for taken_start_s, taken_end_s in [*taken[index:], (end_s, end_s)]:
        if taken_start_s >= end_s:
            taken_start_s = taken_end_s = end_s
        if taken_start_s > start_s:
            piece = replace(span, start_s=start_s, end_s=taken_start_s)
            if pieces:
                piece.tokens = piece.drafts = piece.accepted = 0
            pieces.append(piece)
        start_s = max(start_s, taken_end_s)
        if start_s >= end_s:
            break
    return pieces
