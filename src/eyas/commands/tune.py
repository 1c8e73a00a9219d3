"""`eyas tune`: which tree decodes fastest here, with the measurements that say so."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from eyas import checkpoint, costs, tune
from eyas.automatic import auto_tree, check_writable, keep_tree, write_tree
from eyas.by_value import Adaptive
from eyas.commands.common import EXIT_FAILED, back_end, count, model_flags, print_json, say, say_if_slow
from eyas.errors import InputError
from eyas.machine import commit, machine, versions
from eyas.model import Model, load
from eyas.policies import parse_policy
from eyas.prompts import FOREIGN, SHIPPED, read_workload
from eyas.sampling import Sampling

HELP = "measure machine and head, choose the tree that decodes fastest"
_FEW = 2  # prompts of each set, where none is named
_BAR = 30  # characters of the longest bar of a plot


def add_flags(parser: argparse.ArgumentParser) -> None:
    model_flags(parser)
    parser.add_argument("--head", required=True, help="as in eyas generate")
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME|FILE",
        help=f"prompts like yours: {', '.join(SHIPPED)}; from --data-dir {', '.join(FOREIGN)}; or a file (repeatable; "
        f"default: the first {_FEW} of each shipped set)",
    )
    parser.add_argument("--data-dir", type=Path, default=None, metavar="DIR", help="where sets lie that do not ship")
    parser.add_argument("--limit", type=count, default=None, help="only the first N prompts of each")
    parser.add_argument("--max-new-tokens", type=count, default=64, help="of an answer (default %(default)s)")
    parser.add_argument("--repeats", type=count, default=5, help="alternated runs of each tree (default %(default)s)")
    parser.add_argument("--tree", action="append", default=[], help="measure this tree too (repeatable)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the tree into the head's folder too (tree.json)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    Sampling(temperature=arguments.temperature, seed=arguments.seed)  # what is wrong is refused before anything slow
    also = tuple(map(parse_policy, arguments.tree))
    for policy in also:
        if not policy.keyed:
            raise InputError(f"the tree {policy} is drawn at random: no forecast is about it, give another")
        if isinstance(policy, Adaptive):
            raise InputError(f"the tree {policy} goes by the costs that are to be measured here: compare it, once "
                             f"they are kept, with others by eyas bench")  # fmt: skip
    if arguments.head == "none":
        raise InputError("there is no tree to tune without a head: give one as --head")
    checkpoint.check_head(arguments.head)
    if arguments.write:
        check_writable(arguments.head)
    limit = arguments.limit or (None if arguments.workload else _FEW)
    sources = list(dict.fromkeys(arguments.workload or SHIPPED))
    workloads = {Path(source).stem: read_workload(source, limit, arguments.data_dir) for source in sources}
    if tune.ALL in workloads or len(workloads) < len(sources):
        raise InputError(f"workloads need names of their own, none of them {tune.ALL!r}: got {', '.join(sources)}")

    how = {name: getattr(arguments, name) for name in ("backend", "dtype", "device")}
    model = load(arguments.target, arguments.head, guard=False, **how)
    if isinstance(model.policy, Adaptive):
        model = replace(model, policy=model.policy.most)
    say(f"back end: {back_end(model)}")
    say_if_slow(arguments.head, model)
    spec = model.target.spec
    say(f"tree so far: {model.policy} ({auto_tree(spec, arguments.head)[1]})")
    sampling = model.sampling(temperature=arguments.temperature, seed=arguments.seed)
    plan = tune.Plan(arguments.max_new_tokens, arguments.repeats, also)
    place = checkpoint.place_of(spec, arguments.head)
    found = tune.tune(model, workloads, sampling, plan, lambda own: costs.keep(place, own))
    record = _record(arguments, model, found, {name: len(items) for name, items in workloads.items()})
    kept = keep_tree(spec, arguments.head, found.chosen, record)
    written = write_tree(spec, arguments.head, found.chosen, _summary(record)) if arguments.write else None
    if arguments.json:
        print_json({**record, "kept": str(kept), "written": written and str(written)})
    else:
        print(_text(found))
    say(f"--tree auto is {found.chosen} here from now on" + (f"; written to {written}" if written else ""))
    for divergence in found.divergences:
        say(f"differs from plain: {divergence}")
    return EXIT_FAILED if any(not own["explained"] for own in found.divergences) else 0


def _record(
    arguments: argparse.Namespace, model: Model, found: tune.Tuned, workloads: dict[str, int]
) -> dict[str, object]:
    """Everything that was found, and under which settings."""
    spec, overall = model.target.spec, found.plain[-1]
    return {
        "kind": "tune",
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "target": arguments.target,
        "head": arguments.head,
        "backend": spec.backend,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "seed": arguments.seed,
        "temperature": arguments.temperature,
        "settings": {
            "workloads": workloads,
            "max_new_tokens": arguments.max_new_tokens,
            "repeats": arguments.repeats,
            "trees": arguments.tree,
        },
        "rows": [asdict(row) for row in found.rows],
        "chosen": str(found.chosen),
        "costs": asdict(found.costs),
        "divergences": found.divergences,
        "plain": [asdict(own) for own in found.plain],
        "plain_tokens_per_second": overall.tokens_per_second,
        "plain_tokens_per_second_predicted": overall.tokens_per_second_predicted,
    }


def _summary(record: dict[str, object]) -> dict[str, object]:
    """What a head's folder says of its tree: without the whole grid."""
    return {name: value for name, value in record.items() if name not in ("rows", "plain", "costs", "kind")}


