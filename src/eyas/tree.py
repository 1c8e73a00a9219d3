"""A draft tree and all index arithmetic that follows from it.

Knows tokens, parents and scores; refuses to know models, drafters or policies. Legend: N nodes; node 0 is the
root, the token that was emitted last; parents come before their children. A chain is a tree. W tokens that a draft may
draw, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftLaw:
    """The distribution q that children were drawn from: target ids, all distinct, and their probabilities (float64)."""

    tokens_W: Tensor
    q_W: Tensor

    def dense(self, vocab_size: int) -> Tensor:
        """q over the target's vocabulary [V]: zero for tokens that the draft never proposes."""
        return torch.zeros(vocab_size, dtype=torch.float64).index_copy(0, self.tokens_W.cpu(), self.q_W.cpu())


@dataclass(frozen=True)
class Tree:
    """Tokens hanging from one root, in an order where every parent stands before its children.

    Arguments:
        tokens: N token ids; `tokens[0]` is the root.
        parents: N node numbers; `parents[0]` is -1, else `parents[i] < i`.
        scores: N cumulative draft log-probabilities; 0.0 for the root. Empty means "not drafted": all zeros.
        laws: by node, the law that its children were drawn from without replacement, in node order. Empty means
            "chosen, not drawn".

    Raises:
        ValueError: lengths differ, a parent does not precede its child, or two siblings carry one token (then
            "the child with this token" would not be one node, and verification could not be exact).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] = ()
    laws: Mapping[int, DraftLaw] = field(default_factory=dict, repr=False, compare=False)
    depths: tuple[int, ...] = field(init=False, repr=False)
    _children: tuple[dict[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        scores = self.scores or (0.0,) * n
        if n == 0 or len(self.parents) != n or len(scores) != n:
            raise ValueError(f"a tree needs one parent and one score a token, got {n} tokens, "
                             f"{len(self.parents)} parents, {len(scores)} scores")  # fmt: skip
        if self.parents[0] != -1:
            raise ValueError(f"the root's parent is -1, got {self.parents[0]}")
        depths = [0] * n
        children: list[dict[int, int]] = [{} for _ in range(n)]
        for node in range(1, n):
            token, parent = self.tokens[node], self.parents[node]
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before their children")
            if token in children[parent]:
                raise ValueError(f"nodes {children[parent][token]} and {node} are siblings with one token {token}")
            depths[node] = depths[parent] + 1
            children[parent][token] = node
        if self.laws and self.laws.keys() != {node for node in range(n) if children[node]}:
            raise ValueError(f"a tree of drawn nodes has a law for each node with children, got {sorted(self.laws)}")
        object.__setattr__(self, "scores", tuple(scores))
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "_children", tuple(children))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """The tree in which every token follows the one before it: a prompt, or one plain decoding step."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, or None."""
        return self._children[node].get(token)

    def children(self, node: int) -> list[int]:
        """Children of `node` in node order."""
        return list(self._children[node].values())

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def without_laws(self) -> Tree:
        """The same nodes, without the numbers that they were drawn from: no longer fit to be verified by them."""
        return replace(self, laws={}) if self.laws else self

    def leaves(self) -> list[int]:
        """Nodes without children, in node order."""
        return [node for node in range(len(self)) if not self._children[node]]

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def ancestor_mask(self) -> Tensor:
        """[N, N] bool: row r may see column c where c is r itself or one of its ancestors."""
        n = len(self)
        if self.is_chain:
            return torch.ones(n, n, dtype=torch.bool).tril()
        mask_NN = torch.eye(n, dtype=torch.bool)
        for node in range(1, n):
            mask_NN[node] |= mask_NN[self.parents[node]]
        return mask_NN

    def best(self, num_draft_nodes: int) -> Tree:
        """The root and the `num_draft_nodes` draft nodes of the highest score, renumbered in their old order."""
        return self.select(self.tokens, self.parents, self.scores, best_nodes(self.scores, num_draft_nodes))

    @classmethod
    def select(
        cls, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], kept: Sequence[int]
    ) -> Tree:
        """The tree of the nodes `kept` (ascending, the root first, closed under parents) of a larger one."""
        new_number = {old: new for new, old in enumerate(kept)}
        new_number[-1] = -1
        return cls(
            tuple([tokens[node] for node in kept]),
            tuple([new_number[parents[node]] for node in kept]),
            tuple([scores[node] for node in kept]),
        )


def best_nodes(scores: Sequence[float], num_draft_nodes: int) -> list[int]:
    """The root and the `num_draft_nodes` other nodes of the highest score, ascending.

    A child's score never exceeds its parent's, and among equal scores the earlier node wins; a parent stands before its
    child, so the choice is closed under parents even where a child has exactly its parent's score.
    """
    order = sorted(range(1, len(scores)), key=scores.__getitem__, reverse=True)  # stable: equal scores keep their order
    return [0, *sorted(order[:num_draft_nodes])]
