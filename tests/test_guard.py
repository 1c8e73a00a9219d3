"""The guard's account and the weighing of adaptive trees by hand; that both change nothing but time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from test_lossless import PROMPT, Oracle, untrained
from test_policies import Scripted
from tiny import needs_core, tiny_target

from eyas.by_value import Adaptive, Dynamic, Weighed
from eyas.drafters.base import Drafter
from eyas.drafters.lookup import Lookup
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError
from eyas.generate import Memory, Request, generate, generate_plain
from eyas.guard import Guarded
from eyas.measure import Answer, timed
from eyas.policies import Chain, Sampled, grow, parse_policy
from eyas.policy import Level, Policy
from eyas.replay import replay, trace
from eyas.sampling import Sampling
from eyas.targets.eager import EagerTarget
from eyas.tree import Tree
from eyas.verify import Stop


@dataclass(frozen=True)
class Table:
    """Prices that are easy to add up: ms of a plain round, and of each part of one with a tree."""

    plain: float = 10.0
    fixed: float = 11.0
    node: float = 1.0
    level: float = 0.5
    row: float = 0.5
    absorb: float = 0.02

    def level_ms(self, rows: float) -> float:
        return self.level + self.row * rows

    def round_ms(self, nodes: float, rows: Sequence[int]) -> float:
        return self.fixed + self.node * nodes + sum(map(self.level_ms, rows))

    def plain_ms(self) -> float:
        return self.plain


# below the root stand .5 .3 .08, and below each of them the same
@pytest.mark.parametrize(
    ("rate", "hope", "asked", "values"),
    [
        # one row: .5 x .6 - .1 x (1 + 1) = .1; two: .48 - .1 x (1.5 + 2) = .13; three: .528 - .1 x (2 + 3) = .028.
        # Level two has .25 .15 .15 .09 ...: one row brings .15 - .2. Of nodes, those above .1 x 1 are verified.
        (0.1, 0.6, [[10, 11]], [0.5, 0.3, 0.25, 0.15, 0.15]),
        (0.1, 0.3, [], [0.5, 0.3]),  # .5 x .3 - .2
        (0.4, 0.6, [], [0.5]),
        (0.6, 0.6, [], []),  # not even the first node is worth its millisecond
    ],
)
def test_levels_and_nodes_that_pay(rate: float, hope: float, asked: list, values: list[float]) -> None:
    prices, most = Table(), Dynamic(3, 3, 20)
    node_ms = [prices.round_ms(m, ()) - prices.round_ms(0, ()) for m in range(21)]
    policy = Weighed(most, rate, 1.0, hope, [prices.level_ms(k) for k in range(4)], node_ms)
    drafter = Scripted((0.5, 0.3, 0.08))
    tree = grow(policy, drafter, None, 1, drafter.candidates(1, 3), 9)  # type: ignore[arg-type]
    assert [tokens for _, tokens in drafter.asked] == asked
    assert sorted((round(math.exp(s), 3) for s in tree.scores[1:]), reverse=True) == values


def test_a_verify_cost_that_leaps_is_weighed_as_a_whole() -> None:
    """Nodes 2 and 3 cost nothing on top of the first; the fourth costs 9 ms, and so do it and the fifth together."""
    policy = Weighed(Dynamic(1, 5, 5), 0.1, 1.0, 0.5, [0.0] * 6, [0.0, 1.0, 1.0, 1.0, 10.0, 10.0])
    assert len(policy.survivors([0.0, *map(math.log, (0.3, 0.2, 0.1, 0.1, 0.05))])) == 1 + 3
    assert len(policy.survivors([0.0, *map(math.log, (0.9, 0.5, 0.5, 0.5, 0.5))])) == 1 + 5  # 1 for 0.9


def test_path_values_are_trusted_as_far_as_they_came_true() -> None:
    pilot = Adaptive(Dynamic(3, 3, 20), Table()).pilot()
    first = pilot.choose()
    assert isinstance(first, Weighed)
    assert (first.trust, first.hope, first.rate) == (1.0, 0.5, 6 / 40)
    tree = Tree((1, 10, 11, 10), (-1, 0, 0, 1), (0.0, math.log(0.5), math.log(0.25), math.log(0.25)))
    pilot.see(tree, [0, 1, 3], [2])  # two of the promised 1.0 came true, below both nodes with candidates
    then = pilot.choose()
    assert isinstance(then, Weighed)
    assert then.trust == pytest.approx((0.95 * 4 + 2) / (0.95 * 4 + 1.0))
    assert then.hope == pytest.approx((0.95 * 2 + 2) / (0.95 * 4 + 2))
    assert then.rate == pytest.approx((0.95 * 6 + 3) / (0.95 * 40 + 11 + 3 + 1.5))
    for _ in range(99):
        pilot.see(tree, [0], [2])
    last = pilot.choose()
    assert isinstance(last, Weighed)
    assert last.rate == 1 / 10 and last.trust < 0.02  # plain decoding's rate can always be had


ROOT, TREE = Tree((1,), (-1,)), Tree((1, 10, 11), (-1, 0, 0))


def played(policy: Policy, right: Sequence[bool], rounds: int) -> str:
    """What is chosen from round to round, where drafts are right as given and from there on wrong: T a tree, t a trial,
    . a plain round."""
    pilot, drawn, outcomes = policy.pilot(), "", iter(right)
    for _ in range(rounds):
        chosen = pilot.choose()
        drawn += "." if chosen is None else "t" if chosen == Chain(1) else "T"
        path = [0, 1] if chosen is not None and next(outcomes, False) else [0]
        tree = ROOT if chosen is None else TREE if drawn[-1] == "T" else Tree.chain([1, 10])
        pilot.see(tree, path, [])
    return drawn


def test_the_account_by_hand() -> None:
    prices = Table(fixed=11.0, node=1.02)  # TREE takes 13.04, a trial 12.02
    policy = Guarded(Dynamic(3, 3, 2), prices)
    # 7.5 - 3 x 3.04 = -1.62; + 5 x .4 = .38: a trial, after five plain rounds: 10 - 12.02 - .1, so -1.74;
    # + 9 x .2 = .06: a trial, - 2.02 - .18, so -2.14; and 22 x .1 make up for it
    away = [5, 9, 22]
    assert played(policy, [], 3 + sum(away) + 3) == "TTT" + "".join("." * num + "t" for num in away)
    # the second trial right: .06 + 20 - 12.2 = 7.86, so drafting is back for three rounds of 3.04: -1.26;
    # the allowance is whole again: four plain rounds
    back = played(policy, [False] * 4 + [True], 3 + 5 + 1 + 9 + 1 + 3 + 4 + 1)
    assert back == "TTT" + "." * 5 + "t" + "." * 9 + "t" + "TTT" + "...." + "t"
    # five right rounds save 6.975 each, but no more than 80 stay saved: 27 wrong ones, not 5
    assert played(policy, [True] * 30, 30 + 28) == "T" * 30 + "T" * 27 + "."


def test_hopeless_drafts_cost_less_than_three_percent() -> None:
    """At the demo target's prices in bfloat16 and in int8, 128 tokens."""
    for plain, tree_ms, trial_ms in ((10.5, 14.5, 12.0), (6.0, 9.0, 7.2)):
        prices = Table(plain=plain, fixed=2 * trial_ms - tree_ms, node=tree_ms - trial_ms)
        rounds = played(Guarded(Dynamic(4, 3, 2), prices), [], 127)
        taken = sum({"T": tree_ms, "t": trial_ms, ".": plain}[kind] for kind in rounds)
        assert 127 * plain / taken > 0.98, rounds


