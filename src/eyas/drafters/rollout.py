"""What every head's objective is made of: which pairs are trained, what they see, and how near a guess is.

A batch's sequences stand one after the other; nothing is padded, and none sees another. The training-time test
(EAGLE-3, arXiv 2503.01840, section 3.2) is a `Rollout` of several steps over the rows; HASS (arXiv 2408.15766) is the
same for EAGLE-1. Legend: T tokens and P pairs of all sequences, S supervised rows, J steps, D width, E width of the
attention input, H heads, G key/value heads, C head dimension, V vocabulary, Q draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from eyas.drafters.base import Batch
from eyas.drafters.layers import Block, LaterLayer, run_layers, wide
from eyas.errors import InputError

STEP_DECAY = 0.8  # weight of step j is STEP_DECAY ** j, as in the official code
TOKEN_LOSSES = ("ce", "lk")
_PIECE = 512  # rows of a long sequence that attend at a time


@dataclass(frozen=True)
class Supervised:
    """The pairs of a batch, and those of them that are trained: S rows, ascending.

    Pair i of a sequence is (state of token i, token i+1); what it predicts in step j of a training-time test is token
    i+2+j. Rows are the pairs whose step-0 prediction lies in an answer, its first token and its end included. Sequences
    stand one after the other: `token_P[p]` is the place, in the whole batch, of the token whose state pair p reads.
    """

    token_P: Tensor
    position_P: Tensor  # within its sequence
    pair_S: Tensor  # which pairs the rows are
    last_S: Tensor  # per row, the place of the last token of its answer
    pairs: tuple[int, ...]  # where each sequence's pairs begin, and where the last one's end
    rows: tuple[int, ...]  # the same of its rows

    @property
    def token_S(self) -> Tensor:
        """Per row, the place of the token whose state it reads."""
        return self.token_P[self.pair_S]

    def valid(self, step: int) -> Tensor:
        """[S] bool: does the prediction of this step still lie in the answer?"""
        return self.token_S + 2 + step <= self.last_S

    def counts(self, steps: int) -> Tensor:
        """[steps], float32: how many rows each step trains."""
        return torch.stack([self.valid(step).sum() for step in range(steps)]).float()

    def part(self, first: int, last: int) -> Supervised:
        """Rows `first` to `last` - 1 of the same pairs."""
        rows = tuple(min(max(row, first), last) - first for row in self.rows)
        return replace(self, pair_S=self.pair_S[first:last], last_S=self.last_S[first:last], rows=rows)

    def every_pair(self) -> Supervised:
        """The same pairs, all of them rows."""
        everything = torch.arange(len(self.token_P), device=self.token_P.device)
        return replace(self, pair_S=everything, last_S=self.token_P, rows=self.pairs)


def supervised_rows(bounds: Sequence[int], answer_T: Tensor, device: torch.device | None = None) -> Supervised:
    """The rows of sequences that stand one after the other.

    Arguments:
        bounds: where each sequence begins, and where the last one ends; none is empty.
        answer_T: bool, on the CPU: which tokens the target wrote itself; a run of them is an answer.
        device: where the result is wanted.
    """
    starts, everything = torch.tensor(bounds), torch.arange(len(answer_T))
    position_T = everything - starts[:-1].repeat_interleave(starts.diff())
    ends_sequence_T = torch.zeros(len(answer_T), dtype=torch.bool).index_fill(0, starts[1:] - 1, True)
    goes_on_T = ~ends_sequence_T & answer_T.roll(-1)  # the next token is of the same sequence and in an answer
    run_ends = (~goes_on_T).nonzero()[:, 0]
    last_T = run_ends[torch.searchsorted(run_ends, everything)]
    token_P = (~ends_sequence_T).nonzero()[:, 0]
    pair_S = goes_on_T[token_P + 1].nonzero()[:, 0]
    pairs = starts - torch.arange(len(starts))  # a sequence has one pair less than tokens
    flat = (token_P, position_T[token_P], pair_S, last_T[token_P[pair_S] + 2])
    rows = torch.searchsorted(pair_S, pairs)
    return Supervised(*(x.to(device) for x in flat), pairs=tuple(pairs.tolist()), rows=tuple(rows.tolist()))


class Rollout:
    """What the rows of a batch remember in training: `DraftState` for all of them at once, with gradients.

    In every layer: keys and values of all true pairs, and of each later step of the rows.
    """

    def __init__(self, rows: Supervised) -> None:
        self._rows = rows
        self._step = 0
        self._true: list[tuple[Tensor, Tensor]] = []  # by layer, keys and values: [P, G, C]
        self._own: list[tuple[list[Tensor], list[Tensor]]] = []  # by layer, of each later step: [S, G, C]

    def absorb(self, block: Block, x_PD: Tensor, a_PE: Tensor, later: Sequence[LaterLayer] = ()) -> Tensor:
        """Run the true pairs through the layers; the rows' outputs, [S, D]."""
        position_P = self._rows.position_P

        def through(number: int, block: Block, x_PD: Tensor, a_PE: Tensor) -> Tensor:
            attention, last = block.self_attn, number == len(later)
            keys_PGC, values_PGC = attention.keys(a_PE, position_P), attention.values(a_PE)
            self._true.append((keys_PGC, values_PGC))
            self._own.append(([], []))
            # the last layer's output is read at the rows only; a layer below another is read at every pair
            rows = self._rows if last else self._rows.every_pair()
            queries_SHC = attention.queries(a_PE[rows.pair_S], position_P[rows.pair_S])
            return block.finish(x_PD[rows.pair_S], attend(queries_SHC, rows, keys_PGC, values_PGC, [], []))

        return run_layers(block, later, x_PD, a_PE, through)

    def deepen(self, block: Block, x_SD: Tensor, a_SE: Tensor, later: Sequence[LaterLayer] = ()) -> Tensor:
        """Run the rows' next step through the layers; [S, D]."""
        self._step += 1
        positions_S = self._rows.position_P[self._rows.pair_S] + self._step

        def through(number: int, block: Block, x_SD: Tensor, a_SE: Tensor) -> Tensor:
            attention, (own_keys, own_values) = block.self_attn, self._own[number]
            own_keys.append(attention.keys(a_SE, positions_S))
            own_values.append(attention.values(a_SE))
            queries_SHC = attention.queries(a_SE, positions_S)
            return block.finish(x_SD, attend(queries_SHC, self._rows, *self._true[number], own_keys, own_values))

        return run_layers(block, later, x_SD, a_SE, through)


