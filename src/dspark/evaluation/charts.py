"""Line charts as SVG, small enough to need no plotting library and to follow the page's own colours.

The markup is inline in an HTML page whose style sheet is `STYLE`; nothing is loaded from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["STYLE", "Chart", "Point", "Series", "legend", "svg"]

WIDTH, HEIGHT = 340, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 26, 40
_COLOURS = 7

STYLE = """
:root { --c0: #0b62a8; --c1: #c4500c; --c2: #10795a; --c3: #9a4f96; --c4: #7a6400; --c5: #b3243c; --c6: #46616f }
@media (prefers-color-scheme: dark) {
  :root { --c0: #6cb6f5; --c1: #f59a5c; --c2: #57c9a3; --c3: #d8a0d4; --c4: #dcc654; --c5: #f58a9b; --c6: #a8bfca }
}
svg text { font: 11px system-ui, sans-serif; fill: currentColor }
svg .title { font-weight: 600; font-size: 12px }
svg .axis { stroke: currentColor; stroke-opacity: .6; fill: none }
svg .grid { stroke: currentColor; stroke-opacity: .13; fill: none }
svg .ideal { stroke: currentColor; stroke-opacity: .45; stroke-dasharray: 4 4; fill: none }
svg .line { fill: none; stroke-width: 1.8 }
svg .range { stroke-width: 1.2; stroke-opacity: .6 }
""" + "\n".join(
    f"svg .s{n} {{ stroke: var(--c{n}) }} svg circle.s{n} {{ fill: var(--c{n}) }} .k{n} {{ background: var(--c{n}) }}"
    for n in range(_COLOURS)
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value, and its interval where it has one."""

    x: float
    y: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points with a line through them, left to right."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One panel.

    Attributes:
        unit_square: both axes are 0 to 1, with the diagonal drawn (a reliability diagram).
        percent: y is a share, shown in percent.
        from_zero: the y axis begins at 0.
        doubling: x is above 0, and each doubling of it takes the same room.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    unit_square: bool = False
    percent: bool = False
    from_zero: bool = False
    doubling: bool = False


def svg(chart: Chart) -> str:
    """The chart as an ``<svg>`` element; every point has its numbers as a tooltip."""
    points = [point for series in chart.series for point in series.points]
    xs = sorted({point.x for point in points})
    place: Callable[[float], float] = math.log2 if chart.doubling else float
    if chart.unit_square:
        x_ticks = y_ticks = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        x_low, x_high, y_low, y_high = 0.0, 1.0, 0.0, 1.0
    else:
        reach = [bound for point in points for bound in (point.y, *(point.interval or ()))]
        y_ticks = _ticks(min([*reach, 0.0]) if chart.from_zero else min(reach, default=0.0), max(reach, default=1.0))
        y_low, y_high = y_ticks[0], y_ticks[-1]
        x_ticks = xs if len(xs) <= 10 or chart.doubling else _ticks(xs[0], xs[-1])
        first, last = (place(xs[0]), place(xs[-1])) if xs else (0.0, 1.0)
        margin = 0.06 * (last - first or 1.0) if xs else 0.0
        x_low, x_high = first - margin, last + margin

    def across(x: float) -> str:
        return f"{_LEFT + (place(x) - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT):.1f}"

    def down(y: float) -> str:
        return f"{HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM):.1f}"

    def shown(y: float) -> str:
        return f"{100 * y:.0f}%" if chart.percent else f"{y:g}"

    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(f"{chart.title}: {chart.y_label} against {chart.x_label}")}">',
        f'<text class="title" x="{left}" y="14">{escape(chart.title)}</text>',
    ]
    for y in y_ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{down(y)}" y2="{down(y)}"/>')
        parts.append(f'<text x="{left - 6}" y="{float(down(y)) + 4:.1f}" text-anchor="end">{shown(y)}</text>')
    for x in x_ticks:
        parts.append(f'<text x="{across(x)}" y="{bottom + 15}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>')
    parts.append(
        f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="11" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 11 {middle:.1f})">'
        f"{escape(chart.y_label)}</text>"
    )
    if chart.unit_square:
        parts.append(f'<path class="ideal" d="M{across(0)} {down(0)}L{across(1)} {down(1)}"/>')
    for number, series in enumerate(chart.series):
        colour = f"s{number % _COLOURS}"
        placed = [(across(point.x), down(point.y), point) for point in series.points]
        if placed:
            parts.append(f'<path class="line {colour}" d="M{"L".join(f"{x} {y}" for x, y, _ in placed)}"/>')
        for at_x, at_y, point in placed:
            text = f"{series.label}: {point.x:g}, {point.y:.4g}"
            if point.interval is not None:
                low, high = point.interval
                ends = f'x1="{at_x}" x2="{at_x}" y1="{down(low)}" y2="{down(high)}"'
                parts.append(f'<line class="range {colour}" {ends}/>')
                text += f" [{low:.4g}, {high:.4g}]"
            circle = f'class="{colour}" cx="{at_x}" cy="{at_y}" r="3"'
            parts.append(f"<circle {circle}><title>{escape(text)}</title></circle>")
    return "".join([*parts, "</svg>"])


def legend(labels: Sequence[str]) -> str:
    """Which colour is which series, as HTML; empty for a single series."""
    if len(labels) < 2:
        return ""
    keys = (f'<span><i class="k{number % _COLOURS}"></i>{escape(label)}</span>' for number, label in enumerate(labels))
    return f'<p class="legend">{"".join(keys)}</p>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``, about five steps apart."""
    size = max(abs(low), abs(high))
    size = size if size > 1e-300 else 1.0  # what is smaller has no digits left for steps
    span = high - low if high - low > 1e-6 * size else size
    power = 10.0 ** math.floor(math.log10(span / 4.0))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power * 4.0 >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.9g}") for number in range(first, max(last, first + 1) + 1)]
