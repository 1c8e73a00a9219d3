"""What happened, in numbers: all of them computed from `Round`s.

tau counts what one target forward is worth: tokens after the first, over forwards after the prompt's own. A divergence
between speculative and plain output is either explained by the back end's rounding, measured there, or a bug.
Legend: V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


def tau(answers: Sequence[Answer]) -> float | None:
    """Mean tokens per target forward; None where there was no forward after the prompts'."""
    forwards = target_forwards(answers)
    delivered = sum(len(answer.tokens) for answer in answers) - len(answers)
    return delivered / forwards if forwards else None


def alpha_by_depth(answers: Sequence[Answer]) -> list[float]:
    """Per depth: of the draws at a node that had candidates below it, the share that hit one (first entry: depth 1)."""
    tried: list[int] = []
    hit: list[int] = []
    for round_ in (round_ for answer in answers for round_ in answer.rounds):
        if round_.tree is None:
            continue
        for depth in range(len(round_.tokens)):  # one draw for each delivered token, at the nodes of the path
            if not round_.tree.children(round_.path[depth]):
                break
            if depth == len(tried):
                tried.append(0)
                hit.append(0)
            tried[depth] += 1
            hit[depth] += len(round_.path) > depth + 1
    return [h / t for h, t in zip(hit, tried, strict=True)]


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
