"""`eyas export`: a head in the layout of another runtime, and the command that serves it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from eyas import checkpoint, exports
from eyas.commands.common import load_eager, new_folder, print_json, say
from eyas.dialects import DIALECTS
from eyas.drafters.eagle3 import Eagle3

HELP = "a head for another runtime"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", required=True, help="a shipped head, or a folder in any layout that eyas reads")
    parser.add_argument("--target", required=True, help="a folder, a GGUF file, a hub id, or smollm2")
    parser.add_argument("--to", required=True, choices=[*DIALECTS], help="the runtime")
    parser.add_argument("--dtype", default=None, help="to load the target in (default float32)")
    parser.add_argument("--out", required=True, help="the new folder")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(threads=None)


def run(arguments: argparse.Namespace) -> int:
    out, runtime = Path(arguments.out), arguments.to
    new_folder(out)
    checkpoint.head_folder(arguments.head)
    vocabulary = checkpoint.target_gguf(arguments.target) if runtime == "gguf" else None
    if runtime == "openvino":
        from eyas import openvino_head  # refuses, before the target is loaded, where its library is missing
    target, _ = load_eager(arguments)
    file, head, why = checkpoint.open_movable_head(arguments.head, target)
    served = vocabulary or checkpoint.target_folder(arguments.target)  # what another runtime knows the target by
    spec = replace(target.spec, name=arguments.target if checkpoint.is_hub_id(arguments.target) else str(served))
    dtype = checkpoint.weights_dtype(file)
    with checkpoint.atomic_folder(out) as folder:
        if runtime not in ("gguf", "openvino"):
            extra = {key: value for key, value in file.config.items() if key == "eyas_target"}
            extra["architectures"] = target.model.config.architectures
            exports.export(head, runtime, spec, folder, dtype, extra)
        else:
            exports.check(head, runtime, spec)
            assert isinstance(head, Eagle3), head.kind
            if vocabulary is not None:
                from eyas import gguf_head  # its library is needed for nothing else here

                gguf_head.write(folder / "head.gguf", head, spec, vocabulary, dtype)
            else:
                from eyas import openvino_head

                openvino_head.write(folder, head, spec, dtype)
    serve = exports.serve_command(head, runtime, spec, str(out if vocabulary is None else out / "head.gguf"))
    warnings = exports.warnings(head, runtime)
    for note in (f"states {list(head.reads)}: {why}", *file.notes, *warnings):
        say(note)
    record = {"out": str(out), "to": runtime, "kind": head.kind, "reads": list(head.reads), "serve": serve}
    if arguments.json:
        print_json({**record, "title": DIALECTS[runtime].title, "warnings": list(warnings)})
    else:
        print(f"{out}: a head for {DIALECTS[runtime].title}. Serve it with\n{serve}")
    return 0
