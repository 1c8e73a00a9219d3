"""Filters against transformers, noise against its law, and the order of ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import VOCAB, tiny_target
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas import sampling as sampling_module
from eyas.errors import InputError
from eyas.sampling import Prefix, Sampling, gumbel_noise

PREFIX = Prefix([7, 3, 3, 9, 3, 50], num_prompt=2)


def scores(sampling: Sampling, logits: torch.Tensor, prefix: Prefix = PREFIX) -> torch.Tensor:
    return sampling.filtered(sampling.adjusted(logits, prefix))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_settings_equal_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(3)) * 3
    ids = torch.tensor([PREFIX.tokens])
    expected = TemperatureLogitsWarper(temperature)(ids, RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[None]))
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    expected = TopPLogitsWarper(top_p)(ids, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(ids, expected)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty=1.3)
    ours = scores(sampling, logits)
    shift = expected.max() - ours.max()  # ours are moved so that the best one is 0
    torch.testing.assert_close(ours + shift, expected[0].double(), rtol=0, atol=1e-4)


def test_penalties_by_hand() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 4.0])
    prefix = Prefix([1, 2, 3, 3, 1], num_prompt=2)  # the answer is 3, 3, 1
    penalised = scores(Sampling(presence_penalty=0.5, frequency_penalty=0.25), logits, prefix)
    assert penalised.tolist() == [1.0, -1.75, 2.0, 3.0]
    assert scores(Sampling(repetition_penalty=2.0), logits, prefix).tolist() == [1.0, -2.0, 1.0, 2.0]


CONSTRAINTS = {
    "logit_bias": {9: 2.5, 50: -3.0, 4: 1.25, 3: -0.5},
    "bad_words": ([50, 8], [9, 3, 50, 11], [3, 13], [2], [12], [7, 3, 3, 9, 3, 50, 14], [1, 7, 3, 3, 9, 3, 50, 15]),
    "repetition_penalty": 1.3,
}


def transformers_processors(min_new_tokens: int) -> LogitsProcessorList:
    """What transformers' own `generate` would apply, in its order."""
    model = tiny_target().model
    config = GenerationConfig(
        sequence_bias=[[[token], number] for token, number in CONSTRAINTS["logit_bias"].items()],
        bad_words_ids=[list(word) for word in CONSTRAINTS["bad_words"]],
        repetition_penalty=CONSTRAINTS["repetition_penalty"],
        min_new_tokens=min_new_tokens,
        eos_token_id=[2, 5],
        do_sample=True,
        temperature=0.7,
        top_k=30,
        top_p=0.99,
    )
    model._prepare_special_tokens(config, device="cpu")
    return model._get_logits_processor(config, PREFIX.num_prompt, model_kwargs={}, device="cpu")


