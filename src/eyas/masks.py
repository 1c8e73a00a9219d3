"""Which tokens of a conversation the target wrote itself, by its own chat template: no table of templates is kept.

Where the template marks answers with `{% generation %}`, the marks say it. Elsewhere a conversation is rendered twice,
up to the generation prompt and with the answer: what lies between is the answer, and text and tokens of the first
must begin the second. Each answer is looked at as the last one of its conversation, as it was when it was written; a
template that rewrites history (and drops what was thought) so gives one sequence for each turn. An answer begins with
the first token after the generation prompt and ends with its end-of-turn token. Refuses to know files and models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import cast

from transformers import PreTrainedTokenizerBase

from eyas.data import Sequence
from eyas.errors import InputError, one_line

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Seq[Mapping[str, str]]


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, answer_next: bool) -> str:
    """A conversation as the chat template writes it, with the generation prompt if an answer is to follow.

    Raises:
        InputError: the template refuses it, in whatever way.
    """
    plain = [dict(message) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(plain, add_generation_prompt=answer_next, tokenize=False))
    except Exception as error:  # a template is somebody's program, and raises whatever it stumbles over
        raise InputError(f"the target's chat template refuses the conversation: {one_line(error)}") from error


def join(sequences: list[Sequence], tokens: Seq[int], span: tuple[int, int]) -> None:
    """Add an answer, `tokens[slice(*span)]`: to the last sequence if that begins `tokens`, else as one of its own."""
    last = sequences[-1] if sequences else None
    whole = tuple(tokens)
    if last is not None and span[0] >= len(last.tokens) and whole[: len(last.tokens)] == last.tokens:
        sequences[-1] = Sequence(whole, (*last.spans, span))
    else:
        sequences.append(Sequence(whole, (span,)))


class ChatTemplate:
    """A tokenizer with its chat template, and the target's end tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Seq[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self._marked = bool(_MARKS.search(str(tokenizer.chat_template)))

    def encode(self, text: str) -> list[int]:
        """Tokens of a rendered text, which has its special tokens already."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def whole_text(self, tokens: Seq[int]) -> str:
        """Text for people, special tokens included; control characters, which could move a terminal, as escapes."""
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)

    def check(self, messages: Messages) -> None:
        """Refuse a conversation, up to its last question, that has no prompt.

        Raises:
            InputError: the template refuses it, or there is none and it is more than a text.
        """
        if self.tokenizer.chat_template is not None:
            render(self.tokenizer, messages, answer_next=True)
        elif len(messages) > 1:
            raise InputError("the target has no chat template: its prompts must be single texts")

    def prompt(self, messages: Messages) -> list[int]:
        """Tokens that the answer to the last message follows. A target without a template takes a lone text as it is.

        Raises:
            InputError: as `check`.
        """
        if self.tokenizer.chat_template is not None:
            return self.encode(render(self.tokenizer, messages, answer_next=True))
        self.check(messages)
        return self.tokenizer.encode(messages[0]["content"], add_special_tokens=True)

    def end_of_turn(self) -> int:
        """The token that ends an answer, as the template writes it; where it does not say, the tokenizer's.

        Raises:
            InputError: neither is an end token of the target.
        """
        try:
            probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            return self.answered(probe)[0].tokens[-1]
        except InputError:
            if self.tokenizer.eos_token_id not in self.eos_ids:
                raise
            return self.tokenizer.eos_token_id

    def next_prompt(self, tokens: Seq[int], messages: Messages) -> list[int]:
        """The prompt of a further turn. `tokens` end with the answer as it was sampled, its end token included;
        `messages` with that answer and the next question.

        The tokens stay as they are where the template leaves that answer's text alone; else all is rendered anew.

        Raises:
            InputError: the template refuses the conversation.
        """
        before = render(self.tokenizer, messages[:-2], answer_next=True) + messages[-2]["content"]
        after = render(self.tokenizer, messages, answer_next=True)
        anew = self.encode(after)
        if after.startswith(before):
            follow = self.encode(after[len(before) :])
            if follow[0] == tokens[-1] and anew[-len(follow) :] == follow:
                return [*tokens, *follow[1:]]
        return anew

    def answered(self, messages: Messages) -> list[Sequence]:
        """The sequences of a conversation that has its answers: one, or one for each turn where history is rewritten.

        Raises:
            InputError: the template refuses it, or does not say where the answers are.
        """
        if self.tokenizer.chat_template is None:
            raise InputError("the target has no chat template that says where answers begin and end")
        sequences: list[Sequence] = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                tokens, start, end = self._last_answer(messages[: place + 1])
                join(sequences, tokens[:end], (start, end))
        if not sequences:
            raise InputError("the conversation has no answer")
        return sequences

    def _last_answer(self, messages: Messages) -> tuple[list[int], int, int]:
        """The conversation's tokens, and where its last answer begins and ends among them."""
        find = self._by_marks if self._marked else self._by_rendering
        tokens, start, end = find(messages)
        if start == 0:
            raise InputError("the target's chat template leaves no prompt: 100 % of the tokens would be the answer")
        ends = [place for place in range(start, min(end + 1, len(tokens))) if tokens[place] in self.eos_ids]
        if not ends:
            raise InputError(f"the target's chat template ends an answer with none of the target's end tokens "
                             f"{list(self.eos_ids)}")  # fmt: skip
        if ends[0] == start:
            raise InputError("the target's chat template drops the answer's text: 0 % of the tokens would be trained")
        return tokens, start, ends[0] + 1

    def _by_rendering(self, messages: Messages) -> tuple[list[int], int, int]:
        before = render(self.tokenizer, messages[:-1], answer_next=True)
        text = render(self.tokenizer, messages, answer_next=False)
        prompt, tokens = self.encode(before), self.encode(text)
        if not text.startswith(before):
            place = _common(text, before)
            raise InputError(f"the target's chat template is unstable: with the answer it writes "
                             f"{text[place : place + 40]!r} where its generation prompt has "
                             f"{before[place : place + 40]!r}")  # fmt: skip
        if tokens[: len(prompt)] != prompt:
            raise InputError(f"the target's chat template is unstable: a token holds both the end of the prompt "
                             f"{before[-20:]!r} and the beginning of {text[len(before) :][:20]!r}")  # fmt: skip
        return tokens, len(prompt), len(tokens)

    def _by_marks(self, messages: Messages) -> tuple[list[int], int, int]:
        plain = [dict(message) for message in messages]
        try:
            found = cast(
                "Mapping[str, list[int]]",
                self.tokenizer.apply_chat_template(
                    plain, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                ),
            )
        except Exception as error:  # as in `render`; slow tokenizers have no offsets either
            raise InputError(f"the target's chat template refuses the conversation: {one_line(error)}") from error
        tokens, mask = found["input_ids"], found["assistant_masks"]
        if all(mask):
            raise InputError("the target's chat template marks 100 % of the tokens as answers")
        # what the generation prompt writes is not the target's own, be it marked or not
        first = _common(tokens, self.encode(render(self.tokenizer, messages[:-1], answer_next=True)))
        marked = [place for place in range(first, len(mask)) if mask[place]]
        if not marked:
            raise InputError("the target's chat template marks 0 % of the answer's tokens")
        if marked != list(range(marked[0], marked[-1] + 1)):
            raise InputError("the target's chat template is unstable: it marks one answer in several pieces")
        return tokens, marked[0], marked[-1] + 1


def _common(a: Seq[object], b: Seq[object]) -> int:
    """How many entries two sequences begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))
