"""The picture of a drafter's training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WHEN = ("before", "after")


def plot_training(report: dict[str, Any], out: Path) -> Path:
    """Plot the acceptance length during training, and acceptance by position before and after."""
    from tlt.pictures import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    history = report["training"]["history"]
    temperatures = list(report["acceptance"]["after"])
    colors = {t: f"C{i}" for i, t in enumerate(temperatures)}
    for index, temperature in enumerate(temperatures):
        left.plot(
            [h["elapsed_s"] / 60 for h in history],
            [h[f"length@{temperature}"] for h in history],
            linestyle=("-", "--", ":")[index % 3],  # the curves may coincide
            marker="o",
            markersize=3,
            color=colors[temperature],
            label=f"temperature {temperature}",
        )
    left.set_xlabel("minutes of training")
    left.set_ylabel("expected acceptance length")
    left.set_ylim(1, report["num_draft_tokens"] + 1)
    left.set_title("held-out samples, while training")
    measured = [report["acceptance"][when][temperatures[-1]]["length"] for when in WHEN]
    figure.suptitle(
        "Acceptance length {:.2f} before training, {:.2f} after".format(*measured)
        + f" (temperature {temperatures[-1]})"
    )
    left.legend()

    positions = range(1, report["num_draft_tokens"] + 1)
    width = 0.8 / (2 * len(temperatures))
    bars = [(when, t) for t in temperatures for when in WHEN]
    for index, (when, temperature) in enumerate(bars):
        measured = report["acceptance"][when][temperature]
        right.bar(
            [p - 0.4 + width * (index + 0.5) for p in positions],
            measured["by_position"],
            width,
            color=colors[temperature],
            alpha=0.35 if when == "before" else 1.0,
            label=f"{when}, temperature {temperature}: length {measured['length']:.2f}",
        )
    right.set_xticks(list(positions))
    right.set_xlabel("draft position")
    right.set_ylabel("share of drafts accepted up to here")
    right.set_ylim(0, 1)
    right.set_title(f"in the engine, {report['num_held_out_prompts']} held-out prompts")
    right.legend(fontsize=8)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out
