"""What the parts of a round cost, measured inside the decoding loop.

Alone, a draft step or a forward of the target finds its weights in the caches that the other one empties in the loop.
So whole answers are decoded, another shape of tree in every round: whatever drifts, the machine or the length of the
context, slows all shapes alike. Legend: nodes are draft nodes of the tree that is verified, the root not counted; rows
are nodes that are expanded at once.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from random import Random
from statistics import linear_regression, mean, median
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from eyas import kept as records
from eyas.drafters.base import Drafter
from eyas.errors import InputError
from eyas.generate import Request, generate
from eyas.kept import Place
from eyas.policies import Dynamic, Level, Policy
from eyas.targets.base import Target
from eyas.tree import Tree

CacheT = TypeVar("CacheT")
StateT = TypeVar("StateT")
Curve = tuple[tuple[int, float], ...]  # size, milliseconds; sizes ascend

# Every number of nodes and of rows that a tree of use has is near one of these. None is a plain round.
SHAPES: tuple[Policy | None, ...] = (
    None,
    Dynamic(2, 1, 1),
    Dynamic(2, 1, 2),
    Dynamic(3, 2, 3),
    Dynamic(3, 2, 4),
    Dynamic(3, 3, 5),
    Dynamic(3, 3, 6),
    None,
    Dynamic(3, 4, 8),
    Dynamic(3, 4, 10),
    Dynamic(3, 6, 12),
    Dynamic(3, 6, 16),
    Dynamic(3, 8, 24),
    Dynamic(3, 8, 32),
    Dynamic(3, 10, 48),
    Dynamic(3, 10, 64),
)
ROUNDS = 20 * len(SHAPES)  # of a measurement
_FEWEST = 5  # samples that make a point of a curve, where another one has as many
_STALL = 3.0  # times the median: what took longer is the machine's own business


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round, measured in the decoding loop: for one machine, back end, dtype, thread
    count, target and head."""

    verify: Curve  # draft nodes in the tree -> the target's forward; begins with (0, plain)
    expand: Curve  # rows -> one draft level after the first
    first: float  # observe verified tokens and name the root's children: the first level
    rest: float  # all else of a round with a tree
    plain_rest: float  # all else of a plain round
    rest_per_node: float = 0.0  # on top of `rest`: the tree's nodes are made and walked in Python
    read: float = 0.0  # a token of the prompt: the target
    absorb: float = 0.0  # a token that the drafter takes in many at a time, as a prompt's

    def verify_ms(self, nodes: float) -> float:
        """The target's forward over a tree."""
        return _at(self.verify, nodes)

    def level_ms(self, rows: float) -> float:
        """One draft level after the first."""
        return _at(self.expand, rows) if self.expand else 0.0

    def plain_ms(self) -> float:
        """A whole plain round."""
        return self.verify_ms(0) + self.plain_rest

    def round_ms(self, nodes: float, rows: Sequence[int]) -> float:
        """A whole round with a tree; `rows` are those of each level after the first."""
        levels = self.first + sum(map(self.level_ms, rows))
        return self.verify_ms(nodes) + levels + self.rest + self.rest_per_node * nodes


def _at(curve: Curve, size: float) -> float:
    """Linear between the measured sizes, with the last slope beyond them."""
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    right = min(bisect_right(curve, size, key=lambda point: point[0]), len(curve) - 1)
    (low, before), (high, after) = curve[right - 1], curve[right]
    return before + (after - before) / (high - low) * (size - low)


@dataclass(frozen=True)
class Sample:
    """One round: what was asked for, and how long it took (milliseconds)."""

    nodes: int
    rows: tuple[int, ...]  # of each level after the first
    level_ms: tuple[float, ...]  # empty for a plain round
    verify_ms: float
    whole_ms: float
    observed: int = 0  # tokens that the first level took in
    begins: bool = False  # the drafter's first round of an answer, which absorbs the prompt

    @property
    def rest_ms(self) -> float:
        return self.whole_ms - self.verify_ms - sum(self.level_ms)


