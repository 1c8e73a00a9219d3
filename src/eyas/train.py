"""Training: batches of the target's own answers -> head.loss -> AdamW.

One step for every kind of head; the objectives live with the heads. Float32 master weights, products in the target's
dtype. What a step does follows from (seed, step) alone, so a run that was stopped goes on bit for bit; with several
processes the step is the same, shared out. Refuses to know how states are made (`features`), how a whole run goes
(`fit`) and how heads lie on disk (`formats`).
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call

from eyas.data import digest
from eyas.drafters.base import Batch
from eyas.drafters.eagle import Eagle
from eyas.drafters.rollout import supervised_rows
from eyas.errors import InputError
from eyas.features import Features
from eyas.files import save_tensors
from eyas.initial import Learner
from eyas.team import Team


@dataclass(frozen=True)
class TrainConfig:
    """A recipe; every default works on a laptop."""

    steps: int = 1000  # optimiser steps
    seconds: float = 0.0  # end after this time, the learning rate following it; 0: only by steps
    sequences: int = 4  # of a step, all processes together; at this scale steps are scarcer than tokens
    accumulate: int = 1  # parts that a process takes its share of a step in: less memory, the same step
    learning_rate: float = 6e-4  # peak, reached after the warm-up, then a cosine down
    last_rate: float = 0.1  # where the cosine ends, of the peak; 1: the rate stays, and any step may be the last
    warmup: int = 50  # steps
    weight_decay: float = 0.0
    clip: float = 0.5  # largest norm of the gradient
    seed: int = 0
    checkpoint_every: int = 100  # steps between resumable states
    validate_every: int = 500  # steps between decodings of held-out prompts; 0: only at the end
    validate_prompts: int = 8  # 0: no decoding at all
    validate_tokens: int = 48  # of an answer

    def __post_init__(self) -> None:
        bounds = {
            "steps": (1, math.inf),
            "sequences": (1, math.inf),
            "accumulate": (1, self.sequences),
            "checkpoint_every": (1, math.inf),
            "seconds": (0, math.inf),
            "warmup": (0, math.inf),
            "last_rate": (0, 1.0),
            "weight_decay": (0, 1.0),
            "seed": (0, 2**31),
            "validate_every": (0, math.inf),
            "validate_prompts": (0, math.inf),
            "validate_tokens": (2, math.inf),
        }
        for name, (lowest, highest) in bounds.items():
            if not lowest <= getattr(self, name) <= highest:
                raise InputError(f"{name} must be between {lowest} and {highest}, got {getattr(self, name)}")
        for name, highest in (("learning_rate", 1.0), ("clip", math.inf)):
            if not 0 < getattr(self, name) <= highest:
                raise InputError(f"{name} must be above 0 and at most {highest}, got {getattr(self, name)}")

    def check(self, examples: int, processes: int) -> None:
        """Refuse a step that takes more than there are examples, or does not divide among processes and parts.

        Raises:
            InputError: so it is.
        """
        if self.sequences > examples:
            raise InputError(f"a step takes {self.sequences} sequences, and there are {examples}")
        if self.sequences % (processes * self.accumulate):
            raise InputError(f"a step of {self.sequences} sequences does not divide into {processes} processes of "
                             f"{self.accumulate} parts each")  # fmt: skip


# a run may go on with other values of these
_FREE = {"steps", "seconds", "accumulate", "checkpoint_every", "validate_every", "validate_prompts", "validate_tokens"}


def make_batch(
    features: Features, numbers: Seq[int], reads: Seq[int], seed: int, device: torch.device | None = None
) -> Batch:
    """Examples by number as one batch; the last state of the store is the target's final one."""
    examples = features.batch(numbers)
    columns = [features.reads.index(read) for read in reads]
    states_TLD = torch.cat([example.states_TLD for example in examples]).to(device)
    tokens, answer, bounds = [], [], [0]
    for example in examples:
        own = [False] * len(example.sequence.tokens)
        for a, b in example.sequence.spans:
            own[a:b] = [True] * (b - a)
        tokens += example.sequence.tokens
        answer += own
        bounds.append(len(tokens))
    return Batch(
        tokens_T=torch.tensor(tokens, device=states_TLD.device),
        bounds=tuple(bounds),
        answer_T=torch.tensor(answer),
        states_TLD=states_TLD[:, columns],
        final_TD=states_TLD[:, -1],
        best_T=torch.cat([example.best_T for example in examples]).to(states_TLD.device),
        seed=seed,
    )


