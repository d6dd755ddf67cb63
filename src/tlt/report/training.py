"""The picture of a drafter's training, from the report of `tlt drafter train`."""

from __future__ import annotations

from typing import Any

from tlt.colours import COLOURS, paler
from tlt.report.svg import Axis, Box, Chart, Line, sheet


def training_picture(report: dict[str, Any]) -> str:
    """Return the acceptance length during training, and acceptance by position before and after."""
    temperatures = list(report["acceptance"]["after"])
    colours = dict(zip(temperatures, COLOURS, strict=False))
    before, after = (
        report["acceptance"][when][temperatures[-1]]["length"] for when in ("before", "after")
    )
    title = (
        f"Acceptance length {before:.2f} before training, {after:.2f} after "
        f"(temperature {temperatures[-1]})"
    )
    return sheet(title, [_lengths(report, colours), _positions(report, colours)])


def _lengths(report: dict[str, Any], colours: dict[str, str]) -> Chart:
    history = report["training"]["history"]
    minutes = [each["elapsed_s"] / 60 for each in history]
    lines = {
        f"temperature {temperature}": Line(
            list(zip(minutes, [each[f"length@{temperature}"] for each in history], strict=True)),
            colour,
            dashed=number > 0,  # the curves may coincide
        )
        for number, (temperature, colour) in enumerate(colours.items())
    }
    return Chart(
        "held-out samples, while training",
        Axis("minutes of training", 0, max(minutes)),
        Axis("expected acceptance length", 1, report["num_draft_tokens"] + 1),
        [*lines.values()],
        {name: line.colour for name, line in lines.items()},
    )


def _positions(report: dict[str, Any], colours: dict[str, str]) -> Chart:
    bars = [
        (f"{when}, temperature {temperature}", report["acceptance"][when][temperature], shade)
        for temperature, colour in colours.items()
        for when, shade in (("before", paler(colour, 0.45)), ("after", colour))
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
