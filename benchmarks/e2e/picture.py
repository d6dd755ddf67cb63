"""Draw the results of whole runs that followed each other, from before arms took turns.

    python benchmarks/e2e/picture.py tail equal

Reads results/e2e/<kind>.json and writes the .png beside it. Bars and marks of the first panel show
the same quantity, the seconds of an RL step: bars its mean over the repeats that count, marks every
repeat.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from registry.core import several
from registry.e2e import LABELS, kept, per_step, ratios, uncounted

RESULTS = Path(__file__).parents[1] / "results" / "e2e"
STAGES = {"rollout": "#0072b2", "update": "#e69f00", "the rest": "#bbbbbb"}
ARMS = {
    "off": "#777777",
    "static": "#d55e00",
    "ngram": "#cc79a7",
    "tlt": "#009e73",
    "unpublished": "#56b4e9",
}
NAMES = LABELS | {"static": "frozen drafter"}

PANELS = {
    "tail": {"hits": "share of drafts whose first token is accepted"},
    "equal": {"hits": "share of drafts whose first token is accepted"},
}


def draw(kind: str, result: dict[str, Any], path: Path) -> None:
    """Write the picture of one kind of runs."""
    from tlt.pictures import pyplot

    panels = PANELS[kind]
    figure, axes = pyplot.subplots(
        1,
        1 + len(panels),
        figsize=(5.2 * (1 + len(panels)), 4.4),
        layout="constrained",
        facecolor="white",
    )
    _seconds(axes[0], result)
    for axis, (key, label) in zip(axes[1:], panels.items(), strict=True):
        _by_step(axis, result, key, label)
    base, *arms = result["runs"]
    faster = ", ".join(f"{NAMES[a]} {several(ratios(result, a, 'step_s'))}" for a in arms)
    figure.suptitle(f"Speed end to end, against {NAMES[base]}: {faster}", fontweight="bold")
    figure.savefig(path, dpi=110, facecolor="white")
    pyplot.close(figure)


def _seconds(axis: Any, result: dict[str, Any]) -> None:
    arms = list(result["runs"])
    step, rollout, update = (
        [per_step(result, arm, key) for arm in arms] for key in ("step_s", "rollout_s", "update_s")
    )
    rest = [a - b - c for a, b, c in zip(step, rollout, update, strict=True)]
    below = [0.0] * len(arms)
    names = [NAMES[arm] for arm in arms]
    for (stage, colour), height in zip(STAGES.items(), (rollout, update, rest), strict=True):
        axis.bar(names, height, 0.6, bottom=below, color=colour, label=f"{stage}, mean")
        below = [a + b for a, b in zip(below, height, strict=True)]
    labelled = set()
    for place, arm in enumerate(arms):
        for repeat, run in enumerate(result["runs"][arm]):
            out = repeat in uncounted(result)
            label = "repeat left out of the mean" if out else "RL step of one repeat"
            axis.plot(
                place + 0.12 * (repeat - (len(result["runs"][arm]) - 1) / 2),
                run["step_s"] / result["steps"],
                "X" if out else "o",
                color="white" if out else "black",
                markeredgecolor="black",
                ms=8,
                label=None if label in labelled else label,
            )
            labelled.add(label)
    axis.set_ylim(0, 1.45 * max(step))
    axis.set_ylabel("seconds of an RL step")
    axis.set_title("bars: mean of the repeats that count; marks: every repeat", fontsize=9)
    axis.legend(fontsize=8, ncols=2, loc="upper center")


def _by_step(axis: Any, result: dict[str, Any], key: str, label: str) -> None:
    said = []
    for arm in result["runs"]:
        steps = list(zip(*(run[key] for run in kept(result, arm)), strict=True))
        if not any(any(values) for values in steps):
            continue
        mean = [statistics.fmean(values) for values in steps]
        axis.plot(range(1, len(steps) + 1), mean, color=ARMS[arm], label=NAMES[arm], lw=2)
        first, last = statistics.fmean(mean[: len(mean) // 2]), statistics.fmean(mean[-5:])
        said.append(f"{NAMES[arm]} {first:.2f}, then {last:.2f}")
    axis.set_title("; ".join(said), fontsize=9)
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("RL step (title: mean of the first half, then of the last five)", fontsize=8)
    axis.set_ylabel(label)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend()
    axis.grid(alpha=0.3)


def main() -> None:
    for kind in sys.argv[1:] or PANELS:
        path = RESULTS / f"{kind}.json"
        draw(kind, json.loads(path.read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
