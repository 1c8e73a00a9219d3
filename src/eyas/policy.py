"""The policy's seam: what eyas asks of the shape of a tree.

A policy says how many candidates a node may have, which of them are recorded, which are expanded next, and which nodes
survive; `policies.grow` asks the drafter level by level. A pilot chooses the policies of an answer's rounds. Levels are
draft forwards (the pass over verified tokens is the first); nodes are draft nodes, the root not counted. Policies never
see a model, drafters never see a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eyas.sampling import Sampling
from eyas.tree import Tree

RankPath = tuple[int, ...]  # (a, b): the b-th best token after the a-th best one, counted from 0


@dataclass(frozen=True)
class Level:
    """The nodes that one draft forward recorded, in order: scores, and rank paths for policies that go by rank."""

    scores: list[float]
    paths: list[RankPath]


class Policy(ABC):
    """The shape of a tree, before and while it grows."""

    @property
    @abstractmethod
    def levels(self) -> int:
        """Draft forwards, at most."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Candidates asked for below each node."""

    @abstractmethod
    def expands(self, level: Level) -> list[int]:
        """Places in `level` of the nodes to go on from, in the order in which the drafter sees them."""

    def records(self, path: RankPath) -> bool:
        """Does the candidate at this rank path become a node? Asked only where `by_rank` says so."""
        return True

    def survivors(self, scores: Sequence[float]) -> Sequence[int]:
        """The nodes, root first, that are verified."""
        return range(len(scores))

    def check(self, sampling: Sampling) -> None:  # noqa: B027 (no abstract method: most policies run under all)
        """Refuse settings under which this policy has no trees.

        Raises:
            InputError: there are none.
        """

    def pilot(self) -> Pilot:
        """Who chooses the policies of one answer's rounds: this one, every time."""
        return _Always(self)

    by_rank = False  # do `records` and `expands` want rank paths? They cost time
    by_value = False  # are nodes chosen by path value (EAGLE-2)?
    keyed = True  # does drafted output equal plain output token for token, or only in its law?


class Pilot(Protocol):
    """Chooses the policy of each round of one answer, knowing what became of the rounds before."""

    def choose(self) -> Policy | None:
        """The next round's; None for a plain round: no draft, one token."""
        ...

    def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
        """The tree that was verified; its nodes that held, the root first; how many nodes were expanded for each level
        after the first."""
        ...


@dataclass(frozen=True)
class _Always:
    policy: Policy

    def choose(self) -> Policy:
        return self.policy

    def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
        pass


class Prices(Protocol):
    """What rounds cost, in milliseconds (`costs.Costs`): what pilots go by that weigh tokens against time."""

    @property
    def absorb(self) -> float:
        """A token that the drafter takes in many at a time."""
        ...

    def level_ms(self, rows: float) -> float:
        """A draft level after the first, which expands so many nodes."""
        ...

    def round_ms(self, nodes: float, rows: Sequence[int]) -> float:
        """A whole round, with a tree of so many nodes to verify and so many expanded for each level after the first."""
        ...

    def plain_ms(self) -> float:
        """A whole plain round."""
        ...
