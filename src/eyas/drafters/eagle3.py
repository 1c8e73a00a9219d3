"""The EAGLE-3 head: tokens only, trained on its own guesses (EAGLE-3, arXiv 2503.01840, section 3).

g_i = fc([low, mid, high] states of token i). One block reads [norm(embedding(t_{i+1})), norm(g_i)] around the un-normed
residual g_i; its output h, through a final norm and the head's own output matrix over a draft vocabulary, predicts
t_{i+2}. In later steps h itself, before the final norm, takes the place of g. Legend: B sequences, T tokens, P pairs, S
supervised rows, K nodes, L states, D width, E width of the attention input (2D), Q draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from eyas.drafters.base import Batch, Candidates, Drafter, best_candidates
from eyas.drafters.layers import Block, BlockConfig, DraftState, RMSNorm, attend_causally, supervised_rows

STEP_DECAY = 0.8  # weight of step j is STEP_DECAY ** j, as in the official code


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 head is, beside its weights."""

    block: BlockConfig
    reads: tuple[int, ...]  # low, middle, high state
    target_width: int  # width of each of them
    vocab_size: int
    draft_vocab_size: int  # Q
    own_embedding: bool = False  # the head brings its own embedding rows (its width differs from the target's)
    steps: int = 7  # training only: simulated steps of the training-time test


class Eagle3(nn.Module, Drafter[DraftState]):
    """Fusion of three states, one block, and an output head over a draft vocabulary."""

    kind = "eagle3"

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
        self.fc = nn.Linear(len(c.reads) * c.target_width, c.block.width, bias=False)
        self.embedding_norm = RMSNorm(c.block.width, c.block.norm_eps)
        self.hidden_norm = RMSNorm(c.block.width, c.block.norm_eps)
        self.block = Block(c.block)
        self.norm = RMSNorm(c.block.width, c.block.norm_eps)
        self.lm_head = nn.Linear(c.block.width, c.draft_vocab_size, bias=False)
        self.embedding = nn.Embedding(c.vocab_size, c.block.width) if c.own_embedding else None
        self.embedding_VD, self.head_VD = embedding_VD.detach(), head_VD.detach()  # the target's: no parameters here
        self.draft_vocabulary_Q = draft_vocabulary_Q
        self._draft_set = None if draft_vocabulary_Q is None else frozenset(draft_vocabulary_Q.tolist())

    def new_state(self, first: int | None = None) -> DraftState:
        return DraftState()

    @torch.inference_mode()
    def observe(self, state: DraftState, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        g_TD = self.fc(hidden_TLD.flatten(-2))
        a_TE = self._attention_input(torch.tensor(tokens), g_TD)
        return self._candidates(state.absorb(self.block, g_TD, a_TE), width)

    @torch.inference_mode()
    def expand(self, state: DraftState, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        g_KD = state.hidden_RD[list(rows)]
        a_KE = self._attention_input(torch.tensor(tokens), g_KD)
        return self._candidates(state.deepen(self.block, g_KD, a_KE, rows), width)

    def can_propose(self, token: int) -> bool:
        return 0 <= token < self.config.vocab_size if self._draft_set is None else token in self._draft_set

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Soft cross-entropy over the draft vocabulary under the training-time test (section 3.2), mean over rows.

        Step j reads the token j places further on and the head's own output of step j-1 in the place of the true
        states; a row sees the true pairs up to its own and its own later steps. Rows whose best target token lies
        outside the draft vocabulary weigh nothing.
        """
        rows = supervised_rows(batch.lengths_B, batch.starts_B)
        b, i = rows.sequence_S, rows.pair_S
        p_SQ, known_S = self._target_probabilities(batch.final_BTD[b, i + 1])
        attention = self.block.self_attn
        g_BPD = self.fc(batch.states_BTLD[:, :-1].flatten(-2))
        a_BPE = self._attention_input(batch.tokens_BT[:, 1:], g_BPD)
        positions_P = torch.arange(g_BPD.shape[1], device=g_BPD.device)
        keys_BPGC, values_BPGC = attention.keys(a_BPE, positions_P), attention.values(a_BPE)
        own_keys: list[Tensor] = []  # [S, G, C] of each later step
        own_values: list[Tensor] = []
        h_SD, a_SE = g_BPD[b, i], a_BPE[b, i]
        loss = h_SD.new_zeros((), dtype=torch.float32)
        metrics = {}
        for step in range(self.config.steps):
            if step > 0:
                tokens_S = batch.tokens_BT[b, (i + 1 + step).clamp_max(batch.tokens_BT.shape[1] - 1)]
                a_SE = self._attention_input(tokens_S, h_SD)
                own_keys.append(attention.keys(a_SE, i + step))
                own_values.append(attention.values(a_SE))
            queries_SHC = attention.queries(a_SE, i + step)
            attended_SHC = attend_causally(queries_SHC, rows, keys_BPGC, values_BPGC, own_keys, own_values)
            h_SD = self.block.finish(h_SD, attended_SHC)
            step_loss, accepted = self._step_loss(h_SD, p_SQ, known_S, rows.valid(step), step)
            loss = loss + STEP_DECAY**step * step_loss
            metrics[f"loss_{step + 1}"] = step_loss.detach()
            metrics[f"accept_{step + 1}"] = accepted
        return loss, metrics

    forward = loss  # torch calls a module through this name

    def _target_probabilities(self, final_SD: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distribution restricted to the draft vocabulary, and whether its best token lies in it."""
        with torch.no_grad():
            if self.draft_vocabulary_Q is None:
                logits_SQ = linear(final_SD, self.head_VD).float()
                return logits_SQ.softmax(-1), torch.ones(len(final_SD), dtype=torch.bool, device=final_SD.device)
            logits_SQ = linear(final_SD, self.head_VD[self.draft_vocabulary_Q])
            known_S = logits_SQ.amax(-1) >= linear(final_SD, self.head_VD).amax(-1)
            return logits_SQ.float().softmax(-1), known_S

    def _step_loss(
        self, h_SD: Tensor, p_SQ: Tensor, known_S: Tensor, valid_S: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        # pair i of step j is held to the distribution of pair i + j: rows are contiguous, so that is a shift
        num = max(0, len(h_SD) - step)
        logits = self.lm_head(self.norm(h_SD[:num])).float()
        p, trained = p_SQ[step:], valid_S[:num] & known_S[step:]
        supervised = valid_S[:num].sum().clamp_min(1)
        loss = (cross_entropy(logits, p, reduction="none") * trained).sum() / supervised
        accepted = ((logits.detach().argmax(-1) == p.argmax(-1)) & trained).sum() / supervised
        return loss, accepted

    def _attention_input(self, tokens: Tensor, g: Tensor) -> Tensor:
        weight = self.embedding_VD if self.embedding is None else self.embedding.weight
        embedded = embedding(tokens.to(g.device), weight).to(g.dtype)
        return torch.cat((self.embedding_norm(embedded), self.hidden_norm(g)), dim=-1)

    def _candidates(self, hidden_KD: Tensor, width: int) -> Candidates:
        return best_candidates(self.lm_head(self.norm(hidden_KD)), width, self.draft_vocabulary_Q)
