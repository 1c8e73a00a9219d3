"""What commands share: the flags of decoding, loading by them, and output.

With `--json` standard output holds one line, one JSON object; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eyas import bench, checkpoint, native
from eyas.automatic import auto_tree
from eyas.checkpoint import promised
from eyas.drafters.eagle3 import Eagle3
from eyas.errors import InputError, one_line
from eyas.grammar import compiled
from eyas.guard import check_guarded
from eyas.machine import commit, machine, versions
from eyas.model import BACKENDS, Model, choose_backend, load
from eyas.policies import parse_policy
from eyas.promise import Figures, shortfall
from eyas.results import table
from eyas.sampling import Sampling
from eyas.targets.eager import EagerTarget
from eyas.targets.native import NativeTarget

EXIT_FAILED = 1  # of a command that ran: an unexplained divergence
_ENOUGH = 16  # forwards from which on a run says something


def model_flags(parser: argparse.ArgumentParser, target: str | None = None) -> None:
    """Which target, and what runs it."""
    if target is None:
        parser.add_argument("--target", required=True, help="a folder, a GGUF file, a hub id, or smollm2")
    else:
        parser.add_argument("--target", default=target, help="a folder, a GGUF file, or smollm2 (default)")
    parser.add_argument("--backend", default="auto", help=f"one of {', '.join(BACKENDS)} (default %(default)s)")
    parser.add_argument(
        "--dtype",
        default=None,
        help="native: bfloat16 (default) or int8; eager: float32 (default), bfloat16, float64, or float16 on a GPU",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), or a GPU like cuda: the eager back end then")
    parser.add_argument("--threads", type=threads, default=None, help="default: EYAS_NUM_THREADS, or the cores")


def decoding_flags(parser: argparse.ArgumentParser, target: str | None, max_new_tokens: int) -> None:
    model_flags(parser, target)
    trees = "chain:K, static[:FILE], dynamic:..., adaptive:..., sampled:..., or auto (default)"
    parser.add_argument("--tree", default="auto", help=trees)
    parser.add_argument(
        "--guard",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="plain rounds while drafting does not pay (default: with --tree auto, where eyas tune was run)",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument(
        "--repetition-penalty", type=float, default=None, help="prompt included (default: the model's, or 1)"
    )
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="generated tokens only")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="generated tokens only")
    parser.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=NUMBER", help="add to a logit (repeatable)"
    )
    parser.add_argument(
        "--bad-word", type=_text, action="append", default=[], metavar="TEXT", help="never write this (repeatable)"
    )
    parser.add_argument("--min-new-tokens", type=int, default=0, help="no end token before these")
    parser.add_argument(
        "--json-schema", type=_schema, default=None, metavar="FILE", help="the answer is JSON that fits"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=count, default=max_new_tokens)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be ID=NUMBER, such as 42=-1.5, got {text!r}") from error


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must hold at least one character")
    return text


def _schema(path: str) -> str:
    """The text of a JSON schema, checked now, not after loading."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        compiled("json_schema", text)
    except InputError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path!r}: {one_line(error)}") from error
    return text


def count(text: str) -> int:
    """A flag that counts something."""
    return _whole(text, 1_000_000)


def threads(text: str) -> int:
    return _whole(text, 1024)


def _whole(text: str, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"must be between 1 and {most}, got {text}")
    return value


def load_model(arguments: argparse.Namespace, head: str | None) -> Model:
    settings = sampling_of(arguments)  # wrong settings are refused before anything slow
    if head is not None and arguments.tree != "auto":
        check_tree(arguments.tree, arguments.guard, settings)
    how = {name: getattr(arguments, name) for name in ("backend", "dtype", "tree", "guard", "device")}
    model = load(arguments.target, head, **how)
    say(f"back end: {back_end(model)}")
    say_if_slow(head, model)
    if head is not None and model.drafter is not None and arguments.tree == "auto":
        say_auto(head, model)
    if model.target.spec.repetition_penalty != 1 and arguments.repetition_penalty is None:
        say(f"the model's own repetition_penalty {model.target.spec.repetition_penalty} applies to all methods")
    return model


def check_tree(tree: str, guard: bool | None, sampling: Sampling) -> None:
    """Refuse, before anything is loaded, a tree that cannot be or not under these settings.

    Raises:
        InputError: see `parse_policy` and `Policy.check`; a tree that is drawn at random, and the guard.
    """
    policy = parse_policy(tree)
    policy.check(sampling)
    if guard:
        check_guarded(policy)