class _Products(nn.Module):
    """A head's loss, on copies of its float32 weights in the dtype of the products; gradients reach the weights."""

    def __init__(self, head: Learner, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self.dtype = head, dtype

    def forward(self, batch: Batch, counts_J: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = {name: weight.to(self.dtype) for name, weight in self.head.named_parameters()}
        return functional_call(self.head, weights, (batch, counts_J))


class Trainer:
    """A head, its optimiser and the step it stands at.

    Arguments:
        dtype: of the products; the weights themselves are float32.
        made_for: the target's fingerprint; with the head's settings and the data it says which run this is.
        device: where the head is trained.
        team: the processes that share the steps.

    Raises:
        InputError: fewer examples than a step takes, or a step that does not divide among processes and parts.
    """

    def __init__(
        self,
        head: Learner,
        features: Features,
        config: TrainConfig,
        dtype: torch.dtype,
        made_for: Mapping[str, str] | None = None,
        device: torch.device | None = None,
        team: Team | None = None,
    ) -> None:
        team = team or Team()
        config.check(len(features), team.size)
        self.head, self.features, self.config, self.dtype = head.to(device).float().train(), features, config, dtype
        self.device, self.team = device, team
        ids_Q = None if isinstance(head, Eagle) else head.draft_vocabulary_Q
        self.identity = {
            "head": repr(head.config),
            "draft vocabulary": digest(None if ids_Q is None else ids_Q.tolist()),
            "dtype": str(dtype),
            "answers": features.digest,
            **{f"target's {key}": value for key, value in (made_for or {}).items()},
        }
        self.products = _Products(self.head, dtype)
        self._shared = team.wrap(self.products)
        self.optimiser = torch.optim.AdamW(
            self.weights.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.step = 0
        self.tokens_seen = 0
        self.seconds = 0.0  # spent in steps
        self.recent: dict[str, float] = {}  # metrics, averaged over the last twenty steps or so

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Those of the head that are trained, by name."""
        return {name: weight for name, weight in self.head.named_parameters() if weight.requires_grad}

    @property
    def progress(self) -> float:
        """The share of the run that is done, by steps or by time, whichever is further."""
        c = self.config
        return min(1.0, max(self.step / c.steps, self.seconds / c.seconds if c.seconds else 0.0))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine from the peak down to `last_rate` of it."""
        c = self.config
        if self.step < c.warmup:
            return c.learning_rate * (self.step + 1) / c.warmup
        begun = min(c.warmup / c.steps, 0.999)
        way = max(0.0, self.progress - begun) / (1 - begun)
        return c.learning_rate * (c.last_rate + (1 - c.last_rate) / 2 * (1 + math.cos(math.pi * way)))

    def train_step(self) -> dict[str, float]:
        """One optimiser step; the recent metrics.

        Raises:
            FloatingPointError: the loss is no number any more.
        """
        begun = time.perf_counter()
        batches = self._batches()
        counts_J = self._counts(batches)
        self.optimiser.zero_grad()
        total = defaultdict(float)
        for i, batch in enumerate(batches):
            with self.team.alone(self._shared, alone=i < len(batches) - 1):  # gradients meet once a step
                loss, metrics = self._shared(batch, counts_J)
                loss.backward()
            for name, value in {"loss": loss, **metrics}.items():
                total[name] += value.item()
        total = self.team.mean(total)
        if not math.isfinite(total["loss"]):
            raise FloatingPointError(f"the loss is not finite at step {self.step}")
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.config.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        self.optimiser.step()
        self.step += 1
        self.tokens_seen += round(self.team.size * self.team.mean({"n": sum(len(b.tokens_T) for b in batches)})["n"])
        if self.config.seconds:
            self.seconds += self.team.mean({"s": time.perf_counter() - begun})["s"]
        for name, value in total.items():
            self.recent[name] = 0.95 * self.recent.get(name, value) + 0.05 * value
        return self.recent

    def _batches(self) -> list[Batch]:
        """This process's part of the step."""
        numbers = self.numbers()[self.team.rank :: self.team.size]
        parts, seed = self.config.accumulate, self.config.seed + self.step
        cuts = [numbers[i * len(numbers) // parts : (i + 1) * len(numbers) // parts] for i in range(parts)]
        where = (self.head.reads, seed * self.team.size + self.team.rank, self.device)
        return [make_batch(self.features, part, *where) for part in cuts]

    def _counts(self, batches: Seq[Batch]) -> Tensor:
        """What sums are divided by, so that a step weighs every supervised row of all processes alike: gradients are
        averaged over processes."""
        return self.team.mean_tensor(torch.stack([self._counts_of(batch) for batch in batches]).sum(0))

    def _counts_of(self, batch: Batch) -> Tensor:
        return supervised_rows(batch.bounds, batch.answer_T, batch.tokens_T.device).counts(self.head.steps)

    def numbers(self) -> list[int]:
        """Which examples this step sees: every epoch is a permutation of its own."""
        count, total = self.config.sequences, len(self.features)
        numbers = []
        for place in range(self.step * count, (self.step + 1) * count):
            epoch, offset = divmod(place, total)
            numbers.append(int(self._order(epoch)[offset]))
        return numbers

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.features), generator=generator)

    @torch.no_grad()
    def evaluate(self, features: Features) -> dict[str, float]:
        """Mean metrics over all supervised rows of held-out examples, as decoding sees them: without noise."""
        self.head.eval()
        totals, weights = defaultdict(float), defaultdict(float)
        for i in range(0, len(features), self.config.sequences):
            numbers = range(i, min(i + self.config.sequences, len(features)))
            batch = make_batch(features, numbers, self.head.reads, 0, self.device)
            counts_J = self._counts_of(batch)
            loss, metrics = self.products(batch, counts_J)
            for name, value in {"loss": loss, **metrics}.items():
                step = int(name.rpartition("_")[2]) - 1 if name in metrics else 0
                weights[name] += counts_J[step].item()
                totals[name] += value.item() * counts_J[step].item()
        self.head.train()
        return {name: value / max(weights[name], 1) for name, value in totals.items()}

    def save(self, path: Path, **more: object) -> None:
        """Everything that a run needs to go on, in one file, whole or not at all; `restore` hands `more` back."""
        tensors = {f"weight.{name}": weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            for key, value in self.optimiser.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value
        progress = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "seconds": self.seconds,
            "recent": self.recent,
            "config": asdict(self.config),
            "identity": self.identity,
            "more": more,
        }
        save_tensors(path, tensors, {"progress": json.dumps(progress)})

    def restore(self, path: Path) -> dict[str, object]:
        """Go on where `save` stopped; its `more`.

        Raises:
            InputError: the file is broken, or it is the state of another run (how long it is may change).
        """
        try:
            with safe_open(path, framework="pt") as file:
                progress = json.loads(file.metadata()["progress"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            asked = {**asdict(self.config), **self.identity}
            found = {**progress["config"], **progress["identity"]}
            step, tokens_seen, recent = progress["step"], progress["tokens_seen"], progress["recent"]
            seconds, more = progress["seconds"], progress["more"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"cannot resume from {path}: {type(error).__name__} {error}") from error
        for key in sorted(asked.keys() - _FREE):
            if found.get(key) != asked[key]:
                raise InputError(f"cannot resume from {path}: its {key} was {found.get(key)}, now it is {asked[key]}")
        self.step, self.tokens_seen, self.seconds, self.recent = step, tokens_seen, seconds, recent
        for name, weight in self.weights.items():
            assert tensors[f"weight.{name}"].shape == weight.shape, name
            weight.data.copy_(tensors[f"weight.{name}"])
            self.optimiser.state[weight] = {
                key: tensors[f"{key}.{name}"].to(weight.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}.{name}" in tensors
            }
        return more
