"""The page of `eyas tune`: what trees of each size promise and what was measured of them, with the one that was chosen.

A curve follows the best tree of each size, by forecast; dots are whatever was run. Refuses to know how trees are tuned:
it reads the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any

from eyas import charts
from eyas.charts import INK, Canvas, Curve, Point
from eyas.pages import COLOURS, PLAIN, Charts, Page, grid, legend, note

ALL = "all"  # the workload that is all of them together
PREDICTED, MEASURED = COLOURS[0], COLOURS[1]
SIZES = ("nodes", "levels")


@dataclass(frozen=True)
class TreeRow:
    """A tree on a workload."""

    workload: str
    tree: str
    levels: int
    nodes: int
    tau_predicted: float | None
    tau: float | None
    tokens_per_second_predicted: float
    tokens_per_second: float | None
    memory_bytes: int
    interval: Sequence[float] | None = None  # of tokens per second: the slowest and the fastest run

    def size(self, what: str) -> int:
        return self.nodes if what == "nodes" else self.levels


def tune_page(record: Mapping[str, Any]) -> Page:
    """The page of a tune's JSON.

    Raises:
        KeyError, TypeError, ValueError: it is none, or one of an older version.
    """
    known = {field.name for field in fields(TreeRow)}
    rows = [TreeRow(**{name: value for name, value in row.items() if name in known}) for row in record["rows"]]
    chosen, machine, costs = str(record["chosen"]), record["machine"], record["costs"]
    if not rows:
        raise ValueError("no rows")
    plain = {own["workload"]: float(own["tokens_per_second"]) for own in record.get("plain", [])}
    colours = [("forecast, the best tree of each size", PREDICTED), ("measured", MEASURED), ("chosen", INK)]
    parts: list[str | Charts] = [
        note(", ".join(str(record[name]) for name in ("head", "backend", "dtype") if name in record)),
        note(f"{machine['cpu']}, {machine['threads']} threads, {machine['system']}"),
        note(f"Chosen: {chosen}"),
        legend(colours),
    ]
    names = dict.fromkeys(row.workload for row in rows)
    for workload in sorted(names, key=lambda name: name != ALL):
        own = [row for row in rows if row.workload == workload]
        parts += _workload(workload, own, chosen, plain.get(workload))
    memory = [row for row in rows if row.workload == rows[-1].workload]
    parts += [
        "<h2>Memory</h2>",
        note("Keys, values, logits and states of a tree's rows, beside the model's own."),
        Charts("any workload", tuple(_curves(memory, what, chosen, _MEMORY) for what in SIZES)),
        "<h2>What the parts of a round cost</h2>",
        note(f"Measured inside the decoding loop. Every round: {costs['first']:.2f} ms for the first level and "
             f"{costs['rest']:.2f} ms, {costs.get('rest_per_node', 0.0):.3f} more for each node, beside drafting and "
             f"verifying; a plain round: {costs['plain_rest']:.2f} ms "
             f"beside its forward."),  # fmt: skip
        Charts("in a round", (_cost("a forward of the target", costs["verify"], "its rows: the root and the nodes", 1),
                        _cost("a level deeper", costs["expand"], "nodes that are expanded", 0))),
    ]  # fmt: skip
    return Page(f"eyas tune: {record['target']}" if "target" in record else "eyas tune", parts)


@dataclass(frozen=True)
class Quantity:
    """Something that grows or falls with a tree's size."""

    title: str
    unit: str
    predicted: Callable[[TreeRow], float | None]
    measured: Callable[[TreeRow], float | None]
    interval: Callable[[TreeRow], Sequence[float] | None] = lambda row: None


_SPEED = Quantity(
    "tokens per second",
    "tokens/s",
    lambda row: row.tokens_per_second_predicted,
    lambda row: row.tokens_per_second,
    lambda row: row.interval,
)
_TAU = Quantity("tau", "tokens per forward", lambda row: row.tau_predicted, lambda row: row.tau)
_MEMORY = Quantity("MiB of a tree", "MiB", lambda row: row.memory_bytes / 2**20, lambda row: None)