@pytest.mark.parametrize("min_new_tokens", [0, 1, 4, 5, 9])
def test_constraints_equal_those_of_transformers_in_their_order(min_new_tokens: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    logits[[2, 5]] = 5.0  # end tokens that would be drawn
    logits[[3, 9, 50]] = 4.0  # seen before and biased: survivors that show the order
    ids = torch.tensor([PREFIX.tokens])
    processors = transformers_processors(min_new_tokens)
    sampling = Sampling(0.7, 30, 0.99, **CONSTRAINTS, min_new_tokens=min_new_tokens, eos_ids=(2, 5))
    ours = scores(sampling, logits)
    expected = processors(ids, logits[None])[0].double()
    assert (ours[[8, 11, 12, 14]] == -math.inf).all()
    assert (ours[[2, 5]] == -math.inf).tolist() == [min_new_tokens > 4] * 2
    torch.testing.assert_close(ours + (expected.max() - ours.max()), expected, rtol=0, atol=1e-5)
    assert [type(p).__name__[:10] for p in processors[:2]] == ["SequenceBi", "Repetition"]
    swapped = LogitsProcessorList([processors[1], processors[0], *processors[2:]])(ids, logits[None])[0].double()
    assert not torch.allclose(swapped - swapped.max(), expected - expected.max(), atol=1e-2)


def test_constraints_by_hand() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 4.0])
    prefix = Prefix([0, 2, 2, 1], num_prompt=2)  # the answer is 2, 1
    lost = -math.inf
    assert scores(Sampling(logit_bias={0: 2.0, 3: -4.5}), logits, prefix).tolist() == [3.0, -1.0, 2.0, -0.5]
    # the bias comes first: 2 * 0.5, and the penalty sees the sign that the bias made
    both = Sampling(logit_bias=((0, -2.0), (1, 3.0)), repetition_penalty=2.0)
    assert scores(both, logits, prefix).tolist() == [-2.0, 1.0, 1.0, 4.0]
    words = [[2, 1, 0], [1, 2], [2, 3], [0, 2, 2, 1, 3], [9, 0, 2, 2, 1, 1]]  # one of them begins in the prompt
    assert scores(Sampling(bad_words=words), logits, prefix).tolist() == [lost, -1.0, lost, lost]
    assert scores(Sampling(bad_words=[[3], [0]], eos_ids=(3,)), logits, prefix).tolist() == [lost, -1.0, 2.0, 4.0]
    for least, ruled_out in ((2, False), (3, True)):
        early = scores(Sampling(min_new_tokens=least, eos_ids=(3, 0, 77)), logits, prefix)
        assert early.tolist() == ([lost, -1.0, 2.0, lost] if ruled_out else logits.tolist())


def test_the_constraint_comes_after_the_masks_and_before_the_processors() -> None:
    seen = []

    def constraint(prefix: Prefix, rows: torch.Tensor) -> torch.Tensor:
        seen.append((list(prefix.answer), rows.tolist()))
        return rows + 1

    def processor(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rows * 10

    sampling = Sampling(constraint=constraint, processors=(processor,), bad_words=[[0]], logit_bias={1: 2.0})
    assert scores(sampling, torch.tensor([0.0, -1.0])).tolist() == [-math.inf, 20.0]
    assert seen == [([3, 9, 3, 50], [-math.inf, 1.0])]


def test_processors_see_the_prefix_and_come_before_the_temperature() -> None:
    seen = []

    def processor(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen.append(ids.tolist())
        return rows * 1

    adjusted = scores(Sampling(0.5, processors=(processor,)), torch.tensor([0.0, -1.0]))
    assert (adjusted.tolist(), seen) == ([0.0, -2.0], [[list(PREFIX.tokens)]])


def test_no_temperature_overflows() -> None:
    logits = torch.tensor([0.0, 1.0, 30.0, -2.0])
    assert [Sampling(t).draw(logits, PREFIX) for t in (0.0, 5e-324, 1e-40, 1e-3)] == [2, 2, 2, 2]
    assert scores(Sampling(1e9), logits).isfinite().all()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert Sampling().draw(torch.tensor([1.0, 3.0, 3.0, 2.0]), PREFIX) == 1


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    assert (scores(Sampling(1.0, top_p=0.5), torch.zeros(4)) > -math.inf).tolist() == [True, True, False, False]


def test_noise_is_a_function_of_its_key_alone() -> None:
    tokens = torch.arange(1000)
    noise = gumbel_noise(1, 2, 3, tokens)
    assert torch.equal(noise[500:], gumbel_noise(1, 2, 3, tokens[500:]))
    others = [gumbel_noise(0, 2, 3, tokens), gumbel_noise(1, 0, 3, tokens), gumbel_noise(1, 2, 4, tokens)]
    assert all(not (noise == other).any() for other in others)
    assert noise.unique().numel() == 1000
    assert gumbel_noise(-(1 << 63), 2, 3, tokens).isfinite().all()


def test_noise_has_the_gumbel_law() -> None:
    # Kolmogorov-Smirnov: with n = 10^5 the distance stays below 1.95 / sqrt(n) in 99.9 % of all keys
    noise = gumbel_noise(7, 0, 11, torch.arange(100_000)).sort().values
    law = torch.exp(-torch.exp(-noise))
    empirical = torch.arange(1, 100_001, dtype=torch.float64) / 100_000
    assert (law - empirical).abs().max() < 1.95 / math.sqrt(100_000)


def test_draws_have_the_law_of_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    p = (logits / 0.8).softmax(-1)
    n = 20_000
    counts = torch.bincount(
        torch.tensor([Sampling(0.8, seed=5).draw(logits, Prefix(range(position), 0)) for position in range(n)]),
        minlength=5,
    )
    chi_square = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi_square < 18.47  # 4 degrees of freedom, 0.1 %
    wrong = logits.softmax(-1)  # a sampler that forgot the temperature must be caught
    assert float(((counts - n * wrong) ** 2 / (n * wrong)).sum()) > 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"seed": 1 << 63}, "seed"),
        ({"logit_bias": {-1: 1.0}}, "token id of logit_bias"),
        ({"logit_bias": {True: 1.0}}, "token id of logit_bias"),
        ({"logit_bias": {1: math.nan}}, "number of logit_bias"),
        ({"logit_bias": {1: -math.inf}}, "number of logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "once"),
        ({"logit_bias": (1, 2)}, "pairs"),
        ({"logit_bias": 3}, "pairs"),
        ({"bad_words": [[]]}, "at least one token"),
        ({"bad_words": [[1], [2.5]]}, "token id of bad_words"),
        ({"bad_words": [3]}, "sequences of token ids"),
        ({"bad_words": "ab"}, "token id of bad_words"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 1.5}, "min_new_tokens"),
    ],
)
def test_refuses_settings_outside_their_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


