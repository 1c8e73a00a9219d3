"""Keys and values of the eager back end: those of a sequence by themselves, or as a row of what several share.

Sequences that are verified together lie in one padded tensor a layer (`Shared`), and stay there as long as they go on
together: a forward then writes and reads each layer in one operation, whatever the number of sequences. Slots past a
sequence's length hold leavings that no mask lets anyone see. Legend: B sequences, G key/value heads, N new rows, S
slots, C head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor

_GROWTH = 256  # slots added to a cache at a time


class EagerCache:
    """Keys and values of one sequence: `length` slots that are kept, then `pending` of the tree under test."""

    def __init__(self) -> None:
        self.length = 0
        self.pending = 0
        self.layers: list[tuple[Tensor, Tensor]] = []  # per layer, keys and values [1, G, S, C]
        self.shared: Shared | None = None  # whose rows `layers` are views of
        self.row = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new slots behind the kept ones; returns views of all, old and new."""
        end = self.length + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append((keys.new_empty(0), values.new_empty(0)))
        stored = self.layers[layer]
        if stored[0].numel() == 0 or stored[0].shape[2] < end:
            stored = self._grow(stored, keys, end)
            self.layers[layer] = stored
        for buffer, new in zip(stored, (keys, values), strict=True):
            buffer[:, :, self.length : end] = new
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def _grow(self, stored: tuple[Tensor, Tensor], like: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        self.shared = None
        shape = (*like.shape[:2], slots + _GROWTH, like.shape[3])
        grown = (like.new_empty(shape), like.new_empty(shape))
        if self.length:
            for new, old in zip(grown, stored, strict=True):
                new[:, :, : self.length] = old[:, :, : self.length]
        return grown

    def part(self) -> None:
        """Leave what is shared with others, with a copy of one's own."""
        self.shared = None
        self.layers = [
            (keys[:, :, : self.length].clone(), values[:, :, : self.length].clone()) for keys, values in self.layers
        ]


class Shared:
    """Rows of several sequences in one tensor a layer: keys and values [B, G, S, C]."""

    def __init__(self, rows: int, slots: int) -> None:
        self.slots = slots
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._owners: list[ReferenceType[EagerCache] | None] = [None] * rows

    @property
    def rows(self) -> int:
        """How many sequences there is room for."""
        return len(self._owners)

    def layer(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, made when first asked for; `like` is [.., G, .., C]."""
        if number == len(self.layers):
            shape = (self.rows, like.shape[1], self.slots, like.shape[3])
            self.layers.append((like.new_zeros(shape), like.new_zeros(shape)))  # no leavings that are no numbers
        return self.layers[number]

    def admit(self, newcomers: Sequence[EagerCache], staying: Sequence[EagerCache]) -> None:
        """Give rows to newcomers: free ones, or those of sequences that do not stay."""
        stays = {id(cache) for cache in staying}
        for row, owner in enumerate(self._owners):
            cache = owner() if owner is not None else None
            if cache is not None and cache.shared is self and id(cache) in stays:
                continue
            if cache is not None and cache.shared is self:
                cache.part()
            self._owners[row] = None
        free = (row for row, owner in enumerate(self._owners) if owner is None)
        for cache in newcomers:
            self._seat(cache, next(free))

    def _seat(self, cache: EagerCache, row: int) -> None:
        for number, (keys, values) in enumerate(cache.layers):
            for buffer, own in zip(self.layer(number, keys), (keys, values), strict=True):
                buffer[row, :, : cache.length] = own[0, :, : cache.length]
        self._owners[row] = ref(cache)
        cache.shared, cache.row = self, row
        cache.layers = [(keys[row : row + 1], values[row : row + 1]) for keys, values in self.layers]


def bring_together(caches: Sequence[EagerCache], num_new: int) -> None:
    """Make the caches rows of one `Shared` with room for `num_new` more slots in each: of the one that most of them
    share already, or of a new one."""
    need = max(cache.length for cache in caches) + num_new
    candidates = [cache.shared for cache in caches if cache.shared is not None]
    if candidates:
        shared = max(candidates, key=lambda one: sum(other is one for other in candidates))
        if shared.slots >= need and len(caches) <= shared.rows < 2 * len(caches):
            newcomers = [cache for cache in caches if cache.shared is not shared]
            if newcomers:
                shared.admit(newcomers, [cache for cache in caches if cache.shared is shared])
            return
    Shared(len(caches), need + _GROWTH).admit(caches, [])


class Forward:
    """What the model sees as its cache during one forward."""

    def __init__(self, caches: Sequence[EagerCache], num_nodes: Sequence[int], device: torch.device) -> None:
        """`caches` in the order of the forward's rows; several are rows of one `Shared`, with room for as many slots as
        the largest of `num_nodes`, which says how many of a row's new slots are real."""
        self._caches, self._shared = caches, caches[0].shared
        new = torch.arange(max(num_nodes), device=device)
        self._rows_B1 = torch.tensor([[cache.row] for cache in caches], device=device)
        self._slots_BN = torch.tensor([[cache.length] for cache in caches], device=device) + new
        self._seen = max(cache.length + n for cache, n in zip(caches, num_nodes, strict=True))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(cache.length for cache in self._caches)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if len(self._caches) == 1:
            return self._caches[0].write(layer_idx, key_states, value_states)
        assert self._shared is not None
        keys, values = self._shared.layer(layer_idx, key_states)
        for cache in self._caches:
            if len(cache.layers) == layer_idx:  # its first forward
                cache.layers.append((keys[cache.row : cache.row + 1], values[cache.row : cache.row + 1]))
        return self._put(keys, key_states), self._put(values, value_states)

    def _put(self, buffer: Tensor, new_BGNC: Tensor) -> Tensor:
        """Write new slots; all that the forward's rows see."""
        buffer[self._rows_B1, :, self._slots_BN] = new_BGNC.transpose(1, 2)
        rows = buffer if len(buffer) == len(self._caches) else buffer[self._rows_B1[:, 0]]  # rows ascend: all are all
        return rows[:, :, : self._seen]
