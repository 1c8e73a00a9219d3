"""Charts as inline SVG: grouped bars with intervals, lines, stacked bars, dots beside a diagonal.

Knows numbers, names and colours; refuses to know what they mean. Every mark carries its number as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, FAINT, GRID = "#1f2933", "#6b7280", "#e5e7eb"
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 26, 34  # around the plot: axis numbers, title, names
_LETTER = 6.6  # the width of one, at the size of names, in wide fonts


@dataclass(frozen=True)
class Series:
    """Numbers of one name: one for each place of the axis, None where there is none."""

    name: str
    colour: str
    values: Sequence[float | None]
    intervals: Sequence[Sequence[float] | None] = ()


@dataclass(frozen=True)
class Dots:
    """Points (x, y, count) of one name; a dot's area grows with its count."""

    name: str
    colour: str
    points: Sequence[tuple[float, float, int]]


@dataclass
class Canvas:
    """An SVG in the making. Coordinates are pixels from the upper left corner."""

    width: float
    height: float
    title: str
    _parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = GRID, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {place} stroke="{colour}"{dashes}/>')

    def rect(self, x: float, y: float, width: float, height: float, colour: str, tip: str) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
        self._parts.append(f'<rect {place} fill="{colour}"><title>{escape(tip)}</title></rect>')

    def dot(self, x: float, y: float, radius: float, colour: str, tip: str) -> None:
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"'
        self._parts.append(f'<circle {place} fill="{colour}" fill-opacity=".8"><title>{escape(tip)}</title></circle>')

    def path(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", colour: str = FAINT, size: int = 11) -> None:
        look = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>')

    def svg(self) -> str:
        box = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" height="{self.height:.0f}"'
        return f'<svg {box} role="img" aria-label="{escape(self.title)}">{"".join(self._parts)}</svg>'


@dataclass(frozen=True)
class _Plot:
    """A canvas with a title and a vertical axis from 0 to `top`."""

    canvas: Canvas
    top: float
    digits: int

    @property
    def inner_width(self) -> float:
        return self.canvas.width - _LEFT - _RIGHT

    def y(self, value: float) -> float:
        return self.canvas.height - _BOTTOM - value / self.top * (self.canvas.height - _TOP - _BOTTOM)

    @property
    def floor(self) -> float:
        return self.canvas.height - _BOTTOM


def _plot(title: str, width: float, height: float, most: float) -> _Plot:
    step = _step(most)
    top = step * max(math.ceil(most / step - 1e-9), 1)
    digits = max(0, -math.floor(math.log10(step)))
    plot = _Plot(Canvas(width, height, title), top, digits)
    plot.canvas.text(_LEFT, 14, title, colour=INK, size=12)
    for i in range(round(top / step) + 1):
        y = plot.y(i * step)
        plot.canvas.line(_LEFT, y, width - _RIGHT, y)
        plot.canvas.text(_LEFT - 6, y + 4, f"{i * step:.{digits}f}", anchor="end")
    return plot


def _step(most: float) -> float:
    """A round distance between the lines of an axis that ends at about `most`."""
    if most <= 0:
        return 1.0
    size = 10 ** math.floor(math.log10(most / 4))
    return next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * 5 >= most)


