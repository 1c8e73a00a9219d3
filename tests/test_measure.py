"""Divergences: rounding is told from bugs."""

from __future__ import annotations

from dataclasses import replace

import torch
from tiny import tiny_target

from eyas.generate import Round, generate_plain
from eyas.measure import ROUNDING, Answer, find_divergence, judge, tau, timed
from eyas.sampling import Prefix, Sampling
from eyas.tree import Tree
from eyas.verify import Stop

ALLOWED = ROUNDING[torch.float32]
PROMPT = [1, 8, 4, 4, 30]


def forged(answer: Answer, position: int, token: int) -> Answer:
    """The answer with another token at `position`, as if its drafted run had drawn it."""
    rounds = list(answer.rounds)
    old = rounds[position]
    rounds[position] = replace(old, tokens=[token])
    return Answer(rounds, answer.seconds)


def test_a_wrong_token_is_not_explained() -> None:
    target = tiny_target(torch.float32)
    for sampling in (Sampling(), Sampling(0.8, top_p=0.5), Sampling(1.0, top_k=3)):
        plain = timed(generate_plain(target, PROMPT, sampling, Stop(12)))
        assert find_divergence(PROMPT, plain, plain, sampling, ALLOWED) is None
        wrong = (plain.tokens[5] + 1) % 61
        found = find_divergence(PROMPT, plain, forged(plain, 5, wrong), sampling, ALLOWED)
        assert found is not None
        assert (found.position, found.plain_token, found.token) == (5, plain.tokens[5], wrong)
        assert not found.explained


def test_a_near_tie_is_explained() -> None:
    """Two computations that differ by less than float32's rounding, on either side of a tie or of a filter's cut."""
    prefix = Prefix([1, 2], 1)
    plain, other = torch.tensor([2.0, 2.0 + 1e-5, 0.0]).double(), torch.tensor([2.0 + 1e-5, 2.0, 0.0]).double()
    found = judge(plain, other, (1, 0), Sampling(), prefix, ALLOWED)
    assert found.explained and found.gap is not None and found.gap < 2e-5
    assert not judge(plain, other, (0, 1), Sampling(), prefix, ALLOWED).explained, "drawn from the wrong side"
    assert not judge(plain, plain, (1, 0), Sampling(), prefix, ALLOWED).explained, "nothing differs"
    assert not judge(plain, other + torch.tensor([0.01, 0, 0]), (1, 0), Sampling(), prefix, ALLOWED).explained
    # the mass before token 1 is a hair above, and a hair below, 0.6: token 1 is cut on one side, far from any score
    cut, kept = (torch.tensor([0.6 + e, 0.25, 0.15 - e]).log().double() for e in (1e-6, -1e-6))
    sampling = Sampling(1.0, top_p=0.6, seed=next(s for s in range(99) if draws(s, kept) == 1))
    assert judge(cut, kept, (0, 1), sampling, prefix, ALLOWED).explained


def draws(seed: int, logits: torch.Tensor) -> int:
    return Sampling(1.0, top_p=0.6, seed=seed).draw(logits, Prefix([1, 2], 1))


def test_an_answer_that_ends_early_is_not_explained() -> None:
    target = tiny_target(torch.float32)
    plain = timed(generate_plain(target, PROMPT, Sampling(), Stop(12)))
    found = find_divergence(PROMPT, plain, Answer(plain.rounds[:7], 1.0), Sampling(), ALLOWED)
    assert found is not None
    assert (found.position, found.token, found.explained) == (7, None, False)


def test_tau_leaves_the_prompt_out() -> None:
    first = Round(None, [], [4], None, None, 0, 0, 0)
    three = Round(Tree.chain([4, 5, 6]), [0, 1, 2], [5, 6, 7], None, None, 0, 0, 0)
    one = Round(Tree.chain([7, 1]), [0], [9], "stop", None, 0, 0, 0)
    assert tau([Answer([first, three, one], 1.0)]) == 2.0
    assert tau([Answer([first], 1.0)]) is None
    assert tau([Answer([first, three], 1.0), Answer([first, one], 1.0)]) == 2.0
