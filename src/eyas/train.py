"""Training: batches of the target's own answers -> head.loss -> AdamW -> a head's folder.

One loop for every kind of head; the objectives live with the heads. Float32 master weights, products in the target's
dtype. Everything that a step does follows from (seed, step), so a run that was stopped goes on bit for bit. Refuses to
know how states are made (`features`) and how heads are laid out on disk (`formats`).
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, current_thread, main_thread

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from eyas.data import Sequence, digest
from eyas.drafters.base import Batch
from eyas.drafters.eagle import Eagle, EagleConfig
from eyas.drafters.eagle3 import Eagle3, Eagle3Config
from eyas.drafters.layers import BlockConfig
from eyas.errors import InputError
from eyas.features import Features
from eyas.targets.eager import EagerTarget
from eyas.targets.families import default_reads


@dataclass(frozen=True)
class TrainConfig:
    """A recipe; every default works on a laptop."""

    steps: int = 1000  # optimiser steps
    sequences: int = 4  # per step; at this scale steps are scarcer than tokens, so batches are small
    learning_rate: float = 6e-4  # peak, reached after the warm-up, then a cosine down to a tenth
    warmup: int = 50  # steps
    weight_decay: float = 0.0
    clip: float = 0.5  # largest norm of the gradient
    seed: int = 0
    checkpoint_every: int = 100  # steps between resumable states

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, highest in (("learning_rate", 1.0), ("clip", math.inf)):
            if not 0 < getattr(self, name) <= highest:
                raise InputError(f"{name} must be above 0 and at most {highest}, got {getattr(self, name)}")
        for name, highest in (("warmup", math.inf), ("weight_decay", 1.0), ("seed", 2**31)):
            if not 0 <= getattr(self, name) <= highest:
                raise InputError(f"{name} must be between 0 and {highest}, got {getattr(self, name)}")


def draft_vocabulary(sequences: Seq[Sequence], size: int, special_ids: Seq[int]) -> tuple[Tensor, float]:
    """The `size` most frequent answer tokens, the special ones forced in, ascending; and their share of answer tokens.

    Fewer distinct tokens than `size` are filled up with the lowest ids that are left, so the size is as asked.

    Raises:
        InputError: a size without room for the special tokens.
    """
    if size < max(1, len(special_ids)):
        raise InputError(f"the draft vocabulary needs at least {max(1, len(special_ids))} tokens, got {size}")
    counts = Counter(token for s in sequences for token in s.tokens[s.answer_start :])
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys([*special_ids, *frequent][:size])
    filler = (token for token in range(size + len(chosen)) if token not in chosen)
    while len(chosen) < size:
        chosen[next(filler)] = None
    covered = sum(counts[token] for token in chosen) / max(counts.total(), 1)
    return torch.tensor(sorted(chosen)), covered


def new_head(
    kind: str,
    target: EagerTarget,
    vocabulary_Q: Tensor | None = None,
    steps: int = 7,
    noise: float = 0.1,
    layers: int = 1,
    window: int = 0,
    **switches: bool,
) -> Eagle | Eagle3:
    """An untrained head that starts from the target's last layer, its fusion from the identity on the highest state.

    `steps` and `noise` are the objectives' own (training-time test, feature noise). `window` bounds how far drafting
    looks back: the length of the texts that it will be trained on. `layers` and `switches` (those
    of `Eagle3Config`) are for EAGLE-3; layers after the first start as the identity.

    Raises:
        InputError: a setting that the head or its objective cannot take, or a draft vocabulary larger than the
            target's.
    """
    spec = target.spec
    if steps < 1:
        raise InputError(f"the training-time test needs at least 1 step, got {steps}")
    if not 0 <= noise <= 10:
        raise InputError(f"the feature noise must be between 0 and 10, got {noise}")
    if kind == "eagle" and (layers != 1 or any(switches.values())):
        raise InputError(f"an EAGLE-1 head has one layer and no switches, got {layers} layers and {switches}")
    if vocabulary_Q is not None and len(vocabulary_Q) > spec.vocab_size:
        raise InputError(f"the draft vocabulary has {len(vocabulary_Q)} tokens, the target's only {spec.vocab_size}")
    block = BlockConfig(
        width=spec.width,
        attention_width=spec.width if kind == "eagle" else 2 * spec.width,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn_width=spec.ffn_width,
        norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        window=window,
    )
    layer = {key: value.detach().float() for key, value in target.last_layer().items()}
    generator = torch.Generator().manual_seed(0)
    input_norm_D, final_norm_D = layer.pop("input_layernorm.weight"), layer.pop("norm.weight")
    identity_DD = torch.eye(spec.width)
    if kind == "eagle":
        config = EagleConfig(block, (spec.num_layers,), spec.vocab_size, noise=noise)
        head = Eagle(config, target.embedding_VD, target.head_VD)
        fc = _behind(identity_DD, generator)
        # no norm stands before this block's attention: fold the layer's own into its projections, for features of the
        # final norm's size; and start from f_{i+1} = f_i, since the layer writes at the scale of un-normed states
        scale_D = input_norm_D / final_norm_D.square().mean().sqrt()
        qkv = {name: layer[f"self_attn.{name}_proj.weight"] * scale_D for name in "qkv"}
        layer["self_attn.o_proj.weight"] = torch.zeros_like(layer["self_attn.o_proj.weight"])
        layer["mlp.down_proj.weight"] = torch.zeros_like(layer["mlp.down_proj.weight"])
        start = {"fc.weight": fc, "fc.bias": torch.zeros(spec.width)}
    else:
        reads = default_reads(spec.num_layers)
        size = spec.vocab_size if vocabulary_Q is None else len(vocabulary_Q)
        config = Eagle3Config(block, reads, spec.width, spec.vocab_size, size, steps=steps, layers=layers, **switches)
        head = Eagle3(config, target.embedding_VD, target.head_VD, vocabulary_Q)
        fc = torch.cat((*[torch.zeros_like(identity_DD)] * (len(reads) - 1), identity_DD), dim=1)
        rows = slice(None) if vocabulary_Q is None else vocabulary_Q
        qkv = {name: _behind(layer[f"self_attn.{name}_proj.weight"], generator) for name in "qkv"}
        start = {
            "fc.weight": fc,
            "hidden_norm.weight": input_norm_D,
            "norm.weight": final_norm_D,
            "lm_head.weight": target.head_VD[rows].detach().float(),
        }
    # each later layer is the target's last one too, and its two writes to the residual begin at zero
    silent = {key: torch.zeros_like(layer[key]) for key in ("self_attn.o_proj.weight", "mlp.down_proj.weight")}
    for n in range(layers - 1):
        start |= {f"later.{n}.block.{key}": value for key, value in {**layer, **silent}.items()}
        start[f"later.{n}.norm.weight"] = input_norm_D
    start |= {f"block.self_attn.{name}_proj.weight": weight for name, weight in qkv.items()}
    start = {f"block.{key}": value for key, value in layer.items()} | start
    start = {key: value for key, value in start.items() if key in head.state_dict()}  # no biases, no q/k norms here
    head.load_state_dict({**head.state_dict(), **start})
    return head


def _behind(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A projection of the hidden half of [embedding, hidden]; small weights on the embedding, which it never read."""
    return torch.cat((torch.randn(weight.shape, generator=generator) * 0.01, weight), dim=1)


