"""What one forward costs as a function of its rows: T(m), beside the machine's ceilings and other engines.

    python benchmarks/forward.py --target smollm2 [--llama PYTHON --gguf FILE ...] [--openvino PYTHON --ir FOLDER ...]

Every engine continues one sequence of 200 tokens by m tokens and forgets them again. Engines take turns, round by
round, so that a machine that drifts slows all alike; the figure is the median. Ceilings are measured in the same run:
streaming read, and bfloat16 matrix product (torch). Other engines run in Python environments of their own and talk in
JSON lines (benchmarks/peer_llama.py, benchmarks/peer_openvino.py). Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import eyas
from eyas.machine import machine, versions
from eyas.tree import Tree

HERE = Path(__file__).parent
CONTEXT = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--openvino", help="a Python that has openvino")
    parser.add_argument("--ir", nargs="*", default=[])
    parser.add_argument("--torch", action="store_true", help="transformers in bfloat16 through the eager back end too")
    arguments = parser.parse_args()

    os.environ["EYAS_NUM_THREADS"] = str(arguments.threads)
    torch.set_num_threads(arguments.threads)
    ceilings = {"stream_gb_per_s": stream(), "torch_bf16_gflop_per_s": matrix_peak(torch.bfloat16)}
    engines: dict[str, Callable[[int], float]] = {}
    sizes: dict[str, int] = {}
    weights = 0
    for dtype in ("bfloat16", "int8"):
        model = eyas.load(arguments.target, backend="native", dtype=dtype)
        weights = product_weights(model)
        sizes[f"eyas {dtype}"] = weights * (2 if dtype == "bfloat16" else 1)
        engines[f"eyas {dtype}"] = ours(model)
    if arguments.torch:
        torch.set_num_threads(arguments.threads)  # the core leaves torch one
        engines["torch bfloat16"] = ours(eyas.load(arguments.target, backend="eager", dtype="bfloat16"))
    peers = [Peer(arguments.llama, "peer_llama.py", file, arguments.threads) for file in arguments.gguf]
    peers += [Peer(arguments.openvino, "peer_openvino.py", folder, arguments.threads) for folder in arguments.ir]
    for peer in peers:
        engines[peer.name] = peer.forward
    times = measure(engines, arguments.rows, arguments.rounds)
    for peer in peers:
        peer.close()
    report(times, sizes, weights, ceilings)
    settings = {"target": arguments.target, "threads": arguments.threads, "context": CONTEXT}
    record = {"machine": machine(), "versions": versions(), **settings, "ceilings": ceilings, "milliseconds": times}
    print(json.dumps(record))
    return 0


def ours(model: eyas.Model) -> Callable[[int], float]:
    target = model.target
    cache = target.new_cache()
    target.verify([(cache, Tree.chain(tokens(CONTEXT)))], last_only=True)
    target.keep(cache, range(CONTEXT))

    def forward(rows: int) -> float:
        tree = Tree.chain(tokens(rows))
        begun = time.perf_counter()
        target.verify([(cache, tree)])
        spent = time.perf_counter() - begun
        target.keep(cache, [])
        return spent

    return forward


class Peer:
    """Another engine, in a process of its own."""

    def __init__(self, python: str | None, script: str, model: str, threads: int) -> None:
        if python is None:
            raise SystemExit(f"{script} needs the Python that runs it")
        command = [python, str(HERE / script), model, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = str(self.ask({"do": "open", "tokens": tokens(CONTEXT)})["name"])

    def ask(self, request: dict[str, object]) -> dict[str, object]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def forward(self, rows: int) -> float:
        return float(str(self.ask({"do": "forward", "tokens": tokens(rows)})["seconds"]))

    def close(self) -> None:
        self._process.kill()


def tokens(count: int) -> list[int]:
    return [1000 + 37 * i % 20000 for i in range(count)]


def measure(engines: dict[str, Callable[[int], float]], rows: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Median milliseconds by engine and rows; engines alternate."""
    found: dict[str, dict[int, list[float]]] = {name: {m: [] for m in rows} for name in engines}
    for number in range(rounds + 2):
        for m in rows:
            for name, forward in engines.items():
                time.sleep(0.01)  # the threads of the engine before must have stopped spinning,
                forward(m)  # and what it left in the caches is not this one's cost
                spent = forward(m)
                if number >= 2:
                    found[name][m].append(spent * 1e3)
        print(f"round {number + 1} of {rounds + 2}", file=sys.stderr)
    return {name: {m: statistics.median(values) for m, values in by.items()} for name, by in found.items()}


def product_weights(model: eyas.Model) -> int:
    """Weights that one forward multiplies by: layers and output head."""
    spec = model.target.spec
    attention = spec.width * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    return spec.num_layers * (attention + 3 * spec.width * spec.ffn_width) + spec.vocab_size * spec.width


def stream(megabytes: int = 512) -> float:
    """GB/s of reading memory with all threads."""
    values = torch.ones(megabytes << 18)
    return megabytes / 953.674 / min(timed(lambda: values.sum()) for _ in range(8))


def matrix_peak(dtype: torch.dtype, size: int = 2048) -> float:
    a = torch.randn(size, size).to(dtype)
    return 2 * size**3 / 1e9 / min(timed(lambda: a @ a) for _ in range(8))


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def report(times: dict[str, dict[int, float]], sizes: dict[str, int], weights: int, ceilings: dict[str, float]) -> None:
    rows = list(next(iter(times.values())))
    print(f"ceilings: {ceilings['stream_gb_per_s']:.0f} GB/s, {ceilings['torch_bf16_gflop_per_s']:.0f} bf16 GFLOP/s")
    print("milliseconds (ratio to one row)")
    print(f"{'engine':24}" + "".join(f"{f'm={m}':>14}" for m in rows))
    for name, by in times.items():
        print(f"{name:24}" + "".join(f"{by[m]:8.2f} {f'({by[m] / by[rows[0]]:.2f})':>5}" for m in rows))
    print("share of ceilings: GB/s of weights; GFLOP/s of products")
    for name, size in sizes.items():
        by = times[name]
        cells = (f"{size / by[m] / 1e6:6.0f}/{2 * weights * m / by[m] / 1e6:5.0f}" for m in rows)
        print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
