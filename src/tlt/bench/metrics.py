"""Metrics of a finished rollout: pure functions over samples and counters."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlt.contracts import EngineStats, Sample


@dataclass(frozen=True, slots=True)
class RolloutMetrics:
    """Speed, acceptance and idle time of one rollout."""

    wall_s: float
    tokens_per_s: float
    acceptance_length: float
    tail_share: float
    """Share of the wall time during which at most 1/8 of the requests are unfinished."""
    idle_s: dict[str, float]
    """Seconds without a running request, per engine."""
    curve: list[tuple[float, int]]
    """Points of (seconds since the start, unfinished requests), one for each finished request."""


def measure(
    samples: Sequence[Sample],
    started_at_s: float,
    before: Iterable[EngineStats],
    after: Iterable[EngineStats],
) -> RolloutMetrics:
    """Compute the metrics of a rollout from its samples and the engines' counters around it."""
    ends = sorted(sample.finished_at_s - started_at_s for sample in samples)
    wall_s = ends[-1]
    num = len(ends)
    tail_starts_s = ends[num - num // 8 - 1] if num >= 8 else 0.0
    earlier = {stats.engine: stats for stats in before}
    drafts = accepted = 0
    engines = []
    for stats in after:
        base = earlier.get(stats.engine, EngineStats(stats.engine))
        drafts += stats.drafts - base.drafts
        accepted += stats.accepted_tokens - base.accepted_tokens
        engines.append(stats.engine)
    return RolloutMetrics(
        wall_s=wall_s,
        tokens_per_s=sum(len(sample.token_ids) for sample in samples) / wall_s,
        acceptance_length=1 + accepted / drafts if drafts else 1.0,
        tail_share=(wall_s - tail_starts_s) / wall_s,
        idle_s={
            engine: wall_s - _covered_s([s for s in samples if s.engine == engine])
            for engine in engines
        },
        curve=[(0.0, num)] + [(end, num - index - 1) for index, end in enumerate(ends)],
    )


def _covered_s(samples: Sequence[Sample]) -> float:
    """Return the length of the union of the samples' running times."""
    covered = 0.0
    last = float("-inf")
    for start, end in sorted((s.finished_at_s - s.running_s, s.finished_at_s) for s in samples):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and range of some values."""
    return Spread(statistics.median(values), min(values), max(values))