def test_drawn_trees_are_not_guarded() -> None:
    with pytest.raises(InputError, match="drawn"):
        Guarded(Sampled(2, 2), Table())
    with pytest.raises(InputError, match="measured"):
        parse_policy("adaptive").pilot()
    assert str(parse_policy("adaptive:nodes=9")) == "adaptive:levels=8,top_k=10,nodes=9"


def test_without_a_drafter_no_prices_are_asked_for() -> None:
    rounds = list(generate(tiny_target(), None, parse_policy("adaptive"), PROMPT, Sampling(), Stop(3)))
    assert len(rounds) == 3


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target()


# Prices at which drafting pays always, now and then, and never.
PRICES = {"cheap": Table(fixed=6, node=0.1), "fair": Table(node=0.4), "dear": Table(fixed=14)}


def policies(prices: Table) -> list[Policy]:
    adaptive = Adaptive(Dynamic(4, 3, 9), prices)
    return [adaptive, Guarded(adaptive, prices), *(Guarded(parse_policy(t), prices) for t in ("chain:3", "static"))]


def shape(answer: Answer) -> list[tuple]:
    """Everything in rounds but times and logits."""
    return [(r.tree and (r.tree.tokens, r.tree.parents), r.path, r.tokens, r.finish_reason) for r in answer.rounds]


@dataclass(frozen=True)
class AtRandom(Policy):
    """Any policy or none, drawn anew for every round; a pilot of its own."""

    draws: random.Random
    levels, width = 0, 0  # never asked for

    def expands(self, level: Level) -> list[int]:
        raise AssertionError

    def pilot(self) -> AtRandom:
        return self

    def choose(self) -> Policy | None:
        return self.draws.choice([None, None, Chain(1), Chain(4), Dynamic(3, 2, 5), parse_policy("static")])

    def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
        pass


