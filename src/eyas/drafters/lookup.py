"""N-gram lookup in the context: the tokens that followed when the last ones stood in the text before.

Prompt lookup decoding (A. Saxena 2023; before it LLMA, arXiv 2304.04487), as a tree: every distinct continuation is a
candidate. No weights and no states of the target; what it knows of a text is an index of its n-grams, which grows with
the text and is never made anew. Legend: K nodes, W candidates, n the length of a match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest

import torch
from torch import Tensor

from eyas.drafters.base import Candidates, Drafter

LONGEST = 4  # tokens of a match; longer ones are as good as sure


@dataclass
class LookupState:
    """One text."""

    text: list[int]
    last: tuple[int, ...]  # its last tokens, `LONGEST` at most
    # by n-gram of the text: how often which token followed it; the one that followed last stands last
    followers: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)
    rows: list[tuple[int, ...]] = field(default_factory=list)  # the last tokens at each row of this round


class Lookup(Drafter[LookupState]):
    """Followers of the longest match, then of shorter ones while these can be among the best.

    A token that followed a match of n tokens c times of t is given (1 - 2**-n) c/t of what longer matches left of 1: a
    plain guess at how far to trust a match, which sums to less than 1. Equally likely ones: those of the longest match
    first, of these the most recent.
    """

    kind = "lookup"
    reads = ()

    def new_state(self, first: int | None = None) -> LookupState:
        assert first is not None, "a lookup reads its text's first token too"
        return LookupState([first], (first,))

    def observe(self, state: LookupState, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        for token in tokens:
            for n in range(1, len(state.last) + 1):
                counts = state.followers.setdefault(state.last[-n:], {})
                counts[token] = counts.pop(token, 0) + 1
            state.text.append(token)
            state.last = (*state.last, token)[-LONGEST:]
        state.rows = [state.last]
        return _candidates(state, state.rows, width)

    def expand(self, state: LookupState, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        new = [(*state.rows[row], token)[-LONGEST:] for row, token in zip(rows, tokens, strict=True)]
        state.rows += new
        return _candidates(state, new, width)

    def rewind(self, state: LookupState, length: int) -> None:
        if length + 1 < len(state.text):  # counts cannot be taken back: the index of what stays is made anew
            kept = state.text[1 : length + 1]
            state.text = state.text[:1]
            state.last, state.followers = (state.text[0],), {}
            self.observe(state, kept, torch.empty(0), width=1)
        state.rows = []

    def can_propose(self, token: int) -> bool:
        return True  # any token may stand in a text


def _candidates(state: LookupState, ends: Sequence[tuple[int, ...]], width: int) -> Candidates:
    found = [_below(state, end, width) for end in ends]
    most = max(len(best) for best in found)
    filled = [best + [(0, 0.0)] * (most - len(best)) for best in found]
    tokens_KW = torch.tensor([[token for token, _ in row] for row in filled], dtype=torch.int64)
    p_KW = torch.tensor([[p for _, p in row] for row in filled], dtype=torch.float32)
    return Candidates(tokens_KW, p_KW.log())  # no candidate: -inf


def _below(state: LookupState, end: tuple[int, ...], width: int) -> list[tuple[int, float]]:
    """At most `width` tokens that may follow a text with this end, and their estimates, best first."""
    estimates: dict[int, float] = {}
    left = 1.0
    for n in range(len(end), 0, -1):
        counts = state.followers.get(end[-n:])
        if counts is None:
            continue
        share = left * (1 - 0.5**n)
        left -= share
        total = sum(counts.values())
        for token, times in reversed(counts.items()):
            estimates.setdefault(token, share * times / total)
        if len(estimates) >= width and nlargest(width, estimates.values())[-1] >= left:
            break  # no shorter match can be among the best
    return nlargest(width, estimates.items(), key=lambda item: item[1])  # equal ones keep their order
