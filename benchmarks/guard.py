"""Is guarded drafting ever slower than plain decoding? Where no guess holds, and on MT-bench.

    python benchmarks/guard.py --dtype bfloat16 --repeats 5

Three workloads, each plain, guarded and unguarded by turns: prompts of random tokens; MT-bench with a head whose
weights are shuffled, each matrix in itself; MT-bench with the head as it is. Costs are measured first where none are
kept. Prints tables, and what was to be shown; ends with one JSON line. Exit code 1 where a hopeless workload runs below
0.97 of plain decoding's speed, or tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file

import eyas
from eyas import bench
from eyas.checkpoint import head_folder
from eyas.machine import commit, machine, versions
from eyas.model import Model, attach_head, with_head
from eyas.prompts import Item, read_workload
from eyas.results import table

FLOOR = 0.97


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()

    plain = eyas.load(arguments.target, backend="native", dtype=arguments.dtype)
    raw = replace(plain, tokenizer=deepcopy(plain.tokenizer))
    raw.tokenizer.chat_template = None  # asked in the template, the target politely answers random tokens too
    items = read_workload("mt_bench", 10 * arguments.limit)[::10]  # one of each category
    sampling = plain.sampling(temperature=arguments.temperature)
    how = bench.How(arguments.max_new_tokens, repeats=arguments.repeats)
    found: list[bench.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        shuffled = shuffle(head_folder(arguments.head), Path(folder) / "shuffled")
        for name, model, head, prompts in (
            ("random tokens", raw, arguments.head, random_prompts(plain, arguments.limit)),
            ("shuffled head", plain, str(shuffled), items),
            ("mt_bench", plain, arguments.head, items),
        ):
            rows, _ = bench.compare(methods(model, head, arguments.tree), prompts, name, sampling, how)
            print(f"\n{name}\n{table(rows)}", flush=True)
            found += rows
    return verdict(found, arguments)


def methods(plain: Model, head: str, tree: str) -> list[bench.Method]:
    """Plain decoding, the head with the guard, and without it."""
    drafter = attach_head(head, plain.target, plain.tokenizer)
    guarded, free = (with_head(plain, head, drafter, tree, guard) for guard in (True, False))
    return [bench.Method(None, plain), bench.Method(head, guarded), bench.Method(head, free)]


def random_prompts(plain: Model, num: int) -> list[Item]:
    """Texts of 48 tokens drawn evenly from the vocabulary."""
    draws = torch.Generator().manual_seed(0)
    size = plain.target.spec.vocab_size
    ids = [torch.randint(size, (48,), generator=draws).tolist() for _ in range(num)]
    return [Item(f"random-{i}", (plain.decode(own),)) for i, own in enumerate(ids)]


def shuffle(head: Path, out: Path) -> Path:
    """The same head with the numbers of each weight matrix in another order: guesses without sense."""
    copytree(head, out)
    draws = torch.Generator().manual_seed(0)
    for file in out.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() == 2:
                order = torch.randperm(weight.numel(), generator=draws)
                weights[name] = weight.flatten()[order].view_as(weight).contiguous()
        save_file(weights, file)
    return out


def verdict(rows: Sequence[bench.Row], arguments: argparse.Namespace) -> int:
    """What was to be shown; the exit code."""
    print()
    failed = bench.unexplained(rows) > 0
    for row in rows:
        if row.guard:
            held = row.speedup_vs_plain >= FLOOR or row.workload == "mt_bench"
            failed |= not held
            least, most = row.speedup_interval or [row.speedup_vs_plain] * 2
            print(f"{row.workload:14} guarded {row.speedup_vs_plain:.3f}x plain ({least:.3f} to {most:.3f}), "
                  f"{row.plain_forwards} of {row.target_forwards} forwards plain"
                  f"{'' if held else f': below {FLOOR}'}")  # fmt: skip
    record = {"settings": vars(arguments), "machine": machine(), "versions": versions(), "commit": commit()}
    short = [replace(row, calibration=[], path_calibration=[], answers=[]) for row in rows]
    print(json.dumps({**record, "rows": [asdict(row) for row in short]}, allow_nan=False))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
