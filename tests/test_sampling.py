"""Filters against transformers, noise against its law, and the order of ties."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eyas.errors import InputError
from eyas.sampling import Sampling, gumbel_noise


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
def test_filters_equal_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(3)) * 3
    expected = TemperatureLogitsWarper(temperature)(torch.empty(0), logits[None])
    if top_k:
        expected = TopKLogitsWarper(top_k)(torch.empty(0), expected)
    expected = TopPLogitsWarper(top_p)(torch.empty(0), expected)
    torch.testing.assert_close(Sampling(temperature, top_k, top_p).scores(logits), expected[0], rtol=0, atol=0)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert Sampling().draw(torch.tensor([1.0, 3.0, 3.0, 2.0]), position=5) == 1


def test_top_p_keeps_the_lowest_ids_among_equals() -> None:
    scores = Sampling(1.0, top_p=0.5).scores(torch.zeros(4))
    assert (scores > -math.inf).tolist() == [True, True, False, False]


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
        torch.tensor([Sampling(0.8, seed=5).draw(logits, position) for position in range(n)]), minlength=5
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
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_refuses_settings_outside_their_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


def test_refuses_logits_that_are_not_numbers() -> None:
    with pytest.raises(FloatingPointError):
        Sampling().draw(torch.tensor([0.0, math.nan]), 0)
    with pytest.raises(FloatingPointError):
        Sampling(1.0).draw(torch.tensor([-math.inf, -math.inf]), 0)
