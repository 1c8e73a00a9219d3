"""`eyas bench`: methods side by side on workloads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from eyas import bench, checkpoint
from eyas.commands.common import (
    check_tree,
    count,
    decoding_flags,
    load_model,
    report,
    sampling_of,
    say,
    say_auto,
    say_if_slow,
)
from eyas.data import digest
from eyas.errors import InputError
from eyas.machine import commit, machine, versions
from eyas.model import attach_head, with_head
from eyas.prompts import FOREIGN, SHIPPED, SUITES, Item, read_workload
from eyas.results import Kept, suite_lines, suite_table

HELP = "methods side by side on workloads"


def add_flags(parser: argparse.ArgumentParser) -> None:
    decoding_flags(parser, target=None, max_new_tokens=128)
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME|FILE",
        help=f"{', '.join(SHIPPED)}; from --data-dir {', '.join(FOREIGN)}; or a file: JSONL with turns, messages or "
        "conversations, or lines of text (repeatable)",
    )
    parser.add_argument("--suite", choices=tuple(SUITES), default=None, help="the sets of the EAGLE papers")
    parser.add_argument("--data-dir", type=Path, default=None, metavar="DIR", help="where sets lie that do not ship")
    parser.add_argument("--limit", type=count, default=None, help="only the first N prompts of each")
    parser.add_argument(
        "--turns",
        choices=("first", "all"),
        default=None,
        help="go on through conversations, with plain decoding's answers (default first; --suite: all)",
    )
    parser.add_argument(
        "--method", action="append", default=[], metavar="HEAD[@TREE]", help="repeatable; plain always runs"
    )
    parser.add_argument("--temperatures", type=_numbers, default=None, metavar="T,T", help="in place of --temperature")
    parser.add_argument("--repeats", type=count, default=1, metavar="N", help="alternated runs, for an interval")
    parser.add_argument(
        "--batch", type=count, default=1, metavar="N", help="prompts that share their forwards (default %(default)s)"
    )
    parser.add_argument("--trace", type=count, default=0, metavar="N", help="write down the first N answers' rounds")
    parser.add_argument(
        "--resume", type=Path, default=None, metavar="FILE", help="keep finished results in FILE; do not run them again"
    )


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from error


def run(arguments: argparse.Namespace) -> int:
    sets = SUITES.get(arguments.suite, ())
    sources = list(dict.fromkeys([*sets, *arguments.workload]))
    if not sources:
        raise InputError("give --workload or --suite: there is nothing to measure on")
    workloads = {source: read_workload(source, arguments.limit, arguments.data_dir) for source in sources}
    temperatures = _temperatures(arguments)
    grid = [argparse.Namespace(**{**vars(arguments), "temperature": t}) for t in temperatures]
    specs = [_method(text, grid) for text in arguments.method]  # before anything slow: a typo costs no time
    kept = Kept(arguments.resume)
    methods = _load(grid[0], specs)
    turns = arguments.turns or ("all" if arguments.suite else "first")
    how = bench.How(arguments.max_new_tokens, arguments.batch, turns == "all", arguments.repeats, arguments.trace)
    rows: list[bench.Row] = []
    for source, items in workloads.items():
        for point in grid:
            rows += _measure(methods, source, items, point, how, kept)
    lines = suite_lines(rows, sets)
    suite = {"name": arguments.suite, "table": [asdict(line) for line in lines]}
    flags = {name: value for name, value in vars(arguments).items() if name not in _NOT_SETTINGS}
    extra: dict[str, object] = {"settings": {**flags, "turns": turns, "temperatures": temperatures}}
    code = report(arguments, rows, {**extra, "suite": suite} if sets else extra)
    if sets and not arguments.json:
        print(suite_table(lines, sets))
    return code


def _temperatures(arguments: argparse.Namespace) -> Sequence[float]:
    given = [arguments.temperature] if arguments.temperatures is None else arguments.temperatures
    return list(dict.fromkeys(given))


def _load(arguments: argparse.Namespace, specs: Sequence[tuple[str, str]]) -> list[bench.Method]:
    """Plain decoding, and a method for each head with its tree."""
    plain = load_model(arguments, None)
    drafters = {head: attach_head(head, plain.target, plain.tokenizer) for head in {head for head, _ in specs}}
    for head, drafter in drafters.items():
        say_if_slow(head, replace(plain, drafter=drafter))
    for head in dict.fromkeys(head for head, tree in specs if tree == "auto"):
        say_auto(head, plain)
    methods = [
        bench.Method(head, with_head(plain, head, drafters[head], tree, arguments.guard)) for head, tree in specs
    ]
    return [bench.Method(None, plain), *methods]


def _measure(
    methods: Sequence[bench.Method],
    source: str,
    items: Sequence[Item],
    point: argparse.Namespace,
    how: bench.How,
    kept: Kept,
) -> list[bench.Row]:
    """The rows of one workload at one temperature; those that are kept already are not measured again."""
    name = Path(source).stem
    keys = [_key(name, method, items, point, how) for method in methods]
    missing = [i for i, key in enumerate(keys) if kept.get(key) is None]
    if missing:
        asked = list(dict.fromkeys([0, *missing]))  # the others are compared with plain decoding beside them
        sampling = sampling_of(point, methods[0].model)
        rows, _ = bench.compare([methods[i] for i in asked], items, name, sampling, how)
        kept.add({keys[i]: row for i, row in zip(asked, rows, strict=True) if i in missing})
    else:
        say(f"kept in {point.resume}: {name}, T={point.temperature:g}")
    return [row for key in keys if (row := kept.get(key)) is not None]


_NOT_SETTINGS = ("run", "json", "resume", "data_dir", "temperature")

# Flags that do not change the rows of one method on given prompts at one temperature.
_APART = ("run", "json", "resume", "method", "workload", "suite", "data_dir", "limit", "temperatures", "tree", "turns")


def _key(name: str, method: bench.Method, items: Sequence[Item], point: argparse.Namespace, how: bench.How) -> str:
    """Everything that a row depends on."""
    flags = sorted((name, value) for name, value in vars(point).items() if name not in _APART)
    tree = method.tree and repr(method.model.policy)  # with the prices that it goes by
    return digest([name, method.head, tree, list(items), flags, how, machine(), versions(), commit()])


def _method(text: str, grid: Sequence[argparse.Namespace]) -> tuple[str, str]:
    """HEAD[@TREE], both checked; the name of a folder or file may hold an @."""
    whole = "@" not in text or os.path.exists(text.removeprefix(checkpoint.SMALL))
    head, _, tree = (text, "", "") if whole else text.rpartition("@")
    checkpoint.check_head(head)
    tree = tree or grid[0].tree
    if tree != "auto":
        for point in grid:
            check_tree(tree, point.guard, sampling_of(point))  # now, not after loading
    return head, tree
