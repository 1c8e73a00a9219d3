"""What other trees would have made of an answer, from one recording of the drafter's guesses.

At temperature 0, and above it with keyed noise, the target's text is the same whatever the tree; what a drafter guesses
depends on the verified text alone. So a trace holds the guesses at every place of the answer, all that some trees ask
for; a replay grows a tree from them by the very code that decoding grows it with, follows the text, and goes on where
that round ends: the rounds are those of a live run. A trace needs one pass of the target over the text, and no tree is
pruned in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from eyas.drafters.base import Candidates, Drafter
from eyas.errors import InputError
from eyas.generate import Request, Round, read
from eyas.measure import Answer
from eyas.policies import Level, Policy, RankPath, grow
from eyas.targets.base import Target
from eyas.tree import Tree
from eyas.verify import FinishReason

CacheT = TypeVar("CacheT")
StateT = TypeVar("StateT")
Path = tuple[int, ...]  # the tokens from below the root to a node; empty for the root


class NotInTrace(ValueError):
    """A tree asks for guesses that the trace does not hold: it needs a wider or deeper one."""


@dataclass(frozen=True)
class Guesses:
    """What the drafter named at one place of the answer: candidates below the root and below each expanded node."""

    width: int  # asked for; a row that is shorter has no more
    below: dict[Path, tuple[list[int], list[float]]] = field(default_factory=dict)  # tokens and log-probabilities

    def candidates(self, paths: Sequence[Path], width: int) -> Candidates:
        """The best `width` below each node, as a drafter gives them."""
        missing = [path for path in paths if path not in self.below]
        if missing or (width > self.width and any(len(self.below[path][0]) == self.width for path in paths)):
            raise NotInTrace(f"the trace has up to {self.width} candidates below {len(self.below)} nodes; the tree "
                             f"asks for {width} below the tokens {[*(missing or paths)[0]]}")  # fmt: skip
        rows = [(tokens[:width], logprobs[:width]) for tokens, logprobs in map(self.below.__getitem__, paths)]
        most = max((len(tokens) for tokens, _ in rows), default=0)
        return Candidates(
            torch.tensor([tokens + [0] * (most - len(tokens)) for tokens, _ in rows], dtype=torch.int64),
            torch.tensor([logprobs + [-torch.inf] * (most - len(logprobs)) for _, logprobs in rows]),
        )

    def record(self, paths: Sequence[Path], given: Candidates) -> None:
        rows = zip(given.tokens_KW.tolist(), given.logprobs_KW.tolist(), strict=True)
        for path, (tokens, logprobs) in zip(paths, rows, strict=True):
            num = logprobs.index(-torch.inf) if -torch.inf in logprobs else len(logprobs)
            self.below[path] = (tokens[:num], logprobs[:num])


@dataclass(frozen=True)
class Trace:
    """One answer, and the drafter's guesses at each place of it."""

    tokens: list[int]
    finish_reason: FinishReason | None
    max_new_tokens: int  # what the answer was given: near its end no level is drafted that could not be delivered
    guesses: list[Guesses]  # by place of the root in `tokens`; none at the last one


@dataclass
class _Rows:
    """The path of the node at each row of a round."""

    paths: list[Path] = field(default_factory=lambda: [()])

    def deeper(self, rows: Sequence[int], tokens: Sequence[int]) -> list[Path]:
        new = [(*self.paths[row], token) for row, token in zip(rows, tokens, strict=True)]
        self.paths += new
        return new


