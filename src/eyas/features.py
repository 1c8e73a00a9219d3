"""The states that drafters learn from: run the target over token sequences, and stream or store what it shows.

The target runs through the same `verify` that serves, in the dtype that serves, so a head learns the features that it
will read. A store is a folder of safetensors shards, written one whole shard at a time, memory-mapped when read; a run
that was interrupted goes on with the first missing shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear
from tqdm import tqdm

from eyas.data import Sequence, digest, pack, unpack
from eyas.errors import InputError
from eyas.files import save_tensors, write_text
from eyas.targets.base import Target
from eyas.tree import Tree

_SHARD = 256  # sequences in a shard
_BATCH_TOKENS = 2048  # tokens in one forward of the target, padding included


@dataclass(frozen=True)
class Example:
    """A sequence with what the target shows at each of its tokens.

    `states_TLD[t]` was computed from tokens 0..t. `best_T[t]` (int64) is the token that the target then finds most
    likely, where the next one is of an answer; elsewhere -1.
    """

    sequence: Sequence
    states_TLD: Tensor
    best_T: Tensor


class Features(Protocol):
    """Anything that has examples by number."""

    reads: tuple[int, ...]  # which state each entry of L is
    digest: str  # of the sequences

    def __len__(self) -> int: ...

    def batch(self, numbers: Seq[int]) -> list[Example]: ...


class Streamed:
    """States computed when they are asked for: no disk, one target forward an epoch. The last of `reads` is the
    target's final state."""

    def __init__(self, target: Target, sequences: Seq[Sequence], reads: Seq[int]) -> None:
        self.target, self.sequences, self.reads = target, sequences, tuple(reads)
        self.digest = digest([(s.tokens, s.spans) for s in sequences])

    def __len__(self) -> int:
        return len(self.sequences)

    def batch(self, numbers: Seq[int]) -> list[Example]:
        chosen = [self.sequences[number] for number in numbers]
        items = [(self.target.new_cache(), Tree.chain(sequence.tokens)) for sequence in chosen]
        verified = self.target.verify(items, self.reads, last_only=True)
        dtype = states_dtype(self.target)
        states = [v.hidden_NLD.to(dtype) for v in verified]
        return [Example(s, x_TLD, self._best(s, x_TLD[:, -1])) for s, x_TLD in zip(chosen, states, strict=True)]

    @torch.inference_mode()
    def _best(self, sequence: Sequence, final_TD: Tensor) -> Tensor:
        head_VD = self.target.head_VD
        best_T = torch.full((len(final_TD),), -1, device=final_TD.device)
        for a, b in sequence.spans:
            before = slice(max(a - 1, 0), b - 1)
            best_T[before] = linear(final_TD[before].to(head_VD.dtype), head_VD).argmax(-1)
        return best_T


def states_dtype(target: Target) -> torch.dtype:
    """How states are kept: as the target computes them, but the native core's float32 as the bfloat16 of a head."""
    return torch.bfloat16 if target.spec.backend == "native" else target.spec.dtype


class Stored:
    """States read from a folder that `store` wrote."""

    def __init__(self, folder: Path) -> None:
        try:
            index = json.loads((folder / "index.json").read_text())
            self.reads, self.digest = tuple(index["reads"]), index["sequences"]
            self._places: list[tuple[int, int]] = []
            self._shards = []
            for shard in range(index["shards"]):
                file = safe_open(str(folder / _shard_name(shard)), framework="pt")
                sequences = unpack(file.get_tensor("tokens"), file.get_tensor("bounds"), file.get_tensor("spans"))
                self._shards.append((file, file.get_tensor("bounds").tolist(), sequences))
                self._places += [(shard, i) for i in range(len(sequences))]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InputError(f"{folder} is not a complete feature store: {error}") from error

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, numbers: Seq[int]) -> list[Example]:
        return [self._read(*self._places[number]) for number in numbers]

    def _read(self, shard: int, i: int) -> Example:
        file, bounds, sequences = self._shards[shard]
        own = slice(bounds[i], bounds[i + 1])
        return Example(sequences[i], file.get_slice("states")[own], file.get_slice("best")[own].long())


def is_stored(folder: Path) -> bool:
    """Has a `store` into the folder come to its end?"""
    return (folder / "index.json").is_file()


def store(
    target: Target, sequences: Seq[Sequence], reads: Seq[int], folder: Path, made_for: Mapping[str, str]
) -> Stored:
    """Capture the states of all `sequences` into `folder`, going on where an earlier run stopped.

    `made_for` is the target's fingerprint: states of another target, or another precision, are not taken for its own.

    Raises:
        InputError: the folder holds features of other states, or the disk has too little room (said before it starts).
    """
    spec, streamed = target.spec, Streamed(target, sequences, reads)
    names = [_shard_name(first // _SHARD) for first in range(0, len(sequences), _SHARD)]
    header = {
        "target": dict(made_for),
        "reads": list(reads),
        "sequences": streamed.digest,
        "shards": len(names),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _check_header(folder / "header.json", header)
    missing = [i for i, name in enumerate(names) if not (folder / name).exists()]
    tokens = sum(len(s.tokens) for i in missing for s in sequences[i * _SHARD : (i + 1) * _SHARD])
    need = tokens * len(reads) * spec.width * states_dtype(target).itemsize
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InputError(f"the features need {need / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free")
    with tqdm(total=tokens, unit=" tokens", unit_scale=True, desc=f"features ({need / 1e9:.1f} GB)") as bar:
        for i in missing:
            _write_shard(streamed, range(i * _SHARD, min((i + 1) * _SHARD, len(sequences))), folder / names[i], bar)
    write_text(folder / "index.json", json.dumps(header))
    return Stored(folder)


def _check_header(path: Path, header: dict[str, object]) -> None:
    if path.exists():
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is broken: give another folder for the features") from error
        for key in ("target", "reads", "sequences"):
            if found.get(key) != header[key]:
                raise InputError(f"{path.parent} holds features whose {key} are {found.get(key)}, not {header[key]}")
    write_text(path, json.dumps(header))


def _write_shard(streamed: Streamed, numbers: range, path: Path, bar: tqdm) -> None:
    examples: dict[int, Example] = {}
    for batch in _batches_by_length(streamed.sequences, numbers):
        examples.update(zip(batch, streamed.batch(batch), strict=True))
        bar.update(sum(len(streamed.sequences[number].tokens) for number in batch))
    ordered = [examples[number] for number in numbers]
    tensors = pack([e.sequence for e in ordered])
    tensors["states"] = torch.cat([e.states_TLD for e in ordered])
    tensors["best"] = torch.cat([e.best_T for e in ordered]).int()
    save_tensors(path, tensors)


def _batches_by_length(sequences: Seq[Sequence], numbers: range) -> list[list[int]]:
    """Numbers grouped so that sequences of one batch are of like length and a batch stays within its token budget."""
    batches: list[list[int]] = [[]]
    for number in sorted(numbers, key=lambda n: -len(sequences[n].tokens)):
        longest = len(sequences[batches[-1][0]].tokens) if batches[-1] else 0
        if batches[-1] and longest * (len(batches[-1]) + 1) > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(number)
    return batches


def _shard_name(number: int) -> str:
    return f"states-{number:05d}.safetensors"
