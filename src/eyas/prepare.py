"""From conversations to the target's own answers: sampled here, asked of an endpoint, or kept as the file has them.

Turn by turn: each question is asked after the target's own answers to those before. Sampled token ids are kept as they
were drawn, never made from text again. All conversations in the making share their forwards (`generate.Pool`), across
turns and shards. Refuses to know command lines, and how shards look (`prepared`).
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from eyas.conversations import Conversation, Turn
from eyas.data import Sequence
from eyas.endpoint import Endpoint, EndpointError, Reply
from eyas.errors import InputError
from eyas.generate import Pool, Request, Round
from eyas.masks import ChatTemplate, join
from eyas.model import Model
from eyas.prepared import Answered, Figures, Finish, Folder
from eyas.verify import FinishReason

SHARD = 256  # conversations


@dataclass(frozen=True)
class Settings:
    """How answers are made. Conversation i takes the temperature at place i modulo their number, and is sample i of the
    keyed noise."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 512  # of an answer
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise InputError("answers need at least one temperature")

    def temperature(self, number: int) -> float:
        return self.temperatures[number % len(self.temperatures)]


class Source(Protocol):
    """Where answers come from: `Kept`, `Sampled` or `Asked`."""

    template: ChatTemplate
    settings: dict[str, object]  # that the answers depend on: plain JSON values

    def check(self, conversation: Conversation) -> None:
        """Refuse what cannot be answered, before anything slow.

        Raises:
            InputError: the chat template refuses the conversation, or it lacks what this source needs.
        """
        ...

    def answers(self, conversations: Iterable[tuple[int, Conversation]]) -> Iterator[Answered]:
        """Numbered conversations, each as soon as it is answered: in any order."""
        ...


@dataclass(frozen=True)
class Result:
    """What `prepare` did."""

    whole: Figures  # of the folder
    new: Figures  # of this run
    seconds: float  # of this run
    redone: list[str]  # files that were broken


def prepare(
    conversations: Seq[Conversation], source: Source, made_for: dict[str, str], path: Path, shard: int = SHARD
) -> Result:
    """Answer all conversations into a folder, going on where an earlier run stopped. Whatever ends a run (Ctrl-C, an
    endpoint that died, a full disk), what it has finished is kept as far as the disk allows.

    Arguments:
        made_for: the target's fingerprint.
        shard: conversations of one.

    Raises:
        InputError: a conversation cannot be answered, or the folder holds answers that were made otherwise.
        EndpointError: the endpoint does not answer.
    """
    for conversation in tqdm(conversations, desc="checking", unit="conversation", delay=2, leave=False):
        with _naming(conversation):
            source.check(conversation)
    header = {
        "target": made_for,
        "settings": source.settings,
        "prompts": _digest(conversations),
        "conversations": len(conversations),
        "shard": shard,
    }
    folder = Folder(path, header)
    redone, missing = folder.broken(), folder.missing()
    new, begun = Figures(), time.perf_counter()
    with tqdm(total=len(conversations), initial=len(conversations) - len(missing), unit="conversation") as bar:
        try:
            for answered in source.answers((number, conversations[number]) for number in missing):
                new += Figures.of([answered])
                folder.add(answered)
                rate = new.answer_tokens / (time.perf_counter() - begun)
                bar.set_postfix_str(f"{rate:.0f} new tokens/s", refresh=False)
                bar.update()
        finally:
            folder.close()
    return Result(folder.figures(), new, time.perf_counter() - begun, redone)


class Kept:
    """The file's own answers."""

    def __init__(self, template: ChatTemplate, max_length: int) -> None:
        self.template, self._max_length = template, max_length
        self.settings: dict[str, object] = {"answers": "given"}

    def check(self, conversation: Conversation) -> None:
        self._sequences(conversation)

    def answers(self, conversations: Iterable[tuple[int, Conversation]]) -> Iterator[Answered]:
        for number, conversation in conversations:
            whole = self._sequences(conversation)
            fitting = tuple(cut for sequence in whole if (cut := _cut_at_turn(sequence, self._max_length)) is not None)
            finishes: tuple[Finish, ...] = ("given",) * len(fitting)
            cut = fitting != tuple(whole)
            yield Answered(number, conversation.line, float("nan"), fitting, finishes, cut)

    def _sequences(self, conversation: Conversation) -> list[Sequence]:
        turns = list(takewhile(lambda turn: turn.answer is not None, conversation.turns))
        if not turns:
            raise InputError("the conversation has no assistant's turn, whose answer could be kept")
        return self.template.answered(conversation.messages(turns))


