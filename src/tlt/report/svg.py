"""Charts as values, and the functions that draw them as SVG. Pure.

A `Chart` says what to show, in the units of its axes; `draw` alone knows about pixels. Text and
lines in a page follow the reader's light or dark theme; in a file they suit both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from textwrap import wrap
from xml.etree.ElementTree import Element, tostring

from tlt import colours

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 36
GAP = 24  # between the charts of a sheet
LETTER = 6.3  # width of a letter
MAX_DOTS = 40  # points of a longer line are not marked

INK = "currentColor"  # the text's colour: dark on a light page, light on a dark one
STYLE = (
    "svg{color:#3c434b}text{font:11px system-ui,sans-serif;fill:currentColor}"
    "line{stroke:currentColor}.rule{opacity:.15}.axis{opacity:.6}.mark{stroke-dasharray:3 3}"
    ".title{font-weight:600}"
    "@media (prefers-color-scheme:dark){svg{color:#d5dae0}}"
)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. In `stairs`, each value holds until the next point."""

    points: Points
    colour: str
    dashed: bool = False
    stairs: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; `says` is its tooltip."""

    x: tuple[float, float]
    y: tuple[float, float]
    colour: str
    says: str


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis measures, and its range."""

    label: str = ""
    low: float = math.inf
    high: float = -math.inf
    log: bool = False
    numbers_from: float = -math.inf
    """Smallest value with a number on the axis."""
    names: Mapping[float, str] = field(default_factory=dict)
    """Names to write at values instead of numbers."""

    def share(self, value: float) -> float:
        """Return a value's place between the ends, from 0 to 1."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / ((high - low) or 1.0)

    def labels(self, about: int) -> Mapping[float, str]:
        """Return the labels by value: the names, or about `about` round numbers."""
        low = max(self.low, self.numbers_from)
        values = log_ticks(low, self.high) if self.log else ticks(low, self.high, about)
        return self.names or {value: number(value) for value in values}


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of data on two axes. A chart without data has no shapes; its note says why."""

    title: str
    x: Axis = Axis()
    y: Axis = Axis()
    shapes: Sequence[Line | Box] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    """Names and their colours."""
    marks: Mapping[float, str] = field(default_factory=dict)
    """Labels of vertical lines, by their place on the x axis."""
    note: str = ""

    @property
    def left(self) -> int:
        """Pixels to the left of the y axis: room for its longest name."""
        return max([LEFT, *(12 + round(LETTER * len(name)) for name in self.y.names.values())])

    @property
    def height(self) -> int:
        """Pixels without the legend."""
        return 60 + 26 * len(self.y.names) if self.y.names else HEIGHT


def on_same_axes(charts: Sequence[Chart]) -> list[Chart]:
    """Give charts of the same quantities the same ranges. Axes with names keep theirs."""

    def widened(axis: Axis, others: Sequence[Axis]) -> Axis:
        low, high = min(other.low for other in others), max(other.high for other in others)
        return axis if axis.names else replace(axis, low=low, high=high)

    xs, ys = [chart.x for chart in charts], [chart.y for chart in charts]
    return [replace(chart, x=widened(chart.x, xs), y=widened(chart.y, ys)) for chart in charts]


# --- drawing --------------------------------------------------------------------------------------


def element(tag: str, /, *inside: Element | str, **attributes: float | str) -> Element:
    """Return an element of SVG or HTML. Attributes are written with `_` for `-`, and `class_`."""
    found = Element(tag)
    for name, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else str(value)
        found.set(name.rstrip("_").replace("_", "-"), text)
    found.text = "".join(piece for piece in inside if isinstance(piece, str))
    found.extend(piece for piece in inside if not isinstance(piece, str))
    return found


def draw(chart: Chart) -> Element:
    """Return the chart as an `svg` element, with its legend below it."""
    legend, height = _legend(chart)
    shapes = [part for shape in chart.shapes for part in _parts(chart, shape)]
    return _svg(chart.title, WIDTH, height, *shapes, *_axes(chart), *legend)


def as_file(picture: Element) -> str:
    """Return a picture as the text of a file. Its ink suits light and dark pages."""
    picture.set("style", f"color:{colours.INK}")
    return tostring(picture, encoding="unicode")