def test_pilots_are_told_what_was_expanded(target: EagerTarget) -> None:
    """In a live run and in a replay; and a guarded policy's own pilot goes on learning."""
    request, seen = Request(PROMPT, Sampling(), Stop(20)), []

    class Noting(AtRandom):
        def pilot(self) -> Noting:
            return self

        def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
            seen.append((len(tree) - 1, list(rows)))

        def choose(self) -> Policy | None:
            return [None, Chain(3), Dynamic(3, 2, 5)][len(seen) % 3]

    drafter = untrained("eagle3", target)
    answer = timed(generate(target, drafter, Noting(random.Random(0)), *vars(request).values()))
    assert seen[:3] == [(0, []), (3, [1, 1]), (5, [2, 2])]
    live, plain = seen.copy(), timed(generate_plain(target, *vars(request).values()))
    seen.clear()
    recorded = trace(target, drafter, request, plain, [Chain(3), Dynamic(3, 2, 5)])
    assert shape(replay(recorded, Noting(random.Random(0)))) == shape(answer)
    assert seen == live

    pilot = Guarded(Adaptive(Dynamic(3, 3, 9), Table()), Table()).pilot()
    before = pilot.choose()
    pilot.see(TREE, [0], [])
    assert isinstance(before, Weighed) and isinstance(after := pilot.choose(), Weighed)
    assert after.trust < before.trust and after.hope < before.hope


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_plain_and_rounds_repeat(target: EagerTarget, temperature: float) -> None:
    drafters: dict[str, Drafter] = {"eagle3": untrained("eagle3", target)}
    drafters |= {"lookup": Lookup(), "right": SmallModel(target)}
    sampling, stop, plains = Sampling(temperature, seed=5), Stop(28), 0
    plain = timed(generate_plain(target, PROMPT, sampling, stop))
    for kind, drafter in drafters.items():
        for policy in [AtRandom(random.Random(1)), *policies(PRICES["fair"]), *policies(PRICES["dear"])[1:2]]:
            run = timed(generate(target, drafter, policy, PROMPT, sampling, stop))
            assert run.tokens == plain.tokens, (kind, policy)
            plains += sum(round_.draft_ms == 0 for round_ in run.rounds[1:])
            if kind == "eagle3" and isinstance(policy, Guarded):
                assert shape(timed(generate(target, drafter, policy, PROMPT, sampling, stop))) == shape(run)
    assert plains > 60


def test_a_replay_follows_the_pilot(target: EagerTarget) -> None:
    """A trace of the widest tree contains the adaptive and guarded ones inside of it."""
    drafter, request = untrained("eagle3", target), Request(PROMPT, Sampling(0.8, seed=1), Stop(40))
    answer = timed(generate_plain(target, PROMPT, request.sampling, request.stop))
    recorded = trace(target, drafter, request, answer, [Dynamic(4, 3, 9)])
    for prices in PRICES.values():
        for policy in policies(prices)[:2]:
            live = timed(generate(target, drafter, policy, PROMPT, request.sampling, request.stop))
            assert shape(replay(recorded, policy)) == shape(live)


@needs_core
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_on_the_native_core_a_drafter_that_was_away_guesses_as_one_that_stayed(dtype: str, folder) -> None:
    """The trees of a run with plain rounds between are, to the last bit of their scores, those that a replay finds
    where the drafter saw every token as it came."""
    from eyas.model import load

    model = load(str(folder / "target"), str(folder / "eagle3"), backend="native", dtype=dtype)
    assert model.drafter is not None
    request = Request(model.encode("hello"), Sampling(0.7, seed=1), Stop(60))
    plain = timed(model.rounds(*(request.prompt, request.sampling, request.stop)))
    trees = [Chain(4), Dynamic(3, 2, 5), parse_policy("static")]
    recorded = trace(model.target, model.drafter, request, plain, trees)
    policy = AtRandom(random.Random(2))
    live = timed(generate(model.target, model.drafter, policy, *(request.prompt, request.sampling, request.stop)))
    assert live.tokens == plain.tokens
    away = [round_.draft_ms == 0 for round_ in live.rounds[1:]]
    assert 10 < sum(away) < len(away) - 10
    again = replay(recorded, AtRandom(random.Random(2)))
    assert [r.tree and r.tree.scores for r in again.rounds] == [r.tree and r.tree.scores for r in live.rounds]


def test_a_next_turn_does_not_read_again_what_the_drafter_missed(target: EagerTarget) -> None:
    drafter, memory = Oracle(target, offset=1), Memory()
    policy, stop = Guarded(Chain(2), Table(fixed=30)), Stop(40)
    first = timed(generate(target, drafter, policy, PROMPT, Sampling(), stop, memory=memory))
    assert sum(round_.draft_ms == 0 for round_ in first.rounds[1:]) > 30
    turn = [*PROMPT, *first.tokens[:-3], 60, 11]  # it parts before the answer's end
    drafter.shown.clear()
    read: list[int] = []
    verify = target.verify
    target.verify = lambda items, *a, **k: (read.append(len(items[0][1])), verify(items, *a, **k))[1]  # type: ignore
    second = timed(generate(target, drafter, Chain(2), turn, Sampling(), Stop(9), memory=memory))
    del target.verify
    assert second.tokens == timed(generate_plain(target, turn, Sampling(), Stop(9))).tokens
    assert read[0] < 8, "the target had read the answer"
    tokens, hidden_TLD = drafter.shown[0]
    text = turn + second.tokens[:1]
    assert tokens == text[-len(tokens) :] and len(tokens) > 20
    states_TLD = target.verify([(target.new_cache(), Tree.chain(turn))], drafter.reads)[0].hidden_NLD
    torch.testing.assert_close(hidden_TLD, states_TLD[-len(tokens) :], rtol=0, atol=1e-10)
