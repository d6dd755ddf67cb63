"""Charts as values, and how they are drawn."""

from __future__ import annotations

from xml.etree.ElementTree import fromstring

import pytest

from tlt.report.charts import training_picture
from tlt.report.svg import (
    Axis,
    Box,
    Chart,
    Line,
    draw,
    log_ticks,
    number,
    on_same_axes,
    sheet,
    ticks,
)


def test_axes() -> None:
    axis = Axis("y", -3, 4, numbers_from=0)
    assert list(axis.labels(4).values()) == ["0", "1", "2", "3", "4"]
    assert axis.share(5) == axis.share(4) == 1
    assert Axis("x", 1, 100, log=True).share(10) == pytest.approx(0.5)
    assert Axis("", 0, 2, names={0.5: "engine-0"}).labels(4) == {0.5: "engine-0"}
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(3, 3, 4) == [3]
    assert log_ticks(10, 1000) == [10, 20, 50, 100, 200, 500, 1000]
    assert number(12345.0) == "12,345"


def test_a_drawing_holds_every_shape() -> None:
    line = Line([(0, 0), (4, 1), (10, 1)], "#111111", stairs=True)
    box = Box((0, 5), (0, 1), "#222222", "half of <it>")
    legend, marks = {"a": "#111111"}, {5.0: "v1"}
    svg = draw(Chart("A chart", Axis("x", 0, 10), Axis("y", 0, 1), [line, box], legend, marks))
    assert svg.get("aria-label") == "A chart"
    (polyline,) = svg.findall("polyline")
    assert len(str(polyline.get("points")).split()) == 4  # along, up, along
    assert [title.text for title in svg.iter("title")] == ["half of <it>"]
    words = {text.text for text in svg.findall("text")}
    assert {"x", "y", "a", "v1", "0", "10"} <= words


def test_the_same_axes() -> None:
    short = Chart("t", Axis("s", 0, 4), Axis("n", 0, 9), [Line([(0, 1)], "#111111")])
    long = Chart("t", Axis("s", 1, 8), Axis("n", -1, 3), [Line([(0, 1)], "#111111")])
    named = Chart("t", Axis("s", 0, 1), Axis("", 0, 5, names={0.5: "a"}))
    for chart in (found := on_same_axes([short, long, Chart("t"), named])):
        assert (chart.x.low, chart.x.high) == (0, 8)
    assert {(chart.y.low, chart.y.high) for chart in found} == {(-1, 9), (0, 5)}
    assert found[0].shapes == short.shapes


def test_a_sheet_holds_its_charts_side_by_side() -> None:
    chart = Chart("A", Axis("x", 0, 1), Axis("", 0, 1, names={0.5: "a long name of a row"}))
    found = fromstring(sheet("All", [chart] * 3, ["below " * 60]))
    inside = [each for each in found if each.tag.endswith("svg")]
    (x0, y0), (x1, y1), (x2, y2) = ((int(e.attrib["x"]), int(e.attrib["y"])) for e in inside)
    assert x0 == x2 < x1
    assert y0 == y1 < y2
    words = [each.text or "" for each in found if each.tag.endswith("text")]
    assert words[:2] == ["All", "A"]
    assert sum(text.startswith("below") for text in words) > 1  # wrapped
    assert chart.left > Chart("B").left


def test_the_picture_of_a_training() -> None:
    measured = {"0": {"length": 1.5, "by_position": [0.3, 0.2]}}
    report = {
        "num_draft_tokens": 2,
        "num_held_out_prompts": 8,
        "training": {"history": [{"elapsed_s": 60.0 * n, "length@0": 1.0 + n} for n in range(3)]},
        "acceptance": {"before": measured, "after": {"0": {**measured["0"], "length": 2.5}}},
    }
    shown = training_picture(report)
    assert "Acceptance length 1.50 before training, 2.50 after" in shown
    assert shown.count("<circle") == 3
    assert "after, temperature 0: 30%" in shown
