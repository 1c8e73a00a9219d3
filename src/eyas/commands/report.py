"""`eyas report`: the JSON of `eyas bench` as one HTML page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyas.commands.common import print_json, say
from eyas.errors import InputError, one_line
from eyas.files import write_text
from eyas.report import page

HELP = "the JSON of eyas bench as one HTML page, draft trees included (bench --trace)"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="what eyas bench --json printed")
    parser.add_argument("--out", type=Path, default=None, metavar="PAGE", help="default: FILE with the ending .html")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(threads=None)


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or arguments.file.with_suffix(".html")
    try:
        record = json.loads(arguments.file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {str(arguments.file)!r}: {one_line(error)}") from error
    if out.resolve() == arguments.file.resolve():
        raise InputError(f"the page would take the place of {str(out)!r}: give another --out")
    try:
        text = page(record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{str(arguments.file)!r} is no JSON that this version of eyas bench prints") from error
    write_text(out, text)
    if arguments.json:
        print_json({"out": str(out), "bytes": len(text.encode())})
    else:
        say(f"the report lies in {out}")
    return 0
