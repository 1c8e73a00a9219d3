"""The lossless rule: sample and descend.

The children of a node are fixed before anything is drawn (top-k of the draft), so one token is drawn from the target's
own distribution at each node; where it is a child, the walk goes there, else it ends and the token is emitted. The law
is that of EAGLE's accept loop with a point-mass draft (EAGLE-2's official code), exact at every temperature, and needs
no draft probabilities. With keyed noise it gives plain decoding's tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
    `node`.
    """
    path = [0]
    tokens = list(prefix.tokens)
    while True:
        token = sampling.draw(logits_NV[path[-1]], Prefix(tokens, prefix.num_prompt))
        tokens.append(token)
        child = tree.child(path[-1], token)
        if child is not None:
            path.append(child)
        reason = stop.reason(tokens[prefix.num_prompt :])
        if child is None or reason is not None:
            return Walk(path, tokens[len(prefix.tokens) :], reason)
