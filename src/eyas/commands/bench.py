"""`eyas bench`: methods side by side on workloads."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from eyas import bench, checkpoint
from eyas.commands.common import count, decoding_flags, load_model, report, sampling_of, say_if_slow
from eyas.model import attach_head, choose_policy
from eyas.policies import parse_policy

HELP = "methods side by side on workloads"


def add_flags(parser: argparse.ArgumentParser) -> None:
    decoding_flags(parser, target=None, max_new_tokens=128)
    parser.add_argument("--workload", action="append", required=True, help="a JSONL file with turns, or lines of text")
    parser.add_argument("--limit", type=count, default=None, help="only the first N prompts of each")
    parser.add_argument(
        "--method", action="append", default=[], metavar="HEAD[@TREE]", help="repeatable; plain always runs"
    )
    parser.add_argument(
        "--batch", type=count, default=1, metavar="N", help="prompts that share their forwards (default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    workloads = {path: bench.read_workload(Path(path), arguments.limit) for path in arguments.workload}
    specs = [_method(text, arguments) for text in arguments.method]  # before anything slow: a typo costs no time
    plain = load_model(arguments, None)
    drafters = {head: attach_head(head, plain.target, plain.tokenizer) for head in {head for head, _ in specs}}
    for head, drafter in drafters.items():
        say_if_slow(head, replace(plain, drafter=drafter))
    methods = [bench.Method(None, plain)]
    methods += [
        bench.Method(head, replace(plain, drafter=drafters[head], policy=choose_policy(tree, plain.target.spec)))
        for head, tree in specs
    ]
    rows: list[bench.Row] = []
    for path, items in workloads.items():
        settings = (sampling_of(arguments, plain), arguments.max_new_tokens, arguments.batch)
        rows += bench.compare(methods, items, Path(path).stem, *settings)[0]
    return report(arguments, plain, rows, {})


def _method(text: str, arguments: argparse.Namespace) -> tuple[str, str]:
    """HEAD[@TREE], both checked; the name of a folder or file may hold an @."""
    whole = "@" not in text or os.path.exists(text.removeprefix(checkpoint.SMALL))
    head, _, tree = (text, "", "") if whole else text.rpartition("@")
    checkpoint.check_head(head)
    tree = tree or arguments.tree
    if tree != "auto":
        parse_policy(tree).check(sampling_of(arguments))  # refused now, not after loading
    return head, tree
