"""A forecast has the rounds of a replay, at the costs that it is given."""

from __future__ import annotations

import pytest
import torch
from tiny import VOCAB, tiny_target

from eyas.costs import Costs
from eyas.drafters.base import Drafter
from eyas.drafters.lookup import Lookup
from eyas.drafters.small_model import SmallModel
from eyas.forecast import UNPRUNED, Foresight, Tally, tree_bytes, unpruned
from eyas.generate import Request, generate_plain
from eyas.initial import new_head
from eyas.measure import tau, timed
from eyas.policies import Chain, Dynamic, Policy, parse_policy
from eyas.replay import Guesses, NotInTrace, Trace, replay, trace
from eyas.sampling import Sampling
from eyas.verify import Stop

COSTS = Costs(
    verify=((0, 10.0), (8, 18.0)),
    expand=((1, 1.0), (5, 3.0)),
    first=2.0,
    rest=0.5,
    plain_rest=0.25,
    rest_per_node=0.125,
    read=0.5,
    absorb=0.25,
)


def guesses(*branches: str) -> Guesses:
    """Guesses at a place: below each named path of letters, letters and their chances in tenths."""
    found = Guesses(width=2)
    for branch in branches:
        path, _, below = branch.partition(">")
        pairs = [(ord(pair[0]), float(torch.tensor(int(pair[1]) / 10).log())) for pair in below.split()]
        found.below[tuple(map(ord, path))] = ([token for token, _ in pairs], [score for _, score in pairs])
    return found


def test_a_forecast_worked_out_by_hand() -> None:
    """The answer is a b c d e. At a the drafter has b (0.6) and x (0.4), below b y (0.6) and c (0.3), below x z (0.9):
    path values .6, .4, .36, .18, .36, so c is the fifth of five. At c it has d and then e; elsewhere it is wrong."""
    root = guesses(">b6 x4", "b>y6 c3", "x>z9")
    third = guesses(">d9 x1", "d>e9 x1", "x>x5 y4")
    other = guesses(">q9 w1", "q>q9 w1", "w>q9 w1")
    recorded = Trace([ord(letter) for letter in "abcde"], "length", 50, [root, other, third, other])
    foresight = Foresight(recorded, 20, [Dynamic(2, 2, 5), Chain(1)])
    # two levels, all nodes: b and c are accepted and the target adds d; then q is wrong and the target adds e
    whole = foresight.tally(Dynamic(2, 2, 5), COSTS)
    assert (whole.answers, whole.tokens, whole.forwards) == (1, 5, 2) and whole.tau == 2.0
    rounds = [15.0 + 2 + 1.5 + 0.5 + 5 * 0.125] * 2  # two rows at 1.5
    assert whole.milliseconds == pytest.approx(20 * 0.5 + 20 * 0.25 - 2 + sum(rounds))
    # four nodes: c is cut off; b is accepted and c added; then d and e
    cut = foresight.tally(Dynamic(2, 2, 4), COSTS)
    assert (cut.forwards, cut.tau) == (2, 2.0)
    assert cut.milliseconds == pytest.approx(13.0 + 2 * (14.0 + 2 + 1.5 + 0.5 + 0.5))
    one = foresight.tally(Chain(1), COSTS)  # b, and c added; d, and e added
    assert (one.forwards, one.milliseconds) == (2, pytest.approx(13.0 + 2 * (11.0 + 2 + 0.5 + 0.125)))
    plain = foresight.plain(COSTS)
    assert (plain.tau, plain.milliseconds) == (1.0, 10.0 + 4 * 10.25)
    both = whole + cut
    assert (both.tau, both.tokens_per_second) == (2.0, pytest.approx(1e4 / both.milliseconds)) and Tally().tau is None


GRID: list[Policy] = [
    Dynamic(levels, top_k, nodes) for levels in (1, 2, 4, 5) for top_k in (1, 2, 3) for nodes in (1, 2, 3, 4, 7, 11, 99)
]


@pytest.mark.parametrize("kind", ["eagle3", "lookup", "small"])
def test_a_forecast_is_the_replay(kind: str) -> None:
    target = tiny_target()
    drafter: Drafter = Lookup() if kind == "lookup" else SmallModel(tiny_target())
    if kind == "eagle3":
        drafter = new_head("eagle3", target, torch.arange(0, VOCAB, 2)).double().eval()
    policies = [*GRID, *map(parse_policy, ("chain:1", "chain:4", "static", "dynamic:levels=6,top_k=2,nodes=9"))]
    shapes = [*dict.fromkeys(map(unpruned, policies))]
    prompt, taus = [1, 8, 4, 4, 30], set()
    for temperature, length in ((0.0, 25), (0.8, 14)):
        request = Request(prompt, Sampling(temperature, seed=3), Stop(length))
        answer = timed(generate_plain(target, prompt, request.sampling, request.stop))
        recorded = trace(target, drafter, request, answer, shapes)
        foresight = Foresight(recorded, len(prompt), policies)
        for policy in policies:
            found, rounds = foresight.tally(policy, COSTS), replay(recorded, policy)
            assert found.tau == tau([rounds]), str(policy)
            assert (found.tokens, found.forwards) == (len(answer.tokens), len(rounds.rounds) - 1)
            sizes = sum(len(round_.tree) - 1 for round_ in rounds.rounds if round_.tree is not None)
            free = Costs(((0, 0.0), (1, 1.0)), (), 0.0, 0.0, 0.0)  # a millisecond for each node
            assert foresight.tally(policy, free).milliseconds == pytest.approx(sizes), str(policy)
            taus.add(found.tau)
    assert len(taus) > 1, "the trees differ in what they are worth"


def test_levels_that_the_budget_leaves_out_cost_nothing() -> None:
    """A right drafter's chain of 4 over 7 tokens: 5 of them, then one that only one level is left for."""
    target = tiny_target()
    request = Request([1, 8, 4], Sampling(), Stop(8))
    answer = timed(generate_plain(target, request.prompt, request.sampling, request.stop))
    recorded = trace(target, SmallModel(tiny_target()), request, answer, [Dynamic(4, 2, UNPRUNED)])
    per_level = Costs(((0, 0.0),), ((1, 1.0), (2, 2.0)), 0.0, 0.0, 0.0)
    foresight = Foresight(recorded, 3, [Chain(4), Dynamic(2, 2, 6)])
    assert foresight.tally(Chain(4), per_level).milliseconds == 3.0, "levels 2 to 4; then 2 tokens: one level"
    assert foresight.tally(Dynamic(2, 2, 6), per_level).milliseconds == 4.0, "two rows; 3, 3 and 1 tokens, no level"


def test_a_tree_outside_the_trace_is_refused() -> None:
    recorded = Trace([97, 98, 99], "length", 50, [guesses(">b6 x4"), guesses(">b6 x4")])
    assert Foresight(recorded, 1, [Dynamic(1, 2, 2)]).tally(Dynamic(1, 2, 2), COSTS).forwards == 1
    for policy in (Dynamic(1, 3, 3), Dynamic(2, 2, 4), Dynamic(3, 2, 4)):
        with pytest.raises(NotInTrace):
            Foresight(recorded, 1, [policy])


def test_the_memory_of_a_tree() -> None:
    spec = tiny_target().spec  # 4 layers, 2 K/V heads of 12, width 32, float64
    assert tree_bytes(spec, (1, 2, 4), 5) == 6 * 8 * (2 * 4 * 2 * 12 + VOCAB + 3 * 32)
