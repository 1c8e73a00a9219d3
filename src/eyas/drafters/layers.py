"""The one decoder block that EAGLE heads are made of, and the memory of one drafted sequence.

A Llama-style block with two differences: its attention may read a wider input than its residual (EAGLE-3 reads
[embedding, hidden], 2D wide), and what is normed before attention is the head's business, not the block's. Layers after
a head's first are plain Llama layers. Legend: T rows, D width, E width of the attention input, H heads, G key/value
heads, C head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

_GROWTH = 256  # rows added to a state at a time


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of a block."""

    width: int  # D
    attention_width: int  # E
    heads: int  # H
    kv_heads: int  # G
    head_dim: int  # C
    ffn_width: int
    norm_eps: float
    rope_theta: float
    qkv_bias: bool = False
    window: int = 0  # positions that drafting looks back over, itself included; 0: all. As long as training's texts


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps), computed in float32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        return self.weight * (x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


class Attention(nn.Module):
    """The four projections; who looks at whom is decided by the caller."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c, bias = config, config.qkv_bias
        self.config = config
        self.q_proj = nn.Linear(c.attention_width, c.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.attention_width, c.kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.attention_width, c.kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)

    def queries(self, a_TE: Tensor, positions_T: Tensor) -> Tensor:
        """[T, H, C], rotated."""
        return rotate(self._split(self.q_proj(a_TE)), positions_T, self.config.rope_theta)

    def keys(self, a_TE: Tensor, positions_T: Tensor) -> Tensor:
        """[T, G, C], rotated."""
        return rotate(self._split(self.k_proj(a_TE)), positions_T, self.config.rope_theta)

    def values(self, a_TE: Tensor) -> Tensor:
        """[T, G, C]."""
        return self._split(self.v_proj(a_TE))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP around a residual that the caller gives un-normed."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def finish(self, x_TD: Tensor, attended_THC: Tensor) -> Tensor:
        """What follows the attention: output projection, residual, MLP, residual."""
        y_TD = x_TD + self.self_attn.o_proj(attended_THC.flatten(-2))
        return y_TD + self.mlp(self.post_attention_layernorm(y_TD))


class LaterLayer(nn.Module):
    """A layer after a head's first: Llama's own, whose attention reads the normed output of the layer before."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.block = Block(replace(config, attention_width=config.width))


# One block over some rows: (number of the layer, block, residual [.., D], attention input [.., E]) -> output [.., D].
Through = Callable[[int, Block, Tensor, Tensor], Tensor]


def run_layers(first: Block, later: Sequence[LaterLayer], x: Tensor, a: Tensor, through: Through) -> Tensor:
    """A head's layers one upon the other, from the first one's residual and attention input to the last one's output.

    `through` says which rows look at which: drafting and training differ in that and in nothing else.
    """
    hidden = through(0, first, x, a)
    for number, layer in enumerate(later, start=1):
        hidden = through(number, layer.block, hidden, layer.norm(hidden))
    return hidden


def rotate(x_TGC: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """Llama's rotary embedding: the first half of C is paired with the second; angles in float32."""
    half = x_TGC.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x_TGC.device) / half)
    angles = positions_T.to(torch.float32)[..., None, None] * frequencies
    cos, sin = angles.cos().to(x_TGC.dtype), angles.sin().to(x_TGC.dtype)
    first, second = x_TGC[..., :half], x_TGC[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Memory:
    """Keys and values of one layer, by slot: [G, slots, C], with room to grow."""

    def __init__(self) -> None:
        self.keys_GSC = torch.empty(0)
        self.values_GSC = torch.empty(0)

    def write(self, slot: int, keys_TGC: Tensor, values_TGC: Tensor) -> None:
        """Put rows at `slot` and after; what stood there before is overwritten."""
        end = slot + len(keys_TGC)
        if self.keys_GSC.numel() == 0 or end > self.keys_GSC.shape[1]:
            grown = keys_TGC.new_empty(2, keys_TGC.shape[1], end + _GROWTH, keys_TGC.shape[2])
            if slot:
                grown[0, :, :slot], grown[1, :, :slot] = self.keys_GSC[:, :slot], self.values_GSC[:, :slot]
            self.keys_GSC, self.values_GSC = grown[0], grown[1]
        self.keys_GSC[:, slot:end] = keys_TGC.transpose(0, 1)
        self.values_GSC[:, slot:end] = values_TGC.transpose(0, 1)


def _window(block: Block, all_positions: int) -> int:
    return block.self_attn.config.window or all_positions


class DraftState:
    """What a head remembers of one sequence.

    Kept: keys and values of `length` verified pairs in every layer, made from true target states. For one round only:
    rows, row 0 being the last verified pair and row r > 0 the r-th expanded node, whose keys and values stand at
    `length + r - 1`.
    """

    def __init__(self, layers: int = 1) -> None:
        self.length = 0
        self.level = 0  # levels expanded in this round
        self.hidden_RD = torch.empty(0)  # outputs of the last layer
        self.memories = [Memory() for _ in range(layers)]
        self._ancestors: list[list[int]] = []  # per row, the tree rows that it sees: its ancestors and itself

    def absorb(self, block: Block, x_TD: Tensor, a_TE: Tensor, later: Sequence[LaterLayer] = ()) -> Tensor:
        """Run verified pairs through the layers, drop the round before, start a new one; the last row's output."""
        num = len(x_TD)
        positions_T = torch.arange(self.length, self.length + num, device=x_TD.device)
        seen = torch.arange(self.length + num, device=x_TD.device)
        mask = (seen <= positions_T[:, None]) & (seen > positions_T[:, None] - _window(block, self.length + num))
        hidden_TD = self._run(block, later, x_TD, a_TE, self.length, positions_T, mask)
        self.length += num
        self.level = 0
        self.hidden_RD = hidden_TD[-1:]
        self._ancestors = [[]]
        return self.hidden_RD

    def deepen(
        self, block: Block, x_KD: Tensor, a_KE: Tensor, rows: Sequence[int], later: Sequence[LaterLayer] = ()
    ) -> Tensor:
        """Run one level of nodes through the layers; each sees all verified pairs, its ancestors and itself.

        All nodes of a level share one position, one less than that of their tokens, as pairs do (algorithm 1.2.2).
        """
        first = len(self._ancestors)
        slots = first - 1
        mask = torch.zeros(len(rows), self.length + slots + len(rows), dtype=torch.bool)
        window = _window(block, self.length + self.level + 1)
        mask[:, max(0, self.length + self.level + 1 - window) : self.length] = True
        for k, row in enumerate(rows):
            self._ancestors.append([*self._ancestors[row], slots + k])
            mask[k, [self.length + slot for slot in self._ancestors[-1][-window:]]] = True
        positions_K = torch.full((len(rows),), self.length + self.level, device=x_KD.device)
        hidden_KD = self._run(block, later, x_KD, a_KE, self.length + slots, positions_K, mask.to(x_KD.device))
        self.level += 1
        self.hidden_RD = torch.cat((self.hidden_RD, hidden_KD))
        return hidden_KD

    def rewind(self, length: int) -> None:
        """Keep the first `length` verified pairs; no rows until pairs are absorbed again."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length, self.level, self._ancestors = length, 0, []

    def _run(
        self,
        first: Block,
        later: Sequence[LaterLayer],
        x_TD: Tensor,
        a_TE: Tensor,
        slot: int,
        positions_T: Tensor,
        mask_TS: Tensor,
    ) -> Tensor:
        end = slot + len(x_TD)

        def through(number: int, block: Block, x_TD: Tensor, a_TE: Tensor) -> Tensor:
            attention, memory = block.self_attn, self.memories[number]
            memory.write(slot, attention.keys(a_TE, positions_T), attention.values(a_TE))
            queries_HTC = attention.queries(a_TE, positions_T).transpose(0, 1)
            attended_HTC = scaled_dot_product_attention(
                queries_HTC[None],
                memory.keys_GSC[None, :, :end],
                memory.values_GSC[None, :, :end],
                attn_mask=mask_TS,
                enable_gqa=True,
            )[0]
            return block.finish(x_TD, attended_HTC.transpose(0, 1))

        return run_layers(first, later, x_TD, a_TE, through)
