"""Draw every picture of benchmarks/results again, from the result files beside them.

    python benchmarks/pictures.py

Nothing is measured. Pictures of what `tlt` itself draws are SVG, by the same code; the others are
matplotlib's. They have no background, and can be read on light and dark pages.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

from canvas import pyplot
from common import RESULTS
from common import load as result
from tlt.bench import charts
from tlt.colours import INK, arm_colour
from tlt.report.charts import charts_of, training_picture
from tlt.report.svg import sheet
from tlt.report.view import look_at

HERE = Path(__file__).parent


SHOWN = {"adaptive": "adaptive", "beg_mab": "BEG-MAB", "fixed": "best fixed arm", "off": "off"}
"""Strategies in the picture of the replay."""


def main() -> None:
    drawn = training_picture(result("drafter/report"))
    (RESULTS / "drafter" / "report.svg").write_text(drawn)
    plot_run(RESULTS / "train", "SmolLM2-135M learns sums")
    plot_replay(result("strategy/strategy")["results"], RESULTS / "strategy" / "strategy.png")
    for path in sorted(RESULTS.glob("**/rollout.json")):
        rollout = json.loads(path.read_text())
        path.with_suffix(".svg").write_text(charts.running(rollout))
        for mode, decisions in rollout["decisions"].items():
            if ":" not in mode and mode != "off":
                picture = charts.decisions(decisions, mode)
                path.with_name(f"{mode}.svg").write_text(picture)
    sys.path.insert(0, str(HERE / "e2e"))  # as if each script ran alone
    runpy.run_path(str(HERE / "e2e" / "workers.py"), run_name="__main__")


def plot_run(folder: Path, title: str) -> None:
    """Draw the rewards and the seconds of a run, as its report shows them."""
    (found,) = charts_of([look_at(folder)])
    (folder / "run.svg").write_text(sheet(title, [found["reward"], found["stages"]]))


def plot_replay(results: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw the strategies' shares of the oracle's throughput, a panel per table.

    Of the fixed arms, every scenario shows the best one.
    """
    figure, panels = pyplot.subplots(
        1, len(results), figsize=(5.5 * len(results), 4), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    width = 0.8 / len(SHOWN)
    everywhere: dict[str, list[float]] = {label: [] for label in SHOWN.values()}
    for axes, (table, rows) in zip(panels[0], results.items(), strict=True):
        scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
        for place, scenario in enumerate(scenarios):
            mine = {row["strategy"]: row for row in rows if row["scenario"] == scenario}
            fixed = [row for name, row in mine.items() if ":" in name]
            best = max(fixed, key=lambda row: row["of_oracle"], default=mine["off"])
            for index, (name, label) in enumerate(SHOWN.items()):
                row = best if name == "fixed" else mine[name]
                share = row["of_oracle"]
                everywhere[label].append(share)
                at = place + (index - (len(SHOWN) - 1) / 2) * width
                drafter, _, length = row["strategy"].partition(":")
                axes.bar(
                    at, share, 0.9 * width, color=arm_colour(drafter, int(length or 0)),
                    yerr=[[share - row["low"]], [row["high"] - share]], capsize=2, ecolor=INK,
                )  # fmt: skip
                text = row["strategy"] if name == "fixed" else label
                look = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 8}
                axes.text(at, 0.02, text, color="white", **look)
        axes.set_xticks(range(len(scenarios)), scenarios)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("\n".join(wrap(table, 60)))
    panels[0][0].set_ylabel("share of the oracle's throughput")
    closest = max(everywhere, key=lambda label: fmean(everywhere[label]))
    figure.suptitle(f"Closest to the oracle: {closest} (replayed, modelled)")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
