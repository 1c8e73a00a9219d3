"""Heads as files: any layout that `layouts` knows is read, eyas' own is written.

A head is a folder with `config.json` and `model.safetensors` (or `pytorch_model.bin`, of which only tensors are read).
The kind is detected from the tensors, and their shapes beat the config's fields: released configs carry wrong ones
(`num_hidden_layers` 40, `torch_dtype` float16 over float32 weights). Missing and unknown tensors are refused by name.
eyas' own layout has the official names; an EAGLE-3 head of several layers, which has no official layout, vLLM's
(`layers.0.*`, then plain `layers.N.*`). Legend: D width, Q draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.drafters.eagle import Eagle, EagleConfig
from eyas.drafters.eagle3 import SWITCHES, Eagle3, Eagle3Config
from eyas.drafters.layers import BlockConfig
from eyas.drafters.medusa import Medusa, MedusaConfig
from eyas.errors import InputError, one_line
from eyas.files import save_tensors, write_text
from eyas.initial import Head
from eyas.layouts import HeadFile, layer_count, states_read, switches, understand

# Our module names and those of the files, by prefix. Longest first where one contains another.
_EAGLE_NAMES = {"fc.": "fc.", "block.": "layers.0."}
_HEADER = 100_000  # bytes that a safetensors file of a head's tensors has before them, at most
_SAME_NAMES = ("fc_norm.", "input_norm.", "fc.", "norm.", "lm_head.")


def _eagle3_names(layers: int) -> dict[str, str]:
    first = "midlayer." if layers == 1 else "layers.0."
    names = {"embedding_norm.": f"{first}input_layernorm.", "hidden_norm.": f"{first}hidden_norm.", "block.": first}
    for n in range(1, layers):
        names |= {f"later.{n - 1}.norm.": f"layers.{n}.input_layernorm.", f"later.{n - 1}.block.": f"layers.{n}."}
    return {**names, "embedding.": "embed_tokens.", **{name: name for name in _SAME_NAMES}}


def read_head(folder: Path) -> HeadFile:
    """The config and the tensors of a head's folder, in eyas' terms.

    Raises:
        InputError: a file is missing, broken or unsafe to read, or the tensors are those of no head that eyas knows.
    """
    return understand(str(folder), *read_files(folder))


def read_files(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The config and the tensors of a head's folder, as they lie there.

    Raises:
        InputError: a file is missing, broken or unsafe to read.
    """
    try:
        text = (folder / "config.json").read_text()
        config = json.loads(text, parse_constant=_finite, parse_float=_finite)
        tensors = _read_tensors(folder)
    except pickle.UnpicklingError as error:
        raise InputError(f"the head in {str(folder)!r} is a pickle of more than tensors, which is not read") from error
    except (OSError, ValueError, SafetensorError, RuntimeError, EOFError, RecursionError) as error:
        raise InputError(f"cannot read the head in {str(folder)!r}: {one_line(error)}") from error
    tables = isinstance(config, dict) and isinstance(tensors, dict)
    if not tables or not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()):
        raise InputError(f"cannot read the head in {str(folder)!r}: expected a JSON object and a table of tensors")
    return config, tensors


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    parts = sorted(folder.glob("model-*-of-*.safetensors"))
    if (folder / "model.safetensors").is_file() or parts:
        names = parts or [folder / "model.safetensors"]
        return {name: tensor for part in names for name, tensor in load_file(part).items()}
    return torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"config.json holds {text}, which is no number")
    return value


def build_head(file: HeadFile, embedding_VD: Tensor, head_VD: Tensor, default_reads: tuple[int, ...]) -> Head:
    """The drafter of a head's file, float32, over the target's embedding and output head.

    Raises:
        InputError: tensors are missing, unknown, misshapen or not finite, or do not fit the target's sizes.
    """
    reads, _ = states_read(file.config, default_reads)
    try:
        if file.kind == "medusa":
            return _build_medusa(file, head_VD, reads[-1:])
        if file.kind == "eagle":
            return _build_eagle(file, embedding_VD, head_VD, reads[-1:])
        return _build_eagle3(file, embedding_VD, head_VD, reads)
    except KeyError as error:
        raise InputError(f"the head lacks {error.args[0]!r}") from error