def bars(title: str, labels: Sequence[str], series: Sequence[Series], unit: str, mark: float | None = None) -> str:
    """A group of bars for each label, in the order of `series`; intervals as whiskers; a dashed line at `mark`."""
    ends = [interval[1] for own in series for interval in own.intervals if interval is not None]
    most = max([value for own in series for value in own.values if value is not None] + ends, default=mark or 1.0)
    room = max([18 * len(series) + 26, *(_LETTER * len(label) + 8 for label in labels)])  # names stand side by side
    plot = _plot(title, max(300, _LEFT + _RIGHT + len(labels) * room), 220, most)
    group = plot.inner_width / max(len(labels), 1)
    width = min(26.0, (group - 14) / max(len(series), 1))
    for i, label in enumerate(labels):
        start = _LEFT + group * i + (group - width * len(series)) / 2
        plot.canvas.text(_LEFT + group * (i + 0.5), plot.floor + 16, label, anchor="middle")
        for s, own in enumerate(series):
            value = own.values[i]
            if value is None:
                continue
            x, interval = start + s * width, own.intervals[i] if own.intervals else None
            span = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
            tip = f"{own.name}, {label}: {value:.2f}{span} {unit}"
            plot.canvas.rect(x + 1, plot.y(value), width - 2, plot.floor - plot.y(value), own.colour, tip)
            if interval is not None:
                plot.canvas.line(x + width / 2, plot.y(interval[0]), x + width / 2, plot.y(interval[1]), INK)
    if mark is not None:
        plot.canvas.line(_LEFT, plot.y(mark), _LEFT + plot.inner_width, plot.y(mark), FAINT, dash="4 4")
    return plot.canvas.svg()


def lines(title: str, series: Sequence[Series], axis: str) -> str:
    """A line for each series over 1, 2, 3 and so on; values from 0 to 1."""
    plot = _plot(title, 300, 200, 1.0)
    places = max((len(own.values) for own in series), default=1)
    step = plot.inner_width / max(places, 1)
    for i in range(places):
        plot.canvas.text(_LEFT + step * (i + 0.5), plot.floor + 14, str(i + 1), anchor="middle")
    plot.canvas.text(_LEFT + plot.inner_width / 2, plot.floor + 29, axis, anchor="middle")
    for own in series:
        points = [(_LEFT + step * (i + 0.5), plot.y(v), v) for i, v in enumerate(own.values) if v is not None]
        plot.canvas.path([(x, y) for x, y, _ in points], own.colour)
        for i, (x, y, value) in enumerate(points):
            plot.canvas.dot(x, y, 3.5, own.colour, f"{own.name}, {axis} {i + 1}: {value:.3f}")
    return plot.canvas.svg()


def calibration(title: str, series: Sequence[Dots]) -> str:
    """Dots in the unit square, beside the diagonal on which they would lie if x were the chance of y."""
    plot = _plot(title, 300, 270, 1.0)
    plot.canvas.line(_LEFT, plot.floor, _LEFT + plot.inner_width, plot.y(1), FAINT, dash="4 4")
    for i in range(0, 6):
        plot.canvas.text(_LEFT + plot.inner_width * i / 5, plot.floor + 14, f"{i / 5:.1f}", anchor="middle")
    plot.canvas.text(_LEFT + plot.inner_width / 2, plot.floor + 29, "draft confidence", anchor="middle")
    most = max((count for own in series for _, _, count in own.points), default=1)
    for own in series:
        for x, y, count in own.points:
            radius = 2 + 7 * math.sqrt(count / most)
            tip = f"{own.name}: confidence {x:.3f}, accepted {y:.3f} of {count}"
            plot.canvas.dot(_LEFT + plot.inner_width * x, plot.y(y), radius, own.colour, tip)
    return plot.canvas.svg()


def stacked(title: str, labels: Sequence[str], parts: Sequence[Series], unit: str) -> str:
    """A horizontal bar for each label, made of its parts from left to right."""
    names, row, width = 230, 24, 760
    canvas = Canvas(width, _TOP + row * len(labels) + 4, title)
    canvas.text(0, 14, title, colour=INK, size=12)
    sums = [sum(part.values[i] or 0.0 for part in parts) for i in range(len(labels))]
    scale = (width - names - 70) / max([*sums, 1e-9])
    for i, label in enumerate(labels):
        x, y = float(names), _TOP + row * i
        canvas.text(names - 8, y + 15, label, anchor="end", colour=INK)
        for part in parts:
            value = part.values[i] or 0.0
            canvas.rect(x, y + 3, value * scale, row - 7, part.colour, f"{label}, {part.name}: {value:.2f} {unit}")
            x += value * scale
        canvas.text(x + 6, y + 15, f"{sums[i]:.2f} {unit}")
    return canvas.svg()
