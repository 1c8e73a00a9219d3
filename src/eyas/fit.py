"""A whole training: steps, resumable states, validation by decoding, the best head kept, and what people see of it.

Simulated acceptance says what the objective says; what counts is tau, so held-out prompts are decoded with the head as
it stands and the best one by that is kept. At the end the head's logits in training are compared with those that the
engine drafts with, at every depth.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from eyas.data import Sequence
from eyas.drafters.base import Drafter
from eyas.drafters.eagle import Eagle
from eyas.drafters.rollout import supervised_rows
from eyas.drafters.small_model import SmallModel
from eyas.drafters.student import Student
from eyas.errors import InputError
from eyas.features import Features
from eyas.files import save_tensors, write_text
from eyas.generate import generate
from eyas.initial import Learner, copy_of
from eyas.measure import tau, timed
from eyas.policies import Policy
from eyas.sampling import Sampling
from eyas.targets.base import Target
from eyas.train import Trainer, make_batch
from eyas.verify import Stop

STATE, METRICS, BEST = "training.safetensors", "metrics.jsonl", "best.safetensors"  # in the folder of a run


class Validate(Protocol):
    """Tau of a head by decoding held-out prompts; None where nothing could be measured."""

    def __call__(self, head: Learner) -> float | None: ...


def decoder(
    target: Target[Any],
    serve: Callable[[Learner], Drafter[Any]],
    policy: Policy,
    held_out: Seq[Sequence],
    prompts: int,
    tokens: int,
    quiet: bool = False,
) -> Validate:
    """Decodes the first `prompts` held-out prompts, `tokens` each, at temperature 0; `serve` makes a
    drafter of a head in training."""
    chosen = [s.tokens[: s.spans[0][0]] for s in held_out if s.spans[0][0] > 0][:prompts]

    def validate(head: Learner) -> float | None:
        drafter, stop = serve(head), Stop(tokens, target.spec.eos_ids)
        bar = tqdm(chosen, desc="decoding held-out prompts", unit="prompt", leave=False, disable=quiet)
        return tau([timed(generate(target, drafter, policy, prompt, Sampling(), stop)) for prompt in bar])

    return validate


def fit(
    trainer: Trainer,
    out: Path,
    held_out: Features,
    validate: Validate,
    resume: bool = False,
    tensorboard: bool = False,
) -> dict[str, float | None]:
    """Train to the end with a progress bar; resumable state and a log of metrics lie in `out`. The last metrics.

    The trainer's head ends with the weights that decoded best. Ctrl-C ends the step, saves the state and raises
    KeyboardInterrupt: with `resume` the run goes on.

    Raises:
        InputError: the run has done its steps already, or TensorBoard is not installed.
    """
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise InputError("the package tensorboard is not installed: install it, or leave --tensorboard out")
    run = _Run(trainer, out, held_out, validate, tensorboard)
    if resume:
        run.restore()
    if trainer.progress >= 1:
        raise InputError(f"this run has done {trainer.step} steps already: ask for more than that to go on")
    with _interrupts() as interrupted:
        run.steps(interrupted)
        if interrupted.is_set():
            raise KeyboardInterrupt
    return run.finish()


class _Run:
    """What a training remembers beside the trainer's own state: the best tau so far, and whom it tells."""

    def __init__(self, trainer: Trainer, out: Path, held_out: Features, validate: Validate, tensorboard: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.trainer, self.out, self.held_out, self.validate = trainer, out, held_out, validate
        self.best: float | None = None
        self.last: dict[str, float | None] = {}
        self._tensorboard = tensorboard and trainer.team.first

    def restore(self) -> None:
        more = self.trainer.restore(self.out / STATE)
        best = more.get("best")
        if isinstance(best, float):
            try:
                load_file(self.out / BEST)
                self.best = best
            except (OSError, SafetensorError):
                tqdm.write(f"{self.out / BEST} cannot be read: the best head is sought anew", file=sys.stderr)
        if self.trainer.team.first and (self.out / METRICS).exists():
            lines = (self.out / METRICS).read_text().splitlines()
            kept = [line for line in lines if self._was_done(line)]
            write_text(self.out / METRICS, "".join(f"{line}\n" for line in kept))

    def _was_done(self, line: str) -> bool:
        """Is the line whole, and of a step whose weights were kept?"""
        try:
            return json.loads(line)["step"] <= self.trainer.step
        except (ValueError, KeyError, TypeError):
            return False

    def steps(self, interrupted: Event) -> None:
        trainer, config = self.trainer, self.trainer.config
        first_tokens, begun = trainer.tokens_seen, time.perf_counter()
        bar = tqdm(
            total=round(config.seconds) or config.steps,  # whatever is likely to end the run
            initial=self._place(),
            unit="s" if config.seconds else "step",
            desc=f"train {trainer.head.kind}",
            disable=not trainer.team.first,
        )
        with bar:
            while trainer.progress < 1 and not interrupted.is_set():
                metrics = trainer.train_step()
                if trainer.team.mean({"interrupted": interrupted.is_set()})["interrupted"]:
                    interrupted.set()  # all processes end after the same step
                rate = (trainer.tokens_seen - first_tokens) / (time.perf_counter() - begun)
                bar.set_postfix_str(
                    f"step {trainer.step}, loss {metrics['loss']:.3f}, {acceptance(metrics)}, {rate:.0f} tokens/s"
                )
                bar.update(self._place() - bar.n)
                ended = trainer.progress >= 1
                decode = ended or (config.validate_every and trainer.step % config.validate_every == 0)
                if decode or interrupted.is_set() or trainer.step % config.checkpoint_every == 0:
                    self._keep(rate, decode=bool(decode) and not interrupted.is_set())

    def _place(self) -> int:
        return round(self.trainer.seconds) if self.trainer.config.seconds else self.trainer.step

    def _keep(self, rate: float, decode: bool) -> None:
        """Measure where the head stands, and write everything down. All processes measure: a target that is spread over
        them runs on all or on none."""
        trainer = self.trainer
        held = trainer.evaluate(self.held_out)
        length = self.validate(trainer.head) if decode and trainer.config.validate_prompts else None
        better = length is not None and (self.best is None or length > self.best)
        self.best = length if better else self.best
        self.last = {
            "step": trainer.step,
            "tokens_seen": trainer.tokens_seen,
            "tokens_per_second": rate,
            "learning_rate": trainer.learning_rate(),
            **trainer.recent,
            **{f"held_out_{name}": value for name, value in held.items()},
            "tau": length,
            "best_tau": self.best,
        }
        if not trainer.team.first:
            return
        if better:
            save_tensors(self.out / BEST, {name: weight.detach() for name, weight in trainer.weights.items()})
        told = "" if length is None else f", tau {length:.2f} (best {self.best:.2f})"
        tqdm.write(f"step {trainer.step}: held-out loss {held['loss']:.3f}, {acceptance(held)}{told}", file=sys.stderr)
        trainer.save(self.out / STATE, best=self.best)
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps(self.last) + "\n")
        if self._tensorboard:
            _write_events(self.out, self.last)

    def finish(self) -> dict[str, float | None]:
        if self.best is not None:
            weights = load_file(self.out / BEST)
            for name, weight in self.trainer.weights.items():
                weight.data.copy_(weights[name])
        return self.last


