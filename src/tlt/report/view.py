"""What a run's folder says about it: the numbers behind `tlt report`. Reads files, nothing else.

`look_at` turns a folder into a `RunView`; everything that is shown, as a page, as JSON or in words,
is computed from it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tlt.errors import ConfigError
from tlt.observe.record import read
from tlt.observe.summary import Record, series, stage_table, summary
from tlt.observe.timeline import LEARNER, StepTimeline, read_timeline, worker_seconds
from tlt.spans import Span

TAIL_SHARE = 1 / 8
"""A rollout is in its tail when no more than this share of its requests is left."""


@dataclass(slots=True)
class RunView:
    """One run, as it lies on disk."""

    name: str
    config: dict[str, Any]
    records: list[Record]
    """Of steps; what was measured before the first is not among them."""
    all_records: list[Record]
    lengths: list[int]
    """Of all responses."""
    timelines: list[StepTimeline] = field(default_factory=list)

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the run, by its dotted name."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found


def look_at(folder: Path) -> RunView:
    """Read a run. One that has not finished a step yet has nothing to show."""
    metrics = folder / "metrics.jsonl"
    if not (folder / "config.toml").exists() or not metrics.exists():
        raise ConfigError(
            f"{folder} holds no run of `tlt train` (no config.toml and metrics.jsonl in it); "
            "give the folder that run.out named, e.g. runs/tiny"
        )
    records = read(metrics)
    steps = [record for record in records if record["step"] > 0]
    if not steps:
        raise ConfigError(f"the run in {folder} has not finished a step yet; try again later")
    lengths_file = folder / "lengths.jsonl"
    lines = read(lengths_file) if lengths_file.exists() else []
    return RunView(
        name=folder.resolve().name,
        config=tomllib.loads((folder / "config.toml").read_text()),
        records=steps,
        all_records=records,
        lengths=[tokens for line in lines for tokens in line["tokens"]],
        timelines=read_timeline(folder / "timeline.json"),
    )


# --- numbers --------------------------------------------------------------------------------------


def describe(view: RunView) -> dict[str, Any]:
    """Everything that the report says in numbers, ready for JSON."""
    records = view.records
    return {
        "name": view.name,
        "settings": settings(view),
        **summary(records),
        "stages": [
            {"stage": stage, "median_s": middle_s, "share": share}
            for stage, middle_s, share in stage_table(records)
        ],
        "lengths": lengths(view),
        "workers": worker_seconds(view.timelines),
        "reclaimed": reclaimed(view),
        "tail_share": tail_share(view),
        "arms": arms(view),
        "drafters": drafters(view),
        "harvest": harvest(view),
    }


def settings(view: RunView) -> dict[str, Any]:
    keys = (
        *("policy.model", "task.name", "sampling.prompts_per_step", "sampling.group_size"),
        *("sampling.max_tokens", "pool.num_engines", "placement.kind", "tlt.enabled"),
        *("tlt.harvest", "engine.strategy.kind", "engine.drafter", "learner.lr", "run.seed"),
    )
    return {key: view.setting(key) for key in keys if view.setting(key) is not None}


def lengths(view: RunView) -> dict[str, float]:
    ordered = sorted(view.lengths)
    if not ordered:
        return {}
    return {
        "samples": len(ordered),
        "median": median(ordered),
        "p95": quantile(ordered, 0.95),
        "p99": quantile(ordered, 0.99),
        "longest": ordered[-1],
        "longest_over_median": ordered[-1] / max(1.0, median(ordered)),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def reclaimed(view: RunView) -> dict[str, float]:
    """Idle seconds, and how many of them trained the drafter."""
    seconds = worker_seconds(view.timelines).values()
    idle_s = sum(worker["idle"] for worker in seconds)
    training_s = sum(worker["training"] for worker in seconds)
    both_s = idle_s + training_s
    return {
        "idle_s": idle_s,
        "training_s": training_s,
        "share": training_s / both_s if both_s else 0.0,
    }


def tail_share(view: RunView) -> float:
    """Share of the rollouts' time with at most an eighth of the most requests running."""
    tail_s = total_s = 0.0
    for timeline in view.timelines:
        for start_s, end_s in rollouts(timeline):
            curve = running(timeline, start_s, end_s)
            most = max((count for _, count in curve), default=0.0)
            ends = [at_s for at_s, _ in curve[1:]] + [end_s - start_s]
            total_s += end_s - start_s
            begun = False
            for (at_s, count), until_s in zip(curve, ends, strict=True):
                begun = begun or count == most
                if begun and count <= max(1.0, most * TAIL_SHARE):
                    tail_s += until_s - at_s
    return tail_s / total_s if total_s else 0.0


