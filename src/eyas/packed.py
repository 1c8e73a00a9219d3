"""Packed weights on disk: one safetensors file whose arrays start at multiples of 64 bytes, as vector loads want them.

Read into memory that the kernel may back with huge pages: streaming the weights is what a forward at batch 1 does, and
with pages of 4 kilobytes it can lose a third of the memory's bandwidth. Refuses to know what the arrays mean.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eyas.errors import InputError, one_line

_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_PADDING = "padding."
_DTYPES = {"U8": np.uint8, "U16": np.uint16, "F32": np.float32}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def write(path: Path, arrays: Mapping[str, NDArray[np.generic]], description: Mapping[str, object]) -> None:
    """Arrays and a JSON description as one file, whole or not at all."""
    header: dict[str, object] = {"__metadata__": {"eyas": json.dumps(description)}}
    padded: dict[str, NDArray[np.generic]] = {}  # the format allows no gaps: what fills them is an array too
    for name, array in arrays.items():
        padded[name] = np.ascontiguousarray(array)
        if array.nbytes % _ALIGNMENT:
            padded[f"{_PADDING}{name}"] = np.zeros(-array.nbytes % _ALIGNMENT, np.uint8)
    end = 0
    for name, array in padded.items():
        end += array.nbytes
        offsets = [end - array.nbytes, end]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in padded.values():
                file.write(array.data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[dict[str, NDArray[np.generic]], dict[str, object]]:
    """What `write` was given; the arrays are views of one read of the file.

    Raises:
        InputError: the file cannot be read, or is not such a file, or is cut short.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("its header does not fit into it")
            header = json.loads(file.read(length))
            memory = _huge_memory(size - 8 - length)
            if file.readinto(memory) != len(memory):
                raise ValueError("it is cut short")
        description = json.loads(header.pop("__metadata__")["eyas"])
        arrays = {}
        for name, entry in header.items():
            dtype, (first, end) = np.dtype(_DTYPES[entry["dtype"]]), entry["data_offsets"]
            count = int(np.prod(entry["shape"], dtype=np.int64))
            if not 0 <= first <= first + count * dtype.itemsize <= end <= len(memory):
                raise ValueError(f"{name} does not fit into it")
            if not name.startswith(_PADDING):
                arrays[name] = np.frombuffer(memory, dtype, count, first).reshape(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"cannot read the packed weights {str(path)!r}: {one_line(error)}") from error
    return arrays, description


def _huge_memory(size: int) -> memoryview:
    block = mmap.mmap(-1, max(size, 1) + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            block.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them: small pages do, more slowly
    first = -np.frombuffer(block, np.uint8, 1).ctypes.data % _HUGE_PAGE
    return memoryview(block)[first : first + size]
