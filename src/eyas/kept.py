"""What was measured on this machine, kept in the cache folder: JSON by everything that a time depends on.

Refuses to know what is kept. A record that cannot be read is none: it is measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.data import digest
from eyas.files import cache_folder, write_text
from eyas.machine import machine, versions


@dataclass(frozen=True)
class Place:
    """What a time belongs to, beside the machine, its threads and the versions of what runs there."""

    target: str  # a name that changes with the target's files (`checkpoint.place_of`)
    head: str  # the same of the head
    backend: str
    dtype: str
    device: str

    def path(self, kind: str) -> Path:
        """The file of this place's records of a kind, here and now."""
        here = [sorted(own.items()) for own in (asdict(self), machine(), versions())]
        return cache_folder() / kind / f"{digest(here)}.json"


def keep(kind: str, place: Place, record: Mapping[str, object]) -> Path:
    """Keep a record, in place of an earlier one; where. Machine and versions are written down beside it."""
    path = place.path(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"place": asdict(place), "machine": machine(), "versions": versions()}
    write_text(path, json.dumps({**record, **about}, allow_nan=False) + "\n")
    return path


def kept(kind: str, place: Place) -> dict[str, Any] | None:
    """The record of exactly this place, or None."""
    try:
        record = json.loads(place.path(kind).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
