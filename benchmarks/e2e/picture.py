"""Draw how many times as fast as without speculation each arm is, scenario by scenario.

    python benchmarks/e2e/picture.py

Reads results/e2e/pairs/*.json and writes results/e2e/speed_ups.png. A dot is the median of the
paired ratios, a line its 95% interval.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from registry.core import Results
from registry.e2e import SCENARIOS, labels
from tlt.pictures import pyplot

RESULTS = Path(__file__).parents[1] / "results"
MEASURES = {"rollout": ("rollout", "#0072b2", 0.12), "end_to_end": ("end to end", "#e69f00", -0.12)}


def main() -> None:
    results = Results(RESULTS)
    docs = {title: results[f"e2e/pairs/{name}"] for name, title in SCENARIOS.items()}
    arms = list(reversed(labels(*docs.values()).items()))
    figure, axes = pyplot.subplots(
        1, len(docs), figsize=(11, 2.4), sharey=True, layout="constrained"
    )
    for axis, (title, doc) in zip(axes, docs.items(), strict=True):
        for measure, (label, colour, shift) in MEASURES.items():
            rows = [
                (place + shift, doc["speed_up"][arm]["every_pair"][measure])
                for place, (arm, _) in enumerate(arms)
                if arm in doc["speed_up"]
            ]
            heights = [height for height, _ in rows]
            middles = [found["median"] for _, found in rows]
            below = [found["median"] - found["median_low"] for _, found in rows]
            above = [found["median_high"] - found["median"] for _, found in rows]
            axis.errorbar(
                middles, heights, xerr=(below, above), fmt="o", ms=5, color=colour, label=label
            )
        axis.axvline(1, color="#777777", lw=1)
        axis.set_title(title)
        axis.set_yticks(range(len(arms)), [label for _, label in arms])
        axis.set_ylim(-0.6, len(arms) - 0.4)
        axis.grid(axis="x", alpha=0.3)
    axes[len(docs) // 2].set_xlabel("times as fast as without speculation")
    axes[0].legend(loc="lower right", fontsize=8)
    figure.savefig(RESULTS / "e2e" / "speed_ups.png", dpi=110)


if __name__ == "__main__":
    main()
