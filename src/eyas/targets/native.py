"""A target on the native CPU core: the same weights as transformers' model, packed, in bfloat16 or int8.

One call verifies the trees of all sequences. A row's result depends on nothing but its own path (row invariance), so
speculative output equals plain output bit for bit. Logits and states come as float32. int8: weights have one scale for
each output, activations one for each 64 inputs, made as they come. Refuses to know how files are found (`checkpoint`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas import native
from eyas.errors import InputError, Unsupported
from eyas.native import Arrays
from eyas.targets.base import Target, TargetSpec, Verified
from eyas.targets.eager import EagerTarget
from eyas.tree import Tree

if TYPE_CHECKING:
    from eyas._native import Cache, Layer

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class LayerDescription(TypedDict):
    """What a layer does, beside its weights."""

    windowed: bool
    rope: int  # which table
    activation: str


class Description(TypedDict):
    """What packed arrays are: plain JSON values."""

    spec: dict[str, Any]  # of `TargetSpec`, without what loading decides
    weights: str  # "bfloat16" or "int8"
    shape: dict[str, float]
    layers: list[LayerDescription]
    embedding_scale: float
    rope_scales: list[float]


class NativeTarget(Target["Cache"]):
    """A target made of what `pack_target` returns."""

    def __init__(self, arrays: Mapping[str, NDArray[np.generic]], description: Description, name: str) -> None:
        """`description` is the second result of `pack_target`; arrays may be views of a file.

        Raises:
            InputError: there is no compiled core.
            ValueError: the arrays do not fit the description.
        """
        core = native.core()
        native.use_threads()
        d, kind = description, description["weights"]
        self.spec = TargetSpec(
            **{**d["spec"], "eos_ids": tuple(d["spec"]["eos_ids"])},
            name=name,
            dtype=torch.int8 if kind == "int8" else torch.bfloat16,
            device=torch.device("cpu"),
            backend="native",
        )
        layers = [_layer(arrays, f"layers.{i}", kind, d["shape"], row) for i, row in enumerate(d["layers"])]
        self._arrays = arrays
        self._model = core.Model(
            shape=d["shape"],
            layers=layers,
            embedding=arrays["embedding"],
            embedding_scale=d["embedding_scale"],
            final_norm=arrays["norm"],
            head=native.matrix(arrays, "head", kind, self.spec.vocab_size, self.spec.width),
            frequencies=[arrays[f"rope.{i}"] for i in range(len(d["rope_scales"]))],
            rope_scales=d["rope_scales"],
        )

    def new_cache(self) -> Cache:
        return self._model.new_cache()

    def verify(
        self, items: Sequence[tuple[Cache, Tree]], reads: Sequence[int] = (), last_only: bool = False
    ) -> list[Verified]:
        counts = [len(tree) for _, tree in items]
        states = sorted(set(reads))
        logits, hidden = self._model.verify(
            [cache for cache, _ in items],
            np.array(counts, dtype=np.int32),
            np.array([token for _, tree in items for token in tree.tokens], dtype=np.int32),
            np.array([parent for _, tree in items for parent in tree.parents], dtype=np.int32),
            states,
            last_only,
        )
        logits_RV, hidden_RLD = torch.from_numpy(logits), torch.from_numpy(hidden)
        if list(reads) != states:
            hidden_RLD = hidden_RLD[:, [states.index(read) for read in reads]]
        if len(items) == 1:
            return [Verified(logits_RV, hidden_RLD)]
        split = logits_RV.split([1] * len(items) if last_only else counts)
        return [Verified(*pair) for pair in zip(split, hidden_RLD.split(counts), strict=True)]

    def keep(self, cache: Cache, path: Sequence[int]) -> None:
        cache.keep(list(path))

    def rewind(self, cache: Cache, length: int) -> None:
        cache.rewind(length)

    @property
    def embedding_VD(self) -> Tensor:
        return _bfloat16(self._arrays["embedding"])

    @property
    def head_VD(self) -> Tensor:
        return _bfloat16(self._arrays.get("head_rows", self._arrays["embedding"]))


def _bfloat16(bits: NDArray[np.generic]) -> Tensor:
    # the file is mapped read-only, which torch has no notion of; nothing here writes
    view = np.lib.stride_tricks.as_strided(bits, writeable=True) if not bits.flags.writeable else bits
    return torch.from_numpy(view).view(torch.bfloat16)


def _layer(
    arrays: Mapping[str, NDArray[np.generic]],
    name: str,
    kind: str,
    shape: Mapping[str, float],
    row: LayerDescription,
) -> Layer:
    heads, kv_heads, head_dim, width, ffn = (
        int(shape[key]) for key in ("heads", "kv_heads", "head_dim", "width", "ffn_width")
    )
    norms = (f"{name}.norms.{norm}" for norm in ("input", "query", "key", "after_attention", "mlp", "after_mlp"))
    return native.core().Layer(
        shape=shape,
        qkv=native.matrix(arrays, f"{name}.qkv", kind, (heads + 2 * kv_heads) * head_dim, width),
        output=native.matrix(arrays, f"{name}.output", kind, width, heads * head_dim),
        gate_up=native.matrix(arrays, f"{name}.gate_up", kind, ffn, width, gated=True),
        down=native.matrix(arrays, f"{name}.down", kind, width, ffn),
        norms={norm.rpartition(".")[2]: arrays[norm] for norm in norms if norm in arrays},
        activation=row["activation"],
        windowed=row["windowed"],
        rope=row["rope"],
    )


def pack_target(target: EagerTarget, weights: str) -> tuple[Arrays, Description]:
    """Everything that the core needs of a model: arrays, and what they are (plain JSON values).

    Arguments:
        weights: "bfloat16" or "int8".

    Raises:
        InputError: no such form of weights.
        Unsupported: the model does something that the core does not know.
    """
    if weights not in native.WEIGHTS:
        raise InputError(f"the native back end runs {' or '.join(native.WEIGHTS)}, got {weights!r}")
    config, family, spec = target.model.config, target.family, target.spec
    optional = config.to_dict()
    activation = _ACTIVATIONS.get(optional.get("hidden_activation") or optional.get("hidden_act") or "")
    if activation is None:
        raise Unsupported(f"the native back end knows the activations {', '.join(_ACTIVATIONS)}, not the target's")
    if optional.get("final_logit_softcapping") or optional.get("attn_logit_softcapping"):
        raise Unsupported("the native back end does not soft-cap logits, as the target asks: give --backend eager")
    kinds = optional.get("layer_types") if family.masks == "by_kind" else None
    window = optional.get("sliding_window") if family.masks != "full" else None
    ropes = _ropes(target)
    arrays: Arrays = {"embedding": native.bfloat16_bits(target.embedding_VD)}
    if target.head_VD is not target.embedding_VD:
        arrays["head_rows"] = native.bfloat16_bits(target.head_VD)
    layers: list[LayerDescription] = []
    for i in range(spec.num_layers):
        state = target.layer(i)
        _pack_layer(arrays, f"layers.{i}", weights, state, family.mlp_norm, family.norm_offset)
        kind = kinds[i] if kinds else "full_attention"
        windowed = window is not None and (kinds is None or kind == "sliding_attention")
        rope = list(ropes).index(kind) if kind in ropes else 0
        layers.append({"windowed": windowed, "rope": rope, "activation": activation})
    native.pack(arrays, "head", weights, target.head_VD)
    arrays["norm"] = native.floats(target.model.get_parameter("model.norm.weight") + family.norm_offset)
    for i, (frequencies, _) in enumerate(ropes.values()):
        arrays[f"rope.{i}"] = frequencies
    described = {key: value for key, value in asdict(spec).items() if key not in ("name", "dtype", "device", "backend")}
    # of these families each has it; torch's types know modules and tensors only
    scaling: Any = target.model.get_submodule("model.layers.0.self_attn").scaling
    shape = {
        "width": spec.width,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "ffn_width": spec.ffn_width,
        "window": window or 0,
        "norm_eps": spec.norm_eps,
        "query_scale": float(scaling),
    }
    description: Description = {
        "spec": described,
        "weights": weights,
        "shape": shape,
        "layers": layers,
        "embedding_scale": spec.width**0.5 if family.scaled_embedding else 1.0,
        "rope_scales": [scale for _, scale in ropes.values()],
    }
    return arrays, description


def _pack_layer(
    arrays: Arrays, name: str, kind: str, state: Mapping[str, Tensor], mlp_norm: str, norm_offset: float
) -> None:
    """One decoder layer, by the names that all families of transformers share."""

    def stacked_bias(parts: Sequence[str]) -> Tensor | None:
        found = [state[f"{part}.bias"] for part in parts if f"{part}.bias" in state]
        return torch.cat(found) if found else None

    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    qkv_weight = torch.cat([state[f"{part}.weight"] for part in qkv])
    native.pack(arrays, f"{name}.qkv", kind, qkv_weight, stacked_bias(qkv))
    for ours, theirs in (("output", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        native.pack(arrays, f"{name}.{ours}", kind, state[f"{theirs}.weight"], state.get(f"{theirs}.bias"))
    gate, up = (state[f"mlp.{part}_proj.weight"] for part in ("gate", "up"))
    native.pack_gated(arrays, f"{name}.gate_up", kind, gate, up, stacked_bias(["mlp.gate_proj", "mlp.up_proj"]))
    norms = {"input": "input_layernorm", "query": "self_attn.q_norm", "key": "self_attn.k_norm", "mlp": mlp_norm}
    if mlp_norm == "pre_feedforward_layernorm":  # Gemma's sandwich: a norm after each half too
        norms |= {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
    for ours, theirs in norms.items():
        if f"{theirs}.weight" in state:
            arrays[f"{name}.norms.{ours}"] = native.floats(state[f"{theirs}.weight"] + norm_offset)


def _ropes(target: EagerTarget) -> dict[str, tuple[NDArray[np.float32], float]]:
    """Rotary frequencies and their scale, by kind of layer."""
    module = target.model.get_submodule("model.rotary_emb")
    buffers = dict(module.named_buffers())
    kinds = [kind for kind in ("full_attention", "sliding_attention") if f"{kind}_inv_freq" in buffers]
    prefixes = {kind: f"{kind}_" for kind in kinds} or {"full_attention": ""}
    ropes = {}
    for kind, prefix in prefixes.items():
        frequencies = native.floats(buffers[f"{prefix}inv_freq"])
        if 2 * len(frequencies) != target.spec.head_dim:
            raise Unsupported("the native back end rotates whole heads, and the target rotates a part: "
                              "give --backend eager")  # fmt: skip
        ropes[kind] = (frequencies, float(vars(module)[f"{prefix}attention_scaling"]))
    return ropes
