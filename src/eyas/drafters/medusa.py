"""The Medusa drafter: independent heads on the target's last state (Medusa, arXiv 2401.10774, section 3.1).

Head j guesses the token j places after the one that the target itself would write next: h_j = f + silu(W_j f + b_j) in
every residual block, f the target's last state, and token ~ softmax(target head(h_j)). The target's head is shared and
frozen. Guesses of a level do not depend on one another, so all nodes of a level have the same candidates. Legend: T
tokens, S supervised rows, J heads, K nodes, W candidates, D width, V vocabulary, Q draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from eyas.drafters.base import Batch, Candidates, Drafter, best_candidates
from eyas.drafters.rollout import Supervised, supervised_rows, teacher, token_objective
from eyas.errors import InputError


@dataclass(frozen=True)
class MedusaConfig:
    """What a Medusa drafter is, beside its weights."""

    width: int  # D
    vocab_size: int
    reads: tuple[int, ...]  # one state: the target's last, after its final norm
    heads: int = 4  # levels that can be drafted
    layers: int = 1  # residual blocks of a head
    token_loss: str = "ce"  # training only

    def __post_init__(self) -> None:
        for name, value in (("heads", self.heads), ("layers", self.layers)):
            if not 1 <= value <= 16:
                raise InputError(f"a Medusa drafter has 1 to 16 {name}, got {value}")


class MedusaState:
    """What a Medusa drafter remembers of one sequence: the last true state, and the level of each row of this round."""

    def __init__(self) -> None:
        self.feature_D = torch.empty(0)
        self.levels: list[int] = []


class Residual(nn.Module):
    """f + silu(W f + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, f: Tensor) -> Tensor:
        return f + silu(self.linear(f))


class Medusa(nn.Module, Drafter[MedusaState]):
    """Residual blocks for each level, and the target's own output head."""

    kind = "medusa"
    draft_vocabulary_Q: Tensor | None

    def __init__(self, config: MedusaConfig, head_VD: Tensor, draft_vocabulary_Q: Tensor | None = None) -> None:
        """`draft_vocabulary_Q` are the target ids, ascending, that it drafts over; None: all of the target's."""
        super().__init__()
        self.config = config
        self.reads = config.reads
        self.heads = nn.ModuleList(
            [nn.Sequential(*(Residual(config.width) for _ in range(config.layers))) for _ in range(config.heads)]
        )
        self.head_VD = head_VD.detach()  # the target's: no parameter here
        self.register_buffer("draft_vocabulary_Q", draft_vocabulary_Q, persistent=False)  # follows the module's device
        self._rows_QD = self.head_VD if draft_vocabulary_Q is None else self.head_VD[draft_vocabulary_Q]
        self._draft_set = None if draft_vocabulary_Q is None else frozenset(draft_vocabulary_Q.tolist())

    def new_state(self, first: int | None = None) -> MedusaState:
        return MedusaState()

    @torch.inference_mode()
    def observe(self, state: MedusaState, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        state.feature_D, state.levels = hidden_TLD[-1, 0], [0]
        return self._candidates(state, 0, 1, width)

    @torch.inference_mode()
    def expand(self, state: MedusaState, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        level = state.levels[rows[0]] + 1
        state.levels += [level] * len(rows)
        return self._candidates(state, level, len(rows), width)

    def rewind(self, state: MedusaState, length: int) -> None:
        state.levels = []  # nothing of the text is remembered but its last state, which `observe` brings

    def can_propose(self, token: int) -> bool:
        return 0 <= token < self.config.vocab_size if self._draft_set is None else token in self._draft_set

    @property
    def steps(self) -> int:
        """Depths that are trained: one a head."""
        return self.config.heads

    def loss(self, batch: Batch, counts_J: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Token loss of every head against the target's distribution at its place, the later ones weighing less.

        `counts_J`: what each head's sum is divided by; None: the batch's own number of rows.
        """
        rows = supervised_rows(batch.bounds, batch.answer_T, batch.tokens_T.device)
        counts_J = rows.counts(self.steps) if counts_J is None else counts_J
        taught = teacher(batch, rows, self.head_VD, self.draft_vocabulary_Q)
        return token_objective(rows, self.logits(batch, rows), taught, counts_J, self.config.token_loss)

    forward = loss  # torch calls a module through this name

    def logits(self, batch: Batch, rows: Supervised) -> Iterator[Tensor]:
        """The rows' guesses, head by head: [S, Q]."""
        feature_SD = batch.states_TLD[rows.token_S, 0]
        for head in self.heads:
            yield linear(head(feature_SD), self._rows_QD)

    def _candidates(self, state: MedusaState, level: int, num: int, width: int) -> Candidates:
        """The same candidates for all nodes of a level; none below the last head."""
        if level >= self.config.heads:
            return Candidates(torch.empty(num, 0, dtype=torch.int64), torch.empty(num, 0))
        feature_1D = state.feature_D[None].to(self._rows_QD.dtype)
        one = best_candidates(linear(self.heads[level](feature_1D), self._rows_QD), width, self.draft_vocabulary_Q)
        return Candidates(one.tokens_KW.expand(num, -1), one.logprobs_KW.expand(num, -1))
