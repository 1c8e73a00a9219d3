"""`eyas inspect`: what a head or a target is, and whether they fit."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyas import data, doctor
from eyas.commands.common import count, load_eager, print_json
from eyas.errors import InputError
from eyas.model import load

HELP = "what a head or a target is, and whether they fit"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", default=None)
    parser.add_argument("--target", default=None)
    parser.add_argument("--dtype", default=None, help="of the target; int8 adds what it costs in perplexity")
    parser.add_argument("--answers", default=None, help="int8: JSONL(.gz) as for train (default: the target's own)")
    parser.add_argument("--limit", type=count, default=64, help="int8: answers, at most (default %(default)s)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(threads=None)


def run(arguments: argparse.Namespace) -> int:
    if arguments.head is None and arguments.target is None:
        raise InputError("give --head, --target or both: there is nothing to inspect")
    record: dict[str, object] = {}
    if arguments.head is not None:
        record["head"] = doctor.describe_head(arguments.head)
    if arguments.target is not None:
        if arguments.dtype == "int8":
            record["quality"] = _quality(arguments)
            arguments.dtype = None
        target, tokenizer = load_eager(arguments)
        record["target"] = doctor.describe_target(target, tokenizer)
        if arguments.head is not None:
            record["fit"] = doctor.fit(arguments.head, target, tokenizer)
    if arguments.json:
        print_json(record)
    else:
        for section, values in record.items():
            print(section)
            for key, value in values.items() if isinstance(values, dict) else ():
                print(f"  {key}: {value}")
    return 0


def _quality(arguments: argparse.Namespace) -> dict[str, object]:
    answers = None
    if arguments.answers is not None:
        spec = load(arguments.target, backend="native").target.spec
        read = data.read_answers(Path(arguments.answers), spec.vocab_size, spec.max_length, arguments.limit)
        answers = list(read)
        if not answers:
            raise InputError(f"{arguments.answers} holds no usable answer")
    return doctor.quality(arguments.target, answers, arguments.limit)
