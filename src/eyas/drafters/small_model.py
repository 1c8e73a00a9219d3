"""A smaller language model of the same vocabulary as a drafter (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318), here over trees and with the lossless rule of `verify`.

It is a `Target` like the one that it drafts for, so a level of a draft tree is a verified tree, and there is no second
tree attention. Refuses to know which back end runs it. Legend: T tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from eyas.drafters.base import Candidates, Drafter, best_candidates
from eyas.targets.base import Target
from eyas.tree import Tree

CacheT = TypeVar("CacheT")


@dataclass
class SmallState(Generic[CacheT]):
    """One text. A row of the round is a node of a tree below the text's last token."""

    cache: CacheT  # holds the text without its last token
    text: list[int]
    tokens: list[int]  # by row of this round; the first one is the text's last token
    parents: list[int]


class SmallModel(Drafter[SmallState[CacheT]], Generic[CacheT]):
    """Drafts with a model that reads tokens only.

    A level verifies all nodes of the round again: a few rows, which cost little beside the weights. In return the cache
    holds verified text alone, and there is no speculation to take out of it.
    """

    kind = "small"
    reads = ()

    def __init__(self, model: Target[CacheT]) -> None:
        self.model = model

    def new_state(self, first: int | None = None) -> SmallState[CacheT]:
        assert first is not None, "a model cannot do without its text's first token"
        return SmallState(self.model.new_cache(), [first], [first], [-1])

    def observe(self, state: SmallState[CacheT], tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        unread = [state.text[-1], *tokens]
        verified = self.model.verify([(state.cache, Tree.chain(unread))], last_only=True)[0]
        self.model.keep(state.cache, range(len(tokens)))
        state.text += tokens
        state.tokens, state.parents = state.text[-1:], [-1]
        return best_candidates(verified.logits_NV, width, None)

    def expand(self, state: SmallState[CacheT], rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        first_new = len(state.tokens)
        state.tokens += tokens
        state.parents += rows
        tree = Tree(tuple(state.tokens), tuple(state.parents))
        verified = self.model.verify([(state.cache, tree)])[0]
        return best_candidates(verified.logits_NV[first_new:], width, None)

    def rewind(self, state: SmallState[CacheT], length: int) -> None:
        self.model.rewind(state.cache, length)
        del state.text[length + 1 :]
        state.tokens, state.parents = state.text[-1:], [-1]

    def can_propose(self, token: int) -> bool:
        return 0 <= token < self.model.spec.vocab_size
