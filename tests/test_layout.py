"""The rooms of the code: a file imports only from lower floors (docs/design.md)."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "eyas"
FLOORS = [
    ["errors", "files", "team"],
    ["tree", "sampling", "native", "packed", "data"],
    ["targets.families", "targets.eager_cache", "grammar"],
    ["targets.base"],
    ["targets.eager"],
    ["targets.native"],
    ["drafters.base", "drafters.layers"],
    ["drafters.rollout"],
    ["drafters.eagle", "drafters.eagle3", "drafters.lookup", "drafters.medusa", "drafters.small_model"],
    ["drafters.native"],
    ["initial"],
    ["policies", "verify", "layouts"],
    ["formats", "dialects"],
    ["checkpoint", "generate", "conversations", "endpoint", "exports", "gguf_head", "readers"],
    ["measure", "features", "masks", "prepared"],
    ["model", "train"],
    ["fit"],
    ["card"],
    ["bench", "prepare"],
    ["doctor"],
    ["commands.common"],
    [
        "commands.bench",
        "commands.demo",
        "commands.export",
        "commands.generate",
        "commands.import_",
        "commands.inspect",
        "commands.prepare",
        "commands.train",
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