def _cut_at_turn(sequence: Sequence, max_length: int) -> Sequence | None:
    """A sequence up to the end of the last answer that fits."""
    spans = tuple(span for span in sequence.spans if span[1] <= max_length)
    return Sequence(sequence.tokens[: spans[-1][1]], spans) if spans else None


class Sampled:
    """A model of eyas, many conversations at once."""

    def __init__(self, model: Model, settings: Settings, slots: int) -> None:
        """`slots`: answers that share every forward."""
        spec = model.target.spec
        self._model, self._how, self._slots = model, settings, slots
        self.template = ChatTemplate(model.tokenizer, spec.eos_ids)
        self.settings: dict[str, object] = {"answers": "sampled", **asdict(settings)}
        self.settings["repetition_penalty"] = spec.repetition_penalty
        self._sampling = [model.sampling(temperature=t, seed=settings.seed) for t in settings.temperatures]
        model.stopping(settings.max_new_tokens)  # refused now

    def check(self, conversation: Conversation) -> None:
        _check(self.template, conversation)

    def answers(self, conversations: Iterable[tuple[int, Conversation]]) -> Iterator[Answered]:
        pool = Pool(self._model.target, self._model.drafter, self._model.policy)
        waiting = iter(conversations)
        talks: dict[int, _Talk] = {}
        listening: list[_Talk] = []  # they have got an answer, and may have a further question
        while True:
            while len(pool) < self._slots:
                talk = listening.pop() if listening else self._begin(next(waiting, None))
                if talk is None:
                    break
                talks[talk.number] = talk
                prompt = talk.prompt()
                if prompt is None:
                    yield talks.pop(talk.number).result()
                elif self._hear(talk, pool.admit(talk.number, self._request(talk, prompt))):
                    listening.append(talk)
            if not talks:
                return
            listening += [talks[number] for number, round_ in pool.step() if self._hear(talks[number], round_)]

    def _begin(self, entry: tuple[int, Conversation] | None) -> _Talk | None:
        return None if entry is None else _Talk(*entry, self._how, self.template, self._model.target.spec.max_length)

    def _request(self, talk: _Talk, prompt: list[int]) -> Request:
        sampling = self._sampling[talk.number % len(self._sampling)]
        stop = self._model.stopping(self._how.max_new_tokens)
        return Request(prompt, replace(sampling, sample=talk.number), stop)

    def _hear(self, talk: _Talk, round_: Round) -> bool:
        """Take what one forward adds to an answer; has the answer ended?"""
        talk.response += round_.tokens
        if round_.finish_reason is None:
            return False
        talk.take(self._model.decode(talk.response), round_.finish_reason)
        return True


