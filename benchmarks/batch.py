"""Throughput of many prompts that share their forwards: tokens per second by batch size, and each answer its own.

    python benchmarks/batch.py WORKLOAD [--dtype int8] [--head smollm2-eagle3 --tree chain:2] [--batch 1 16 64]

Every batch size answers the same prompts, taken in turns of the largest batch, so that a machine that drifts slows all
alike. Whole answers, and decoding alone: without the prompts' own forwards, which are as fast at every batch size, and
the tokens that they give. Prompt i is sample i. Answers equal to those of the first batch size are counted: all of them
on the native back end, while others round differently for another batch shape. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

import eyas
from eyas.generate import Request
from eyas.machine import machine, versions
from eyas.prompts import read_workload


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--head")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()

    model = eyas.load(
        arguments.target, arguments.head, backend=arguments.backend, dtype=arguments.dtype, tree=arguments.tree
    )
    stop = model.stopping(arguments.max_new_tokens)
    requests = [
        Request(model.encode(item.text), model.sampling(temperature=arguments.temperature, sample=i), stop)
        for i, item in enumerate(read_workload(arguments.workload, arguments.limit))
    ]
    answer(model, requests[:2], 2)
    seconds, reading = dict.fromkeys(arguments.batch, 0.0), dict.fromkeys(arguments.batch, 0.0)
    tokens: dict[int, list[list[int]]] = {batch: [] for batch in arguments.batch}
    turn = max(arguments.batch)
    for first in tqdm(range(0, len(requests), turn), unit="turn"):
        for batch in arguments.batch:
            begun = time.perf_counter()
            found, prompts_ms = answer(model, requests[first : first + turn], batch)
            seconds[batch] += time.perf_counter() - begun
            reading[batch] += prompts_ms / 1e3
            tokens[batch] += found
    rows: list[dict[str, float]] = []
    base = arguments.batch[0]
    print(f"{'batch':>5} {'tokens/s':>9} {'ratio':>6} {'decoding':>9} {'ratio':>6} {'identical':>9}")
    for batch in arguments.batch:
        num_tokens = sum(map(len, tokens[batch]))
        whole = num_tokens / seconds[batch]
        decoding = (num_tokens - len(requests)) / (seconds[batch] - reading[batch])
        same = sum(a == b for a, b in zip(tokens[base], tokens[batch], strict=True))
        rows.append({"batch": batch, "tokens_per_second": whole, "decoding": decoding, "identical": same})
        ratios = (whole / rows[0]["tokens_per_second"], decoding / rows[0]["decoding"])
        print(f"{batch:5} {whole:9.1f} {ratios[0]:6.2f} {decoding:9.1f} {ratios[1]:6.2f} {same:5}/{len(requests)}")
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "batch"}
    print(json.dumps({"machine": machine(), "versions": versions(), **settings, "rows": rows}))
    return 0


def answer(model: eyas.Model, requests: list[Request], batch: int) -> tuple[list[list[int]], float]:
    """Tokens by request, and the milliseconds that the prompts' own forwards took."""
    found: list[list[int]] = [[] for _ in requests]
    prompts_ms = 0.0
    for number, round_ in model.many_rounds(requests, batch):
        found[number] += round_.tokens
        if round_.tree is None:
            prompts_ms += round_.verify_ms + round_.other_ms
    return found, prompts_ms


if __name__ == "__main__":
    sys.exit(main())