def fit(samples: Sequence[Sample], reads: Sequence[tuple[int, float]]) -> Costs:
    """Costs from rounds, and from prompts: their tokens and the milliseconds of the target's forward over them.

    The speed of a run follows the mean, so that is what counts: where a machine changes its pace, a median belongs to
    one of them. Only what took far longer than usual counts as less.
    """
    rounds = [own for own in samples if not own.begins]
    drafted, plain = [own for own in rounds if own.level_ms], [own for own in rounds if not own.level_ms]
    if not drafted or not plain:
        raise InputError("the prompts' answers are too short: too few rounds were decoded to measure them")
    rests = _curve((own.nodes, own.rest_ms) for own in drafted)
    slope = linear_regression(*zip(*rests, strict=True)).slope if len(rests) > 1 else 0.0
    starts = [own for own in samples if own.begins and own.level_ms]
    return Costs(
        verify=_curve((own.nodes, own.verify_ms) for own in rounds),
        expand=_curve(pair for own in drafted for pair in zip(own.rows, own.level_ms[1:], strict=True)),
        first=_typical(own.level_ms[0] for own in drafted),
        rest=_typical(own.rest_ms - slope * own.nodes for own in drafted),
        plain_rest=_typical(own.rest_ms for own in plain),
        rest_per_node=slope,
        read=_typical(ms / num for num, ms in reads) if reads else 0.0,
        absorb=_typical(own.level_ms[0] / own.observed for own in starts) if starts else 0.0,
    )


def _typical(times: Iterable[float]) -> float:
    """The mean, stalls cut short."""
    found = list(times)
    most = _STALL * median(found)
    return mean(min(own, most) for own in found)


def _curve(pairs: Iterable[tuple[int, float]]) -> Curve:
    """What is typical at each size that was met often enough. A curve never falls: where a larger size measured faster,
    that was noise, and they share their mean (isotonic regression by pooling neighbours)."""
    found: dict[int, list[float]] = {}
    for size, ms in pairs:
        found.setdefault(size, []).append(ms)
    most = max(map(len, found.values()), default=0)
    pools: list[tuple[float, list[int]]] = []  # a mean, and the sizes that share it
    for size in sorted(size for size, own in found.items() if len(own) >= min(_FEWEST, most)):
        ms, sizes = _typical(found[size]), [size]
        while pools and pools[-1][0] > ms:
            shared, before = pools.pop()
            ms = (shared * len(before) + ms * len(sizes)) / (len(before) + len(sizes))
            sizes = before + sizes
        pools.append((ms, sizes))
    return tuple((size, ms) for ms, sizes in pools for size in sizes)


class _Alternating(Policy):
    """Another shape in every round, all of them by turns in an order that changes (none may gain by what runs before
    it), and on from there in the next answer: a pilot of its own."""

    def __init__(self, shapes: Sequence[Policy | None]) -> None:
        self.shapes = list(shapes)
        self._trees = [shape for shape in shapes if shape is not None]
        self._next: list[Policy | None] = []
        self._random = Random(0)
        self.chosen: Policy | None = None  # of the last round
        self.rows: tuple[int, ...] = ()  # that were expanded in it, by level after the first

    @property
    def levels(self) -> int:
        return max(tree.levels for tree in self._trees)

    @property
    def width(self) -> int:
        return max(tree.width for tree in self._trees)

    def expands(self, level: Level) -> list[int]:
        raise AssertionError("each round has a policy of its own")

    def pilot(self) -> _Alternating:
        return self

    def choose(self) -> Policy | None:
        self._next = self._next or self._random.sample(self.shapes, len(self.shapes))
        self.chosen = self._next.pop()
        return self.chosen

    def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
        self.rows = tuple(rows)


