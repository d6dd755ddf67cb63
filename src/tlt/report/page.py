"""`tlt report` as one HTML file that needs neither network nor scripts, and as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from tlt.contracts import OFF, Arm
from tlt.observe.metrics import STAGES
from tlt.observe.summary import series
from tlt.observe.timeline import LEARNER, StepTimeline
from tlt.report.findings import findings
from tlt.report.svg import COLOURS, Chart, number, ticks
from tlt.report.view import RunView, compare, describe, rollouts, running
from tlt.spans import STATES

STAGE_COLOURS = dict(zip(STAGES, COLOURS, strict=False)) | {"other": "#c4c7cc"}
STATE_COLOURS = {
    "generating": "#3b6fb6",
    "training": "#4b9d5b",
    "idle": "#e5e0d3",
    "updating": "#e08a2e",
    "swapping": "#b6455b",
    "waiting": "#c4c7cc",
    "lost": "#222222",
}
ARM_COLOURS = {"off": "#c4c7cc", "ngram": "#e08a2e", "eagle3": "#4b9d5b"}
MAX_BARS = 300
"""Of more steps every second one is drawn, or fewer."""
SHADES = (0.45, 0.6, 0.75, 0.9, 1.0)

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2126; background: #fff;
       max-width: 1080px; margin: 0 auto; padding: 12px 16px 48px; }
h1 { font-size: 1.6em; margin: .6em 0 .2em; } h2 { margin: 1.6em 0 .3em; font-size: 1.3em; }
h3 { font-size: 1.02em; margin: 0 0 .2em; }
p { margin: .3em 0 .6em; } .note { color: #5a626c; font-size: .9em; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
        gap: 18px 26px; margin-top: 12px; }
.grid > section { min-width: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92em; margin: .3em 0; }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; }
td:first-child { white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { border-bottom: 1px solid #b8bec6; } tbody tr + tr td { border-top: 1px solid #eceef0; }
svg { width: 100%; height: auto; display: block; }
.finding { border-left: 4px solid #e08a2e; background: #fdf6ec; padding: 6px 12px; margin: 8px 0;
           border-radius: 0 4px 4px 0; }
.big { font-size: 1.5em; font-weight: 600; }
"""


def as_json(views: Sequence[RunView]) -> str:
    runs = [
        describe(view)
        | {
            "findings": [
                {"kind": f.kind, "says": f.says, "change": f.change} for f in findings(view)
            ]
        }
        for view in views
    ]
    comparisons = [compare(views[0], other) for other in views[1:]]
    return json.dumps({"runs": runs, "comparisons": comparisons}, indent=2)


