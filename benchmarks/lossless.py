"""Is drafted output plain output, to the last token? On the native back end nothing may differ.

    python benchmarks/lossless.py WORKLOAD.jsonl --head smollm2-eagle3 --dtype int8 --threads 1 2 --limit 480

Answers every prompt plainly with the first number of threads, then with the head for each of them; compares all, prints
a digest of the tokens, and ends with one JSON line; exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

import eyas
from eyas import native
from eyas.machine import machine, versions
from eyas.measure import tau, timed
from eyas.prompts import read_workload


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--tree", default="dynamic:levels=5,top_k=6,nodes=11")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--limit", type=int, default=480)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--no-plain", action="store_true", help="only with the head: to compare digests with another run"
    )
    arguments = parser.parse_args()

    model = eyas.load(arguments.target, arguments.head, backend="native", dtype=arguments.dtype, tree=arguments.tree)
    plain = replace(model, drafter=None)
    items = read_workload(arguments.workload, arguments.limit)
    stop = model.stopping(arguments.max_new_tokens)
    digest, different, answers = hashlib.sha256(), [], []
    for i, item in enumerate(tqdm(items, unit="prompt")):
        ids = model.encode(item.text)
        sampling = model.sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=0, sample=i)
        seen = []
        for threads in arguments.threads:
            native.core().set_num_threads(threads)
            if not seen and not arguments.no_plain:
                seen.append(timed(plain.rounds(ids, sampling, stop)))
            seen.append(timed(model.rounds(ids, sampling, stop)))
        if any(answer.tokens != seen[0].tokens for answer in seen):
            different.append(item.id)
        digest.update(json.dumps(seen[0].tokens).encode())
        answers.append(seen[-1])
    tokens = sum(len(answer.tokens) for answer in answers)
    print(f"{len(items)} prompts, {tokens} tokens, {len(arguments.threads)} thread settings: {len(different)} differ")
    settings = {key: getattr(arguments, key) for key in ("target", "head", "tree", "dtype", "threads", "temperature")}
    record = {"machine": machine(), "versions": versions(), **settings, "kernels": native.core().kernels()}
    record |= {"workload": arguments.workload.stem, "prompts": len(items), "tokens": tokens, "tau": tau(answers)}
    print(json.dumps(record | {"different": different, "digest": digest.hexdigest()[:16]}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
