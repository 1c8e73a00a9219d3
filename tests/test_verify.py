"""Accept or reject: by hand, and against the target's law with 100,000 draws. Rules that are wrong must fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from eyas.verify import accept_many, accept_one

# Far apart. The target rules token 2 out (a filter did), the draft never proposes token 5 (outside its vocabulary).
P = np.array([0.02, 0.50, 0.00, 0.25, 0.08, 0.15])
Q = np.array([0.55, 0.02, 0.20, 0.15, 0.08, 0.00])
CERTAIN = 18.47  # chi-square, 4 degrees of freedom, 0.1 %


def drawn(count: int, num: int, seed: int, replace: bool = False) -> list[list[int]]:
    """`num` times `count` candidates from Q, one after the other."""
    rng = np.random.default_rng(seed)
    if replace:
        return rng.choice(len(Q), (num, count), p=Q).tolist()
    with np.errstate(divide="ignore"):
        return np.argsort(-(np.log(Q) + rng.gumbel(size=(num, len(Q)))), axis=1)[:, :count].tolist()


def chi_square(tokens: Sequence[int]) -> float:
    counts = np.bincount(tokens, minlength=len(P))
    assert counts[P == 0].sum() == 0, "a token that the target rules out"
    expected = len(tokens) * P[P > 0]
    return float(((counts[P > 0] - expected) ** 2 / expected).sum())


def variant(
    p: np.ndarray, q: np.ndarray, candidates: Sequence[int], uniforms: Sequence[float], mistake: str = ""
) -> int:
    """`accept_many` once more, slow, with room for a mistake."""
    p, q = list(p), list(q)
    for x, u in zip(candidates, uniforms[:-1], strict=True):
        ratio = (q[x] / p[x] if p[x] else 1) if mistake == "ratio upside down" else (p[x] / q[x] if q[x] else 0)
        if u < min(1, ratio):
            return x
        p = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
        total = 1 if mistake == "residual not renormalised" else sum(p)
        p = [a / total for a in p]
        q[x] = 0
        total = 1 if mistake == "q not renormalised" else sum(q)
        q = [b / total for b in q]
    place = uniforms[-1] * sum(p)
    for x, share in enumerate(p):
        place -= share
        if place < 0:
            return x
    raise AssertionError("the shares add up")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_accepted_and_residual_tokens_have_the_targets_law(count: int) -> None:
    num = 100_000
    uniforms = np.random.default_rng(count).random((num, count + 1)).tolist()
    candidates = drawn(count, num, seed=10 + count)
    tokens = [accept_many(P, Q, c, u) for c, u in zip(candidates, uniforms, strict=True)]
    assert chi_square(tokens) < CERTAIN
    shown = range(0, num, 50)
    assert [tokens[i] for i in shown] == [variant(P, Q, candidates[i], uniforms[i]) for i in shown]
    if count == 1:
        assert tokens[:5000] == [accept_one(P, Q, candidates[i][0], uniforms[i]) for i in range(5000)]


@pytest.mark.parametrize(
    ("mistake", "counts"),
    [
        ("ratio upside down", (1, 2, 3, 4)),
        ("residual not renormalised", (2, 3, 4)),  # the last draw makes up for it where there is one candidate
        ("q not renormalised", (2, 3, 4)),
        ("drawn with replacement", (2, 3, 4)),
    ],
)
def test_wrong_rules_are_caught(mistake: str, counts: Sequence[int]) -> None:
    num = 20_000
    for count in counts:
        uniforms = np.random.default_rng(count).random((num, count + 1)).tolist()
        candidates = drawn(count, num, seed=20 + count, replace=mistake == "drawn with replacement")
        tokens = [variant(P, Q, c, u, mistake) for c, u in zip(candidates, uniforms, strict=True)]
        impossible = tokens.count(2)
        assert impossible or chi_square(tokens) > 2 * CERTAIN, (count, mistake)


def test_one_candidate_by_hand() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    assert accept_one(p, q, 2, [0.39, 0.0]) == 2  # 0.2 / 0.5
    assert accept_one(p, q, 2, [0.41, 0.0]) == accept_one(p, q, 2, [0.41, 0.99]) == 0  # all that is left is token 0
    assert accept_one(p, q, 1, [0.999, 0.0]) == 1
    assert accept_one(p, q, 0, [0.999, 0.0]) == 0
    p, q = np.array([0.1, 0.6, 0.3]), np.array([0.9, 0.1, 0.0])  # residual: 0, 0.5, 0.3
    assert [accept_one(p, q, 0, [0.2, u]) for u in (0.0, 0.62, 0.63, 0.99)] == [1, 1, 2, 2]
    assert (p.tolist(), q.tolist()) == ([0.1, 0.6, 0.3], [0.9, 0.1, 0.0]), "pure: what was given stays as it was"


def test_several_candidates_by_hand() -> None:
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    # token 0 is accepted below 0.25; after it p = (0, 0, 1/4, 3/4) and q = (0, 1/2, 1/3, 1/6)
    assert accept_many(p, q, [0, 1], [0.24, 0.0, 0.0]) == 0
    assert accept_many(p, q, [0, 1], [0.26, 0.0, 0.0]) == 3  # 1 has nothing left, and p - q leaves 3 alone
    assert accept_many(p, q, [0, 2], [0.26, 0.74, 0.0]) == 2
    assert accept_many(p, q, [0, 2], [0.26, 0.76, 0.0]) == 3
    assert accept_many(p, q, [0, 3], [0.26, 0.999, 0.0]) == 3
    # then p = (0, 0, 0, 1) and q = (0, 0, 2/3, 1/3)
    assert accept_many(p, q, [0, 1, 2], [0.26, 0.0, 0.0, 0.0]) == 3
    assert accept_many(p, q, [], [0.29]) == 1  # no candidate: a draw from p


def test_edges_of_floating_point() -> None:
    below_one = 1 - 2.0**-53
    q = np.array([0.5, 0.5])
    assert accept_one(q, q, 1, [below_one, 0.0]) == 1
    assert accept_one(q * (1 - 2.0**-52), q, 1, [below_one, 0.0]) == 1  # rejected, and nothing left of p - q
    certain = np.array([0.0, 1.0, 0.0])
    assert accept_one(np.array([0.5, 0.0, 0.5]), certain, 1, [0.0, below_one]) == 2  # q runs out
    assert accept_many(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.5, 0.0]), [0, 1], [0.0, 0.0, 0.0]) == 2
    tiny = np.array([1.0, 5e-324, 1e-323])
    assert accept_many(certain, tiny, [0, 2], [0.0, 0.0, 0.5]) == 1
    for uniform in (0.0, below_one):  # tokens without a chance are never drawn, not even at the ends
        assert accept_many(np.array([0.0, 0.3, 0.7, 0.0]), q, [], [uniform]) in (1, 2)


def test_candidates_that_cannot_have_been_drawn_are_refused() -> None:
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.9, 0.1, 0.0])
    with pytest.raises(ValueError, match="candidate 2 cannot"):
        accept_one(p, q, 2, [0.5, 0.5])
    with pytest.raises(ValueError, match="candidate 0 cannot"):
        accept_many(p, q, [0, 0], [0.9, 0.5, 0.5])  # twice: not without replacement
