"""Is drafted decoding what transformers itself would have written? Greedy, prompt by prompt, token by token.

    python benchmarks/exact.py --target smollm2 --head smollm2-eagle3 --limit 20 --max-new-tokens 96 WORKLOAD.jsonl ...
    python benchmarks/exact.py --target MODEL.gguf --head none lookup --repetition-penalty 1.1 WORKLOAD.jsonl ...

Compares `eyas` with each head with `model.generate(do_sample=False)` of transformers. A difference is explained where
both logits at that place lie within the dtype's rounding of each other and the decision was closer than twice that.
Ends with one JSON line; exit code 1 where a difference is not explained.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import eyas
from eyas import native
from eyas.checkpoint import target_folder
from eyas.machine import machine, versions
from eyas.measure import Divergence, judge, rounding, timed
from eyas.model import attach_head
from eyas.prompts import read_workload
from eyas.sampling import Prefix


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", nargs="+", default=["smollm2-eagle3"], help="none is plain decoding")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    native.ask_threads(arguments.threads)
    plain = eyas.load(arguments.target, backend="eager", dtype=arguments.dtype, tree=arguments.tree)
    models = {head: replace(plain, drafter=attach_head(head, plain.target, plain.tokenizer)) for head in arguments.head}
    sampling = plain.sampling(repetition_penalty=arguments.repetition_penalty)
    reference = AutoModelForCausalLM.from_pretrained(target_folder(arguments.target), dtype=plain.target.spec.dtype)
    rows, failed = [], 0
    for path in arguments.workloads:
        items = read_workload(path, arguments.limit)
        differences: dict[str, list[dict[str, object]]] = {head: [] for head in models}
        for item in tqdm(items, desc=path.stem, unit="prompt"):
            ids = plain.encode(item.text)
            theirs = reference_answer(reference, ids, sampling, arguments.max_new_tokens)
            for head, model in models.items():
                found = compare(model, ids, theirs, sampling, arguments.max_new_tokens)
                if found is not None:
                    differences[head].append({"id": item.id, **asdict(found)})
                    failed += not found.explained
        for head, found in differences.items():
            row = {"workload": path.stem, "head": head, "prompts": len(items), "equal": len(items) - len(found)}
            rows.append({**row, "differences": found})
            print(f"{path.stem:20} {head:20} {row['equal']}/{len(items)} equal to transformers; differences: {found}")
    settings = {
        key: getattr(arguments, key) for key in ("target", "head", "dtype", "max_new_tokens", "repetition_penalty")
    }
    settings["tree"] = str(plain.policy)
    print(json.dumps({"machine": machine(), "versions": versions(), **settings, "rows": rows, "unexplained": failed}))
    return 1 if failed else 0


@torch.inference_mode()
def reference_answer(
    reference: torch.nn.Module, ids: list[int], sampling: eyas.Sampling, max_new_tokens: int
) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """What transformers writes after a prompt, and the logits of each token before penalties."""
    output = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=max_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(ids) :].tolist(), output.logits


def compare(
    model: eyas.Model,
    ids: list[int],
    theirs: tuple[list[int], tuple[torch.Tensor, ...]],
    sampling: eyas.Sampling,
    max_new_tokens: int,
) -> Divergence | None:
    """The first difference of our answer from theirs, judged."""
    answer = timed(model.rounds(ids, sampling, model.stopping(max_new_tokens), with_logits=True))
    ours, (expected, logits) = answer.tokens, theirs
    if ours == expected:
        return None
    position = next(i for i in range(len(ours) + 1) if ours[i : i + 1] != expected[i : i + 1])
    if position >= min(len(ours), len(expected)):
        return Divergence(position, None, None, None, None, explained=False)
    theirs_V = logits[position][0].to(model.target.spec.dtype)  # generate hands out float32
    prefix = Prefix([*ids, *ours[:position]], len(ids))
    tokens = (expected[position], ours[position])
    return judge(theirs_V, answer.logits(position), tokens, sampling, prefix, rounding(model.target.spec))


if __name__ == "__main__":
    sys.exit(main())
