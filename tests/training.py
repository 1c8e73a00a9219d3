"""Answers of a tiny target and trainers for them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from eyas.data import Sequence
from eyas.features import Streamed
from eyas.generate import generate_plain
from eyas.initial import draft_vocabulary, new_head
from eyas.measure import timed
from eyas.sampling import Sampling
from eyas.targets.eager import EagerTarget
from eyas.train import TrainConfig, Trainer
from eyas.verify import Stop

PROMPTS = [[1, 5, 9, 3], [1, 7, 7], [1, 20, 33, 4, 8], [1, 50]]
MORE_PROMPTS = [[1, 11, 12], [1, 40, 41, 42], [1, 30], [1, 25, 6, 17]]


def answered(prompt: Seq[int], answer: Seq[int]) -> Sequence:
    return Sequence((*prompt, *answer), ((len(prompt), len(prompt) + len(answer)),))


def answers(target: EagerTarget, length: int = 24, prompts: Seq[list[int]] = PROMPTS) -> list[Sequence]:
    stop = Stop(length)
    return [answered(prompt, timed(generate_plain(target, prompt, Sampling(), stop)).tokens) for prompt in prompts]


def trainer(kind: str, target: EagerTarget, sequences: Seq[Sequence], config: TrainConfig, **settings) -> Trainer:
    vocabulary, _ = draft_vocabulary(sequences, 40, special_ids=(2,))
    every = kind in ("eagle", "small")  # these draft over all tokens
    steps = {"steps": 1 if every else 3, "noise": 0.0}
    head = new_head(kind, target, None if every else vocabulary, **{**steps, **settings})
    return Trainer(head, Streamed(target, sequences, reads_for(head)), config, torch.float32, {})


def reads_for(head) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*head.reads, 4)))


def in_a_process_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """A test that forks: a child of a process in which PyTorch has made threads (earlier tests' training) may hang."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        if os.environ.get("EYAS_TEST_ALONE"):
            return test(*args, **kwargs)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        how = {"cwd": Path(__file__).parents[1], "env": {**os.environ, "EYAS_TEST_ALONE": "1"}}
        done = subprocess.run([*command, node], capture_output=True, text=True, timeout=300, **how)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

    return run