def _text(found: tune.Tuned) -> str:
    parts = [_table(found, plain) for plain in found.plain]
    overall = [row for row in found.rows if row.workload == tune.ALL]
    parts.append(_curve("nodes", overall, lambda row: row.nodes))
    parts.append(_curve("levels", overall, lambda row: row.levels))
    return "\n\n".join(parts)


def _table(found: tune.Tuned, plain: tune.Plain) -> str:
    """The trees that were measured on a workload."""
    lines = [
        f"{plain.workload}",
        f"{'':2}{'tree':34} {'nodes':>5} {'tau':>5} {'replay':>6} {'formula':>7} {'tokens/s':>9} {'runs':>13} "
        f"{'forecast':>9} {'off':>5} {'speed-up':>8} {'MB':>5}",
        _line("", "plain", "", [1.0, None, None], plain, None, plain.tokens_per_second),
    ]
    rows = [row for row in found.rows if row.workload == plain.workload and row.tokens_per_second is not None]
    for row in sorted(rows, key=lambda row: -(row.tokens_per_second or 0)):
        mark = "*" if row.tree == str(found.chosen) else ""
        taus = [row.tau, row.tau_predicted, row.tau_formula]
        lines.append(_line(mark, row.tree, str(row.nodes), taus, row, row.memory_bytes, plain.tokens_per_second))
    return "\n".join(lines)


def _line(
    mark: str,
    tree: str,
    nodes: str,
    taus: Sequence[float | None],
    own: tune.Row | tune.Plain,
    memory_bytes: int | None,
    plain: float,
) -> str:
    assert own.tokens_per_second is not None and own.interval is not None, "it was measured"
    tau, by_replay, by_formula = ("" if tau is None else f"{tau:.2f}" for tau in taus)
    low, high = own.interval
    off = 100 * (own.tokens_per_second_predicted / own.tokens_per_second - 1)
    memory = "" if memory_bytes is None else f"{memory_bytes / 1e6:.1f}"
    return (
        f"{mark:2}{tree.removeprefix('dynamic:'):34} {nodes:>5} {tau:>5} {by_replay:>6} {by_formula:>7} "
        f"{own.tokens_per_second:9.1f} {f'{low:.0f} to {high:.0f}':>13} {own.tokens_per_second_predicted:9.1f} "
        f"{off:+4.0f}% {own.tokens_per_second / plain:7.2f}x {memory:>5}"
    )


def _curve(name: str, rows: Sequence[tune.Row], size: Callable[[tune.Row], int]) -> str:
    """The tree of each size that promises most, and what it measured where it was run."""
    best: dict[int, tune.Row] = {}
    for row in sorted(rows, key=lambda row: -row.tokens_per_second_predicted):
        best.setdefault(size(row), row)
    most = max(row.tokens_per_second_predicted for row in best.values())
    lines = [f"{name:>6} {'tau':>5} {'MB':>5} {'forecast':>8} {'measured':>8}"]
    for number, row in sorted(best.items()):
        measured = "" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}"
        bar = "#" * round(_BAR * row.tokens_per_second_predicted / most)
        note = f"  <- {row.tree.removeprefix('dynamic:')}" if row.tokens_per_second_predicted == most else ""
        tau = "" if row.tau_predicted is None else f"{row.tau_predicted:.2f}"
        lines.append(
            f"{number:6} {tau:>5} {row.memory_bytes / 1e6:5.1f} {row.tokens_per_second_predicted:8.1f} {measured:>8}  "
            f"{bar}{note}"
        )
    return f"The best tree of each number of {name}, all prompts\n" + "\n".join(lines)
