"""A file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas import files


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    files.save_tensors(path, {"a": torch.ones(2)}, {"step": "1"})
    assert path.stat().st_mode & 0o777 == 0o644

    def half(tensors: object, to: Path, metadata: object) -> None:
        to.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(files, "save_file", half)
    with pytest.raises(OSError, match="cannot write .*weights.safetensors: No space"):
        files.save_tensors(path, {"a": torch.zeros(2)})
    assert load_file(path)["a"].tolist() == [1, 1]
    with pytest.raises(RuntimeError), files.whole(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert sorted(tmp_path.iterdir()) == [path]
    files.write_text(path, "new")
    assert path.read_text() == "new"
