"""`tlt report` as one HTML file that needs neither network nor scripts, and as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import Element, tostring

from tlt.report.charts import NO_TIMELINE, charts_of, comparison
from tlt.report.findings import findings
from tlt.report.gain import compare, gain, headline, in_words
from tlt.report.svg import Chart, draw, element, sheet
from tlt.report.view import RunView, describe
from tlt.spans import STATES

MAX_WORKERS = 16
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 0 auto; padding: 1em; }
h1 { font-size: 1.6em; margin: .6em 0 .2em; } h2 { margin: 1.6em 0 .3em; font-size: 1.3em; }
h3 { font-size: 1.02em; margin: 0 0 .2em; } p { margin: .3em 0 .6em; }
.note { opacity: .75; font-size: .9em; } .scroll { overflow-x: auto; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
        gap: 18px 26px; margin-top: 12px; }
.grid > section { min-width: 0; } svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: .92em; margin: .3em 0; }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; }
td:first-child, .n { white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 1px solid #8889; } tbody tr + tr td { border-top: 1px solid #8883; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 160px), 1fr));
         gap: 12px; margin: 1em 0; }
.fact { border: 1px solid #8886; border-radius: 6px; padding: 8px 14px; }
.fact b { display: block; font-size: 1.7em; line-height: 1.3; }
.condition { border-left: 4px solid #3b6fb6; background: #3b6fb61a; padding: 6px 12px; }
.finding { border-left: 4px solid #e08a2e; background: #e08a2e1a; padding: 6px 12px; margin: 8px 0 }
"""


def as_json(views: Sequence[RunView]) -> str:
    """Return the numbers and findings of runs, and how they compare."""
    runs = []
    for view in views:
        found = [{"kind": f.kind, "says": f.says, "change": f.change} for f in findings(view)]
        runs.append(describe(view) | {"findings": found})
    comparisons = [compare(views[0], other) for other in views[1:]]
    return json.dumps({"runs": runs, "comparisons": comparisons}, indent=2)


def as_html(views: Sequence[RunView], page: Path | None = None) -> str:
    """Return the page: gains of several runs, what was emulated or forced, findings, then each run.

    `page` is the file to write it to, from which links lead to the runs' timelines.
    """
    title = _title(views)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", STYLE),
    )
    parts = _gain(views) if len(views) > 1 else []
    parts += [element("p", text, class_="condition") for text in _conditions(views)]
    parts += _comparison(views) if len(views) > 1 else []
    parts += [part for view in views for part in _findings(view, len(views) > 1, page)]
    for view, charts in zip(views, charts_of(views), strict=True):
        if len(views) > 1:
            del charts["reward"]  # the comparison shows it
        if view is not views[0] and sorted(view.lengths) == sorted(views[0].lengths):
            note = f"Nothing to show: the same lengths as in {views[0].name}."
            charts["lengths"] = Chart(charts["lengths"].title, note=note)
        parts += _run(view, charts)
    whole = element("html", head, element("body", element("h1", title), *parts), lang="en")
    return f"<!doctype html>{tostring(whole, encoding='unicode', method='html')}\n"


def _title(views: Sequence[RunView]) -> str:
    """Return the result in one line."""
    if len(views) == 2:
        return headline(*views)
    if len(views) > 2:
        return f"{', '.join(view.name for view in views[1:])} compared with {views[0].name}"
    return f"Training run {views[0].name}: {_extent(views[0])}"


def _extent(view: RunView) -> str:
    minutes = sum(record.get("time/step_s", 0.0) for record in view.records) / 60
    return f"{len(view.records)} RL steps in {minutes:.1f} minutes"


def _conditions(views: Sequence[RunView]) -> Iterator[str]:
    """Yield what was emulated or forced in these runs, and what was real."""
    if label := next((view.emulated for view in views if view.emulated), ""):
        yield (
            f"Time was {label}. Engine steps, updates, drafter training, weight syncs, swaps, "
            "sleep and wake take as long as they would there. Everything else is real: engines, "
            "scheduling, speculation, acceptance, training, hidden states, samples."
        )
    if any(view.setting("debug.forced_lengths") for view in views):
        yield (
            "Response lengths were forced (debug.forced_lengths), the same in every run. The "
            "speed is real; the rewards mean nothing."
        )


