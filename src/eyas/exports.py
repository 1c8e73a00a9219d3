"""A head in the layout of another runtime: what `dialects` says that it reads, and nothing that it would misread.

What a runtime cannot serve is refused with the reason: none of them says so itself. Every folder also carries what eyas
knows beside (`eyas_reads`, `eyas_target`), which runtimes pass over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from eyas.dialects import DIALECTS, Dialect
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import SWITCHES, Eagle3
from eyas.errors import InputError
from eyas.formats import head_tensors, write_files
from eyas.layouts import layer_count
from eyas.targets.base import TargetSpec
from eyas.targets.families import default_reads

_OMIT = object()  # a key that is not written


def export(
    head: Eagle | Eagle3, runtime: str, spec: TargetSpec, folder: Path, dtype: torch.dtype, extra: Mapping[str, object]
) -> tuple[str, ...]:
    """Write `head` for `runtime` (a key of DIALECTS, but not "gguf" or "openvino") and the target of `spec`; warnings.

    `extra` goes into the config as it is, but for `architectures`, which are the target's.

    Raises:
        InputError: the runtime cannot serve this head for this target.
    """
    check(head, runtime, spec)
    dialect = DIALECTS[runtime]
    known = values(head, dialect, spec, dtype)
    known["target_architectures"] = extra.get("architectures", _OMIT)
    config: dict[str, object] = {}
    for path, name in dialect.keys[head.kind].items():
        if known[name] is not _OMIT:
            _put(config, path.split("."), known[name])
    config |= {"eyas_reads": list(head.reads), **{key: extra[key] for key in extra if key != "architectures"}}
    if head.config.block.window:
        config["eyas_window"] = head.config.block.window
    write_files(folder, config, tensors_for(head, dialect, config, dtype))
    return warnings(head, runtime)


def check(head: Eagle | Eagle3, runtime: str, spec: TargetSpec) -> None:
    """Refuse, with the reasons, what `runtime` cannot serve."""
    dialect = DIALECTS[runtime]
    reasons = [f"it serves {' and '.join(sorted(dialect.architectures))} heads only"]
    if head.kind in dialect.architectures:
        reasons = _eagle_reasons(head, dialect) if isinstance(head, Eagle) else _eagle3_reasons(head, dialect, spec)
    if reasons:
        raise InputError(f"{dialect.title} cannot serve this {head.kind} head: {'; '.join(reasons)}")


def _eagle_reasons(head: Eagle, dialect: Dialect) -> list[str]:
    found = _block_reasons(head, dialect, "eagle qkv")
    bias = head.fc.bias
    if "eagle fc" not in dialect.biases and bias is not None and bool(bias.any()):
        found.append("its fc has a bias, which the runtime has no place for")
    return found


def _eagle3_reasons(head: Eagle3, dialect: Dialect, spec: TargetSpec) -> list[str]:
    c = head.config
    found = _block_reasons(head, dialect, "qkv")
    on = [switch for switch in SWITCHES if asdict(c)[switch] and switch not in dialect.switches]
    least, most = dialect.states
    if on:
        found.append(f"it does not know {', '.join(on)}")
    if c.fc_bias and "fc" not in dialect.biases:
        found.append("its fc has a bias, which the runtime has no place for")
    if c.layers > dialect.most_layers:
        found.append(f"the head has {c.layers} decoder layers, the runtime's have {dialect.most_layers}")
    if not least <= len(c.reads) <= most:
        found.append(f"the head reads {len(c.reads)} states, the runtime gives {least} to {most}")
    if dialect.skips_fc and len(c.reads) * c.target_width == c.block.width:
        found.append("the states together are as wide as the head, and the runtime then leaves fc out")
    if list(c.reads) != sorted(set(c.reads)):
        found.append(f"it gives states in ascending order, and the head reads {list(c.reads)}")
    if min(c.reads) == 0 and not dialect.embedding_state:
        found.append("the head reads state 0, the embedding, and the runtime hands out what leaves a layer")
    if max(c.reads) >= spec.num_layers:
        found.append("the head reads the target's last, normed state, which the runtime does not hand out")
    if dialect.usual_states_only and c.reads != default_reads(spec.num_layers):
        found.append(f"it reads the states {list(default_reads(spec.num_layers))}, the head {list(c.reads)}")
    if spec.family not in dialect.families:
        found.append(f"it does not hand out the inner states of {spec.family} targets")
    if c.own_embedding and c.target_width == c.block.width and not dialect.narrow_rows:
        found.append("the head has an embedding of its own, which the runtime replaces with the target's")
    if head.draft_vocabulary_Q is not None and c.draft_vocab_size == c.vocab_size and not dialect.permuted_vocabulary:
        found.append("the draft vocabulary is the target's in another order, which the runtime passes over")
    return found


def _block_reasons(head: Eagle | Eagle3, dialect: Dialect, bias: str) -> list[str]:
    block, found = head.config.block, []
    if block.qkv_bias and bias not in dialect.biases:
        found.append("its attention has biases, which the runtime has no place for")
    if not dialect.split_head_dim and block.head_dim * block.heads != block.width:
        found.append(f"it takes a head's size as {block.width} / {block.heads}, and it is {block.head_dim}")
    return found


def values(head: Eagle | Eagle3, dialect: Dialect, spec: TargetSpec, dtype: torch.dtype) -> dict[str, object]:
    """The values of a config, by the names that `dialects` gives them."""
    block, reads = head.config.block, list(head.reads)
    found: dict[str, object] = {
        "architectures": [dialect.architectures[head.kind]], "model_type": "llama", "width": block.width,
        "ffn_width": block.ffn_width, "heads": block.heads, "kv_heads": block.kv_heads, "head_dim": block.head_dim,
        "layers": 1, "act": "silu", "eps": block.norm_eps, "rope_theta": block.rope_theta, "none": None,
        "context": spec.max_length, "vocabulary": head.config.vocab_size, "no": False, "yes": True,
        "dtype": str(dtype).removeprefix("torch."), "fc_bias": head.config.fc_bias, "qkv_bias": block.qkv_bias,
        "default": "default", "target": spec.name,
    }  # fmt: skip
    if isinstance(head, Eagle):
        return found
    c = head.config
    usual = spec.num_layers >= 3 and c.reads == default_reads(spec.num_layers)
    leaving = [read - 1 for read in reads]
    return found | {
        "layers": c.layers, "draft_vocabulary": c.draft_vocab_size, "states": len(reads),
        "target_width": c.target_width,
        "other_target_width": c.target_width if c.target_width != block.width else _OMIT,
        "entering": reads, "leaving": leaving,
        "usual_entering": reads if usual else _OMIT, "usual_leaving": leaving if usual else _OMIT,
        "eagle3": "eagle3", "version": "0.9.0", "greedy": "greedy",
        "proposals": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                       "accept_tolerance": 0.0}],
        **{switch: value for switch, value in asdict(c).items() if switch in SWITCHES},
    }  # fmt: skip


def _put(config: dict[str, object], path: list[str], value: object) -> None:
    for key in path[:-1]:
        inner = config.setdefault(key, {})
        assert isinstance(inner, dict), path
        config = inner
    config[path[-1]] = value


def tensors_for(
    head: Eagle | Eagle3, dialect: Dialect, config: Mapping[str, object], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The weights by the runtime's names, with the zeros that it wants in the file."""
    ours = head_tensors(head, dtype)
    single, several = dialect.prefixes
    layers = layer_count(ours)
    found = {}
    for name, tensor in ours.items():
        if isinstance(head, Eagle3) and layers == 1:
            name = name.replace("midlayer.", single)
        elif isinstance(head, Eagle3) and name.startswith("layers."):
            number, rest = name.removeprefix("layers.").split(".", 1)
            if number != "0":
                rest = rest.replace("input_layernorm", dialect.later_norm)
            name = f"{several}{number}.{rest}"
        found[name] = tensor
    width = head.config.block.width
    if isinstance(head, Eagle) and dialect.zero_fc_bias and "fc.bias" not in found:
        found["fc.bias"] = torch.zeros(width, dtype=dtype)
    layer = config.get("transformer_layer_config", config)
    assert isinstance(layer, Mapping)
    if dialect.zero_output_bias and (layer.get("attention_bias") or layer.get("bias")):
        outputs = [name for name in found if name.endswith("o_proj.weight")]
        found |= {name.removesuffix("weight") + "bias": torch.zeros(width, dtype=dtype) for name in outputs}
    if isinstance(head, Eagle) and "eagle fc" not in dialect.biases:
        found.pop("fc.bias", None)  # all zero, else `check` had refused
    return found


def serve_command(head: Eagle | Eagle3, runtime: str, spec: TargetSpec, place: str) -> str:
    """How the runtime is started with the head at `place`."""
    window = head.config.block.window
    return DIALECTS[runtime].serve.format(
        target=spec.name,
        head=place,
        method={"eagle": "EAGLE", "eagle3": "EAGLE3"}[head.kind],
        vllm=head.kind,
        eagle3=head.kind == "eagle3",
        ids=[read - 1 for read in head.reads],
        window=f" --speculative-draft-window-size {window}" if window else "",
    )


def warnings(head: Eagle | Eagle3, runtime: str) -> tuple[str, ...]:
    """What the runtime does in another way than eyas, though it serves the head."""
    window = head.config.block.window
    if not window or runtime == "sglang":
        return ()
    return (f"the head was trained on texts of {window} tokens, and eyas drafts over as many; this looks back over "
            f"all of a text",)  # fmt: skip
