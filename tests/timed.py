"""A target and a drafter whose times are known to the millisecond: they turn the clock themselves."""

from __future__ import annotations

from collections.abc import Sequence

from tiny import tiny_target
from torch import Tensor

from eyas.drafters.base import Candidates, Drafter
from eyas.drafters.small_model import SmallModel
from eyas.targets.base import Target, Verified
from eyas.tree import Tree


class Clock:
    """Time that stands still until somebody spends it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def spend(self, milliseconds: float) -> None:
        self.seconds += milliseconds / 1e3


class TimedTarget(Target):
    """8 ms a forward, 0.5 more for each node and `cliff` more from the fourth on; a prompt 1 ms a token."""

    def __init__(self, clock: Clock, cliff: float = 0.0) -> None:
        self._target, self._clock, self._cliff = tiny_target(), clock, cliff
        self.spec = self._target.spec

    def verify(self, items: Sequence[tuple], reads: Sequence[int] = (), last_only: bool = False) -> list[Verified]:
        tree: Tree = items[0][1]
        cliff = self._cliff if len(tree) > 4 else 0.0
        self._clock.spend(len(tree) if last_only else 8 + 0.5 * (len(tree) - 1) + cliff)
        return self._target.verify(items, reads, last_only)

    def keep(self, cache: object, path: Sequence[int]) -> None:
        self._clock.spend(0.25)  # all else of a round
        self._target.keep(cache, path)  # type: ignore[arg-type]

    def new_cache(self) -> object:
        return self._target.new_cache()

    def rewind(self, cache: object, length: int) -> None:
        raise NotImplementedError

    @property
    def embedding_VD(self) -> Tensor:
        return self._target.embedding_VD

    @property
    def head_VD(self) -> Tensor:
        return self._target.head_VD


class TimedDrafter(Drafter):
    """1 ms to observe (2 ms a token where a prompt is), 0.25 ms for each row of a level; with the target's `seed` it is
    always right."""

    kind, reads = "small", ()

    def __init__(self, clock: Clock, seed: int = 3) -> None:
        self._drafter, self._clock = SmallModel(tiny_target(seed=seed)), clock

    def new_state(self, first: int | None = None) -> object:
        return self._drafter.new_state(first)

    def observe(self, state: object, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        self._clock.spend(2 * len(tokens) if len(tokens) > 10 else 1)
        return self._drafter.observe(state, tokens, hidden_TLD, width)  # type: ignore[arg-type]

    def expand(self, state: object, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        self._clock.spend(0.25 * len(rows))
        return self._drafter.expand(state, rows, tokens, width)  # type: ignore[arg-type]

    def rewind(self, state: object, length: int) -> None:
        raise NotImplementedError

    def can_propose(self, token: int) -> bool:
        return True
