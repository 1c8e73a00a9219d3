"""What the layouts of other writers mean, in eyas' own terms: names of tensors, keys of configs, numbers of layers.

Knows no files and no modules: tables in, tables out. Names come out as the official code writes them (`midlayer.*` for
an EAGLE-3 head of one layer), as `layers.N.*` for several. Where a layout is ambiguous a note says what was taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from eyas.drafters.eagle3 import SWITCHES
from eyas.errors import InputError

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_NAME = re.compile(r"(?:(?:midlayer|layers)\.([0-9]{1,3})|midlayer)\.(.+)")
OTHER_NAMES = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}
OTHER_NAMES["draft_id_to_target_id"] = "d2t"

# Where a switch of an EAGLE-3 head stands in configs of the wild, besides its own key at the top.
_SWITCH_ALIASES = {
    "fc_norm": ("use_aux_norm",),
    "norm_output": ("eagle_config.return_hidden_post_norm",),
    "norm_before_residual": (),
    "norm_before_fc": ("eagle_config.norm_before_fc",),
}

# Keys that ask for mathematics that eyas' heads do not have, with the values that ask for nothing.
_PLAIN: Mapping[str, object] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1,
    "rope_parameters.partial_rotary_factor": 1,
    "logit_scale": 1,
    "use_sliding_window": False,
    "parallel_drafting": False,
    "eagle_config.use_aux_hidden_state": True,
    "eagle_config.next_layer_regular": True,
    "eagle_config.eh_proj_before_attn": False,
}


@dataclass(frozen=True)
class HeadFile:
    """A head as it lies on disk, its names and keys in eyas' terms."""

    kind: str  # "eagle", "eagle3" or "medusa"
    config: Mapping[str, object]  # nested configs of other writers flattened
    tensors: Mapping[str, Tensor]
    layout: str = "eyas"  # who writes such folders
    notes: tuple[str, ...] = ()  # sentences: what was taken, where the files leave a choice


def understand(where: str, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> HeadFile:
    """A head's own config and tensors, whoever wrote them. `where` is named in errors.

    Raises:
        InputError: the tensors are those of no head that eyas knows, one is there twice, or the config asks for what
            eyas' heads do not do.
    """
    flat, layout = _flatten(config)
    prefixed = any(name.startswith("model.") for name in tensors)
    named = _renamed(tensors)
    kind = _kind(where, named)
    if layout is None:
        middle = any(name.startswith("midlayer.") and name[len("midlayer.")].isdigit() for name in tensors)
        layout = (
            "TensorRT-LLM"
            if middle
            else "vLLM or SGLang"
            if prefixed or AUX_IDS in flat or "eagle_config" in flat
            else "official"
        )
    _refuse_unknown(flat)
    notes = list(_notes(kind, flat, named))
    return HeadFile(kind, flat, _without_zero_biases(flat, named, notes), layout, tuple(notes))


def _flatten(config: Mapping[str, object]) -> tuple[dict[str, object], str | None]:
    """One table, where writers nest the layer's own settings; and the layout, where the config alone says it."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise InputError(f"the head is a speculator of type {kind!r}, and eyas reads those of type 'eagle3'")
    for key, layout in (("transformer_layer_config", "speculators"), ("model", "vLLM")):
        inner = config.get(key)
        if isinstance(inner, dict):
            given = {name: value for name, value in config.items() if name != key and value is not None}
            return {**inner, **given}, layout
    return dict(config), "eyas" if "eyas_kind" in config else None


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that eyas writes, whatever layout they came in.

    Layers are `midlayer.*`, `layers.N.*` (vLLM, speculators) or `midlayer.N.*` (TensorRT-LLM); the norm before a later
    layer's attention is its `input_layernorm` or, in SGLang and TensorRT-LLM, its `hidden_norm`.
    """
    bare = [(name, name.removeprefix("model.")) for name in tensors if not name.endswith("rotary_emb.inv_freq")]
    layers = {name: LAYER_NAME.fullmatch(short) for name, short in bare}
    single = not any(match and int(match[1] or 0) for match in layers.values())
    fused = any(match and match[2] == "hidden_norm.weight" and not int(match[1] or 0) for match in layers.values())
    fused = fused or any(
        short.startswith("midlayer.") or short in ("d2t", "draft_id_to_target_id") for _, short in bare
    )
    found: dict[str, Tensor] = {}
    for name, short in bare:
        match, ours = layers[name], OTHER_NAMES.get(short, short)
        if match:
            number, rest = int(match[1] or 0), match[2]
            if number and rest == "hidden_norm.weight":
                rest = "input_layernorm.weight"
            ours = f"midlayer.{rest}" if single and fused else f"layers.{number}.{rest}"
        if ours in found:
            raise InputError(f"the head holds {ours} twice, under two names")
        found[ours] = tensors[name]
    return found


def _kind(where: str, tensors: Mapping[str, Tensor]) -> str:
    if "heads.0.0.linear.weight" in tensors:
        return "medusa"
    if "midlayer.self_attn.q_proj.weight" in tensors:
        return "eagle3"
    if "layers.0.self_attn.q_proj.weight" in tensors:
        if "layers.0.hidden_norm.weight" in tensors or "d2t" in tensors:
            return "eagle3"
        if "fc.weight" in tensors:
            return "eagle"
    raise InputError(f"the tensors in {where!r} are those of no EAGLE head: neither midlayer.* (EAGLE-3) nor "
                     f"fc and layers.0.* (EAGLE-1) were found")  # fmt: skip


def _dotted(config: Mapping[str, object]) -> dict[str, object]:
    """The config, with the keys of tables inside it as `table.key` beside its own."""
    inner = {f"{table}.{key}": value for table, part in config.items() if isinstance(part, dict)
             for key, value in part.items()}  # fmt: skip
    return {**inner, **config}


def _refuse_unknown(config: Mapping[str, object]) -> None:
    given = _dotted(config)
    for key, plain in _PLAIN.items():
        if given.get(key, plain) not in (plain, None):
            raise InputError(f"the head's config.json asks for {key} = {given[key]!r}, and eyas' heads know {plain!r}")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
        if kind != "default":
            raise InputError(f"the head asks for rotary embeddings of type {kind!r}, and eyas' heads know 'default'")


def _notes(kind: str, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Iterable[str]:
    """What the config says and the tensors do not bear out, and what it leaves out."""
    layers = layer_count(tensors)
    told = config.get("num_hidden_layers")
    if told not in (None, layers):
        yield f"num_hidden_layers is {told}, the tensors are those of {layers}: the tensors hold"
    if "rope_theta" not in config and not _rope_theta_of(config):
        yield "no rope_theta: 10000, as in the official code"
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()})
    told = config.get("torch_dtype", config.get("dtype"))
    if told is not None and dtypes != [told]:
        yield f"the config says {told}, the weights are {', '.join(dtypes)}: the weights hold"
    if kind == "eagle3" and "speculators_model_type" in config and "norm_before_residual" not in config:
        yield "no norm_before_residual: off, as in speculators (vLLM takes such a folder as on)"


