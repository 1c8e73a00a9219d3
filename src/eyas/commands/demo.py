"""`eyas demo`: the demo target with a head beside plain decoding, on a few prompts of different kinds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from eyas import bench
from eyas.commands.common import count, decoding_flags, load_model, report, sampling_of, say
from eyas.errors import InputError
from eyas.measure import tau
from eyas.prompts import Item, read_workload

HELP = "the demo target with a shipped head beside plain decoding"


def add_flags(parser: argparse.ArgumentParser) -> None:
    decoding_flags(parser, target="smollm2", max_new_tokens=96)
    parser.add_argument(
        "--head",
        default="smollm2-eagle3",
        help="a shipped head, a folder, lookup, or small:TARGET (default %(default)s)",
    )
    parser.add_argument("--limit", type=count, default=None, help="only the first N prompts")


def run(arguments: argparse.Namespace) -> int:
    if arguments.head == "none":
        raise InputError("the demo shows a head beside plain decoding: give a head")
    say("loading the demo target (the first time, its weights are converted: about half a minute)")
    model = load_model(arguments, arguments.head)
    items = read_workload(Path(str(files("eyas") / "demo.jsonl")), arguments.limit)
    methods = [bench.Method(None, replace(model, drafter=None)), bench.Method(arguments.head, model)]
    how = bench.How(arguments.max_new_tokens)
    rows, answers = bench.compare(methods, items, "demo", sampling_of(arguments, model), how)
    texts = []
    for i, item in enumerate(items):
        plain, drafted = (model.decode(side[i].tokens) for side in answers)
        speeds = [len(side[i].tokens) / side[i].seconds for side in answers]
        same = answers[0][i].tokens == answers[1][i].tokens if methods[1].keyed else None
        texts.append({"id": item.id, "prompt": item.text, "plain": plain, "text": drafted, "identical": same})
        if not arguments.json:
            _show_pair(item, plain, drafted, same, speeds, tau(answers[1][i : i + 1]))
    return report(arguments, rows, {"texts": texts})


def _show_pair(
    item: Item, plain: str, drafted: str, same: bool | None, speeds: Sequence[float], own_tau: float | None
) -> None:
    print(f"\n== {item.id}: {item.text}\n-- plain ({speeds[0]:.1f} tokens/s)\n{plain}")
    tau_text = "" if own_tau is None else f", tau {own_tau:.2f}"
    print(f"-- drafted ({speeds[1]:.1f} tokens/s, {speeds[1] / speeds[0]:.2f}x{tau_text})\n{drafted}")
    verdict = {True: "yes", False: "NO", None: "not claimed: a sampled tree keeps the law, not the tokens"}[same]
    print(f"-- identical: {verdict}")
