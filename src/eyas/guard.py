"""Never slower than plain decoding: drafting stops while it does not pay, and is tried again from time to time.

An answer keeps one account, in milliseconds saved. A drafted round books what its tokens would have taken plain, less
what it takes itself; drafting goes on while the account is above zero. It opens with a small credit, and may save up no
more than a few rounds' worth, so that a text that turns bad is noticed (the cumulative sum test of Page 1954). While it
is overdrawn, rounds are plain, each books a small allowance, and once that has paid off the debt the cheapest draft is
tried: one level, one node. A failed attempt halves the allowance, down to a 32nd, so attempts come further and
further apart. What an answer may lose is the credit, a round, and the allowances: with a drafter that is always wrong,
1.3 to 1.5 % of 128 tokens at the demo target's prices.

All of it follows from given prices and from what this answer accepted, nothing from a clock: a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.errors import InputError
from eyas.policies import Chain
from eyas.policy import Level, Pilot, Policy, Prices, RankPath
from eyas.tree import Tree

# In plain rounds.
CREDIT = 0.75  # what an answer may lose before it falls back: 0.6 % of 128 tokens, and a round
MOST_SAVED = 8.0
ALLOWANCE = 0.04  # of each plain round, for trying again
_LEAST_ALLOWANCE = ALLOWANCE / 32
_TRIAL = Chain(1)


@dataclass(frozen=True)
class Guarded(Policy):
    """Another policy, while it pays."""

    inner: Policy
    prices: Prices

    def __post_init__(self) -> None:
        check_guarded(self.inner)
        object.__setattr__(self, "by_rank", self.inner.by_rank)
        object.__setattr__(self, "by_value", self.inner.by_value)

    def __str__(self) -> str:
        return str(self.inner)

    @property
    def levels(self) -> int:
        return self.inner.levels

    @property
    def width(self) -> int:
        return self.inner.width

    def records(self, path: RankPath) -> bool:
        return self.inner.records(path)

    def expands(self, level: Level) -> list[int]:
        return self.inner.expands(level)

    def survivors(self, scores: Sequence[float]) -> Sequence[int]:
        return self.inner.survivors(scores)

    def pilot(self) -> Pilot:
        return _Account(self.inner.pilot(), self.prices)


def check_guarded(policy: Policy) -> None:
    """Refuse what has no guard.

    Raises:
        InputError: the policy draws its trees at random.
    """
    if not policy.keyed:
        raise InputError(f"the tree {policy} is drawn at random, and the guard is for trees that are chosen")


class _Account:
    """What drafting has saved in one answer so far."""

    def __init__(self, inner: Pilot, prices: Prices) -> None:
        self._inner, self._prices, self._plain_ms = inner, prices, prices.plain_ms()
        self._saved_ms = CREDIT * self._plain_ms
        self._allowance = ALLOWANCE
        self._away = 0  # plain rounds since the drafter last saw the text
        self._policy: Policy | None = None  # of the round that is under way

    def choose(self) -> Policy | None:
        if self._saved_ms <= 0:
            self._policy = None
        else:
            self._policy = _TRIAL if self._away else self._inner.choose()
        return self._policy

    def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
        if self._policy is None:
            self._saved_ms += self._allowance * self._plain_ms
            self._away += 1
            return
        taken_ms = self._prices.round_ms(len(tree) - 1, rows) + self._away * self._prices.absorb
        saved_ms = self._saved_ms + len(path) * self._plain_ms - taken_ms
        self._saved_ms = min(saved_ms, MOST_SAVED * self._plain_ms)
        if self._away:
            self._allowance = ALLOWANCE if saved_ms > 0 else max(self._allowance / 2, _LEAST_ALLOWANCE)
            self._away = 0
        else:
            self._inner.see(tree, path, rows)