def as_html(views: Sequence[RunView]) -> str:
    names = ", ".join(view.name for view in views)
    parts = [f"<h1>TLT: {escape(names)}</h1>"]
    if len(views) > 1:
        parts.append(_comparison(views))
    parts += [_run(view) for view in views]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>TLT: {escape(names)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def pictures(view: RunView) -> dict[str, str]:
    """The charts of a run as SVG files of their own."""
    found = describe(view)
    sections = {
        "stages": _stages(view, found),
        "rollout": _rollout(view),
        "workers": _workers(view),
        "lengths": _lengths(view, found),
        "acceptance": _acceptance(view, found),
        "reward": _reward(view),
    }
    drawn = {name: re.search(r"<svg.*?</svg>", html, re.S) for name, html in sections.items()}
    return {name: svg[0] for name, svg in drawn.items() if svg is not None}


# --- several runs ---------------------------------------------------------------------------------


def _comparison(views: Sequence[RunView]) -> str:
    base = views[0]
    rows = []
    for other in views[1:]:
        found = compare(base, other)
        rewards = [found["reward"][view.name].get("last_fifth", math.nan) for view in (base, other)]
        rows.append(
            [
                other.name,
                f"{found['whole']:.2f}x",
                _spread(found["step"]),
                _spread(found["rollout"]),
                _spread(found["rollout_per_token"]),
                f"{rewards[0]:.3f} / {rewards[1]:.3f}",
            ]
        )
    headings = ("run", "all steps", "a step", "its rollout", "rollout, per token", "reward at end")
    steps = Chart(
        _step_range(views), (0, _top(views, "time/step_s")), "RL step", "seconds of the step"
    )
    rewards_chart = Chart(
        _step_range(views), (_low(views, "reward/mean"), _top(views, "reward/mean")), "RL step",
        "mean reward",
    )  # fmt: skip
    for view, colour in zip(views, COLOURS, strict=False):
        steps.line(_points(view, "time/step_s"), colour)
        rewards_chart.line(_points(view, "reward/mean"), colour)
    colours = {view.name: colour for view, colour in zip(views, COLOURS, strict=False)}
    return (
        f"<h2>Speed-up over {escape(base.name)}</h2>"
        + _table(headings, rows)
        + '<p class="note">Medians of the ratios of equal steps, with the range that 80% of them '
        "lie in. Where lengths differ by chance, the rollout per token is the fair figure.</p>"
        + _grid(
            ("Seconds of a step", steps.svg("seconds of a step", colours)),
            ("Reward", rewards_chart.svg("mean reward", colours)),
        )
    )


def _spread(found: Mapping[str, float]) -> str:
    if not found:
        return "-"
    return f"{found['median']:.2f}x ({found['low']:.2f} to {found['high']:.2f})"


# --- one run --------------------------------------------------------------------------------------


def _run(view: RunView) -> str:
    found = describe(view)
    words = "".join(
        f'<div class="finding"><p>{_prose(f.says)}</p><p><b>To do:</b> {_prose(f.change)}</p></div>'
        for f in findings(view)
    )
    given = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>"
        for key, value in found["settings"].items()
    )
    return (
        f"<h2>{escape(view.name)}</h2>"
        f"<p>{found['num_steps']} steps, {found['total'].get('time/step_s', 0) / 60:.1f} minutes."
        f"</p>{words}"
        + _grid(
            ("Where the seconds of a step go", _stages(view, found)),
            ("Running requests of one rollout, and how they were decoded", _rollout(view)),
            ("What every worker did in that step", _workers(view)),
            ("Response lengths", _lengths(view, found)),
            ("Acceptance length", _acceptance(view, found)),
            ("Reward", _reward(view)),
            ("Seconds of the workers", _seconds(found)),
            ("Ways of decoding", _arms(found)),
            ("Drafters", _drafters(found)),
            ("Settings", f'<div class="scroll"><table>{given}</table></div>'),
        )
    )


def _stages(view: RunView, found: Mapping[str, Any]) -> str:
    every = len(view.records) // MAX_BARS + 1
    records = view.records[::every]
    steps = [record["step"] for record in records]
    tops = [sum(record.get(f"time/{s}_s", 0.0) for s in STAGES) for record in records]
    chart = Chart((steps[0] - 0.5, steps[-1] + 0.5), (0, max(tops)), "RL step", "seconds")
    for record in records:
        below = 0.0
        for stage in STAGES:
            seconds = max(0.0, record.get(f"time/{stage}_s", 0.0))
            if seconds:
                at = record["step"]
                says = f"step {at:.0f}: {_words(stage)} {seconds:.2f} s"
                chart.box(
                    (at - 0.42, at + 0.42), (below, below + seconds), STAGE_COLOURS[stage], says
                )
                below += seconds
    rows = [
        [_words(row["stage"]), f"{row['median_s']:.2f}", f"{row['share']:.0%}"]
        for row in found["stages"]
    ]
    used = {_words(row["stage"]): STAGE_COLOURS[row["stage"]] for row in found["stages"]}
    return chart.svg("seconds of every stage, step by step", used) + _table(
        ("stage", "median s", "share"), rows, numbers=(1, 2)
    )


