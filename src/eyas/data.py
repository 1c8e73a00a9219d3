"""Conversations as token ids with the place where the answer begins: what training reads.

First form: a JSONL file (plain or gzip) of the target's own answers, one object a line with `prompt_ids` and
`response_ids` (`finish` says `stop` or `length`). Ids were made by the target's own chat template and tokenizer, so
no template is guessed here. Refuses to know models and drafters.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import InputError


@dataclass(frozen=True)
class Sequence:
    """One conversation: `tokens[answer_start:]` is the answer, its end-of-turn token included."""

    tokens: tuple[int, ...]
    answer_start: int


def read_answers(path: Path, vocab_size: int, max_length: int, limit: int | None = None) -> Iterator[Sequence]:
    """The lines of an answers file, cut to `max_length` tokens; a line whose answer is cut away is left out.

    Raises:
        InputError: the file cannot be read, or a line is malformed (the message names the line).
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and number > limit:
                    return
                sequence = _parse(line, f"{path}, line {number}", vocab_size, max_length)
                if sequence is not None:
                    yield sequence
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the answers file {path}: {error}") from error


def _parse(line: str, where: str, vocab_size: int, max_length: int) -> Sequence | None:
    try:
        record = json.loads(line)
        prompt, answer = record["prompt_ids"], record["response_ids"]
        tokens = tuple(int(token) for token in [*prompt, *answer])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where}: expected an object with prompt_ids and response_ids, lists of token ids") from error
    if not prompt or not answer:
        raise InputError(f"{where}: prompt_ids and response_ids must hold at least one token each")
    if not all(0 <= token < vocab_size for token in tokens):
        raise InputError(f"{where}: token ids must lie between 0 and {vocab_size - 1}, the target's vocabulary")
    return Sequence(tokens[:max_length], len(prompt)) if len(prompt) < max_length else None