class Meter(Generic[CacheT, StateT]):
    """Rounds of all shapes by turns, as many as are asked for; costs at any time."""

    def __init__(
        self, target: Target[CacheT], drafter: Drafter[StateT], shapes: Sequence[Policy | None] = SHAPES
    ) -> None:
        self._target, self._drafter = target, drafter
        self._policy = _Alternating(shapes)
        self.samples: list[Sample] = []
        self.reads: list[tuple[int, float]] = []

    def run(self, request: Request, rounds: int) -> int:
        """Up to so many rounds of one answer; how many there were."""
        pilot, before, begins, last = self._policy, len(self.samples), True, time.perf_counter()
        unseen = len(request.prompt) - 1  # tokens that the drafter has not observed; it never sees the first one
        answer = generate(self._target, self._drafter, pilot, request.prompt, request.sampling, request.stop, False)
        for round_ in answer:
            whole_ms, drafted = (time.perf_counter() - last) * 1e3, bool(round_.level_ms)
            observed = 0 if round_.tree is None or pilot.chosen is None else unseen
            unseen += len(round_.tokens) - observed
            if round_.tree is None:
                self.reads.append((len(request.prompt), round_.verify_ms))
            elif drafted or not observed:  # the budget's last round may observe and have no level to draft
                parts = (round_.level_ms, round_.verify_ms, whole_ms, observed, begins and drafted)
                self.samples.append(Sample(len(round_.tree) - 1, pilot.rows, *parts))
                begins = begins and not drafted
                if len(self.samples) - before >= rounds:
                    break
            last = time.perf_counter()
        return len(self.samples) - before

    def run_all(self, requests: Sequence[Request], rounds: int, title: str | None = None) -> None:
        """So many rounds of the answers to some requests, over and over; with a bar that has a title."""
        asked, idle = cycle(requests), 0
        with tqdm(total=rounds, desc=title, unit="round", disable=title is None) as bar:
            while rounds > 0 and idle < len(requests):
                done = self.run(next(asked), rounds)
                rounds, idle = rounds - done, 0 if done else idle + 1
                bar.update(done)

    def warm_up(self, request: Request) -> None:
        """A round of each shape that does not count: a machine that was just woken is slow."""
        self.run_all([request], len(self._policy.shapes))
        self.samples, self.reads = [], []

    def costs(self) -> Costs:
        """From all rounds so far.

        Raises:
            InputError: there were too few.
        """
        return fit(self.samples, self.reads)


def measure_costs(
    target: Target[CacheT],
    drafter: Drafter[StateT],
    requests: Sequence[Request],
    rounds: int = ROUNDS,
    shapes: Sequence[Policy | None] = SHAPES,
) -> Costs:
    """The costs of a target and a drafter on this machine: `rounds` rounds of answers to `requests`, over and over.

    Raises:
        InputError: the requests' answers end before there is anything to measure.
    """
    meter = Meter(target, drafter, shapes)
    meter.warm_up(requests[0])
    meter.run_all(requests, rounds, "costs")
    return meter.costs()


def keep(place: Place, costs: Costs) -> None:
    """For `kept`: in `$EYAS_CACHE/costs`."""
    records.keep("costs", place, {"costs": asdict(costs)})


def kept(place: Place) -> Costs | None:
    """The costs that were measured for exactly this machine, back end, dtype, thread count, target and head."""
    record = records.kept("costs", place)
    try:
        return None if record is None else from_record(record["costs"])
    except (KeyError, TypeError, ValueError):
        return None


def from_record(record: Mapping[str, Any]) -> Costs:
    """Costs from their fields as JSON has them.

    Raises:
        KeyError, TypeError, ValueError: these are none.
    """
    curves = {name: tuple((int(size), float(ms)) for size, ms in record[name]) for name in ("verify", "expand")}
    numbers = {name: float(value) for name, value in record.items() if name not in curves}
    if not curves["verify"]:
        raise ValueError("costs have at least a plain forward")
    return Costs(verify=curves["verify"], expand=curves["expand"], **numbers)
