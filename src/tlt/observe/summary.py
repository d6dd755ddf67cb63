"""A run in a few numbers, from its records. Pure; skips values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, median
from typing import Any

from tlt.observe.metrics import STAGES

Record = dict[str, float]

MEDIANS = (
    "time/step_s",
    "rollout/tokens_per_s",
    "rollout/acceptance_length",
    "rollout/idle_share",
    "learner/tokens_per_s",
    "learner/gap_mean",
    "response/median_tokens",
    "response/longest_tokens",
)
TOTALS = (
    "time/step_s",
    "rollout/output_tokens",
    "learner/tokens",
    "reward/faults",
    "rollout/engine_restarts",
    "learner/restarts",
)


def series(records: Iterable[Record], name: str) -> tuple[list[float], list[float]]:
    """Return the RL steps that have the metric, and its values."""
    points = [(r["step"], r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def stage_table(records: Iterable[Record]) -> list[tuple[str, float, float]]:
    """Return each stage, its median seconds where it took time, and its share of all time."""
    records = list(records)
    seconds = {stage: series(records, f"time/{stage}_s")[1] for stage in STAGES}
    total_s = sum(sum(values) for values in seconds.values())
    return [
        (stage, median(value for value in values if value > 0), sum(values) / total_s)
        for stage, values in seconds.items()
        if any(value > 0 for value in values)
    ]


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """Return rewards, evaluations, totals and medians of a run.

    Metrics that no RL step has are left out.
    """
    records = list(records)
    rewards = series(records, "reward/mean")[1]
    evaluations = series(records, "eval/reward_mean")[1]
    result: dict[str, Any] = {"num_steps": len(rewards)}
    if rewards:
        fifth = math.ceil(len(rewards) / 5)
        first, last = fmean(rewards[:fifth]), fmean(rewards[-fifth:])
        result["reward"] = {"first_fifth": first, "last_fifth": last}
    if evaluations:
        result["eval_reward"] = {"first": evaluations[0], "last": evaluations[-1]}
    evals = sorted({name for record in records for name in record if name.startswith("eval/")})
    found = {name: series(records, name)[1] for name in evals}
    if evals:
        result["eval"] = {
            name: {"first": values[0], "last": values[-1]}
            for name, values in found.items()
            if values
        }
    for key, names, total in (("total", TOTALS, sum), ("median", MEDIANS, median)):
        columns = {name: series(records, name)[1] for name in names}
        result[key] = {name: total(values) for name, values in columns.items() if values}
    return result
