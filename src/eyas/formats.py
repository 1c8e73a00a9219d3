"""The layouts that heads live in, both ways. First form: the official EAGLE layout, which is also eyas' own.

A head is a folder with `config.json` and `model.safetensors` (or `pytorch_model.bin`, of which only tensors are read).
The kind is detected from the tensors, and their shapes beat the config's fields: released configs carry wrong ones
(`num_hidden_layers` 40, `torch_dtype` float16 over float32 weights). Missing and unknown tensors are refused by name.
An EAGLE-3 head of several layers has no official layout: eyas writes vLLM's (`layers.0.*`, then plain `layers.N.*`)
and reads its relatives. Legend: D width, Q draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.drafters.eagle import Eagle, EagleConfig
from eyas.drafters.eagle3 import SWITCHES, Eagle3, Eagle3Config
from eyas.drafters.layers import BlockConfig
from eyas.errors import InputError, one_line

# Our module names and those of the official files, by prefix. Longest first where one contains another.
_EAGLE_NAMES = {"fc.": "fc.", "block.": "layers.0."}
_SAME_NAMES = ("fc_norm.", "input_norm.", "fc.", "norm.", "lm_head.")
_LAYER_NAME = re.compile(r"(?:(?:midlayer|layers)\.([0-9]{1,3})|midlayer)\.(.+)")
_LEGACY_NAMES = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}

# Where a switch of an EAGLE-3 head stands in configs of the wild, besides its own key at the top.
_SWITCH_ALIASES = {
    "fc_norm": ("use_aux_norm",),
    "norm_output": ("eagle_config.return_hidden_post_norm",),
    "norm_before_residual": (),
    "norm_before_fc": ("eagle_config.norm_before_fc",),
}


def _eagle3_names(layers: int) -> dict[str, str]:
    first = "midlayer." if layers == 1 else "layers.0."
    names = {"embedding_norm.": f"{first}input_layernorm.", "hidden_norm.": f"{first}hidden_norm.", "block.": first}
    for n in range(1, layers):
        names |= {f"later.{n - 1}.norm.": f"layers.{n}.input_layernorm.", f"later.{n - 1}.block.": f"layers.{n}."}
    return {**names, "embedding.": "embed_tokens.", **{name: name for name in _SAME_NAMES}}


@dataclass(frozen=True)
class HeadFile:
    """A head as it lies on disk."""

    kind: str  # "eagle" or "eagle3"
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]


def read_head(folder: Path) -> HeadFile:
    """The config and the tensors of a head's folder.

    Raises:
        InputError: a file is missing, broken or unsafe to read, or the tensors are those of no head that eyas knows.
    """
    try:
        text = (folder / "config.json").read_text()
        config = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if (folder / "model.safetensors").is_file():
            tensors = load_file(folder / "model.safetensors")
        else:
            tensors = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"the head in {str(folder)!r} is a pickle of more than tensors, which is not read") from error
    except (OSError, ValueError, SafetensorError, RuntimeError, EOFError, RecursionError) as error:
        raise InputError(f"cannot read the head in {str(folder)!r}: {one_line(error)}") from error
    tables = isinstance(config, dict) and isinstance(tensors, dict)
    if not tables or not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()):
        raise InputError(f"cannot read the head in {str(folder)!r}: expected a JSON object and a table of tensors")
    kind = _kind(folder, tensors)
    return HeadFile(kind, config, _eagle3_tensors(tensors) if kind == "eagle3" else tensors)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"config.json holds {text}, which is no number")
    return value


def _kind(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    if "midlayer.self_attn.q_proj.weight" in tensors or "midlayer.0.self_attn.q_proj.weight" in tensors:
        return "eagle3"
    if "layers.0.self_attn.q_proj.weight" in tensors and ("layers.0.hidden_norm.weight" in tensors or "d2t" in tensors):
        return "eagle3"
    if "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors and "lm_head.weight" not in tensors:
        return "eagle"
    raise InputError(f"the tensors in {str(folder)!r} are those of no EAGLE head: neither midlayer.* (EAGLE-3) nor "
                     f"fc and layers.0.* (EAGLE-1) were found")  # fmt: skip


def _eagle3_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head under the names that eyas writes, whatever layout they came in.

    Layers are `midlayer.*`, `layers.N.*` (vLLM, speculators) or `midlayer.N.*` (TensorRT-LLM); the norm before a later
    layer's attention is its `input_layernorm` or, in TensorRT-LLM, its `hidden_norm`.
    """
    layers = {name: _LAYER_NAME.fullmatch(name) for name in tensors}
    single = not any(match and int(match[1] or 0) for match in layers.values())
    found: dict[str, Tensor] = {}
    for name, match in layers.items():
        ours = _LEGACY_NAMES.get(name, name)
        if match:
            number, rest = int(match[1] or 0), match[2]
            if number and rest == "hidden_norm.weight":
                rest = "input_layernorm.weight"
            ours = f"midlayer.{rest}" if single else f"layers.{number}.{rest}"
        if ours in found:
            raise InputError(f"the head holds {ours} twice, under two names")
        found[ours] = tensors[name]
    return found


