"""A whole training: stopped, killed and resumed to the bit, validated by decoding, checked against drafting."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB, tiny_target
from tqdm import tqdm
from training import answers, in_a_process_of_its_own, trainer

from eyas.checkpoint import serving
from eyas.errors import InputError
from eyas.fit import BEST, METRICS, STATE, acceptance, decoder, fit, serving_difference
from eyas.initial import Head
from eyas.policies import Chain
from eyas.train import TrainConfig, Trainer


def nothing(head: Head) -> None:
    return None


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.head.named_parameters()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, weight in a.items():
        assert torch.equal(weight, b[name]), name


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "small"])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    target = tiny_target(torch.float32)
    sequences = answers(target)
    config = TrainConfig(steps=9, sequences=3, warmup=2, checkpoint_every=4)
    settings = {"noise": 0.1}
    whole = trainer(kind, target, sequences, config, **settings)
    fit(whole, tmp_path / "whole", whole.features, nothing)
    first = trainer(kind, target, sequences, config, **settings)
    for _ in range(5):
        first.train_step()
    (tmp_path / "second").mkdir()
    first.save(tmp_path / "second" / STATE, best=None)
    (tmp_path / "second" / METRICS).write_text('{"step": 4}\n{"step": 6}\n{"st')  # step 6 was not kept, a line is torn
    second = trainer(kind, target, sequences, config, **settings)
    fit(second, tmp_path / "second", second.features, nothing, resume=True)
    assert_equal(weights(whole), weights(second))
    assert whole.tokens_seen == second.tokens_seen
    assert whole.recent == second.recent
    lines = (tmp_path / "second" / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8, 9]


@in_a_process_of_its_own
def test_twenty_kills_at_random_leave_the_same_weights(tmp_path: Path) -> None:
    """Killed without warning, whatever it is doing: the end is that of a run left alone, optimiser and all."""
    target = tiny_target(torch.float32)
    sequences = answers(target, 12)
    config = TrainConfig(steps=70, sequences=2, warmup=2, checkpoint_every=1, validate_every=7)

    def train_on(out: Path) -> None:
        learner = trainer("eagle3", target, sequences, config)
        validate = decoder(target, lambda head: serving(head, target), Chain(2), sequences, 1, 4)
        fit(learner, out, learner.features, validate, resume=(out / STATE).exists())

    def killed(steps: int, seconds: float) -> bool:
        """Run until `steps` more states are written and some time has passed; then kill, if it has not ended."""
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            tqdm.set_lock(threading.RLock())  # the bars' own is shared with this child, which may be killed holding it
            train_on(tmp_path / "killed")
            os._exit(0)
        seen, state, latest = stamp(), tmp_path / "killed" / STATE, time.monotonic() + 60
        while steps and time.monotonic() < latest and os.waitpid(child, os.WNOHANG) == (0, 0):
            steps, seen = steps - (stamp() != seen), stamp()
        time.sleep(seconds)
        assert state.exists() or steps == 0
        os.kill(child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    def stamp() -> int:
        try:
            return (tmp_path / "killed" / STATE).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    train_on(tmp_path / "alone")
    chance = random.Random(0)
    assert all(killed(chance.randrange(3), 0.03 * chance.random()) for _ in range(20))
    train_on(tmp_path / "killed")
    ends = [load_file(tmp_path / name / file) for file in (STATE, BEST) for name in ("alone", "killed")]
    for alone, again in (ends[:2], ends[2:]):
        assert_equal(alone, again)
    logs = [(tmp_path / name / METRICS).read_text().splitlines() for name in ("alone", "killed")]
    steps = [[json.loads(line)["step"] for line in log] for log in logs]
    assert steps[1] == sorted(set(steps[1])) and set(steps[1]) <= set(steps[0])


def test_ctrl_c_ends_the_step_and_saves_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(torch.float32)
    learner = trainer("eagle", target, answers(target, 6), TrainConfig(steps=50))
    step = learner.train_step

    def interrupted() -> dict[str, float]:
        if learner.step == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(learner, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(learner, tmp_path, learner.features, nothing)
    again = trainer("eagle", target, answers(target, 6), TrainConfig(steps=4))
    with pytest.raises(InputError, match="4 steps already"):
        fit(again, tmp_path, again.features, nothing, resume=True)
    assert again.step == 4
    assert again.recent == learner.recent


def test_the_head_that_decodes_best_is_kept(tmp_path: Path) -> None:
    """Tau as told by validation: 2, 3, 1. The weights in the end are those of the second time."""
    target = tiny_target(torch.float32)
    learner = trainer("eagle3", target, answers(target, 6), TrainConfig(steps=6, checkpoint_every=2, validate_every=2))
    lengths, seen = [2.0, 3.0, 1.0], []

    def validate(head: Head) -> float:
        seen.append({name: weight.detach().clone() for name, weight in head.named_parameters()})
        return lengths[len(seen) - 1]

    metrics = fit(learner, tmp_path, learner.features, validate)
    assert (metrics["tau"], metrics["best_tau"]) == (1.0, 3.0)
    assert_equal(weights(learner), seen[1])
    assert not torch.equal(seen[2]["fc.weight"], seen[1]["fc.weight"])
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(line["step"], line["tau"], line["best_tau"]) for line in lines] == [(2, 2, 2), (4, 3, 3), (6, 1, 3)]


def test_a_best_head_that_is_broken_is_sought_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target(torch.float32)
    sequences, config = answers(target, 6), TrainConfig(steps=4, checkpoint_every=2, validate_every=2)
    learner = trainer("eagle3", target, sequences, config)
    fit(learner, tmp_path, learner.features, lambda head: 3.0)
    (tmp_path / BEST).write_bytes(b"x" * 50)
    again = trainer("eagle3", target, sequences, replace(config, steps=6))
    metrics = fit(again, tmp_path, again.features, lambda head: 2.0, resume=True)
    assert "sought anew" in capsys.readouterr().err
    assert metrics["best_tau"] == 2.0
    assert_equal(weights(again), load_file(tmp_path / BEST))


def test_validation_is_tau_of_decoding() -> None:
    """By a draft that is always right: chains of 2 give 3 tokens a forward; the first token comes with the prompt."""
    target = tiny_target(torch.float32)
    sequences = answers(target, 13)
    learner = trainer("eagle3", target, sequences, TrainConfig(steps=300, learning_rate=3e-3, warmup=20, clip=1.0))
    validate = decoder(target, lambda head: serving(head, target), Chain(2), sequences, 3, 13)
    before = validate(learner.head)
    for _ in range(250):
        learner.train_step()
    after = validate(learner.head)
    assert before is not None and after is not None
    assert before < 2 < 2.4 < after <= 3
    assert learner.head.training and all(weight.requires_grad for weight in learner.head.parameters())


def test_a_time_budget_ends_a_run(tmp_path: Path) -> None:
    target = tiny_target(torch.float32)
    config = TrainConfig(steps=10**6, seconds=0.3, warmup=1, checkpoint_every=10**6, validate_every=0)
    learner = trainer("eagle3", target, answers(target, 6), config)
    rates = []
    step = learner.train_step
    learner.train_step = lambda: rates.append(learner.learning_rate()) or step()  # type: ignore[method-assign]
    fit(learner, tmp_path, learner.features, nothing)
    assert 2 < learner.step < 10**6 and learner.seconds >= 0.3
    assert rates[1:] == sorted(rates[1:], reverse=True)  # the cosine follows the clock
    assert learner.learning_rate() == pytest.approx(0.1 * config.learning_rate)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle", {}),
        ("eagle", {"steps": 3}),
        ("eagle3", {}),
        ("eagle3", {"layers": 2, "norm_output": True, "fc_norm": True}),
        ("medusa", {"layers": 2}),
    ],
)
def test_drafting_is_what_was_trained(kind: str, settings: dict) -> None:
    """And a head whose drafting is something else is found out."""
    target = tiny_target(torch.float32)
    learner = trainer(kind, target, answers(target, 9), TrainConfig(), **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in learner.head.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    assert serving_difference(learner.head, learner.features) < 1e-4
    broken = type(learner.head).expand

    def shifted(self, state, rows, tokens, width):
        return broken(self, state, rows, [(token + 1) % VOCAB for token in tokens], width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(learner.head), "expand", shifted)
        deep = kind != "medusa" and learner.head.steps > 1  # Medusa's guesses do not look at the drafted tokens
        assert (serving_difference(learner.head, learner.features) > 1e-2) == deep


def test_the_line_that_people_read() -> None:
    metrics = {"loss": 1.0, "accept_1": 0.5, "reach_1": 0.5, "accept_2": 0.4, "reach_2": 0.25}
    assert acceptance(metrics) == "acceptance 0.50 0.40 (chain 1.75)"
