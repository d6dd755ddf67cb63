"""Pictures of benchmark results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

from tlt.colours import INK, arm_colour
from tlt.contracts import OFF, Arm

LABELS = {"beg_mab": "BEG-MAB"}
"""Names in pictures, where they differ from those in results."""
SHOWN = {"adaptive": "adaptive", "beg_mab": "BEG-MAB", "fixed": "best fixed arm", "off": "off"}
"""Strategies in the picture of the replay."""
SCENARIOS = {
    "stationary": "acceptance stays", "drifting": "acceptance drifts", "abrupt": "acceptance jumps"
}  # fmt: skip


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
        look = {"where": "post", "color": _mode_colour(row["mode"]), "label": label}
        axes.step([p[0] for p in curve], [p[1] for p in curve], **look)
    axes.axhline(num / 8, color=INK, linestyle=":", linewidth=1)
    axes.annotate("1/8 of the requests", (0.01, num / 8), xycoords=("axes fraction", "data"),
                  va="bottom", fontsize=8)  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_ylabel("unfinished requests")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    base, *_ = result["summary"]
    best = min(result["summary"], key=lambda row: row["wall_s"]["median"])
    gain = base["wall_s"]["median"] / best["wall_s"]["median"]
    said = LABELS.get(best["mode"], best["mode"])
    figure.suptitle(
        f"{said} is fastest: {gain:.2f}x as fast as {LABELS.get(base['mode'], base['mode'])}"
        if best is not base
        else f"Nothing is faster than {said}"
    )
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
        above.step(seconds, [point[1] for point in trace], where="post", color=INK)
        above.set_ylabel("running requests")
        above.set_ylim(bottom=0)
        above.set_title(f"engine {column}")
        places = [arms.index(point[2]) for point in trace]
        below.scatter(seconds, places, s=6, marker="|", c=[_mode_colour(p[2]) for p in trace])
        below.set_yticks(range(len(arms)), arms)
        below.set_ylim(-0.5, len(arms) - 0.5)
        below.grid(axis="y", alpha=0.3)
        below.set_xlabel("seconds")
    used = Counter(arm for trace in engines for _, _, arm in trace)
    most, steps = used.most_common(1)[0]
    figure.suptitle(
        f"{LABELS.get(mode, mode)} used {len(used)} of its arms, most of all {most} "
        f"({steps / used.total():.0%} of the decisions)"
    )
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out


def _arm_order(text: str) -> tuple[bool, str, int]:
    arm = Arm.parse(text)
    return arm != OFF, arm.drafter, arm.num_draft_tokens


def _mode_colour(text: str) -> str:
    """Return the colour of a mode or an arm."""
    drafter, _, length = text.partition(":")
    drafter = "eagle3" if drafter == "tail" else drafter  # tail:K@B
    return arm_colour(drafter, int(length.split("@")[0] or 0))


def plot_replay(results: dict[str, list[dict[str, Any]]], out: Path) -> Path:
    """Plot the strategies' shares of the oracle's throughput, a panel per table.

    Of the fixed arms, every scenario shows the best one.
    """
    from tlt.pictures import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(5.5 * len(results), 4), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    everywhere: dict[str, list[float]] = {label: [] for label in SHOWN.values()}
    for axes, (table, rows) in zip(panels[0], results.items(), strict=True):
        reached: dict[str, list[float]] = {label: [] for label in SHOWN.values()}
        scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
        width = 0.8 / len(SHOWN)
        for place, scenario in enumerate(scenarios):
            mine = {row["strategy"]: row for row in rows if row["scenario"] == scenario}
            fixed = [row for name, row in mine.items() if ":" in name]
            best = max(fixed, key=lambda row: row["of_oracle"], default=mine["off"])
            for index, (name, label) in enumerate(SHOWN.items()):
                row = best if name == "fixed" else mine[name]
                middle = row["of_oracle"]
                reached[label].append(middle)
                everywhere[label].append(middle)
                error = [[middle - row["low"]], [row["high"] - middle]]
                at = place + (index - (len(SHOWN) - 1) / 2) * width
                axes.bar(
                    at, middle, 0.9 * width, yerr=error, capsize=2, ecolor=INK,
                    color=_mode_colour(row["strategy"]),
                )  # fmt: skip
                text = row["strategy"] if name == "fixed" else label
                axes.text(
                    at, 0.02, text, rotation=90, ha="center", va="bottom", fontsize=8, color="white"
                )
        axes.set_xticks(range(len(scenarios)), [SCENARIOS.get(name, name) for name in scenarios])
        axes.set_ylim(0, 1.05)
        said = [f"{label} {min(of):.0%} to {max(of):.0%}" for label, of in reached.items()]
        axes.set_title(f"{', '.join(said[:2])},\n{', '.join(said[2:])}", fontsize=10)
        axes.set_xlabel("\n".join(wrap(table, 60)))
    panels[0][0].set_ylabel("share of the oracle's throughput")
    closest = max(everywhere, key=lambda label: fmean(everywhere[label]))
    figure.suptitle(f"Closest to the oracle: {closest} (replayed, modelled)")
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return out