def _workload(workload: str, rows: Sequence[TreeRow], chosen: str, plain: float | None) -> list[str | Charts]:
    said = "Whiskers: the slowest and the fastest run."
    if plain is not None:
        said += f" Dashed: plain decoding, {plain:.1f} tokens/s."
    shown = [(what, quantity) for what in SIZES for quantity in (_SPEED, _TAU)]
    curves = [_curves(rows, what, chosen, quantity, plain if quantity is _SPEED else None) for what, quantity in shown]
    name = "all workloads" if workload == ALL else f"workload {workload}"
    return [f"<h2>{escape(name.capitalize())}</h2>", _table(rows, chosen), note(said), Charts(name, tuple(curves))]


def best_by_size(rows: Sequence[TreeRow], what: str) -> list[TreeRow]:
    """The tree of each number of nodes or levels that promises most, in ascending size."""
    best: dict[int, TreeRow] = {}
    for row in rows:
        size = row.size(what)
        if size not in best or row.tokens_per_second_predicted > best[size].tokens_per_second_predicted:
            best[size] = row
    return [best[size] for size in sorted(best)]


def _curves(rows: Sequence[TreeRow], what: str, chosen: str, quantity: Quantity, plain: float | None = None) -> Canvas:
    def points(own: Sequence[TreeRow], value: Callable[[TreeRow], float | None], interval: bool) -> list[Point]:
        found = [(row, value(row)) for row in own]
        return [
            Point(row.size(what), y, row.tree, quantity.interval(row) if interval else None)
            for row, y in found
            if y is not None
        ]

    there = [row for row in rows if row.tree == chosen]
    ringed = points(there, quantity.measured, False) or points(there, quantity.predicted, False)
    measured = points(rows, quantity.measured, True)
    own = [Curve("forecast", PREDICTED, points(best_by_size(rows, what), quantity.predicted, False))]
    own += [Curve("measured", MEASURED, measured, "dots")] if measured else []
    own += [Curve("chosen", INK, ringed, "ring")] if ringed else []
    chart = charts.curves(f"{quantity.title} by {what}", own, f"draft {what}", quantity.unit, plain)
    chart.key += [] if plain is None else [("plain decoding (dashed)", PLAIN)]
    return chart


def _cost(title: str, curve: Sequence[Sequence[float]], axis: str, root: int) -> Canvas:
    points = [Point(size + root, ms, f"{size + root:g} rows") for size, ms in curve]
    return charts.curves(f"ms of {title}", [Curve("measured", MEASURED, points)], axis, "ms")


def _table(rows: Sequence[TreeRow], chosen: str) -> str:
    """Trees that were run, the fastest first."""
    heads = ("tree", "levels", "nodes", "tau forecast", "tau", "tokens/s forecast", "tokens/s", "interval", "off by")
    run = [(row, row.tokens_per_second) for row in rows]
    ordered = sorted(((row, speed) for row, speed in run if speed is not None), key=lambda own: -own[1])
    lines = []
    for row, speed in ordered:
        off = row.tokens_per_second_predicted / speed - 1
        interval = "-" if row.interval is None else f"{row.interval[0]:.1f} to {row.interval[1]:.1f}"
        name = f"{row.tree} (chosen)" if row.tree == chosen else row.tree
        lines.append(
            (
                name,
                str(row.levels),
                str(row.nodes),
                _two(row.tau_predicted),
                _two(row.tau),
                f"{row.tokens_per_second_predicted:.1f}",
                f"{speed:.1f}",
                interval,
                f"{round(100 * off):+d} %",
            )
        )
    return grid(heads, lines, num_names=1)


def _two(tau: float | None) -> str:
    return "-" if tau is None else f"{tau:.2f}"
