"""Sequences that share their forwards: whatever comes and goes beside one, it sees its own keys and values."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import FAMILY_SETTINGS, VOCAB, tiny_target

from eyas.targets import eager_cache
from eyas.targets.eager_cache import EagerCache, Shared, bring_together
from eyas.tree import Tree


def random_tree(chance: random.Random, most: int) -> Tree:
    size = 1 + chance.randrange(most)
    parents = [-1, *(chance.randrange(i) for i in range(1, size))]
    tokens: list[int] = []
    for i, parent in enumerate(parents):
        taken = {tokens[j] for j in range(1, i) if parents[j] == parent}
        tokens.append(chance.choice([token for token in range(3, VOCAB) if token not in taken]))
    return Tree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_any_company_gives_the_logits_of_being_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty forwards over random groups of six sequences: random trees, random accepted paths, ends, returns to a
    beginning, forwards alone, and rooms that grow."""
    monkeypatch.setattr(eager_cache, "_GROWTH", 5)
    target, chance = tiny_target(family=family), random.Random(1)
    pairs = [(target.new_cache(), target.new_cache()) for _ in range(6)]  # in company, alone
    for _ in range(40):
        group = chance.sample(range(6), chance.choice([1, 2, 3, 5, 6]))
        trees = [random_tree(chance, 7) for _ in group]
        reads = chance.choice([(), (1, 4)])
        seen = target.verify([(pairs[i][0], tree) for i, tree in zip(group, trees, strict=True)], reads)
        for i, tree, found in zip(group, trees, seen, strict=True):
            expected = target.verify([(pairs[i][1], tree)], reads)[0]
            torch.testing.assert_close(found.logits_NV, expected.logits_NV, rtol=0, atol=1e-9)
            torch.testing.assert_close(found.hidden_NLD, expected.hidden_NLD, rtol=0, atol=1e-9)
            path = tree.path(chance.randrange(len(tree)))
            for cache in pairs[i]:
                target.keep(cache, path)
            if chance.random() < 0.1:
                length = chance.randrange(pairs[i][0].length + 1)
                for cache in pairs[i]:
                    target.rewind(cache, length)
            if chance.random() < 0.1:
                pairs[i] = (target.new_cache(), target.new_cache())


def filled(length: int, value: float) -> EagerCache:
    cache = EagerCache()
    for _ in range(2):
        cache.write(len(cache.layers), torch.full((1, 1, length, 2), value), torch.full((1, 1, length, 2), -value))
    cache.length = length
    return cache


def test_who_sits_where() -> None:
    """Three go together; one leaves and a newcomer takes its row; nothing of the others is copied."""
    a, b, c, d = (filled(3, value) for value in (1.0, 2.0, 3.0, 4.0))
    bring_together([a, b, c], 2)
    shared = a.shared
    assert shared is not None and [cache.row for cache in (a, b, c)] == [0, 1, 2]
    keys = shared.layers[1][0]
    assert [keys[row, 0, 2, 0].item() for row in range(3)] == [1, 2, 3]
    bring_together([a, c], 2)
    assert a.shared is c.shared is b.shared is shared, "a row may stand idle"
    bring_together([c, d, a], 2)
    assert d.shared is shared and d.row == 1 and shared.layers[1][0] is keys
    assert b.shared is None and b.layers[1][0][0, 0, :, 0].tolist() == [2, 2, 2], "the one that left took its own along"
    assert d.layers[0][1].data_ptr() == shared.layers[0][1][1].data_ptr()
    assert [keys[row, 0, 2, 0].item() for row in range(3)] == [1, 4, 3]
    del d
    e = EagerCache()
    bring_together([a, c, e], 2)
    assert e.shared is shared and e.row == 1 and len(e.layers) == 2


def test_a_room_that_is_too_small_or_mostly_empty_is_left() -> None:
    caches = [filled(3, 1.0) for _ in range(4)]
    bring_together(caches, 2)
    first = caches[0].shared
    assert isinstance(first, Shared) and (first.rows, first.slots) == (4, 5 + 256)
    bring_together(caches, 259)  # 3 + 259 slots are more than there are
    second = caches[0].shared
    assert second is not None and second is not first and second.slots == 262 + 256
    assert all(cache.shared is second for cache in caches)
    bring_together(caches[:3], 1)
    assert caches[0].shared is second, "three of four rows are in use"
    bring_together(caches[:2], 1)
    third = caches[0].shared
    assert third is not None and third is not second and third.rows == 2
    caches[0].write(0, torch.zeros(1, 1, 500, 2), torch.zeros(1, 1, 500, 2))
    assert caches[0].shared is None, "one that outgrows its row alone has its own"
