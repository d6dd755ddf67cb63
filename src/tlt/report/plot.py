"""`run.png`: four panels that show a training run."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt import colours
from tlt.observe.metrics import STAGES
from tlt.observe.summary import Record, series

FEW_STEPS = 40  # up to here, every RL step gets a marker


def plot_run(records: list[Record], out: Path, title: str) -> Path:
    """Plot rewards, response lengths, stages and speed over the RL steps, and return the file."""
    if not records:
        raise ValueError("no step is recorded yet: there is nothing to plot")
    from matplotlib.ticker import MaxNLocator

    from tlt.pictures import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), constrained_layout=True)
    (reward, length), (time, speed) = axes
    _plot_reward(reward, records)
    _plot_lengths(length, records)
    _plot_stages(time, records)
    _plot_speed(speed, records)
    steps = [record["step"] for record in records]
    for panel in axes.flat:
        panel.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
        panel.set_xlabel("RL step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out


def _plot_reward(panel: Any, records: list[Record]) -> None:
    steps, values = series(records, "reward/mean")
    window = 2 * (len(values) // 40 + 1) + 1
    faint = {"color": "C0", "alpha": 0.35, "linewidth": 1, "markersize": 4}
    panel.plot(steps, values, marker=_marker(values), label="each RL step", **faint)
    label = f"mean of {window} RL steps"
    panel.plot(steps, smoothed(values, window), color="C0", linewidth=2, label=label)
    steps, values = series(records, "eval/reward_mean")
    if values:
        dashed = {"color": "C1", "linestyle": "--", "marker": "D", "markersize": 5}
        panel.plot(steps, values, label="held out", **dashed)
    panel.set_ylabel("reward")
    means = smoothed(values, window) or [math.nan]
    panel.set_title(f"Reward: from {means[0]:.2f} to {means[-1]:.2f}")
    panel.grid(alpha=0.25)
    panel.legend(fontsize=9)


def _plot_lengths(panel: Any, records: list[Record]) -> None:
    lines = (
        ("longest", "response/longest_tokens", "C3"),
        ("99th percentile", "response/p99_tokens", "C1"),
        ("median", "response/median_tokens", "C0"),
    )
    _plot_on_log_axis(panel, records, lines)
    panel.set_ylabel("tokens")
    panel.set_title("Response lengths")


def _plot_stages(panel: Any, records: list[Record]) -> None:
    steps = [record["step"] for record in records]
    # Each bar reaches to the next record's bar.
    edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]
    below = [0.0] * len(records)
    for stage in STAGES:
        seconds = [max(0.0, record.get(f"time/{stage}_s", 0.0)) for record in records]
        if not any(seconds):
            continue
        tops = [low + more for low, more in zip(below, seconds, strict=True)]
        color = colours.STAGES[stage]
        label = stage.replace("_", " ")
        panel.stairs(tops, edges, baseline=below, fill=True, color=color, label=label)
        below = tops
    panel.set_ylim(0, max(below) * 1.3 or 1)  # room for the legend
    panel.set_ylabel("seconds")
    rollout = sum(record.get("time/rollout_s", 0.0) for record in records)
    share = f": {rollout / sum(below):.0%} rollout" if any(below) else ""
    panel.set_title(f"Where the time goes{share}")
    if any(below):
        panel.legend(fontsize=9, loc="upper center", ncols=4)


def _plot_speed(panel: Any, records: list[Record]) -> None:
    lines = (
        ("rollout", "rollout/tokens_per_s", "C0"),
        ("learner", "learner/tokens_per_s", "C2"),
    )
    if any(series(records, name)[1] for _, name, _ in lines):
        _plot_on_log_axis(panel, records, lines)
        panel.set_ylabel("tokens per second")
        panel.set_title("Speed")
    else:
        steps, values = series(records, "learner/gap_mean")
        panel.plot(steps, values, color="C4", marker=_marker(values), markersize=3)
        panel.set_ylim(0, max(values, default=0) * 1.1 or 1)
        panel.set_ylabel("mean log-probability gap")
        panel.set_title("Gap between engines and learner")
        panel.grid(alpha=0.25)


def _plot_on_log_axis(
    panel: Any, records: list[Record], lines: tuple[tuple[str, str, str], ...]
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    shown: list[float] = []
    for label, name, color in lines:
        steps, values = series(records, name)
        values = [value if value > 0 else math.nan for value in values]
        panel.plot(steps, values, color=color, marker=_marker(values), markersize=3, label=label)
        shown += [value for value in values if value > 0]
    panel.set_yscale("log")
    if shown:  # wide enough for a tick at 1, 2 or 5
        panel.set_ylim(min(shown) / 1.6, max(shown) * 1.6)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.25)
    panel.legend(fontsize=9)


def _marker(values: list[float]) -> str:
    return "o" if len(values) <= FEW_STEPS else ""


def smoothed(values: list[float], window: int) -> list[float]:
    """Return means over `window` values (odd) around each value; over fewer at both ends."""
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
