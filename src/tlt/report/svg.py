"""Small charts as SVG text, for pages that must work alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 36

COLOURS = (
    *("#3b6fb6", "#e08a2e", "#4b9d5b", "#b6455b", "#7a62b3", "#8a6d4f", "#4aa6b5", "#9aa0a6"),
)

STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#3c434b}"
    "line.rule{stroke:#e4e7ea}line.axis{stroke:#8d949c}"
)

Points = Sequence[tuple[float, float]]


class Chart:
    """A plot area with two axes. Draw with its methods, then take `svg()`."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str,
        y_label: str,
        log_x: bool = False,
        height: int = HEIGHT,
        y_names: Mapping[float, str] | None = None,
    ) -> None:
        self._x, self._y, self._log_x = x, (y[0], y[1] if y[1] > y[0] else y[0] + 1), log_x
        self._height = height
        self._y_names = y_names
        self._parts: list[str] = []
        self._axes(x_label, y_label)

    # --- where things are ---------------------------------------------------------------------

    def at_x(self, value: float) -> float:
        low, high = self._x
        if self._log_x:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        share = (value - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def at_y(self, value: float) -> float:
        low, high = self._y
        share = (min(max(value, low), high) - low) / (high - low)
        return self._height - BOTTOM - share * (self._height - TOP - BOTTOM)

    # --- drawing ------------------------------------------------------------------------------

    def line(self, points: Points, colour: str, dashed: bool = False, dots: bool = True) -> None:
        shown = [(self.at_x(x), self.at_y(y)) for x, y in points if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        if dots and len(shown) <= 40:
            self._parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in shown
            ]

    def stairs(self, points: Points, end: float, colour: str) -> None:
        """Each value holds until the next point; the last until `end`."""
        corners: list[tuple[float, float]] = []
        for (x, y), until in zip(points, [*(x for x, _ in points[1:]), end], strict=True):
            corners += [(self.at_x(x), self.at_y(y)), (self.at_x(until), self.at_y(y))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )

    def box(self, x: tuple[float, float], y: tuple[float, float], colour: str, says: str) -> None:
        left, right = sorted((self.at_x(x[0]), self.at_x(x[1])))
        top, bottom = sorted((self.at_y(y[0]), self.at_y(y[1])))
        self._parts.append(
            f'<rect shape-rendering="crispEdges" x="{left:.1f}" y="{top:.1f}" '
            f'width="{max(0.3, right - left):.1f}" height="{max(0.3, bottom - top):.1f}" '
            f'fill="{colour}"><title>{escape(says)}</title></rect>'
        )

    def mark(self, x: float, says: str) -> None:
        """A vertical line with a word on it."""
        at = self.at_x(x)
        left = at > WIDTH * 0.6
        self._parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self._height - BOTTOM}" '
            'stroke="#555" stroke-dasharray="3 3"/>'
            f'<text x="{at + (-5 if left else 5):.1f}" y="{TOP + 11}" '
            f'text-anchor="{"end" if left else "start"}">{escape(says)}</text>'
        )

    def svg(self, says: str, names: Mapping[str, str] | None = None) -> str:
        """The picture, with names and their colours below it."""
        legend, height = self._legend(names or {})
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(says)}"><style>{STYLE}</style>{"".join(self._parts)}{legend}</svg>'
        )

    def _legend(self, names: Mapping[str, str]) -> tuple[str, int]:
        parts, x, y = [], LEFT, self._height + 10
        for name, colour in names.items():
            width = 17 + round(6.3 * len(name)) + 12
            if x > LEFT and x + width > WIDTH:
                x, y = LEFT, y + 17
            parts.append(
                f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{colour}"/>'
                f'<text x="{x + 15}" y="{y}">{escape(name)}</text>'
            )
            x += width
        return "".join(parts), y + 8 if names else self._height

    # --- axes ---------------------------------------------------------------------------------

    def _axes(self, x_label: str, y_label: str) -> None:
        bottom = self._height - BOTTOM
        names = self._y_names or {v: number(v) for v in ticks(*self._y, 4)}
        for value, name in names.items():
            y = self.at_y(value)
            if self._y_names is None:
                self._parts.append(
                    f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                    'class="rule"/>'
                )
            self._parts.append(
                f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            )
        values = log_ticks(*self._x) if self._log_x else ticks(*self._x, 6)
        for value in values:
            x = self.at_x(value)
            self._parts.append(
                f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{number(value)}</text>'
            )
        self._parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" class="axis"/>'
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{self._height - 5}" text-anchor="middle">'
            f"{escape(x_label)}</text>"
            f'<text transform="translate(11 {(TOP + bottom) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(y_label)}</text>'
        )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    scale = 10 ** math.floor(math.log10(rough))
    step = next(scale * m for m in (1, 2, 5, 10) if scale * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    found = [m * 10**e for e in range(-3, 8) for m in (1, 2, 5) if low <= m * 10**e <= high]
    return found if len(found) <= 8 else [v for v in found if f"{v:e}".startswith("1")]


def number(value: float) -> str:
    """As short as it can be read."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
