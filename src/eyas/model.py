"""Text in, text out: a target with its tokenizer, a drafter and a tree, behind `eyas.load`.

The only room that knows both tokenizers and the round loop. Refuses to know command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypedDict

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from typing_extensions import Unpack

from eyas import native
from eyas.checkpoint import DTYPES, load_head, load_native, load_native_head, load_target
from eyas.drafters.base import Drafter
from eyas.errors import InputError, Unsupported, one_line
from eyas.generate import Round, generate, generate_plain
from eyas.measure import Answer, tau, timed
from eyas.policies import Policy, parse_policy
from eyas.sampling import Processor, Sampling
from eyas.targets.base import Target, TargetSpec
from eyas.targets.eager import EagerTarget
from eyas.targets.native import NativeTarget
from eyas.verify import FinishReason, Stop

BACKENDS = ("auto", "eager", "native")
# Until trees are tuned: the best that were measured on two cores (docs/log.md).
AUTO_TREES = {
    ("native", torch.bfloat16): "dynamic:levels=4,top_k=3,nodes=5",
    ("native", torch.int8): "dynamic:levels=4,top_k=3,nodes=5",
    ("eager", torch.bfloat16): "dynamic:levels=3,top_k=3,nodes=6",
}
AUTO_TREE = "dynamic:levels=3,top_k=3,nodes=4"  # other dtypes


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[int]


class Settings(TypedDict, total=False):
    """How tokens are drawn: the fields of `Sampling`, and `logits_processor`, a list of transformers' processors."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logits_processor: Sequence[Processor]
    seed: int
    sample: int


@dataclass(frozen=True)
class Output:
    """One answer."""

    text: str  # ends before a stop string; no special tokens
    token_ids: list[int]  # the end token and the token that completed a stop string included
    prompt_tokens: int
    finish_reason: FinishReason
    tau: float | None
    rounds: list[Round]
    seconds: float  # prompt included, loading excluded


class TextStream:
    """The text of an answer as its rounds arrive: never half a character, never a stop string or its beginning."""

    def __init__(self, stop: Stop, decode: Callable[[list[int]], str]) -> None:
        self._stop = stop
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = ""

    def feed(self, round_: Round) -> str:
        """What this round adds to the text; the last round adds all that was held back."""
        self._tokens += round_.tokens
        text = self._decode(self._tokens)
        cut = self._stop.cut(text)
        if cut is not None:
            text = cut
        elif round_.finish_reason is None:
            text = text.rstrip("\ufffd")  # bytes of a character that is not complete yet
            held_back = max((len(string) - 1 for string in self._stop.strings), default=0)
            text = text[: max(len(text) - held_back, len(self._shown))]
        piece, self._shown = text[len(self._shown) :], text
        return piece


@dataclass(frozen=True)
class Model:
    """What `eyas.load` returns."""

    target: Target[Any]
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter[Any] | None
    policy: Policy

    def encode(self, prompt: Prompt, chat: bool | None = None) -> list[int]:
        """Token ids of a text, a conversation or ids; a text is a user's turn where the model has a chat template.

        Raises:
            InputError: an empty prompt, a conversation for a model without a template, ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty: it must hold at least one character")
            if chat is None:
                chat = self.tokenizer.chat_template is not None
            if not chat:
                return self._tokenize(prompt, special=True)
            prompt = [Message(role="user", content=prompt)]
        if not isinstance(prompt, Iterable):
            raise InputError(f"a prompt is a text, a list of messages or a list of token ids, got {prompt!r}")
        parts = list(prompt)
        if not parts:
            raise InputError("the prompt is empty: it must hold at least one token or message")
        if not isinstance(parts[0], dict):
            return self._checked_ids(parts)
        if self.tokenizer.chat_template is None:
            raise InputError("the target has no chat template: give a text (--raw) instead of a conversation")
        messages = [_checked_message(part) for part in parts]
        try:
            text = str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:
            raise InputError(f"the target's chat template refuses the conversation: {one_line(error)}") from error
        return self._tokenize(text, special=False)  # the template wrote the special tokens itself

    def rounds(self, ids: Sequence[int], sampling: Sampling, stop: Stop, with_logits: bool = False) -> Iterator[Round]:
        """The rounds of one answer, as they happen; plain decoding where there is no drafter."""
        if self.drafter is None:
            return generate_plain(self.target, ids, sampling, stop, with_logits)
        return generate(self.target, self.drafter, self.policy, ids, sampling, stop, with_logits)

    def stopping(self, max_new_tokens: int, stop: str | Sequence[str] = ()) -> Stop:
        """A `Stop` with this model's end tokens and tokenizer; `stop` is one string or several."""
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return Stop(max_new_tokens, self.target.spec.eos_ids, strings, self.decode)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def sampling(self, **settings: Unpack[Settings]) -> Sampling:
        """How answers are drawn; the repetition penalty of the model's own generation_config holds if none is given."""
        processors = tuple(settings.pop("logits_processor", ()))
        settings.setdefault("repetition_penalty", self.target.spec.repetition_penalty)
        # popped above: what is left are fields of Sampling, which the type of a TypedDict cannot say
        return Sampling(processors=processors, **settings)  # type: ignore[misc]

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        chat: bool | None = None,
        **settings: Unpack[Settings],
    ) -> Output:
        """One answer to one prompt.

        Raises:
            InputError: the prompt or a setting is outside what is accepted.
        """
        ids, stopping = self.encode(prompt, chat), self.stopping(max_new_tokens, stop)
        answer = timed(self.rounds(ids, self.sampling(**settings), stopping))
        return self.output(answer, len(ids), stopping)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        chat: bool | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[str]:
        """The text of `generate` piece by piece, whole characters only. Raises what `generate` raises."""
        ids, stopping = self.encode(prompt, chat), self.stopping(max_new_tokens, stop)
        text = TextStream(stopping, self.decode)
        for round_ in self.rounds(ids, self.sampling(**settings), stopping):
            yield text.feed(round_)

    def output(self, answer: Answer, prompt_tokens: int, stop: Stop) -> Output:
        """An answer's rounds as an `Output`."""
        text = self.decode(answer.tokens)
        cut = stop.cut(text)
        reason = answer.rounds[-1].finish_reason
        assert reason is not None, "a finished answer has a reason"
        return Output(
            text=text if cut is None else cut,
            token_ids=answer.tokens,
            prompt_tokens=prompt_tokens,
            finish_reason=reason,
            tau=tau([answer]),
            rounds=answer.rounds,
            seconds=answer.seconds,
        )

    def _tokenize(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the prompt holds bytes that are no UTF-8 text") from error
        return self.tokenizer.encode(text, add_special_tokens=special)

    def _checked_ids(self, parts: Sequence[object]) -> list[int]:
        size = self.target.spec.vocab_size
        try:
            ids = [index(part) for part in parts if not isinstance(part, bool)]  # type: ignore[arg-type]
        except TypeError as error:
            raise InputError(
                f"a prompt is a text, a list of messages or a list of token ids, got {parts[:3]}"
            ) from error
        if len(ids) != len(parts) or not all(0 <= token < size for token in ids):
            raise InputError(f"token ids must be whole numbers between 0 and {size - 1}")
        return ids


def _checked_message(message: object) -> dict[str, str]:
    if isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str):
        return {"role": message["role"], "content": message["content"]}
    raise InputError(f"a conversation is a list of messages whose role and content are texts, got {message!r} in it")