def test_refuses_logits_that_are_not_numbers() -> None:
    with pytest.raises(FloatingPointError):
        Sampling().draw(torch.tensor([0.0, math.nan]), PREFIX)
    with pytest.raises(FloatingPointError):
        Sampling(1.0).draw(torch.tensor([-math.inf, -math.inf]), PREFIX)
    for temperature in (0.0, 1.0):
        for logits in ([math.nan, 0.0], [-math.inf, -math.inf]):
            with pytest.raises(FloatingPointError, match="logits at position 6 are not numbers"):
                Sampling(temperature, bad_words=[[0]]).draw(torch.tensor(logits), PREFIX)
    with pytest.raises(FloatingPointError, match="logits at position 6 are not numbers"):
        Sampling(1.0).draw(torch.tensor([math.inf, 0.0]), PREFIX)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_says_so_if_every_token_is_ruled_out(temperature: float) -> None:
    sampling = Sampling(temperature, bad_words=[[0], [50, 1]], eos_ids=(2,), min_new_tokens=5)
    with pytest.raises(InputError, match="bad words.* leave no token to draw at position 6"):
        sampling.draw(torch.tensor([1.0, 2.0, 3.0]), PREFIX)
    assert sampling.draw(torch.tensor([1.0, 2.0, 3.0, 0.0]), PREFIX) == 3


def test_a_penalty_that_overflows_is_the_users() -> None:
    for take in (Sampling.draw, Sampling.probabilities):
        with pytest.raises(InputError, match="penalties"):
            take(Sampling(1.0, repetition_penalty=1e-300), torch.ones(64), PREFIX)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    for sampling in (Sampling(logit_bias={10: 1.0}), Sampling(bad_words=[[10, 3]])):
        sampling.check_vocabulary(11)
        with pytest.raises(InputError, match="between 0 and 9, got 10"):
            sampling.check_vocabulary(10)


# -- the fast draw and its slow twin -----------------------------------------------------------------------------------


def signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64's own shift copies the sign bit


def mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def slow_noise(seed: int, sample: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """The definition, on torch's int64, whose products wrap like uint64's."""
    golden = signed(0x9E3779B97F4A7C15)
    key = torch.tensor([0])
    for part in (seed, sample, position):
        key = mix(key + golden + part)
    bits = shift_right(mix(mix(tokens * golden + key)), 11)
    return -torch.log(-torch.log((bits.to(torch.float64) + 0.5) * 2.0**-53))


def slow_draw(sampling: Sampling, logits: torch.Tensor, prefix: Prefix) -> int:
    scores_V = sampling.filtered(sampling.adjusted(logits, prefix))
    keyed_V = scores_V + slow_noise(sampling.seed, sampling.sample, len(prefix.tokens), torch.arange(len(scores_V)))
    return int(torch.nonzero(keyed_V == keyed_V.max())[0, 0])


def test_noise_equals_its_definition_bit_for_bit() -> None:
    tokens = torch.arange(50_000)
    for key in ((0, 0, 0), (-1, 3, 70), (1 << 62, (1 << 63) - 1, 5), (-(1 << 63), 1, 1)):
        noise = slow_noise(*key, tokens)
        assert torch.equal(gumbel_noise(*key, tokens), noise)
        some = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[:77].sort().values
        assert torch.equal(gumbel_noise(*key, some), noise[some]), "whatever stands beside it"


def test_the_largest_and_the_smallest_noise_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for bits in (0, (1 << 64) - 1):
        with monkeypatch.context() as patch:
            patch.setattr(sampling_module, "_mix", lambda x, bits=bits: np.full_like(x, bits))
            ends.append(float(gumbel_noise(0, 0, 0, torch.arange(1))))
    assert -3.7 < ends[0] < -3.6 and 36.7 < ends[1] < 36.8
    assert ends[1] - ends[0] < sampling_module._NOISE_RANGE


def test_fast_draws_equal_slow_ones() -> None:
    draw = np.random.default_rng(0)
    in_doubt = 0
    for case in range(2500):
        size = int(draw.choice([1, 2, 7, 100, 700, 3000]))
        logits = torch.from_numpy(draw.normal(size=size) * draw.choice([0.01, 1, 4, 30]))
        if draw.random() < 0.3:
            logits = (logits * 4).round() / 4  # many ties
        if draw.random() < 0.3:
            logits[torch.from_numpy(draw.random(size) < 0.5)] = -math.inf
            logits[-1] = 0.0
        if draw.random() < 0.2:
            logits += draw.choice([-1e6, 1e3, 1e12])
        sampling = Sampling(
            temperature=float(draw.choice([5e-324, 1e-40, 0.01, 0.3, 1, 1, 1.7, 50, 1e9])),
            top_k=int(draw.choice([0, 0, 1, 2, 50, 2000])),
            top_p=float(draw.choice([1, 1, 1 - 1e-12, 0.999, 0.9, 0.5, 0.01, 1e-9])),
            min_p=float(draw.choice([0, 0, 1e-9, 0.02, 0.5, 1])),
            repetition_penalty=float(draw.choice([1, 1.3])) if size > 50 else 1.0,
            seed=case,
        )
        logits = logits.to(torch.float32 if draw.random() < 0.8 else torch.float64)
        assert sampling.draw(logits, PREFIX) == slow_draw(sampling, logits, PREFIX), (case, sampling)
        in_doubt += sampling._contenders(sampling.processed(logits, PREFIX), len(PREFIX.tokens)) is None
    assert 20 < in_doubt < 600, "both ways are taken"


def test_a_token_far_below_the_best_may_win() -> None:
    """All but one of 3,000 tokens lie 7 below the best: each seldom wins, some do."""
    logits = torch.full((3000,), -7.0)
    logits[5] = 0.0
    won = [Sampling(1.0, seed=seed).draw(logits, PREFIX) for seed in range(60)]
    assert won == [slow_draw(Sampling(1.0, seed=seed), logits, PREFIX) for seed in range(60)]
    assert 5 in won and len(set(won)) > 10