def _gain(views: Sequence[RunView]) -> list[Element]:
    """Return what the runs gained over the first: four figures, or a row for each of several."""
    base, *others = views
    found = [compare(base, other) for other in others]
    if len(found) == 1:
        facts = [
            element("div", element("b", figure), element("span", says), class_="fact")
            for figure, says in _facts(base, others[0], found[0])
        ]
        note = (
            f"{others[0].name} compared with {base.name}. Ratios are medians over pairs of equal "
            "RL steps, without the first, which loads and compiles; ranges are 95% intervals."
        )
        return [element("div", *facts, class_="facts"), element("p", note, class_="note")]
    rows = [[of["run"], *in_words(of), _rewards(of)] for of in found]
    headings = (
        "run",
        "RL step",
        "rollout",
        "identical samples",
        f"reward at the end: {base.name} / run",
    )
    note = (
        "RL step and rollout: the median of the ratios of equal RL steps and its 95% interval, "
        "without the first RL step, which loads and compiles."
    )
    heading = element("h2", f"Speed-up over {base.name}")
    return [heading, _table(headings, rows), element("p", note, class_="note")]


def _facts(base: RunView, other: RunView, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the figures of two runs, and what each means."""
    measured = gain(base, other)
    if measured is not None:
        per_token = "" if found["same_tokens"] else " per token, as lengths differ"
        rollout = measured.rollout if found["same_tokens"] else measured.rollout_per_token
        yield (
            f"{measured.step.median:.2f}x",
            f"RL steps ({measured.step.range}): "
            f"{measured.other_s:.1f} s instead of {measured.base_s:.1f} s",
        )
        yield (
            f"{rollout.median:.2f}x",
            f"rollouts{per_token} ({rollout.range})",
        )
    if of := found["samples"]["compared"]:
        yield (
            f"{found['samples']['same']} of {of}",
            "samples identical, of the samples that both runs kept",
        )
    if found["same_reward"]:
        yield "identical", "reward in every RL step"
    else:
        yield _rewards(found), f"reward at the end: {base.name} / {other.name}"


def _rewards(found: Mapping[str, Any]) -> str:
    """Return the mean rewards of the last fifth of the RL steps, the base's first."""
    return " / ".join(f"{of.get('last_fifth', math.nan):.3f}" for of in found["reward"].values())


def pictures(views: Sequence[RunView]) -> dict[str, str]:
    """Return every chart as an SVG file, by its file name. Each says what was emulated."""
    return {
        f"{view.name.replace('/', '-')}-{name}.svg": sheet(
            chart.title,
            [replace(chart, title="")],
            [f"Time was {view.emulated}."] * bool(view.emulated),
        )
        for view, charts in zip(views, charts_of(views), strict=True)
        for name, chart in charts.items()
        if chart.shapes
    }


def _comparison(views: Sequence[RunView]) -> list[Element]:
    return [element("div", *(_picture(chart) for chart in comparison(views)), class_="grid")]


def _run(view: RunView, charts: Mapping[str, Chart]) -> list[Element]:
    found = describe(view)
    stages = [
        [row["stage"].replace("_", " "), f"{row['median_s']:.2f}", f"{row['share']:.0%}"]
        for row in found["stages"]
    ]
    table = _table(("stage", "median s", "share"), stages, numbers=2)
    sections = [
        *(_picture(c, table if name == "stages" else "") for name, c in charts.items()),
        _section("Seconds of the workers", *_seconds(found)),
        _section("Arms", _arms(found)),
        _section("Drafters", *_drafters(found)),
        _section("Settings", _table((), [[key, str(v)] for key, v in found["settings"].items()])),
    ]
    return [
        element("h2", view.name),
        element("p", f"{_extent(view)}."),
        element("div", *sections, class_="grid"),
    ]


def _findings(view: RunView, several: bool, page: Path | None) -> list[Element]:
    """Return what `tlt watch` and `tlt doctor --run` say about a run, and its timeline."""
    whose = f"{view.name}: what" if several else "What"
    parts = [element("h2", f"{whose} holds the run back")]
    for finding in findings(view):
        says = element("p", *_prose(finding.says))
        to_do = element("p", element("b", "To do: "), *_prose(finding.change))
        parts.append(element("div", says, to_do, class_="finding"))
    return [*parts, *_timeline(view, page)]


def _timeline(view: RunView, page: Path | None) -> list[Element]:
    """Return the way to the run's timeline; nothing for a run without one."""
    if view.folder is None or not view.timelines:
        return []
    file = view.folder / "timeline.json"
    target = str(file.resolve())
    with contextlib.suppress(ValueError):  # on another drive
        target = os.path.relpath(file.resolve(), (page or file).resolve().parent)
    return [
        element(
            "p",
            element("span", "Every second of every worker: open "),
            element("a", "timeline.json", href=quote(target), download=""),
            *_prose(" at `https://ui.perfetto.dev`."),
            class_="note",
        )
    ]


def _section(title: str, *inside: Element | str) -> Element:
    return element("section", element("h3", title), *inside)


def _picture(chart: Chart, below: Element | str = "") -> Element:
    picture = draw(chart) if chart.shapes else ""
    return _section(chart.title, picture, element("p", chart.note, class_="note"), below)


def _seconds(found: Mapping[str, Any]) -> list[Element]:
    if not found["workers"]:
        return [element("p", NO_TIMELINE, class_="note")]
    states = [s for s in STATES if any(of[s] > 0 for of in found["workers"].values())]
    rows = [
        [worker, *(f"{of[state]:.1f}" for state in states)]
        for worker, of in list(found["workers"].items())[:MAX_WORKERS]
    ]
    idle_s, training_s, share = (found["reclaimed"][k] for k in ("idle_s", "training_s", "share"))
    words = f"Workers had nothing to generate for {idle_s + training_s:.1f} seconds."
    if training_s:
        words += f" They trained the drafter for {training_s:.1f} of them ({share:.0%})."
    return [element("p", words), _table(("worker", *states), rows, numbers=len(states))]


def _arms(found: Mapping[str, Any]) -> Element:
    if not found["arms"]:
        return element("p", NO_TIMELINE, class_="note")
    rows = [
        [arm, f"{of['seconds']:.1f}", f"{of['tokens']:,.0f}", f"{of['acceptance_length']:.2f}"]
        for arm, of in found["arms"].items()
    ]
    return _table(("drafter:length", "seconds", "tokens", "tokens per draft"), rows, numbers=3)


def _drafters(found: Mapping[str, Any]) -> list[Element]:
    harvest, words = found["harvest"], "This run trained no drafter."
    if harvest:
        words = (
            f"{harvest['published']:.0f} published, {harvest['refused']:.0f} refused as no better, "
            f"{harvest['faults']:.0f} faults; {harvest['trained_tokens']:,.0f} training tokens."
        )
    rows = [
        [f"{v['version']:.0f}", f"{v['step']:.0f}", f"{v['held_out_length']:.2f}"]
        for v in found["drafters"]
    ]
    headings = ("version", "first RL step", "held-out length") if rows else ()
    return [element("p", words), _table(headings, rows, numbers=3)]


def _prose(text: str) -> list[Element]:
    """Return the pieces of a text, with what stands between backticks as code."""
    return [element("code" if n % 2 else "span", piece) for n, piece in enumerate(text.split("`"))]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> Element:
    """Return a table whose last `numbers` columns are aligned to the right."""

    def row(tag: str, cells: Sequence[str]) -> Element:
        made = [element(tag, cell) for cell in cells]
        for cell in made[len(made) - numbers :]:
            cell.set("class", "n")
        return element("tr", *made)

    head = element("thead", row("th", headings)) if headings else ""
    body = element("tbody", *(row("td", cells) for cells in rows))
    return element("div", element("table", head, body), class_="scroll")
