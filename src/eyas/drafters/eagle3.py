"""The EAGLE-3 head: tokens only, trained on its own guesses (EAGLE-3, arXiv 2503.01840, section 3).

g_i = fc([low, mid, high] states of token i). One block reads [norm(embedding(t_{i+1})), norm(g_i)] around the un-normed
residual g_i; up to four plain layers may follow. The last output h, through a final norm and the head's own output
matrix over a draft vocabulary, predicts t_{i+2}. In later steps h itself, before the final norm, takes the place of g.
The switches of EAGLE-3.1 and its relatives move norms; all of them off is EAGLE-3. Legend: T tokens, P pairs, S
supervised rows, J steps, K nodes, L states, D width, E width of the attention input (2D), Q draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from eyas.drafters.base import Batch, Candidates, Drafter, best_candidates
from eyas.drafters.layers import Block, BlockConfig, DraftState, LaterLayer, RMSNorm
from eyas.drafters.rollout import Rollout, Supervised, supervised_rows, teacher, token_objective
from eyas.errors import InputError

MAX_LAYERS = 5
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")  # fields below, and keys in files


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 head is, beside its weights."""

    block: BlockConfig
    reads: tuple[int, ...]  # low, middle, high state
    target_width: int  # width of each of them
    vocab_size: int
    draft_vocab_size: int  # Q
    own_embedding: bool = False  # the head brings its own embedding rows (its width differs from the target's)
    fc_bias: bool = False
    steps: int = 7  # training only: simulated steps of the training-time test
    token_loss: str = "ce"  # training only
    layers: int = 1  # the first reads [embedding, hidden], those after it are plain
    fc_norm: bool = False  # a norm on each state before the fusion
    norm_output: bool = False  # later steps read the output after the final norm
    norm_before_residual: bool = False  # the first layer's residual is normed too
    norm_before_fc: bool = False  # one norm on the states side by side, before the fusion

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= MAX_LAYERS:
            raise InputError(f"an EAGLE-3 head has 1 to {MAX_LAYERS} decoder layers, got {self.layers}")
        if self.fc_norm and self.norm_before_fc:
            raise InputError("an EAGLE-3 head norms its states one by one (fc_norm) or side by side (norm_before_fc), "
                             "not both")  # fmt: skip