def _rope_theta_of(config: Mapping[str, object]) -> object:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope.get("rope_theta") if isinstance(rope, dict) else None


def _without_zero_biases(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], notes: list[str]
) -> dict[str, Tensor]:
    """The tensors without biases that are all zero and that the config does not ask for: some runtimes want them."""
    asked = config.get("bias") is True
    idle = [
        name
        for name, tensor in tensors.items()
        if (name.endswith("o_proj.bias") or (name == "fc.bias" and not asked)) and not tensor.any()
    ]
    if idle:
        notes.append(f"{', '.join(idle)}: all zero, and left out")
    return {name: tensor for name, tensor in tensors.items() if name not in idle}


def layer_count(tensors: Iterable[str]) -> int:
    """Decoder layers of a head, by its tensors' names (those that eyas writes)."""
    matches = (LAYER_NAME.fullmatch(name) for name in tensors)
    return 1 + max((int(match[1] or 0) for match in matches if match), default=0)


def switches(config: Mapping[str, object]) -> dict[str, bool]:
    """Which norms of an EAGLE-3 head its config moves; those that it does not name are off.

    Raises:
        InputError: a switch is neither true nor false, or is both.
    """
    flat = _dotted(config)
    found = {}
    for switch in SWITCHES:
        given = {key: flat[key] for key in (switch, *_SWITCH_ALIASES[switch]) if flat.get(key) is not None}
        if not all(isinstance(value, bool) for value in given.values()) or len(set(given.values())) > 1:
            raise InputError(f"the head's {switch} must be true or false, got {given}")
        found[switch] = True in given.values()
    return found


def states_read(config: Mapping[str, object], default: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The states that a head reads (numbers of transformers' `hidden_states`), and a sentence that says why.

    Layer ids at the top of a config number the layer that a state *enters* (vLLM, speculators, llama.cpp): the state's
    own number. Ids inside `eagle_config` number the layer that it *leaves* (SGLang): one less than the state's number.

    Raises:
        InputError: a list of ids that is none.
    """
    nested = config.get("eagle_config")
    given = {
        "eyas_reads": config.get("eyas_reads"),
        AUX_IDS: config.get(AUX_IDS),
        f"eagle_config.{AUX_IDS}": nested.get(AUX_IDS) if isinstance(nested, dict) else None,
    }
    for key, ids in given.items():
        if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
            raise InputError(f"the head's {key} must be a list of layer numbers, got {ids!r}")
    own, top, inner = given.values()
    if isinstance(own, list):
        return tuple(own), "eyas' own record"
    leaving = [i + 1 for i in inner] if isinstance(inner, list) else None
    if isinstance(top, list):
        why = f"{AUX_IDS} at the top: layers that the states enter"
        if leaving not in (None, top):
            why += f"; those in eagle_config, {inner}, name other states ({leaving}) and were passed over"
        return tuple(top), why
    if leaving is not None:
        why = "the ids in eagle_config, as SGLang reads them: layers that the states leave"
        if inner == list(default):
            why += (f"; the same numbers as layers that states enter would be the usual {list(default)}, which is what "
                    f"vLLM takes: eyas inspect --head HEAD --target TARGET --runtime vllm compares both")  # fmt: skip
        return tuple(leaving), why
    return default, "none named: the usual ones of the target"
