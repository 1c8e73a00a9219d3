"""From logits and the prefix to a token: the only place where eyas draws.

Greedy at temperature 0. Above that, Gumbel-max with keyed noise: the draw depends on (seed, sample, position,
token id) alone, so speculative and plain decoding draw the same token from the same distribution, and losslessness
is an equality. Gumbel-max: argmax(logit + g) with g = -log(-log u) has the law of the softmax (Gumbel 1954; Maddison
et al. 2014, arXiv 1411.0030). Decisions are made in float32 or better, and equal scores go to the lowest token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.errors import InputError

_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on uint64, in place."""
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


def _uniform(tokens: np.ndarray, *parts: int) -> np.ndarray:
    """Float64 strictly between 0 and 1 for `tokens` (int64): a pure function of its arguments, 53 bits a draw."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mix(key + _GOLDEN + np.uint64(part % (1 << 64)))
    bits = _mix(_mix(tokens.astype(np.uint64) * _GOLDEN + key)) >> np.uint64(11)
    uniform = (bits.view(np.int64).astype(np.float64) + 0.5) * 2.0**-53  # processors convert signed numbers faster
    return np.minimum(uniform, 1 - 2.0**-53, out=uniform)  # the very last value has been rounded to 1


# Streams of noise beside the target's own: what a draft draws, and what accepts it, must not depend on that, nor on one
# another. Any two large numbers do.
_DRAFT, _ACCEPT = 0x5851F42D4C957F2D, 0x14057B7EF767814F


def gumbel_noise(seed: int, sample: int, position: int, tokens: Tensor, *stream: int) -> Tensor:
    """Float64 Gumbel noise for `tokens` (int64, any shape): a pure function of its arguments, from -3.7 to 36.8."""
    uniform = _uniform(tokens.cpu().numpy(), seed, sample, position, *stream)
    uniform = torch.from_numpy(uniform).to(tokens.device)
    return -torch.log(-torch.log(uniform))


_NOISE_RANGE = 42  # more than lies between the smallest and the largest noise: no token that far below the best wins
_FEW = 256  # scores that are not worth a first pass
_DOUBT = 1e-9  # how near to a cut rounding may decide; sums over a vocabulary are a thousand times more exact
_LARGEST = 1e9  # of settings that have no bound of their own


def _check(name: str, value: object, low: float, high: float, above: bool = False, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)  # exact types: the comparison below is then defined, bools are refused
    if type(value) not in kinds or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        number = "a whole number" if whole else "a number"
        raise InputError(f"{name} must be {number} {'above' if above else 'from'} {low} to {high}, got {value!r}")


def _checked_bias(given: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    try:
        pairs = tuple((token, number) for token, number in (given.items() if isinstance(given, Mapping) else given))
    except (TypeError, ValueError) as error:
        raise InputError(f"logit_bias must be pairs of a token id and a number, got {given!r}") from error
    for token, number in pairs:
        _check("a token id of logit_bias", token, 0, _LARGEST, whole=True)
        _check("a number of logit_bias", number, -_LARGEST, _LARGEST)
    if len(dict(pairs)) < len(pairs):
        raise InputError(f"logit_bias must name each token id once, got {given!r}")
    return pairs


def _checked_words(given: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        words = tuple(tuple(word) for word in given)
    except TypeError as error:
        raise InputError(f"bad_words must be sequences of token ids, got {given!r}") from error
    if not all(words):
        raise InputError(f"bad_words must hold at least one token each, got {given!r}")
    for token in (token for word in words for token in word):
        _check("a token id of bad_words", token, 0, _LARGEST, whole=True)
    return words


@dataclass(frozen=True)
class Prefix:
    """What stands before a draw: the prompt (`num_prompt` tokens) and the answer so far."""

    tokens: Sequence[int]
    num_prompt: int

    @property
    def answer(self) -> Sequence[int]:
        return self.tokens[self.num_prompt :]


Processor = Callable[[Tensor, Tensor], Tensor]  # (ids [1, T], scores [1, V]) -> scores: transformers' LogitsProcessor
Constraint = Callable[[Prefix, Tensor], Tensor]  # (prefix, scores [V]) -> scores: unlike a processor, knows the answer


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become one token. What changes them comes in transformers' order: `logit_bias`, the
    penalties, `bad_words`, `min_new_tokens`, `constraint`, `processors`, temperature, filters.

    Arguments:
        temperature: 0 takes the best token; above 0 samples.
        top_k: keep the k best tokens (and those that tie with the k-th); 0 keeps all.
        top_p: keep the smallest set of best tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens at least this many times as likely as the best one; 0 keeps all.
        repetition_penalty: divide positive logits of tokens seen before (prompt included) by it, multiply negative ones
            (CTRL, arXiv 1909.05858); 1 does nothing.
        presence_penalty, frequency_penalty: subtracted once, or once an occurrence, from the logits of tokens that the
            answer holds already.
        logit_bias: numbers to add to the logits of tokens: a mapping from token id, or pairs.
        bad_words: sequences of token ids that must not be completed. As in transformers a sequence may begin in the
            prompt, and one that is a lone end token counts for nothing.
        min_new_tokens: end tokens are ruled out until the answer holds this many tokens.
        eos_ids: the end tokens that `bad_words` and `min_new_tokens` mean.
        constraint: a function of the prefix that rules tokens out, such as `grammar.Grammar`.
        processors: any of transformers' logits processors. They see each prefix that the walk visits, once for each
            emitted token.
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
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # kept as pairs
    bad_words: Sequence[Sequence[int]] = ()  # kept as tuples
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
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
        _check("min_new_tokens", self.min_new_tokens, 0, _LARGEST, whole=True)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))  # the one way into a frozen dataclass
        object.__setattr__(self, "bad_words", _checked_words(self.bad_words))
        _check("seed", self.seed, -(1 << 63), (1 << 63) - 1, whole=True)
        _check("sample", self.sample, 0, (1 << 63) - 1, whole=True)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise an InputError if a token id that the settings name is none of the target's."""
        named = [*dict(self.logit_bias), *(token for word in self.bad_words for token in word)]
        if named and max(named) >= vocab_size:
            raise InputError(f"token ids must be whole numbers between 0 and {vocab_size - 1}, got {max(named)}")

    def draw(self, logits_V: Tensor, prefix: Prefix) -> int:
        """The token that follows `prefix`.

        Raises:
            FloatingPointError: the logits hold NaN, or nothing but -inf.
            InputError: the settings rule every token out.
        """
        if bool(logits_V.max().isnan()):  # where a setting may rule the NaN out, too
            raise _nothing_left(logits_V, prefix)
        scores_V, position = self.processed(logits_V, prefix), len(prefix.tokens)
        if self.temperature == 0:
            values = scores_V.cpu().numpy()
            best = int(values.argmax())  # the first one, and of NaN the first NaN
            if not values[best] > -math.inf:
                raise _nothing_left(logits_V, prefix)
            return best
        contenders = self._contenders(scores_V.cpu(), position)
        if contenders is None:
            survivors, keyed = self.keyed_scores(self._tempered(scores_V), position)
        else:
            survivors, scores = (torch.from_numpy(array) for array in contenders)
            keyed = scores + gumbel_noise(self.seed, self.sample, position, survivors)
        if survivors.numel() == 0 or bool(keyed.isnan().any()):
            raise _nothing_left(logits_V, prefix)
        return int(survivors[int(keyed.cpu().numpy().argmax())])  # the first one, as ids ascend

    def probabilities(self, logits_V: Tensor, prefix: Prefix) -> Tensor:
        """[V] float64: the law of `draw` at a temperature above 0.

        Raises:
            FloatingPointError, InputError: as `draw`.
        """
        assert self.temperature > 0, "greedy decoding draws nothing"
        p_V = self.filtered(self.adjusted(logits_V, prefix)).to(torch.float64).softmax(-1)
        if bool(p_V.isnan().any()):
            raise _nothing_left(logits_V, prefix)
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
        return _uniform(np.arange(count), self.seed, self.sample, position, _ACCEPT).tolist()

    def adjusted(self, logits_V: Tensor, prefix: Prefix) -> Tensor:
        """Scores before the filters, temperature included, in float32 or better."""
        return self._tempered(self.processed(logits_V, prefix))

    def _tempered(self, scores_V: Tensor) -> Tensor:
        """Above temperature 0 the best one is moved to 0 and the division is float64's: no temperature overflows."""
        if self.temperature == 0:
            return scores_V
        scores_V = scores_V.to(torch.float64)
        return (scores_V - scores_V.max()) / self.temperature

    def processed(self, logits_V: Tensor, prefix: Prefix) -> Tensor:
        """Scores before the temperature, in float32 or better."""
        scores_V = logits_V if logits_V.dtype == torch.float64 else logits_V.float()
        scores_V = self._penalised(self._biased(scores_V), prefix)
        banned = [token for token in self._banned(prefix) if token < len(scores_V)]
        if banned:
            scores_V = scores_V.index_fill(0, torch.tensor(banned, device=scores_V.device), -math.inf)
        if self.constraint is not None:
            scores_V = self.constraint(prefix, scores_V)
        if self.processors:
            ids = torch.tensor([list(prefix.tokens)], device=scores_V.device)
            for processor in self.processors:
                scores_V = processor(ids, scores_V[None])[0]
        return scores_V

    def _biased(self, scores_V: Tensor) -> Tensor:
        if not self.logit_bias:
            return scores_V
        added = dict(self.logit_bias)
        tokens = torch.tensor(list(added), device=scores_V.device)
        numbers = torch.tensor(list(added.values()), dtype=scores_V.dtype, device=scores_V.device)
        return scores_V.index_add(0, tokens, numbers)

    def _banned(self, prefix: Prefix) -> list[int]:
        """Tokens that would complete a bad word, and end tokens that come too early."""
        last = [word[-1] for word in self.bad_words if self._may_complete(prefix, word)]
        return [*last, *self.eos_ids] if len(prefix.answer) < self.min_new_tokens else last

    def _may_complete(self, prefix: Prefix, word: Sequence[int]) -> bool:
        *before, last = word
        if not before:
            return last not in self.eos_ids
        return list(prefix.tokens[-len(before) :]) == before

    def _penalised(self, scores_V: Tensor, prefix: Prefix) -> Tensor:
        if self.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(prefix.tokens)), device=scores_V.device)
            old = scores_V[seen]
            new = torch.where(old < 0, old * self.repetition_penalty, old / self.repetition_penalty)
            scores_V = scores_V.index_copy(0, seen, new)
        if self.presence_penalty or self.frequency_penalty:
            answer = torch.tensor(list(prefix.answer), dtype=torch.int64, device=scores_V.device)
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

    def _contenders(self, scores_V: Tensor, position: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The fast twin of `keyed_scores` before the noise: the ids (ascending) and scores of a few survivors, the
        winner among them; None where it cannot be told without that one's own rounding. Sorts and sums over what can
        matter only, and gives exact noise to what a first pass leaves.
        """
        best = float(scores_V.max())
        if not math.isfinite(best):
            return None
        lowest = best - (_NOISE_RANGE + 1) * self.temperature
        if 0 < self.top_k < len(scores_V):
            cut = float(scores_V.topk(self.top_k).values[-1])
            lowest = max(lowest, cut - _DOUBT * (best - cut))
        values_V = scores_V.numpy()
        ids = np.flatnonzero(values_V >= np.nextafter(values_V.dtype.type(lowest), -math.inf))
        with np.errstate(over="ignore"):
            scores = (values_V[ids].astype(np.float64) - best) / self.temperature
        if 0 < self.top_k < len(ids):  # not before: scores that the division makes equal pass together
            kept = scores >= np.partition(scores, -self.top_k)[-self.top_k]
            ids, scores = ids[kept], scores[kept]
        if self.top_p < 1:
            nucleus = _nucleus(scores, self.top_p)
            if nucleus is None:
                return None
            ids, scores = ids[nucleus], scores[nucleus]
        if self.min_p > 0:
            ratio = np.exp(scores)  # the best score is 0
            if (np.abs(ratio - self.min_p)[scores < 0] < _DOUBT * self.min_p).any():
                return None
            kept = (ratio >= self.min_p) | (scores == 0)
            ids, scores = ids[kept], scores[kept]
        if len(ids) > _FEW:
            # argmax(score + noise) = argmin(exp(-noise - score)), whose first factor is -log(uniform)
            race = -np.log(_uniform(ids, self.seed, self.sample, position)) * np.exp(-scores)
            kept = race <= race.min() * (1 + _DOUBT)
            ids, scores = ids[kept], scores[kept]
        return ids, scores


def _nucleus(scores: np.ndarray, top_p: float) -> np.ndarray | None:
    """The places (ascending) of the best scores up to probability `top_p`; None where rounding may decide."""
    weights = np.exp(scores)
    total = weights.sum()
    spared = (1 - top_p) / 2
    if spared < _DOUBT:
        return None
    places = np.flatnonzero(weights >= spared * total / len(weights))  # all others together are less than `spared`
    order = places[np.argsort(-scores[places], kind="stable")]
    mass = weights[order] / total
    mass_before = mass.cumsum() - mass
    if (np.abs(mass_before - top_p) < _DOUBT).any():
        return None
    return np.sort(order[mass_before < top_p])


def _nothing_left(logits_V: Tensor, prefix: Prefix) -> FloatingPointError | InputError:
    """Why no token can be drawn: the target is at fault, or what the user asked for."""
    position = len(prefix.tokens)
    if not math.isfinite(float(logits_V.max())):
        return FloatingPointError(f"the target's logits at position {position} are not numbers")
    return InputError(f"bad words, min_new_tokens, the grammar, the penalties and the logits processors leave no token "
                      f"to draw at position {position}")  # fmt: skip
