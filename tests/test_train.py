"""Training: what is learned is what decoding uses."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_target

from eyas.data import Sequence
from eyas.features import Streamed
from eyas.generate import generate, generate_plain
from eyas.measure import tau, timed
from eyas.policies import Chain
from eyas.sampling import Sampling
from eyas.train import TrainConfig, Trainer, draft_vocabulary, new_head
from eyas.verify import Stop

PROMPTS = [[1, 5, 9, 3], [1, 7, 7], [1, 20, 33, 4, 8], [1, 50]]


def answers(target, length: int = 24) -> list[Sequence]:
    stop = Stop(length)
    return [
        Sequence((*prompt, *timed(generate_plain(target, prompt, Sampling(), stop)).tokens), len(prompt))
        for prompt in PROMPTS
    ]


def trainer(kind: str, target, sequences: list[Sequence], config: TrainConfig, steps: int = 3) -> Trainer:
    vocabulary, _ = draft_vocabulary(sequences, 40, special_ids=(2,))
    head = new_head(kind, target, vocabulary if kind == "eagle3" else None, steps=steps, noise=0.0)
    reads = (*head.reads, target.spec.num_layers)
    return Trainer(head, Streamed(target, sequences, reads), config, torch.float32)


@pytest.mark.parametrize(("kind", "levels", "share"), [("eagle", 3, 0.85), ("eagle3", 3, 0.9)])
def test_overfitting_gives_accepted_drafts(kind: str, levels: int, share: float) -> None:
    """The gate between training and serving: what was learned by heart is accepted when decoding."""
    target = tiny_target(torch.float32)
    sequences = answers(target)
    learner = trainer(kind, target, sequences, TrainConfig(steps=300, learning_rate=3e-3, warmup=20, clip=1.0))
    for _ in range(300):
        metrics = learner.train_step()
    head = learner.head.eval()
    decoded = [
        timed(generate(target, head, Chain(levels), s.tokens[: s.answer_start], Sampling(), Stop(25)))
        for s in sequences
    ]
    assert [a.tokens[:24] for a in decoded] == [list(s.tokens[s.answer_start :]) for s in sequences]
    assert tau(decoded) >= share * (levels + 1), (tau(decoded), metrics)
