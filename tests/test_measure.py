"""Figures from rounds, worked out by hand; divergences: rounding is told from bugs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tiny import VOCAB, tiny_target

from eyas.drafters.base import Candidates, Drafter
from eyas.generate import Round, generate, generate_plain
from eyas.measure import (
    ROUNDING,
    Answer,
    Bin,
    acceptance_by_depth,
    acceptance_by_depth_and_rank,
    acceptance_by_rank,
    alpha_by_depth,
    calibration,
    draws,
    find_divergence,
    judge,
    level_ms,
    n_alpha,
    path_calibration,
    rejected_outside_vocabulary,
    tau,
    timed,
)
from eyas.policies import Chain
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
    sampling = Sampling(1.0, top_p=0.6, seed=next(s for s in range(99) if drawn(s, kept) == 1))
    assert judge(cut, kept, (0, 1), sampling, prefix, ALLOWED).explained


def drawn(seed: int, logits: torch.Tensor) -> int:
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


@dataclass
class Scripted(Drafter[list[int]]):
    """Knows the whole text, and names the right token at some places of the answer, a wrong one at all others."""

    text: list[int]
    right: set[int]
    kind = "eagle"
    reads = ()

    def new_state(self, first: int | None = None) -> list[int]:
        """The place in the text of the token that each row of the round guesses; the first row's is kept up."""
        return [1]

    def observe(self, state: list[int], tokens: Sequence[int], hidden_TLD: torch.Tensor, width: int) -> Candidates:
        state[:] = [state[0] + len(tokens)]
        return self._named(state)

    def expand(self, state: list[int], rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        new = [state[row] + 1 for row in rows]
        state += new
        return self._named(new)

    def _named(self, places: list[int]) -> Candidates:
        tokens = [self.text[at] if at - len(PROMPT) in self.right else (self.text[at] + 1) % VOCAB for at in places]
        return Candidates(torch.tensor(tokens)[:, None], torch.full((len(places), 1), -0.5))

    def rewind(self, state: list[int], length: int) -> None:
        raise NotImplementedError

    def can_propose(self, token: int) -> bool:
        return True


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tau_of_a_scripted_drafter(temperature: float) -> None:
    """Chains of three, twelve tokens. Token 0 is the prompt's. From 0: 1 and 2 hold, 3 does not: 1 2 3 come. From 3: 4.
    From 4: all three hold: 5 6 7 8. From 8, where the budget leaves two levels: 9 holds: 9 10. From 10, no level: 11.
    """
    target, sampling, stop = tiny_target(), Sampling(temperature, seed=5), Stop(12)
    plain = timed(generate_plain(target, PROMPT, sampling, stop)).tokens
    drafter = Scripted([*PROMPT, *plain], {1, 2, 5, 6, 7, 9})
    answer = timed(generate(target, drafter, Chain(3), PROMPT, sampling, stop))
    assert answer.tokens == plain
    assert [len(round_.tokens) for round_ in answer.rounds] == [1, 3, 1, 4, 2, 1]
    assert tau([answer]) == 11 / 5
    assert alpha_by_depth([answer]) == n_alpha([answer]) == [3 / 4, 2 / 3, 1 / 2]
    assert acceptance_by_depth([answer]) == [3 / 5, 2 / 5, 1 / 5]
    assert [len(round_.level_ms) for round_ in answer.rounds] == [0, 3, 3, 3, 2, 0]


# -- figures of three rounds, worked out by hand -----------------------------------------------------------------------

# Confidences: 5 has .62, 6 has .35; below 5 stand 7 (.55) and 8 (.22); below 7 stands 9 (.9).
VALUES = (1, 0.62, 0.35, 0.62 * 0.55, 0.62 * 0.22, 0.62 * 0.55 * 0.9)
TREE = Tree((4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 1, 3), tuple(map(math.log, VALUES)))
FIRST = Round(None, [], [4], None, None, 0, 0, 0)
THIRD = Round(TREE, [0, 1, 4], [5, 8, 77], None, None, 0, 0, 0, (1.0, 2.0, 4.0))  # 8 hit as second; no candidates below
NONE = Round(TREE, [0], [78], None, None, 0, 0, 0, (1.0, 2.0))
END = Round(TREE, [0, 1, 3], [5, 7], "stop", None, 0, 0, 0, (0.5,))  # the answer ends at 7: nothing is drawn below
ANSWERS = [Answer([FIRST, THIRD, NONE], 1.0), Answer([FIRST, END], 1.0)]


def test_acceptance_by_hand() -> None:
    assert tau(ANSWERS) == (3 + 1 + 2) / 3
    assert alpha_by_depth(ANSWERS) == [2 / 3, 1.0]
    assert acceptance_by_depth(ANSWERS) == [2 / 3, 2 / 3]
    assert acceptance_by_rank(ANSWERS) == [3 / 5, 1 / 5]
    assert acceptance_by_depth_and_rank(ANSWERS) == [[2 / 3, 0.0], [1 / 2, 1 / 2]]
    assert [(draw.depth, draw.rank, draw.token) for draw in draws(ANSWERS)] == [
        (1, 0, 5), (2, 1, 8), (1, None, 78), (1, 0, 5), (2, 0, 7),
    ]  # fmt: skip
    assert level_ms(ANSWERS) == [2.5, 4.0, 4.0]


def test_a_rank_counts_where_it_is_there() -> None:
    """5 and 6 below the root, 7 alone below 5."""
    tree = Tree((4, 5, 6, 7), (-1, 0, 0, 1))
    paths = [([0, 1, 3], [5, 7, 9]), ([0, 1], [5, 8]), ([0, 2], [6, 9])]
    answer = Answer([FIRST, *(Round(tree, path, tokens, None, None, 0, 0, 0) for path, tokens in paths)], 1.0)
    assert acceptance_by_rank([answer]) == [3 / 5, 1 / 3]
    assert acceptance_by_depth_and_rank([answer]) == [[2 / 3, 1 / 3], [1 / 2]]


def test_figures_of_plain_decoding_are_empty() -> None:
    plain = [Answer([FIRST, Round(Tree.chain([4]), [0], [9], "stop", None, 0, 0, 0)], 1.0)]
    assert (tau(plain), alpha_by_depth(plain), acceptance_by_depth(plain), acceptance_by_rank(plain)) == (1, [], [], [])
    assert (calibration(plain), path_calibration(plain), level_ms(plain)) == ([], [], [])
    assert rejected_outside_vocabulary(plain, lambda token: False) is None
    assert n_alpha(plain) is None


def figures(bins: list[Bin]) -> list[tuple[float, float, float, int]]:
    return [(bin_.low, round(bin_.confidence, 6), round(bin_.accepted, 6), bin_.count) for bin_ in bins]


def test_calibration_by_hand() -> None:
    """Three draws at the root: .62 hit twice, .35 never; two below 5: .55 hit once, .22 once."""
    assert figures(calibration(ANSWERS)) == [
        (0.2, 0.22, 0.5, 2), (0.3, 0.35, 0.0, 3), (0.5, 0.55, 0.5, 2), (0.6, 0.62, 0.666667, 3),
    ]  # fmt: skip


def test_path_calibration_by_hand() -> None:
    """Values .62, .35, .341, .1364 in all three rounds; .3069 in the first two: in the last nothing was drawn there."""
    assert figures(path_calibration(ANSWERS)) == [
        (0.1, 0.1364, 0.333333, 3), (0.3, round((3 * 0.35 + 3 * 0.341 + 2 * 0.3069) / 8, 6), 1 / 8, 8),
        (0.6, 0.62, 0.666667, 3),
    ]  # fmt: skip
    sure = [Answer([FIRST, Round(Tree((4, 5), (-1, 0)), [0, 1], [5, 6], None, None, 0, 0, 0)], 1.0)]
    assert calibration(sure) == path_calibration(sure) == [Bin(0.9, 1.0, 1.0, 1.0, 1)], "1 lies in the last step"


def test_rejections_outside_the_vocabulary() -> None:
    assert rejected_outside_vocabulary(ANSWERS, lambda token: token < 70) == 1.0, "77 met no candidate: no rejection"
    assert rejected_outside_vocabulary(ANSWERS, lambda token: True) == 0.0


def test_n_alpha_is_of_chains() -> None:
    chain = Tree.chain([4, 5, 6, 7])
    hit = Round(chain, [0, 1, 2, 3], [5, 6, 7, 8], None, None, 0, 0, 0)
    half = Round(chain, [0, 1], [5, 9], None, None, 0, 0, 0)
    missed = Round(chain, [0], [9], None, None, 0, 0, 0)
    assert n_alpha([Answer([FIRST, hit, half, missed, hit], 1.0)]) == [3 / 4, 2 / 3, 1.0]
    assert n_alpha([Answer([FIRST, hit, NONE], 1.0)]) is None
