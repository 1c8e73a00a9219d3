"""How a draft tree grows: `grow`, and the shapes by their names. Here are `Chain`, `Static` (EAGLE-1) and `Sampled`;
trees that grow by value are in `by_value`.

A sampled tree is drawn instead of chosen, and carries the laws that it was drawn from (`verify.accept_many`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Protocol, TypeVar

from eyas.by_value import Adaptive, Dynamic
from eyas.drafters.base import Candidates
from eyas.errors import InputError, one_line
from eyas.policy import Level, Policy, RankPath
from eyas.sampling import Sampling
from eyas.tree import DraftLaw, Tree

StateT = TypeVar("StateT")
StateT_contra = TypeVar("StateT_contra", contravariant=True)
_ALL = (1 << 31) - 1  # a width that no draft vocabulary reaches: drafters give what they have
_MOST_NODES = 1024  # of a sampled tree, whose size is a power of its levels


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
        return min(max(path[-1] for path in self.paths) + 1, _ALL)

    def records(self, path: RankPath) -> bool:
        return path in self._recorded

    def expands(self, level: Level) -> list[int]:
        return [place for place, path in enumerate(level.paths) if path in self._inner]

    by_rank = True


@dataclass(frozen=True)
class Sampled(Policy):
    """`num_children` tokens drawn from q, without replacement, below every node of every level (EAGLE-1's way at
    temperatures above 0; RSD-S in arXiv 2402.14160).

    All are expanded and none is pruned: what is verified must not depend on what was drawn, else the children would no
    longer have the law q, and the accept rule would not be exact.
    """

    num_levels: int = 3
    num_children: int = 2

    def __post_init__(self) -> None:
        if min(self.num_levels, self.num_children) < 1:
            raise InputError(f"a sampled tree needs levels and width of at least 1, got {self}")
        small = max(self.num_levels, self.num_children) <= _MOST_NODES
        if not small or sum(self.num_children**level for level in range(1, self.num_levels + 1)) > _MOST_NODES:
            raise InputError(f"a sampled tree keeps all of its nodes, at most {_MOST_NODES}, and {self} has more")

    def __str__(self) -> str:
        return f"sampled:levels={self.num_levels},width={self.num_children}"

    @property
    def levels(self) -> int:
        return self.num_levels

    @property
    def width(self) -> int:
        return _ALL  # q whole: a draw from the best few would have another law

    def expands(self, level: Level) -> list[int]:
        return list(range(len(level.scores)))

    def check(self, sampling: Sampling) -> None:
        if sampling.temperature == 0:
            raise InputError(f"the tree {self} is drawn at random and needs a temperature above 0, got 0: "
                             f"give --temperature, or another tree")  # fmt: skip

    keyed = False


class Expands(Protocol[StateT_contra]):
    """What `grow` asks of a drafter (`Drafter.expand`)."""

    def expand(self, state: StateT_contra, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates: ...


@dataclass
class Growth:
    """What growing a tree took."""

    marks: list[float]  # the time (`time.perf_counter`) at which each level stood, after that of the beginning
    rows: list[int] = field(default_factory=list)  # nodes expanded for each level after the first


def grow(
    policy: Policy,
    drafter: Expands[StateT],
    state: StateT,
    root: int,
    first: Candidates,
    max_levels: int,
    sampling: Sampling | None = None,
    position: int = 0,
    growth: Growth | None = None,
) -> Tree:
    """A tree below the token `root`: expand level by level, then prune (rerank).

    `first` are the candidates that `observe` returned for the root's children; `max_levels` clips the policy to what
    the token budget and the context still allow. `sampling` and `position`, that of the root's children, are what a
    `Sampled` tree is drawn with. `growth` is written.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    paths: list[RankPath] = [()]  # kept up only for policies that go by rank
    laws: dict[int, DraftLaw] = {}  # filled only where nodes are drawn
    frontier = [0]  # nodes whose candidates the drafter has just given
    candidates = first
    levels = min(policy.levels, max_levels)
    next_row = 0  # rows of the drafter in this round: 0 gave `first`, then one for each expanded node
    for number in range(1, levels + 1):
        begin = len(tokens)
        rows: list[int] = []  # by new node: the row that proposed it
        if isinstance(policy, Sampled):
            assert sampling is not None, "a sampled tree is drawn with it"
            token_lists, logprob_lists, drawn_from = _draw(policy, candidates, frontier, sampling, position)
            laws |= drawn_from
        else:
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
        if growth is not None:
            growth.marks.append(time.perf_counter())
        if number == levels:
            break
        chosen = policy.expands(Level(scores[begin:], paths[begin:]))
        if not chosen:
            break
        if growth is not None:
            growth.rows.append(len(chosen))
        frontier = [begin + place for place in chosen]
        candidates = drafter.expand(state, [rows[p] for p in chosen], [tokens[n] for n in frontier], policy.width)
    tree = Tree.select(tokens, parents, scores, policy.survivors(scores))
    return replace(tree, laws=laws) if laws else tree  # a drawn tree is not pruned: nodes have kept their numbers


