"""What the recipes share: a target, one store of its states, heads trained on it, and what any tree makes of them.

Every recipe is a script that anyone can rerun:

    python recipes/NAME.py ANSWERS [--out runs/recipes] [--sequences 1140] [--prompts 8] ...

ANSWERS is JSONL of the target's own answers (`eyas train --answers`). Heads are found again by their settings, so
recipes that compare with the same head share it, and a recipe that was stopped goes on. Acceptance is that of replayed
answers (`eyas.replay`): exact for every tree, whatever else the machine does. Speeds follow from costs that are
measured in the decoding loop once (`eyas.costs`), when nothing else should run. Figures go to --figures; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eyas import checkpoint, costs, data, features, fit, initial, native, replay, train
from eyas.drafters.base import Drafter
from eyas.files import write_text
from eyas.generate import Request, generate_plain
from eyas.initial import Head
from eyas.machine import commit, machine, versions
from eyas.measure import Answer, alpha_by_depth, draws, tau, timed
from eyas.model import attach_head, load
from eyas.policies import Policy
from eyas.prompts import read_workload
from eyas.sampling import Sampling
from eyas.verify import Stop

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#65a30d", "#be185d")
_FEWEST = 20  # rounds that a share is of
Row = dict[str, Any]


def parser(doc: str) -> argparse.ArgumentParser:
    """The flags that all recipes have."""
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("answers", type=Path)
    found.add_argument("--target", default="smollm2")
    found.add_argument("--dtype", default="bfloat16", help="of the target that makes states and verifies")
    found.add_argument("--head", default="smollm2-eagle3", help="the trained head, where a recipe trains none")
    found.add_argument("--out", type=Path, default=Path("runs/recipes"))
    found.add_argument("--figures", type=Path, default=Path("docs/figures"))
    found.add_argument("--sequences", type=int, default=1140, help="answers that an arm is trained on, once")
    found.add_argument("--workload", action="append", default=[], help="default: mt_bench, humaneval, gsm8k")
    found.add_argument("--prompts", type=int, default=8, help="of each workload")
    found.add_argument("--max-new-tokens", type=int, default=96)
    return found


@dataclass(frozen=True)
class Beginning:
    """The first `count` examples of a store."""

    whole: features.Features
    count: int

    @property
    def reads(self) -> tuple[int, ...]:
        return self.whole.reads

    @property
    def digest(self) -> str:
        return data.digest([self.whole.digest, self.count])

    def __len__(self) -> int:
        return self.count

    def batch(self, numbers: Sequence[int]) -> list[features.Example]:
        return self.whole.batch(numbers)


@dataclass
class Arm:
    """A head of a recipe: how it drafts, and what its training took."""

    name: str
    head: Head
    drafter: Drafter[Any]
    tokens_seen: int
    seconds: float


Recorded = dict[str, list[replay.Trace]]  # by workload


@dataclass
class Lab:
    """One target with its answers and states."""

    asked: argparse.Namespace
    dtype: str = ""  # in place of the one asked for
    largest: int = 1  # the store holds so many times the answers of an arm
    _answers: dict[str, list[tuple[Request, Answer]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = self.dtype or self.asked.dtype
        self.model = load(self.asked.target, dtype=self.dtype)
        self.target, self.tokenizer = self.model.target, self.model.tokenizer
        self.eager, _ = checkpoint.load_target(self.asked.target, torch.bfloat16)
        made_for = checkpoint.target_fingerprint(self.eager, self.tokenizer)
        self.made_for = {**made_for, "dtype": str(self.target.spec.dtype).removeprefix("torch.")}

    @cached_property
    def sequences(self) -> list[data.Sequence]:
        """The answers of the store."""
        read = data.read_answers(self.asked.answers, self.target.spec.vocab_size, 512)
        return [s for s, _ in zip(read, range(self.asked.sequences * self.largest), strict=False)]

    def states(self, count: int) -> features.Features:
        """Of the first `count` answers; the store is made once for all recipes that take as many."""
        sequences = self.sequences
        layers = self.target.spec.num_layers
        reads = (*initial.default_reads(layers), layers)
        folder = self.asked.out / f"states-{self.dtype}-{len(sequences)}"
        return Beginning(features.store(self.target, sequences, reads, folder, self.made_for), count)

    def arm(self, kind: str = "eagle3", **settings: Any) -> Arm:
        """A new head, trained on the answers of an arm, four a step, each of them once."""
        return self.growing([1], kind, **settings)[0]

    def growing(
        self,
        times: Sequence[int],
        kind: str = "eagle3",
        *,
        steps: int = 4,
        noise: float = 0.1,
        layers: int = 1,
        reads: tuple[int, ...] | None = None,
        vocabulary: int = 8192,
    ) -> list[Arm]:
        """A new head as it stands after each of `times` the answers of an arm, in one training.

        With several, the learning rate stays at its peak: what came first is then a training of its own.
        """
        count = self.asked.sequences * max(times)
        parts = [kind, f"steps{steps}", f"answers{count}", self.dtype]
        parts += [f"noise{noise:g}"] if kind == "eagle" else [f"layers{layers}", f"vocabulary{vocabulary}"]
        parts += [] if reads is None else ["reads" + "-".join(map(str, reads))]
        parts += [] if len(times) == 1 else ["constant"]
        folder = self.asked.out / "arms" / "-".join(parts)
        ids_Q, _ = initial.draft_vocabulary(self.sequences[:count], vocabulary, self.target.spec.eos_ids)
        if not all((folder / str(n) / "arm.json").exists() for n in times):
            head = initial.new_head(
                kind, self.eager, None if kind == "eagle" else ids_Q, steps=steps, noise=noise, layers=layers,
                window=512, reads=reads,
            )  # fmt: skip
            self._train(head, times, folder)
        arms = []
        for n in times:
            record = json.loads((folder / str(n) / "arm.json").read_text())
            head = checkpoint.read_head_for(str(folder / str(n) / "head"), self.target)
            drafter = checkpoint.serving(head, self.target, ids_Q if kind == "eagle" else None)
            arms.append(Arm(folder.name, head, drafter, record["tokens_seen"], record["seconds"]))
        return arms

    def _train(self, head: Head, times: Sequence[int], folder: Path) -> None:
        part = self.asked.sequences // 4  # steps
        states = self.states(self.asked.sequences * max(times))
        config = train.TrainConfig(
            steps=part * max(times), warmup=min(50, part // 10), last_rate=0.1 if len(times) == 1 else 1.0,
            validate_every=part,
        )  # fmt: skip
        trainer = train.Trainer(head, states, config, features.states_dtype(self.target), self.made_for)
        run, begun = folder / "run", time.perf_counter()

        def keep(head: Head) -> None:
            done = trainer.step // part
            if done in times:
                here = folder / str(done)
                checkpoint.save_head(head, here / "head", self.made_for, f"# {folder.name}\n\nAn arm of a recipe.\n")
                record = {"tokens_seen": trainer.tokens_seen, "seconds": time.perf_counter() - begun}
                write_text(here / "arm.json", json.dumps(record))

        with pytorch_threads():
            fit.fit(trainer, run, Beginning(states, 4), keep, resume=(run / fit.STATE).exists())

    def shipped(self) -> Drafter[Any]:
        """The drafter of --head."""
        drafter = attach_head(self.asked.head, self.target, self.tokenizer)
        assert drafter is not None, "a recipe needs a head that drafts"
        return drafter

    @property
    def workloads(self) -> list[str]:
        return self.asked.workload or ["mt_bench", "humaneval", "gsm8k"]

    def answers(self, workload: str) -> list[tuple[Request, Answer]]:
        """What the target says to a workload's first prompts, at temperature 0."""
        if workload not in self._answers:
            stop = Stop(self.asked.max_new_tokens, self.target.spec.eos_ids)
            items = read_workload(workload, self.asked.prompts)
            requests = [Request(self.model.encode(item.text), Sampling(), stop) for item in items]
            bar = tqdm(requests, desc=f"answers to {workload}", unit="prompt")
            plain = [timed(generate_plain(self.target, own.prompt, own.sampling, stop, False)) for own in bar]
            self._answers[workload] = list(zip(requests, plain, strict=True))
        return self._answers[workload]

    def record(self, drafter: Drafter[Any], policies: Sequence[Policy]) -> Recorded:
        """What the drafter guesses at every place of the answers, for trees like these."""
        return {
            workload: [
                replay.trace(self.target, drafter, request, answer, policies)
                for request, answer in tqdm(self.answers(workload), desc=f"guesses on {workload}", unit="answer")
            ]
            for workload in self.workloads
        }

    def costs(self, drafter: Drafter[Any], name: str) -> costs.Costs:
        """Milliseconds of a round's parts with this drafter; measured once, and kept in --out."""
        path = self.asked.out / "costs" / f"{name}.json"
        if not path.exists():
            requests = [request for workload in self.workloads for request, _ in self.answers(workload)[:2]]
            found = costs.measure_costs(self.target, drafter, requests)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asdict(found)))
        return costs.from_record(json.loads(path.read_text()))


