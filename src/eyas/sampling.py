"""From logits and the prefix to a token: the only place where eyas draws.

Greedy at temperature 0. Above that, Gumbel-max with keyed noise: the draw depends on (seed, sample, position,
token id) alone, so speculative and plain decoding draw the same token from the same distribution, and losslessness
is an equality. Gumbel-max: argmax(logit + g) with g = -log(-log u) has the law of the softmax (Gumbel 1954; Maddison
et al. 2014, arXiv 1411.0030). Decisions are made in float32 or better, and equal scores go to the lowest token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.errors import InputError


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64's own shift copies the sign bit


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64, whose products wrap like uint64's."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


# Streams of noise beside the target's own: what a draft draws, and what accepts it, must not depend on that, nor on one
# another. Any two large numbers do.
_DRAFT, _ACCEPT = 0x5851F42D4C957F2D, 0x14057B7EF767814F


def _hashed(tokens: Tensor, *key: int) -> Tensor:
    """64 random bits for each of `tokens` (int64, any shape), a pure function of its arguments."""
    state = torch.tensor([0], dtype=torch.int64, device=tokens.device)
    for part in key:
        state = _mix(state + _GOLDEN + part)
    return _mix(_mix(tokens * _GOLDEN + state))


def gumbel_noise(seed: int, sample: int, position: int, tokens: Tensor, *stream: int) -> Tensor:
    """Float64 Gumbel noise for `tokens` (int64, any shape): a pure function of its arguments, 53 bits a draw."""
    bits = _shift_right(_hashed(tokens, seed, sample, position, *stream), 11)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


_LARGEST = 1e9  # of settings that have no bound of their own


def _check(name: str, value: object, low: float, high: float, above: bool = False, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)  # exact types: the comparison below is then defined, bools are refused
    if type(value) not in kinds or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        number = "a whole number" if whole else "a number"
        raise InputError(f"{name} must be {number} {'above' if above else 'from'} {low} to {high}, got {value!r}")


@dataclass(frozen=True)
class Prefix:
    """What stands before a draw: the prompt (`num_prompt` tokens) and the answer so far."""

    tokens: Sequence[int]
    num_prompt: int


Processor = Callable[[Tensor, Tensor], Tensor]  # (ids [1, T], scores [1, V]) -> scores: transformers' LogitsProcessor


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become one token.

    Arguments:
        temperature: 0 takes the best token; above 0 samples.
        top_k: keep the k best tokens (and those that tie with the k-th); 0 keeps all.
        top_p: keep the smallest set of best tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens at least this many times as likely as the best one; 0 keeps all.
        repetition_penalty: divide positive logits of tokens seen before (prompt included) by it, multiply negative ones
            (CTRL, arXiv 1909.05858); 1 does nothing.
        presence_penalty, frequency_penalty: subtracted once, or once an occurrence, from the logits of tokens that the
            answer holds already.
        processors: any of transformers' logits processors, applied after the penalties and before the temperature. They
            see each prefix that the walk visits, once for each emitted token.
        seed, sample: the key of the noise, together with the position and the token id.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    processors: tuple[Processor, ...] = ()
    seed: int = 0
    sample: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, _LARGEST)
        _check("top_k", self.top_k, 0, _LARGEST, whole=True)
        _check("top_p", self.top_p, 0, 1, above=True)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0, _LARGEST, above=True)
        _check("presence_penalty", self.presence_penalty, -_LARGEST, _LARGEST)
        _check("frequency_penalty", self.frequency_penalty, -_LARGEST, _LARGEST)
        _check("seed", self.seed, -(1 << 63), (1 << 63) - 1, whole=True)
        _check("sample", self.sample, 0, (1 << 63) - 1, whole=True)

    def draw(self, logits_V: Tensor, prefix: Prefix) -> int:
        """The token that follows `prefix`.

        Raises:
            FloatingPointError: the logits hold NaN, or nothing but -inf: no token can be drawn from them.
        """
        scores_V = self.adjusted(logits_V, prefix)
        if self.temperature == 0:
            values = scores_V.cpu().numpy()
            best = int(values.argmax())  # the first one, and of NaN the first NaN
            if not values[best] > -math.inf:
                raise FloatingPointError(f"the target's logits at position {len(prefix.tokens)} are not numbers")
            return best
        survivors, keyed = self.keyed_scores(scores_V, position=len(prefix.tokens))
        if survivors.numel() == 0 or bool(keyed.isnan().any()) or bool(logits_V.isnan().any()):
            raise FloatingPointError(f"the target's logits at position {len(prefix.tokens)} are not numbers")
        return int(survivors[torch.nonzero(keyed == keyed.max())[0, 0]])

    def probabilities(self, logits_V: Tensor, prefix: Prefix) -> Tensor:
        """[V] float64: the law of `draw` at a temperature above 0.

        Raises:
            FloatingPointError: as `draw`.
        """
        assert self.temperature > 0, "greedy decoding draws nothing"
        p_V = self.filtered(self.adjusted(logits_V, prefix)).to(torch.float64).softmax(-1)
        if bool(p_V.isnan().any()):
            raise FloatingPointError(f"the target's logits at position {len(prefix.tokens)} are not numbers")
        return p_V

    def draft_law(self, logprobs_W: Tensor) -> Tensor:
        """[W] float64: the distribution q that a draft's log-probabilities make at the target's temperature and under
        its filters, as in EAGLE-1's code; all zeros where none of them is a number."""
        assert self.temperature > 0, "greedy decoding draws nothing"
        known_W = logprobs_W.isfinite()
        if not bool(known_W.any()):
            return torch.zeros(logprobs_W.shape, dtype=torch.float64)
        scores_W = logprobs_W.to(torch.float64).masked_fill(~known_W, -math.inf)
        return self.filtered((scores_W - scores_W.max()) / self.temperature).softmax(-1)

    def draw_distinct(self, q_W: Tensor, tokens_W: Tensor, count: int, position: int, node: int) -> list[int]:
        """Places in `tokens_W` of up to `count` tokens drawn from q > 0 without replacement, in the order drawn.

        The `count` largest of log q + Gumbel noise have that law (Gumbel top-k: Kool et al. 2019, arXiv 1903.06059).
        The noise is keyed by the draft tree's place (`position` of the root's children) and by `node`, so that no two
        nodes of an answer share it.
        """
        noise_W = gumbel_noise(self.seed, self.sample, position, tokens_W, _DRAFT, node)
        return (q_W.log() + noise_W).topk(min(count, len(q_W))).indices.tolist()

    def uniforms(self, position: int, count: int) -> list[float]:
        """Uniform numbers in (0, 1) for the decisions at absolute `position`; independent of all other draws."""
        bits = _shift_right(_hashed(torch.arange(count), self.seed, self.sample, position, _ACCEPT), 12)
        return ((bits.to(torch.float64) + 0.5) * 2.0**-52).tolist()  # 52 bits: with 53 the largest would round to 1

    def adjusted(self, logits_V: Tensor, prefix: Prefix) -> Tensor:
        """Scores before the filters: penalties, processors, temperature, in float32 or better.

        Above temperature 0 the best one is moved to 0 and the division is float64's, so that no temperature overflows.
        """
        scores_V = logits_V if logits_V.dtype == torch.float64 else logits_V.float()
        scores_V = self._penalised(scores_V, prefix)
        if self.processors:
            ids = torch.tensor([list(prefix.tokens)], device=scores_V.device)
            for processor in self.processors:
                scores_V = processor(ids, scores_V[None])[0]
        if self.temperature == 0:
            return scores_V
        scores_V = scores_V.to(torch.float64)
        return (scores_V - scores_V.max()) / self.temperature

    def _penalised(self, scores_V: Tensor, prefix: Prefix) -> Tensor:
        if self.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(prefix.tokens)), device=scores_V.device)
            old = scores_V[seen]
            new = torch.where(old < 0, old * self.repetition_penalty, old / self.repetition_penalty)
            scores_V = scores_V.index_copy(0, seen, new)
        if self.presence_penalty or self.frequency_penalty:
            answer = torch.tensor(list(prefix.tokens[prefix.num_prompt :]), dtype=torch.int64, device=scores_V.device)
            counts_V = torch.bincount(answer, minlength=len(scores_V))
            scores_V = scores_V - self.presence_penalty * (counts_V > 0) - self.frequency_penalty * counts_V
        return scores_V

    def filtered(self, scores_V: Tensor) -> Tensor:
        """Adjusted scores in transformers' order of filters (top-k, top-p, min-p): -inf where a token is ruled out."""
        if self.temperature == 0:
            return scores_V
        if 0 < self.top_k < scores_V.numel():
            cut = scores_V.topk(self.top_k).values[-1]
            scores_V = scores_V.masked_fill(scores_V < cut, -math.inf)
        if self.top_p < 1:
            best, order = scores_V.sort(descending=True, stable=True)
            p = best.softmax(-1)
            mass_before = p.cumsum(-1) - p
            scores_V = scores_V.index_fill(0, order[mass_before >= self.top_p], -math.inf)
        if self.min_p > 0:
            p_V = scores_V.softmax(-1)
            scores_V = scores_V.masked_fill(p_V < self.min_p * p_V.max(), -math.inf)
        return scores_V

    def keyed_scores(self, adjusted_V: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """What a draw at absolute `position` compares: surviving token ids (ascending), their scores with noise."""
        scores_V = self.filtered(adjusted_V)
        survivors = torch.nonzero(scores_V > -math.inf).flatten()
        keyed = scores_V[survivors].to(torch.float64)
        if self.temperature > 0:
            keyed = keyed + gumbel_noise(self.seed, self.sample, position, survivors)
        return survivors, keyed
