"""Conversations as token ids with the place where the answer begins: what training reads.

First form: a JSONL file (plain or gzip) of the target's own answers, one object a line with `prompt_ids` and
`response_ids` (`finish` says `stop` or `length`). Ids were made by the target's own chat template and tokenizer, so
no template is guessed here. Refuses to know models and drafters.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import InputError


@dataclass(frozen=True)
class Sequence:
    """A conversation. `spans` [a, b) of its tokens, ascending and apart, are the target's own: its answers, end-of-turn
    tokens included."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def answer_tokens(self) -> list[int]:
        """The tokens of all answers."""
        return [token for a, b in self.spans for token in self.tokens[a:b]]


def digest(data: object) -> str:
    """Sixteen hex digits of plain data (numbers, strings, tuples and lists of them)."""
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]


def pack(sequences: list[Sequence]) -> dict[str, Tensor]:
    """Sequences as tensors of a file: all tokens, where each sequence begins and the last one ends, and all spans, one
    row (sequence, first token, last token + 1) each, places counted within the sequence."""
    lengths = torch.tensor([0, *(len(s.tokens) for s in sequences)])
    spans = [(i, a, b) for i, s in enumerate(sequences) for a, b in s.spans]
    return {
        "tokens": torch.tensor([token for s in sequences for token in s.tokens], dtype=torch.int32),
        "bounds": lengths.cumsum(0),
        "spans": torch.tensor(spans, dtype=torch.int32).reshape(-1, 3),
    }


def unpack(tokens: Tensor, bounds: Tensor, spans: Tensor) -> list[Sequence]:
    """What `pack` packed."""
    by_sequence: list[list[tuple[int, int]]] = [[] for _ in range(len(bounds) - 1)]
    for i, a, b in spans.tolist():
        by_sequence[i].append((a, b))
    all_tokens, ends = tokens.tolist(), bounds.tolist()
    return [Sequence(tuple(all_tokens[ends[i] : ends[i + 1]]), tuple(own)) for i, own in enumerate(by_sequence)]


def read_answers(path: Path, vocab_size: int, max_length: int, limit: int | None = None) -> Iterator[Sequence]:
    """The lines of an answers file, cut to `max_length` tokens.

    Sequences that then hold no answer token, or less than three tokens (so that no pair predicts one), are left out.

    Raises:
        InputError: the file cannot be read, or a line is malformed (the message names the line).
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and number > limit:
                    return
                if not line.strip():
                    continue
                prompt, answer = _parse(line, f"{path}, line {number}", vocab_size)
                tokens = (*prompt, *answer)[:max_length]
                if len(tokens) > max(len(prompt), 2):
                    yield Sequence(tokens, ((len(prompt), len(tokens)),))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"cannot read the answers file {path}: {error}") from error


def _parse(line: str, where: str, vocab_size: int) -> tuple[list[int], list[int]]:
    try:
        record = json.loads(line)
        parts = (record["prompt_ids"], record["response_ids"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{where}: expected an object with prompt_ids and response_ids") from error
    for ids in parts:
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise InputError(f"{where}: prompt_ids and response_ids must be lists of at least one token id each")
        if not all(0 <= token < vocab_size for token in ids):
            raise InputError(f"{where}: token ids must lie between 0 and {vocab_size - 1}, the target's vocabulary")
    return parts
