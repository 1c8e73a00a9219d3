"""EAGLE heads on the native CPU core: fast twins of the trained modules, one call for each observe and expand.

Guesses need not be exact, so weights are rounded (bfloat16 or int8) whatever the head was trained in. An EAGLE-1 head,
whose output matrix is the target's, may draft over some of the target's rows only: the most frequent tokens make nearly
all of its hits at a sixth of the cost (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eyas import native
from eyas.drafters.base import Candidates, Drafter
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import SWITCHES, Eagle3, Eagle3Config
from eyas.drafters.layers import BlockConfig
from eyas.errors import Unsupported
from eyas.native import Arrays

if TYPE_CHECKING:
    from eyas._native import Draft, DraftState


class NativeDrafter(Drafter["DraftState"]):
    """A trained head, packed."""

    def __init__(self, head: Eagle | Eagle3, weights: str, vocabulary_Q: Tensor | None = None) -> None:
        """`weights` is "bfloat16" or "int8"; `vocabulary_Q` are the target ids, ascending, that an EAGLE-1 head drafts
        over (None: all). An EAGLE-3 head has a vocabulary of its own.

        Raises:
            InputError: there is no compiled core.
            Unsupported: the head has several layers, or norms that the core does not know.
        """
        if isinstance(head, Eagle3):
            _refuse_unknown(head.config)
        self.kind, self.reads = head.kind, head.reads
        self._head = head
        if isinstance(head, Eagle3):
            vocabulary_Q = head.draft_vocabulary_Q
        self._draft_set = None if vocabulary_Q is None else frozenset(vocabulary_Q.tolist())
        self._draft = _pack(head, weights, vocabulary_Q)

    def new_state(self, first: int | None = None) -> DraftState:
        return self._draft.new_state()

    def observe(self, state: DraftState, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        states = np.ascontiguousarray(hidden_TLD.numpy().reshape(len(hidden_TLD), -1))
        return _candidates(*self._draft.observe(state, np.array(tokens, dtype=np.int32), states, width))

    def expand(self, state: DraftState, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        chosen, nodes = np.array(rows, dtype=np.int32), np.array(tokens, dtype=np.int32)
        return _candidates(*self._draft.expand(state, chosen, nodes, width))

    def rewind(self, state: DraftState, length: int) -> None:
        state.rewind(length)

    def can_propose(self, token: int) -> bool:
        return self._head.can_propose(token) if self._draft_set is None else token in self._draft_set


def _refuse_unknown(config: Eagle3Config) -> None:
    on = [switch for switch in SWITCHES if asdict(config)[switch]]
    if config.layers > 1 or on:
        raise Unsupported(f"the native back end drafts with plain EAGLE-3 heads of one layer; this one has "
                          f"{config.layers} and {', '.join(on) or 'no switches'}")  # fmt: skip


def _candidates(tokens: np.ndarray, logprobs: np.ndarray) -> Candidates:
    return Candidates(torch.from_numpy(tokens), torch.from_numpy(logprobs))


def _pack(head: Eagle | Eagle3, kind: str, vocabulary_Q: Tensor | None) -> Draft:
    state = head.state_dict()
    block = head.config.block
    first = isinstance(head, Eagle)
    arrays: Arrays = {}
    native.pack(arrays, "fusion", kind, state["fc.weight"], state.get("fc.bias"))
    attention = "block.self_attn"
    qkv = torch.cat([state[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    bias = torch.cat([state[f"{attention}.{part}_proj.bias"] for part in "qkv"]) if block.qkv_bias else None
    native.pack(arrays, "qkv", kind, qkv, bias)
    native.pack(arrays, "output", kind, state[f"{attention}.o_proj.weight"])
    gate, up = (state[f"block.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    native.pack_gated(arrays, "gate_up", kind, gate, up)
    native.pack(arrays, "down", kind, state["block.mlp.down_proj.weight"])
    rows_QD = head.head_VD if first else state["lm_head.weight"]
    if first and vocabulary_Q is not None:
        rows_QD = rows_QD[vocabulary_Q]
    native.pack(arrays, "head", kind, rows_QD)
    own = None if first else head.embedding
    embedding_VD = head.embedding_VD if own is None else own.weight
    norms = {"mlp": native.floats(state["block.post_attention_layernorm.weight"])}
    if not first:
        names = {"embedding": "embedding_norm", "hidden": "hidden_norm", "final": "norm"}
        norms |= {ours: native.floats(state[f"{theirs}.weight"]) for ours, theirs in names.items()}
    return _assemble(head, kind, arrays, norms, native.bfloat16_bits(embedding_VD), len(rows_QD), vocabulary_Q)


def _assemble(
    head: Eagle | Eagle3,
    kind: str,
    arrays: Arrays,
    norms: dict[str, np.ndarray],
    embedding: np.ndarray,
    draft_size: int,
    vocabulary_Q: Tensor | None,
) -> Draft:
    block = head.config.block
    shape, matrix, core = _shape(block), native.matrix, native.core()
    fused = 2 * block.width if isinstance(head, Eagle) else len(head.reads) * head.config.target_width
    layer = core.Layer(
        shape=shape,
        qkv=matrix(arrays, "qkv", kind, (block.heads + 2 * block.kv_heads) * block.head_dim, block.attention_width),
        output=matrix(arrays, "output", kind, block.width, block.heads * block.head_dim),
        gate_up=matrix(arrays, "gate_up", kind, block.ffn_width, block.width, gated=True),
        down=matrix(arrays, "down", kind, block.width, block.ffn_width),
        norms={"mlp": norms["mlp"]},
        activation="silu",
        windowed=block.window > 0,
        rope=0,
    )
    half = block.head_dim // 2
    frequencies = block.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    return core.Draft(
        kind=head.kind,
        shape=shape,
        num_states=block.width if isinstance(head, Eagle) else fused,
        embedding=embedding,
        fusion=matrix(arrays, "fusion", kind, block.width, fused),
        layer=layer,
        head=matrix(arrays, "head", kind, draft_size, block.width),
        vocabulary=None if vocabulary_Q is None else vocabulary_Q.numpy(),
        norms=norms,
        frequencies=native.floats(frequencies),
    )


def _shape(block: BlockConfig) -> dict[str, float]:
    return {
        "width": block.width,
        "heads": block.heads,
        "kv_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "ffn_width": block.ffn_width,
        "window": block.window,
        "norm_eps": block.norm_eps,
        "query_scale": block.head_dim**-0.5,
    }
