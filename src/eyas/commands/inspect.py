"""`eyas inspect`: what a head or a target is, whether they fit, and what another runtime would make of the head."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyas import data, doctor
from eyas.commands.common import count, load_eager, print_json
from eyas.dialects import DIALECTS
from eyas.errors import InputError
from eyas.model import load
from eyas.readers import Finding

HELP = "what a head or a target is, whether they fit, and what another runtime would make of the head"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", default=None)
    parser.add_argument("--target", default=None)
    runtimes = [name for name in DIALECTS if name != "openvino"]  # which runs the graph that `eyas export` wrote
    parser.add_argument("--runtime", default=None, choices=runtimes, help="judge the head as this runtime reads it")
    parser.add_argument("--dtype", default=None, help="of the target; int8 adds what it costs in perplexity")
    parser.add_argument("--answers", default=None, help="int8: JSONL(.gz) as for train (default: the target's own)")
    parser.add_argument("--limit", type=count, default=64, help="int8: answers, at most (default %(default)s)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(threads=None)


def run(arguments: argparse.Namespace) -> int:
    if arguments.head is None and arguments.target is None:
        raise InputError("give --head, --target or both: there is nothing to inspect")
    if arguments.runtime is not None:
        return _diagnose(arguments)
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


def _diagnose(arguments: argparse.Namespace) -> int:
    if arguments.head is None or arguments.target is None:
        raise InputError("--runtime judges a head with its target: give --head and --target")
    record = doctor.diagnose(arguments.head, arguments.runtime, *load_eager(arguments))
    if arguments.json:
        print_json({"diagnosis": record})
        return 0
    findings = record.pop("findings")
    for key, value in record.items():
        print(f"{key}: {value}")
    for finding in findings if isinstance(findings, list) else ():
        print(Finding(**finding))
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
