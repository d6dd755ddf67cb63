"""The numbers behind `tlt report`, from the files in a run's folder.

`look_at` reads a folder into a `RunView`. The page, the JSON and the findings are computed from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from tlt.config.load import check_types, read_toml
from tlt.config.train import EmulateConfig, TrainConfig
from tlt.errors import ConfigError
from tlt.observe.record import read_lengths, read_metrics
from tlt.observe.summary import Record, series, stage_table, summary
from tlt.observe.timeline import LEARNER, StepTimeline, read_timeline, worker_seconds
from tlt.spans import Span

K = TypeVar("K")
TOTALS = ("seconds", "tokens", "drafts", "accepted")
"""Numbers of a span that add up."""
TAIL_SHARE = 1 / 8
"""A rollout is in its tail while at most this share of its requests runs."""


@dataclass(slots=True)
class RunView:
    """The records of one run."""

    name: str
    config: dict[str, Any]
    records: list[Record]
    """One record per RL step, from step 1 on."""
    all_records: list[Record]
    """All records, with the measurements before the first RL step."""
    lengths: list[int]
    """Tokens of every response."""
    timelines: list[StepTimeline] = field(default_factory=list)
    folder: Path | None = None
    """Folder of the run; None for a run that is not on disk."""

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting of the run by its dotted name."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found

    @property
    def emulated(self) -> str:
        """Return what the run emulates, in words; empty if it emulates nothing."""
        given = EmulateConfig(**self.setting("emulate", {}))
        return given.label(int(self.setting("pool.num_engines", 1)))


def look_at(folder: Path, latest: int | None = None) -> RunView:
    """Read a run that has finished at least one RL step; only its latest RL steps if asked for."""
    metrics = folder / "metrics.jsonl"
    if not (folder / "config.toml").exists() or not metrics.exists():
        raise ConfigError(
            f"{folder} holds no run of `tlt train` (no config.toml and metrics.jsonl in it); "
            f"give the folder that run.out named, e.g. {_run_in(folder) or 'runs/tiny'}"
        )
    records = read_metrics(metrics)
    steps = [record for record in records if record["step"] > 0][-latest if latest else 0 :]
    if not steps:
        raise ConfigError(f"the run in {folder} has not finished a step yet; try again later")
    by_step = read_lengths(folder / "lengths.jsonl")
    config = read_toml(folder / "config.toml")
    check_types(TrainConfig, config, str(folder / "config.toml"))
    return RunView(
        name=folder.resolve().name,
        config=config,
        records=steps,
        all_records=records,
        lengths=[tokens for of_step in by_step[-latest if latest else 0 :] for tokens in of_step],
        timelines=read_timeline(folder / "timeline.json", latest),
        folder=folder,
    )


def _run_in(folder: Path) -> Path | None:
    """Return a run below a folder, such as one of several that a user keeps together."""
    try:
        inside = sorted(folder.glob("*/metrics.jsonl"))
    except OSError:
        return None
    return inside[-1].parent if inside else None


def same_samples(base: RunView, other: RunView) -> dict[str, int]:
    """Count the samples that both runs kept, and the ones with equal texts, lengths and rewards.

    A run keeps the same samples of an RL step, in any order of their ends (`metrics.keep_samples`).
    """
    found = {"compared": 0, "same": 0}
    if base.folder is None or other.folder is None:
        return found
    for file in sorted((base.folder / "samples").glob("step-*.jsonl")):
        same_step = other.folder / "samples" / file.name
        if same_step.exists():
            mine, theirs = (Counter(f.read_bytes().splitlines()) for f in (file, same_step))
            found["compared"] += min(mine.total(), theirs.total())
            found["same"] += (mine & theirs).total()
    return found


# --- numbers --------------------------------------------------------------------------------------


def describe(view: RunView) -> dict[str, Any]:
    """Return all numbers of the report, ready for JSON."""
    return {
        "name": view.name,
        "emulated": view.emulated,
        "settings": settings(view),
        **summary(view.records),
        "stages": [
            {"stage": stage, "median_s": middle_s, "share": share}
            for stage, middle_s, share in stage_table(view.records)
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
    """Return the settings that distinguish runs most often."""
    keys = (
        *("policy.model", "task.name", "sampling.prompts_per_step", "sampling.group_size"),
        *("sampling.max_tokens", "pool.num_engines", "placement.kind", "tlt.enabled"),
        *("tlt.harvest", "engine.strategy.kind", "engine.drafter", "learner.lr", "run.seed"),
    )
    return {key: view.setting(key) for key in keys if view.setting(key) is not None}


def lengths(view: RunView) -> dict[str, float]:
    """Return the distribution of response lengths in a few numbers; empty without lengths."""
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
    """Return the smallest value that at least this share of the values does not exceed."""
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def reclaimed(view: RunView) -> dict[str, float]:
    """Return the idle seconds of all workers, and how many of them trained the drafter."""
    workers = worker_seconds(view.timelines).values()
    idle_s, training_s = (sum(of[state] for of in workers) for state in ("idle", "training"))
    share = training_s / (idle_s + training_s) if idle_s + training_s else 0.0
    return {"idle_s": idle_s, "training_s": training_s, "share": share}


def tail_share(view: RunView) -> float:
    """Return the share of the rollouts' time that is tail: few requests, after the peak."""
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
    """Return start and end of every rollout of an RL step."""
    return [(start, end) for stage, start, end in timeline.stages if stage == "rollout"]


