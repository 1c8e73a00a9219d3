"""The rooms of the code: a file imports only from lower floors (docs/design.md)."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "eyas"
FLOORS = [
    ["errors", "charts", "files", "team"],
    ["tree", "sampling", "native", "packed", "data"],
    ["targets.families", "targets.eager_cache", "grammar", "machine"],
    ["targets.base", "kept"],
    ["targets.eager"],
    ["targets.native"],
    ["drafters.base", "drafters.layers"],
    ["drafters.rollout"],
    ["drafters.eagle", "drafters.eagle3", "drafters.lookup", "drafters.medusa", "drafters.small_model"],
    ["drafters.native"],
    ["initial"],
    ["policies", "verify", "layouts"],
    ["formats", "dialects"],
    ["checkpoint", "generate", "gguf_head", "conversations", "endpoint", "exports", "readers"],
    ["measure", "costs", "features", "expect", "masks", "prepared", "prompts"],
    ["model", "train", "replay"],
    ["fit"],
    ["card"],
    ["bench", "prepare"],
    ["doctor", "report", "results"],
    ["commands.common"],
    [
        *(f"commands.{name}" for name in ("bench", "demo", "expect", "export", "generate", "import_", "inspect")),
        *(f"commands.{name}" for name in ("prepare", "report", "train")),
    ],
    ["cli"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("eyas", "eyas.commands"):
            package = node.module.removeprefix("eyas").removeprefix(".")
            found |= {f"{package}.{alias.name}".removeprefix(".") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eyas."):
            found.add(node.module.removeprefix("eyas."))
    return found


def test_a_room_imports_only_from_lower_floors() -> None:
    rooms = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
        for path in SOURCE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert rooms.keys() == FLOOR.keys(), "every room has its floor, and every floor its rooms"
    wrong = [
        f"{room} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[other]})"
        for room, path in rooms.items()
        for other in imports(path) - {"_native"}
        if FLOOR[other] >= FLOOR[room]
    ]
    assert not wrong, wrong
