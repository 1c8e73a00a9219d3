"""`eyas report`: the JSON of `eyas bench` or `eyas tune` as one HTML page, and its charts as PNG files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tqdm import tqdm

from eyas.commands.common import print_json, say
from eyas.errors import InputError, one_line
from eyas.files import write_text
from eyas.pages import Page
from eyas.pictures import check_pictures, write_png
from eyas.report import bench_page
from eyas.tune_report import tune_page

HELP = "the JSON of eyas bench (with --trace: draft trees too) or eyas tune as one HTML page, and PNG files"
_PAGES = {"bench": bench_page, "tune": tune_page}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="what eyas bench --json or eyas tune --json printed")
    parser.add_argument("--out", type=Path, default=None, metavar="PAGE", help="default: FILE with the ending .html")
    parser.add_argument("--png", type=Path, default=None, metavar="DIR", help="write the charts there as PNG files too")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(threads=None)


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or arguments.file.with_suffix(".html")
    if out.resolve() == arguments.file.resolve():
        raise InputError(f"the page would take the place of {str(out)!r}: give another --out")
    if arguments.png is not None:
        check_pictures()
    page = _read(arguments.file)
    text, pictures = page.html(), [] if arguments.png is None else _draw(page, arguments.png)
    write_text(out, text)
    if arguments.json:
        print_json({"out": str(out), "bytes": len(text.encode()), "png": [str(path) for path in pictures]})
    else:
        say(f"the report lies in {out}" + (f", {len(pictures)} pictures in {arguments.png}" if pictures else ""))
    return 0


def _read(file: Path) -> Page:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {str(file)!r}: {one_line(error)}") from error
    try:
        return _PAGES[record.get("kind", "bench")](record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{str(file)!r} is no JSON that this version of eyas bench or eyas tune prints") from error


def _draw(page: Page, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = page.pictures()
    for name, chart in tqdm(pictures.items(), desc="pictures", unit="picture", leave=False):
        write_png(chart, folder / name)
    return [folder / name for name in pictures]
