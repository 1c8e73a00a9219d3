"""Training throughput of an EAGLE-3 head by simulated steps, beside the machine's peak in the same precision.

    python benchmarks/training.py ANSWERS [--target smollm2] [--steps 1 3 5 7] [--limit 48]

Steps of all settings alternate, so that a machine that drifts slows all alike; states are made beforehand. Operations
are those of matrix products, forward and backward, as PyTorch counts them; the peak is that of a product of two square
matrices of 2048. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from eyas.checkpoint import load_target
from eyas.data import read_answers
from eyas.features import store
from eyas.initial import draft_vocabulary, new_head
from eyas.machine import machine, versions
from eyas.train import TrainConfig, Trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 5, 7])
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    arguments = parser.parse_args()

    target, _ = load_target(arguments.target, torch.bfloat16)
    sequences = list(read_answers(arguments.answers, target.spec.vocab_size, 512, arguments.limit))
    vocabulary_Q, _ = draft_vocabulary(sequences, arguments.draft_vocab, target.spec.eos_ids)
    trainers = {}
    with tempfile.TemporaryDirectory() as folder:
        for steps in arguments.steps:
            head = new_head("eagle3", target, vocabulary_Q, steps=steps, window=512)
            states = store(target, sequences, (*head.reads, target.spec.num_layers), Path(folder), {})
            trainers[steps] = Trainer(head, states, TrainConfig(sequences=arguments.sequences), torch.bfloat16)
        operations, seconds, tokens = {}, dict.fromkeys(trainers, 0.0), dict.fromkeys(trainers, 0)
        for steps, trainer in trainers.items():  # the first step of each is no example
            with FlopCounterMode(display=False) as counter:
                trainer.train_step()
            operations[steps] = counter.get_total_flops() / trainer.tokens_seen
            tokens[steps] = -trainer.tokens_seen
        for _ in tqdm(range(arguments.rounds), unit="round"):
            for steps, trainer in trainers.items():
                begun = time.perf_counter()
                trainer.train_step()
                seconds[steps] += time.perf_counter() - begun
        peak = peak_rate()
    rows = []
    print(f"peak {peak / 1e9:.0f} GFLOP/s\n{'steps':>5} {'tokens/s':>9} {'GFLOP/s':>8} {'of peak':>8}")
    for steps, trainer in trainers.items():
        rate = (tokens[steps] + trainer.tokens_seen) / seconds[steps]
        share = rate * operations[steps] / peak
        rows.append({"steps": steps, "tokens_per_second": rate, "flop_per_token": operations[steps], "of_peak": share})
        print(f"{steps:5} {rate:9.1f} {rate * operations[steps] / 1e9:8.1f} {100 * share:7.1f}%")
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "steps"}
    print(json.dumps({"machine": machine(), "versions": versions(), **settings, "peak": peak, "rows": rows}))
    return 0


def peak_rate(size: int = 2048, repeats: int = 10) -> float:
    """Operations a second of one bfloat16 product after the other."""
    a, b = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    a @ b
    begun = time.perf_counter()
    for _ in range(repeats):
        a @ b
    return 2 * size**3 * repeats / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
