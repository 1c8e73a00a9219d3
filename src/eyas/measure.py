"""What happened, in numbers: all of them computed from `Round`s.

tau counts what one target forward is worth: tokens after the first, over forwards after the prompt's own. A divergence
between speculative and plain output is either explained by the back end's rounding, measured there, or a bug.
Legend: V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from eyas import data
from eyas.generate import Round
from eyas.sampling import Prefix, Sampling
from eyas.targets.base import Target, TargetSpec
from eyas.tree import Tree

CacheT = TypeVar("CacheT")

# How far a logit may move when the same model computes it in another batch shape. Measured on the demo target, with a
# factor of about four to spare; a larger difference is no rounding and makes a divergence unexplained. The native core
# computes a row in one way only: there any divergence is a bug.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2.0, torch.float16: 0.25}


def rounding(spec: TargetSpec) -> float:
    """How far a logit of this target may move with the shape of a batch."""
    return 0.0 if spec.backend == "native" else ROUNDING[spec.dtype]


@dataclass(frozen=True)
class Answer:
    """One answer and how it came about."""

    rounds: list[Round]
    seconds: float  # prompt included

    @property
    def tokens(self) -> list[int]:
        return [token for round_ in self.rounds for token in round_.tokens]

    def logits(self, position: int) -> Tensor:
        """[V]: what the token at `position` of the answer was drawn from."""
        for round_ in self.rounds:
            if position < len(round_.tokens):
                assert round_.logits_TV is not None, "the rounds were kept with their logits"
                return round_.logits_TV[position]
            position -= len(round_.tokens)
        raise IndexError(f"the answer has {len(self.tokens)} tokens")

    def without_logits(self) -> Answer:
        """The same answer without V numbers for each of its tokens and nodes."""
        trees = [None if round_.tree is None else round_.tree.without_laws() for round_ in self.rounds]
        rounds = [replace(round_, tree=tree, logits_TV=None) for round_, tree in zip(self.rounds, trees, strict=True)]
        return Answer(rounds, self.seconds)


def timed(rounds: Iterator[Round]) -> Answer:
    """Run a generation to its end."""
    start = time.perf_counter()
    collected = list(rounds)
    return Answer(collected, time.perf_counter() - start)


def target_forwards(answers: Sequence[Answer]) -> int:
    """Forwards of the target, the prompts' own left out."""
    return sum(len(answer.rounds) - 1 for answer in answers)


def plain_forwards(answers: Sequence[Answer]) -> int:
    """Those of the target's forwards that nothing was drafted for."""
    return sum(round_.tree is not None and round_.draft_ms == 0 for answer in answers for round_ in answer.rounds)


def tau(answers: Sequence[Answer]) -> float | None:
    """Mean tokens per target forward; None where there was no forward after the prompts'."""
    forwards = target_forwards(answers)
    delivered = sum(len(answer.tokens) for answer in answers) - len(answers)
    return delivered / forwards if forwards else None


@dataclass(frozen=True)
class Draw:
    """A token drawn at a node of the accepted path that had candidates below it."""

    tree: Tree
    node: int
    token: int
    children: list[int]  # the candidates, best first
    rank: int | None  # the place among them of the one that was hit

    @property
    def depth(self) -> int:
        """Of the candidates: 1 below the root."""
        return self.tree.depths[self.node] + 1


def draws(answers: Sequence[Answer]) -> Iterator[Draw]:
    """The draws that candidates could win, in order."""
    for round_ in (round_ for answer in answers for round_ in answer.rounds):
        if round_.tree is None:
            continue
        for node, token in zip(round_.path, round_.tokens, strict=False):  # an answer may end at an accepted node
            children = round_.tree.children(node)
            if children:
                hit = round_.tree.child(node, token)
                yield Draw(round_.tree, node, token, children, None if hit is None else children.index(hit))


def first_draws(answers: Sequence[Answer]) -> tuple[int, int]:
    """Draws below roots that had candidates: those that hit one, and all."""
    own = [draw.rank is not None for draw in draws(answers) if draw.node == 0]
    return sum(own), len(own)


def alpha_by_depth(answers: Sequence[Answer]) -> list[float]:
    """Per depth: of the draws at a node that had candidates below it, the share that hit one (first entry: depth 1)."""
    outcomes: list[list[bool]] = []
    for draw in draws(answers):
        outcomes += [[] for _ in range(draw.depth - len(outcomes))]
        outcomes[draw.depth - 1].append(draw.rank is not None)
    return [sum(own) / len(own) for own in outcomes]


