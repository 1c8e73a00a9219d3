"""The page of `eyas bench`: tables, charts, and the draft trees of the answers that were traced.

Data and the program of the viewer (`page/viewer.js`, which runs in the browser) stand in the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from eyas import charts
from eyas.bench import Row
from eyas.charts import Canvas, Dots, Series
from eyas.measure import Bin
from eyas.pages import COLOURS, PLAIN, Charts, Page, grid, legend, note

VERIFY, REST = "#475569", "#d1d5db"
LEVELS = ("#0b4f7d", "#2573a8", "#4d96c6", "#7fb5d9", "#aed1e8", "#d4e6f3")


@dataclass(frozen=True)
class Entry:
    """A method over all workloads and temperatures: one name and one colour throughout the page."""

    name: str
    colour: str
    rows: list[Row]

    def at(self, workload: str, temperature: float) -> Row | None:
        return next((row for row in self.rows if (row.workload, row.temperature) == (workload, temperature)), None)


def bench_page(record: Mapping[str, Any]) -> Page:
    """The page of a bench's JSON.

    Raises:
        KeyError, TypeError, ValueError: it is none, or one of an older version.
    """
    rows = [Row(**{field.name: row[field.name] for field in fields(Row)}) for row in record["rows"]]
    if not rows:
        raise ValueError("no rows")
    entries = _entries(rows)
    title = f"eyas bench: {record['target']}"
    parts: list[str | Charts] = [_head(record, rows), legend((entry.name, entry.colour) for entry in entries)]
    for temperature in dict.fromkeys(row.temperature for row in rows):
        own = [row for row in rows if row.temperature == temperature]
        parts += _temperature(temperature, own, entries, record.get("suite"))
    data = [
        {"temperature": row.temperature, "label": entry.name, **answer}
        for entry in entries
        for row in entry.rows
        for answer in row.answers
        if entry.colour != PLAIN
    ]
    if data:
        parts.append(_viewer(data))
    return Page(title, parts)


def _entries(rows: Sequence[Row]) -> list[Entry]:
    by_key: dict[tuple[str, str | None, str | None], list[Row]] = {}
    for row in rows:
        by_key.setdefault((row.method, row.head, row.tree), []).append(row)
    names = [f"{method} {tree}" if tree else method for method, _, tree in by_key]
    found, colours = [], 0
    for (_, head, _), name, own in zip(by_key, names, by_key.values(), strict=True):
        twice = names.count(name) > 1
        colour = PLAIN if head is None else COLOURS[colours % len(COLOURS)]
        colours += head is not None
        found.append(Entry(f"{name} ({head})" if twice else name, colour, own))
    return found


def _head(record: Mapping[str, Any], rows: Sequence[Row]) -> str:
    row, machine, versions = rows[0], record["machine"], record["versions"]
    asked = f"up to {row.max_new_tokens} new tokens, seed {row.seed}, {row.turns} turn" + ("s" * (row.turns == "all"))
    batch = "batch 1" if row.batch == 1 else f"{row.batch} prompts at a time"
    facts = [
        f"{row.backend} back end, {row.dtype}, {batch}, {asked}",
        f"{machine['cpu']}, {machine['threads']} threads, {machine['system']}, peak memory "
        f"{max(row.peak_memory_bytes for row in rows) / 2**20:.0f} MiB",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + f", commit {record.get('commit', '-')}",
    ]
    return "\n".join(map(note, facts))


def _temperature(temperature: float, rows: Sequence[Row], entries: Sequence[Entry], suite: Any) -> list[str | Charts]:
    about = f"temperature {temperature:g}"
    workloads = list(dict.fromkeys(row.workload for row in rows))
    drafting = [entry for entry in entries if entry.colour != PLAIN]

    def column(entry: Entry, what: str) -> list[Any]:
        found = [entry.at(workload, temperature) for workload in workloads]
        return [None if row is None else getattr(row, what) for row in found]

    speeds = [
        Series(e.name, e.colour, column(e, "tokens_per_second"), column(e, "tokens_per_second_interval"))
        for e in entries
    ]
    ratios = [Series(e.name, e.colour, column(e, "speedup_vs_plain"), column(e, "speedup_interval")) for e in drafting]
    taus = [Series(e.name, e.colour, column(e, "tau")) for e in drafting]
    times = _times(rows, entries)
    return [
        f"<h2>Temperature {temperature:g}</h2>\n{_table(rows, entries, temperature)}",
        _suite(suite, temperature),
        "<h3>Workloads side by side</h3>",
        note("tau is tokens per forward of the target. Whiskers: the slowest and the fastest of alternated runs."),
        Charts(
            about,
            (
                charts.bars("tokens per second", workloads, speeds, "tokens/s"),
                charts.bars("speed-up over plain decoding", workloads, ratios, "x", mark=1.0),
                charts.bars("tau", workloads, taus, "tokens per forward"),
            ),
        ),
        "<h3>Acceptance by depth</h3>",
        note("Of the rounds that reached a depth and had candidates there, the share that accepted one."),
        Charts(
            f"{about}, acceptance by depth", tuple(_by_depth(workload, drafting, temperature) for workload in workloads)
        ),
        "<h3>Calibration</h3>",
        note(
            "Nodes by draft confidence, all workloads together; a dot's area is their number. On the diagonal, "
            "confidence is the chance to be accepted; dynamic trees are chosen by path values."
        ),  # fmt: skip
        Charts(
            f"{about}, calibration",
            (
                charts.calibration("a candidate, its parent accepted", _dots(drafting, temperature, "calibration")),
                charts.calibration("the whole path to a node", _dots(drafting, temperature, "path_calibration")),
            ),
        ),
        "<h3>Where a forward's time goes</h3>",
        note(
            "All time over all forwards of the target but the prompts' own, whose time counts as verification. Level 1 "
            "absorbs what was verified before."
        ),  # fmt: skip
        legend(times.key),
        Charts(about, (times,)),
    ]


def _by_depth(workload: str, entries: Sequence[Entry], temperature: float) -> Canvas:
    found = [(entry, entry.at(workload, temperature)) for entry in entries]
    series = [Series(entry.name, entry.colour, row.alpha_by_depth) for entry, row in found if row is not None]
    return charts.lines(workload, series, "depth")


def _dots(entries: Iterable[Entry], temperature: float, what: str) -> list[Dots]:
    """Bins of all workloads together."""
    found = []
    for entry in entries:
        bins = [Bin(**own) for row in entry.rows if row.temperature == temperature for own in getattr(row, what)]
        points = []
        for low in sorted({own.low for own in bins}):
            here = [own for own in bins if own.low == low]
            count = sum(own.count for own in here)
            confidence = sum(own.confidence * own.count for own in here) / count
            points.append((confidence, sum(own.accepted * own.count for own in here) / count, count))
        found.append(Dots(entry.name, entry.colour, points))
    return found


def _times(rows: Sequence[Row], entries: Sequence[Entry]) -> Canvas:
    """Milliseconds of a target forward: drafting by level, verification, rest."""
    names = {id(row): entry.name.split(" ")[0] for entry in entries for row in entry.rows}
    labels = [f"{row.workload}, {names[id(row)]}" for row in rows]
    forwards = [max(row.target_forwards, 1) for row in rows]
    most = max((len(row.draft_ms_by_level) for row in rows), default=0)

    def level(row: Row, i: int) -> float:
        if i < most:
            return row.draft_ms_by_level[i] if i < len(row.draft_ms_by_level) else 0.0
        return row.draft_ms - sum(row.draft_ms_by_level)

    parts = [
        Series(f"draft level {i + 1}" if i < most else "draft, choosing nodes", LEVELS[min(i, len(LEVELS) - 1)],
               [level(row, i) / n for row, n in zip(rows, forwards, strict=True)])
        for i in range(most + (most > 0))
    ]  # fmt: skip
    parts.append(Series("verify", VERIFY, [row.verify_ms / n for row, n in zip(rows, forwards, strict=True)]))
    parts.append(Series("rest", REST, [row.other_ms / n for row, n in zip(rows, forwards, strict=True)]))
    return charts.stacked("ms per forward of the target", labels, parts, "ms")


def _table(rows: Sequence[Row], entries: Sequence[Entry], temperature: float) -> str:
    heads = (
        "workload",
        "method",
        "tau",
        "tokens/s",
        "interval",
        "speed-up",
        "identical",
        "outside vocabulary",
        "n-alpha",
    )
    lines = []
    for workload in dict.fromkeys(row.workload for row in rows):
        for entry in entries:
            row = entry.at(workload, temperature)
            if row is None:
                continue
            interval, share = row.tokens_per_second_interval, row.rejected_outside_vocabulary
            lines.append(
                (
                    workload,
                    entry.name,
                    _two(row.tau),
                    f"{row.tokens_per_second:.1f}",
                    "-" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}",
                    f"{row.speedup_vs_plain:.2f}x",
                    "-" if row.identical is None else f"{row.identical}/{row.sequences}",
                    "-" if share is None else f"{100 * share:.0f} %",
                    "-" if row.n_alpha is None else " ".join(f"{alpha:.2f}" for alpha in row.n_alpha),
                )
            )
    return grid(heads, lines, num_names=2)


def _suite(suite: Any, temperature: float) -> str:
    """The papers' table, where the JSON has one."""
    found = [] if suite is None else [line for line in suite["table"] if line["temperature"] == temperature]
    if not found:
        return ""
    sets = list(dict.fromkeys(name for line in found for name in line["sets"]))
    lines = []
    for line in found:
        cells = [*map(line["sets"].get, sets), line["mean"]]
        texts = ["-" if cell is None else f"{cell['speedup']:.2f}x / {_two(cell['tau'])}" for cell in cells]
        lines.append((f"{line['method']} {line['tree']}", *texts))
    return "<h3>The papers' table</h3>\n" + grid(("speed-up / tau", *sets, "mean"), lines, num_names=1)


def _two(tau: float | None) -> str:
    return "-" if tau is None else f"{tau:.2f}"


def _viewer(answers: Sequence[Mapping[str, Any]]) -> str:
    """The viewer's places, its data and its program."""
    data = json.dumps(answers, allow_nan=False).replace("<", "\\u003c")  # no text in it can end the element
    program = (files("eyas") / "page" / "viewer.js").read_text(encoding="utf-8")
    about = note("Each round drafts a tree below the last token, with the draft's confidence in each node; the target "
                 "verifies it in one forward, keeps the green path and adds a token of its own. Grey nodes were "
                 "hedges. Click a token, or step with the arrow keys.")  # fmt: skip
    return f"""<h2 id="viewer">Round by round</h2>
{about}
<div class="controls"><select id="answer" aria-label="answer"></select>
<button id="back" aria-label="round before">&larr;</button>
<input type="range" id="round" min="0" value="0" aria-label="round">
<button id="next" aria-label="next round">&rarr;</button>
</div>
<p id="prompt" class="faint"></p>
<ul id="origins" class="legend"></ul>
<div id="text"></div>
<p id="what"></p>
<div id="tree"></div>
<script type="application/json" id="answers">{data}</script>
<script>
{program}</script>"""
