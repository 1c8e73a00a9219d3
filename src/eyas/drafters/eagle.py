"""The EAGLE-1 head: regression of the target's next feature (EAGLE, arXiv 2401.15077, section 3).

x_i = fc([embedding(t_{i+1}), f_i]); f_{i+1} ~ block(x_0..x_i); t_{i+2} ~ softmax(target head(f_{i+1})). Embedding and
head are the target's own and frozen. EAGLE-2 (arXiv 2406.16858) is this head under a dynamic policy. Legend: B
sequences, T tokens, P pairs, S supervised rows, K nodes, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear, smooth_l1_loss

from eyas.drafters.base import Batch, Candidates, Drafter, best_candidates
from eyas.drafters.layers import Block, BlockConfig, DraftState, Rollout, supervised_rows

FEATURE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1  # section 4.1


@dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE-1 head is, beside its weights."""

    block: BlockConfig
    reads: tuple[int, ...]  # one state: the target's last, after its final norm
    vocab_size: int
    fc_bias: bool = True
    noise: float = 0.1  # training only: features are moved by uniform noise in (-noise, noise)


class Eagle(nn.Module, Drafter[DraftState]):
    """fc and one block; reads [embedding, feature], predicts the next feature."""

    kind = "eagle"

    def __init__(self, config: EagleConfig, embedding_VD: Tensor, head_VD: Tensor) -> None:
        super().__init__()
        self.config = config
        self.reads = config.reads
        self.fc = nn.Linear(2 * config.block.width, config.block.width, bias=config.fc_bias)
        self.block = Block(config.block)
        self.embedding_VD, self.head_VD = embedding_VD.detach(), head_VD.detach()  # the target's: no parameters here

    def new_state(self, first: int | None = None) -> DraftState:
        return DraftState()

    @torch.inference_mode()
    def observe(self, state: DraftState, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        x_TD = self._fuse(torch.tensor(tokens), hidden_TLD[:, 0])
        return self._candidates(state.absorb(self.block, x_TD, x_TD), width)

    @torch.inference_mode()
    def expand(self, state: DraftState, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        x_KD = self._fuse(torch.tensor(tokens), state.hidden_RD[list(rows)])
        return self._candidates(state.deepen(self.block, x_KD, x_KD, rows), width)

    def rewind(self, state: DraftState, length: int) -> None:
        state.rewind(length)

    def can_propose(self, token: int) -> bool:
        return 0 <= token < self.config.vocab_size

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """1.0 SmoothL1 on the next feature + 0.1 soft cross-entropy through the target's head, over supervised rows."""
        rows = supervised_rows(batch.lengths_B, batch.starts_B)
        b, i = rows.sequence_S, rows.pair_S
        features_BPD = batch.states_BTLD[:, :-1, 0]
        if self.training:
            generator = torch.Generator(features_BPD.device).manual_seed(batch.seed)
            uniform_BPD = torch.rand(features_BPD.shape, generator=generator, device=features_BPD.device)
            features_BPD = features_BPD + ((uniform_BPD * 2 - 1) * self.config.noise).to(features_BPD.dtype)
        x_BPD = self._fuse(batch.tokens_BT[:, 1:], features_BPD)
        guess_SD = Rollout(rows).absorb(self.block, x_BPD, x_BPD)

        truth_SD = batch.final_BTD[b, i + 1]
        feature_loss = smooth_l1_loss(guess_SD.float(), truth_SD.float())
        with torch.no_grad():
            p_SV = linear(truth_SD, self.head_VD).float().softmax(-1)
        logits_SV = linear(guess_SD, self.head_VD).float()
        token_loss = cross_entropy(logits_SV, p_SV)
        loss = FEATURE_WEIGHT * feature_loss + TOKEN_WEIGHT * token_loss
        accepted = (logits_SV.detach().argmax(-1) == p_SV.argmax(-1)).float().mean()
        return loss, {"feature_loss": feature_loss.detach(), "token_loss": token_loss.detach(), "accept_1": accepted}

    forward = loss  # torch calls a module through this name

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = embedding(tokens.to(hidden.device), self.embedding_VD).to(hidden.dtype)
        return self.fc(torch.cat((embedded, hidden), dim=-1))

    def _candidates(self, hidden_KD: Tensor, width: int) -> Candidates:
        return best_candidates(linear(hidden_KD, self.head_VD), width, None)
