"""The EAGLE-1 head: regression of the target's next feature (EAGLE, arXiv 2401.15077, section 3).

x_i = fc([embedding(t_{i+1}), f_i]); f_{i+1} ~ block(x_0..x_i); t_{i+2} ~ softmax(target head(f_{i+1})). Embedding and
head are the target's own and frozen. EAGLE-2 (arXiv 2406.16858) is this head under a dynamic policy. Legend: T tokens,
P pairs, S supervised rows, J steps, K nodes, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, smooth_l1_loss

from eyas.drafters.base import Batch, Candidates, Drafter, best_candidates
from eyas.drafters.layers import Block, BlockConfig, DraftState
from eyas.drafters.rollout import Rollout, Supervised, Tally, supervised_rows, teacher

FEATURE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1  # section 4.1


@dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE-1 head is, beside its weights."""

    block: BlockConfig
    reads: tuple[int, ...]  # one state: the target's last, after its final norm
    vocab_size: int
    fc_bias: bool = True
    noise: float = 0.1  # training only: features are moved by uniform noise in (-noise, noise)
    steps: int = 1  # training only: more than one is HASS
    token_loss: str = "ce"  # training only


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

    @property
    def steps(self) -> int:
        """Steps of a training row: 1 in EAGLE-1, more under HASS."""
        return self.config.steps

    def loss(self, batch: Batch, counts_J: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """1.0 SmoothL1 on the next feature + 0.1 token loss through the target's head, over supervised rows.

        Under HASS (arXiv 2408.15766) a row goes on for `steps`, reading its own last feature. `counts_J`: what each
        step's sum is divided by; None: the batch's own number of rows.
        """
        rows = supervised_rows(batch.bounds, batch.answer_T, batch.tokens_T.device)
        counts_J = rows.counts(self.steps) if counts_J is None else counts_J
        taught = teacher(batch, rows, self.head_VD, None)
        tally = Tally(rows, *taught, counts_J, self.config.token_loss, TOKEN_WEIGHT)
        for step, guess_SD in enumerate(self._rollout(batch, rows)):
            truth_SD = batch.final_TD[(rows.token_S + 1 + step).clamp_max(len(batch.final_TD) - 1)]
            distance_S = smooth_l1_loss(guess_SD.float(), truth_SD.float(), reduction="none").mean(-1)
            feature_loss = (distance_S * rows.valid(step)).sum() / counts_J[step].clamp_min(1)
            tally.include(step, FEATURE_WEIGHT * feature_loss)
            tally.add(step, linear(guess_SD, self.head_VD))
            tally.metrics[f"feature_loss_{step + 1}"] = feature_loss.detach()
        return tally.loss, tally.metrics

    forward = loss  # torch calls a module through this name

    def logits(self, batch: Batch, rows: Supervised) -> Iterator[Tensor]:
        """The rows' guesses, step by step: [S, V]."""
        for guess_SD in self._rollout(batch, rows):
            yield linear(guess_SD, self.head_VD)

    def _rollout(self, batch: Batch, rows: Supervised) -> Iterator[Tensor]:
        """The rows' guessed features, step by step: [S, D]."""
        memory = Rollout(rows)
        features_PD = batch.states_TLD[rows.token_P, 0]
        if self.training:
            generator = torch.Generator(features_PD.device).manual_seed(batch.seed)
            uniform_PD = torch.rand(features_PD.shape, generator=generator, device=features_PD.device)
            features_PD = features_PD + ((uniform_PD * 2 - 1) * self.config.noise).to(features_PD.dtype)
        x_PD = self._fuse(batch.tokens_T[rows.token_P + 1], features_PD)
        guess_SD = memory.absorb(self.block, x_PD, x_PD)
        yield guess_SD
        for step in range(1, self.steps):
            place_S = (rows.token_S + 1 + step).clamp_max(len(batch.tokens_T) - 1)
            x_SD = self._fuse(batch.tokens_T[place_S], guess_SD)
            guess_SD = memory.deepen(self.block, x_SD, x_SD)
            yield guess_SD

    def _fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = embedding(tokens.to(hidden.device), self.embedding_VD).to(hidden.dtype)
        return self.fc(torch.cat((embedded, hidden), dim=-1))

    def _candidates(self, hidden_KD: Tensor, width: int) -> Candidates:
        return best_candidates(linear(hidden_KD, self.head_VD), width, None)
