"""What trees would have made of recorded answers on this machine: tau by replay, milliseconds by measured costs.

The slow twin is `replay.replay`, which grows every tree anew. Dynamic trees that differ in levels and nodes alone are
prunings of one: it is grown once, and a node's rank among the nodes of its first levels says in which of them it
survives. Legend: P places of an answer, L levels, D depths of the path that the text takes through the grown tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eyas.costs import Costs
from eyas.policies import Chain, Dynamic, Policy, grow
from eyas.replay import Recalled, Trace, follow, levels_left, replay
from eyas.targets.base import TargetSpec
from eyas.tree import Tree

UNPRUNED = 10_000  # nodes of a dynamic tree that keeps all that it grows: up to 10 levels of 31² each
_NEVER = UNPRUNED + 1  # the rank of a node that is not there
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """What answers come to: tokens, forwards of the target without the prompts' own, milliseconds."""

    answers: int = 0
    tokens: int = 0
    forwards: int = 0
    milliseconds: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.answers + other.answers,
            self.tokens + other.tokens,
            self.forwards + other.forwards,
            self.milliseconds + other.milliseconds,
        )

    @property
    def tau(self) -> float | None:
        return (self.tokens - self.answers) / self.forwards if self.forwards else None

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.milliseconds


class _Grown(NamedTuple):
    """The unpruned tree at every place of an answer, for one `top_k`."""

    ranks_PLD: Ints  # among the nodes of the first L levels, the rank of the node that the text takes at depth D
    counts_PL: Ints  # nodes of the first L levels
    rows_PL: Ints  # that level L + 1 expands; 0 where there is no such level


class Foresight:
    """One recorded answer, to be asked what some policies would have made of it. Holds a few numbers for each place;
    the trace itself, which is large, is done with."""

    def __init__(self, trace: Trace, prompt_tokens: int, policies: Sequence[Policy]) -> None:
        """
        Raises:
            NotInTrace, InputError: as `replay.replay`.
        """
        self._prompt_tokens, self._tokens = prompt_tokens, len(trace.tokens)
        self._replayed: dict[Policy, list[tuple[int, list[int]]]] = {}  # nodes and rows of each round
        deepest: dict[int, int] = {}  # levels, by top_k
        for policy in map(as_dynamic, policies):
            if isinstance(policy, Dynamic):
                deepest[policy.top_k] = max(policy.levels, deepest.get(policy.top_k, 0))
            else:
                trees = [round_.tree for round_ in replay(trace, policy).rounds if round_.tree is not None]
                self._replayed[policy] = [(len(tree) - 1, _rows(tree)) for tree in trees]
        self._grown = {top_k: _grow(trace, levels, top_k) for top_k, levels in deepest.items()}

    def tally(self, policy: Policy, costs: Costs) -> Tally:
        """The answer under one of the policies."""
        policy = as_dynamic(policy)
        if not isinstance(policy, Dynamic):
            return self._answer(costs, [costs.round_ms(nodes, rows) for nodes, rows in self._replayed[policy]])
        grown, last = self._grown[policy.top_k], policy.levels - 1
        accepted_P = (grown.ranks_PLD[:, last] <= policy.nodes).sum(-1)
        nodes_P = np.minimum(grown.counts_PL[:, last], policy.nodes)
        level_ms = np.array([0.0, *(costs.level_ms(rows) for rows in range(1, policy.top_k + 1))])
        verify_ms = np.array([costs.round_ms(nodes, ()) for nodes in range(int(nodes_P.max(initial=0)) + 1)])
        round_ms_P = verify_ms[nodes_P] + level_ms[grown.rows_PL[:, :last]].sum(-1)
        return self._answer(costs, _hop(accepted_P.tolist(), round_ms_P.tolist()))

    def plain(self, costs: Costs) -> Tally:
        """The answer without a draft."""
        forwards = self._tokens - 1
        return Tally(1, forwards + 1, forwards, costs.read * self._prompt_tokens + forwards * costs.plain_ms())

    def _answer(self, costs: Costs, rounds_ms: Sequence[float]) -> Tally:
        prompt_ms = costs.read * self._prompt_tokens
        if rounds_ms:  # the first one absorbs the prompt, in place of a round's few tokens
            prompt_ms += max(costs.absorb * self._prompt_tokens - costs.first, 0.0)
        return Tally(1, self._tokens, len(rounds_ms), prompt_ms + sum(rounds_ms))


def as_dynamic(policy: Policy) -> Policy:
    """A chain as the dynamic tree that it is."""
    return Dynamic(policy.length, 1, policy.length) if isinstance(policy, Chain) else policy


def unpruned(policy: Policy) -> Policy:
    """What a trace is to hold for a policy, whatever its number of nodes."""
    policy = as_dynamic(policy)
    return Dynamic(policy.levels, policy.top_k, UNPRUNED) if isinstance(policy, Dynamic) else policy


def _hop(accepted: Sequence[int], round_ms: Sequence[float]) -> list[float]:
    """The times of the rounds that an answer has, from what a round at each of its places would accept and take."""
    place, taken = 0, []
    while place < len(accepted):
        taken.append(round_ms[place])
        place += accepted[place] + 1
    return taken


def _grow(trace: Trace, levels: int, top_k: int) -> _Grown:
    num = len(trace.guesses)
    ranks_PLD = np.full((num, levels, levels), _NEVER, dtype=np.int64)
    counts_PL, rows_PL = np.zeros((num, levels), dtype=np.int64), np.zeros((num, levels), dtype=np.int64)
    policy = Dynamic(levels, top_k, UNPRUNED)
    for place, guesses in enumerate(trace.guesses):
        most = max(min(levels, levels_left(trace, place)), 0)
        first = guesses.candidates([()], policy.width)
        tree = grow(policy, Recalled(guesses), None, trace.tokens[place], first, most)
        counts_L = np.bincount(tree.depths, minlength=levels + 1)[1:]
        counts_PL[place] = counts_L.cumsum()
        rows_PL[place, : max(most - 1, 0)] = np.minimum(counts_L, top_k)[: max(most - 1, 0)]
        for depth, node in enumerate(follow(tree, trace.tokens[place + 1 :])[1:]):
            ranks_PLD[place, depth:, depth] = _ranks(tree, node, counts_PL[place])[depth:]
    return _Grown(ranks_PLD, counts_PL, rows_PL)


def _ranks(tree: Tree, node: int, counts_L: Ints) -> Ints:
    """[L]: how many of the first L levels' draft nodes `best_nodes` takes before `node` and with it."""
    scores_N = np.array(tree.scores[1:])  # nodes stand in the order of their levels
    own = scores_N[node - 1]
    before_N = (scores_N > own) | ((scores_N == own) & (np.arange(1, len(tree)) < node))
    return 1 + np.append(0, before_N.cumsum())[counts_L]


def _rows(tree: Tree) -> list[int]:
    """Rows of each level after the first, of a tree that was not pruned: the nodes that have children."""
    inner = [tree.depths[node] for node in range(1, len(tree)) if tree.children(node)]
    return [inner.count(depth) for depth in range(1, max(tree.depths))]


def tree_bytes(spec: TargetSpec, reads: Sequence[int], nodes: int) -> int:
    """What a tree's verification holds: keys and values of its nodes and the root, their logits and the states read."""
    native = spec.backend == "native"  # keys and values in bfloat16, what comes out in float32
    kept, out = (2, 4) if native else (spec.dtype.itemsize, spec.dtype.itemsize)
    cached = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * kept
    return (nodes + 1) * (cached + (spec.vocab_size + len(reads) * spec.width) * out)