@contextmanager
def pytorch_threads() -> Iterator[None]:
    """All threads for PyTorch, which trains; otherwise it has one, so as not to be in the native core's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(native.use_threads())
    yield
    torch.set_num_threads(before)


def replayed(recorded: Recorded, policy: Policy) -> dict[str, list[Answer]]:
    """The rounds of every answer under a tree."""
    return {workload: [replay.replay(trace, policy) for trace in traces] for workload, traces in recorded.items()}


def chain_acceptance(chains: dict[str, list[Answer]]) -> list[float]:
    """By depth, all workloads together: the share accepted of those that were reached, as deep as enough were."""
    answers = [answer for own in chains.values() for answer in own]
    reached = Counter(draw.depth for draw in draws(answers))
    return [share for depth, share in enumerate(alpha_by_depth(answers), start=1) if reached[depth] >= _FEWEST]


def mean_tau(answers: dict[str, list[Answer]]) -> float:
    """The mean over workloads."""
    return sum(tau(own) or 0.0 for own in answers.values()) / len(answers)


def speed(answers: dict[str, list[Answer]], rows: Sequence[int], price: costs.Costs) -> float:
    """Tokens per millisecond, prompts left out: rounds of these trees, `rows` nodes expanded at each later level."""
    rounds = [round_ for own in answers.values() for answer in own for round_ in answer.rounds[1:]]
    milliseconds = sum(price.round_ms(len(round_.tree or ()) - 1, rows) for round_ in rounds)
    return sum(len(round_.tokens) for round_ in rounds) / milliseconds


def finish(lab: Lab, name: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """The table, the record in --out, and the JSON line."""
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(lab.asked).items()}
    record = {
        "recipe": name,
        "rows": rows,
        "settings": settings,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }
    lab.asked.out.mkdir(parents=True, exist_ok=True)
    write_text(lab.asked.out / f"{name}.json", json.dumps(record, indent=1))
    print(json.dumps(record))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, (list, tuple)):
        return " ".join(_cell(part) for part in value)
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Panel:
    """One plot: lines of (x, y) by name."""

    title: str
    x: str
    y: str
    lines: dict[str, Sequence[tuple[float, float]]]
    diagonal: bool = False
    logarithmic: bool = False


def draw(lab: Lab, name: str, panels: Sequence[Panel]) -> None:
    """The panels side by side, as SVG."""
    import matplotlib  # only figures need it

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "font.size": 9, "axes.grid": True, "grid.color": "#e5e7eb"})
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        for colour, (label, points) in zip(_colours(panel.lines), panel.lines.items(), strict=True):
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", ms=3, label=label, color=colour)
        if panel.diagonal:
            axis.plot([0, 1], [0, 1], color="#6b7280", ls=":", lw=1)
        if panel.logarithmic:
            axis.set_xscale("log", base=2)
        elif all(isinstance(x, int) for points in panel.lines.values() for x, _ in points):
            axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    lab.asked.figures.mkdir(parents=True, exist_ok=True)
    figure.savefig(lab.asked.figures / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def _colours(names: Iterable[str]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i, _ in enumerate(names)]


def main(recipe: Callable[[], None]) -> None:
    """Run a recipe; Ctrl-C leaves what can be gone on from."""
    try:
        recipe()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
