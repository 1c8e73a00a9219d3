"""What a head or a target is, and whether they fit. First form: sizes, layers, fingerprints."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from eyas.checkpoint import head_folder, load_head, target_fingerprint
from eyas.formats import read_head
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
    file = read_head(head_folder(name))
    trained = [t for key, t in file.tensors.items() if key not in ("d2t", "t2d", "embed_tokens.weight")]
    return {
        "name": name,
        "kind": file.kind,
        "width": file.config.get("hidden_size"),
        "reads": file.config.get("eyas_reads"),
        "draft_vocabulary": len(file.tensors["lm_head.weight"]) if "lm_head.weight" in file.tensors else None,
        "vocabulary": file.config.get("vocab_size"),
        "parameters": sum(t.numel() for t in trained),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in trained}),
        "made_for": file.config.get("eyas_target"),
    }


def fit(name: str, target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Does the head fit the target? Raises InputError where it cannot be loaded; else lists what differs."""
    load_head(name, target)
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
