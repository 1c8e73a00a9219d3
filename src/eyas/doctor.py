"""What a head or a target is, whether they fit, and what rounding costs a target. First form."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eyas import data
from eyas.checkpoint import LOOKUP, SMALL, head_folder, load_small_target, target_fingerprint
from eyas.drafters.lookup import LONGEST, Lookup
from eyas.drafters.small_model import SmallModel
from eyas.formats import layer_count, read_head, switches
from eyas.measure import perplexity
from eyas.model import Model, attach_head, load
from eyas.prompts import read_workload
from eyas.targets.eager import EagerTarget


def describe_target(target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """A target's figures, by name."""
    spec = target.spec
    return {
        "name": spec.name,
        "family": spec.family,
        "layers": spec.num_layers,
        "width": spec.width,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "vocabulary": spec.vocab_size,
        "context": spec.max_length,
        "end_tokens": list(spec.eos_ids),
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "fingerprint": target_fingerprint(target, tokenizer),
    }


def describe_head(name: str) -> dict[str, object]:
    """A head's figures from its files alone, by name."""
    if name == LOOKUP:
        return {"name": name, "kind": Lookup.kind, "longest_match": LONGEST, "parameters": 0}
    if name.startswith(SMALL):
        target, tokenizer = load_small_target(name, "eager", torch.float32)
        assert isinstance(target, EagerTarget), type(target)
        return describe_target(target, tokenizer) | {"name": name, "kind": SmallModel.kind}
    file = read_head(head_folder(name))
    layered = file.kind == "eagle3"
    rows = file.tensors.get("lm_head.weight", torch.empty(())).shape
    trained = [t for key, t in file.tensors.items() if key not in ("d2t", "t2d", "embed_tokens.weight")]
    return {
        "name": name,
        "kind": file.kind,
        "layers": layer_count(file.tensors) if layered else 1,
        "switches": [switch for switch, on in switches(file.config).items() if on] if layered else [],
        "width": file.config.get("hidden_size"),
        "reads": file.config.get("eyas_reads"),
        "draft_vocabulary": rows[0] if rows else None,
        "vocabulary": file.config.get("vocab_size"),
        "parameters": sum(t.numel() for t in trained),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in trained}),
        "made_for": file.config.get("eyas_target"),
    }


def fit(name: str, target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Does the head fit the target? Raises InputError where it cannot be loaded; else lists what differs."""
    attach_head(name, target, tokenizer)
    if name == LOOKUP or name.startswith(SMALL):
        return {"fits": True, "findings": []}
    made_for = describe_head(name)["made_for"]
    found = target_fingerprint(target, tokenizer)
    if not isinstance(made_for, dict):
        return {"fits": True, "findings": ["the head does not record what it was made for: sizes fit, weights unknown"]}
    findings = [
        f"{key}: the head was made for {made_for.get(key)}, the target has {value}"
        for key, value in found.items()
        if made_for.get(key) != value
    ]
    return {"fits": not any(f.startswith(("weights", "tokenizer")) for f in findings), "findings": findings}


def quality(name: str, answers: Sequence[data.Sequence] | None, limit: int) -> dict[str, object]:
    """What int8 costs: perplexity of answers on the native back end, against bfloat16.

    Without `answers`, the target's own in bfloat16, sampled at temperature 1 on the prompts that eyas ships.

    Raises:
        InputError: the native back end is absent, or does not run the target.
    """
    exact = load(name, backend="native", dtype="bfloat16")
    source = "the answers given"
    if answers is None:
        answers, source = _own_answers(exact), "the target's own, in bfloat16 at temperature 1, on shipped prompts"
    answers = answers[:limit]
    found = {"bfloat16": perplexity(exact.target, answers)}
    found["int8"] = perplexity(load(name, backend="native", dtype="int8").target, answers)
    tokens = sum(len(answer.tokens) - answer.answer_start for answer in answers)
    difference = 100 * (found["int8"] / found["bfloat16"] - 1)
    return {"perplexity": found, "int8_costs_percent": difference, "answers": source, "tokens": tokens}


def _own_answers(model: Model) -> list[data.Sequence]:
    prompts = [item.text for item in read_workload(Path(str(files("eyas") / "demo.jsonl")), None)]
    answers = []
    for i, prompt in enumerate(tqdm([text for text in prompts for _ in range(4)], desc="answers", unit="answer")):
        ids = model.encode(prompt)
        output = model.generate(ids, max_new_tokens=128, temperature=1.0, sample=i)
        answers.append(data.Sequence((*ids, *output.token_ids), len(ids)))
    return answers
