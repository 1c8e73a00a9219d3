"""Prompts and conversations from files: what users asked, and what was answered to them.

JSONL (plain or gzip) whose objects have `messages` (role and content), `turns` (what the user asks, turn by turn) or
ShareGPT's `conversations` (from and value); a JSON array of such objects (`.json`); text, one prompt a line; a folder
of such files; a folder that the optional package `datasets` reads. Refuses to know tokenizers and chat templates.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eyas.errors import InputError, one_line

# ShareGPT's names of those who speak, and the ones of chat templates
_SPEAKERS = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_TABLES = (".parquet", ".arrow")  # what `datasets` reads
_FILES = (".jsonl", ".json", ".txt")  # what a folder is searched for, gzip or not


@dataclass(frozen=True)
class Turn:
    """What a user asks, and the answer that the file has to it, if any."""

    user: str
    answer: str | None = None
    reasoning: str | None = None  # before the answer, where the file has it apart (`reasoning_content`)


@dataclass(frozen=True)
class Conversation:
    """One conversation of a file."""

    where: str  # for people: file and line
    line: int  # of the file; place in an array or a table, counted from 1
    id: str  # the file's own, else the line
    system: str | None
    turns: tuple[Turn, ...]

    def messages(self, answers: Iterable[Turn]) -> list[dict[str, str]]:
        """What a chat template takes: these answered turns (this conversation's first ones) and the next question."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        answers = tuple(answers)
        for turn in answers:
            assert turn.answer is not None, "an answered turn has an answer"
            answer = {"role": "assistant", "content": turn.answer}
            if turn.reasoning is not None:
                answer["reasoning_content"] = turn.reasoning
            messages += [{"role": "user", "content": turn.user}, answer]
        if len(answers) < len(self.turns):
            messages.append({"role": "user", "content": self.turns[len(answers)].user})
        return messages


def read_conversations(path: Path, limit: int | None = None) -> Iterator[Conversation]:
    """The first `limit` conversations of a file or folder (see the module), in its own order.

    Raises:
        InputError: it cannot be read, or a line is malformed: the message names it.
    """
    return islice(_read(path), limit)


def _read(path: Path) -> Iterator[Conversation]:
    if not path.is_dir():
        yield from _read_file(path)
        return
    inside = sorted(entry for entry in path.rglob("*") if entry.is_file())
    if any(entry.suffix in _TABLES for entry in inside):
        yield from _read_dataset(path)
        return
    files = [entry for entry in inside if entry.name.removesuffix(".gz").endswith(_FILES)]
    if not files:
        raise InputError(f"the folder {str(path)!r} holds no prompts: give one with {', '.join(_FILES)} (or .gz of "
                         f"them) files, or a data set with {' or '.join(_TABLES)} files")  # fmt: skip
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Conversation]:
    name = path.name.removesuffix(".gz")
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            if name.endswith(".json"):
                yield from _read_array(file.read(), path)
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                if name.endswith(".jsonl"):
                    yield parse(_json(line, where), where, number)
                else:
                    yield Conversation(where, number, str(number), None, (Turn(_text(line.rstrip("\n"), where)),))
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise InputError(f"cannot read the prompts {str(path)!r}: {one_line(error)}") from error


def _read_array(text: str, path: Path) -> Iterator[Conversation]:
    records = _json(text, str(path))
    if not isinstance(records, list):
        raise InputError(f"{path}: a .json file must hold an array of conversations; one object a line is .jsonl")
    for number, record in enumerate(records, start=1):
        yield parse(record, f"{path}, entry {number}", number)


def _read_dataset(folder: Path) -> Iterator[Conversation]:
    """Rows of a folder that `save_to_disk` wrote, or of one with Parquet files."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(f"{folder} is a data set of tables, which need the package datasets: "
                         f"pip install 'eyas[datasets]'") from error  # fmt: skip
    try:
        if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(folder))
        else:
            files = [str(file) for file in sorted(folder.rglob("*.parquet"))]
            found = datasets.load_dataset("parquet", data_files=files)
    except Exception as error:  # whatever the package stumbles over in somebody's files
        raise InputError(f"cannot read the data set {str(folder)!r}: {one_line(error)}") from error
    if isinstance(found, Mapping):
        if "train" not in found and len(found) > 1:
            raise InputError(f"the data set {str(folder)!r} has the splits {', '.join(map(str, found))}: "
                             f"give the folder of one of them")  # fmt: skip
        found = found["train"] if "train" in found else next(iter(found.values()))
    for number, record in enumerate(found, start=1):
        yield parse(record, f"{folder}, row {number}", number)


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON ({one_line(error)})") from error


def parse(record: object, where: str, line: int) -> Conversation:
    """A conversation from an object of the three forms.

    Raises:
        InputError: another form, roles out of order, no user's turn, or an empty text.
    """
    forms = ("messages", "turns", "conversations")
    given = [form for form in forms if isinstance(record, Mapping) and record.get(form) is not None]
    if not isinstance(record, Mapping) or len(given) != 1 or not isinstance(record[given[0]], list):
        raise InputError(f"{where}: expected an object with one list of {', '.join(forms)}")
    entries = record[given[0]]
    id_ = record.get("id", record.get("question_id"))  # as MT-bench has it
    common = (where, line, str(line if id_ is None else id_))
    if given[0] == "turns":
        if not entries:
            raise InputError(f"{where}: turns must hold at least one text")
        return Conversation(*common, None, tuple(Turn(_text(entry, where)) for entry in entries))
    names = ("role", "content") if given[0] == "messages" else ("from", "value")
    system, turns = _alternating([_message(entry, names, where) for entry in entries], where)
    return Conversation(*common, system, turns)


def _message(entry: object, names: tuple[str, str], where: str) -> tuple[str, str, str | None]:
    """Role, text and what was thought before it."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: expected objects with {names[0]} and {names[1]}")
    speaker = entry.get(names[0])
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InputError(f"{where}: {names[0]} must be one of {', '.join(_SPEAKERS)}, got {speaker!r}")
    if entry.get("tool_calls"):
        raise InputError(f"{where}: calls of tools are not supported")
    reasoning = entry.get("reasoning_content")
    return role, _text(entry.get(names[1]), where), None if reasoning is None else _text(reasoning, where)


def _alternating(messages: list[tuple[str, str, str | None]], where: str) -> tuple[str | None, tuple[Turn, ...]]:
    """Roles in order: a system message or none, then user and assistant in turn."""
    system = messages.pop(0)[1] if messages and messages[0][0] == "system" else None
    if not messages:
        raise InputError(f"{where}: a conversation needs a user's turn")
    turns: list[Turn] = []
    for place, (role, text, reasoning) in enumerate(messages):
        expected = ("user", "assistant")[place % 2]
        if role != expected:
            raise InputError(f"{where}: roles are out of order: message {place + 1 + (system is not None)} is of the "
                             f"{role}, expected the {expected}")  # fmt: skip
        if role == "user":
            turns.append(Turn(text))
        else:
            turns[-1] = Turn(turns[-1].user, text, reasoning)
    return system, tuple(turns)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: every turn must be a text with something in it, got {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: a turn holds half a surrogate pair, which is no text") from error
    return value