def _build_eagle(file: HeadFile, embedding_VD: Tensor, head_VD: Tensor, reads: tuple[int, ...]) -> Eagle:
    tensors = dict(file.tensors)
    own_rows = tensors.pop("embed_tokens.weight", embedding_VD)  # released files carry a copy of the target's rows
    if own_rows.shape != embedding_VD.shape or not bool(own_rows.isfinite().all()):
        raise InputError(f"the head's embed_tokens.weight is {list(own_rows.shape)}, the target's embedding "
                         f"{list(embedding_VD.shape)}; or it is not finite")  # fmt: skip
    width, fc_width = _matrix(tensors, "fc.weight")
    if fc_width != 2 * width:
        raise InputError(f"an EAGLE-1 head's fc is [D, 2D], got [{width}, {fc_width}]")
    _check_width("EAGLE-1", width, head_VD.shape[1])
    config = EagleConfig(
        block=_block_config(file.config, tensors, "layers.0.", width),
        reads=reads,
        vocab_size=len(head_VD),
        fc_bias="fc.bias" in tensors,
    )
    head = Eagle(config, own_rows.to(head_VD.dtype), head_VD)
    _load(head, tensors)
    return head


def _build_eagle3(file: HeadFile, embedding_VD: Tensor, head_VD: Tensor, reads: tuple[int, ...]) -> Eagle3:
    tensors = dict(file.tensors)
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # a mask that trainers use; all of it follows from d2t
    layers = layer_count(tensors)
    if "eyas_kind" in file.config and file.config.get("num_hidden_layers") != layers:
        # other writers put the target's number there, so only eyas' own is believed
        raise InputError(f"the head's num_hidden_layers is {file.config.get('num_hidden_layers')}, and its tensors are "
                         f"those of {layers}")  # fmt: skip
    target_width = head_VD.shape[1]
    width, fc_width = _matrix(tensors, "fc.weight")
    if "embed_tokens.weight" not in tensors:
        _check_width("EAGLE-3", width, embedding_VD.shape[1])
    if fc_width % len(reads) or (fc_width != len(reads) * target_width and fc_width % target_width == 0):
        states = f"{fc_width / target_width:g} states of the target's width {target_width}"
        raise InputError(f"the head fuses {fc_width} numbers, which are {states}, and reads the states {list(reads)}")
    if "lm_head.weight" not in tensors and offsets is None and width == target_width:
        tensors["lm_head.weight"] = head_VD  # a head without rows of its own multiplies by the target's
    draft_size = _matrix(tensors, "lm_head.weight")[0]
    told = file.config.get("draft_vocab_size")
    if told not in (None, draft_size):
        raise InputError(f"the head's draft_vocab_size is {told!r}, and its output matrix has {draft_size} rows")
    rows_VD = tensors.get("embed_tokens.weight")
    if rows_VD is not None and torch.equal(rows_VD, embedding_VD.to(rows_VD.dtype)):
        rows_VD = None  # a copy of the target's
        del tensors["embed_tokens.weight"]
    vocab_size = len(embedding_VD) if rows_VD is None else _matrix(tensors, "embed_tokens.weight")[0]
    if vocab_size != len(embedding_VD):
        raise InputError(f"the head embeds {vocab_size} tokens, and the target has {len(embedding_VD)}")
    config = Eagle3Config(
        block=_block_config(file.config, tensors, _eagle3_names(layers)["block."], width),
        reads=reads,
        target_width=fc_width // len(reads),
        vocab_size=vocab_size,
        draft_vocab_size=draft_size,
        own_embedding=rows_VD is not None,
        fc_bias="fc.bias" in tensors,
        layers=layers,
    )
    config = replace(config, **switches(file.config))
    head = Eagle3(config, embedding_VD, head_VD, _draft_vocabulary(offsets, draft_size, vocab_size))
    _load(head, tensors)
    return head