def make_batch(features: Features, numbers: Seq[int], reads: Seq[int], seed: int) -> Batch:
    """Examples by number as one padded batch; the last state of the store is the target's final one."""
    examples = features.batch(numbers)
    columns = [features.reads.index(read) for read in reads]
    states = [example.states_TLD[:, columns] for example in examples]
    final = [example.states_TLD[:, -1] for example in examples]
    tokens = [torch.tensor(example.sequence.tokens) for example in examples]
    return Batch(
        tokens_BT=pad_sequence(tokens, batch_first=True),
        lengths_B=torch.tensor([len(t) for t in tokens]),
        starts_B=torch.tensor([example.sequence.answer_start for example in examples]),
        states_BTLD=pad_sequence(states, batch_first=True),
        final_BTD=pad_sequence(final, batch_first=True),
        seed=seed,
    )


class Trainer:
    """A head, its optimiser and the step it stands at.

    Arguments:
        dtype: of the products; the weights themselves are float32.
        made_for: the target's fingerprint; with the head's settings and the data it says which run this is.

    Raises:
        InputError: fewer examples than a step takes.
    """

    def __init__(
        self,
        head: Eagle | Eagle3,
        features: Features,
        config: TrainConfig,
        dtype: torch.dtype,
        made_for: Mapping[str, str] | None = None,
    ) -> None:
        if config.sequences > len(features):
            raise InputError(f"a step takes {config.sequences} sequences, and there are {len(features)}")
        self.head, self.features, self.config, self.dtype = head.float().train(), features, config, dtype
        vocabulary_Q = head.draft_vocabulary_Q if isinstance(head, Eagle3) else None
        self.identity = {
            "head": repr(head.config),
            "draft vocabulary": digest(None if vocabulary_Q is None else vocabulary_Q.tolist()),
            "dtype": str(dtype),
            "answers": features.digest,
            **{f"target's {key}": value for key, value in (made_for or {}).items()},
        }
        self.optimiser = torch.optim.AdamW(
            head.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.step = 0
        self.tokens_seen = 0
        self.recent: dict[str, float] = {}  # metrics, averaged over the last twenty steps or so

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine from the peak to a tenth of it."""
        c = self.config
        if self.step < c.warmup:
            return c.learning_rate * (self.step + 1) / c.warmup
        progress = (self.step - c.warmup) / max(1, c.steps - c.warmup)
        return c.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))

    def train_step(self) -> dict[str, float]:
        """One optimiser step; the recent metrics.

        Raises:
            FloatingPointError: the loss is no number any more.
        """
        batch = make_batch(self.features, self._numbers(), self.head.reads, self.config.seed + self.step)
        loss, metrics = self._loss(batch)
        if not bool(loss.isfinite()):
            raise FloatingPointError(f"the loss is not finite at step {self.step}")
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        self.optimiser.step()
        self.step += 1
        self.tokens_seen += int(batch.lengths_B.sum())
        for name, value in {"loss": loss, **metrics}.items():
            self.recent[name] = 0.95 * self.recent.get(name, value.item()) + 0.05 * value.item()
        return self.recent

    def _loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        # masters stay float32; products run on copies in the target's dtype, gradients flow back through the cast
        weights = {name: weight.to(self.dtype) for name, weight in self.head.named_parameters()}
        return functional_call(self.head, weights, (batch,))

    def _numbers(self) -> list[int]:
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
        """Mean metrics over held-out examples, as decoding sees them: without noise."""
        self.head.eval()
        totals: Counter[str] = Counter()
        batches = [
            range(i, min(i + self.config.sequences, len(features)))
            for i in range(0, len(features), self.config.sequences)
        ]
        for numbers in batches:
            loss, metrics = self._loss(make_batch(features, list(numbers), self.head.reads, 0))
            totals.update({"loss": loss.item(), **{name: value.item() for name, value in metrics.items()}})
        self.head.train()
        return {name: value / len(batches) for name, value in totals.items()}

    def save(self, path: Path) -> None:
        """Everything that a run needs to go on, in one file, whole or not at all."""
        tensors = {f"weight.{name}": weight.detach() for name, weight in self.head.named_parameters()}
        for name, weight in self.head.named_parameters():
            for key, value in self.optimiser.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value
        progress = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "recent": self.recent,
            "config": asdict(self.config),
            "identity": self.identity,
        }
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary, metadata={"progress": json.dumps(progress)})
        temporary.rename(path)

    def restore(self, path: Path) -> None:
        """Go on where `save` stopped.

        Raises:
            InputError: the file is broken, or it is the state of another run (the number of steps may change).
        """
        try:
            with safe_open(path, framework="pt") as file:
                progress = json.loads(file.metadata()["progress"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            asked = {**asdict(self.config), **self.identity}
            found = {**progress["config"], **progress["identity"]}
            step, tokens_seen, recent = progress["step"], progress["tokens_seen"], progress["recent"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"cannot resume from {path}: {type(error).__name__} {error}") from error
        for key in sorted(asked.keys() - {"steps", "checkpoint_every"}):
            if found.get(key) != asked[key]:
                raise InputError(f"cannot resume from {path}: its {key} was {found.get(key)}, now it is {asked[key]}")
        self.step, self.tokens_seen, self.recent = step, tokens_seen, recent
        for name, weight in self.head.named_parameters():
            assert tensors[f"weight.{name}"].shape == weight.shape, name
            weight.data.copy_(tensors[f"weight.{name}"])
            self.optimiser.state[weight] = {
                key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors
            }


def run(trainer: Trainer, out: Path, held_out: Features | None = None) -> dict[str, float]:
    """Train to the end with a progress bar; resumable state and a log of metrics lie in `out`. The last metrics.

    Ctrl-C ends the step, saves the state and raises KeyboardInterrupt: the same command with `--resume` goes on.

    Raises:
        InputError: the run has done its steps already.
    """
    out.mkdir(parents=True, exist_ok=True)
    total, first_step, first_tokens = trainer.config.steps, trainer.step, trainer.tokens_seen
    if first_step >= total:
        raise InputError(f"this run has done {first_step} steps already: ask for more than that to go on")
    begun = time.perf_counter()
    bar = tqdm(total=total, initial=first_step, unit="step", desc=f"train {trainer.head.kind}")
    with bar, _interrupts() as interrupted:
        while trainer.step < total and not interrupted.is_set():
            metrics = trainer.train_step()
            rate = (trainer.tokens_seen - first_tokens) / (time.perf_counter() - begun)
            bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {_acceptance(metrics)}, {rate:.0f} tokens/s")
            bar.update()
            if trainer.step % trainer.config.checkpoint_every == 0 or trainer.step == total or interrupted.is_set():
                trainer.save(out / "training.safetensors")
                _log(trainer, out / "metrics.jsonl", rate, held_out)
        if interrupted.is_set():
            raise KeyboardInterrupt
    return trainer.recent


@contextmanager
def _interrupts() -> Iterator[Event]:
    """Within the block, Ctrl-C only sets the event: a step is done or not done, never half done."""
    event = Event()
    if current_thread() is not main_thread():
        yield event  # signals reach the main thread alone
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _log(trainer: Trainer, path: Path, rate: float, held_out: Features | None) -> None:
    record = {"step": trainer.step, "tokens_seen": trainer.tokens_seen, "tokens_per_second": rate, **trainer.recent}
    if held_out is not None:
        held = trainer.evaluate(held_out)
        record |= {f"held_out_{name}": value for name, value in held.items()}
        tqdm.write(f"step {trainer.step}: held-out loss {held['loss']:.3f}, {_acceptance(held)}", file=sys.stderr)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _acceptance(metrics: dict[str, float]) -> str:
    """Simulated acceptance by depth, and the length of a chain that it would give (all depths before must hold)."""
    rates = [value for name, value in metrics.items() if name.startswith("accept_")]
    length, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        length += reached
    return f"acceptance {' '.join(f'{rate:.2f}' for rate in rates)} (chain {length:.2f})"


def card(trainer: Trainer, target: str, made_for: Mapping[str, str], answers: str) -> str:
    """What people should know about a head: its training, and what it is for."""
    head, config = trainer.head, trainer.config
    layers = f" of {head.config.layers} layers" if isinstance(head, Eagle3) and head.config.layers > 1 else ""
    drafts = f"{head.config.draft_vocab_size} of {head.config.vocab_size}" if isinstance(head, Eagle3) else "all"
    return f"""# {head.kind} head{layers} for {target}

- Reads states {list(head.reads)} of the target (indices of transformers' `hidden_states`), drafts over {drafts} tokens.
- Trained on features of dtype {made_for["dtype"]}; chat template {made_for["chat_template"]}, as the answers were made.
- Data: `{answers}`, {len(trainer.features)} sequences; {trainer.tokens_seen:,} tokens seen in {trainer.step} steps of
  {config.sequences} sequences; AdamW, peak learning rate {config.learning_rate}, seed {config.seed}.
- Simulated acceptance at the end of training: {_acceptance(trainer.recent)}.
- A head is made for one target: with other weights, or another template, acceptance falls; the output stays right.
"""
