"""The target's seam: what eyas asks of a language model, whatever runs it.

Legend: N tree nodes, L states read, D width, V vocabulary, T tokens. State `i` of a model with n layers is the
vector that enters decoder layer i (0: the embedding), and state n is the last one after the final norm: the indices
of transformers' `hidden_states`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from eyas.tree import Tree

CacheT = TypeVar("CacheT")


@dataclass(frozen=True)
class TargetSpec:
    """The figures of a target that the rest of eyas needs."""

    name: str  # as the user gave it
    family: str  # a key of `families.FAMILIES`
    num_layers: int
    width: int  # D
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int  # V
    norm_eps: float
    rope_theta: float
    max_length: int  # positions that its rotary table was trained for
    eos_ids: tuple[int, ...]
    repetition_penalty: float  # of its generation_config; 1 where it sets none
    dtype: torch.dtype  # of the weights
    device: torch.device
    backend: str  # "eager" or "native"


@dataclass(frozen=True)
class Verified:
    """What one forward says about one tree."""

    logits_NV: Tensor  # row i: the distribution after node i; only the last row where `last_only` was asked
    hidden_NLD: Tensor  # row i: the states read at node i


class Target(ABC, Generic[CacheT]):
    """A language model that verifies trees. Holds weights only; a sequence's state is its cache."""

    spec: TargetSpec

    @abstractmethod
    def new_cache(self) -> CacheT:
        """An empty cache for one sequence."""

    @abstractmethod
    def verify(
        self, items: Sequence[tuple[CacheT, Tree]], reads: Sequence[int] = (), last_only: bool = False
    ) -> list[Verified]:
        """One forward over the nodes of every tree, each after what its cache holds.

        A node sees the whole cache, its ancestors and itself, at position (cache length + depth). A prompt is a
        chain; with `last_only` logits are computed for the last node alone. Every node's keys and values stand in
        the cache until `keep` says which of them were accepted.
        """

    @abstractmethod
    def keep(self, cache: CacheT, path: Sequence[int]) -> None:
        """Keep the keys and values of the nodes on `path` (root first), drop those of all other nodes."""

    @abstractmethod
    def rewind(self, cache: CacheT, length: int) -> None:
        """Forget all but the first `length` tokens, of those that were kept."""

    @property
    @abstractmethod
    def embedding_VD(self) -> Tensor:
        """The embedding's rows, unscaled (Gemma scales them inside the model; drafters do not)."""

    @property
    @abstractmethod
    def head_VD(self) -> Tensor:
        """The rows of the output head."""
