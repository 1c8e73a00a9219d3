"""One row per model family: what eyas must know about it beyond what transformers' model already does itself.

Refuses to know weights. The rules for the states that an EAGLE-3 head reads follow the official code (layers 2, N/2
and N-3 of N); shallow models get a rule of their own, written down in the head that is trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eyas.errors import InputError


@dataclass(frozen=True)
class Family:
    """A model family that eyas verifies trees with."""

    name: str


# Keyed by `model_type` of a transformers config.
FAMILIES: dict[str, Family] = {"llama": Family("Llama")}

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
    rope_type = rope_parameters.get("rope_type", "default")
    if rope_type not in FIXED_ROPE_TYPES:
        raise InputError(f"rotary embeddings of type {rope_type!r} depend on the length of the sequence and cannot be "
                         f"verified as a tree; supported: {', '.join(FIXED_ROPE_TYPES)}")  # fmt: skip
    return FAMILIES[model_type]


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