def attend(
    queries_SHC: Tensor,
    rows: Supervised,
    keys_PGC: Tensor,
    values_PGC: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    """The attention of a training step: a row sees its sequence's true pairs up to its own, and its own later steps.

    This is what drafting sees: a chain grown from verified pair i reads true keys up to i and the keys of its own
    nodes. Sequences are taken one by one, so none sees another. Where one is long, its rows go in pieces whose scores
    are made again on the way back: what is kept grows with the tokens, not with their square. Returns [S, H, C].
    """
    position_S = rows.position_P[rows.pair_S]
    attended = []
    for (first_pair, last_pair), (first_row, last_row) in zip(pairwise(rows.pairs), pairwise(rows.rows), strict=True):
        for row in range(first_row, last_row, _PIECE):
            piece = slice(row, min(row + _PIECE, last_row))
            own = [k[piece] for k in own_keys], [v[piece] for v in own_values]
            seen = slice(first_pair, last_pair)
            inputs = (queries_SHC[piece], position_S[piece], keys_PGC[seen], values_PGC[seen], *own)
            long = last_pair - first_pair > _PIECE and torch.is_grad_enabled()
            attended.append(checkpoint(_attend, *inputs, use_reentrant=False) if long else _attend(*inputs))
    return torch.cat(attended) if attended else torch.zeros_like(queries_SHC)


def _attend(
    queries_SHC: Tensor,
    position_S: Tensor,
    keys_PGC: Tensor,
    values_PGC: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    """Rows of one sequence: [S, H, C]. The softmax runs over true keys and own keys together."""
    num, heads, size = queries_SHC.shape
    groups, pairs = keys_PGC.shape[1], len(keys_PGC)
    queries_GRC = queries_SHC.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # R: heads of a group x S
    scores_GRP = queries_GRC @ keys_PGC.permute(1, 2, 0)
    future_SP = torch.arange(pairs, device=position_S.device) > position_S[:, None]
    scores_GHSP = wide(scores_GRP).unflatten(1, (-1, num)).masked_fill(future_SP, -torch.inf)
    queries_GHSC = queries_GRC.unflatten(1, (-1, num))
    own_GHSJ = [wide((queries_GHSC * k.transpose(0, 1)[:, None]).sum(-1, keepdim=True)) for k in own_keys]
    weights = (torch.cat((scores_GHSP, *own_GHSJ), dim=-1) * size**-0.5).softmax(-1).to(values_PGC.dtype)
    attended_GHSC = (weights[..., :pairs].flatten(1, 2) @ values_PGC.transpose(0, 1)).unflatten(1, (-1, num))
    for j, values_SGC in enumerate(own_values):
        attended_GHSC = attended_GHSC + weights[..., pairs + j, None] * values_SGC.transpose(0, 1)[:, None]
    return attended_GHSC.flatten(0, 1).transpose(0, 1)


def teacher(batch: Batch, rows: Supervised, head_VD: Tensor, vocabulary_Q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Per row, the target's distribution at its first prediction over the draft vocabulary (float32), and whether the
    target's best token lies in it."""
    place_S = rows.token_S + 1
    with torch.no_grad():
        weight = head_VD if vocabulary_Q is None else head_VD[vocabulary_Q]
        p_SQ = linear(batch.final_TD[place_S], weight).float().softmax(-1)
        best_S = batch.best_T[place_S]
        every = torch.ones_like(best_S, dtype=torch.bool)
        known_S = every if vocabulary_Q is None else torch.isin(best_S, vocabulary_Q)
    return p_SQ, known_S


class Tally:
    """A batch's loss and its metrics, step by step.

    `p_SQ` and `known_S` are the `teacher`'s at the rows' first predictions. Rows whose best target token lies outside
    the draft vocabulary weigh nothing and count as missed.

    Metrics: of step j, `loss_j`, `accept_j` (the share of rows whose guess is the target's best token) and `reach_j`
    (the share where all guesses up to this one are: how far a chain would be accepted).
    """

    def __init__(
        self, rows: Supervised, p_SQ: Tensor, known_S: Tensor, counts_J: Tensor, form: str = "ce", weight: float = 1.0
    ) -> None:
        """`counts_J` is what each step's sums are divided by; `form` is one of `TOKEN_LOSSES`, `weight` its weight."""
        self.loss = p_SQ.new_zeros(())
        self.metrics: dict[str, Tensor] = {}
        self._rows, self._p_SQ, self._known_S, self._counts_J = rows, p_SQ, known_S, counts_J
        self._form, self._weight = form, weight
        self._alive_S = torch.ones_like(known_S)

    def add(self, step: int, logits_SQ: Tensor) -> None:
        """The guesses of one more step."""
        # row r of step j is held to the distribution of row r + j: rows of an answer are contiguous, so that is a shift
        num = max(0, len(logits_SQ) - step)
        logits, p = logits_SQ[:num].float(), self._p_SQ[step:]
        trained = self._rows.valid(step)[:num] & self._known_S[step:]
        loss = (token_loss(logits, p, self._form) * trained).sum() / self._counts_J[step].clamp_min(1)
        hit = (logits.detach().argmax(-1) == p.argmax(-1)) & trained
        self._alive_S = self._alive_S[:num] & hit
        self.include(step, self._weight * loss)
        self.metrics[f"loss_{step + 1}"] = loss.detach()
        for name, good in (("accept", hit), ("reach", self._alive_S)):
            self.metrics[f"{name}_{step + 1}"] = good.sum() / self._counts_J[step].clamp_min(1)

    def include(self, step: int, loss: Tensor) -> None:
        """Another loss of a step."""
        self.loss = self.loss + STEP_DECAY**step * loss


def token_objective(
    rows: Supervised, steps: Iterable[Tensor], taught: tuple[Tensor, Tensor], counts_J: Tensor, form: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of heads that are held to tokens alone: `steps` are the rows' guesses, step by step, [S, Q]
    each; `taught` is the `teacher`'s answer."""
    tally = Tally(rows, *taught, counts_J, form)
    for step, logits_SQ in enumerate(steps):
        tally.add(step, logits_SQ)
    return tally.loss, tally.metrics


def token_loss(logits_SQ: Tensor, p_SQ: Tensor, form: str) -> Tensor:
    """[S], how far q is from p: "ce", the cross-entropy of p; "lk", -log of the chance sum(min(p, q)) that a token
    drawn from q is accepted (after LK losses, arXiv 2602.23881).

    Raises:
        InputError: another form.
    """
    if form == "ce":
        return cross_entropy(logits_SQ, p_SQ, reduction="none")
    if form == "lk":
        return -torch.minimum(p_SQ, logits_SQ.softmax(-1)).sum(-1).clamp_min(1e-9).log()
    raise InputError(f"a token loss is one of {', '.join(TOKEN_LOSSES)}, got {form!r}")