def rollouts(timeline: StepTimeline) -> list[tuple[float, float]]:
    return [(start, end) for stage, start, end in timeline.stages if stage == "rollout"]


def running(timeline: StepTimeline, start_s: float, end_s: float) -> list[tuple[float, float]]:
    """(seconds since the start, requests that all engines run), from each moment on."""
    changes: dict[float, float] = {start_s: 0.0}
    for span in _generated(timeline):
        if span.start_s < end_s and span.end_s > start_s:
            for at_s, change in (
                (max(start_s, span.start_s), span.running),
                (span.end_s, -span.running),
            ):
                changes[at_s] = changes.get(at_s, 0.0) + change
    curve: list[tuple[float, float]] = []
    count = 0.0
    for at_s in sorted(changes):
        count += changes[at_s]
        if at_s < end_s:
            curve.append((at_s - start_s, max(0.0, round(count, 3))))
    return curve


def _generated(timeline: StepTimeline) -> list[Span]:
    return [
        s
        for w, spans in timeline.rows.items()
        if w != LEARNER
        for s in spans
        if s.state == "generating"
    ]


def arms(view: RunView) -> dict[str, dict[str, float]]:
    """What every way of decoding did: seconds, tokens, and tokens per draft."""
    found: dict[str, dict[str, float]] = {}
    for timeline in view.timelines:
        for span in _generated(timeline):
            arm = found.setdefault(
                span.arm, {"seconds": 0.0, "tokens": 0, "drafts": 0, "accepted": 0}
            )
            arm["seconds"] += span.seconds
            arm["tokens"] += span.tokens
            arm["drafts"] += span.drafts
            arm["accepted"] += span.accepted
    for arm in found.values():
        arm["acceptance_length"] = 1 + arm["accepted"] / arm["drafts"] if arm["drafts"] else 1.0
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


def drafters(view: RunView) -> list[dict[str, float]]:
    """The drafters that engines got, with the step that used each first."""
    found: list[dict[str, float]] = []
    for record in view.records:
        version = record.get("drafter_version", 0)
        if not found or found[-1]["version"] != version:
            found.append(
                {
                    "version": version,
                    "step": record["step"],
                    "held_out_length": record.get("harvest/held_out_length", 0.0),
                }
            )
    return found if len(found) > 1 or found[0]["version"] else []


def harvest(view: RunView) -> dict[str, float]:
    if not any("harvest/used_s" in record for record in view.records):
        return {}
    names = ("idle_s", "coverable_s", "used_s", "trained_tokens", "published", "refused", "faults")
    return {name: sum(series(view.records, f"harvest/{name}")[1]) for name in names}


# --- several runs ---------------------------------------------------------------------------------


def compare(base: RunView, other: RunView) -> dict[str, Any]:
    """How much faster the other run is, step by step where both have the step.

    Where lengths differ by chance, `rollout_per_token` is the fair figure.
    """
    theirs = {record["step"]: record for record in other.records}
    pairs = [(r, theirs[r["step"]]) for r in base.records if r["step"] in theirs]

    def ratios(value: Any) -> dict[str, float]:
        found = sorted(
            value(mine) / value(yours)
            for mine, yours in pairs
            if value(mine) > 0 and value(yours) > 0
        )
        if not found:
            return {}
        return {
            "median": median(found),
            "low": quantile(found, 0.1),
            "high": quantile(found, 0.9),
        }

    total = [sum(series([r for r, _ in pairs], "time/step_s")[1])]
    total.append(sum(series([r for _, r in pairs], "time/step_s")[1]))
    return {
        "base": base.name,
        "run": other.name,
        "steps": len(pairs),
        "whole": total[0] / total[1] if total[1] else 0.0,
        "step": ratios(lambda r: r.get("time/step_s", 0.0)),
        "rollout": ratios(lambda r: r.get("time/rollout_s", 0.0)),
        "rollout_per_token": ratios(
            lambda r: r.get("time/rollout_s", 0.0) / max(1.0, r.get("rollout/output_tokens", 0.0))
        ),
        "reward": {run.name: summary(run.records).get("reward", {}) for run in (base, other)},
    }
