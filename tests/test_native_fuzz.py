"""Random shapes, trees and damaged files: the native core answers rightly or refuses, and never breaks memory.

`EYAS_FUZZ=N` runs N cases of each kind (default 8); `make sanitize` runs more of them under AddressSanitizer and UBSan.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from tiny import FAMILY_SETTINGS, tiny_target

from eyas import native, packed
from eyas.drafters.native import NativeDrafter
from eyas.errors import InputError
from eyas.initial import new_head
from eyas.targets.native import NativeTarget, pack_target
from eyas.tree import Tree

if native.cpu_features() is None:
    pytest.skip("this install has no compiled core", allow_module_level=True)

CASES = int(os.environ.get("EYAS_FUZZ", "8"))


def random_tree(rng: random.Random, vocab: int) -> Tree:
    nodes = rng.choice([1, 2, 5, 13, 40, 140])
    tokens, parents = [rng.randrange(vocab)], [-1]
    for node in range(1, nodes):
        parent = node - 1 if rng.random() < 0.6 else rng.randrange(node)
        taken = {token for token, up in zip(tokens, parents, strict=True) if up == parent}
        free = [token for token in range(vocab) if token not in taken]
        tokens.append(rng.choice(free))
        parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("seed", range(CASES))
def test_random_shapes_and_trees(seed: int) -> None:
    rng = random.Random(seed)
    vocab, width = rng.choice([17, 64, 150]), rng.choice([8, 20, 64, 72])
    family = rng.choice(sorted(FAMILY_SETTINGS))
    eager = tiny_target(
        torch.float32, seed, layers=rng.choice([3, 4]), width=width, vocab=vocab, family=family,
        head_dim=rng.choice([2, 6, 16, 34]),
    )  # fmt: skip
    weights = rng.choice(native.WEIGHTS)
    target = NativeTarget(*pack_target(eager, weights), "tiny")
    native.core().set_num_threads(rng.choice([1, 2, 5]))
    caches, texts = [target.new_cache() for _ in range(3)], [[], [], []]
    for _ in range(4):
        chosen = [i for i in range(3) if rng.random() < 0.7 and len(texts[i]) < 250] or [0]
        trees = [random_tree(rng, vocab) for _ in chosen]
        results = target.verify([(caches[i], tree) for i, tree in zip(chosen, trees, strict=True)], (0, 2))
        for i, tree, verified in zip(chosen, trees, results, strict=True):
            node = rng.randrange(len(tree))
            text = texts[i] + [tree.tokens[n] for n in tree.path(node)]
            alone = target.verify([(target.new_cache(), Tree.chain(text))], (0, 2))[0]
            assert torch.equal(verified.logits_NV[node], alone.logits_NV[-1])
            assert torch.equal(verified.hidden_NLD[node], alone.hidden_NLD[-1])
            target.keep(caches[i], tree.path(node))
            texts[i] = text
    kind = rng.choice(["eagle", "eagle3"])
    head = NativeDrafter(new_head(kind, eager, torch.arange(0, vocab, 3) if kind == "eagle3" else None), weights)
    state = head.new_state()
    for _ in range(3):
        count = rng.choice([1, 3, 130])
        hidden_TLD = torch.randn(count, len(head.reads), width)
        head.observe(state, [rng.randrange(vocab) for _ in range(count)], hidden_TLD, rng.choice([1, 4, 999]))
        num_rows = 1
        for _ in range(rng.randrange(4)):
            level = rng.choice([1, 2, 9])
            rows = [rng.randrange(num_rows) for _ in range(level)]
            found = head.expand(state, rows, [rng.randrange(vocab) for _ in range(level)], rng.choice([1, 4, 999]))
            assert found.tokens_KW.shape == found.logprobs_KW.shape and len(found.tokens_KW) == level
            num_rows += level


@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_files_are_refused_or_harmless(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    path = tmp_path / "packed.safetensors"
    packed.write(path, *pack_target(tiny_target(torch.float32), rng.choice(native.WEIGHTS)))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(25):
        damaged = bytearray(whole)
        if rng.random() < 0.2:
            damaged = damaged[: rng.randrange(len(damaged))]
        for _ in range(rng.choice([1, 1, 3])):
            if damaged:
                damaged[rng.randrange(min(header, len(damaged)))] = rng.choice(b'0123456789[]{}",:-e\x00\xff')
        path.write_bytes(damaged)
        try:
            # a damaged description may be of any type: that is what this tests
            target = NativeTarget(*packed.read(path), "damaged")  # type: ignore[arg-type]
            target.verify([(target.new_cache(), Tree.chain([1, 2, 3]))], (0, target.spec.num_layers))
        except (InputError, ValueError, KeyError, TypeError):
            pass


def test_packed_files_come_back_as_they_were(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays, description = pack_target(tiny_target(torch.float32, width=36), "int8")
    packed.write(tmp_path / "x.safetensors", arrays, description)
    again, described = packed.read(tmp_path / "x.safetensors")
    assert described == json.loads(json.dumps(description)) and again.keys() == arrays.keys()
    theirs = load_file(tmp_path / "x.safetensors")  # it is a file of that format indeed
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype and (again[name] == array).all() and (theirs[name] == array).all()
        assert again[name].ctypes.data % 64 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
