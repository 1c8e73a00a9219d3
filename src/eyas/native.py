"""The way to eyas's compiled core, which an install without a C++ compiler lacks, and what targets and heads share on
it: packed matrices.

Legend: N rows of a weight (outputs), K columns (inputs).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.errors import InputError

if TYPE_CHECKING:
    from eyas._native import Matrix

WEIGHTS = ("bfloat16", "int8")  # what products run on
Arrays = dict[str, NDArray[np.generic]]
_LANES = 16  # columns of a block


def core() -> ModuleType:
    """The compiled module.

    Raises:
        InputError: this install has none, or EYAS_KERNELS asks for kernels that this machine does not run.
    """
    try:
        from eyas import _native
    except ImportError as error:
        raise InputError("this install of eyas has no compiled core (it was built without a C++ compiler): "
                         "give --backend eager") from error  # fmt: skip
    try:
        _native.kernels()
    except ValueError as error:
        raise InputError(str(error)) from error
    return _native


def cpu_features() -> dict[str, bool] | None:
    """Which vector instruction sets the CPU offers (off x86 none), or None without the compiled module."""
    try:
        from eyas import _native
    except ImportError:
        return None
    return _native.cpu_features()


def fast_kernels() -> bool:
    """Is there a compiled core, with vector kernels for this CPU?"""
    return cpu_features() is not None and core().kernels() != "portable"


_asked: int | None = None  # threads, by whoever runs this process


def ask_threads(count: int | None) -> None:
    """Give torch and the core this many threads; None: as EYAS_NUM_THREADS says, if it does.

    Raises:
        InputError: EYAS_NUM_THREADS is no such number.
    """
    global _asked
    _asked = count
    if (wanted := _wanted_threads()) is not None:
        torch.set_num_threads(wanted)


def use_threads() -> int:
    """Give the core the threads that were asked for, else as many as torch had; how many those are.

    Torch itself is left with one thread in this process: its pool spins after each small operation, and on the cores
    that the next forward needs (plain decoding of the demo target ran at half its speed beside it).

    Raises:
        InputError: EYAS_NUM_THREADS is no such number.
    """
    count = _wanted_threads() or core().num_threads() or torch.get_num_threads()
    core().set_num_threads(count)
    torch.set_num_threads(1)
    return count


def threads_in_use() -> int:
    """Of the core where a target runs on it, else of torch."""
    return (core().num_threads() if cpu_features() is not None else 0) or torch.get_num_threads()


def _wanted_threads() -> int | None:
    text = os.environ.get("EYAS_NUM_THREADS")
    if _asked is not None or not text:
        return _asked
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= 1024:
        raise InputError(f"EYAS_NUM_THREADS must be a whole number from 1 to 1024, got {text!r}")
    return int(text)


def pack(arrays: Arrays, name: str, kind: str, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
    """A weight as the core reads it, into `arrays` under `name`."""
    _pack(arrays, name, kind, weight_NK, bias_N, np.arange(len(weight_NK), dtype=np.int32))


def pack_gated(
    arrays: Arrays, name: str, kind: str, gate_NK: Tensor, up_NK: Tensor, bias_2N: Tensor | None = None
) -> None:
    """Gate and up of an MLP as one matrix: a block of one beside the same block of the other."""
    num = len(gate_NK)
    places = np.arange(-(-num // _LANES) * _LANES)
    gate = np.where(places < num, places, -1).reshape(-1, _LANES)
    up = np.where(gate >= 0, gate + num, -1)
    order = np.concatenate((gate, up), axis=1).reshape(-1).astype(np.int32)
    _pack(arrays, name, kind, torch.cat((gate_NK, up_NK)), bias_2N, order)


def _pack(
    arrays: Arrays, name: str, kind: str, weight_NK: Tensor, bias_N: Tensor | None, order: NDArray[np.int32]
) -> None:
    rows = np.ascontiguousarray(weight_NK.detach().float().numpy())
    arrays[f"{name}.weights"], scales = core().pack(kind, rows, order)
    if kind == "int8":
        arrays[f"{name}.scales"] = scales
    if bias_N is not None:
        bias = np.append(bias_N.detach().float().numpy(), np.float32(0))[order]  # -1 finds the zero
        arrays[f"{name}.bias"] = np.pad(bias, (0, -len(bias) % (4 * _LANES)))


def matrix(
    arrays: Mapping[str, NDArray[np.generic]], name: str, kind: str, n: int, k: int, gated: bool = False
) -> Matrix:
    """A packed weight of `n` outputs and `k` inputs; both halves of a gated one have `n` outputs."""
    columns = 2 * (-(-n // _LANES) * _LANES) if gated else n
    scales, bias = arrays.get(f"{name}.scales"), arrays.get(f"{name}.bias")
    return core().Matrix(kind, n, k, columns, arrays[f"{name}.weights"], scales, bias)


def bfloat16_bits(weight: Tensor) -> NDArray[np.uint16]:
    """The rows of an embedding as the core reads them."""
    return weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def floats(weight: Tensor) -> NDArray[np.float32]:
    """A vector as the core reads it."""
    return weight.detach().float().contiguous().numpy()
