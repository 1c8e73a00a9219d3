"""`eyas import`: a head in any layout that eyas reads, written in eyas' own."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyas import checkpoint
from eyas.commands.common import load_eager, new_folder, print_json, say

HELP = "a head of any layout, written in eyas' own"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", help="a folder: official EAGLE, SGLang, vLLM, speculators, ...")
    parser.add_argument("--target", required=True, help="a folder, a GGUF file, a hub id, or smollm2")
    parser.add_argument("--dtype", default=None, help="to load the target in (default float32)")
    parser.add_argument("--out", required=True, help="the new folder")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(threads=None)


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    new_folder(out)
    checkpoint.head_folder(arguments.head)
    target, tokenizer = load_eager(arguments)
    file, head, why = checkpoint.open_movable_head(arguments.head, target)
    notes = [f"states {list(head.reads)}: {why}", *file.notes]
    made_for = checkpoint.target_fingerprint(target, tokenizer)
    card = "\n".join([f"# {head.kind} head for {target.spec.name}", "", f"Imported from the {file.layout} layout.", ""]
                     + [f"- {note}" for note in notes]) + "\n"  # fmt: skip
    with checkpoint.atomic_folder(out) as folder:
        checkpoint.save_head(head, folder, made_for, card, checkpoint.weights_dtype(file))
    for note in notes:
        say(note)
    record = {"out": str(out), "kind": head.kind, "layout": file.layout, "reads": list(head.reads), "notes": notes}
    if arguments.json:
        print_json(record)
    else:
        print(f"{head.kind} head, {file.layout} layout, written to {out}")
    return 0
