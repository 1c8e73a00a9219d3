"""The drafter's seam: what eyas asks of anything that guesses the target's next tokens.

Legend: T tokens, K nodes of one level, W candidates per node, L states read, D width. `p` is
the target, `q` the draft. Drafters never see a policy; they answer with target token ids, whatever vocabulary of their
own they use inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Candidates:
    """The best W tokens below each of K nodes, best first: target ids, and their draft log-probabilities (float32).

    A row with fewer than W ends in log-probabilities of -inf: what stands there is no candidate. W may be 0.
    """

    tokens_KW: Tensor
    logprobs_KW: Tensor


@dataclass(frozen=True)
class Batch:
    """Training sequences one after the other: sequence b is `tokens_T[bounds[b] : bounds[b + 1]]`.

    `states_TLD[t]` are the states that the drafter reads, `final_TD[t]` the target's last one (after its final norm),
    both computed from the tokens of t's sequence up to t; `best_T[t]` is the token that the target finds most likely
    there, where an answer's token follows. `answer_T[t]` (bool, on the CPU): did the target write token t itself?
    """

    tokens_T: Tensor
    bounds: tuple[int, ...]
    answer_T: Tensor
    states_TLD: Tensor
    final_TD: Tensor
    best_T: Tensor
    seed: int  # of whatever the objective draws


class Drafter(ABC, Generic[StateT]):
    """Guesses continuations level by level. Holds weights only; a sequence's memory is its state."""

    kind: str  # "eagle", "eagle3", "medusa", "lookup" or "small"
    reads: tuple[int, ...]  # the target states that `observe` wants, as indices of transformers' `hidden_states`

    @abstractmethod
    def new_state(self, first: int | None = None) -> StateT:
        """An empty state for one sequence; `first` is its first token, which `observe` never gives.

        Heads, whose pairs begin at the second token, ignore it.
        """

    @abstractmethod
    def observe(self, state: StateT, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        """Absorb verified tokens and forget all speculation; candidates for the root's children (K = 1).

        `tokens[i]` is the token that *follows* the one at which the true target states `hidden_TLD[i]` were read; the
        last one is the root of the tree to come. This pass becomes row 0 of the new round.
        """

    @abstractmethod
    def expand(self, state: StateT, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        """One level deeper: candidates below each of the chosen nodes.

        Node k carries `tokens[k]` and was proposed by row `rows[k]` of this round; the nodes become the next rows, in
        the order given.
        """

    @abstractmethod
    def rewind(self, state: StateT, length: int) -> None:
        """Forget all but the first `length` of the observed tokens, and all speculation; `observe` comes next."""

    @abstractmethod
    def can_propose(self, token: int) -> bool:
        """Is the target token `token` in the draft vocabulary?"""


def best_candidates(logits_KQ: Tensor, width: int, target_ids_Q: Tensor | None) -> Candidates:
    """The `width` most likely tokens of each row (fewer where the vocabulary is smaller), by float32 log-softmax.

    No temperature: the tree is the same at every temperature of the target. `target_ids_Q` maps a draft vocabulary to
    target ids; None where both are one.
    """
    best = logits_KQ.float().log_softmax(-1).topk(min(width, logits_KQ.shape[-1]), dim=-1)
    tokens_KW = best.indices if target_ids_Q is None else target_ids_Q[best.indices]
    return Candidates(tokens_KW, best.values.nan_to_num(nan=-torch.inf))  # a broken head drafts badly, no more
