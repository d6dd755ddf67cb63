"""Draw how many times as fast as without speculation each arm is, scenario by scenario.

    python benchmarks/e2e/picture.py

Reads results/e2e/pairs/*.json and writes results/e2e/speed_ups.png. A dot is the median of the
paired ratios, a line its 95% interval.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from canvas import pyplot
from registry.core import Results
from registry.e2e import SCENARIOS, labels
from tlt.colours import INK, MODES

RESULTS = Path(__file__).parents[1] / "results"
MEASURES = {"end_to_end": ("whole RL steps", "o", 0.14), "rollout": ("rollouts", "D", -0.14)}
"""Label, marker and place of what is measured. Colours are those of the arms."""
COLOURS = MODES | {"fixed": MODES["eagle3"], "nothing": MODES["tlt"]}


def main() -> None:
    results = Results(RESULTS)
    docs = {title: results[f"e2e/pairs/{name}"] for name, title in SCENARIOS.items()}
    arms = list(reversed(labels(*docs.values()).items()))
    figure, axes = pyplot.subplots(
        1, len(docs), figsize=(11, 3.2), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (title, doc) in zip(axes, docs.items(), strict=True):
        for measure, (label, marker, shift) in MEASURES.items():
            for place, (arm, _) in enumerate(arms):
                if arm in doc["speed_up"]:
                    found = doc["speed_up"][arm]["every_pair"][measure]
                    middle = found["median"]
                    error = [[middle - found["median_low"]], [found["median_high"] - middle]]
                    look = {"fmt": marker, "ms": 6, "color": COLOURS[arm]}
                    if measure == "rollout":
                        look |= {"mfc": "none", "elinewidth": 1}
                    axis.errorbar(middle, place + shift, xerr=error, **look)
            hollow = {"mfc": "none"} if measure == "rollout" else {}
            axis.plot([], [], marker, color=INK, label=label, **hollow)
        axis.axvline(1, color=INK, lw=1)
        axis.set_title(title)
        axis.set_yticks(range(len(arms)), [label for _, label in arms])
        axis.set_ylim(-0.6, len(arms) - 0.4)
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel("times as fast as without speculation")
    axes[0].legend(loc="lower right", fontsize=8)
    gains = [doc["speed_up"]["tlt"]["every_pair"]["end_to_end"]["median"] for doc in docs.values()]
    said = " and ".join(
        f"{gain:.2f}x as fast with {'a ' * (title == 'heavy tail')}{title}"
        for gain, title in zip(gains, docs, strict=True)
    )
    figure.suptitle(f"Whole RL steps with TLT are {said}")
    figure.savefig(RESULTS / "e2e" / "speed_ups.png", dpi=110)


if __name__ == "__main__":
    main()
