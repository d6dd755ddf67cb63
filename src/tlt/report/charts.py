"""The charts of runs, and of a drafter's training: from numbers to `Chart` values. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tlt import colours
from tlt.colours import COLOURS, RUNS, arm_colour
from tlt.contracts import Arm
from tlt.observe.metrics import STAGES, declared
from tlt.observe.summary import series, stage_table
from tlt.observe.timeline import LEARNER, StepTimeline
from tlt.report.svg import INK, Axis, Box, Chart, Line, Points, on_same_axes, sheet
from tlt.report.view import RunView, drafters, lengths, rollouts, running, tail_share
from tlt.spans import STATES

MAX_BARS = 300  # longer runs show every second RL step, or fewer
MAX_STRIPS, MAX_WORKERS, NUM_BINS = 6, 12, 24
NO_TIMELINE = "Nothing to show: only runs with metrics.timeline = true have a timeline.json."


def charts_of(views: Sequence[RunView]) -> list[dict[str, Chart]]:
    """Return the charts of every run by name. Charts of the same name have the same axes."""
    makers = {"stages": _stages, "rollout": _rollout, "workers": _workers}
    makers |= {"lengths": _lengths, "acceptance": _acceptance, "reward": _reward}
    columns = [
        on_same_axes([_labelled(make(view), view.emulated) for view in views])
        for make in makers.values()
    ]
    return [dict(zip(makers, row, strict=True)) for row in zip(*columns, strict=True)]


def comparison(views: Sequence[RunView]) -> list[Chart]:
    """Return the charts that show all runs together."""
    seconds, rewards = {}, {}
    for view, colour in zip(views, RUNS, strict=False):
        seconds[view.name] = Line(_points(view, "time/step_s"), colour)
        for name, line in _reward_lines(view).items():
            key = view.name if name == "samples" else f"{view.name}, {name}"
            rewards[key] = replace(line, colour=colour)
    title, points = "Reward", [dict(_points(view, "reward/mean")) for view in views]
    both = set.intersection(*map(set, points))
    if both and all(of[step] == points[0][step] for of in points for step in both):
        runs = "both runs" if len(views) == 2 else "all runs"
        lines = _reward_lines(max(views, key=lambda view: len(view.records)))
        title, rewards = f"Reward: identical in {runs}", {runs: lines.pop("samples"), **lines}
    charts = [
        _over_steps("Seconds of an RL step", "seconds", seconds),
        _over_steps(title, "mean reward", rewards),
    ]
    return [_labelled(chart, views[0].emulated) for chart in charts]


def _labelled(chart: Chart, label: str) -> Chart:
    """Return a chart whose axis of seconds says that they were emulated, if they were."""

    def said(axis: Axis) -> Axis:
        is_time = bool(label) and axis.label.startswith("seconds")
        return replace(axis, label=f"{axis.label} (emulated)") if is_time else axis

    return replace(chart, x=said(chart.x), y=said(chart.y))


def _stages(view: RunView) -> Chart:
    boxes = []
    for record in view.records[:: len(view.records) // MAX_BARS + 1]:
        step, below = record["step"], 0.0
        for stage in STAGES:
            seconds = max(0.0, record.get(f"time/{stage}_s", 0.0))
            if seconds:
                says = f"RL step {step:.0f}: {stage.replace('_', ' ')} {seconds:.2f} s"
                x, y = (step - 0.42, step + 0.42), (below, below + seconds)
                boxes.append(Box(x, y, colours.STAGES[stage], says))
                below += seconds
    first, last = view.records[0]["step"], view.records[-1]["step"]
    top = max((box.y[1] for box in boxes), default=1.0)
    used = [stage for stage, _, _ in stage_table(view.records)]
    return Chart(
        "Where the seconds of an RL step go",
        Axis("RL step", first - 0.5, last + 0.5),
        Axis("seconds", 0, top),
        boxes,
        {stage.replace("_", " "): colours.STAGES[stage] for stage in used},
    )


def _typical(view: RunView) -> StepTimeline | None:
    """Return the RL step whose rollout took the median time."""
    timed = [timeline for timeline in view.timelines if rollouts(timeline)]
    timed.sort(key=lambda timeline: sum(end - start for start, end in rollouts(timeline)))
    return timed[len(timed) // 2] if timed else None


def _rollout(view: RunView) -> Chart:
    title = "Running requests of one rollout, and the arms that engines used"
    timeline = _typical(view)
    if timeline is None:
        return Chart(title, note=NO_TIMELINE)
    start_s, end_s = rollouts(timeline)[0]
    curve = running(timeline, start_s, end_s)
    most = max((count for _, count in curve), default=1.0)
    strip = most * 0.09
    engines = [worker for worker in timeline.rows if worker != LEARNER][:MAX_STRIPS]
    boxes, shown = [], {}
    for place, worker in enumerate(engines):
        top = -strip * (place + 0.5)
        for span in timeline.rows[worker]:
            begin, end = max(span.start_s, start_s), min(span.end_s, end_s)
            if span.state == "generating" and end > begin:
                shown[span.arm] = _arm_colour(span.arm)
                says = f"{worker}: {span.arm}, {span.running:.0f} running"
                x, y = (begin - start_s, end - start_s), (top - strip * 0.8, top)
                boxes.append(Box(x, y, shown[span.arm], says))
    below = "one strip per engine shows" if len(engines) > 1 else "a strip shows"
    return Chart(
        title,
        Axis("seconds since the rollout began", 0, end_s - start_s),
        Axis("running requests", -strip * (len(engines) + 0.5), most, numbers_from=0),
        [Line([*curve, (end_s - start_s, curve[-1][1])], INK, stairs=True), *boxes],
        dict(sorted(shown.items())),
        note=f"RL step {timeline.step}. Below the curve, {below} the drafter and its draft length.",
    )


def _arm_colour(text: str) -> str:
    arm = Arm.parse(text)
    return arm_colour(arm.drafter, arm.num_draft_tokens)


def _workers(view: RunView) -> Chart:
    title = "What every worker did in that RL step"
    timeline = _typical(view)
    if timeline is None:
        return Chart(title, note=NO_TIMELINE)
    workers = list(timeline.rows)[:MAX_WORKERS]
    boxes, used = [], set()
    for place, worker in enumerate(workers):
        top = len(workers) - place
        for span in timeline.rows[worker]:
            used.add(span.state)
            x = span.start_s - timeline.start_s, span.end_s - timeline.start_s
            says = f"{worker}: {span.state} {span.seconds:.2f} s"
            boxes.append(Box(x, (top - 0.82, top - 0.1), colours.STATES[span.state], says))
    names = {len(workers) - place - 0.46: worker for place, worker in enumerate(workers)}
    return Chart(
        title,
        Axis("seconds since the RL step began", 0, timeline.end_s - timeline.start_s),
        Axis("", 0, len(workers), names=names),
        boxes,
        {state: colours.STATES[state] for state in STATES if state in used},
        note=f"RL step {timeline.step}. ui.perfetto.dev shows the whole run: open timeline.json.",
    )


def _lengths(view: RunView) -> Chart:
    title = "Response lengths"
    if not view.lengths:
        return Chart(title, note="Nothing to show: the run has no lengths.jsonl.")
    found = lengths(view)
    middle, tail_from = found["median"], found["p95"]
    low, high = max(1, min(view.lengths)), max(view.lengths) + 1
    width = math.log(high / low) / NUM_BINS
    places = (int(math.log(max(tokens, low) / low) / width) for tokens in view.lengths)
    counts = Counter(min(NUM_BINS - 1, place) for place in places)
    boxes = []
    for place, count in sorted(counts.items()):
        left, right = low * math.exp(place * width), low * math.exp((place + 1) * width)
        colour = COLOURS[3 if left >= tail_from else 0]
        boxes.append(Box((left, right), (0, count), colour, f"{left:.0f} to {right:.0f}: {count}"))
    marks = {middle: f"median {middle:.0f}"}
    if tail_from > middle * 1.3:
        marks[tail_from] = f"95%: {tail_from:.0f}"
    return Chart(
        title,
        Axis("tokens", low, high, log=True),
        Axis("responses", 0, max(counts.values())),
        boxes,
        marks=marks,
        note=f"The longest response has {found['longest']:,} tokens, "
        f"{found['longest_over_median']:.1f}x the median. For {tail_share(view):.0%} of the "
        "rollout time, at most an eighth of the requests ran.",
    )


def _acceptance(view: RunView) -> Chart:
    points = _points(view, "rollout/acceptance_length")
    if points and max(length for _, length in points) <= 1:
        return Chart("Acceptance length", note="Nothing to show: engines accepted no drafts.")
    lines = {"": Line(points, COLOURS[0])}
    new = {d["step"]: f"v{d['version']:.0f}" for d in drafters(view) if d["version"]}
    chart = _over_steps("Acceptance length", "tokens per draft", lines, low=1.0, high=2.0)
    return replace(chart, legend={}, marks=new)


def _reward(view: RunView) -> Chart:
    return _over_steps("Reward", "mean reward", _reward_lines(view))


def _reward_lines(view: RunView) -> dict[str, Line]:
    lines = {"samples": Line(_points(view, "reward/mean"), COLOURS[0])}
    names = dict.fromkeys(name for record in view.all_records for name in record)
    held_out = [name for name in names if declared(name) == "eval/reward_mean"]
    for place, name in enumerate(held_out):
        points = list(zip(*series(view.all_records, name), strict=True))
        of = name.split("/")[1:-1]  # the name of a set
        colour = COLOURS[1 + place % (len(COLOURS) - 1)]
        lines[", ".join(["held out", *of])] = Line(points, colour, dashed=True)
    return lines


def _points(view: RunView, name: str) -> Points:
    return list(zip(*series(view.records, name), strict=True))


def _over_steps(
    title: str, label: str, lines: Mapping[str, Line], low: float = 0.0, high: float = 0.0
) -> Chart:
    """Return a chart of named lines over RL steps whose y axis covers `low` to `high` at least."""
    points = [point for line in lines.values() for point in line.points] or [(1.0, low)]
    steps, values = [x for x, _ in points], [y for _, y in points]
    return Chart(
        title,
        Axis("RL step", min(steps) - 0.5, max(steps) + 0.5),
        Axis(label, min(low, *values), max(high, 1.05 * max(values)) or 1.0),
        [*lines.values()],
        {name: line.colour for name, line in lines.items()},
    )


# --- the training of a drafter --------------------------------------------------------------------


def training_picture(report: dict[str, Any]) -> str:
    """Draw the acceptance length during training, and acceptance by position before and after.

    `report` comes from `tlt drafter train`.
    """
    temperatures = list(report["acceptance"]["after"])
    palette = dict(zip(temperatures, COLOURS, strict=False))
    before, after = (
        report["acceptance"][when][temperatures[-1]]["length"] for when in ("before", "after")
    )
    title = (
        f"Acceptance length {before:.2f} before training, {after:.2f} after "
        f"(temperature {temperatures[-1]})"
    )
    return sheet(title, [_trained_lengths(report, palette), _positions(report, palette)])


def _trained_lengths(report: dict[str, Any], palette: dict[str, str]) -> Chart:
    history = report["training"]["history"]
    minutes = [each["elapsed_s"] / 60 for each in history]
    lines = {
        f"temperature {temperature}": Line(
            list(zip(minutes, [each[f"length@{temperature}"] for each in history], strict=True)),
            colour,
            dashed=number > 0,  # the curves may coincide
        )
        for number, (temperature, colour) in enumerate(palette.items())
    }
    return Chart(
        "held-out samples, while training",
        Axis("minutes of training", 0, max(minutes)),
        Axis("expected acceptance length", 1, report["num_draft_tokens"] + 1),
        [*lines.values()],
        {name: line.colour for name, line in lines.items()},
    )


def _positions(report: dict[str, Any], palette: dict[str, str]) -> Chart:
    bars = [
        (f"{when}, temperature {temperature}", report["acceptance"][when][temperature], shade)
        for temperature, colour in palette.items()
        for when, shade in (("before", colours.paler(colour, 0.45)), ("after", colour))
    ]
    width = 0.8 / len(bars)
    boxes = []
    for number, (name, measured, colour) in enumerate(bars):
        for place, share in enumerate(measured["by_position"], 1):
            left = place - 0.4 + number * width
            says = f"{name}: {share:.0%}"
            boxes.append(Box((left, left + 0.95 * width), (0, share), colour, says))
    num = report["num_draft_tokens"]
    return Chart(
        f"in the engine, {report['num_held_out_prompts']} held-out prompts",
        Axis("draft position", 0.5, num + 0.5, names={n: str(n) for n in range(1, num + 1)}),
        Axis("share of drafts accepted up to here", 0, 1),
        boxes,
        {f"{name}: {of['length']:.2f}": colour for name, of, colour in bars},
    )