def _build_medusa(file: HeadFile, head_VD: Tensor, reads: tuple[int, ...]) -> Medusa:
    tensors = dict(file.tensors)
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    width, own = _matrix(tensors, "heads.0.0.linear.weight")
    if width != own:
        raise InputError(f"a block of a Medusa drafter is [D, D], got [{width}, {own}]")
    _check_width("Medusa", width, head_VD.shape[1])
    blocks = [name.split(".")[1:3] for name in tensors if name.startswith("heads.") and name.endswith(".linear.weight")]
    heads, layers = (1 + max(int(number) for number in numbers) for numbers in zip(*blocks, strict=True))
    config = MedusaConfig(width, len(head_VD), reads, heads, layers)
    size = len(head_VD) if offsets is None else len(offsets)
    head = Medusa(config, head_VD, _draft_vocabulary(offsets, size, len(head_VD)))
    _load(head, tensors)
    return head


def _draft_vocabulary(offsets: Tensor | None, draft_size: int, vocab_size: int) -> Tensor | None:
    """Target ids of the draft vocabulary: draft id + offset, the form in which `d2t` is stored."""
    if draft_size == vocab_size and (offsets is None or not offsets.any()):
        return None
    if offsets is None:
        raise InputError(f"the head drafts over {draft_size} of {vocab_size} tokens and has no d2t to say which")
    if offsets.shape != (draft_size,):
        raise InputError(f"d2t has shape {list(offsets.shape)}, and the head drafts over {draft_size} tokens")
    if offsets.is_floating_point() or not _are_tokens(ids_Q := torch.arange(draft_size) + offsets.long(), vocab_size):
        whole = not offsets.is_floating_point() and _are_tokens(offsets, vocab_size)
        hint = " (is it a list of tokens?)" if whole else ""
        raise InputError(f"d2t, which is a draft token's distance to its token, names tokens outside 0 to "
                         f"{vocab_size - 1}, or one token twice{hint}")  # fmt: skip
    return ids_Q


def _are_tokens(ids: Tensor, vocab_size: int) -> bool:
    return int(ids.min()) >= 0 and int(ids.max()) < vocab_size and len(ids.unique()) == len(ids)


def _block_config(config: Mapping[str, object], tensors: Mapping[str, Tensor], prefix: str, width: int) -> BlockConfig:
    q_rows, attention_width = _matrix(tensors, f"{prefix}self_attn.q_proj.weight")
    k_rows = _matrix(tensors, f"{prefix}self_attn.k_proj.weight")[0]
    heads = int(_number(config, "num_attention_heads"))
    head_dim = q_rows // heads
    if q_rows != heads * head_dim or k_rows % max(head_dim, 1) or head_dim % 2 or head_dim == 0:
        raise InputError(f"q_proj has {q_rows} rows and k_proj {k_rows}, which do not divide into {heads} heads of one "
                         f"even size")  # fmt: skip
    if config.get("head_dim", head_dim) not in (head_dim, None):
        raise InputError(f"the head's config says {heads} heads of {config['head_dim']!r} numbers, and q_proj has "
                         f"{q_rows} rows")  # fmt: skip
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    return BlockConfig(
        width=width,
        attention_width=attention_width,
        heads=heads,
        kv_heads=k_rows // head_dim,
        head_dim=head_dim,
        ffn_width=_matrix(tensors, f"{prefix}mlp.gate_proj.weight")[0],
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=_number({**rope, **config}, "rope_theta", 10000.0),  # released heads without it were trained so
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in tensors,
        window=int(_number(config, "eyas_window")) if "eyas_window" in config else 0,
    )


def _matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """The shape of a weight that must be a matrix."""
    shape = tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{name} must be a matrix, got shape {list(shape)}")
    return shape[0], shape[1]


