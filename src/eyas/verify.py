"""The lossless rules: sample and descend for trees that were chosen, accept or reject for trees that were drawn.

The children of a node are fixed before anything is drawn (top-k of the draft), so one token is drawn from the target's
own distribution at each node; where it is a child, the walk goes there, else it ends and the token is emitted. The law
is that of EAGLE's accept loop with a point-mass draft (EAGLE-2's official code), exact at every temperature, and needs
no draft probabilities. With keyed noise it gives plain decoding's tokens one by one.

Where the children were drawn from a draft distribution q that the tree carries, the classic rule takes its place:
`accept_one`, `accept_many`. It keeps the law of plain decoding, not its tokens. Legend: N tree nodes, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from eyas.errors import InputError
from eyas.sampling import Prefix, Sampling
from eyas.tree import Tree

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Stop:
    """When an answer ends: an end token, a completed stop string, or a used-up budget, whichever comes first."""

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = field(default=None, repr=False)  # tokens to text: needed for strings

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be a whole number of at least 1, got {self.max_new_tokens!r}")
        if not all(isinstance(string, str) and string for string in self.strings):
            raise InputError(f"stop strings must be texts that are not empty, got {list(self.strings)}")
        assert not self.strings or self.decode is not None, "stop strings are looked for in decoded text"

    def reason(self, generated: Sequence[int]) -> FinishReason | None:
        """Why the answer ends after these tokens, if it does. Called after every token."""
        if generated and generated[-1] in self.eos_ids:
            return "stop"
        if self.strings and self.decode is not None and self.cut(self.decode(list(generated))) is not None:
            return "stop"
        return "length" if len(generated) >= self.max_new_tokens else None

    def cut(self, text: str) -> str | None:
        """`text` before the first stop string in it; None where there is none."""
        places = [place for place in (text.find(string) for string in self.strings) if place >= 0]
        return text[: min(places)] if places else None


@dataclass(frozen=True)
class Walk:
    """What the target says about a tree."""

    path: list[int]  # nodes that hold: the root, then the accepted ones
    tokens: list[int]  # emitted: the tokens of the accepted nodes, then the one that ended the walk
    finish_reason: FinishReason | None


def walk(tree: Tree, logits_NV: Tensor, sampling: Sampling, prefix: Prefix, stop: Stop) -> Walk:
    """Descend from the root, one draw for every emitted token, none after the answer has ended.

    `prefix` is prompt and answer up to and with the root's token; `logits_NV[node]` is the target's distribution after
    `node`. A node whose children were drawn is decided by `accept_many`, all others by `Sampling.draw`.
    """
    path = [0]
    tokens = list(prefix.tokens)
    while True:
        token = _decide(tree, path[-1], logits_NV[path[-1]], sampling, Prefix(tokens, prefix.num_prompt))
        tokens.append(token)
        child = tree.child(path[-1], token)
        if child is not None:
            path.append(child)
        reason = stop.reason(tokens[prefix.num_prompt :])
        if child is None or reason is not None:
            return Walk(path, tokens[len(prefix.tokens) :], reason)


def _decide(tree: Tree, node: int, logits_V: Tensor, sampling: Sampling, prefix: Prefix) -> int:
    """The token that follows `node`, which stands at the end of `prefix`."""
    law = tree.laws.get(node)
    if law is None:
        return sampling.draw(logits_V, prefix)
    p_V = sampling.probabilities(logits_V, prefix).cpu().numpy()
    candidates = [tree.tokens[child] for child in tree.children(node)]
    uniforms = sampling.uniforms(len(prefix.tokens), len(candidates) + 1)
    return accept_many(p_V, law.dense(len(p_V)).numpy(), candidates, uniforms)


def accept_one(p_V: np.ndarray, q_V: np.ndarray, token: int, uniforms: Sequence[float]) -> int:
    """A token with the law p, given one drawn from q: the draft's with chance min(1, p/q), else one from the residual
    norm(max(p - q, 0)) (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318,
    algorithm 2).

    Arguments and errors as `accept_many`, for one candidate: two uniforms, one to accept with, one to draw with.
    """
    return accept_many(p_V, q_V, [token], uniforms)


def accept_many(p_V: np.ndarray, q_V: np.ndarray, candidates: Sequence[int], uniforms: Sequence[float]) -> int:
    """A token with the law p, given candidates drawn from q without replacement: recursive rejection sampling.

    Each candidate in turn is accepted with chance min(1, p/q). After a rejection p becomes the residual, and q what the
    next candidate was drawn from: q without the rejected token, both normalised. If none is accepted, the token is
    drawn from the last residual (Jeon et al. 2024, arXiv 2402.14160; after SpecInfer's multi-step speculative sampling,
    arXiv 2305.09781; EAGLE-1's code, arXiv 2401.15077).

    Arguments:
        p_V: the target's distribution, float64, with zeros where filters rule a token out.
        q_V: the draft's, float64, over the same ids: zero for tokens outside the draft's vocabulary.
        candidates: distinct tokens, in the order in which they were drawn.
        uniforms: one number in [0, 1) for each candidate, and a last one to draw with.

    Returns:
        The token: one of the candidates exactly if that one was accepted.

    Raises:
        ValueError: a candidate that q cannot have drawn.
    """
    for token, uniform in zip(candidates, uniforms[:-1], strict=True):
        if not q_V[token] > 0:
            raise ValueError(f"the candidate {token} cannot have been drawn: q gives it {q_V[token]}")
        if uniform * q_V[token] < p_V[token]:
            return token
        residual_V = np.maximum(p_V - q_V, 0.0)
        if not residual_V.any():  # p is q but for rounding, and so was the chance to accept but for rounding 1
            return token
        p_V = residual_V / residual_V.sum()
        q_V = q_V.copy()
        q_V[token] = 0.0
        rest = q_V.sum()
        q_V = q_V / rest if rest > 0 else q_V
    return _pick(p_V, uniforms[-1])


def _pick(p_V: np.ndarray, uniform: float) -> int:
    """The token at which p's cumulative sum passes `uniform`: never one with p = 0."""
    cumulative_V = p_V.cumsum()
    return int(cumulative_V.searchsorted(uniform * cumulative_V[-1], side="right"))
