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


def gumbel_noise(seed: int, sample: int, position: int, tokens: Tensor) -> Tensor:
    """Float64 Gumbel noise for `tokens` (int64, any shape): a pure function of its arguments, 53 bits a draw."""
    key = torch.tensor([0], dtype=torch.int64, device=tokens.device)
    for part in (seed, sample, position):
        key = _mix(key + _GOLDEN + part)
    bits = _shift_right(_mix(_mix(tokens * _GOLDEN + key)), 11)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


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
            FloatingPointError: the logits hold NaN, or nothing but -inf, or the settings rule every token out.
        """
        if bool(logits_V.max().isnan()):  # where a setting may rule the NaN out, too
            raise _nothing_left(logits_V, prefix)
        scores_V = self.adjusted(logits_V, prefix)
        if self.temperature == 0:
            values = scores_V.cpu().numpy()
            best = int(values.argmax())  # the first one, and of NaN the first NaN
            if not values[best] > -math.inf:
                raise _nothing_left(logits_V, prefix)
            return best
        survivors, keyed = self.keyed_scores(scores_V, position=len(prefix.tokens))
        if survivors.numel() == 0 or bool(keyed.isnan().any()):
            raise _nothing_left(logits_V, prefix)
        return int(survivors[torch.nonzero(keyed == keyed.max())[0, 0]])

    def adjusted(self, logits_V: Tensor, prefix: Prefix) -> Tensor:
        """Scores before the filters, temperature included, in float32 or better.

        Above temperature 0 the best one is moved to 0 and the division is float64's, so that no temperature overflows.
        """
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
        if self.temperature == 0:
            return scores_V
        scores_V = scores_V.to(torch.float64)
        return (scores_V - scores_V.max()) / self.temperature

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


def _nothing_left(logits_V: Tensor, prefix: Prefix) -> FloatingPointError:
    """Why no token can be drawn."""
    position = len(prefix.tokens)
    if not math.isfinite(float(logits_V.max())):
        return FloatingPointError(f"the target's logits at position {position} are not numbers")
    return FloatingPointError(f"bad words, min_new_tokens, the grammar and the logits processors leave no token "
                              f"to draw at position {position}")  # fmt: skip