def layer_count(tensors: Iterable[str]) -> int:
    """Decoder layers of an EAGLE-3 head, by its tensors' names (those that eyas writes)."""
    matches = (_LAYER_NAME.fullmatch(name) for name in tensors)
    return 1 + max((int(match[1] or 0) for match in matches if match), default=0)


def switches(config: Mapping[str, object]) -> dict[str, bool]:
    """Which norms of an EAGLE-3 head its config moves; those that it does not name are off.

    Raises:
        InputError: a switch is neither true nor false, or is both.
    """
    nested = config.get("eagle_config")
    flat = {**{f"eagle_config.{k}": v for k, v in (nested if isinstance(nested, dict) else {}).items()}, **config}
    found = {}
    for switch in SWITCHES:
        given = {key: flat[key] for key in (switch, *_SWITCH_ALIASES[switch]) if flat.get(key) is not None}
        if not all(isinstance(value, bool) for value in given.values()) or len(set(given.values())) > 1:
            raise InputError(f"the head's {switch} must be true or false, got {given}")
        found[switch] = True in given.values()
    return found


def build_head(file: HeadFile, embedding_VD: Tensor, head_VD: Tensor, default_reads: tuple[int, ...]) -> Eagle | Eagle3:
    """The drafter of a head's file, float32, over the target's embedding and output head.

    Raises:
        InputError: tensors are missing, unknown, misshapen or not finite, or do not fit the target's sizes.
    """
    reads = file.config.get("eyas_reads", list(default_reads))
    if not isinstance(reads, list) or not reads or not all(type(read) is int for read in reads):
        raise InputError(f"the head's eyas_reads must be a list of state numbers, got {reads!r}")
    try:
        if file.kind == "eagle":
            return _build_eagle(file, embedding_VD, head_VD, tuple(reads[-1:]))
        return _build_eagle3(file, embedding_VD, head_VD, tuple(reads))
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
    width, fc_width = _matrix(tensors, "fc.weight")
    if fc_width % len(reads):
        raise InputError(f"the head fuses {fc_width} numbers, which are not {len(reads)} states of one width")
    draft_size = _matrix(tensors, "lm_head.weight")[0]
    own_embedding = "embed_tokens.weight" in tensors
    vocab_size = _matrix(tensors, "embed_tokens.weight")[0] if own_embedding else len(embedding_VD)
    if vocab_size != len(embedding_VD):
        raise InputError(f"the head embeds {vocab_size} tokens, and the target has {len(embedding_VD)}")
    config = Eagle3Config(
        block=_block_config(file.config, tensors, _eagle3_names(layers)["block."], width),
        reads=reads,
        target_width=fc_width // len(reads),
        vocab_size=vocab_size,
        draft_vocab_size=draft_size,
        own_embedding=own_embedding,
        layers=layers,
        **switches(file.config),
    )
    if not own_embedding:
        _check_width("EAGLE-3", width, embedding_VD.shape[1])
    head = Eagle3(config, embedding_VD, head_VD, _draft_vocabulary(offsets, draft_size, vocab_size))
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
    ids_Q = torch.arange(draft_size) + offsets.long()
    if int(ids_Q.min()) < 0 or int(ids_Q.max()) >= vocab_size or len(ids_Q.unique()) != draft_size:
        raise InputError(f"d2t names tokens outside 0 to {vocab_size - 1}, or one token twice")
    return ids_Q


