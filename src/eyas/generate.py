"""The round loop: observe, grow, verify, walk, keep; and its slow twin, which defines what is correct.

Both yield one `Round` for each target forward; all else (text, tau, time) is computed from rounds. Refuses to know
tokenizers, files and what the drafter is made of. Legend: N tree nodes, T verified tokens, L states read, D width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from eyas.drafters.base import Drafter
from eyas.errors import InputError
from eyas.policies import Growth, grow
from eyas.policy import Policy
from eyas.sampling import Prefix, Sampling
from eyas.targets.base import Target, Verified
from eyas.tree import Tree
from eyas.verify import FinishReason, Stop, Walk, walk

CacheT = TypeVar("CacheT")
StateT = TypeVar("StateT")

PREFILL_ROWS = 512  # rows of one pass over a prompt: bounds the memory that long prompts take


@dataclass(frozen=True)
class Round:
    """One target forward.

    The first one of an answer is the prompt's own: it has no tree, yields the first token, and counts as no target
    forward in tau.
    """

    tree: Tree | None  # with the draft's cumulative log-probabilities as scores
    path: list[int]  # nodes that held: the root, then the accepted ones
    tokens: list[int]  # delivered by this round
    finish_reason: FinishReason | None  # set in the last round
    logits_TV: Tensor | None  # what each delivered token was drawn from; None where nobody needs it any more
    draft_ms: float
    verify_ms: float
    other_ms: float
    level_ms: tuple[float, ...] = ()  # of draft_ms, by level; the first one absorbs verified tokens too


@dataclass(frozen=True)
class Request:
    """One answer that is asked for."""

    prompt: Sequence[int]
    sampling: Sampling
    stop: Stop


class Memory(Generic[CacheT, StateT]):
    """What the last answer left behind. A prompt that begins with the same tokens, as the next turn of a conversation
    does, is read from where it parts from them."""

    def __init__(self) -> None:
        # text, K/V, draft state and its pairs, the true states of tokens that the drafter has not observed
        self.kept: tuple[list[int], CacheT, StateT | None, int, Tensor] | None = None

    def take(self) -> tuple[list[int], CacheT, StateT | None, int, Tensor] | None:
        """What is kept. It is nobody else's from now on: an answer that is broken off leaves nothing."""
        kept, self.kept = self.kept, None
        return kept


def generate(
    target: Target[CacheT],
    drafter: Drafter[StateT] | None,
    policy: Policy,
    prompt: Sequence[int],
    sampling: Sampling,
    stop: Stop,
    with_logits: bool = True,
    memory: Memory[CacheT, StateT] | None = None,
) -> Iterator[Round]:
    """Decode by drafting and verifying: the tokens of `generate_plain`, in fewer target forwards; under a policy that
    is not `keyed`, tokens of the same law.

    Rounds carry the logits that their tokens were drawn from, and the laws that a tree was drawn from, only
    `with_logits`: copying and keeping them has its cost. `memory` is read and written.

    Raises:
        InputError: the prompt is empty, or fills the target's context; the policy refuses the sampling.
    """
    requests = [Request(prompt, sampling, stop)]
    for _, round_ in generate_many(target, drafter, policy, requests, 1, with_logits, memory):
        yield round_


def generate_many(
    target: Target[CacheT],
    drafter: Drafter[StateT] | None,
    policy: Policy,
    requests: Sequence[Request],
    slots: int,
    with_logits: bool = False,
    memory: Memory[CacheT, StateT] | None = None,
) -> Iterator[tuple[int, Round]]:
    """The rounds of many answers, each with the number of its request; up to `slots` of them share every forward.

    A request is admitted as soon as another one has ended. Its tokens do not depend on what runs beside it: noise is
    keyed by each request's own `Sampling`. Without a drafter every tree is its root alone: plain decoding.

    Raises:
        InputError: a prompt is empty, or fills the target's context; the policy refuses a sampling. Nothing has been
            computed then.
    """
    pool = Pool(target, drafter, policy, with_logits, memory)
    for request in requests:
        pool.check(request)
    admitted = 0
    while admitted < len(requests) or len(pool):
        while admitted < len(requests) and len(pool) < slots:
            yield admitted, pool.admit(admitted, requests[admitted])
            admitted += 1
        yield from pool.step()