def _draw(
    policy: Sampled, candidates: Candidates, nodes: Sequence[int], sampling: Sampling, position: int
) -> tuple[list[list[int]], list[list[float]], dict[int, DraftLaw]]:
    """The tokens drawn below each node and their log-probabilities; the laws of the nodes that got any."""
    token_lists: list[list[int]] = []
    logprob_lists: list[list[float]] = []
    laws = {}
    for node, tokens_W, logprobs_W in zip(nodes, candidates.tokens_KW, candidates.logprobs_KW, strict=True):
        q_W = sampling.draft_law(logprobs_W)
        law = DraftLaw(tokens_W[q_W > 0], q_W[q_W > 0])
        drawn = sampling.draw_distinct(law.q_W, law.tokens_W, policy.num_children, position, node)
        token_lists.append(law.tokens_W[drawn].tolist())
        logprob_lists.append(law.q_W[drawn].log().tolist())
        if drawn:
            laws[node] = law
    return token_lists, logprob_lists, laws


def parse_policy(text: str) -> Policy:
    """`chain:K`, `static`, `static:FILE`, `dynamic[:levels=6,top_k=8,nodes=24]`,
    `adaptive[:levels=8,top_k=10,nodes=59]` or `sampled[:levels=3,width=2]` (omitted keys take these values).

    Raises:
        InputError: anything else, a file that cannot be read, or a tree that cannot be.
    """
    kind, _, rest = text.partition(":")
    if kind == "chain" and rest.isdecimal() and len(rest) <= 9:
        return Chain(int(rest))
    if kind == "static":
        return _static(rest)
    if kind == "dynamic":
        values = _settings(kind, rest, {"levels": 6, "top_k": 8, "nodes": 24})
        return Dynamic(values["levels"], values["top_k"], values["nodes"])
    if kind == "adaptive":
        values = _settings(kind, rest, {"levels": 8, "top_k": 10, "nodes": 59})
        return Adaptive(Dynamic(values["levels"], values["top_k"], values["nodes"]))
    if kind == "sampled":
        values = _settings(kind, rest, {"levels": 3, "width": 2})
        return Sampled(values["levels"], values["width"])
    raise InputError(f"unknown tree {text!r}: give chain:K, static, static:FILE, dynamic:levels=6,top_k=8,nodes=24, "
                     f"adaptive:levels=8,top_k=10,nodes=59 or sampled:levels=3,width=2")  # fmt: skip


def _static(file: str) -> Static:
    if not file:
        return Static.from_json((files("eyas") / "trees" / "eagle1.json").read_text(), "static")
    try:
        text = Path(file).read_text()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path that cannot be
        raise InputError(f"cannot read the tree file {file!r}: {one_line(error)}") from error
    return Static.from_json(text, f"static:{file}")


def _settings(kind: str, text: str, defaults: Mapping[str, int]) -> dict[str, int]:
    values = dict(defaults)
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in values or not value.isdecimal() or len(value) > 9:
            raise InputError(f"unknown tree setting {item!r}: {kind} takes {', '.join(f'{k}=N' for k in values)}")
        values[key] = int(value)
    return values
