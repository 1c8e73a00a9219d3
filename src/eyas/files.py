"""Files that are there whole or not at all, written beside their place, then renamed into it; the cache folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def cache_folder() -> Path:
    """Where eyas keeps what it can make again: `$EYAS_CACHE`, else the user's cache folder."""
    if os.environ.get("EYAS_CACHE"):
        return Path(os.environ["EYAS_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to: what stands there takes the place of `path` when the block ends well, else it goes.

    Raises:
        OSError: the place cannot be written, or the disk is full.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except SafetensorError as error:  # its way to say that the disk is full
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """As `whole`."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file that others may read; as `whole`."""
    with whole(path) as temporary:
        save_file(dict(tensors), temporary, None if metadata is None else dict(metadata))
        temporary.chmod(0o644)
