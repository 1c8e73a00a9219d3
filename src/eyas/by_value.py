"""Trees that grow by value: `Dynamic` (EAGLE-2, arXiv 2406.16858, section 4), and `Adaptive`, which weighs time too.

The value of a node is the product of draft confidences along its path, an estimate of the chance that the target
accepts the whole path. An adaptive tree drafts a level, or verifies a node, where that is expected to bring more tokens
than the same time brings on average in this answer. At the best average this maximises tokens over time (Dinkelbach
1967, on fractional programming). Cost-aware draft trees: arXiv 2510.26577; by value alone, OPT-Tree: arXiv 2406.17276.
All of it follows from given prices and from what the answer has accepted, nothing from a clock: a run can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.errors import InputError
from eyas.policy import Level, Pilot, Policy, Prices
from eyas.tree import Tree, best_nodes

_MOST_EXPANDED, _MOST_VERIFIED = 1024, 10_000  # nodes of a dynamic tree: each level grows top_k² before pruning
_FADE = 0.95  # of what was learned, from round to round: a memory of 20 rounds


@dataclass(frozen=True)
class Dynamic(Policy):
    """Expand the `top_k` nodes of the highest path value at each level, then keep the best `nodes` of all (EAGLE-2).

    EAGLE's own setting (total_token 60, depth 7, top_k 10) is levels=8, top_k=10, nodes=59.
    """

    num_levels: int = 6
    top_k: int = 8
    nodes: int = 24

    def __post_init__(self) -> None:
        if (
            min(self.num_levels, self.top_k, self.nodes) < 1
            or self.top_k > _MOST_EXPANDED
            or self.nodes > _MOST_VERIFIED
        ):
            raise InputError(f"a dynamic tree needs levels, top_k (up to {_MOST_EXPANDED}) and nodes (up to "
                             f"{_MOST_VERIFIED}) of at least 1, got {self}")  # fmt: skip

    def __str__(self) -> str:
        return f"dynamic:levels={self.num_levels},top_k={self.top_k},nodes={self.nodes}"

    @property
    def levels(self) -> int:
        return self.num_levels

    @property
    def width(self) -> int:
        return self.top_k

    def expands(self, level: Level) -> list[int]:
        return sorted(range(len(level.scores)), key=level.scores.__getitem__, reverse=True)[: self.top_k]  # stable

    def survivors(self, scores: Sequence[float]) -> Sequence[int]:
        return best_nodes(scores, self.nodes)

    by_value = True


@dataclass(frozen=True)
class Adaptive(Policy):
    """A dynamic tree that is only as deep, wide and large as pays in its round: never more than `most`.

    Outside of a pilot it is `most`.
    """

    most: Dynamic = Dynamic(8, 10, 59)
    prices: Prices | None = None  # None: not known yet

    def __str__(self) -> str:
        return str(self.most).replace("dynamic", "adaptive")

    @property
    def levels(self) -> int:
        return self.most.levels

    @property
    def width(self) -> int:
        return self.most.width

    def expands(self, level: Level) -> list[int]:
        return self.most.expands(level)

    def survivors(self, scores: Sequence[float]) -> Sequence[int]:
        return self.most.survivors(scores)

    def pilot(self) -> Pilot:
        if self.prices is None:
            raise InputError(f"the tree {self} weighs what rounds cost on this machine, and that has not been measured")
        return _Weighing(self.most, self.prices)

    by_value = True


@dataclass
class Share:
    """A running ratio with a fading memory; it begins with what is taken for granted."""

    above: float
    below: float

    def add(self, above: float, below: float) -> None:
        self.above, self.below = _FADE * self.above + above, _FADE * self.below + below

    @property
    def value(self) -> float:
        return self.above / self.below


@dataclass(frozen=True)
class Weighed(Policy):
    """The tree of one round: a node or a level for each that pays."""

    most: Dynamic
    rate: float  # tokens a millisecond: what time is worth
    trust: float  # path values times this are chances
    hope: float  # the chance that a candidate holds below a node that holds
    level_ms: Sequence[float]  # by expanded rows, from 0
    node_ms: Sequence[float]  # by verified nodes, from 0: on top of a round without any

    @property
    def levels(self) -> int:
        return self.most.levels

    @property
    def width(self) -> int:
        return self.most.width

    def expands(self, level: Level) -> list[int]:
        order = self.most.expands(level)
        each = self.node_ms[-1] / self.most.nodes  # an expanded node makes one to verify, if it is to be of use
        best, num, tokens = 0.0, 0, 0.0
        for rows, place in enumerate(order, start=1):
            tokens += self.trust * math.exp(level.scores[place]) * self.hope
            gain = tokens - self.rate * (self.level_ms[rows] + rows * each)
            if gain > best:
                best, num = gain, rows
        return order[:num]

    def survivors(self, scores: Sequence[float]) -> Sequence[int]:
        best, num, tokens = 0.0, 0, 0.0
        for nodes, score in enumerate(sorted(scores[1:], reverse=True)[: self.most.nodes], start=1):
            tokens += self.trust * math.exp(score)
            gain = tokens - self.rate * self.node_ms[nodes]
            if gain > best:
                best, num = gain, nodes
        return best_nodes(scores, num)


class _Weighing:
    """What one answer has taught so far. It begins with values that are trusted, every second level accepted, and
    rounds half as fast again as plain ones; each of these counts for about four rounds."""

    def __init__(self, most: Dynamic, prices: Prices) -> None:
        self._most, self._prices, self._plain_rate = most, prices, 1 / prices.plain_ms()
        self._trust, self._hope = Share(4.0, 4.0), Share(2.0, 4.0)
        self._rate = Share(6.0, 4.0 / self._plain_rate)
        none = prices.round_ms(0, ())
        self._node_ms = [prices.round_ms(nodes, ()) - none for nodes in range(most.nodes + 1)]
        self._level_ms = [prices.level_ms(rows) for rows in range(most.top_k + 1)]

    def choose(self) -> Policy:
        rate = max(self._rate.value, self._plain_rate)  # plain decoding can always be had
        return Weighed(self._most, rate, self._trust.value, self._hope.value, self._level_ms, self._node_ms)

    def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
        accepted = len(path) - 1
        self._trust.add(accepted, sum(map(math.exp, tree.scores[1:])))
        self._hope.add(accepted, sum(bool(tree.children(node)) for node in path))
        self._rate.add(len(path), self._prices.round_ms(len(tree) - 1, rows))