class Eagle3(nn.Module, Drafter[DraftState]):
    """Fusion of three states, one layer or several, and an output head over a draft vocabulary."""

    kind = "eagle3"
    draft_vocabulary_Q: Tensor | None

    def __init__(
        self, config: Eagle3Config, embedding_VD: Tensor, head_VD: Tensor, draft_vocabulary_Q: Tensor | None = None
    ) -> None:
        """`draft_vocabulary_Q` are the target ids of the draft vocabulary, ascending; None where it is the target's."""
        super().__init__()
        c = config
        if draft_vocabulary_Q is not None and len(draft_vocabulary_Q) != c.draft_vocab_size:
            raise ValueError(f"the draft vocabulary has {c.draft_vocab_size} tokens, got {len(draft_vocabulary_Q)} ids")
        self.config = config
        self.reads = config.reads
        fused = len(c.reads) * c.target_width
        norms = [RMSNorm(c.target_width, c.block.norm_eps) for _ in c.reads] if c.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.input_norm = RMSNorm(fused, c.block.norm_eps) if c.norm_before_fc else None
        self.fc = nn.Linear(fused, c.block.width, bias=c.fc_bias)
        self.embedding_norm = RMSNorm(c.block.width, c.block.norm_eps)
        self.hidden_norm = RMSNorm(c.block.width, c.block.norm_eps)
        self.block = Block(c.block)
        self.later = nn.ModuleList([LaterLayer(c.block) for _ in range(c.layers - 1)])
        self.norm = RMSNorm(c.block.width, c.block.norm_eps)
        self.lm_head = nn.Linear(c.block.width, c.draft_vocab_size, bias=False)
        self.embedding = nn.Embedding(c.vocab_size, c.block.width) if c.own_embedding else None
        self.embedding_VD, self.head_VD = embedding_VD.detach(), head_VD.detach()  # the target's: no parameters here
        self.register_buffer("draft_vocabulary_Q", draft_vocabulary_Q, persistent=False)  # follows the module's device
        self._draft_set = None if draft_vocabulary_Q is None else frozenset(draft_vocabulary_Q.tolist())

    def new_state(self, first: int | None = None) -> DraftState:
        return DraftState(self.config.layers)

    @torch.inference_mode()
    def observe(self, state: DraftState, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        x_TD, a_TE = self._inputs(torch.tensor(tokens), self._fuse(hidden_TLD))
        return self._candidates(state.absorb(self.block, x_TD, a_TE, self._later), width)

    @torch.inference_mode()
    def expand(self, state: DraftState, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        x_KD, a_KE = self._inputs(torch.tensor(tokens), self._fed_back(state.hidden_RD[list(rows)]))
        return self._candidates(state.deepen(self.block, x_KD, a_KE, rows, self._later), width)

    def rewind(self, state: DraftState, length: int) -> None:
        state.rewind(length)

    def can_propose(self, token: int) -> bool:
        return 0 <= token < self.config.vocab_size if self._draft_set is None else token in self._draft_set

    @property
    def steps(self) -> int:
        """Simulated steps of the training-time test."""
        return self.config.steps

    def loss(self, batch: Batch, counts_J: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss over the draft vocabulary under the training-time test (section 3.2).

        Step j reads the token j places further on and the head's own output of step j-1 in the place of the true
        states; a row sees the true pairs up to its own and its own later steps. `counts_J`: what each step's sum is
        divided by; None: the batch's own number of rows.
        """
        rows = supervised_rows(batch.bounds, batch.answer_T, batch.tokens_T.device)
        counts_J = rows.counts(self.steps) if counts_J is None else counts_J
        taught = teacher(batch, rows, self.head_VD, self.draft_vocabulary_Q)
        return token_objective(rows, self.logits(batch, rows), taught, counts_J, self.config.token_loss)

    forward = loss  # torch calls a module through this name

    def logits(self, batch: Batch, rows: Supervised) -> Iterator[Tensor]:
        """The rows' guesses in each step of the training-time test: [S, Q]."""
        for h_SD in self._rollout(batch, rows):
            yield self.lm_head(self.norm(h_SD))

    def _rollout(self, batch: Batch, rows: Supervised) -> Iterator[Tensor]:
        """The rows' output in each step, before the final norm: [S, D]."""
        memory = Rollout(rows)
        x_PD, a_PE = self._inputs(batch.tokens_T[rows.token_P + 1], self._fuse(batch.states_TLD[rows.token_P]))
        h_SD = memory.absorb(self.block, x_PD, a_PE, self._later)
        yield h_SD
        for step in range(1, self.steps):
            place_S = (rows.token_S + 1 + step).clamp_max(len(batch.tokens_T) - 1)
            x_SD, a_SE = self._inputs(batch.tokens_T[place_S], self._fed_back(h_SD))
            h_SD = memory.deepen(self.block, x_SD, a_SE, self._later)
            yield h_SD

    @property
    def _later(self) -> list[LaterLayer]:
        return cast("list[LaterLayer]", list(self.later))  # torch's types do not say what a ModuleList holds

    def _fuse(self, states: Tensor) -> Tensor:
        """g of true target states: [.., L, D of the target] -> [.., D]."""
        if self.config.fc_norm:
            states = torch.stack([norm(states[..., n, :]) for n, norm in enumerate(self.fc_norm)], dim=-2)
        flat = states.flatten(-2)
        return self.fc(flat if self.input_norm is None else self.input_norm(flat))

    def _fed_back(self, h: Tensor) -> Tensor:
        """What the next step reads in the place of g: [.., D]."""
        return self.norm(h) if self.config.norm_output else h

    def _inputs(self, tokens: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's residual [.., D] and attention input [.., E]."""
        weight = self.embedding_VD if self.embedding is None else self.embedding.weight
        embedded = embedding(tokens.to(g.device), weight).to(g.dtype)
        normed = self.hidden_norm(g)
        residual = normed if self.config.norm_before_residual else g
        return residual, torch.cat((self.embedding_norm(embedded), normed), dim=-1)

    def _candidates(self, hidden_KD: Tensor, width: int) -> Candidates:
        return best_candidates(self.lm_head(self.norm(hidden_KD)), width, self.draft_vocabulary_Q)