@dataclass(frozen=True)
class _Recording(Generic[StateT]):
    """A drafter in one round, and what it guesses there."""

    drafter: Drafter[StateT]
    guesses: Guesses
    rows: _Rows = field(default_factory=_Rows)

    def expand(self, state: StateT, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        given = self.drafter.expand(state, rows, tokens, width)
        self.guesses.record(self.rows.deeper(rows, tokens), given)
        return given


@dataclass(frozen=True)
class Recalled:
    """What was guessed in one round, as a drafter of its own."""

    guesses: Guesses
    rows: _Rows = field(default_factory=_Rows)

    def expand(self, state: None, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        return self.guesses.candidates(self.rows.deeper(rows, tokens), width)


class _Union(Policy):
    """Expands what any of several policies would; one object serves one round.

    A wider dynamic tree need not contain a narrower one: a node among the best of the narrow one's few may be none of
    the best among the wide one's many. So each policy keeps its own frontier, and sees its own candidates only.
    """

    by_rank = True

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = policies
        self._frontiers: list[list[RankPath]] = [[()] for _ in policies]
        self._number = 0

    @property
    def levels(self) -> int:
        return max(policy.levels for policy in self._policies)

    @property
    def width(self) -> int:
        return max(policy.width for policy in self._policies)

    def expands(self, level: Level) -> list[int]:
        self._number += 1
        place = {path: i for i, path in enumerate(level.paths)}
        below: dict[RankPath, list[RankPath]] = {}
        for path in level.paths:
            below.setdefault(path[:-1], []).append(path)
        for m, policy in enumerate(self._policies):
            grown = [path for parent in self._frontiers[m] for path in below.get(parent, ())]
            own = [path for path in grown if path[-1] < policy.width and policy.records(path)]
            last = self._number >= policy.levels
            chosen = [] if last else policy.expands(Level([level.scores[place[path]] for path in own], own))
            self._frontiers[m] = [own[i] for i in chosen]
        return sorted({place[path] for frontier in self._frontiers for path in frontier})


def trace(
    target: Target[CacheT],
    drafter: Drafter[StateT],
    request: Request,
    answer: Answer,
    policies: Sequence[Policy],
) -> Trace:
    """What the drafter guesses at every place of an answer that the target gave to `request`, under any tree or none.

    The trace contains the trees of `policies`, and others that happen to lie inside of them.

    Raises:
        InputError: one of them draws its trees at random.
    """
    for policy in policies:
        _check(policy)
    text, tokens = [*request.prompt, *answer.tokens], answer.tokens
    hidden_TLD = read(target, target.new_cache(), text[:-1], drafter.reads).hidden_NLD
    budget = min(request.stop.max_new_tokens, target.spec.max_length - len(request.prompt))
    found = Trace(tokens, answer.rounds[-1].finish_reason, budget, [])
    state, seen = drafter.new_state(text[0]), 1
    for place in range(len(tokens) - 1):
        end, union = len(request.prompt) + place + 1, _Union(policies)
        first = drafter.observe(state, text[seen:end], hidden_TLD[seen - 1 : end - 1], union.width)
        seen = end
        guesses = Guesses(union.width)
        guesses.record([()], first)
        grow(union, _Recording(drafter, guesses), state, text[end - 1], first, levels_left(found, place))
        found.guesses.append(guesses)
    return found


def replay(trace: Trace, policy: Policy) -> Answer:
    """The rounds that decoding under `policy` would have had: trees, paths and tokens; no logits and no times.

    Raises:
        NotInTrace: `policy` has trees that the trace does not contain.
        InputError: `policy` draws its trees at random, and decoding under it has a text of its own.
    """
    _check(policy)
    tokens = trace.tokens
    rounds = [Round(None, [], tokens[:1], None, None, 0.0, 0.0, 0.0)]
    place = 0  # of the root
    while place < len(tokens) - 1:
        recalled = Recalled(trace.guesses[place])
        first = recalled.guesses.candidates([()], policy.width)
        tree = grow(policy, recalled, None, tokens[place], first, levels_left(trace, place))
        path = follow(tree, tokens[place + 1 :])
        delivered = tokens[place + 1 : place + 1 + len(path)]  # the target's own token at the end of the path too
        rounds.append(Round(tree, path, delivered, None, None, 0.0, 0.0, 0.0))
        place += len(delivered)
    return Answer([*rounds[:-1], replace(rounds[-1], finish_reason=trace.finish_reason)], seconds=0.0)


def _check(policy: Policy) -> None:
    if not policy.keyed:
        raise InputError(f"the tree {policy} is drawn anew in every run: no trace contains it")


def levels_left(trace: Trace, place: int) -> int:
    """Levels that the budget can deliver below the root at `place`: n of them deliver up to n + 1 tokens."""
    return trace.max_new_tokens - (place + 1) - 1


def follow(tree: Tree, tokens: Sequence[int]) -> list[int]:
    """The nodes from the root on that carry `tokens`, as far as there are any."""
    path = [0]
    for token in tokens:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return path