def sheet(title: str, charts: Sequence[Chart], below: Sequence[str] = (), columns: int = 2) -> str:
    """Return one file with charts side by side, their titles, and lines of text below them."""
    columns = min(columns, len(charts))
    width = columns * (WIDTH + GAP) - GAP
    parts = [element("text", title, class_="title", x=6, y=18)]
    y = 34
    for first in range(0, len(charts), columns):
        row = [(chart, draw(chart)) for chart in charts[first : first + columns]]
        heading = 16 if any(chart.title for chart, _ in row) else 0
        for place, (chart, picture) in enumerate(row):
            x = place * (WIDTH + GAP)
            parts.append(element("text", chart.title, class_="title", x=x + 6, y=y + 6))
            picture.set("x", str(x))
            picture.set("y", str(y + heading))
            parts.append(picture)
        y += heading + max(int(picture.get("height", 0)) for _, picture in row) + 10
    for line in (part for text in below for part in wrap(text, int((width - 12) / LETTER) + 8)):
        parts.append(element("text", line, x=6, y=y + 8))
        y += 15
    return as_file(_svg(title, width, y + 6, *parts))


def _svg(title: str, width: int, height: int, *inside: Element) -> Element:
    return element(
        "svg", element("style", STYLE), *inside,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}",
        width=width, height=height, role="img", aria_label=title,
    )  # fmt: skip


def _x(chart: Chart, value: float) -> float:
    return chart.left + chart.x.share(value) * (WIDTH - chart.left - RIGHT)


def _y(chart: Chart, value: float) -> float:
    return chart.height - BOTTOM - chart.y.share(value) * (chart.height - TOP - BOTTOM)


def _parts(chart: Chart, shape: Line | Box) -> list[Element]:
    if isinstance(shape, Line):
        return _line(chart, shape)
    left, right = (_x(chart, value) for value in shape.x)
    bottom, top = (_y(chart, value) for value in shape.y)
    size = {"width": max(0.3, right - left), "height": max(0.3, bottom - top)}
    look = {"fill": shape.colour, "shape_rendering": "crispEdges"}
    return [element("rect", element("title", shape.says), x=left, y=top, **size, **look)]


def _line(chart: Chart, line: Line) -> list[Element]:
    places = [(_x(chart, x), _y(chart, y)) for x, y in line.points if math.isfinite(y)]
    dots = [] if line.stairs or len(places) > MAX_DOTS else places
    if line.stairs:
        places = [corner for a, b in pairwise(places) for corner in (a, (b[0], a[1]))]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    look = {"fill": "none", "stroke": line.colour, "stroke_width": "1.5" if line.stairs else "2"}
    dash = {"stroke_dasharray": "5 4"} if line.dashed else {}
    return [
        element("polyline", points=path, **look, **dash),
        *(element("circle", cx=x, cy=y, r=2.5, fill=line.colour) for x, y in dots),
    ]


def _axes(chart: Chart) -> list[Element]:
    left, right, bottom = chart.left, WIDTH - RIGHT, chart.height - BOTTOM
    turned = f"translate(11 {(TOP + bottom) / 2}) rotate(-90)"
    place = {"x": (left + right) / 2, "y": chart.height - 5}
    parts = [
        element("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom),
        element("text", chart.x.label, text_anchor="middle", **place),
        element("text", chart.y.label, text_anchor="middle", transform=turned),
    ]
    for value, name in chart.x.labels(6).items():
        x = _x(chart, value)
        parts.append(element("text", name, text_anchor="middle", x=x, y=bottom + 15))
    for value, name in chart.y.labels(4).items():
        y = _y(chart, value)
        parts.append(element("text", name, text_anchor="end", x=left - 5, y=y + 4))
        if not chart.y.names:
            parts.append(element("line", class_="rule", x1=left, x2=right, y1=y, y2=y))
    for value, says in chart.marks.items():
        x = _x(chart, value)
        offset, anchor = (-5, "end") if x > WIDTH * 0.6 else (5, "start")
        parts.append(element("line", class_="mark", x1=x, x2=x, y1=TOP, y2=bottom))
        parts.append(element("text", says, x=x + offset, y=TOP + 11, text_anchor=anchor))
    return parts


def _legend(chart: Chart) -> tuple[list[Element], int]:
    """Return the legend, and the height of the picture with it."""
    parts, x, y = [], LEFT, chart.height + 10
    for name, colour in chart.legend.items():
        width = 17 + round(LETTER * len(name)) + 12
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + 17
        parts.append(element("rect", x=x, y=y - 9, width=10, height=10, rx=2, fill=colour))
        parts.append(element("text", name, x=x + 15, y=y))
        x += width
    return parts, y + 8 if parts else chart.height


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about `about` round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    scale = 10 ** math.floor(math.log10(rough))
    step = next(scale * m for m in (1, 2, 5, 10) if scale * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between low and high, or the powers alone."""
    found = [m * 10**e for e in range(-3, 8) for m in (1, 2, 5) if low <= m * 10**e <= high]
    return found if len(found) <= 8 else [v for v in found if f"{v:e}".startswith("1")]


def number(value: float) -> str:
    """Return a number in three digits, or whole where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
