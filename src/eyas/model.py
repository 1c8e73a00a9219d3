"""Text in, text out: a target with its tokenizer, a drafter and a tree, behind `eyas.load`.

The only room that knows both tokenizers and the round loop. Refuses to know command lines.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Literal, Protocol, TypedDict, cast, get_args, overload

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import Unpack

from eyas import native
from eyas.automatic import auto_tree
from eyas.checkpoint import (
    DTYPES,
    LOOKUP,
    SMALL,
    load_head,
    load_native,
    load_native_head,
    load_small,
    load_target,
    promised,
)
from eyas.drafters.base import Drafter
from eyas.drafters.lookup import Lookup
from eyas.errors import InputError, Unsupported
from eyas.generate import Memory, Request, Round, generate, generate_many, generate_plain
from eyas.grammar import Grammar, Kind
from eyas.masks import render
from eyas.measure import Answer, first_draws, tau
from eyas.policies import Policy, parse_policy
from eyas.prices import priced
from eyas.promise import Figures, shortfall
from eyas.prompts import read_workload
from eyas.sampling import Processor, Sampling
from eyas.targets.base import Target, TargetSpec
from eyas.targets.eager import EagerTarget
from eyas.targets.native import NativeTarget
from eyas.verify import FinishReason, Stop

BACKENDS = ("auto", "eager", "native")
_MOST_SAMPLES = 1_000_000  # of a prompt


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[int]


class Settings(TypedDict, total=False):
    """How tokens are drawn: the fields of `Sampling`; `logits_processor`, a list of transformers' processors; words as
    texts among the `bad_words`; and at most one grammar that the answer must fit."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    bad_words: str | Sequence[str | Sequence[int]]
    min_new_tokens: int
    json_schema: str | Mapping[str, Any]
    regex: str  # in Rust's syntax
    lark: str  # in llguidance's dialect
    logits_processor: Sequence[Processor] | None
    seed: int
    sample: int


class Options(Settings, total=False):
    """What `Model.generate` and `Model.stream` take beside the prompt: `Settings`, and

    max_new_tokens: the answer's budget (default 256).
    stop: a string, or several; the answer ends before the first one that it completes.
    chat: is a text a user's turn in the chat template (default: where the model has one)?
    """

    max_new_tokens: int
    stop: str | Sequence[str]
    chat: bool | None