def _write_events(out: Path, record: Mapping[str, float | None]) -> None:
    from torch.utils.tensorboard import SummaryWriter  # an optional dependency

    with SummaryWriter(str(out / "tensorboard")) as writer:
        for name, value in record.items():
            if value is not None and name != "step":
                writer.add_scalar(name, value, int(record["step"] or 0))


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


def acceptance(metrics: Mapping[str, float]) -> str:
    """Simulated acceptance by depth, and a chain's length: 1 + the shares of rows where all guesses so far hold."""
    rates = [value for name, value in metrics.items() if name.startswith("accept_")]
    length = 1 + sum(value for name, value in metrics.items() if name.startswith("reach_"))
    return f"acceptance {' '.join(f'{rate:.2f}' for rate in rates)} (chain {length:.2f})"


@torch.inference_mode()
def serving_difference(head: Learner, features: Features, most: int = 8) -> float:
    """The largest difference of a draft log-probability between training and drafting, in float32, at every depth of
    the first `most` rows of an example, over the draft vocabulary.

    Training computes all depths of all rows at once, drafting one node after the other. If they differ, the head was
    trained for something else than what it will do.
    """
    twin = head.copy(torch.float32) if isinstance(head, Student) else copy_of(head, torch.float32)
    batch = make_batch(features, [0], head.reads, 0, twin.head_VD.device)
    batch = replace(batch, states_TLD=batch.states_TLD.float(), final_TD=batch.final_TD.float())
    rows = supervised_rows(batch.bounds, batch.answer_T, twin.head_VD.device)
    trained = [logits_SQ[:most].log_softmax(-1) for logits_SQ in twin.logits(batch, rows)]
    width, vocabulary_Q = trained[0].shape[-1], None if isinstance(twin, Eagle) else twin.draft_vocabulary_Q
    drafter = SmallModel(twin.small) if isinstance(twin, Student) else cast("Drafter[Any]", twin)
    tokens, worst = batch.tokens_T.tolist(), 0.0
    for row, place in enumerate(rows.token_S[:most].tolist()):
        state = drafter.new_state(tokens[0])
        candidates = drafter.observe(state, tokens[1 : place + 2], batch.states_TLD[: place + 1], width)
        for step, logprobs_SQ in enumerate(trained):
            ids_W = candidates.tokens_KW[0]
            if vocabulary_Q is not None:
                ids_W = torch.searchsorted(vocabulary_Q, ids_W)
            if rows.valid(step)[row]:
                worst = max(worst, (logprobs_SQ[row, ids_W] - candidates.logprobs_KW[0]).abs().max().item())
            if step + 1 < len(trained) and place + 2 + step < len(tokens):
                candidates = drafter.expand(state, [step], [tokens[place + 2 + step]], width)
    return worst