def acceptance_by_depth(answers: Sequence[Answer]) -> list[float]:
    """Per depth: of all target forwards, the share that accepted a node at that depth (first entry: depth 1).

    Unlike `alpha_by_depth` it does not ask whether the depth was reached or drafted: 1 + the sum of the entries is tau,
    but for tokens that an answer's end cut off.
    """
    accepted = [len(round_.path) - 1 for answer in answers for round_ in answer.rounds if round_.tree is not None]
    depths = range(1, max(accepted, default=0) + 1)
    return [sum(number >= depth for number in accepted) / len(accepted) for depth in depths]


def acceptance_by_rank(answers: Sequence[Answer]) -> list[float]:
    """Per place among siblings (first entry: the best one): of the draws at a node that had such a candidate, the share
    that hit it. A dynamic tree keeps a second candidate mostly where the first one is in doubt."""
    return _by_rank(list(draws(answers)))


def acceptance_by_depth_and_rank(answers: Sequence[Answer]) -> list[list[float]]:
    """`acceptance_by_rank` for each depth (first entry: depth 1)."""
    by_depth: list[list[Draw]] = []
    for draw in draws(answers):
        by_depth += [[] for _ in range(draw.depth - len(by_depth))]
        by_depth[draw.depth - 1].append(draw)
    return [_by_rank(own) for own in by_depth]


def _by_rank(own: Sequence[Draw]) -> list[float]:
    most = max((len(draw.children) for draw in own), default=0)
    there = [sum(len(draw.children) > rank for draw in own) for rank in range(most)]
    return [sum(draw.rank == rank for draw in own) / there[rank] for rank in range(most)]


def n_alpha(answers: Sequence[Answer]) -> list[float] | None:
    """n-alpha of the EAGLE papers (arXiv 2401.15077, section 4.1): the acceptance rate of a chain's token that was
    guessed from n guesses before it, all of them accepted (first entry: 0-alpha). None where a tree was no chain.

    At temperature 0 it is the papers' figure. Above, the papers accept by chance min(1, p/q) of a sampled draft; here a
    token is accepted if the target draws it.
    """
    trees = [round_.tree for answer in answers for round_ in answer.rounds if round_.tree is not None]
    return alpha_by_depth(answers) if all(tree.is_chain for tree in trees) and any(map(_drafted, trees)) else None


def _drafted(tree: Tree) -> bool:
    return len(tree) > 1


@dataclass(frozen=True)
class Bin:
    """Nodes whose confidence lies from `low` up to `high`."""

    low: float
    high: float
    confidence: float  # mean
    accepted: float  # share
    count: int


def calibration(answers: Sequence[Answer]) -> list[Bin]:
    """Draft probabilities of candidates at the nodes where the target drew, against the share that it hit."""
    return _bins(
        (math.exp(draw.tree.scores[child] - draw.tree.scores[draw.node]), rank == draw.rank)
        for draw in draws(answers)
        for rank, child in enumerate(draw.children)
    )


def path_calibration(answers: Sequence[Answer]) -> list[Bin]:
    """Path values (products of draft probabilities, what dynamic trees go by) of all nodes that were verified, against
    the share whose whole path was accepted (EAGLE-2, arXiv 2406.16858, section 3.2)."""
    return _bins(
        (math.exp(round_.tree.scores[node]), node in round_.path)
        for answer in answers
        for round_ in answer.rounds
        if round_.tree is not None
        for node in _decided(round_.tree, round_)
    )


def _decided(tree: Tree, round_: Round) -> Iterator[int]:
    """Draft nodes, without those below an accepted node at which the answer ended: nothing was drawn there."""
    ended = round_.path[-1] if len(round_.tokens) < len(round_.path) else None
    return (node for node in range(1, len(tree)) if ended is None or ended not in tree.path(node)[:-1])


def _bins(outcomes: Iterable[tuple[float, bool]], num: int = 10) -> list[Bin]:
    """Equal steps of confidence; those without a node are left out."""
    found: list[list[tuple[float, bool]]] = [[] for _ in range(num)]
    for confidence, accepted in outcomes:
        found[min(int(confidence * num), num - 1)].append((confidence, accepted))
    return [
        Bin(i / num, (i + 1) / num, sum(c for c, _ in own) / len(own), sum(a for _, a in own) / len(own), len(own))
        for i, own in enumerate(found)
        if own
    ]


def rejected_outside_vocabulary(answers: Sequence[Answer], can_propose: Callable[[int], bool]) -> float | None:
    """Of the draws that hit no candidate, the share whose token the drafter can never propose; None where all hit."""
    missed = [draw.token for draw in draws(answers) if draw.rank is None]
    return sum(not can_propose(token) for token in missed) / len(missed) if missed else None


def level_ms(answers: Sequence[Answer]) -> list[float]:
    """Milliseconds of drafting by level, all rounds together."""
    rounds = [round_ for answer in answers for round_ in answer.rounds]
    return [sum(own) for own in zip_longest(*(round_.level_ms for round_ in rounds), fillvalue=0.0)]