def _block_config(config: Mapping[str, object], tensors: Mapping[str, Tensor], prefix: str, width: int) -> BlockConfig:
    q_rows, attention_width = _matrix(tensors, f"{prefix}self_attn.q_proj.weight")
    k_rows = _matrix(tensors, f"{prefix}self_attn.k_proj.weight")[0]
    heads = int(_number(config, "num_attention_heads"))
    head_dim = q_rows // heads
    if q_rows != heads * head_dim or k_rows % max(head_dim, 1) or head_dim % 2 or head_dim == 0:
        raise InputError(f"q_proj has {q_rows} rows and k_proj {k_rows}, which do not divide into {heads} heads of one "
                         f"even size")  # fmt: skip
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    if rope.get("rope_type", rope.get("type", "default")) != "default" or config.get("hidden_act", "silu") != "silu":
        raise InputError("the head asks for scaled rotary embeddings or another activation than silu, which no EAGLE "
                         "head that eyas knows has")  # fmt: skip
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


def _load(head: Eagle | Eagle3, tensors: Mapping[str, Tensor]) -> None:
    names = _head_names(head)
    wanted = {official_name(key, names): tensor for key, tensor in head.state_dict().items()}
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise InputError(f"the head's tensors do not match: missing {missing or 'none'}, unknown {unknown or 'none'}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}, expected {list(wanted[name].shape)}")
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} holds values that are not finite")
    head.load_state_dict({key: tensors[official_name(key, names)].float() for key in head.state_dict()})


def _head_names(head: Eagle | Eagle3) -> Mapping[str, str]:
    """Our prefixes of a head's parameters, and those of its files."""
    return _EAGLE_NAMES if isinstance(head, Eagle) else _eagle3_names(head.config.layers)


def official_name(key: str, names: Mapping[str, str]) -> str:
    """Our parameter name in the official layout."""
    prefix = next(prefix for prefix in names if key.startswith(prefix))
    return names[prefix] + key.removeprefix(prefix)


def write_head(head: Eagle | Eagle3, folder: Path, extra: Mapping[str, object], dtype: torch.dtype) -> None:
    """A head in the official layout, with what eyas records besides (`extra`) in its config; files land whole."""
    folder.mkdir(parents=True, exist_ok=True)
    names = _head_names(head)
    tensors = {
        official_name(key, names): tensor.detach().to(dtype).contiguous().cpu()
        for key, tensor in head.state_dict().items()
    }
    block = head.config.block
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eyas_kind": head.kind,
        "eyas_reads": list(head.reads),
        "eyas_reads_meaning": "indices of hidden_states in transformers: i enters layer i, the last is normed",
        "hidden_size": block.width,
        "intermediate_size": block.ffn_width,
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "num_hidden_layers": 1 if isinstance(head, Eagle) else head.config.layers,
        "hidden_act": "silu",
        "rms_norm_eps": block.norm_eps,
        "rope_theta": block.rope_theta,
        "vocab_size": head.config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **extra,
    }
    if block.window:
        config["eyas_window"] = block.window
    if isinstance(head, Eagle):
        config |= {"bias": head.config.fc_bias, "qkv_bias": block.qkv_bias}
    else:
        config |= {"draft_vocab_size": head.config.draft_vocab_size, "target_hidden_size": head.config.target_width}
        config |= {switch: value for switch, value in asdict(head.config).items() if switch in SWITCHES}
        ids_Q = head.draft_vocabulary_Q
        if ids_Q is not None:
            tensors["d2t"] = ids_Q - torch.arange(len(ids_Q))
            tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids_Q, True)
    temporary = folder / "model.safetensors.tmp"
    save_file(tensors, temporary)
    temporary.rename(folder / "model.safetensors")
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(config, indent=2) + "\n")
    temporary.rename(folder / "config.json")
