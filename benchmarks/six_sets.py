"""Heads on the six sets of the EAGLE papers, under trees like theirs: tau and acceptance by depth, by replay.

    python benchmarks/six_sets.py smollm2-eagle3 smollm2-eagle --data-dir DATA --out runs/six_sets

Each set's first prompts are answered plainly, once at each temperature (MT-bench with both turns). What a head guesses
at every place of these answers is recorded and replayed under each tree, which gives live decoding's rounds
(`eyas.replay`) whatever else the machine does. Answers and figures lie in --out and are found again, so a run that was
stopped goes on. Prints a table and ends with one JSON line, which `benchmarks/figures.py` takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eyas import measure, replay
from eyas.bench import How, plain_answers
from eyas.drafters.base import Drafter
from eyas.errors import InputError
from eyas.files import write_text
from eyas.generate import Request, Round
from eyas.machine import commit, machine, versions
from eyas.measure import Answer
from eyas.model import Model, attach_head, load
from eyas.policies import parse_policy
from eyas.prompts import SUITES, Item, read_workload

TREES = ("static", "dynamic:levels=6,top_k=8,nodes=24", "dynamic:levels=8,top_k=10,nodes=59")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data-dir", type=Path, help="for the sets that eyas may not ship")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--out", type=Path, default=Path("runs/six_sets"))
    asked = parser.parse_args()
    try:
        items = {name: read_workload(name, asked.limit, asked.data_dir) for name in SUITES["eagle"]}
        _claim(asked)
    except InputError as error:
        parser.error(str(error))
    model = load(asked.target, dtype=asked.dtype)
    drafters = {head: attach_head(head, model.target, model.tokenizer) for head in asked.heads}
    temperatures = [float(part) for part in asked.temperatures.split(",")]
    rows = []
    for temperature in temperatures:
        for workload in items:
            answered = answers(model, workload, items[workload], temperature, asked)
            for head, drafter in drafters.items():
                assert drafter is not None, "plain decoding has no trees"
                kept = asked.out / f"{head.replace('/', '_')}-{workload}-{temperature:g}.json"
                if not kept.exists():
                    found = replayed(model, drafter, answered, asked.trees, f"{Path(head).name} on {workload}")
                    own = {"head": head, "workload": workload, "temperature": temperature}
                    write_text(kept, json.dumps([{**own, **row} for row in found]))
                rows += json.loads(kept.read_text())
    for temperature in temperatures:
        show([row for row in rows if row["temperature"] == temperature], temperature, asked)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(asked).items()}
    record = {"rows": rows, "settings": settings, "machine": machine(), "versions": versions(), "commit": commit()}
    print(json.dumps(record))


def _claim(asked: argparse.Namespace) -> None:
    """--out is for runs of these settings alone.

    Raises:
        InputError: it holds one of others.
    """
    own = {name: getattr(asked, name) for name in ("target", "dtype", "limit", "max_new_tokens")}
    own = {**own, "trees": list(asked.trees)}
    kept = asked.out / "settings.json"
    if kept.exists() and (found := json.loads(kept.read_text())) != own:
        raise InputError(f"{asked.out} holds a run of {found}: give another --out for {own}")
    asked.out.mkdir(parents=True, exist_ok=True)
    write_text(kept, json.dumps(own))


def answers(
    model: Model, workload: str, items: Sequence[Item], temperature: float, asked: argparse.Namespace
) -> list[tuple[Request, Answer]]:
    """The target's own answers to a set, made once."""
    sampling, stop = model.sampling(temperature=temperature), model.stopping(asked.max_new_tokens)
    kept = asked.out / f"answers-{workload}-{temperature:g}.json"
    if not kept.exists():
        how = How(asked.max_new_tokens, all_turns=True)
        bar = tqdm(plain_answers(model, items, sampling, how), desc=f"answers to {workload}", unit="answer",
                   total=sum(len(item.turns) for item in items))  # fmt: skip
        made = [(request.prompt, answer.tokens, answer.rounds[-1].finish_reason) for request, answer in bar]
        write_text(kept, json.dumps(made))
    return [
        (Request(prompt, sampling, stop), Answer([Round(None, [], tokens, finish, None, 0.0, 0.0, 0.0)], 0.0))
        for prompt, tokens, finish in json.loads(kept.read_text())
    ]


def replayed(
    model: Model, drafter: Drafter[Any], answered: Sequence[tuple[Request, Answer]], trees: Sequence[str], what: str
) -> list[Row]:
    """The figures of each tree on a set."""
    policies = [parse_policy(tree) for tree in trees]
    rounds: dict[str, list[Answer]] = {tree: [] for tree in trees}
    for request, answer in tqdm(answered, desc=what, unit="answer"):
        trace = replay.trace(model.target, drafter, request, answer, policies)
        for tree, policy in zip(trees, policies, strict=True):
            rounds[tree].append(replay.replay(trace, policy))
    return [
        {
            "tree": tree,
            "tau": measure.tau(own),
            "alpha_by_depth": measure.alpha_by_depth(own),
            "sequences": len(own),
            "new_tokens": sum(len(answer.tokens) for answer in own),
            "target_forwards": measure.target_forwards(own),
            "plain_forwards": 0,
        }
        for tree, own in rounds.items()
    ]


def show(rows: Sequence[Row], temperature: float, asked: argparse.Namespace) -> None:
    workloads = SUITES["eagle"]
    print(f"\ntau at temperature {temperature:g}: {asked.target} in {asked.dtype}, {asked.limit} prompts of each set, "
          f"up to {asked.max_new_tokens} tokens\n")  # fmt: skip
    print("| head | tree | " + " | ".join(workloads) + " | mean |")
    print("|" + " --- |" * (len(workloads) + 3))
    for head in asked.heads:
        for tree in asked.trees:
            taus = [row["tau"] for row in rows if row["head"] == head and row["tree"] == tree]
            cells = [f"{tau:.2f}" for tau in (*taus, sum(taus) / len(taus))]
            print(f"| {head} | {tree} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
