"""Metrics of a finished rollout: pure functions over samples and counters."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tlt.contracts import EngineStats, Sample


def measure(
    samples: Sequence[Sample],
    started_at_s: float,
    before: Sequence[EngineStats],
    after: Sequence[EngineStats],
) -> dict[str, Any]:
    """Return the metrics of a rollout from its samples and the engines' counters around it.

    `tail_share` is the share of the wall time during which at most 1/8 of the requests are
    unfinished, and `idle_s` has the seconds without a running request of each engine. `curve` has
    (seconds since the start, unfinished requests) whenever a request ends.
    """
    ends = sorted(sample.finished_at_s - started_at_s for sample in samples)
    num, wall_s = len(ends), ends[-1]
    tail_starts_s = ends[num - num // 8 - 1] if num >= 8 else 0.0
    return {
        "wall_s": wall_s,
        "tokens_per_s": sum(len(sample.token_ids) for sample in samples) / wall_s,
        "acceptance_length": EngineStats.difference(before, after).acceptance_length,
        "tail_share": (wall_s - tail_starts_s) / wall_s,
        "idle_s": {
            stats.engine: wall_s - _covered_s([s for s in samples if s.engine == stats.engine])
            for stats in after
        },
        "curve": [(0.0, num)] + [(end, num - index - 1) for index, end in enumerate(ends)],
    }


def _covered_s(samples: Sequence[Sample]) -> float:
    """Return the length of the union of the samples' running times."""
    covered = 0.0
    last = float("-inf")
    for start, end in sorted((s.finished_at_s - s.running_s, s.finished_at_s) for s in samples):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and range of repeated measurements."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
