"""Types of the compiled core (src/native/bindings.cpp)."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

def cpu_features() -> dict[str, bool]: ...
def kernels() -> str: ...
def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def pack(
    kind: str, rows: NDArray[np.float32], order: NDArray[np.int32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]: ...

class Matrix:
    def __init__(
        self,
        kind: str,
        n: int,
        k: int,
        num_columns: int,
        weights: NDArray[np.uint8],
        scales: NDArray[np.float32] | None,
        bias: NDArray[np.float32] | None,
    ) -> None: ...

class Layer:
    def __init__(
        self,
        shape: Mapping[str, float],
        qkv: Matrix,
        output: Matrix,
        gate_up: Matrix,
        down: Matrix,
        norms: Mapping[str, NDArray[np.float32]],
        activation: str,
        windowed: bool,
        rope: int,
    ) -> None: ...

class Cache:
    length: int
    pending: int
    def keep(self, path: Sequence[int]) -> None: ...
    def rewind(self, length: int) -> None: ...

class Model:
    def __init__(
        self,
        shape: Mapping[str, float],
        layers: Sequence[Layer],
        embedding: NDArray[np.uint16],
        embedding_scale: float,
        final_norm: NDArray[np.float32],
        head: Matrix,
        frequencies: Sequence[NDArray[np.float32]],
        rope_scales: Sequence[float],
    ) -> None: ...
    def new_cache(self) -> Cache: ...
    def verify(
        self,
        caches: Sequence[Cache],
        counts: NDArray[np.int32],
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        reads: Sequence[int],
        last_only: bool,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...

class DraftState:
    length: int
    def rewind(self, length: int) -> None: ...

class Draft:
    def __init__(
        self,
        kind: str,
        shape: Mapping[str, float],
        num_states: int,
        embedding: NDArray[np.uint16],
        fusion: Matrix,
        layer: Layer,
        head: Matrix,
        vocabulary: NDArray[np.int64] | None,
        norms: Mapping[str, NDArray[np.float32]],
        frequencies: NDArray[np.float32],
    ) -> None: ...
    def new_state(self) -> DraftState: ...
    def observe(
        self, state: DraftState, tokens: NDArray[np.int32], states: NDArray[np.float32], width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]: ...
    def expand(
        self, state: DraftState, rows: NDArray[np.int32], tokens: NDArray[np.int32], width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]: ...
