"""Answers that fit a grammar: a JSON schema, a regular expression or a Lark grammar, by llguidance (optional).

What is allowed after a prefix is a function of the answer so far alone, so plain and drafted decoding see the same
masks at every node that the walk visits. Refuses to know models; what may follow a text is llguidance's to say
(github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.errors import InputError, one_line
from eyas.sampling import Prefix

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_schema", "regex", "lark"]
# Between the parts of a JSON text. Not more: a model may prefer blanks without end to going on.
WHITESPACE = r"[ \n\t]{0,20}"


def compiled(kind: Kind, source: object) -> str:
    """A grammar in llguidance's own form; `source` is a JSON schema (an object, or its text), a regular expression in
    Rust's syntax, or a grammar in llguidance's dialect of Lark.

    Raises:
        InputError: llguidance is not installed, or the grammar is none, or asks for what llguidance does not know.
    """
    matcher = _matcher_type()
    given = _schema(source) if kind == "json_schema" else source
    if not isinstance(given, str):
        raise InputError(f"{kind} must be a text, got {given!r}")
    try:
        if kind == "json_schema":
            text = matcher.grammar_from_json_schema(given, defaults={"whitespace_pattern": WHITESPACE})
        else:
            text = (matcher.grammar_from_regex if kind == "regex" else matcher.grammar_from_lark)(given)
        is_wrong, messages = matcher.validate_grammar_with_warnings(text)
    except ValueError as error:  # a text that is no UTF-8, or JSON of a number that is none
        raise InputError(f"{kind}: {one_line(error)}") from error
    if is_wrong:
        raise InputError(f"{kind}: {one_line(ValueError(messages[0]))}")
    return text


def _matcher_type() -> type[LLMatcher]:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise InputError("a grammar needs llguidance, which is not installed: pip install 'eyas[grammar]'") from error
    return LLMatcher


def _schema(source: object) -> str:
    try:
        schema = json.loads(source) if isinstance(source, str) else source
        text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema is not JSON: {one_line(error)}") from error
    if not isinstance(schema, Mapping):
        raise InputError(f"a JSON schema is an object, got {one_line(ValueError(text))}")
    return text


class Grammar:
    """A constraint for `Sampling`: rules out what cannot go on to a text of the grammar. After a text that nothing can
    follow, only end tokens are left.

    It holds one matcher, moved from answer to answer by what they have in common, so one object may serve answers that
    run in turns: correct in any order, fastest for one after the other.
    """

    def __init__(
        self, kind: Kind, source: object, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        """`source` as in `compiled`; `vocab_size` is the width of the logits, which may exceed the tokenizer's."""
        text = compiled(kind, source)
        if not eos_ids:
            raise InputError(f"{kind} needs a target with an end token: nothing else can end the answer")
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = vocab_size
        self._matcher = _matcher_type()(_tokenizer(tokenizer, vocab_size, self.eos_ids), text, log_level=0)
        self._consumed: list[int] = []  # the answer's tokens that the matcher stands behind
        self._check()

    def __call__(self, prefix: Prefix, scores_V: Tensor) -> Tensor:
        allowed_V = torch.from_numpy(self.allowed(prefix.answer)).to(scores_V.device)
        return scores_V.masked_fill(~allowed_V, -math.inf)

    def allowed(self, answer: Sequence[int]) -> np.ndarray:
        """[V] bool: the tokens that may follow `answer`.

        Raises:
            InputError: the answer does not fit the grammar (a logits processor forced a token), or the grammar is too
                complex for llguidance's limits.
        """
        ended = any(token in self.eos_ids for token in answer)
        if not ended:
            self._move_to(answer)
        if ended or self._matcher.is_stopped():
            allowed_V = np.zeros(self.vocab_size, dtype=bool)
            allowed_V[list(self.eos_ids)] = True
            return allowed_V
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self.vocab_size].astype(bool)

    def _move_to(self, answer: Sequence[int]) -> None:
        common = 0
        for ours, theirs in zip(self._consumed, answer, strict=False):
            if ours != theirs:
                break
            common += 1
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        ahead = list(answer[common:])
        taken = self._matcher.try_consume_tokens(ahead)
        self._consumed += ahead[:taken]
        self._check()
        if taken < len(ahead):
            raise InputError(
                f"the answer's token {ahead[taken]} does not fit the grammar: a logits processor forced it"
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(f"the grammar: {one_line(ValueError(self._matcher.get_error()))}")


@lru_cache(maxsize=4)  # some seconds for a large vocabulary
def _tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError("a grammar needs a fast tokenizer (tokenizer.json); the target's is a slow one")
    return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(eos_ids))
