"""How many tokens a forward of the target is worth, from acceptance: formulas for chains and trees.

E[tau] = 1 + the sum over draft nodes of the chance that the whole path to the node is accepted; the 1 is the token that
the target adds. For a chain of g tokens, each accepted with chance a, that is (1 - a^(g+1)) / (1 - a) (Leviathan et al.
2023, arXiv 2211.17192, section 3.1). Siblings can be counted in two ways, and both are given by name. *Independent*, as
textbooks have it: each of b candidates holds with chance a, so one of them does with 1 - (1 - a)^b. *Exclusive*, as it
is: the candidates below a node are tokens of one distribution; one of them comes true with the sum of their shares.
Every depth is taken to be accepted independently of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.drafters.base import Candidates
from eyas.errors import InputError
from eyas.policies import Policy, grow
from eyas.tree import Tree

_MOST_RANKS = 1024  # below one node: no tree of use is wider


@dataclass(frozen=True)
class Shares:
    """How often the candidate of each rank (columns, the best first) is accepted at each depth (rows, from 1).

    Depths below the last row are like it. What the ranks that are not listed would be is not known: between nothing
    and all that the listed ones leave.

    Raises:
        InputError: a share outside 0 to 1, or more than 1 together; no share.
    """

    by_depth: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for row in self.by_depth:
            if not row or not all(0 <= share <= 1 for share in row) or sum(row) > 1 + 1e-9:
                raise InputError(f"acceptance by rank must be numbers from 0 to 1 that exclude each other, so with a "
                                 f"sum of at most 1, got {', '.join(f'{share:g}' for share in row)}")  # fmt: skip
        if not self.by_depth:
            raise InputError("no acceptance was measured: the row has no tree")

    @classmethod
    def measured(cls, by_depth: Sequence[Sequence[float]]) -> Shares:
        """From a row of `eyas bench`. A rank was counted where it was there: where a tree keeps a second candidate only
        in doubt, its count is high. Later ranks get no more than earlier ones leave."""
        rows: list[tuple[float, ...]] = []
        for row in by_depth:
            left, cut = 1.0, []
            for share in row:
                cut.append(min(share, left))
                left -= cut[-1]
            rows.append(tuple(cut))
        return cls(tuple(rows))

    def _row(self, depth: int) -> tuple[float, ...]:
        return self.by_depth[min(depth, len(self.by_depth)) - 1]

    def first(self, depth: int) -> float:
        """The share of the best candidate."""
        return self._row(depth)[0]

    def least(self, depth: int, rank: int) -> float:
        """The share of a rank, if ranks that are not listed have none."""
        row = self._row(depth)
        return row[rank] if rank < len(row) else 0.0

    def most(self, depth: int, rank: int) -> float:
        """The share of a rank, if the first that is not listed has all that is left."""
        row = self._row(depth)
        return max(1.0 - sum(row), 0.0) if rank == len(row) else self.least(depth, rank)

    def confidence(self, depth: int, rank: int) -> float:
        """What shapes a dynamic tree here: listed shares, then ever smaller parts of what they leave."""
        row = self._row(depth)
        if rank < len(row):
            return row[rank]
        return max(1.0 - sum(row), 0.0) * row[0] * (1 - row[0]) ** (rank - len(row))


def chain(alpha: float, length: int) -> float:
    """The closed form for a chain."""
    return length + 1.0 if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def at_least_one(alpha: float, candidates: int) -> float:
    """The chance that one of some independent candidates holds."""
    return 1 - (1 - alpha) ** candidates


@dataclass(frozen=True)
class _Ranks:
    """A drafter whose tokens are their own ranks and whose confidences are shares."""

    shares: Shares

    def below(self, depth: int, num: int, width: int) -> Candidates:
        confidences = [max(self.shares.confidence(depth, rank), 1e-30) for rank in range(width)]
        return Candidates(torch.arange(width).expand(num, -1), torch.tensor(confidences).log().expand(num, -1))

    def expand(self, state: list[int], rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        state[0] += 1
        return self.below(state[0], len(rows), width)


def shape(policy: Policy, shares: Shares) -> Tree:
    """The tree that a policy grows where confidences are the shares: its tokens are ranks. Only a dynamic tree's shape
    depends on them, and in decoding it differs from round to round.

    Raises:
        InputError: the policy draws its trees at random, or is too wide.
    """
    if not policy.keyed:
        raise InputError(f"the tree {policy} is drawn at random: no formula here is about it")
    if policy.width > _MOST_RANKS:
        raise InputError(f"the tree {policy} has more than {_MOST_RANKS} candidates below a node")
    drafter = _Ranks(shares)
    return grow(policy, drafter, [1], 0, drafter.below(1, 1, policy.width), policy.levels)


def expected(tree: Tree, chance: Callable[[int, int], float]) -> float:
    """E[tau] of a tree whose node of token r at depth d is accepted with `chance(d, r)` where its parent was."""
    reached = [1.0]
    for node in range(1, len(tree)):
        reached.append(reached[tree.parents[node]] * chance(tree.depths[node], tree.tokens[node]))
    return math.fsum(reached)


@dataclass(frozen=True)
class Expectation:
    """E[tau] of a tree in both forms."""

    tree: str
    levels: int
    nodes: int
    independent: float
    exclusive: float  # with no share for ranks that are not listed
    exclusive_most: float  # with all that is left


def expect(policy: Policy, shares: Shares) -> Expectation:
    """Both forms for a policy's tree; errors as `shape`."""
    tree = shape(policy, shares)
    place = {child: place for node in range(len(tree)) for place, child in enumerate(tree.children(node))}
    reached = [1.0]  # with independent candidates: the first sibling that holds is taken
    for node in range(1, len(tree)):
        alpha = shares.first(tree.depths[node])
        reached.append(reached[tree.parents[node]] * alpha * (1 - alpha) ** place[node])
    return Expectation(
        tree=str(policy),
        levels=max(tree.depths),
        nodes=len(tree) - 1,
        independent=math.fsum(reached),
        exclusive=expected(tree, shares.least),
        exclusive_most=expected(tree, shares.most),
    )


@dataclass(frozen=True)
class Example:
    """The textbook's example: two levels, and `width` independent candidates in place of one."""

    alpha: float
    width: int
    chain_reaches_depth_2: float
    one_level: float  # one of the candidates holds
    widened_at_depth_2: float
    widened_at_both: float


def example(alpha: float, width: int = 3) -> Example:
    level = at_least_one(alpha, width)
    return Example(alpha, width, alpha**2, level, alpha * level, level**2)
