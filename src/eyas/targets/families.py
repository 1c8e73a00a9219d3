"""One row per model family: what eyas must know about it beyond what transformers' model already does itself.

Refuses to know weights. The rules for the states that an EAGLE-3 head reads follow the official code (layers 2, N/2
and N-3 of N); shallow models get a rule of their own, written down in the head that is trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.errors import InputError


@dataclass(frozen=True)
class Family:
    """A model family that eyas verifies trees with."""

    masks: Literal["full", "window", "by_kind"]  # one full mask; one windowed mask; a mask for each kind of layer
    mlp_norm: str = "post_attention_layernorm"  # the norm before the MLP, which a new head's block starts from
    norm_offset: float = 0.0  # Gemma stores w of (1 + w)
    scaled_embedding: bool = False  # Gemma multiplies embedding rows by sqrt(D)


# Keyed by `model_type` of a transformers config.
FAMILIES: dict[str, Family] = {
    "llama": Family(masks="full"),
    "mistral": Family(masks="window"),
    "qwen2": Family(masks="by_kind"),
    "qwen3": Family(masks="by_kind"),
    "gemma3_text": Family(
        masks="by_kind", mlp_norm="pre_feedforward_layernorm", norm_offset=1.0, scaled_embedding=True
    ),
}

# Rotary kinds whose frequencies depend on nothing but the position. `dynamic` and `longrope` change them with the
# length of the sequence, so a deep speculative node would change the result of the nodes before it.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def family_of(model_type: str, rope_parameters: Mapping[str, object]) -> Family:
    """The row of a model.

    Raises:
        InputError: a family or a rotary kind that eyas does not support, with the list of those that it does.
    """
    if model_type not in FAMILIES:
        raise InputError(f"models of type {model_type!r} are not supported; supported: {', '.join(FAMILIES)}")
    for parameters in _rope_kinds(rope_parameters):
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in FIXED_ROPE_TYPES:
            raise InputError(f"rotary embeddings of type {rope_type!r} depend on the length of the sequence and cannot "
                             f"be verified as a tree; supported: {', '.join(FIXED_ROPE_TYPES)}")  # fmt: skip
    return FAMILIES[model_type]


def rope_theta_of(rope_parameters: Mapping[str, object]) -> float:
    """The rotary base of the layers that see everything: what a head on this target uses."""
    theta = _rope_kinds(rope_parameters)[0].get("rope_theta", 10000.0)
    assert isinstance(theta, (int, float)), theta
    return float(theta)


def _rope_kinds(rope_parameters: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Rotary parameters by kind of layer, those of full attention first; most models have one set for all layers."""
    kinds = [rope_parameters.get(kind) for kind in ("full_attention", "sliding_attention")]
    by_kind = [parameters for parameters in kinds if isinstance(parameters, Mapping)]
    return by_kind or [rope_parameters]


def default_reads(num_layers: int) -> tuple[int, int, int]:
    """The low, middle and high state that an EAGLE-3 head reads (indices of `hidden_states`).

    (2, N/2, N-3) as in the official code; below 7 layers those collide, so (1, N/2, N-1) made distinct.

    Raises:
        InputError: fewer than 3 layers, which have no three distinct inner states.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers < 3:
        raise InputError(f"an EAGLE-3 head reads three states; a target of {num_layers} layers has too few")
    middle = min(max(num_layers // 2, 2), num_layers - 1)
    high = num_layers - 1 if num_layers - 1 > middle else num_layers
    return (1, middle, high)
