"""Is drafted decoding what transformers itself would have written? Greedy, prompt by prompt, token by token.

    python benchmarks/exact.py --target smollm2 --head smollm2-eagle3 --limit 20 --max-new-tokens 96 WORKLOAD.jsonl ...

Compares `eyas` with a head against `model.generate(do_sample=False)` of transformers. A difference is explained where
both logits at that place lie within the dtype's rounding of each other and the decision was closer than twice that.
Ends with one JSON line; exit code 1 where a difference is not explained.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import eyas
from eyas.bench import machine, read_workload, versions
from eyas.checkpoint import target_folder
from eyas.measure import Divergence, judge, rounding, timed
from eyas.sampling import Prefix


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()

    model = eyas.load(arguments.target, arguments.head, backend="eager", dtype=arguments.dtype, tree=arguments.tree)
    reference = AutoModelForCausalLM.from_pretrained(target_folder(arguments.target), dtype=model.target.spec.dtype)
    rows, failed = [], 0
    for path in arguments.workloads:
        items = read_workload(path, arguments.limit)
        differences = []
        for item in tqdm(items, desc=path.stem, unit="prompt"):
            found = compare(model, reference, item.text, arguments.max_new_tokens)
            if found is not None:
                differences.append({"id": item.id, **asdict(found)})
                failed += not found.explained
        rows.append({"workload": path.stem, "prompts": len(items), "equal": len(items) - len(differences)})
        rows[-1]["differences"] = differences
        print(f"{path.stem:20} {rows[-1]['equal']}/{len(items)} equal to transformers; differences: {differences}")
    settings = {key: getattr(arguments, key) for key in ("target", "head", "dtype", "max_new_tokens")}
    settings["tree"] = str(model.policy)
    print(json.dumps({"machine": machine(), "versions": versions(), **settings, "rows": rows, "unexplained": failed}))
    return 1 if failed else 0


@torch.inference_mode()
def compare(model: eyas.Model, reference: torch.nn.Module, text: str, max_new_tokens: int) -> Divergence | None:
    """One prompt by both; the first difference, judged."""
    ids = model.encode(text)
    answer = timed(model.rounds(ids, eyas.Sampling(), model.stopping(max_new_tokens), with_logits=True))
    output = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = output.sequences[0, len(ids) :].tolist()
    ours = answer.tokens
    if ours == expected:
        return None
    position = next(i for i in range(len(ours) + 1) if ours[i : i + 1] != expected[i : i + 1])
    if position >= min(len(ours), len(expected)):
        return Divergence(position, None, None, None, None, explained=False)
    theirs_V = output.logits[position][0].to(model.target.spec.dtype)  # generate hands out float32
    ours_V = answer.logits(position)
    tokens = (expected[position], ours[position])
    prefix = Prefix([*ids, *ours[:position]], len(ids))
    return judge(theirs_V, ours_V, tokens, eyas.Sampling(), prefix, rounding(model.target.spec))


if __name__ == "__main__":
    sys.exit(main())