@dataclass(frozen=True)
class Divergence:
    """The first place where speculative output left plain output, and whether rounding accounts for it."""

    position: int  # in the answer, counted from 0
    plain_token: int | None  # None: this side had ended
    token: int | None
    gap: float | None  # how close the decision was
    difference: float | None  # how far the two computations of the same logits lie apart
    explained: bool


def perplexity(target: Target[CacheT], answers: Sequence[data.Sequence]) -> float:
    """e to the mean negative log-likelihood of the answers' tokens, prompts given."""
    total, count = 0.0, 0
    for answer in tqdm(answers, desc=f"perplexity, {target.spec.dtype}".replace("torch.", ""), unit="answer"):
        cache, start = target.new_cache(), max(answer.spans[0][0] - 1, 0)  # the token before the first one scored
        if start:
            target.verify([(cache, Tree.chain(answer.tokens[:start]))], last_only=True)
            target.keep(cache, range(start))
        scored = Tree.chain(answer.tokens[start:-1])
        logits_TV = target.verify([(cache, scored)])[0].logits_NV.float()
        places = torch.tensor([t for a, b in answer.spans for t in range(max(a, 1), b)], device=logits_TV.device)
        expected_T = torch.tensor(answer.tokens, device=logits_TV.device)[places]
        total += float(cross_entropy(logits_TV[places - start - 1], expected_T, reduction="sum"))
        count += len(expected_T)
    return math.exp(total / count)


def find_divergence(
    prompt: Sequence[int], plain: Answer, other: Answer, sampling: Sampling, allowed: float
) -> Divergence | None:
    """Where two answers to one prompt part, judged by the logits that both sides drew from there.

    `allowed` is how far rounding may move a logit (`rounding`). Where it may not at all, nothing explains a divergence,
    and answers need no logits.
    """
    ours, theirs = other.tokens, plain.tokens
    if ours == theirs:
        return None
    position = next(i for i in range(len(ours) + 1) if ours[i : i + 1] != theirs[i : i + 1])
    if position >= min(len(ours), len(theirs)):
        ended = [None if position >= len(side) else side[position] for side in (theirs, ours)]
        return Divergence(position, ended[0], ended[1], gap=None, difference=None, explained=False)
    if allowed == 0:
        return Divergence(position, theirs[position], ours[position], gap=None, difference=None, explained=False)
    prefix = Prefix([*prompt, *ours[:position]], len(prompt))
    tokens = (theirs[position], ours[position])
    return judge(plain.logits(position), other.logits(position), tokens, sampling, prefix, allowed)


def judge(
    plain_V: Tensor, other_V: Tensor, tokens: tuple[int, int], sampling: Sampling, prefix: Prefix, allowed: float
) -> Divergence:
    """Two computations of one distribution, and the tokens (plain, other) drawn from them: does rounding explain them?

    It does if the two differ, by no more than rounding may, and each, drawn from again, gives its token. Then the
    choice was closer than twice the difference, which is checked too where both tokens pass both sides' filters;
    where one falls to a filter's cut on one side, the difference itself has moved the cut past it.
    """
    difference = float((plain_V.to(torch.float64) - other_V.to(torch.float64)).abs().max())
    redrawn = (sampling.draw(plain_V, prefix), sampling.draw(other_V, prefix))
    adjusted = [sampling.adjusted(logits_V, prefix) for logits_V in (plain_V, other_V)]
    moved = float((adjusted[0] - adjusted[1]).nan_to_num(0.0).abs().max())  # -inf - -inf: ruled out on both sides
    sides = [_gap(adjusted_V, tokens, sampling, len(prefix.tokens)) for adjusted_V in adjusted]
    gap = min(gap for gap, _ in sides)
    close = gap <= 2 * moved or any(cut for _, cut in sides)
    explained = redrawn == tokens and 0 < difference <= allowed and close
    return Divergence(len(prefix.tokens) - prefix.num_prompt, *tokens, gap, difference, explained)


def _gap(adjusted_V: Tensor, tokens: tuple[int, int], sampling: Sampling, position: int) -> tuple[float, bool]:
    """How close the choice between two tokens was, and whether a filter cut one of them off: then it is the distance
    to the lowest score that passed."""
    survivors, keyed = sampling.keyed_scores(adjusted_V, position)
    score = dict(zip(survivors.tolist(), keyed.tolist(), strict=True))
    lost = [token for token in tokens if token not in score]
    if lost:
        return max(float(adjusted_V[survivors].min() - adjusted_V[token]) for token in lost), True
    return abs(score[tokens[0]] - score[tokens[1]]), False
