"""A replay has the rounds of the live run: trees, paths, tokens, and so tau and every other figure."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import VOCAB, needs_core, tiny_target

from eyas import native
from eyas.drafters.base import Drafter
from eyas.drafters.lookup import Lookup
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError
from eyas.generate import Request, generate, generate_plain
from eyas.initial import new_head
from eyas.measure import Answer, alpha_by_depth, tau, timed
from eyas.policies import Chain, Dynamic, Level, Sampled, Static, parse_policy
from eyas.replay import Guesses, NotInTrace, Trace, _Union, replay, trace
from eyas.sampling import Sampling
from eyas.targets.eager import EagerTarget
from eyas.verify import Stop

PROMPT = [1, 8, 4, 4, 30]
TREES = ["chain:1", "chain:5", "static", "dynamic:levels=4,top_k=3,nodes=7", "dynamic:levels=6,top_k=2,nodes=99"]


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target()


def drafters(target: EagerTarget) -> dict[str, Drafter]:
    """Two that are mostly wrong below their first guess, one by the text alone, one that is right."""
    vocabulary = torch.tensor([token for token in range(VOCAB) if token % 7])
    heads = {"eagle": new_head("eagle", target), "eagle3": new_head("eagle3", target, vocabulary)}
    return {kind: head.double().eval() for kind, head in heads.items()} | {
        "lookup": Lookup(),
        "small": SmallModel(tiny_target(seed=0)),
    }


def shape(answer: Answer) -> list[tuple]:
    """Everything in rounds but times and logits."""
    trees = [None if round_.tree is None else (round_.tree.tokens, round_.tree.parents) for round_ in answer.rounds]
    return [(tree, r.path, r.tokens, r.finish_reason) for tree, r in zip(trees, answer.rounds, strict=True)]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "lookup", "small"])
def test_a_replay_is_the_live_run(target: EagerTarget, kind: str) -> None:
    drafter = drafters(target)[kind]
    taus = set()
    for temperature, ends in ((0.0, False), (0.8, True)):
        plain = timed(generate_plain(target, PROMPT, Sampling(temperature, seed=3), Stop(36)))
        stop = Stop(36, eos_ids=(plain.tokens[23],)) if ends else Stop(25)  # both fall inside of paths
        request = Request(PROMPT, Sampling(temperature, seed=3), stop)
        answer = timed(generate_plain(target, PROMPT, request.sampling, stop))
        recorded = trace(target, drafter, request, answer, [parse_policy(tree) for tree in TREES])
        for tree in TREES:
            policy = parse_policy(tree)
            live = timed(generate(target, drafter, policy, PROMPT, request.sampling, stop))
            again = replay(recorded, policy)
            assert shape(again) == shape(live), (temperature, tree)
            assert (tau([again]), alpha_by_depth([again])) == (tau([live]), alpha_by_depth([live]))
            taus.add(tau([again]))
    assert len(taus) > 1, "the trees differ in what they are worth"


@needs_core
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_replay_on_the_native_core_has_the_very_scores(dtype: str, folder) -> None:
    """Drafts are the same to the last bit, however many tokens an `observe` takes."""
    from eyas.model import load

    model = load(str(folder / "target"), str(folder / "eagle3"), backend="native", dtype=dtype)
    assert model.drafter is not None and native.cpu_features() is not None
    ids = model.encode("hello")
    request = Request(ids, Sampling(0.7, seed=1), Stop(40))
    answer = timed(generate_plain(model.target, ids, request.sampling, request.stop))
    trees = ("chain:4", "dynamic:levels=4,top_k=3,nodes=8", "dynamic:levels=5,top_k=10,nodes=30")
    recorded = trace(model.target, model.drafter, request, answer, [parse_policy(tree) for tree in trees])
    for tree in trees:
        live = timed(replace(model, policy=parse_policy(tree)).rounds(ids, request.sampling, request.stop))
        again = replay(recorded, parse_policy(tree))
        assert shape(again) == shape(live)
        assert [r.tree.scores for r in again.rounds if r.tree] == [r.tree.scores for r in live.rounds if r.tree]


def test_by_hand() -> None:
    """The answer 5 6 7 8 9. Below 5 the drafter names 1 and 6, and below 6 the tokens 7 and 2; below 8 only 9."""
    first = Guesses(2, {(): ([1, 6], [-0.5, -1.0]), (6,): ([7, 2], [-0.1, -3.0]), (1,): ([3, 4], [-2.0, -2.5])})
    others = [Guesses(2, {(): ([1, 2], [-0.5, -1.0])}), Guesses(2, {(): ([9, 1], [-0.1, -3.0])})]
    recorded = Trace([5, 6, 7, 8, 9], "length", 5, [first, others[0], others[0], others[1]])
    two = replay(recorded, Dynamic(2, 2, 6))
    # 5 | 6 7 8 (both levels held) | at 8 the budget leaves one token: no level is drafted
    assert [r.tokens for r in two.rounds] == [[5], [6, 7, 8], [9]]
    assert [r.path for r in two.rounds] == [[], [0, 2, 5], [0]]
    assert two.rounds[1].tree is not None and two.rounds[1].tree.tokens == (5, 1, 6, 3, 4, 7, 2)
    assert tau([two]) == 2.0 and two.rounds[-1].finish_reason == "length"
    one = replay(recorded, Dynamic(1, 2, 6))  # 5 | 6 7 | 8 (nothing held) | 9
    assert [r.tokens for r in one.rounds] == [[5], [6, 7], [8], [9]]
    assert tau([one]) == 4 / 3
    assert tau([replay(recorded, Dynamic(1, 2, 1))]) == 1.0, "the one node kept is token 1, which never holds"


def test_what_a_trace_does_not_contain_is_said(target: EagerTarget) -> None:
    drafter = drafters(target)["eagle"]
    request = Request(PROMPT, Sampling(), Stop(20))
    answer = timed(generate_plain(target, PROMPT, Sampling(), Stop(20)))
    recorded = trace(target, drafter, request, answer, [Dynamic(3, 2, 10)])
    assert tau([replay(recorded, Dynamic(3, 2, 4))]) is not None, "the same tree with fewer nodes is contained"
    for tree in ("chain:4", "dynamic:levels=2,top_k=3,nodes=4", "static"):
        with pytest.raises(NotInTrace, match="asks for"):
            replay(recorded, parse_policy(tree))
    with pytest.raises(InputError, match="drawn anew"):
        replay(recorded, Sampled())
    with pytest.raises(InputError, match="drawn anew"):
        trace(target, drafter, request, answer, [Chain(2), Sampled()])


def test_a_wide_tree_need_not_contain_a_narrow_one() -> None:
    """Level 1: .40 .30 .29. Below the first .39 and crumbs, below the second .10 twice, below the third .15 twice: the
    best two of two parents are .39 and .10, the best three of three .39 .15 .15."""
    first = Level([math.log(p) for p in (0.40, 0.30, 0.29)], [(0,), (1,), (2,)])
    values = {(0, 0): 0.39, (0, 1): 0.005, (0, 2): 0.005, (1, 0): 0.10, (1, 1): 0.10, (1, 2): 0.10, (2, 0): 0.15,
              (2, 1): 0.14, (2, 2): 0.0}  # fmt: skip
    second = Level([math.log(p + 1e-9) for p in values.values()], list(values))
    for policies, expected in (
        ([Dynamic(3, 3, 9)], [(0, 0), (2, 0), (2, 1)]),
        ([Dynamic(3, 2, 9)], [(0, 0), (1, 0)]),
        ([Dynamic(3, 3, 9), Dynamic(3, 2, 9), Chain(2)], [(0, 0), (1, 0), (2, 0), (2, 1)]),
        ([Static(((0,), (2,), (2, 2), (2, 2, 1)))], [(2, 2)]),
        ([Chain(3)], [(0, 0)]),
        ([Chain(2)], []),
    ):
        union = _Union(policies)
        union.expands(first)
        assert [second.paths[i] for i in union.expands(second)] == expected