class Streamer(Protocol):
    """transformers' streamers: `put` takes token ids (the prompt's first), `end` says that the answer is complete."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Output:
    """One answer."""

    text: str  # ends before a stop string; no special tokens
    token_ids: list[int]  # the end token and the token that completed a stop string included
    prompt_tokens: int
    finish_reason: FinishReason
    tau: float | None
    rounds: list[Round]
    seconds: float  # prompt included, loading excluded; of a list: this answer's share of the whole
    logprobs: list[float] | None = None  # of token_ids: the target's own, before penalties, filters and temperature

    @property
    def timing(self) -> dict[str, float]:
        """Milliseconds of drafting, verification (the prompt's forward too) and the rest."""
        return {
            "draft_ms": sum(round_.draft_ms for round_ in self.rounds),
            "verify_ms": sum(round_.verify_ms for round_ in self.rounds),
            "other_ms": sum(round_.other_ms for round_ in self.rounds),
        }


class TextStream:
    """The text of an answer as its rounds arrive: never half a character, never a stop string or its beginning."""

    def __init__(self, stop: Stop, decode: Callable[[list[int]], str]) -> None:
        self._stop = stop
        self._decode = decode
        self._tokens: list[int] = []
        self.shown = ""

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
            text = text[: max(len(text) - held_back, len(self.shown))]
        piece, self.shown = text[len(self.shown) :], text
        return piece


@dataclass(frozen=True)
class Model:
    """What `eyas.load` returns."""

    target: Target[Any]
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter[Any] | None
    policy: Policy
    figures: Sequence[Figures] = ()  # what the head's makers measured of it
    _watch: _Watch = field(default_factory=lambda: _Watch(), init=False, repr=False, compare=False)
    _memory: Memory[Any, Any] = field(default_factory=Memory, init=False, repr=False, compare=False)

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
            elif type(chat) is not bool:
                raise InputError(f"chat must be True, False or None, got {chat!r}")
            if not chat:
                return self._tokenize(prompt, special=True)
            prompt = [Message(role="user", content=prompt)]
        try:
            parts = list(prompt)
        except TypeError as error:
            raise InputError(
                f"a prompt is a text, a list of messages or a list of token ids, got {prompt!r}"
            ) from error
        if not parts:
            raise InputError("the prompt is empty: it must hold at least one token or message")
        if not isinstance(parts[0], dict):
            return self._checked_ids(parts)
        if self.tokenizer.chat_template is None:
            raise InputError("the target has no chat template: give a text (--raw) instead of a conversation")
        messages = [_checked_message(part) for part in parts]
        text = render(self.tokenizer, messages, answer_next=True)
        return self._tokenize(text, special=False)  # the template wrote the special tokens itself

    def rounds(self, ids: Sequence[int], sampling: Sampling, stop: Stop, with_logits: bool = False) -> Iterator[Round]:
        """The rounds of one answer, as they happen; plain decoding where there is no drafter."""
        if self.drafter is None:
            return generate_plain(self.target, ids, sampling, stop, with_logits)
        return generate(self.target, self.drafter, self.policy, ids, sampling, stop, with_logits)

    def many_rounds(
        self, requests: Sequence[Request], slots: int, with_logits: bool = False
    ) -> Iterator[tuple[int, Round]]:
        """The rounds of several answers, up to `slots` of which share every forward, with the numbers of requests."""
        return generate_many(self.target, self.drafter, self.policy, requests, slots, with_logits)

    def stopping(self, max_new_tokens: int, stop: str | Sequence[str] = ()) -> Stop:
        """A `Stop` with this model's end tokens and tokenizer; `stop` is one string or several."""
        try:
            strings = (stop,) if isinstance(stop, str) else tuple(stop)
        except TypeError as error:
            raise InputError(f"stop is a text or a list of texts, got {stop!r}") from error
        return Stop(max_new_tokens, self.target.spec.eos_ids, strings, self.decode)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str:
        """The text of a token inside of a text, blank before it and special tokens included."""
        once, twice = (str(self.tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
        return twice[len(once) :]  # a tokenizer may drop the blank at the beginning of a text

    def sampling(self, **settings: Unpack[Settings]) -> Sampling:
        """How answers are drawn; the repetition penalty of the model's own generation_config holds if none is given.

        A bad word given as a text is ruled out as the tokenizer writes it at the beginning of a text and after a blank;
        other spellings and cases are other words.
        """
        spec, fields = self.target.spec, dict[str, Any](settings)
        grammars = [(kind, fields.pop(kind)) for kind in get_args(Kind) if kind in fields]
        if len(grammars) > 1:
            raise InputError(f"give one grammar, got {' and '.join(kind for kind, _ in grammars)}")
        for kind, source in grammars:
            fields["constraint"] = Grammar(kind, source, self.tokenizer, spec.vocab_size, spec.eos_ids)
        fields["processors"] = _processors(fields.pop("logits_processor", None))
        fields["bad_words"] = self._bad_words(fields.pop("bad_words", ()))
        fields.setdefault("repetition_penalty", spec.repetition_penalty)
        sampling = Sampling(eos_ids=spec.eos_ids, **fields)
        sampling.check_vocabulary(spec.vocab_size)
        return sampling

    def _bad_words(self, given: str | Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        if not isinstance(given, Sequence):
            raise InputError(f"bad_words are texts or sequences of token ids, got {given!r}")
        words = (given,) if isinstance(given, str) else given
        return [ids for word in words for ids in (self._forms(word) if isinstance(word, str) else [word])]

    def _forms(self, word: str) -> list[Sequence[int]]:
        forms = [word] if word[:1].isspace() else [word, f" {word}"]
        found = [self._tokenize(form, special=False, what="a bad word") for form in forms]
        if not found[0]:
            raise InputError(f"a bad word must hold at least one token, got {word!r}")
        return [list(ids) for ids in dict.fromkeys(map(tuple, found))]

    @overload  # a text is a sequence of texts too, for types; `_is_list` knows better
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompt: Prompt,
        *,
        n: Literal[1] = 1,
        logprobs: bool = False,
        streamer: Streamer | None = None,
        batch_size: int = 16,
        **options: Unpack[Options],
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        n: Literal[1] = 1,
        logprobs: bool = False,
        streamer: None = None,
        batch_size: int = 16,
        **options: Unpack[Options],
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        n: int,
        logprobs: bool = False,
        streamer: None = None,
        batch_size: int = 16,
        **options: Unpack[Options],
    ) -> list[Output] | list[list[Output]]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        logprobs: bool = False,
        streamer: Streamer | None = None,
        batch_size: int = 16,
        **options: Unpack[Options],
    ) -> Output | list[Output] | list[list[Output]]:
        """An answer to a prompt; a list of them for a list of prompts, or for `n` samples; a list of lists for both.

        Prompt i of P is sample `sample + i` of the keyed noise, and its j-th sample `sample + i + j * P`: any of them
        can be had alone. Up to `batch_size` answers share each forward. A single prompt that begins as the last one
        and its answer do (a conversation's next turn) is read from where it parts from them.

        Arguments:
            n: samples of each prompt.
            logprobs: of the answers' tokens, in `Output.logprobs`.
            streamer: for a single answer, transformers' `TextStreamer` or anything with its two methods.

        Raises:
            InputError: a prompt or a setting is outside what is accepted.
        """
        if type(n) is not int or not 1 <= n <= _MOST_SAMPLES:
            raise InputError(f"n must be a whole number from 1 to {_MOST_SAMPLES}, got {n!r}")
        if type(batch_size) is not int or batch_size < 1:
            raise InputError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        if type(logprobs) is not bool:
            raise InputError(f"logprobs must be True or False, got {logprobs!r}")
        if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise InputError(f"a streamer has the methods put and end, got {streamer!r}")
        many = _is_list(prompt)
        if streamer is not None and (many or n > 1):
            raise InputError("a streamer takes a single answer: give one prompt and n=1")
        prompts = cast("Sequence[Prompt]", prompt if many else [prompt])
        requests = self._requests(prompts, n, options)
        memory = None if many or n > 1 else self._memory
        outputs = self._answers(requests, batch_size, logprobs, streamer, memory)
        if n == 1:
            return outputs if many else outputs[0]
        by_prompt = [outputs[i :: len(prompts)] for i in range(len(prompts))]
        return by_prompt if many else by_prompt[0]

    def _answers(
        self,
        requests: Sequence[Request],
        slots: int,
        logprobs: bool,
        streamer: Streamer | None,
        memory: Memory[Any, Any] | None,
    ) -> list[Output]:
        begun = time.perf_counter()
        collected = [_Collected(logprobs) for _ in requests]
        if streamer is not None:
            streamer.put(torch.tensor([requests[0].prompt]))
        for number, round_ in generate_many(
            self.target, self.drafter, self.policy, requests, slots, with_logits=logprobs, memory=memory
        ):
            collected[number].add(round_)
            if streamer is not None:
                streamer.put(torch.tensor(round_.tokens))
        if streamer is not None:
            streamer.end()
        share = (time.perf_counter() - begun) / sum(one.milliseconds for one in collected)
        answers = [Answer(one.rounds, one.milliseconds * share) for one in collected]
        sampling = requests[0].sampling  # figures are of free, greedy answers
        if self.figures and sampling.temperature == 0 and sampling.constraint is None:
            self._watch.see(answers, str(self.policy), self.figures)
        return [
            self.output(answer, len(request.prompt), request.stop, one.logprobs)
            for answer, request, one in zip(answers, requests, collected, strict=True)
        ]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[str]:
        """The text of `generate` piece by piece, whole characters only. Raises what `generate` raises."""
        request = self._requests([prompt], 1, options)[0]
        text = TextStream(request.stop, self.decode)
        for _, round_ in generate_many(self.target, self.drafter, self.policy, [request], 1, memory=self._memory):
            yield text.feed(round_)

    def _requests(self, prompts: Sequence[Prompt], n: int, options: Options) -> list[Request]:
        """n requests for each prompt, the first samples of all of them first."""
        settings = dict(options)
        max_new_tokens, stop = settings.pop("max_new_tokens", 256), settings.pop("stop", ())
        chat = settings.pop("chat", None)
        # popped above: what is left are `Settings`, which the types of dictionaries cannot say
        sampling = self.sampling(**settings)  # type: ignore[arg-type]
        stopping = self.stopping(max_new_tokens, stop)  # type: ignore[arg-type]
        ids = [self.encode(prompt, chat) for prompt in prompts]  # type: ignore[arg-type]
        return [
            Request(ids[i % len(ids)], replace(sampling, sample=sampling.sample + i), stopping)
            for i in range(n * len(ids))
        ]

    def output(self, answer: Answer, prompt_tokens: int, stop: Stop, logprobs: list[float] | None = None) -> Output:
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
            logprobs=logprobs,
        )

    def _tokenize(self, text: str, special: bool, what: str = "the prompt") -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{what} holds bytes that are no UTF-8 text") from error
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


class _Watch:
    """How often the first guess held in all answers of a model so far."""

    def __init__(self) -> None:
        self._hits = self._draws = 0
        self._warned = False

    def see(self, answers: Sequence[Answer], tree: str, figures: Sequence[Figures]) -> None:
        """Warn, once, where that is far below the head's figures."""
        hits, draws = first_draws(answers)
        self._hits, self._draws = self._hits + hits, self._draws + draws
        found = None if self._warned else shortfall(self._hits, self._draws, tree, figures)
        if found is not None:
            self._warned = True
            warnings.warn(found, stacklevel=4)


class _Collected:
    """The rounds of one answer as they arrive, without the logits that they came with."""

    def __init__(self, with_logprobs: bool) -> None:
        self.rounds: list[Round] = []
        self.logprobs: list[float] | None = [] if with_logprobs else None

    def add(self, round_: Round) -> None:
        if self.logprobs is not None:
            assert round_.logits_TV is not None, "the rounds came with their logits"
            logprobs_TV = round_.logits_TV.double().log_softmax(-1)
            self.logprobs += logprobs_TV[range(len(round_.tokens)), round_.tokens].tolist()
        self.rounds.append(replace(round_, logits_TV=None))

    @property
    def milliseconds(self) -> float:
        return sum(round_.draft_ms + round_.verify_ms + round_.other_ms for round_ in self.rounds)


def _processors(given: Iterable[Processor] | None) -> tuple[Processor, ...]:
    try:
        processors = () if given is None else tuple(given)
    except TypeError as error:
        raise InputError(f"logits_processor is a list of functions, got {given!r}") from error
    if not all(map(callable, processors)):
        raise InputError(f"logits_processor is a list of functions, got {given!r}")
    return processors


def _is_list(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Several prompts, or one? A list of texts or of lists is several; a list of messages or token ids is one."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], str) or (isinstance(prompt[0], Sequence) and not isinstance(prompt[0], bytes))


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
    guard: bool | None = None,
    device: str | torch.device | None = None,
) -> Model:
    """A model that decodes with a head.

    Arguments:
        target: a folder in transformers format, a GGUF file, a hub id (downloaded once), or "smollm2".
        head: a head's folder, a hub id, a shipped name ("smollm2-eagle3", "smollm2-eagle", "smollm2-medusa"),
            "lookup" (n-grams of the context), "small:" and a smaller model in the forms of `target`, or None ("none")
            for plain decoding.
        backend: "native" (the compiled CPU core), "eager" (transformers), or "auto": native where it supports the
            model, the dtype and the CPU, else eager; `target.spec.backend` says which.
        dtype: "bfloat16" (default on native), "int8" (native), "float32" (default on eager), "float64" (eager) or
            "float16" (eager, on a GPU).
        tree: a `Policy`, or "auto" (the tuned one where there is one, else a stated one), "chain:K", "static[:FILE]",
            "dynamic:levels=6,top_k=8,nodes=24", "adaptive:levels=8,top_k=10,nodes=59" (bounds: no more than pays) or
            "sampled:levels=3,width=2" (at temperatures above 0: the law of plain decoding, not its tokens).
        guard: fall back to plain decoding while drafting does not pay? None: with `tree="auto"`, where `eyas tune` has
            measured what rounds cost here. True measures it now if need be, which takes some seconds.
        device: "cpu" (default), or a GPU like "cuda": the eager back end then.

    Raises:
        InputError: one of them is unknown, broken, or does not fit the others.
    """
    for what, name in (("target", target), ("head", "none" if head is None else head)):
        if not isinstance(name, str):
            raise InputError(f"a {what} is a name or a folder, as a text, got {name!r}")
    place = choose_device(device)
    chosen = choose_backend(backend, dtype, place)
    if guard is not None and type(guard) is not bool:
        raise InputError(f"guard must be True, False or None, got {guard!r}")
    if not isinstance(tree, (str, Policy)):
        raise InputError(f"a tree is its name or a Policy, got {tree!r}")
    if isinstance(tree, str) and tree != "auto":
        tree = parse_policy(tree)  # refused now, not after loading
    loaded, tokenizer = _load_target(target, chosen, place, may_fall_back=backend == "auto")
    plain = Model(loaded, tokenizer, None, choose_policy("auto", loaded.spec, None))
    return with_head(plain, head, attach_head(head, loaded, tokenizer), tree, guard)


def with_head(
    plain: Model, head: str | None, drafter: Drafter[Any] | None, tree: str | Policy, guard: bool | None
) -> Model:
    """A model's target with the drafter of a head, and the tree and the guard that `load` takes.

    Raises:
        InputError: see `load`.
    """
    policy = tree if isinstance(tree, Policy) else choose_policy(tree, plain.target.spec, head)
    if head is not None and drafter is not None:
        policy = priced(policy, guard, tree == "auto", plain.target, head, drafter, lambda: _to_measure_on(plain))
    figures = promised(head) if head is not None and drafter is not None else ()
    return replace(plain, drafter=drafter, policy=policy, figures=figures)


def _to_measure_on(plain: Model) -> list[Request]:
    """Requests like what users ask, cut where they leave no room for an answer."""
    most = plain.target.spec.max_length // 2
    prompts = [plain.encode(item.text)[:most] for item in read_workload("mt_bench", 8)]
    return [Request(ids, plain.sampling(), plain.stopping(96)) for ids in prompts]


def _load_target(
    name: str, dtype: torch.dtype | str, device: torch.device, may_fall_back: bool
) -> tuple[Target[Any], PreTrainedTokenizerBase]:
    if isinstance(dtype, torch.dtype):
        return load_target(name, dtype, device)
    try:
        return load_native(name, dtype)
    except Unsupported:
        if not may_fall_back or dtype not in DTYPES:
            raise
        return load_target(name, DTYPES[dtype])


def attach_head(name: str | None, target: Target[Any], tokenizer: PreTrainedTokenizerBase) -> Drafter[Any] | None:
    """The drafter of a head's name or folder on a target's back end; None for plain decoding.

    Raises:
        InputError: see `load`.
    """
    if name is None or name == "none":
        return None
    if name == LOOKUP:
        return Lookup()
    if name.startswith(SMALL):
        return load_small(name, target, tokenizer)
    if isinstance(target, NativeTarget):
        return load_native_head(name, target)
    assert isinstance(target, EagerTarget), type(target)
    return load_head(name, target)


def choose_policy(tree: str, spec: TargetSpec, head: str | None) -> Policy:
    """A tree by its name, or what `auto_tree` finds.

    Raises:
        InputError: see `parse_policy`.
    """
    return auto_tree(spec, head)[0] if tree == "auto" else parse_policy(tree)


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device of a name; the CPU where none is given.

    Raises:
        InputError: there is no such device here.
    """
    try:
        chosen = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"unknown device {device!r}: give cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and (chosen.index or 0) >= count):
        here = "cpu" if count == 0 else f"cpu, cuda and cuda:0 to cuda:{count - 1}"
        raise InputError(f"there is no device {str(device)!r} that eyas runs on here: it runs on {here}")
    return chosen


def choose_backend(
    backend: str, dtype: str | torch.dtype | None, device: torch.device | None = None
) -> torch.dtype | str:
    """What to load: a torch dtype for the eager back end, the name of a form of weights for the native one.

    Raises:
        InputError: an unknown back end or dtype, or a pair that does not exist.
    """
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}: give one of {', '.join(BACKENDS)}")
    if name is not None and (not isinstance(name, str) or name not in (*DTYPES, *native.WEIGHTS)):
        raise InputError(f"unknown dtype {name!r}: give one of {', '.join(dict.fromkeys((*DTYPES, *native.WEIGHTS)))}")
    on_cpu = device is None or device.type == "cpu"
    if backend == "native" and not on_cpu:
        raise InputError(f"the native back end runs on the CPU, got the device {str(device)!r}: give --backend eager")
    if name == "float16" and on_cpu:
        raise InputError("float16 is for GPUs: on a CPU give bfloat16, int8 or float32")
    fits = on_cpu and native.fast_kernels() and (name is None or name in native.WEIGHTS)
    if backend == "native" or (backend == "auto" and fits):
        weights = name or "bfloat16"
        if weights not in native.WEIGHTS:
            raise InputError(f"the native back end runs {' or '.join(native.WEIGHTS)}, got {weights!r}")
        return weights
    if name is not None and name not in DTYPES:
        raise InputError(f"the eager back end runs {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name or "float32"]
