"""Costs of the parts of a round: curves by hand, and a loop whose clock the test turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_target
from torch import Tensor

from eyas import costs, machine
from eyas.checkpoint import place_of
from eyas.costs import Costs, Meter, Sample, fit, measure_costs
from eyas.drafters.base import Candidates, Drafter
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError
from eyas.generate import Request
from eyas.policies import Chain, Dynamic
from eyas.sampling import Sampling
from eyas.targets.base import Target, Verified
from eyas.tree import Tree
from eyas.verify import Stop

COSTS = Costs(
    verify=((0, 10.0), (4, 12.0), (8, 12.0), (16, 20.0)),
    expand=((1, 1.0), (5, 3.0)),
    first=2.0,
    rest=0.5,
    plain_rest=0.25,
    rest_per_node=0.125,
)


def test_a_forward_between_and_beyond_the_measured_sizes() -> None:
    assert [COSTS.verify_ms(nodes) for nodes in (0, 1, 4, 6, 8)] == [10.0, 10.5, 12.0, 12.0, 12.0]
    assert [COSTS.verify_ms(nodes) for nodes in (12, 16, 24)] == [16.0, 20.0, 28.0], "on with the last slope"
    assert [COSTS.level_ms(rows) for rows in (1, 2, 5, 7)] == [1.0, 1.5, 3.0, 4.0]
    assert replace(COSTS, verify=((0, 10.0),)).verify_ms(50) == 10.0, "one size is all that is known"
    assert replace(COSTS, expand=()).level_ms(3) == 0.0, "a drafter that never goes deeper"


def test_a_round_is_the_sum_of_its_parts() -> None:
    assert COSTS.plain_ms() == 10.25
    assert COSTS.round_ms(4, []) == 12.0 + 2.0 + 0.5 + 4 * 0.125
    assert COSTS.round_ms(4, [2, 5]) == 15.0 + 1.5 + 3.0
    assert COSTS.scaled(2).round_ms(4, [2, 5]) == 39.0 and COSTS.scaled(2).plain_ms() == 20.5


def test_the_shape_is_of_medians_and_the_level_of_the_mean() -> None:
    """Plain 10 + 0.2; trees of one level, 2 nodes 12 + 1 + 0.4; of two levels, 4 nodes, 14 + 1 + 0.5 + 0.8."""
    plain = Sample(0, (), (), 10.0, 10.2)
    small = Sample(2, (), (1.0,), 12.0, 13.4)
    large = Sample(4, (2,), (1.0, 0.5), 14.0, 16.3)
    starts = Sample(2, (), (9.0,), 12.0, 21.0, observed=30, begins=True)
    rounds = [plain] * 5 + [small] * 5 + [large] * 5 + [starts]
    found = fit(rounds, [(20, 4.0), (10, 3.0), (10, 2.5)])
    assert found.verify == ((0, 10.0), (2, 12.0), (4, 14.0)) and found.expand == ((2, 0.5),)
    assert (found.first, found.plain_rest) == (1.0, pytest.approx(0.2))
    assert (found.rest, found.rest_per_node) == (pytest.approx(0.0), pytest.approx(0.2)), "0.4 at 2 nodes, 0.8 at 4"
    assert (found.read, found.absorb) == (0.25, 0.3), "of the prompts, of the round that began an answer"
    # one round in fifteen takes 2 * 13.4 more: nothing moves but the level
    paused = [*rounds[:5], replace(small, whole_ms=2 * 13.4), *rounds[6:]]
    total = 5 * (10.2 + 13.4 + 16.3)
    assert fit(paused, []).verify_ms(2) == pytest.approx(12.0 * (total + 13.4) / total)
    stopped = [*rounds[:5], replace(small, whole_ms=5000.0), *rounds[6:]]
    assert fit(stopped, []).verify_ms(2) == pytest.approx(12.0 * (total + 2 * 13.4) / total), "a stall counts little"


def test_a_size_that_was_hardly_met_makes_no_point() -> None:
    common, rare = Sample(0, (), (), 10.0, 10.0), Sample(7, (), (1.0,), 50.0, 51.0)
    tree = Sample(2, (), (1.0,), 12.0, 13.0)
    assert [size for size, _ in fit([common] * 6 + [tree] * 6 + [rare] * 4, []).verify] == [0, 2]
    assert [size for size, _ in fit([common, tree, rare], []).verify] == [0, 2, 7], "where all are rare, all count"


def test_a_curve_never_falls() -> None:
    sizes = {0: 10.0, 2: 14.0, 4: 12.0, 6: 13.0, 8: 20.0}
    rounds = [Sample(n, (), (1.0,) if n else (), ms, ms + 1) for n, ms in sizes.items()]
    assert fit(rounds, []).verify == ((0, 10.0), (2, 13.0), (4, 13.0), (6, 13.0), (8, 20.0)), "14, 12 and 13 share 13"


def test_too_few_rounds_are_no_measurement() -> None:
    with pytest.raises(InputError, match="too short"):
        fit([Sample(0, (), (), 10.0, 10.0)], [])


class Clock:
    """Time that stands still until somebody spends it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def spend(self, milliseconds: float) -> None:
        self.seconds += milliseconds / 1e3


