"""The processes that train together: those that `torchrun` started, or one alone.

Gradients are averaged over processes (DistributedDataParallel). Refuses to know what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Team:
    """Which process this is, of how many."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """The process that writes files and talks to people."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, its gradients averaged over processes from here on."""
        return DistributedDataParallel(module) if self.size > 1 else module

    @contextmanager
    def alone(self, module: nn.Module, alone: bool) -> Iterator[None]:
        """A backward pass whose gradients stay here (`alone`) until a later one brings all of them together."""
        if alone and isinstance(module, DistributedDataParallel):
            with module.no_sync():
                yield
        else:
            yield

    def mean_tensor(self, x: Tensor) -> Tensor:
        """The mean over processes."""
        if self.size > 1:
            dist.all_reduce(x)
            x = x / self.size
        return x

    def mean(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The same of plain numbers."""
        if self.size == 1:
            return dict(numbers)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        values = self.mean_tensor(torch.tensor(list(numbers.values()), dtype=torch.float64, device=device))
        return dict(zip(numbers, values.tolist(), strict=True))


@contextmanager
def join(device: torch.device) -> Iterator[tuple[Team, torch.device]]:
    """This process's team and device, by the environment that `torchrun` sets; one process alone without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Team(dist.get_rank(), size), device
    finally:
        dist.destroy_process_group()
