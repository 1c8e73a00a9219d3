"""Heads on disk: what is written is what is read, and what is broken is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_target

from eyas.checkpoint import load_head, load_target, save_head
from eyas.errors import InputError
from eyas.formats import build_head, read_head
from eyas.initial import new_head

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_comes_back_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    target = tiny_target(torch.float32)
    head = new_head(kind, target, torch.arange(3, 50) if kind == "eagle3" else None)
    save_head(head, tmp_path, {"weights": "x"}, "card\n")
    again = build_head(read_head(tmp_path), target.embedding_VD, target.head_VD, default_reads=(9, 9, 9))
    assert again.kind == kind
    assert again.reads == head.reads
    assert again.config.block == head.config.block
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor.to(torch.bfloat16).float()), key
    if kind == "eagle3":
        assert again.draft_vocabulary_Q.tolist() == list(range(3, 50))
        assert load_file(tmp_path / "model.safetensors")["d2t"].tolist() == [3] * 47
    assert [again.can_propose(t) for t in (2, 3, 49, 50, VOCAB)] == (
        [True] * 4 + [False] if kind == "eagle" else [False, True, True, False, False]
    )


def broken(tmp_path: Path, name: str, **changes: torch.Tensor | None) -> Path:
    """A copy of a golden head with some tensors replaced (None: removed)."""
    shutil.copytree(GOLDEN / name / "head_safetensors", tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    for key, tensor in changes.items():
        key = key.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    return tmp_path / "head"


def build(folder: Path) -> None:
    golden = load_file(GOLDEN / "eagle3_gqa" / "golden.safetensors")
    embedding = golden["target.embed_tokens.weight"]
    build_head(read_head(folder), embedding, embedding, default_reads=(0, 1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "fc.weight"),
        ({"midlayer__hidden_norm__weight": None}, "missing.*midlayer.hidden_norm.weight"),
        ({"extra__weight": torch.ones(2)}, "unknown.*extra.weight"),
        ({"norm__weight": torch.ones(7)}, "norm.weight has shape"),
        ({"norm__weight": torch.full((64,), torch.nan)}, "not finite"),
        ({"d2t": None}, "no d2t"),
        ({"d2t": torch.full((97,), 200)}, "outside 0 to 210"),
        ({"d2t": -torch.arange(97)}, "twice"),
        ({"midlayer__self_attn__q_proj__weight": None}, "no EAGLE head"),
    ],
)
def test_a_broken_head_is_refused_by_name(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(broken(tmp_path, "eagle3_gqa", **changes))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    source = GOLDEN / "eagle3_gqa" / "head_safetensors"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(InputError, match="cannot read"):
        read_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:500])
    with pytest.raises(InputError, match="cannot read"):
        read_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot read"):
        read_head(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "1" + "0" * 400])
def test_numbers_that_are_none_are_refused(tmp_path: Path, number: str) -> None:
    head = broken(tmp_path, "eagle3_gqa")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "num_attention_heads": "?"}).replace('"?"', number))
    with pytest.raises(InputError, match="no number|positive number"):
        build(head)


class Hostile:
    def __reduce__(self):
        return (Path.touch, (Path("was_run"),))


def test_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Hostile()}))
    with pytest.raises(InputError, match="pickle of more than tensors"):
        read_head(tmp_path)
    torch.save({"fc.weight": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickle of more than tensors"):
        read_head(tmp_path)
    assert not Path("was_run").exists()


def test_a_head_for_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    other, _ = load_target(str(folder / "other"))
    for kind in ("eagle", "eagle3"):
        with pytest.raises(InputError, match="wide"):
            load_head(str(folder / kind), other)
    target, _ = load_target(str(folder / "target"))
    shutil.copytree(folder / "eagle", tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    for key, value, message in (
        ("vocab_size", 99, "99 tokens"),
        ("eyas_reads", [9], "states 0 to 4"),
        ("eyas_target", {"family": "mistral"}, "family 'mistral'"),
    ):
        (tmp_path / "head" / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(InputError, match=message):
            load_head(str(tmp_path / "head"), target)
