"""Several processes train as one does: gradients averaged by rows, the target spread over them."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_target
from torch.distributed.tensor import DTensor
from training import answered, answers, in_a_process_of_its_own, trainer

from eyas.errors import InputError
from eyas.targets.eager import EagerTarget
from eyas.team import Team, join
from eyas.train import TrainConfig, Trainer

CPU = torch.device("cpu")


def together(size: int, work: Callable[[Team], None]) -> None:
    """`work` in forked processes that know each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                with join(CPU) as (team, _):
                    work(team)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * size


def trained(target: EagerTarget, team: Team, accumulate: int, kind: str, spread: bool = False) -> Trainer:
    sequences = [answered((1, 5), range(3, 9)), answered((1,), range(9, 40)), *answers(tiny_target(torch.float32), 12)]
    config = TrainConfig(sequences=4, accumulate=accumulate, warmup=1, learning_rate=1e-3)
    one = trainer(kind, target, sequences, config)
    if spread:
        target.share_out(CPU)
        weight = target.model.get_parameter("model.layers.0.mlp.up_proj.weight")
        assert isinstance(weight, DTensor) and weight.to_local().shape[0] == 24, "half of its rows lie here"
    learner = Trainer(one.head, one.features, config, torch.float32, {}, CPU, team)
    for _ in range(3):
        learner.train_step()
    return learner


@pytest.mark.parametrize(
    ("kind", "accumulate", "spread"), [("eagle3", 1, False), ("eagle", 2, False), ("eagle3", 2, True)]
)
@in_a_process_of_its_own
def test_two_processes_train_as_one(tmp_path: Path, kind: str, accumulate: int, spread: bool) -> None:
    """Relative 1e-5 after three steps, of sequences that are not of one length."""
    alone = trained(tiny_target(torch.float32), Team(), 1, kind)

    def work(team: Team) -> None:
        target = tiny_target(torch.float32)
        embedding_VD = target.embedding_VD.clone()
        learner = trained(target, team, accumulate, kind, spread)
        assert torch.equal(target.embedding_VD, embedding_VD)
        weights = {name: weight.detach().clone() for name, weight in learner.head.named_parameters()}
        save_file(weights, tmp_path / f"{team.rank}.safetensors", {"recent": repr(learner.recent)})
        assert learner.recent == pytest.approx(alone.recent, rel=1e-4)
        assert learner.tokens_seen == alone.tokens_seen

    together(2, work)
    expected = dict(alone.head.named_parameters())
    for rank in (0, 1):
        for name, weight in load_file(tmp_path / f"{rank}.safetensors").items():
            error = (weight - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
            assert error < 1e-5, (rank, name, error)


def test_a_step_that_does_not_divide_is_refused() -> None:
    target = tiny_target(torch.float32)
    one = trainer("eagle", target, answers(target, 6), TrainConfig())
    with pytest.raises(InputError, match="3 processes"):
        Trainer(one.head, one.features, TrainConfig(sequences=4), torch.float32, {}, CPU, Team(0, 3))


def test_one_process_is_a_team() -> None:
    with join(CPU) as (team, device):
        assert (team, device) == (Team(), CPU)
        assert team.first and team.mean({"a": 2.0}) == {"a": 2.0}
