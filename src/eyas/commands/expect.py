"""`eyas expect`: tokens per forward of the target to expect from acceptance, for chains and trees."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.commands.common import print_json
from eyas.errors import InputError, one_line
from eyas.expect import Example, Expectation, Shares, chain, example, expect
from eyas.policies import parse_policy

HELP = "what acceptance promises: expected tokens per forward, for chains and trees"
TREES = ("chain:2", "chain:4", "static", "dynamic:levels=4,top_k=3,nodes=5", "dynamic")


def add_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--alpha",
        type=_shares,
        default=None,
        metavar="A[,A...]",
        help="acceptance of the best candidate, of the second",
    )
    source.add_argument("--bench", type=Path, default=None, metavar="FILE", help="acceptance from eyas bench --json")
    parser.add_argument("--tree", action="append", default=[], help="as in eyas generate, but not auto (repeatable)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(threads=None)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from error


def run(arguments: argparse.Namespace) -> int:
    policies = [parse_policy(tree) for tree in arguments.tree]
    if arguments.alpha is not None:
        shares = Shares((arguments.alpha,))
        found = [expect(policy, shares) for policy in policies or map(parse_policy, TREES)]
        lesson = example(arguments.alpha[0])
        if arguments.json:
            print_json({"rows": [asdict(own) for own in found], "example": asdict(lesson)})
        else:
            print(_table(found, arguments.alpha[0]) + "\n\n" + _lesson(lesson))
        return 0
    records: list[dict[str, object]] = []
    for row in _measured(arguments.bench):
        own = [parse_policy(row.tree), *policies]
        by_name = {str(policy): policy for policy in own if policy.keyed}
        found = [expect(policy, row.shares) for policy in by_name.values()]
        where = {"workload": row.workload, "method": row.method, "temperature": row.temperature}
        records += [{**where, "measured_tree": row.tree, "measured_tau": row.tau, **asdict(line)} for line in found]
        if not arguments.json:
            print(f"\n{row.workload}, {row.method}, T={row.temperature:g}: measured {row.tau:.2f} with {row.tree}\n"
                  f"{_table(found)}")  # fmt: skip
    if arguments.json:
        print_json({"rows": records})
    return 0


@dataclass(frozen=True)
class _Measured:
    """What a row of a bench's JSON says about a tree."""

    workload: str
    method: str
    temperature: float
    tree: str
    tau: float
    shares: Shares


def _measured(path: Path) -> list[_Measured]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {str(path)!r}: {one_line(error)}") from error
    try:
        found = [_row(row) for row in record["rows"] if row["tree"] and row["acceptance_by_depth_and_rank"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{str(path)!r} is no JSON of eyas bench with acceptance by depth and rank") from error
    if not found:
        raise InputError(f"{str(path)!r} has no row of a method that drafts")
    return found


def _row(row: Mapping[str, Any]) -> _Measured:
    shares = Shares.measured([[float(share) for share in ranks] for ranks in row["acceptance_by_depth_and_rank"]])
    names = (str(row["workload"]), str(row["method"]), float(row["temperature"]), str(row["tree"]), float(row["tau"]))
    return _Measured(*names, shares)


def _table(found: Sequence[Expectation], alpha: float | None = None) -> str:
    lines = [f"{'tree':42} {'levels':>6} {'nodes':>5} {'independent':>11} {'exclusive':>12}"]
    for own in found:
        low, high = f"{own.exclusive:.2f}", f"{own.exclusive_most:.2f}"
        note = ""
        if alpha is not None and own.nodes == own.levels:  # a chain
            note = f"  (1-a^{own.levels + 1})/(1-a) = {chain(alpha, own.levels):.2f}"
        span = low if low == high else f"{low} to {high}"
        lines.append(f"{own.tree:42} {own.levels:6} {own.nodes:5} {own.independent:11.2f} {span:>12}{note}")
    return "\n".join(lines)


def _lesson(e: Example) -> str:
    return (
        f"At a = {e.alpha:g} a chain reaches depth 2 with {e.chain_reaches_depth_2:.2f}. With {e.width} independent "
        f"candidates one level holds with\n1 - (1-a)^{e.width} = {e.one_level:.3f}: a path widened at depth 2 only is "
        f"reached with {e.widened_at_depth_2:.2f}, widened at both with {e.widened_at_both:.2f}.\nCandidates of one "
        f"distribution exclude each other: what counts is the sum of their shares (--alpha 0.7,0.1,0.05)."
    )