def load(
    target: str,
    head: str | None = None,
    *,
    backend: str = "auto",
    dtype: str | torch.dtype | None = None,
    tree: str | Policy = "auto",
) -> Model:
    """A model that decodes with a head.

    Arguments:
        target: a folder in transformers format, a GGUF file, or "smollm2".
        head: a head's folder, a shipped name ("smollm2-eagle3", "smollm2-eagle"), or None ("none") for plain decoding.
        backend: "native" (the compiled CPU core), "eager" (transformers), or "auto": native where it supports the
            model, the dtype and the CPU, else eager; `target.spec.backend` says which.
        dtype: "bfloat16" (default on native), "int8" (native), "float32" (default on eager) or "float64" (eager).
        tree: a `Policy`, or "auto", "chain:K", "static[:FILE]", "dynamic:levels=6,top_k=8,nodes=24" or
            "sampled:levels=3,width=2" (at temperatures above 0: the law of plain decoding, not its tokens).

    Raises:
        InputError: one of them is unknown, broken, or does not fit the others.
    """
    chosen = choose_backend(backend, dtype)
    if not isinstance(tree, Policy) and tree != "auto":
        tree = parse_policy(tree)  # refused now, not after loading
    loaded, tokenizer = _load_target(target, chosen, may_fall_back=backend == "auto")
    policy = tree if isinstance(tree, Policy) else choose_policy("auto", loaded.spec)
    return Model(loaded, tokenizer, attach_head(head, loaded), policy)


def _load_target(
    name: str, dtype: torch.dtype | str, may_fall_back: bool
) -> tuple[Target[Any], PreTrainedTokenizerBase]:
    if isinstance(dtype, torch.dtype):
        return load_target(name, dtype)
    try:
        return load_native(name, dtype)
    except Unsupported:
        if not may_fall_back or dtype not in DTYPES:
            raise
        return load_target(name, DTYPES[dtype])


def attach_head(name: str | None, target: Target[Any]) -> Drafter[Any] | None:
    """The drafter of a head's name or folder on a target's back end; None for plain decoding.

    Raises:
        InputError: see `load`.
    """
    if name in (None, "none"):
        return None
    if isinstance(target, NativeTarget):
        return load_native_head(name, target)
    assert isinstance(target, EagerTarget), type(target)
    return load_head(name, target)


def choose_policy(tree: str, spec: TargetSpec) -> Policy:
    """A tree by its name; `auto` is the stated one of the back end and dtype.

    Raises:
        InputError: see `parse_policy`.
    """
    return parse_policy(AUTO_TREES.get((spec.backend, spec.dtype), AUTO_TREE) if tree == "auto" else tree)


def choose_backend(backend: str, dtype: str | torch.dtype | None) -> torch.dtype | str:
    """What to load: a torch dtype for the eager back end, the name of a form of weights for the native one.

    Raises:
        InputError: an unknown back end or dtype, or a pair that does not exist.
    """
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}: give one of {', '.join(BACKENDS)}")
    if name is not None and name not in (*DTYPES, *native.WEIGHTS):
        raise InputError(f"unknown dtype {name!r}: give one of {', '.join(dict.fromkeys((*DTYPES, *native.WEIGHTS)))}")
    if backend == "native" or (
        backend == "auto" and native.fast_kernels() and (name is None or name in native.WEIGHTS)
    ):
        weights = name or "bfloat16"
        if weights not in native.WEIGHTS:
            raise InputError(f"the native back end runs {' or '.join(native.WEIGHTS)}, got {weights!r}")
        return weights
    if name is not None and name not in DTYPES:
        raise InputError(f"the eager back end runs {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name or "float32"]
