"""Which tree `auto` stands for: what was tuned here, what a head's folder says, or a stated one.

A tuned tree is kept in the cache folder, for exactly the machine, back end, dtype, thread count, target and head that
it was measured with. Where a head is shipped with its trees, its folder has a `tree.json`: a record by back end and
dtype, true enough on like machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.checkpoint import LOOKUP, MEDUSA, SMALL, TREE_FILE, head_folder, place_of
from eyas.errors import InputError
from eyas.files import write_text
from eyas.kept import keep, kept
from eyas.policies import Policy, parse_policy
from eyas.targets.base import TargetSpec

# Where no tree was tuned: the best that were measured on two cores (docs/log.md).
STATED = {
    ("native", torch.bfloat16): "dynamic:levels=4,top_k=3,nodes=5",
    ("native", torch.int8): "dynamic:levels=4,top_k=3,nodes=5",
    ("eager", torch.bfloat16): "dynamic:levels=3,top_k=3,nodes=6",
}
STATED_ELSE = "dynamic:levels=3,top_k=3,nodes=4"  # other dtypes


def auto_tree(spec: TargetSpec, head: str | None) -> tuple[Policy, str]:
    """The tree for a loaded target and a head by its name, and where it comes from, in words."""
    stated = parse_policy(STATED.get((spec.backend, spec.dtype), STATED_ELSE))
    if head is None or head == "none":
        return stated, "there is no head"
    here, written = kept("trees", place_of(spec, head)), _written(head).get(_key(spec))
    for record, where in ((here, "tuned on this machine"), (written, "of the head's folder, tuned elsewhere")):
        if isinstance(record, dict) and isinstance(name := record.get("tree"), str):
            try:
                return parse_policy(name), where
            except InputError:  # a record of another version, or the file of a static tree has gone
                continue
    return stated, "not tuned for this machine: see eyas tune"


def keep_tree(spec: TargetSpec, head: str, tree: Policy, evidence: Mapping[str, object]) -> Path:
    """A tuned tree for `auto_tree`, with what was measured; the file."""
    return keep("trees", place_of(spec, head), {"tree": str(tree), **evidence})


def write_tree(spec: TargetSpec, head: str, tree: Policy, evidence: Mapping[str, object]) -> Path:
    """The same into the head's folder, beside the trees of other back ends and dtypes.

    Raises:
        InputError: as `check_writable`.
        OSError: the file cannot be written.
    """
    path = check_writable(head) / TREE_FILE
    trees = {**_written(head), _key(spec): {"tree": str(tree), **evidence}}
    write_text(path, json.dumps(trees, indent=1, allow_nan=False) + "\n")
    return path


def check_writable(head: str) -> Path:
    """The folder of a head of the user's own.

    Raises:
        InputError: the head is none.
    """
    folder = Path(head.removeprefix(MEDUSA))
    if head.startswith(SMALL) or not os.path.isdir(folder):
        raise InputError(f"a tree is written into the folder of a head, and {head!r} names no folder: leave out "
                         f"--write (the tree is kept in the cache in any case)")  # fmt: skip
    if not os.access(folder, os.W_OK):
        raise InputError(f"the head's folder {str(folder)!r} cannot be written: leave out --write")
    return folder


def _key(spec: TargetSpec) -> str:
    return f"{spec.backend} {str(spec.dtype).removeprefix('torch.')}"


def _written(head: str) -> dict[str, Any]:
    """The trees in a head's folder; none where there is no such file, or it cannot be read."""
    if head == LOOKUP or head.startswith(SMALL):
        return {}
    try:
        trees = json.loads((head_folder(head) / TREE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return trees if isinstance(trees, dict) else {}