class Pool(Generic[CacheT, StateT]):
    """Answers in the making that share every forward: what `generate_many` runs, for callers whose next request depends
    on answers that they have got."""

    def __init__(
        self,
        target: Target[CacheT],
        drafter: Drafter[StateT] | None,
        policy: Policy,
        with_logits: bool = False,
        memory: Memory[CacheT, StateT] | None = None,
    ) -> None:
        self._engine = _Engine(target, drafter, policy, with_logits)
        self._memory = memory
        self._live: dict[int, _Sequence[CacheT, StateT]] = {}

    def __len__(self) -> int:
        """Answers that have not ended."""
        return len(self._live)

    def check(self, request: Request) -> None:
        """Refuse now what `admit` would refuse.

        Raises:
            InputError: see `generate_many`.
        """
        _Sequence(self._engine, request)

    def admit(self, number: int, request: Request) -> Round:
        """Read a prompt: the first round of the answer that goes by this number, which no live one has."""
        assert number not in self._live, f"number {number} is still being answered"
        sequence = _Sequence(self._engine, request)
        round_ = sequence.read_prompt(self._memory)
        if round_.finish_reason is None:
            self._live[number] = sequence
        else:
            sequence.leave(self._memory)
        return round_

    def step(self) -> Iterator[tuple[int, Round]]:
        """One forward over all live answers: a round of each, with its number. Nothing where none is live."""
        if not self._live:
            return
        trees = [sequence.grow() for sequence in self._live.values()]
        clock = _Clock()
        items = [(sequence.cache, tree) for sequence, tree in zip(self._live.values(), trees, strict=True)]
        verified = self._engine.target.verify(items, self._engine.reads)
        share_ms = clock.lap() / len(items)
        for (number, sequence), tree, seen in zip(list(self._live.items()), trees, verified, strict=True):
            round_ = sequence.take(tree, seen, share_ms)
            if round_.finish_reason is not None:
                del self._live[number]
                sequence.leave(self._memory)
            yield number, round_


@dataclass(frozen=True)
class _Engine(Generic[CacheT, StateT]):
    """What all sequences of a call share."""

    target: Target[CacheT]
    drafter: Drafter[StateT] | None
    policy: Policy
    with_logits: bool

    @property
    def reads(self) -> Sequence[int]:
        return () if self.drafter is None else self.drafter.reads


class _Sequence(Generic[CacheT, StateT]):
    """One answer in the making: its text, its caches, and what the drafter has not observed yet."""

    def __init__(self, engine: _Engine[CacheT, StateT], request: Request) -> None:
        if engine.drafter is not None:
            engine.policy.check(request.sampling)
        self._engine = engine
        self._sampling = request.sampling
        self._stop = _within_context(engine.target, request.prompt, request.stop)
        self._num_prompt = len(request.prompt)
        self._tokens = list(request.prompt)
        self._num_pairs = 0  # that the drafter has observed
        self._hidden: list[Tensor] = []
        self._pilot = None if engine.drafter is None else engine.policy.pilot()
        self._draft_ms = 0.0
        self._level_ms: tuple[float, ...] = ()
        self._rows: Sequence[int] = ()  # that were expanded, by level

    def read_prompt(self, memory: Memory[CacheT, StateT] | None) -> Round:
        """The prompt's own forward, which yields the first token."""
        target, clock = self._engine.target, _Clock()
        start = self._begin(memory)
        verified = read(target, self.cache, self._tokens[start:], self._engine.reads)
        verify_ms = clock.lap()
        step = walk(Tree.chain(self._tokens[-1:]), verified.logits_NV, self._sampling, self._prefix, self._stop)
        # what the drafter has not observed: followers[i] comes after the token whose states are row i of `hidden`
        self._hidden.append(verified.hidden_NLD)
        self._followers = [*self._tokens[self._num_pairs + 1 :], *step.tokens]
        return self._deliver(None, [], step, verified.logits_NV, (0.0, verify_ms, clock.lap()))

    def grow(self) -> Tree:
        """Observe what was verified since the last draft, and draft on from there."""
        drafter, clock = self._engine.drafter, _Clock()
        self._draft_ms, self._level_ms, self._rows = 0.0, (), []
        policy = None if self._pilot is None else self._pilot.choose()
        if drafter is None or self._state is None or policy is None:
            return Tree.chain(self._tokens[-1:])
        growth = Growth([time.perf_counter()])
        candidates = drafter.observe(self._state, self._followers, torch.cat(self._hidden), policy.width)
        self._num_pairs += len(self._followers)
        self._hidden, self._followers = [], []
        budget = self._stop.max_new_tokens - (len(self._tokens) - self._num_prompt)  # n nodes deliver n + 1 tokens
        root, position = self._tokens[-1], len(self._tokens)
        tree = grow(policy, drafter, self._state, root, candidates, budget - 1, self._sampling, position, growth)
        self._draft_ms = clock.lap()
        self._rows = growth.rows
        self._level_ms = tuple((end - begin) * 1e3 for begin, end in pairwise(growth.marks))
        return tree

    def take(self, tree: Tree, verified: Verified, verify_ms: float) -> Round:
        """What the target says about the tree becomes text."""
        clock = _Clock()
        step = walk(tree, verified.logits_NV, self._sampling, self._prefix, self._stop)
        self._engine.target.keep(self.cache, step.path)
        if self._pilot is not None:
            self._pilot.see(tree, step.path, self._rows)
            whole = len(step.path) == len(tree)  # as in plain rounds, which must not pay for a copy
            self._hidden.append(verified.hidden_NLD if whole else verified.hidden_NLD[step.path])
            self._followers += step.tokens
        logits_TV = verified.logits_NV[step.path[: len(step.tokens)]] if self._engine.with_logits else None
        tree = tree if self._engine.with_logits else tree.without_laws()
        ms = (self._draft_ms, verify_ms, clock.lap())
        return self._deliver(tree, step.path, step, logits_TV, ms, self._level_ms)

    def leave(self, memory: Memory[CacheT, StateT] | None) -> None:
        """Keep what a next turn can go on from."""
        if memory is not None:
            hidden_TLD = torch.cat(self._hidden)
            memory.kept = (self._tokens, self.cache, self._state, self._num_pairs, hidden_TLD)

    @property
    def _prefix(self) -> Prefix:
        return Prefix(self._tokens, self._num_prompt)

    def _begin(self, memory: Memory[CacheT, StateT] | None) -> int:
        """Caches, empty or with the beginning of an earlier text; the first place that is still to be read."""
        target, drafter = self._engine.target, self._engine.drafter
        kept = memory.take() if memory is not None else None
        common = 0 if kept is None else _common(kept[0], self._tokens)
        if kept is None or common == 0:
            self.cache = target.new_cache()
            self._state = None if drafter is None else drafter.new_state(self._tokens[0])
            return 0
        _, self.cache, self._state, num_pairs, hidden_TLD = kept
        # the states of the last common token are read again: the pair that they open has another second half now
        start = common - 1
        if drafter is not None and self._state is not None:
            self._num_pairs = min(start, num_pairs)
            drafter.rewind(self._state, self._num_pairs)
            self._hidden.append(hidden_TLD[: start - self._num_pairs])
        target.rewind(self.cache, start)
        return start

    def _deliver(
        self,
        tree: Tree | None,
        path: list[int],
        step: Walk,
        logits_TV: Tensor | None,
        ms: tuple[float, float, float],
        level_ms: tuple[float, ...] = (),
    ) -> Round:
        self._tokens += step.tokens
        logits_TV = logits_TV if self._engine.with_logits else None
        return Round(tree, path, step.tokens, step.finish_reason, logits_TV, *ms, level_ms)


