"""The round loop: observe, grow, verify, walk, keep; and its slow twin, which defines what is correct.

Both yield one `Round` for each target forward; all else (text, tau, time) is computed from rounds. Refuses to know
tokenizers, files and what the drafter is made of. Legend: N tree nodes, T verified tokens, L states read, D width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from eyas.drafters.base import Drafter
from eyas.errors import InputError
from eyas.policies import Policy, grow
from eyas.sampling import Prefix, Sampling
from eyas.targets.base import Target, Verified
from eyas.tree import Tree
from eyas.verify import FinishReason, Stop, walk

CacheT = TypeVar("CacheT")
StateT = TypeVar("StateT")


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


def generate(
    target: Target[CacheT],
    drafter: Drafter[StateT],
    policy: Policy,
    prompt: Sequence[int],
    sampling: Sampling,
    stop: Stop,
    with_logits: bool = True,
) -> Iterator[Round]:
    """Decode by drafting and verifying: the tokens of `generate_plain`, in fewer target forwards; under a policy that
    is not `keyed`, tokens of the same law.

    Rounds carry the logits that their tokens were drawn from, and the laws that a tree was drawn from, only
    `with_logits`: copying and keeping them has its cost.

    Raises:
        InputError: the prompt is empty, or fills the target's context; the policy refuses the sampling.
    """
    policy.check(sampling)
    tokens, stop = list(prompt), _within_context(target, prompt, stop)
    cache, state = target.new_cache(), drafter.new_state()
    clock = _Clock()
    verified = _read_prompt(target, cache, tokens, drafter.reads)
    clock.lap("verify")
    step = walk(Tree.chain(tokens[-1:]), verified.logits_NV, sampling, Prefix(tokens, len(prompt)), stop)
    hidden_TLD = verified.hidden_NLD
    followers = [*tokens[1:], *step.tokens]  # followers[i] comes after the token whose states are hidden_TLD[i]
    tokens += step.tokens
    first_TV = verified.logits_NV if with_logits else None
    yield Round(None, [], step.tokens, step.finish_reason, first_TV, *clock.split())

    while step.finish_reason is None:
        clock = _Clock()
        candidates = drafter.observe(state, followers, hidden_TLD, policy.width)
        budget = stop.max_new_tokens - (len(tokens) - len(prompt))  # a path of n nodes delivers n + 1 tokens
        tree = grow(policy, drafter, state, tokens[-1], candidates, budget - 1, sampling, position=len(tokens))
        clock.lap("draft")
        verified = target.verify([(cache, tree)], drafter.reads)[0]
        clock.lap("verify")
        step = walk(tree, verified.logits_NV, sampling, Prefix(tokens, len(prompt)), stop)
        target.keep(cache, step.path)
        hidden_TLD, followers = verified.hidden_NLD[step.path], step.tokens
        tokens += step.tokens
        logits_TV = verified.logits_NV[step.path[: len(step.tokens)]] if with_logits else None
        shown = tree if with_logits else tree.without_laws()
        yield Round(shown, step.path, step.tokens, step.finish_reason, logits_TV, *clock.split())


def generate_plain(
    target: Target[CacheT], prompt: Sequence[int], sampling: Sampling, stop: Stop, with_logits: bool = True
) -> Iterator[Round]:
    """One token, one target forward: the definition of correct.

    Raises:
        InputError: as `generate`.
    """
    tokens, stop = list(prompt), _within_context(target, prompt, stop)
    cache = target.new_cache()
    clock = _Clock()
    verified = _read_prompt(target, cache, tokens, reads=())
    tree = None
    while True:
        clock.lap("verify")
        step = walk(Tree.chain(tokens[-1:]), verified.logits_NV, sampling, Prefix(tokens, len(prompt)), stop)
        tokens += step.tokens
        path = [] if tree is None else [0]
        logits_TV = verified.logits_NV if with_logits else None
        yield Round(tree, path, step.tokens, step.finish_reason, logits_TV, *clock.split())
        if step.finish_reason is not None:
            return
        clock = _Clock()
        tree = Tree.chain(tokens[-1:])
        verified = target.verify([(cache, tree)])[0]
        target.keep(cache, [0])


def _read_prompt(target: Target[CacheT], cache: CacheT, tokens: list[int], reads: Sequence[int]) -> Verified:
    verified = target.verify([(cache, Tree.chain(tokens))], reads, last_only=True)[0]
    target.keep(cache, range(len(tokens)))
    return verified


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
    """Where the milliseconds of one round went."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._spent = {"draft": 0.0, "verify": 0.0}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._spent[name] += now - self._last
        self._last = now

    def split(self) -> tuple[float, float, float]:
        """Milliseconds of drafting, verification and the rest."""
        total = time.perf_counter() - self._start
        draft, verify = self._spent["draft"], self._spent["verify"]
        return draft * 1e3, verify * 1e3, (total - draft - verify) * 1e3
