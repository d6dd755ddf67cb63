"""The pictures of `tlt drafter bench`, as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tlt.colours import arm_colour
from tlt.contracts import OFF, Arm
from tlt.report.svg import INK, Axis, Box, Chart, Line, sheet

LABELS = {"beg_mab": "BEG-MAB"}
"""Names in pictures, where they differ from those in results."""


def running(result: dict[str, Any]) -> str:
    """Return the unfinished requests over time, for the median run of each mode."""
    work, summary = result["workload"], result["summary"]
    num = work["num_requests"]
    lines, legend = [], {}
    for row in summary:
        runs = [run for run in result["runs"] if run["mode"] == row["mode"]]
        curve = sorted(runs, key=lambda run: run["wall_s"])[len(runs) // 2]["curve"]
        lines.append(Line(curve, _colour(row["mode"]), stairs=True))
        legend[f"{_label(row['mode'])}, {row['wall_s']['median']:.0f} s"] = _colour(row["mode"])
    end_s = max(line.points[-1][0] for line in lines)
    lines.append(Line([(0.0, num / 8), (end_s, num / 8)], INK, dashed=True, stairs=True))
    base, best = summary[0], min(summary, key=lambda row: row["wall_s"]["median"])
    title = f"Nothing is faster than {_label(base['mode'])}"
    if best is not base:
        gain = base["wall_s"]["median"] / best["wall_s"]["median"]
        title = (
            f"{_label(best['mode'])} is fastest: {gain:.2f}x the speed of {_label(base['mode'])}"
        )
    chart = Chart(
        f"{num} requests, {work['total_tokens']} tokens, {result['num_engines']} engines",
        Axis("seconds", 0, end_s),
        Axis("unfinished requests", 0, num),
        lines,
        legend,
    )
    below = ["Dashed: an eighth of the requests. The legend has median wall times."]
    return sheet(title, [chart], below)


def decisions(traces: Sequence[Sequence[tuple[float, int, str]]], mode: str) -> str:
    """Return the running requests of each engine over time, above the arms in use."""
    engines = [trace for trace in traces if trace]
    used = Counter(arm for trace in engines for _, _, arm in trace)
    arms = sorted(used, key=_order)
    end_s = max(trace[-1][0] for trace in engines)
    most = max(count for trace in engines for _, count, _ in trace)
    seconds = Axis("seconds", 0, end_s)
    names = {place + 0.5: arm for place, arm in enumerate(arms)}
    above, below = [], []
    for number, trace in enumerate(engines):
        line = Line([(at_s, count) for at_s, count, _ in trace], INK, stairs=True)
        above.append(Chart(f"engine {number}", seconds, Axis("running requests", 0, most), [line]))
        boxes = []
        ends = [at_s for at_s, _, _ in trace[1:]] + [end_s]
        for arm, group in groupby(zip(trace, ends, strict=True), key=lambda step: step[0][2]):
            steps = list(group)
            span, place = (steps[0][0][0], steps[-1][1]), arms.index(arm)
            says = f"{arm}, {len(steps)} engine steps"
            boxes.append(Box(span, (place + 0.1, place + 0.9), _colour(arm), says))
        below.append(Chart("", seconds, Axis("", 0, len(arms), names=names), boxes))
    favourite, times = used.most_common(1)[0]
    title = (
        f"{_label(mode)} used {len(used)} arms, most of all {favourite} "
        f"({times / used.total():.0%} of the decisions)"
    )
    return sheet(title, [*above, *below], columns=len(engines))


def _label(mode: str) -> str:
    return LABELS.get(mode, mode)


def _order(text: str) -> tuple[bool, str, int]:
    arm = Arm.parse(text)
    return arm != OFF, arm.drafter, arm.num_draft_tokens


def _colour(text: str) -> str:
    """Return the colour of a mode or an arm."""
    drafter, _, length = text.partition(":")
    drafter = "eagle3" if drafter == "tail" else drafter  # tail:K@B
    return arm_colour(drafter, int(length.split("@")[0] or 0))