class Asked:
    """An endpoint that serves the target; conversations are asked side by side, the turns of each in their order."""

    def __init__(
        self, endpoint: Endpoint, template: ChatTemplate, max_length: int, settings: Settings, concurrency: int
    ) -> None:
        """`max_length`: tokens of the context."""
        self.template = template
        self.settings: dict[str, object] = {"answers": f"of {endpoint.model}", **asdict(settings)}
        self._endpoint, self._how, self._concurrency = endpoint, settings, concurrency
        self._max_length, self._end = max_length, template.end_of_turn()
        self._lock = threading.Lock()  # tokenizers are not for several threads at once

    def check(self, conversation: Conversation) -> None:
        _check(self.template, conversation)

    def answers(self, conversations: Iterable[tuple[int, Conversation]]) -> Iterator[Answered]:
        """Raises EndpointError."""
        todo: queue.SimpleQueue[tuple[int, Conversation] | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[Answered | Exception] = queue.SimpleQueue()
        for _ in range(self._concurrency):  # daemons: whoever interrupts waits for no answer
            threading.Thread(target=self._work, args=(todo, done), daemon=True).start()
        try:
            flying = 0
            for entry in conversations:
                if flying == 2 * self._concurrency:
                    yield _got(done)
                    flying -= 1
                todo.put(entry)
                flying += 1
            for _ in range(flying):
                yield _got(done)
        finally:  # nothing more is asked, whatever ended this
            with suppress(queue.Empty):
                while True:
                    todo.get_nowait()
            for _ in range(self._concurrency):
                todo.put(None)

    def _work(self, todo: queue.SimpleQueue, done: queue.SimpleQueue) -> None:
        while (entry := todo.get()) is not None:
            try:
                done.put(self._converse(*entry))
            except Exception as error:  # raised where it is seen
                done.put(error)

    def _converse(self, number: int, conversation: Conversation) -> Answered:
        talk = _Talk(number, conversation, self._how, self.template, self._max_length)
        while True:
            with self._lock:
                prompt = talk.prompt(anew=True)  # the endpoint has texts only, and makes tokens of them
            if prompt is None:
                return talk.result()
            room = min(self._how.max_new_tokens, self._max_length - len(prompt))
            seed = self._how.seed + number
            reply = self._endpoint.answer(talk.messages(), talk.temperature, room, seed)
            with self._lock:
                talk.response = self._tokens(reply, prompt)
                talk.take(reply.text, reply.finish)

    def _tokens(self, reply: Reply, prompt: list[int]) -> list[int]:
        """The answer's tokens: the endpoint's, else those of its text; the end token where it finished by that."""
        if reply.prompt_ids is not None and reply.prompt_ids != prompt:
            raise EndpointError(f"the endpoint's model {self._endpoint.model!r} has another tokenizer or chat template "
                                f"than the target: of one conversation it makes {len(reply.prompt_ids)} tokens, not "
                                f"the same {len(prompt)}")  # fmt: skip
        tokens = self.template.encode(reply.text) if reply.token_ids is None else reply.token_ids
        ended = bool(tokens) and tokens[-1] in self.template.eos_ids
        return [*tokens, self._end] if reply.finish == "stop" and not ended else tokens


def _got(done: queue.SimpleQueue) -> Answered:
    result = done.get()
    if isinstance(result, Exception):
        raise result
    return result


class _Talk:
    """One conversation in the making."""

    def __init__(
        self, number: int, conversation: Conversation, settings: Settings, template: ChatTemplate, max_length: int
    ) -> None:
        self.number, self.temperature = number, settings.temperature(number)
        self.response: list[int] = []  # the answer in the making
        self._conversation, self._template, self._max_length = conversation, template, max_length
        self._prompt: list[int] = []
        self._turns: list[Turn] = []  # with their answers
        self._sequences: list[Sequence] = []
        self._finishes: list[Finish] = []
        self._cut = False

    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, up to the question that is to be answered."""
        return self._conversation.messages(self._turns)

    def prompt(self, anew: bool = False) -> list[int] | None:
        """The tokens to be answered next; None at the conversation's end, or where it is cut.

        Arguments:
            anew: make all of the tokens from text, those of earlier answers too.
        """
        if len(self._turns) == len(self._conversation.turns) or self._cut:
            return None
        with _naming(self._conversation):
            if self._turns and not anew:
                tokens = self._template.next_prompt([*self._prompt, *self.response], self.messages())
            else:
                tokens = self._template.prompt(self.messages())
        self._cut = len(tokens) >= self._max_length
        self._prompt, self.response = tokens, []
        return None if self._cut else tokens

    def take(self, text: str, finish: FinishReason) -> None:
        """The answer in the making has ended."""
        if self.response:
            span = (len(self._prompt), len(self._prompt) + len(self.response))
            join(self._sequences, [*self._prompt, *self.response], span)
            self._finishes = [*self._finishes[: len(self._sequences) - 1], finish]
        self._turns.append(Turn(self._conversation.turns[len(self._turns)].user, text))
        # what was broken off has no end token, and a next question would follow half an answer
        self._cut = finish == "length" and len(self._turns) < len(self._conversation.turns)

    def result(self) -> Answered:
        how = (self.number, self._conversation.line, self.temperature)
        return Answered(*how, tuple(self._sequences), tuple(self._finishes), self._cut)


def _check(template: ChatTemplate, conversation: Conversation) -> None:
    """Refuse a conversation that the chat template will not write; what will be answered is not known yet."""
    template.check(conversation.messages([Turn(turn.user, "x") for turn in conversation.turns[:-1]]))


def _digest(conversations: Seq[Conversation]) -> str:
    """Of what is asked, and what is answered in the file: not of where it stands."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(repr((conversation.system, conversation.turns)).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _naming(conversation: Conversation) -> Iterator[None]:
    """What is refused about a conversation is said with its place in the file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{conversation.where}: {error}") from error
