"""What a head's makers measured of it, as `acceptance.json` in its folder; and whether a run falls far short of it.

A head that drifts from its target (other weights, another precision, another chat template) still decodes rightly, and
nobody notices that it has stopped to help. So the acceptance of the first guessed token is held to the figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eyas.errors import InputError, one_line
from eyas.files import write_text

FILE = "acceptance.json"
_FAR = 0.5  # of the lowest promise: workloads, lengths and trees that were never measured account for less than that
_CHANCE = 1e-4  # that draws of a head which still reaches `_FAR` of its promise come out as badly


@dataclass(frozen=True)
class Figures:
    """Greedy decoding of one workload under one tree: a row of `eyas bench`."""

    tree: str
    workload: str
    tau: float
    alpha_by_depth: tuple[float, ...]


def read_figures(folder: Path) -> list[Figures]:
    """Those of a head's folder; none where it has no file.

    Raises:
        InputError: the file is no list of figures.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [_figures(row) for row in rows]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise InputError(f"{str(path)!r} is no list of tree, workload, tau and alpha_by_depth: "
                         f"{one_line(error)}") from error  # fmt: skip


def _figures(row: dict[str, object]) -> Figures:
    tree, workload, tau, alpha = (row[name] for name in ("tree", "workload", "tau", "alpha_by_depth"))
    if not isinstance(tau, (int, float)) or not isinstance(alpha, list) or not alpha:
        raise ValueError("tau must be a number, and alpha_by_depth numbers from 0 to 1")
    if not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in alpha):
        raise ValueError("alpha_by_depth must be numbers from 0 to 1")
    return Figures(str(tree), str(workload), tau, tuple(alpha))


def write_figures(folder: Path, rows: Sequence[Figures]) -> None:
    """For `read_figures`."""
    write_text(folder / FILE, json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False) + "\n")


def shortfall(hits: int, draws: int, tree: str, figures: Sequence[Figures]) -> str | None:
    """A sentence if so few of the draws below roots hit a candidate that the head cannot be at half of its lowest
    figure at this depth; None otherwise. Figures under other trees count where there are none under this one."""
    comparable = [row for row in figures if row.tree == tree] or figures
    if not comparable or not draws:
        return None
    least = min(row.alpha_by_depth[0] for row in comparable)
    if binomial_tail(hits, draws, _FAR * least) > _CHANCE:
        return None
    return (f"only {hits} of {draws} first guesses held, and the head's own figures are {least:.0%} or more on every "
            f"workload: has the target other weights, another precision or another chat template than the head was "
            f"made for? (eyas inspect says what it was made for)")  # fmt: skip


def binomial_tail(hits: int, draws: int, chance: float) -> float:
    """P(at most `hits` of `draws` independent draws of this chance)."""
    if chance <= 0 or hits >= draws:
        return 1.0
    if chance >= 1:
        return 0.0
    total = math.lgamma(draws + 1)
    terms = (
        total
        - math.lgamma(k + 1)
        - math.lgamma(draws - k + 1)
        + k * math.log(chance)
        + (draws - k) * math.log1p(-chance)
        for k in range(hits + 1)
    )
    return min(sum(map(math.exp, terms)), 1.0)
