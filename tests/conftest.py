"""Fixtures: a tiny model and heads in folders, as users have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import tiny_target, tiny_tokenizer

from eyas.checkpoint import save_head, target_fingerprint
from eyas.initial import new_head

BYTES = 260  # 256 bytes and four special tokens


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that tests pack lands in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `eagle` and `eagle3` in transformers' and in eyas' layout; `other` is a target of another width."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    for name, width in (("target", 32), ("other", 48)):
        target = tiny_target(torch.float32, width=width, vocab=BYTES)
        target.model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        if name == "target":
            made_for = target_fingerprint(target, tokenizer)
            save_head(new_head("eagle", target), root / "eagle", made_for, "a head\n")
            save_head(new_head("eagle3", target, torch.arange(0, BYTES, 2)), root / "eagle3", made_for, "a head\n")
    return root