def _typical(view: RunView) -> StepTimeline | None:
    """The step whose rollout took the median time."""
    timed = [
        (sum(end - start for start, end in rollouts(timeline)), timeline)
        for timeline in view.timelines
        if rollouts(timeline)
    ]
    if not timed:
        return None
    timed.sort(key=lambda pair: pair[0])
    return timed[len(timed) // 2][1]


def _rollout(view: RunView) -> str:
    timeline = _typical(view)
    if timeline is None:
        return _missing("timeline.json", "metrics.timeline = true")
    start_s, end_s = rollouts(timeline)[0]
    curve = running(timeline, start_s, end_s)
    most = max((count for _, count in curve), default=1.0)
    engines = [worker for worker in timeline.rows if worker != LEARNER][:6]
    strip = most * 0.09
    bottom = -strip * (len(engines) + 0.5)
    chart = Chart(
        (0, end_s - start_s), (bottom, most), "seconds since the rollout began", "requests running",
        y_names={value: number(value) for value in ticks(0, most, 4)},
    )  # fmt: skip
    chart.stairs(curve, end_s - start_s, "#1d2126")
    shown: dict[str, str] = {}
    for place, worker in enumerate(engines):
        top = -strip * (place + 0.5)
        for span in timeline.rows[worker]:
            begin, end = max(span.start_s, start_s), min(span.end_s, end_s)
            if span.state != "generating" or end <= begin:
                continue
            colour = _arm_colour(span.arm)
            shown[span.arm] = colour
            says = f"{worker}: {span.arm}, {span.running:.0f} running"
            chart.box((begin - start_s, end - start_s), (top - strip * 0.8, top), colour, says)
    names = "one strip an engine" if len(engines) > 1 else "the engine"
    return (
        chart.svg("running requests over one rollout", dict(sorted(shown.items())))
        + f'<p class="note">Step {timeline.step}. Below the curve, {names}: how it decoded at '
        "that moment, a drafter and its draft length.</p>"
    )


def _arm_colour(text: str) -> str:
    arm = Arm.parse(text)
    base = ARM_COLOURS.get(arm.drafter, "#7a62b3")
    if arm == OFF:
        return base
    share = SHADES[min(len(SHADES) - 1, arm.num_draft_tokens - 1)]
    parts = [int(base[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)


def _workers(view: RunView) -> str:
    timeline = _typical(view)
    if timeline is None:
        return _missing("timeline.json", "metrics.timeline = true")
    workers = list(timeline.rows)[:12]
    chart = Chart(
        (0, timeline.end_s - timeline.start_s), (0, len(workers)), "seconds since the step began",
        "", height=60 + 26 * len(workers),
        y_names={len(workers) - n - 0.46: worker for n, worker in enumerate(workers)},
    )  # fmt: skip
    used: dict[str, str] = {}
    for place, worker in enumerate(workers):
        top = len(workers) - place
        for span in timeline.rows[worker]:
            begin, end = span.start_s - timeline.start_s, span.end_s - timeline.start_s
            used[span.state] = STATE_COLOURS[span.state]
            says = f"{worker}: {span.state} {span.seconds:.2f} s"
            chart.box((begin, end), (top - 0.82, top - 0.1), used[span.state], says)
    return (
        chart.svg("states of the workers over one step", {s: used[s] for s in STATES if s in used})
        + f'<p class="note">Step {timeline.step}. The whole run opens at ui.perfetto.dev: '
        "timeline.json.</p>"
    )


def _lengths(view: RunView, found: Mapping[str, Any]) -> str:
    if not view.lengths:
        return _missing("lengths.jsonl", "a run of this version")
    low, high = max(1, min(view.lengths)), max(view.lengths) + 1
    count = 24
    edges = [low * (high / low) ** (i / count) for i in range(count + 1)]
    counts = [0] * count
    for tokens in view.lengths:
        place = math.log(max(tokens, low) / low) / math.log(high / low) * count
        counts[min(count - 1, int(place))] += 1
    tail_from = found["lengths"]["p95"]
    chart = Chart((low, high), (0, max(counts)), "tokens", "responses", log_x=True)
    for left, right, many in zip(edges, edges[1:], counts, strict=False):
        if many:
            colour = "#b6455b" if left >= tail_from else "#3b6fb6"
            chart.box((left, right), (0, many), colour, f"{left:.0f} to {right:.0f}: {many}")
    chart.mark(found["lengths"]["median"], f"median {found['lengths']['median']:.0f}")
    if tail_from > found["lengths"]["median"] * 1.3:
        chart.mark(tail_from, f"95%: {tail_from:.0f}")
    return (
        chart.svg("distribution of response lengths")
        + f"<p>Longest {found['lengths']['longest']:,}, "
        f"{found['lengths']['longest_over_median']:.1f}x the median; {found['tail_share']:.0%} of "
        "the rollout's time at most an eighth of the requests ran.</p>"
    )


def _acceptance(view: RunView, found: Mapping[str, Any]) -> str:
    points = _points(view, "rollout/acceptance_length")
    top = max([2.0, *(y for _, y in points)])
    chart = Chart(_step_range([view]), (1, top), "RL step", "tokens a pass")
    chart.line(points, COLOURS[0])
    for version in found["drafters"]:
        if version["version"]:
            chart.mark(version["step"], f"v{version['version']:.0f}")
    return chart.svg("acceptance length over steps")


def _reward(view: RunView) -> str:
    chart = Chart(
        _step_range([view]),
        (_low([view], "reward/mean"), _top([view], "reward/mean")),
        "RL step",
        "mean reward",
    )
    chart.line(_points(view, "reward/mean"), COLOURS[0])
    held_out = list(zip(*series(view.all_records, "eval/reward_mean"), strict=True))
    entries = {"samples": COLOURS[0]}
    if held_out:
        chart.line(held_out, COLOURS[1], dashed=True)
        entries["held out"] = COLOURS[1]
    return chart.svg("reward over steps", entries)


def _seconds(found: Mapping[str, Any]) -> str:
    if not found["workers"]:
        return _missing("timeline.json", "metrics.timeline = true")
    states = [s for s in STATES if any(of[s] > 0 for of in found["workers"].values())]
    rows = [
        [worker, *(f"{of[state]:.1f}" for state in states)]
        for worker, of in list(found["workers"].items())[:16]
    ]
    reach = found["reclaimed"]
    words = (
        f"<p>Of {reach['idle_s'] + reach['training_s']:.1f} seconds with nothing to generate, "
        f"{reach['training_s']:.1f} ({reach['share']:.0%}) trained the drafter.</p>"
    )
    return words + _table(("worker", *states), rows, numbers=range(1, len(states) + 1))


def _arms(found: Mapping[str, Any]) -> str:
    if not found["arms"]:
        return _missing("timeline.json", "metrics.timeline = true")
    rows = [
        [arm, f"{of['seconds']:.1f}", f"{of['tokens']:,.0f}", f"{of['acceptance_length']:.2f}"]
        for arm, of in found["arms"].items()
    ]
    return _table(("drafter:length", "seconds", "tokens", "tokens a draft"), rows, (1, 2, 3))


def _drafters(found: Mapping[str, Any]) -> str:
    harvest = found["harvest"]
    if not harvest and not found["drafters"]:
        return "<p>None was trained in this run.</p>"
    words = ""
    if harvest:
        words = (
            f"<p>{harvest['published']:.0f} published, {harvest['refused']:.0f} no better and "
            f"refused, {harvest['faults']:.0f} faults; {harvest['trained_tokens']:,.0f} tokens of "
            "training.</p>"
        )
    rows = [
        [f"{v['version']:.0f}", f"{v['step']:.0f}", f"{v['held_out_length']:.2f}"]
        for v in found["drafters"]
    ]
    headings = ("version", "first used in step", "held-out length")
    return words + (_table(headings, rows, (0, 1, 2)) if rows else "")


# --- pieces ---------------------------------------------------------------------------------------


def _words(name: str) -> str:
    return name.replace("_", " ")


def _prose(text: str) -> str:
    """With what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _missing(what: str, why: str) -> str:
    return f'<p class="note">Nothing to show: the run has no {what}. It takes {why}.</p>'


def _grid(*sections: tuple[str, str]) -> str:
    inside = "".join(f"<section><h3>{escape(t)}</h3>{body}</section>" for t, body in sections)
    return f'<div class="grid">{inside}</div>'


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()
) -> str:
    right = set(numbers)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if place in right else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", headings)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _points(view: RunView, name: str) -> list[tuple[float, float]]:
    return list(zip(*series(view.records, name), strict=True))


def _step_range(views: Sequence[RunView]) -> tuple[float, float]:
    steps = [record["step"] for view in views for record in view.records]
    return min(steps) - 0.5, max(steps) + 0.5


def _values(views: Sequence[RunView], name: str) -> list[float]:
    return sorted(value for view in views for value in series(view.records, name)[1])


def _top(views: Sequence[RunView], name: str) -> float:
    values = _values(views, name)
    return values[-1] * 1.05 if values and values[-1] > 0 else 1.0


def _low(views: Sequence[RunView], name: str) -> float:
    values = _values(views, name)
    return min(0.0, values[0]) if values else 0.0
