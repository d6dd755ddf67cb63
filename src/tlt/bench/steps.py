"""The step times that `tlt drafter bench` records, for replays of strategies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any

from tlt.contracts import Arm, StepReport

MIN_STEPS = 15
"""Engine steps behind each point of the table."""


def step_table(reports: Iterable[StepReport]) -> dict[str, Any]:
    """Return median step times by arm and batch size, and acceptance by drafter and position.

    Only steady engine steps count: they verify and draft with one arm, without prefills.
    """
    times: dict[Arm, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    accepted: dict[str, Counter[int]] = defaultdict(Counter)
    drafted: Counter[str] = Counter()
    for report in reports:
        arm = report.verified
        if arm != report.proposed or report.num_prefill_tokens or not report.num_decodes:
            continue
        times[arm][report.num_decodes].append(report.elapsed_s)
        if arm.num_draft_tokens:
            drafted[arm.drafter] += report.num_draft_tokens
            for position in range(arm.num_draft_tokens):
                seen[arm.drafter][position] += report.num_decodes
            for position, count in enumerate(report.accepted_at):
                accepted[arm.drafter][position] += count
    return {
        "arms": [
            {
                "drafter": arm.drafter,
                "num_draft_tokens": arm.num_draft_tokens,
                "seconds": _smooth(by_batch),
            }
            for arm, by_batch in times.items()
        ],
        "accepted": {
            drafter: [accepted[drafter][position] / counts[position] for position in sorted(counts)]
            for drafter, counts in seen.items()
        },
        "drafted_share": {
            drafter: drafted[drafter] / counts.total() for drafter, counts in seen.items()
        },
    }


def _smooth(by_batch: Mapping[int, list[float]]) -> list[tuple[float, float]]:
    """Return medians over neighbouring batch sizes, with at least `MIN_STEPS` steps each.

    A larger batch never takes less time: points that suggest it are noise and are pooled.
    """
    groups: list[tuple[list[int], list[float]]] = []
    for batch, seconds in sorted(by_batch.items()):
        if not groups or len(groups[-1][1]) >= MIN_STEPS:
            groups.append(([], []))
        groups[-1][0].extend([batch] * len(seconds))
        groups[-1][1].extend(seconds)
        while len(groups) > 1 and median(groups[-2][1]) > median(groups[-1][1]):
            batches, pooled = groups.pop()
            groups[-1][0].extend(batches)
            groups[-1][1].extend(pooled)
    return [(fmean(batches), median(seconds)) for batches, seconds in groups]