def running(timeline: StepTimeline, start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Return (seconds since the start, requests running from then on) of all engines together."""
    changes: dict[float, float] = {start_s: 0.0}
    for span in _generated(timeline):
        if span.start_s < end_s and span.end_s > start_s:
            begin_s = max(start_s, span.start_s)
            for at_s, change in ((begin_s, span.running), (span.end_s, -span.running)):
                changes[at_s] = changes.get(at_s, 0.0) + change
    curve: list[tuple[float, float]] = []
    count = 0.0
    for at_s in sorted(changes):
        count += changes[at_s]
        if at_s < end_s:
            curve.append((at_s - start_s, max(0.0, round(count, 3))))
    return curve


def _generated(timeline: StepTimeline) -> list[Span]:
    engines = (spans for worker, spans in timeline.rows.items() if worker != LEARNER)
    return [span for spans in engines for span in spans if span.state == "generating"]


def span_totals(spans: Iterable[Span], key: Callable[[Span], K]) -> dict[K, dict[str, float]]:
    """Return seconds, tokens, drafts and accepted tokens of spans with the same key."""
    found: dict[K, dict[str, float]] = {}
    for span in spans:
        total = found.setdefault(key(span), dict.fromkeys(TOTALS, 0))
        for name in TOTALS:
            total[name] += getattr(span, name)
    return found


def arms(view: RunView) -> dict[str, dict[str, float]]:
    """Return seconds, tokens, drafts and acceptance length of every arm, the most used first."""
    return by_arm(span for timeline in view.timelines for span in _generated(timeline))


def by_arm(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Return the figures of `arms` for some spans of generating."""
    found = span_totals(spans, lambda span: span.arm)
    for arm in found.values():
        arm["acceptance_length"] = 1 + arm["accepted"] / arm["drafts"] if arm["drafts"] else 1.0
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


def drafters(view: RunView) -> list[dict[str, float]]:
    """Return the drafters that engines used, each with the first RL step that used it."""
    found: list[dict[str, float]] = []
    for record in view.records:
        version = record.get("drafter_version", 0)
        length = record.get("harvest/held_out_length", 0.0)
        if not found or found[-1]["version"] != version:
            found.append({"version": version, "step": record["step"], "held_out_length": length})
    return found if len(found) > 1 or found[0]["version"] else []


def harvest(view: RunView) -> dict[str, float]:
    """Return the totals of harvest over the run; empty for a run without harvest."""
    if not any("harvest/used_s" in record for record in view.records):
        return {}
    names = ("idle_s", "coverable_s", "used_s", "trained_tokens", "published", "refused", "faults")
    return {name: sum(series(view.records, f"harvest/{name}")[1]) for name in names}
