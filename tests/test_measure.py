"""Divergences: rounding is told from bugs."""

from __future__ import annotations

import torch
from tiny import tiny_target

from eyas.generate import Round, generate_plain
from eyas.measure import Answer, find_divergence, tau, timed
from eyas.sampling import Sampling
from eyas.tree import Tree
from eyas.verify import Stop

PROMPT = [1, 8, 4, 4, 30]


def forged(answer: Answer, position: int, token: int) -> Answer:
    """The answer with another token at `position`, as if its drafted run had drawn it."""
    rounds = list(answer.rounds)
    old = rounds[position]
    rounds[position] = Round(old.tree, old.path, [token], old.finish_reason, 0, 0, 0)
    return Answer(rounds, answer.seconds)


def test_a_wrong_token_is_not_explained() -> None:
    target = tiny_target(torch.float32)
    for sampling in (Sampling(), Sampling(0.8, top_p=0.5), Sampling(1.0, top_k=3)):
        plain = timed(generate_plain(target, PROMPT, sampling, Stop(12)))
        assert find_divergence(target, PROMPT, plain, plain, sampling) is None
        wrong = (plain.tokens[5] + 1) % 61
        found = find_divergence(target, PROMPT, plain, forged(plain, 5, wrong), sampling)
        assert found is not None
        assert (found.position, found.plain_token, found.token) == (5, plain.tokens[5], wrong)
        assert not found.explained


def test_a_near_tie_is_explained() -> None:
    """Two rows of the head that differ by less than float32's rounding: either token may win."""
    target = tiny_target(torch.float32)
    plain = timed(generate_plain(target, PROMPT, Sampling(), Stop(12)))
    best, twin = plain.tokens[0], (plain.tokens[0] + 1) % 61
    with torch.no_grad():
        target.head_VD[twin] = target.head_VD[best]
    rounds = [Round(None, [], [min(best, twin)], None, 0, 0, 0)]
    low, high = (Answer([Round(None, [], [t], None, 0, 0, 0)], 1.0) for t in sorted((best, twin)))
    found = find_divergence(target, PROMPT, low, high, Sampling())
    assert found is not None and found.gap == 0.0 and found.explained
    assert rounds[0].tokens == low.tokens


def test_an_answer_that_ends_early_is_not_explained() -> None:
    target = tiny_target(torch.float32)
    plain = timed(generate_plain(target, PROMPT, Sampling(), Stop(12)))
    found = find_divergence(target, PROMPT, plain, Answer(plain.rounds[:7], 1.0), Sampling())
    assert found is not None
    assert (found.position, found.token, found.explained) == (7, None, False)


def test_tau_leaves_the_prompt_out() -> None:
    first = Round(None, [], [4], None, 0, 0, 0)
    three = Round(Tree.chain([4, 5, 6]), [0, 1, 2], [5, 6, 7], None, 0, 0, 0)
    one = Round(Tree.chain([7, 1]), [0], [9], "stop", 0, 0, 0)
    assert tau([Answer([first, three, one], 1.0)]) == 2.0
    assert tau([Answer([first], 1.0)]) is None
    assert tau([Answer([first, three], 1.0), Answer([first, one], 1.0)]) == 2.0