def say_if_plain(what: str, forwards: int, plain: int) -> None:
    """Say that the guard fell back for most of a run, why, and what to do."""
    if forwards >= _ENOUGH and plain > forwards / 2:
        say(f"{what}: {plain} of {forwards} forwards were plain, since what was accepted did not pay for drafting: "
             f"train a head on such texts (eyas train) or look for a better tree (eyas tune); --no-guard drafts "
             f"all the same")  # fmt: skip


def say_if_short(what: str, hits: int, draws: int, tree: str, figures: Sequence[Figures]) -> None:
    """Say that a head does far worse than its figures."""
    found = shortfall(hits, draws, tree, figures)
    if found is not None:
        say(f"{what}: {found}")


def free(arguments: argparse.Namespace, temperature: float) -> bool:
    """Do the target's own best tokens decide, as where heads' figures were measured?"""
    return temperature == 0 and arguments.json_schema is None


def say_auto(head: str, model: Model) -> None:
    """Which tree `auto` has come to, and why."""
    tree, where = auto_tree(model.target.spec, head)
    say(f"tree for {head}: {tree} ({where})")


def say_if_slow(head: str | None, model: Model) -> None:
    if isinstance(model.drafter, Eagle3) and isinstance(model.target, NativeTarget):
        say(f"the head {head} drafts in PyTorch, which is slower: the native core knows EAGLE-3 heads of one layer "
             f"without switches")  # fmt: skip


def load_eager(arguments: argparse.Namespace) -> tuple[EagerTarget, PreTrainedTokenizerBase]:
    """The target as transformers runs it: what training starts from and fingerprints are taken of."""
    dtype = choose_backend("eager", arguments.dtype)
    assert isinstance(dtype, torch.dtype)
    return checkpoint.load_target(arguments.target, dtype)


def new_folder(out: Path) -> None:
    """Refuse a folder that holds something already, and what is no folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty: give a new folder as --out")


def sampling_of(arguments: argparse.Namespace, model: Model | None = None) -> Sampling:
    """The flags of a draw; without a model, only to refuse wrong ones early."""
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    names += ("logit_bias", "min_new_tokens", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    if arguments.repetition_penalty is not None:
        settings["repetition_penalty"] = arguments.repetition_penalty
    if model is None:
        return Sampling(**settings)
    if arguments.json_schema is not None:
        settings["json_schema"] = arguments.json_schema
    return model.sampling(bad_words=arguments.bad_word, **settings)


def back_end(model: Model) -> str:
    """Which back end runs a model, in words."""
    spec = model.target.spec
    dtype = str(spec.dtype).removeprefix("torch.")
    if spec.backend == "native":
        return f"native ({native.core().kernels()}, {native.use_threads()} threads), {dtype}"
    return f"{spec.backend} ({torch.get_num_threads()} threads), {dtype}"


def report(arguments: argparse.Namespace, rows: list[bench.Row], extra: dict[str, object]) -> int:
    record = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "target": arguments.target,
        "rows": [asdict(row) for row in rows],
        **extra,
    }
    if arguments.json:
        print_json(record)
    else:
        print(f"{rows[0].dtype}, {record['machine']}")
        for workload, temperature in dict.fromkeys((row.workload, row.temperature) for row in rows):
            print(f"\n{workload}, T={temperature:g}")
            print(table([row for row in rows if (row.workload, row.temperature) == (workload, temperature)]))
    for row in rows:
        for divergence in row.divergences:
            say(f"{row.workload} {row.method} {row.tree} differs from plain: {divergence}")
        if row.head is not None and row.alpha_by_depth and free(arguments, row.temperature):
            draws = row.target_forwards - row.plain_forwards
            hits = round(draws * row.alpha_by_depth[0])
            say_if_short(f"{row.workload} {row.method}", hits, draws, row.tree or "", promised(row.head))
        say_if_plain(f"{row.workload} {row.method}", row.target_forwards, row.plain_forwards if row.guard else 0)
    return EXIT_FAILED if bench.unexplained(rows) else 0


def print_json(record: Mapping[str, object]) -> None:
    print(json.dumps(record, allow_nan=False))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
