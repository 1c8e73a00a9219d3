"""How a draft tree grows: `Chain`, `Static` (EAGLE-1) and `Dynamic` (EAGLE-2, arXiv 2406.16858, section 4).

A policy says how many candidates a node may have, which of them are recorded, which are expanded next, and which nodes
survive; `grow` asks the drafter level by level. Levels are draft forwards (the pass over verified tokens is the first);
nodes are draft nodes, the root not counted. Policies never see a model, drafters never see a policy.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from eyas.drafters.base import Candidates, Drafter
from eyas.errors import InputError, one_line
from eyas.tree import Tree, best_nodes

StateT = TypeVar("StateT")
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

    by_rank = False  # do `records` and `expands` want rank paths? They cost time


@dataclass(frozen=True)
class Chain(Policy):
    """The best token after the best token: `length` of them."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"a chain needs at least 1 level, got {self.length}")

    def __str__(self) -> str:
        return f"chain:{self.length}"

    @property
    def levels(self) -> int:
        return self.length

    @property
    def width(self) -> int:
        return 1

    def expands(self, level: Level) -> list[int]:
        return list(range(len(level.scores)))


@dataclass(frozen=True)
class Static(Policy):
    """A fixed shape: the rank paths of its nodes, every path with all its beginnings (EAGLE-1, appendix A)."""

    paths: tuple[RankPath, ...]
    name: str = "static"
    _recorded: frozenset[RankPath] = field(init=False, repr=False, compare=False)
    _inner: frozenset[RankPath] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        recorded = frozenset(self.paths)
        if not self.paths or len(recorded) != len(self.paths):
            raise InputError("a static tree is a list of distinct rank paths, with at least one")
        for path in self.paths:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in recorded):
                raise InputError(f"the static tree has the path {list(path)}, whose ranks must be 0 or more and whose "
                                 f"beginning must be a path of the tree too")  # fmt: skip
        object.__setattr__(self, "_recorded", recorded)
        object.__setattr__(self, "_inner", frozenset(path[:-1] for path in recorded))

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_json(cls, text: str, name: str) -> Static:
        """A tree from a JSON list of rank paths."""
        try:
            paths = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: {one_line(error)}") from error
        lists = isinstance(paths, list) and all(isinstance(path, list) for path in paths)
        if not lists or not all(type(rank) is int for path in paths for rank in path):
            raise InputError(f"{name}: a static tree is a JSON list of rank paths like [[0], [1], [0, 0]]")
        return cls(tuple(map(tuple, paths)), name)

    @property
    def levels(self) -> int:
        return max(len(path) for path in self.paths)

    @property
    def width(self) -> int:
        return max(path[-1] for path in self.paths) + 1

    def records(self, path: RankPath) -> bool:
        return path in self._recorded

    def expands(self, level: Level) -> list[int]:
        return [place for place, path in enumerate(level.paths) if path in self._inner]

    by_rank = True


@dataclass(frozen=True)
class Dynamic(Policy):
    """Expand the `top_k` nodes of the highest path value at each level, then keep the best `nodes` of all (EAGLE-2).

    The value of a node is the product of draft confidences along its path, an estimate of the chance that the target
    accepts the whole path. EAGLE's own setting (total_token 60, depth 7, top_k 10) is levels=8, top_k=10, nodes=59.
    """

    num_levels: int = 6
    top_k: int = 8
    nodes: int = 24

    def __post_init__(self) -> None:
        if min(self.num_levels, self.top_k, self.nodes) < 1:
            raise InputError(f"a dynamic tree needs levels, top_k and nodes of at least 1, got {self}")

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


def grow(
    policy: Policy, drafter: Drafter[StateT], state: StateT, root: int, first: Candidates, max_levels: int
) -> Tree:
    """A tree below the token `root`: expand level by level, then prune (rerank).

    `first` are the candidates that `observe` returned for the root's children; `max_levels` clips the policy to what
    the token budget and the context still allow.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    paths: list[RankPath] = [()]  # kept up only for policies that go by rank
    frontier = [0]  # nodes whose candidates the drafter has just given
    candidates = first
    levels = min(policy.levels, max_levels)
    next_row = 0  # rows of the drafter in this round: 0 gave `first`, then one for each expanded node
    for number in range(1, levels + 1):
        begin = len(tokens)
        rows: list[int] = []  # by new node: the row that proposed it
        token_lists, logprob_lists = candidates.tokens_KW.tolist(), candidates.logprobs_KW.tolist()
        for k, node in enumerate(frontier):
            below, logprobs = token_lists[k], logprob_lists[k]
            if -math.inf in logprobs:  # fewer candidates than the others have
                num = logprobs.index(-math.inf)
                below, logprobs = below[:num], logprobs[:num]
            if policy.by_rank:
                ranks = [rank for rank in range(len(below)) if policy.records((*paths[node], rank))]
                paths += [(*paths[node], rank) for rank in ranks]
                below, logprobs = [below[rank] for rank in ranks], [logprobs[rank] for rank in ranks]
            score = scores[node]
            tokens += below
            scores += [score + min(logprob, 0.0) for logprob in logprobs]  # rounding must not lift a child over it
            parents += [node] * len(below)
            rows += [next_row + k] * len(below)
        next_row += len(frontier)
        if number == levels:
            break
        chosen = policy.expands(Level(scores[begin:], paths[begin:]))
        if not chosen:
            break
        frontier = [begin + place for place in chosen]
        candidates = drafter.expand(state, [rows[p] for p in chosen], [tokens[n] for n in frontier], policy.width)
    return Tree.select(tokens, parents, scores, policy.survivors(scores))


def parse_policy(text: str) -> Policy:
    """`chain:K`, `static`, `static:FILE` or `dynamic[:levels=6,top_k=8,nodes=24]` (omitted keys take these values).

    Raises:
        InputError: anything else, a file that cannot be read, or a tree that cannot be.
    """
    kind, _, rest = text.partition(":")
    if kind == "chain" and rest.isdecimal():
        return Chain(int(rest))
    if kind == "static":
        return _static(rest)
    if kind == "dynamic":
        return _dynamic(rest)
    raise InputError(f"unknown tree {text!r}: give chain:K, static, static:FILE or dynamic:levels=6,top_k=8,nodes=24")


def _static(file: str) -> Static:
    if not file:
        return Static.from_json((files("eyas") / "trees" / "eagle1.json").read_text(), "static")
    try:
        return Static.from_json(Path(file).read_text(), f"static:{file}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the tree file {file!r}: {error}") from error


def _dynamic(text: str) -> Dynamic:
    values = {"levels": 6, "top_k": 8, "nodes": 24}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in values or not value.isdecimal():
            raise InputError(f"unknown tree setting {item!r}: dynamic takes {', '.join(f'{k}=N' for k in values)}")
        values[key] = int(value)
    return Dynamic(values["levels"], values["top_k"], values["nodes"])
