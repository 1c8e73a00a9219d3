"""Charts: grouped bars with intervals, lines, curves over numbers, stacked bars, dots beside a diagonal.

A chart is a list of marks, drawn as SVG here and as PNG by `pictures`. Knows numbers, names and colours; refuses to
know what they mean. In SVG every mark carries its number as a tooltip.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

INK, FAINT, GRID = "#1f2933", "#6b7280", "#e5e7eb"
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 26, 34  # around the plot: axis numbers, title, names
_LETTER = 6.6  # the width of one, at the size of names, in wide fonts
_FAR = 10  # numbers beyond it have an axis that doubles
_RADIUS = {"line": 2.5, "dots": 4.0, "ring": 8.0}


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


@dataclass(frozen=True)
class Point:
    """A place of a curve; an interval is drawn as a whisker."""

    x: float
    y: float
    name: str  # of what was measured there
    interval: Sequence[float] | None = None


@dataclass(frozen=True)
class Curve:
    """Points of one name, as a line (in ascending x), as dots, or as rings around what other curves show there."""

    name: str
    colour: str
    points: Sequence[Point]
    look: Literal["line", "dots", "ring"] = "line"


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    dash: bool

    def svg(self) -> str:
        dashes = ' stroke-dasharray="4 4"' if self.dash else ""
        place = f'x1="{self.x1:.1f}" y1="{self.y1:.1f}" x2="{self.x2:.1f}" y2="{self.y2:.1f}"'
        return f'<line {place} stroke="{self.colour}"{dashes}/>'


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    colour: str
    tip: str

    def svg(self) -> str:
        place = f'x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{self.height:.1f}"'
        return f'<rect {place} fill="{self.colour}"><title>{escape(self.tip)}</title></rect>'


@dataclass(frozen=True)
class Dot:
    """`ring`: only its edge."""

    x: float
    y: float
    radius: float
    colour: str
    tip: str
    ring: bool

    def svg(self) -> str:
        place = f'cx="{self.x:.1f}" cy="{self.y:.1f}" r="{self.radius:.1f}"'
        look = f'fill="none" stroke="{self.colour}"' if self.ring else f'fill="{self.colour}" fill-opacity=".8"'
        return f"<circle {place} {look}><title>{escape(self.tip)}</title></circle>"


@dataclass(frozen=True)
class Path:
    points: tuple[tuple[float, float], ...]
    colour: str

    def svg(self) -> str:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)
        return f'<polyline points="{places}" fill="none" stroke="{self.colour}" stroke-width="2"/>'


@dataclass(frozen=True)
class Text:
    """`y` is the line that letters stand on."""

    x: float
    y: float
    text: str
    anchor: str  # "start", "middle" or "end": what of the text stands at x
    colour: str
    size: int

    def svg(self) -> str:
        look = f'text-anchor="{self.anchor}" fill="{self.colour}" font-size="{self.size}"'
        return f'<text x="{self.x:.1f}" y="{self.y:.1f}" {look}>{escape(self.text)}</text>'


@dataclass
class Canvas:
    """A chart as a list of marks, which `svg` and `pictures` draw; in pixels from the upper left corner."""

    width: float
    height: float
    title: str
    key: list[tuple[str, str]] = field(default_factory=list)  # names and colours, for who shows the chart alone
    marks: list[Line | Rect | Dot | Path | Text] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = GRID, dash: bool = False) -> None:
        self.marks.append(Line(x1, y1, x2, y2, colour, dash))

    def rect(self, x: float, y: float, width: float, height: float, colour: str, tip: str) -> None:
        self.marks.append(Rect(x, y, max(width, 0), max(height, 0), colour, tip))

    def dot(self, x: float, y: float, radius: float, colour: str, tip: str, ring: bool = False) -> None:
        self.marks.append(Dot(x, y, radius, colour, tip, ring))

    def path(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        self.marks.append(Path(tuple(points), colour))

    def text(self, x: float, y: float, text: str, anchor: str = "start", colour: str = FAINT, size: int = 11) -> None:
        self.marks.append(Text(x, y, text, anchor, colour, size))

    def named(self, series: Iterable[Series | Dots | Curve]) -> Canvas:
        """Itself, with these in its key."""
        self.key += [(own.name, own.colour) for own in series]
        return self

    def alone(self, caption: str) -> Canvas:
        """A chart that stands without its page: its key and what it is about below."""
        longest = max((len(name) for name, _ in self.key), default=0)
        own = Canvas(max(self.width, 42 + _LETTER * longest), self.height, self.title, marks=list(self.marks))
        x = 12.0
        for name, colour in self.key:
            room = 18 + _LETTER * len(name) + 12
            if x + room > own.width and x > 12:
                x, own.height = 12.0, own.height + 18
            own.rect(x, own.height + 4, 11, 11, colour, name)
            own.text(x + 16, own.height + 14, name, colour=INK)
            x += room
        own.height += 24 if self.key else 0
        for line in textwrap.wrap(caption, int((own.width - 24) / _LETTER)):
            own.text(12, own.height + 12, line)
            own.height += 16
        own.height += 6
        return own

    def svg(self) -> str:
        box = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" height="{self.height:.0f}"'
        marks = "".join(mark.svg() for mark in self.marks)
        return f'<svg {box} role="img" aria-label="{escape(self.title)}">{marks}</svg>'


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


def bars(title: str, labels: Sequence[str], series: Sequence[Series], unit: str, mark: float | None = None) -> Canvas:
    """A group of bars for each label, in the order of `series`; intervals as whiskers; a dashed line at `mark`."""
    marked = [] if mark is None else [mark]
    ends = [interval[1] for own in series for interval in own.intervals if interval is not None]
    most = max([value for own in series for value in own.values if value is not None] + ends + marked, default=1.0)
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
        plot.canvas.line(_LEFT, plot.y(mark), _LEFT + plot.inner_width, plot.y(mark), FAINT, dash=True)
    return plot.canvas.named(series)


def lines(title: str, series: Sequence[Series], axis: str) -> Canvas:
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
    return plot.canvas.named(series)


def curves(title: str, own: Sequence[Curve], axis: str, unit: str, mark: float | None = None) -> Canvas:
    """Numbers over numbers from 1 on, the axis doubling from step to step where they reach far; a dashed line at
    `mark`."""
    points = [point for curve in own for point in curve.points]
    tops = [max((point.y, *(point.interval or ()))) for point in points] + ([] if mark is None else [mark])
    plot = _plot(title, 400, 240, max(tops, default=1.0))
    far = max((point.x for point in points), default=1.0)
    doubling = far > _FAR
    steps = [2**i for i in range(math.ceil(math.log2(far)) + 1)] if doubling else list(range(1, math.ceil(far) + 1))

    def x(value: float) -> float:
        share = math.log2(value) / math.log2(steps[-1]) if doubling else (value - 1) / max(steps[-1] - 1, 1)
        return _LEFT + 12 + share * (plot.inner_width - 24)

    for step in steps:
        plot.canvas.text(x(step), plot.floor + 14, str(step), anchor="middle")
    plot.canvas.text(_LEFT + plot.inner_width / 2, plot.floor + 29, axis, anchor="middle")
    if mark is not None:
        plot.canvas.line(_LEFT, plot.y(mark), _LEFT + plot.inner_width, plot.y(mark), FAINT, dash=True)
    for curve in own:
        if curve.look == "line":
            plot.canvas.path([(x(point.x), plot.y(point.y)) for point in curve.points], curve.colour)
        for point in curve.points:
            ends = point.interval
            span = "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"
            if ends is not None:
                plot.canvas.line(x(point.x), plot.y(ends[0]), x(point.x), plot.y(ends[1]), INK)
            tip = f"{curve.name}, {point.name}: {point.y:.2f}{span} {unit}"
            radius, ring = _RADIUS[curve.look], curve.look == "ring"
            plot.canvas.dot(x(point.x), plot.y(point.y), radius, curve.colour, tip, ring)
    return plot.canvas.named(own)


def calibration(title: str, series: Sequence[Dots]) -> Canvas:
    """Dots in the unit square, beside the diagonal on which they would lie if x were the chance of y."""
    plot = _plot(title, 300, 270, 1.0)
    plot.canvas.line(_LEFT, plot.floor, _LEFT + plot.inner_width, plot.y(1), FAINT, dash=True)
    for i in range(0, 6):
        plot.canvas.text(_LEFT + plot.inner_width * i / 5, plot.floor + 14, f"{i / 5:.1f}", anchor="middle")
    plot.canvas.text(_LEFT + plot.inner_width / 2, plot.floor + 29, "draft confidence", anchor="middle")
    most = max((count for own in series for _, _, count in own.points), default=1)
    for own in series:
        for x, y, count in own.points:
            radius = 2 + 7 * math.sqrt(count / most)
            tip = f"{own.name}: confidence {x:.3f}, accepted {y:.3f} of {count}"
            plot.canvas.dot(_LEFT + plot.inner_width * x, plot.y(y), radius, own.colour, tip)
    return plot.canvas.named(series)


def stacked(title: str, labels: Sequence[str], parts: Sequence[Series], unit: str) -> Canvas:
    """A horizontal bar for each label, made of its parts from left to right."""
    names, row, width = 230, 24, 760
    canvas = Canvas(width, _TOP + row * len(labels) + 4, title)
    canvas.text(4, 14, title, colour=INK, size=12)
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
    return canvas.named(parts)