def generate_plain(
    target: Target[CacheT], prompt: Sequence[int], sampling: Sampling, stop: Stop, with_logits: bool = True
) -> Iterator[Round]:
    """One token, one target forward: the definition of correct.

    Raises:
        InputError: as `generate`.
    """
    tokens, stop = list(prompt), _within_context(target, prompt, stop)
    cache, clock = target.new_cache(), _Clock()
    verified = read(target, cache, tokens, reads=())
    tree = None
    while True:
        verify_ms = clock.lap()
        step = walk(Tree.chain(tokens[-1:]), verified.logits_NV, sampling, Prefix(tokens, len(prompt)), stop)
        tokens += step.tokens
        path = [] if tree is None else [0]
        logits_TV = verified.logits_NV if with_logits else None
        yield Round(tree, path, step.tokens, step.finish_reason, logits_TV, 0.0, verify_ms, clock.lap())
        if step.finish_reason is not None:
            return
        clock = _Clock()
        tree = Tree.chain(tokens[-1:])
        verified = target.verify([(cache, tree)])[0]
        target.keep(cache, [0])


def read(target: Target[CacheT], cache: CacheT, tokens: list[int], reads: Sequence[int]) -> Verified:
    """A prompt, in pieces: no pass has more rows than `PREFILL_ROWS`, however long the prompt."""
    pieces: list[Verified] = []
    for first in range(0, len(tokens), PREFILL_ROWS):
        piece = tokens[first : first + PREFILL_ROWS]
        pieces += target.verify([(cache, Tree.chain(piece))], reads, last_only=True)
        target.keep(cache, range(len(piece)))
    return Verified(pieces[-1].logits_NV, torch.cat([piece.hidden_NLD for piece in pieces]))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _within_context(target: Target[CacheT], prompt: Sequence[int], stop: Stop) -> Stop:
    """`stop` with a budget that ends with the target's context."""
    if not prompt:
        raise InputError("the prompt is empty: it must hold at least one token")
    room = target.spec.max_length - len(prompt)
    if room < 1:
        raise InputError(f"the prompt has {len(prompt)} tokens; the target's context holds {target.spec.max_length}, "
                         f"which must leave room for an answer")  # fmt: skip
    return replace(stop, max_new_tokens=min(stop.max_new_tokens, room))


class _Clock:
    """Milliseconds since it was made, or since its last lap."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        return spent * 1e3