class TimedTarget(Target):
    """8 ms a forward and 0.5 more for each node; a prompt 1 ms a token."""

    def __init__(self, clock: Clock) -> None:
        self._target, self._clock = tiny_target(), clock
        self.spec = self._target.spec

    def verify(self, items: Sequence[tuple], reads: Sequence[int] = (), last_only: bool = False) -> list[Verified]:
        tree: Tree = items[0][1]
        self._clock.spend(len(tree) if last_only else 8 + 0.5 * (len(tree) - 1))
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
    """1 ms to observe (2 ms a token where a prompt is), 0.25 ms for each row of a level."""

    kind, reads = "small", ()

    def __init__(self, clock: Clock) -> None:
        self._drafter, self._clock = SmallModel(tiny_target(seed=3)), clock

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


SHAPES = (Chain(2), None, Dynamic(3, 3, 5), Dynamic(2, 4, 9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_the_loop_measures_what_its_parts_cost(clock: Clock) -> None:
    requests = [Request([1, *range(5, 25)], Sampling(), Stop(40)), Request([3, *range(5, 25)], Sampling(), Stop(40))]
    found = measure_costs(TimedTarget(clock), TimedDrafter(clock), requests, 60, SHAPES)
    assert found.verify == tuple((n, pytest.approx(8 + 0.5 * n)) for n in (0, 2, 5, 9))
    assert found.expand == tuple((k, pytest.approx(0.25 * k)) for k in (1, 3, 4))
    assert (found.first, found.rest, found.plain_rest) == pytest.approx((1.0, 0.25, 0.25))
    assert found.rest_per_node == pytest.approx(0.0, abs=1e-9)
    assert (found.read, found.absorb) == pytest.approx((21.25 / 21, 2.0)), "keys and values are kept too"
    assert found.round_ms(5, [3, 3]) == pytest.approx(8 + 2.5 + 1 + 0.75 + 0.75 + 0.25)


def test_shapes_take_turns_round_by_round(clock: Clock) -> None:
    meter = Meter(TimedTarget(clock), TimedDrafter(clock), SHAPES)
    request = Request([1, *range(5, 25)], Sampling(), Stop(100))
    assert meter.run(request, 10) == 10 and len(meter.samples) == 10
    assert meter.run(request, 2) == 2, "the next answer goes on where this one was"
    nodes = [own.nodes for own in meter.samples]
    assert [sorted(nodes[i : i + 4]) for i in (0, 4, 8)] == [[0, 2, 5, 9]] * 3 and nodes[:4] != nodes[4:8]
    assert {own.nodes: own.rows for own in meter.samples} == {2: (1,), 0: (), 5: (3, 3), 9: (4,)}
    first = [0 if nodes[0] else 1, 10 if nodes[10] else 11]  # with a tree: it takes in the prompt
    assert [i for i, own in enumerate(meter.samples) if own.begins] == first


def test_answers_without_a_round_are_refused(clock: Clock) -> None:
    with pytest.raises(InputError, match="too short"):
        measure_costs(TimedTarget(clock), TimedDrafter(clock), [Request([1, 2], Sampling(), Stop(1))], 60, SHAPES)


def test_costs_are_kept_for_exactly_this_place(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    monkeypatch.setattr("eyas.kept.machine", lambda: {"cpu": "a", "threads": 2})
    spec = replace(tiny_target().spec, name=str(folder / "target"))
    place = place_of(spec, str(folder / "eagle3"))
    assert costs.kept(place) is None
    costs.keep(place, COSTS)
    assert costs.kept(place_of(spec, str(folder / "eagle3"))) == COSTS
    others = [
        place_of(replace(spec, dtype=torch.bfloat16), str(folder / "eagle3")),
        place_of(replace(spec, backend="native"), str(folder / "eagle3")),
        place_of(replace(spec, name=str(folder / "other")), str(folder / "eagle3")),
        place_of(spec, str(folder / "eagle")),
        place_of(spec, "lookup"),
        place_of(spec, f"small:{folder / 'target'}"),
    ]
    assert len(set(others)) == 6 and all(costs.kept(own) is None for own in others)
    monkeypatch.setattr("eyas.kept.machine", lambda: {"cpu": "a", "threads": 1})
    assert costs.kept(place) is None, "another number of threads"
    monkeypatch.setattr("eyas.kept.machine", lambda: {"cpu": "b", "threads": 2})
    assert costs.kept(place) is None, "another machine"
    monkeypatch.undo()
    assert "threads" in machine.machine(), "the real one says how many there are"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"costs": {"verify": []}}', '{"costs": {"verify": 3}}'])
def test_a_broken_record_is_none(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    place = place_of(replace(tiny_target().spec, name=str(folder / "target")), "lookup")
    costs.keep(place, COSTS)
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(text)
    assert costs.kept(place) is None
