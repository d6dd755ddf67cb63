"""Pictures of benchmark results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlt.contracts import OFF, Arm

LABELS = {"beg_mab": "BEG-MAB"}
"""Names in pictures, where they differ from those in results."""


def plot_running(result: dict[str, Any], out: Path) -> Path:
    """Plot the unfinished requests over time, for the median run of each mode."""
    from tlt.pictures import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    num = result["workload"]["num_requests"]
    for row in result["summary"]:
        runs = sorted(
            (r for r in result["runs"] if r["mode"] == row["mode"]), key=lambda r: r["wall_s"]
        )
        curve = runs[len(runs) // 2]["curve"]
        label = f"{LABELS.get(row['mode'], row['mode'])}  ({row['wall_s']['median']:.0f} s)"
        axes.step([p[0] for p in curve], [p[1] for p in curve], where="post", label=label)
    axes.axhline(num / 8, color="0.6", linestyle=":", linewidth=1)
    axes.annotate("1/8 of the requests", (0.01, num / 8), xycoords=("axes fraction", "data"),
                  va="bottom", fontsize=8, color="0.4")  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_ylabel("unfinished requests")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{num} requests, {result['workload']['total_tokens']} tokens, "
        f"longest {result['workload']['longest']}, {result['num_engines']} engines"
    )
    axes.legend(title="mode (median wall time)")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out


def plot_decisions(decisions: list[list[tuple[float, int, str]]], mode: str, out: Path) -> Path:
    """Plot the running decodes of each engine over time, above the arms in use."""
    from tlt.pictures import pyplot

    engines = [trace for trace in decisions if trace]
    arms = sorted({arm for trace in engines for _, _, arm in trace}, key=_arm_order)
    figure, grid = pyplot.subplots(
        2, len(engines), figsize=(6 * len(engines) + 1, 5), sharex="col", squeeze=False,
        constrained_layout=True, gridspec_kw={"height_ratios": [3, 2]},
    )  # fmt: skip
    for column, trace in enumerate(engines):
        seconds = [point[0] for point in trace]
        above, below = grid[0][column], grid[1][column]
        above.step(seconds, [point[1] for point in trace], where="post", color="0.3")
        above.set_ylabel("running requests")
        above.set_ylim(bottom=0)
        above.set_title(f"engine {column}")
        places = [arms.index(point[2]) for point in trace]
        below.scatter(seconds, places, s=6, marker="|", c=[f"C{place % 10}" for place in places])
        below.set_yticks(range(len(arms)), arms)
        below.set_ylim(-0.5, len(arms) - 0.5)
        below.grid(axis="y", alpha=0.3)
        below.set_xlabel("seconds")
    figure.suptitle(f"decisions of {LABELS.get(mode, mode)}")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out


def _arm_order(text: str) -> tuple[bool, str, int]:
    arm = Arm.parse(text)
    return arm != OFF, arm.drafter, arm.num_draft_tokens


def plot_replay(results: dict[str, list[dict[str, Any]]], out: Path) -> Path:
    """Plot the throughput of every strategy relative to the oracle's, a panel per table."""
    from tlt.pictures import pyplot

    figure, panels = pyplot.subplots(
        len(results), 1, figsize=(11, 3.6 * len(results)), squeeze=False, constrained_layout=True
    )
    for axes, (table, rows) in zip(panels[:, 0], results.items(), strict=True):
        scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
        strategies = list(dict.fromkeys(row["strategy"] for row in rows))
        width = 0.8 / len(scenarios)
        for index, scenario in enumerate(scenarios):
            mine = {row["strategy"]: row for row in rows if row["scenario"] == scenario}
            middle = [mine[strategy]["of_oracle"] for strategy in strategies]
            low = [mine[strategy]["of_oracle"] - mine[strategy]["low"] for strategy in strategies]
            high = [mine[strategy]["high"] - mine[strategy]["of_oracle"] for strategy in strategies]
            places = [
                place + (index - (len(scenarios) - 1) / 2) * width
                for place in range(len(strategies))
            ]
            axes.bar(places, middle, 0.9 * width, yerr=[low, high], capsize=2, label=scenario)
        axes.axhline(0.97, color="0.4", linestyle=":", linewidth=1, label="0.97")
        axes.set_xticks(range(len(strategies)), [LABELS.get(name, name) for name in strategies])
        axes.set_ylim(0, 1.1)
        axes.set_ylabel("throughput relative to oracle")
        axes.set_title(f"replay (modelled), {table}", loc="left", fontsize=10)
        columns = len(scenarios) + 1
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, frameon=False)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out
