"""Rows of a comparison as tables for people and as the papers print them; kept in a file while a run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eyas.bench import Row
from eyas.errors import InputError
from eyas.files import write_text


def table(rows: Sequence[Row]) -> str:
    """One workload at one temperature: a line for each method, and its acceptance by depth."""
    lines = [
        f"{'method':8} {'tree':40} {'tau':>5} {'tokens/s':>9} {'speed-up':>8} {'identical':>9}  draft/verify/rest %"
    ]
    for row in rows:
        parts = (row.draft_ms, row.verify_ms, row.other_ms)
        shares = "/".join(f"{100 * part / sum(parts):.0f}" for part in parts)
        tau_text = "-" if row.tau is None else f"{row.tau:.2f}"
        same = "-" if row.identical is None else f"{row.identical:4}/{row.sequences:<4}"
        lines.append(
            f"{row.method:8} {row.tree or '-':40} {tau_text:>5} {row.tokens_per_second:9.1f} "
            f"{row.speedup_vs_plain:7.2f}x {same:>9}  {shares}"
        )
        if row.tokens_per_second_interval is not None and row.speedup_interval is not None:
            (slow, fast), (least, most) = row.tokens_per_second_interval, row.speedup_interval
            lines.append(f"{'':8} {row.runs} runs, {slow:.1f} to {fast:.1f} tokens/s, {least:.2f}x to {most:.2f}x")
        if row.alpha_by_depth:
            by_depth = " ".join(f"{share:.2f}" for share in row.alpha_by_depth)
            lines.append(f"{'':8} acceptance by depth {by_depth}{_outside(row)}")
    return "\n".join(lines)


def _outside(row: Row) -> str:
    share = row.rejected_outside_vocabulary
    return "" if not share else f"; {100 * share:.0f} % of rejections lie outside the draft vocabulary"


@dataclass(frozen=True)
class Cell:
    """What a method is worth on a set."""

    speedup: float
    tau: float | None


@dataclass(frozen=True)
class SuiteLine:
    """A method at a temperature over the sets of a suite: a line of the papers' tables (EAGLE-2, table 1)."""

    temperature: float
    method: str
    head: str
    tree: str | None
    sets: dict[str, Cell]
    mean: Cell  # over the sets, each counted once


def suite_lines(rows: Sequence[Row], sets: Sequence[str]) -> list[SuiteLine]:
    """The lines of a suite's table, by temperature and method."""
    found: dict[tuple[float, str, str, str | None], dict[str, Cell]] = {}
    for row in rows:
        if row.head is not None and row.workload in sets:
            cells = found.setdefault((row.temperature, row.method, row.head, row.tree), {})
            cells[row.workload] = Cell(row.speedup_vs_plain, row.tau)
    return [SuiteLine(*key, cells, _mean(list(cells.values()))) for key, cells in found.items()]


def _mean(cells: Sequence[Cell]) -> Cell:
    taus = [cell.tau for cell in cells if cell.tau is not None]
    return Cell(sum(cell.speedup for cell in cells) / len(cells), sum(taus) / len(taus) if taus else None)


def suite_table(lines: Sequence[SuiteLine], sets: Sequence[str]) -> str:
    """The same for people."""
    out: list[str] = []
    for temperature in dict.fromkeys(line.temperature for line in lines):
        out.append(f"\nT={temperature:g}, speed-up/tau")
        out.append(f"{'method':10}" + "".join(f"{name:>18}" for name in (*sets, "mean")))
        for line in (line for line in lines if line.temperature == temperature):
            cells = "".join(f"{_cell(cell):>18}" for cell in (*map(line.sets.get, sets), line.mean))
            out.append(f"{line.method:10}{cells}  {line.tree}")
    return "\n".join(out)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.speedup:.2f}x/" + ("-" if cell.tau is None else f"{cell.tau:.2f}")


class Kept:
    """Finished rows in a JSONL file, so that an interrupted run goes on where it was; written whole, then renamed."""

    def __init__(self, path: Path | None) -> None:
        """None keeps nothing.

        Raises:
            InputError: the file is none of this kind.
        """
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is None or not path.exists():
            self._write()  # a place that cannot be written is refused before anything is measured
            return
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self._rows[record["key"]] = Row(**record["row"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{str(path)!r} holds no results to go on from: give another file") from error

    def get(self, key: str) -> Row | None:
        return self._rows.get(key)

    def add(self, rows: dict[str, Row]) -> None:
        self._rows |= rows
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        lines = [json.dumps({"key": key, "row": asdict(row)}, allow_nan=False) for key, row in self._rows.items()]
        write_text(self._path, "".join(line + "\n" for line in lines))
