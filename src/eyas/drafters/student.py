"""A small language model in training: what `small:` drafts with, distilled on the target's own answers.

The objective is the target's own distribution at the tokens that heads are trained on too (knowledge distillation at
temperature 1, Hinton et al., arXiv 1503.02531; for drafting: DistillSpec, arXiv 2310.08461). It reads tokens alone, so
a guess at any depth of a chain that was accepted so far is a guess after true text: one depth is trained. Embedding and
output head stay as they were: most of a small model's weights are theirs, and their gradients and moments would cost
more than those of all its layers. Refuses to know where the model comes from (`initial`) and how it is served
(`small_model`). Legend: T tokens, S supervised rows, D width, V vocabulary, J steps (one).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from eyas.drafters.base import Batch
from eyas.drafters.rollout import Supervised, supervised_rows, teacher, token_objective
from eyas.targets.eager import EagerTarget

_PIECE = 512  # rows whose distributions over all tokens are in memory at a time


@dataclass(frozen=True)
class StudentConfig:
    """What a small model is, beside its weights."""

    vocab_size: int
    layers: tuple[int, ...]  # of the target, which it started from; empty: it was a model of its own
    token_loss: str = "ce"


class Student(nn.Module):
    """A model of transformers whose decoder layers and final norm are trained."""

    kind = "small"
    reads = ()
    steps = 1
    draft_vocabulary_Q = None  # it drafts over all tokens

    def __init__(self, config: StudentConfig, small: EagerTarget, teacher_VD: Tensor) -> None:
        """`small` is trained in place; `teacher_VD` are the rows of the target's output head."""
        super().__init__()
        self.config, self.small = config, small
        self.model = small.model
        self.head_VD = teacher_VD.detach()  # the target's: no parameter here
        frozen = {id(small.embedding_VD), id(small.head_VD)}  # one tensor where they are tied
        for weight in self.model.parameters():
            weight.requires_grad_(id(weight) not in frozen)

    def copy(self, dtype: torch.dtype) -> Student:
        """The same apart from training, all of it in `dtype`; its `small` is ready to draft with."""
        model = copy.deepcopy(self.model)
        for weight in model.parameters():  # and no buffer: rotary frequencies stay float32
            weight.data = weight.data.to(dtype)
        twin = Student(self.config, EagerTarget(model, self.small.spec.name), self.head_VD.to(dtype))
        return twin.eval().requires_grad_(False)

    def loss(self, batch: Batch, counts_J: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Token loss against the target's distribution, over all of its tokens.

        Rows are taken in pieces, whose logits are made again on the way back: some hundred rows of a vocabulary are
        more than everything else that a step keeps. `counts_J`: what the sum is divided by; None: the batch's own
        number of rows.
        """
        rows = supervised_rows(batch.bounds, batch.answer_T, batch.tokens_T.device)
        counts_J = rows.counts(self.steps) if counts_J is None else counts_J
        hidden_SD, num = self._hidden(batch, rows), len(rows.pair_S)
        loss, metrics = hidden_SD.new_zeros((), dtype=torch.float32), defaultdict(lambda: counts_J.new_zeros(()))
        for first in range(0, max(num, 1), _PIECE):
            last = min(first + _PIECE, num)
            inputs = (
                hidden_SD[first:last],
                self.small.head_VD,
                batch,
                rows.part(first, last),
                self.head_VD,
                counts_J,
                self.config.token_loss,
            )
            again = num > _PIECE and torch.is_grad_enabled()
            own, numbers = checkpoint(_objective, *inputs, use_reentrant=False) if again else _objective(*inputs)
            loss = loss + own
            for name, value in numbers.items():
                metrics[name] = metrics[name] + value
        return loss, dict(metrics)

    forward = loss  # torch calls a module through this name

    def logits(self, batch: Batch, rows: Supervised) -> Iterator[Tensor]:
        """The rows' guesses, of the one step that there is: [S, V]."""
        yield linear(self._hidden(batch, rows), self.small.head_VD)

    def _hidden(self, batch: Batch, rows: Supervised) -> Tensor:
        """The model's own last state at the rows: [S, D]. Sequences are read one by one, so none sees another."""
        self.model.eval()  # no dropout, in whatever config: what a step does follows from its number
        states = [
            self.model.base_model(input_ids=batch.tokens_T[None, first:last], use_cache=False).last_hidden_state[0]
            for first, last in pairwise(batch.bounds)
        ]
        return torch.cat(states)[rows.token_S + 1]


def _objective(
    hidden_SD: Tensor,
    own_VD: Tensor,
    batch: Batch,
    rows: Supervised,
    teacher_VD: Tensor,
    counts_J: Tensor,
    form: str,
) -> tuple[Tensor, dict[str, Tensor]]:
    taught = teacher(batch, rows, teacher_VD, None)
    return token_objective(rows, [linear(hidden_SD, own_VD)], taught, counts_J, form)
