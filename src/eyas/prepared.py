"""The folder that `eyas prepare` writes: tokens, which of them the target wrote, and how they came about.

`header.json` says what the answers are of: the target's fingerprint, the settings, the prompts. A shard holds the
sequences of so many conversations as arrays (safetensors); the record beside it, the shard's SHA-256 and its figures.
One without its record, or with another checksum, counts as missing. `open.safetensors` holds what an interrupted run
had finished of shards that were not full. Files are written whole or not at all. Refuses to know where answers come
from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from eyas.data import Sequence, pack, unpack
from eyas.errors import InputError, one_line
from eyas.files import whole, write_text

Finish = Literal["stop", "length", "given"]  # by an end token, by the budget or the context; not sampled
_FINISHES: tuple[Finish, ...] = ("stop", "length", "given")
_FORMAT = 1  # of the folder
_HEADER, _OPEN = "header.json", "open.safetensors"
_ABOUT = ("conversations", "lines", "temperatures", "cut")  # arrays with a row for each conversation


@dataclass(frozen=True)
class Answered:
    """One conversation, as far as it was answered."""

    number: int  # among the prompts, from 0
    line: int  # of the prompts' file
    temperature: float  # NaN where answers are the file's own
    sequences: tuple[Sequence, ...]  # none where the context had no room for a first answer
    finishes: tuple[Finish, ...]  # of each sequence's last answer
    cut: bool  # turns were left out: the context was full, or an answer had used up its budget


@dataclass(frozen=True)
class Figures:
    """What a shard, or a folder, holds. Prompt tokens are all that the target did not write."""

    conversations: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    stop: int = 0
    length: int = 0
    given: int = 0
    cut: int = 0

    @staticmethod
    def of(answered: Seq[Answered]) -> Figures:
        sequences = [sequence for one in answered for sequence in one.sequences]
        finishes = [finish for one in answered for finish in one.finishes]
        written = sum(len(sequence.answer_tokens) for sequence in sequences)
        return Figures(
            conversations=len(answered),
            sequences=len(sequences),
            prompt_tokens=sum(len(sequence.tokens) for sequence in sequences) - written,
            answer_tokens=written,
            cut=sum(one.cut for one in answered),
            **{finish: finishes.count(finish) for finish in _FINISHES},
        )

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Folder:
    """A prepared folder that is being written."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        """`header`: plain JSON values, `conversations` and `shard` (conversations of one) among them.

        Raises:
            InputError: the folder holds something else, or answers that were made otherwise.
        """
        self.path, self._shard = path, _whole(header["shard"])
        self._conversations = _whole(header["conversations"])
        header = {"format": _FORMAT, **header}
        path.mkdir(parents=True, exist_ok=True)
        if (path / _HEADER).is_file():
            _compare(path, read_header(path), header)
        elif any(entry.suffix != ".tmp" for entry in path.iterdir()):
            raise InputError(f"{path} is not empty: give a new folder, or one that eyas prepare has begun")
        else:
            write_text(path / _HEADER, json.dumps(header, indent=1) + "\n")
        self.full = {shard for shard in range(self.num_shards) if _record(path / _name(shard)) is not None}
        found = (path / _OPEN).is_file() and _record(path / _OPEN) is not None
        self.open: dict[int, dict[int, Answered]] = {}
        for answered in _read(path / _OPEN) if found else ():
            self._put(answered)

    @property
    def num_shards(self) -> int:
        return -(-self._conversations // self._shard)

    def missing(self) -> list[int]:
        """Numbers of the conversations that are to be answered, ascending."""
        wanted = (n for shard in range(self.num_shards) if shard not in self.full for n in self._numbers(shard))
        return [n for n in wanted if n not in self.open.get(n // self._shard, ())]

    def broken(self) -> list[str]:
        """Names of files that are there, but not as they were written. Their conversations are missing."""
        names = [_OPEN, *(_name(shard) for shard in range(self.num_shards) if shard not in self.full)]
        return [name for name in names if (self.path / name).exists() and _record(self.path / name) is None]

    def add(self, answered: Answered) -> None:
        """Take a conversation; the last one of a shard has the shard written."""
        shard = answered.number // self._shard
        self._put(answered)
        if len(self.open[shard]) == len(self._numbers(shard)):
            _write_shard(self.path / _name(shard), list(self.open[shard].values()))
            self.full.add(shard)
            del self.open[shard]

    def close(self) -> None:
        """Keep what is finished of shards that are not full."""
        rest = [answered for shard in self.open.values() for answered in shard.values()]
        if rest:
            _write_shard(self.path / _OPEN, rest)
        else:
            for path in (self.path / _OPEN, _beside(self.path / _OPEN)):
                path.unlink(missing_ok=True)

    def figures(self) -> Figures:
        """Of the full shards."""
        return sum((_figures(self.path / _name(shard)) for shard in sorted(self.full)), Figures())

    def _numbers(self, shard: int) -> range:
        return range(shard * self._shard, min((shard + 1) * self._shard, self._conversations))

    def _put(self, answered: Answered) -> None:
        if answered.number // self._shard not in self.full:
            self.open.setdefault(answered.number // self._shard, {})[answered.number] = answered


def read_header(folder: Path) -> dict[str, object]:
    """What a prepared folder says about itself: `target` (a fingerprint), `settings`, `prompts` (a digest) and counts.

    Raises:
        InputError: there is no header, or a broken one.
    """
    try:
        header = json.loads((folder / _HEADER).read_text())
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise ValueError(f"its header is of no format that this eyas reads, which is {_FORMAT}")
        for key in ("conversations", "shard"):
            _whole(header.get(key))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder} is no folder that eyas prepare has written: {one_line(error)}") from error
    return header


def read_prepared(
    folder: Path, vocab_size: int, max_length: int, limit: int | None = None, made_for: Mapping[str, str] | None = None
) -> Iterator[Sequence]:
    """The first `limit` sequences of a prepared folder, cut to `max_length` tokens.

    Sequences that then hold no answer token, or less than three tokens (so that no pair predicts one), are left out.

    Arguments:
        made_for: a target's fingerprint; weights, tokenizer and chat template must be the same where both are known.

    Raises:
        InputError: the folder is another target's, is not finished, or a shard is broken.
    """
    header = read_header(folder)
    _check_target(folder, header, made_for or {})
    given = 0
    for shard in range(-(-_whole(header["conversations"]) // _whole(header["shard"]))):
        path = folder / _name(shard)
        if _record(path) is None:
            state = "broken" if path.exists() else "missing"
            raise InputError(f"{path} is {state}: the same eyas prepare command makes it")
        for sequence in (sequence for answered in _read(path) for sequence in answered.sequences):
            if limit is not None and given >= limit:
                return
            given += 1
            if max(sequence.tokens) >= vocab_size or min(sequence.tokens) < 0:
                raise InputError(f"{path} holds token ids outside the target's vocabulary of {vocab_size}")
            clipped = _clipped(sequence, max_length)
            if clipped is not None:
                yield clipped


def _check_target(folder: Path, header: Mapping[str, object], made_for: Mapping[str, str]) -> None:
    own = header.get("target")
    if not isinstance(own, dict):
        raise InputError(f"{folder / _HEADER} does not say which target the answers are of")
    for key in ("tokenizer", "chat_template", "weights"):
        if key in own and own[key] != made_for.get(key, own[key]):
            raise InputError(f"{folder} was prepared for a target with another {key.replace('_', ' ')}")


def _clipped(sequence: Sequence, max_length: int) -> Sequence | None:
    tokens = sequence.tokens[:max_length]
    spans = tuple((start, min(end, len(tokens))) for start, end in sequence.spans if start < len(tokens))
    return Sequence(tokens, spans) if spans and len(tokens) > 2 else None


def _compare(path: Path, found: Mapping[str, object], header: Mapping[str, object]) -> None:
    for key, value in json.loads(json.dumps(header)).items():  # as it reads when written: tuples are lists
        old = found.get(key)
        if old == value:
            continue
        if isinstance(old, dict) and isinstance(value, dict):
            key = next(k for k in {**value, **old} if old.get(k) != value.get(k))
            old, value = old.get(key), value.get(key)
        raise InputError(f"{path} holds answers that were made otherwise: {key} was {old!r:.60}, and is {value!r:.60} "
                         f"now: give a new folder")  # fmt: skip


def _write_shard(path: Path, answered: list[Answered]) -> None:
    answered = sorted(answered, key=lambda one: one.number)
    finishes = [_FINISHES.index(finish) for one in answered for finish in one.finishes]
    data = save(
        {
            **pack([sequence for one in answered for sequence in one.sequences]),
            "owners": torch.tensor([row for row, one in enumerate(answered) for _ in one.sequences], dtype=torch.int64),
            "finishes": torch.tensor(finishes, dtype=torch.uint8),
            "conversations": torch.tensor([one.number for one in answered]),
            "lines": torch.tensor([one.line for one in answered]),
            "temperatures": torch.tensor([one.temperature for one in answered], dtype=torch.float64),
            "cut": torch.tensor([one.cut for one in answered]),
        }
    )
    _beside(path).unlink(missing_ok=True)  # so that no record is ever of another shard
    with whole(path) as temporary:
        temporary.write_bytes(data)
    record = {"sha256": hashlib.sha256(data).hexdigest(), "figures": asdict(Figures.of(answered))}
    write_text(_beside(path), json.dumps(record) + "\n")


def _read(path: Path) -> list[Answered]:
    """The conversations of a shard whose checksum was right."""
    try:
        arrays = load(path.read_bytes())
        sequences = unpack(arrays["tokens"], arrays["bounds"], arrays["spans"])
        finishes = [_FINISHES[finish] for finish in arrays["finishes"].tolist()]
        rows = list(zip(*(arrays[name].tolist() for name in _ABOUT), strict=True))
        owned: list[list[int]] = [[] for _ in rows]
        for i, owner in enumerate(arrays["owners"].tolist()):
            owned[owner].append(i)
        return [
            Answered(number, line, temperature, tuple(sequences[i] for i in own), tuple(finishes[i] for i in own), cut)
            for (number, line, temperature, cut), own in zip(rows, owned, strict=True)
        ]
    except (OSError, KeyError, IndexError, ValueError, SafetensorError) as error:
        raise InputError(f"cannot read the shard {path}: {one_line(error)}") from error


def _record(path: Path) -> dict[str, object] | None:
    """The record of a shard that is as it was written; None for any other."""
    try:
        record = json.loads(_beside(path).read_text())
        same = isinstance(record, dict) and record.get("sha256") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError, RecursionError):
        return None
    return record if same else None


def _figures(path: Path) -> Figures:
    try:
        return Figures(**json.loads(_beside(path).read_text())["figures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read {_beside(path)}: {one_line(error)}: delete it") from error


def _name(shard: int) -> str:
    return f"answers-{shard:05d}.safetensors"


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _whole(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"expected a whole number of at least 1, got {value!r}")
    return value
