"""The prompts of a workload: evaluation sets by name, and files of one's own.

Sets under permissive licences ship inside the package; the others stay in a folder of the user's. Refuses to know
models: what is read here is what a user says, turn by turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from eyas.conversations import read_conversations
from eyas.errors import InputError

SHIPPED = ("mt_bench", "vicuna_bench", "humaneval", "gsm8k")
# Sets that may not be shipped, with the folder that each of them has in the EAGLE repository.
FOREIGN = {"alpaca": "alpaca", "cnn_dm": "sum", "natural_questions": "qa", "spec_bench": "spec_bench"}
# The six sets of the EAGLE-2 paper, in the order of its tables (arXiv 2406.16858, table 1).
SUITES = {"eagle": ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "natural_questions")}


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
    """The first `limit` conversations of a set by its name, or of a file (`conversations`), of which the user's turns
    and the system message count.

    Raises:
        InputError: the file cannot be read, a line is malformed (named), or there is no prompt in it; a set that is
            not in `data_dir`.
    """
    path = _place(str(source), data_dir)
    items = [
        Item(own.id, tuple(turn.user for turn in own.turns), own.system) for own in read_conversations(path, limit)
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
