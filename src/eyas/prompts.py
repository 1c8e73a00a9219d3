"""The prompts of a workload: evaluation sets by name, and files of one's own.

Sets under permissive licences ship inside the package; the others stay in a folder of the user's. Refuses to know
models: what is read here is what a user says, turn by turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path

from eyas.errors import InputError, one_line

SHIPPED = ("mt_bench", "vicuna_bench", "humaneval", "gsm8k")
# Sets that may not be shipped, with the folder that each of them has in the EAGLE repository.
FOREIGN = {"alpaca": "alpaca", "cnn_dm": "sum", "natural_questions": "qa", "spec_bench": "spec_bench"}
# The six sets of the EAGLE-2 paper, in the order of its tables (arXiv 2406.16858, table 1).
SUITES = {"eagle": ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "natural_questions")}

_USERS, _SYSTEMS = ("user", "human"), ("system",)


@dataclass(frozen=True)
class Item:
    """One conversation's user turns, the first of which is a prompt by itself."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None  # the system message that it begins with

    @property
    def text(self) -> str:
        return self.turns[0]


def read_workload(source: str | Path, limit: int | None, data_dir: Path | None = None) -> list[Item]:
    """The first `limit` conversations of a set by its name, or of a file.

    A `.jsonl` file has an object a line, a `.json` file a list of them: with `turns` (a list of texts), `messages`
    (objects with role and content) or `conversations` (ShareGPT: from and value), of which the user's turns count.
    Any other file has one prompt a line.

    Raises:
        InputError: the file cannot be read, a line is malformed (named), or there is no prompt in it; a set that is
            not in `data_dir`.
    """
    path = _place(str(source), data_dir)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path that cannot be
        raise InputError(f"cannot read the workload {str(path)!r}: {one_line(error)}") from error
    plain = path.suffix not in (".jsonl", ".json")
    items = [
        Item(str(number), (str(record),)) if plain else _item(record, path, number)
        for number, record in islice(_records(text, path), limit)
    ]
    if not items:
        raise InputError(f"the workload {str(path)!r} holds no prompt")
    return items


def _place(source: str, data_dir: Path | None) -> Path:
    if source in SHIPPED:
        return Path(str(files("eyas") / "workloads" / f"{source}.jsonl"))
    if source not in FOREIGN:
        return Path(source)
    if data_dir is None:
        raise InputError(f"the set {source} does not ship with eyas, for its licence: give --data-dir, a folder with "
                         f"{source}.jsonl or {FOREIGN[source]}/question.jsonl")  # fmt: skip
    places = [data_dir / f"{source}.jsonl", data_dir / FOREIGN[source] / "question.jsonl"]
    found = [place for place in places if place.is_file()]
    if not found:
        raise InputError(f"the folder {str(data_dir)!r} holds neither {source}.jsonl nor "
                         f"{FOREIGN[source]}/question.jsonl")  # fmt: skip
    return found[0]


def _records(text: str, path: Path) -> Iterator[tuple[int, object]]:
    """What stands on each line, or in each place of a list, counted from 1."""
    if path.suffix == ".json":
        records = _parsed(text, f"{path}")
        if not isinstance(records, list):
            raise InputError(f"{path}: expected a list of conversations")
        yield from enumerate(records, start=1)
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON may hold other line ends
        if line.strip():
            yield number, _parsed(line, f"{path}, line {number}") if path.suffix == ".jsonl" else line


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: {one_line(error)}") from error


def _item(record: object, path: Path, number: int) -> Item:
    try:
        turns, system = conversation(record)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}, line {number}: expected an object with turns (a list of texts), messages or "
                         f"conversations, with at least one user turn") from error  # fmt: skip
    assert isinstance(record, dict), "a conversation is an object"
    return Item(str(record.get("id", record.get("question_id", number))), tuple(turns), system)


def conversation(record: object) -> tuple[list[str], str | None]:
    """A record's user turns, and its system message.

    Raises:
        KeyError, TypeError: it has no turns, or they are no texts.
    """
    if not isinstance(record, dict):
        raise TypeError("no object")
    if "turns" in record:
        said, system = record["turns"], None
        if not isinstance(said, list):
            raise TypeError("turns are a list")
    else:
        names = ("role", "content") if "messages" in record else ("from", "value")
        parts = record["messages"] if "messages" in record else record["conversations"]
        pairs = [(part[names[0]], part[names[1]]) for part in parts]
        said = [text for speaker, text in pairs if speaker in _USERS]
        system = pairs[0][1] if pairs and pairs[0][0] in _SYSTEMS else None
    texts = said if system is None else [system, *said]
    if not said or not all(isinstance(text, str) and text for text in texts):
        raise TypeError("turns are texts that are not empty")
    return said, system