def _number(config: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = config.get(key, default)  # an exact type makes the comparison and the conversion below sound
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise InputError(f"the head's config.json needs a positive number {key!r}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _check_width(kind: str, width: int, target_width: int) -> None:
    if width != target_width:
        raise InputError(f"this {kind} head is {width} wide and shares the embedding of its target, which is "
                         f"{target_width} wide: it was made for another target")  # fmt: skip


def _load(head: Head, tensors: Mapping[str, Tensor]) -> None:
    names = official_names(head)
    wanted = {names[key]: tensor for key, tensor in head.state_dict().items()}
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise InputError(f"the head's tensors do not match: missing {missing or 'none'}, unknown {unknown or 'none'}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}, expected {list(wanted[name].shape)}")
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} holds values that are not finite")
    head.load_state_dict({key: tensors[names[key]].float() for key in head.state_dict()})


def official_names(head: Head) -> dict[str, str]:
    """The names of a head's parameters in its module, and in the files that eyas writes."""
    if isinstance(head, Medusa):
        return {key: key for key in head.state_dict()}
    prefixes = _EAGLE_NAMES if isinstance(head, Eagle) else _eagle3_names(head.config.layers)
    names = {}
    for key in head.state_dict():
        prefix = next(prefix for prefix in prefixes if key.startswith(prefix))
        names[key] = prefixes[prefix] + key.removeprefix(prefix)
    return names


def head_tensors(head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """A head's weights by the names that eyas writes, and its draft vocabulary as `d2t` and `t2d`."""
    names = official_names(head)
    tensors = {names[key]: tensor.detach().to(dtype).contiguous().cpu() for key, tensor in head.state_dict().items()}
    ids_Q = None if isinstance(head, Eagle) else head.draft_vocabulary_Q
    if ids_Q is not None:
        ids_Q = ids_Q.cpu()
        tensors["d2t"] = ids_Q - torch.arange(len(ids_Q))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids_Q, True)
    return tensors


def write_head(
    head: Head, folder: Path, extra: Mapping[str, object], dtype: torch.dtype, shard_mb: int | None = None
) -> None:
    """A head in eyas' own layout, with what eyas records besides (`extra`) in its config; files land whole.

    `shard_mb`: weights go into several files of less than so many megabytes (10^6 bytes) each.
    """
    config: dict[str, object] = {
        "eyas_kind": head.kind,
        "eyas_reads": list(head.reads),
        "eyas_reads_meaning": "indices of hidden_states in transformers: i enters layer i, the last is normed",
        "vocab_size": head.config.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **(_medusa_config(head) if isinstance(head, Medusa) else _eagle_config(head)),
        **extra,
    }
    write_files(folder, config, head_tensors(head, dtype), shard_mb)


def _medusa_config(head: Medusa) -> dict[str, object]:
    return {"hidden_size": head.config.width, "medusa_num_heads": head.config.heads,
            "medusa_num_layers": head.config.layers}  # fmt: skip


def _eagle_config(head: Eagle | Eagle3) -> dict[str, object]:
    block = head.config.block
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": block.width,
        "intermediate_size": block.ffn_width,
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "num_hidden_layers": 1 if isinstance(head, Eagle) else head.config.layers,
        "hidden_act": "silu",
        "rms_norm_eps": block.norm_eps,
        "rope_theta": block.rope_theta,
        "tie_word_embeddings": False,
        "bias": head.config.fc_bias,
    }
    if block.window:
        config["eyas_window"] = block.window
    if isinstance(head, Eagle):
        return config | {"qkv_bias": block.qkv_bias}
    config |= {"draft_vocab_size": head.config.draft_vocab_size, "target_hidden_size": head.config.target_width}
    return config | {switch: value for switch, value in asdict(head.config).items() if switch in SWITCHES}


def write_files(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], shard_mb: int | None = None
) -> None:
    """The weights (`model.safetensors`, or numbered parts of it), then `config.json`, each whole or not at
    all. A tensor that is larger than a part is a part of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        size = sum(other.nbytes for other in parts[-1].values()) + tensor.nbytes
        if shard_mb is not None and parts[-1] and size > shard_mb * 1_000_000 - _HEADER:
            parts.append({})
        parts[-1][name] = tensor
    for number, part in enumerate(parts, start=1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_tensors(folder / name, part)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
