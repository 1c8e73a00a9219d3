"""Methods side by side on the same prompts, in one alternated run: the rows of `eyas bench` and `eyas demo`.

Speed-up is total tokens over total time of each method on the same prompts with the same stop rules; plain always runs,
and each prompt (or batch of them) is answered by every method before the next one is begun, so that a drifting machine
slows all alike. Every other figure comes from `Round`s (`measure`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tqdm import tqdm

from eyas import measure
from eyas.errors import InputError
from eyas.generate import Memory, Request, Round, generate
from eyas.guard import Guarded
from eyas.machine import peak_memory_bytes
from eyas.measure import Answer, find_divergence, rounding, timed
from eyas.model import Message, Model
from eyas.prompts import Item
from eyas.sampling import Sampling
from eyas.tree import Tree


@dataclass(frozen=True)
class How:
    """How a comparison is run."""

    max_new_tokens: int
    batch: int = 1  # prompts that share their forwards
    all_turns: bool = False  # go on through each conversation, or stop after its first turn
    repeats: int = 1  # alternated runs, for the interval of what is timed
    traced: int = 0  # answers whose rounds are written down, for the report's tree viewer


@dataclass(frozen=True)
class Method:
    """A column of the comparison: a head with its tree, or plain decoding (`head` None)."""

    head: str | None
    model: Model  # with the head's drafter and the tree's policy

    @property
    def name(self) -> str:
        """`plain`, `lookup`, `small`, `eagle`, `eagle2` (an EAGLE-1 head under a dynamic tree) or `eagle3`."""
        if self.model.drafter is None:
            return "plain"
        if self.model.drafter.kind == "eagle" and self.model.policy.by_value:
            return "eagle2"
        return self.model.drafter.kind

    @property
    def keyed(self) -> bool:
        """Is its output held to plain decoding's, token for token? A sampled tree's has the same law, no more."""
        return self.model.drafter is None or self.model.policy.keyed

    @property
    def guarded(self) -> bool:
        """Does it fall back to plain rounds while drafting does not pay?"""
        return self.model.drafter is not None and isinstance(self.model.policy, Guarded)

    @property
    def tree(self) -> str | None:
        return None if self.model.drafter is None else str(self.model.policy)


@dataclass(frozen=True)
class Row:
    """A method's figures on a workload: one row of the JSON that `--json` prints. Rounds are those of the first run."""

    workload: str
    method: str
    head: str | None
    tree: str | None
    backend: str
    dtype: str
    temperature: float
    seed: int
    sequences: int
    new_tokens: int
    target_forwards: int
    tau: float | None
    alpha_by_depth: list[float]
    tokens_per_second: float
    speedup_vs_plain: float
    identical: int | None  # sequences equal to plain decoding's; None where the method does not claim it
    divergences: list[dict[str, object]]  # the first one of each sequence that is not; empty where it is not claimed
    draft_ms: float
    verify_ms: float
    other_ms: float
    peak_memory_bytes: int
    batch: int  # prompts that shared their forwards
    max_new_tokens: int
    turns: str  # "first" or "all"
    seconds: float  # of all runs
    runs: int
    tokens_per_second_interval: list[float] | None  # the slowest and the fastest run; None of a single one
    speedup_interval: list[float] | None  # the same of each run's speed over plain's in that run
    acceptance_by_depth: list[float]
    acceptance_by_rank: list[float]
    acceptance_by_depth_and_rank: list[list[float]]
    n_alpha: list[float] | None
    rejected_outside_vocabulary: float | None
    calibration: list[dict[str, float]]
    path_calibration: list[dict[str, float]]
    draft_ms_by_level: list[float]
    answers: list[dict[str, object]]  # with their rounds: the first few that were asked for
    guard: bool  # may it fall back to plain rounds?
    plain_forwards: int  # target forwards that nothing was drafted for


class _Talk:
    """One conversation, which goes on from plain decoding's answers."""

    def __init__(self, plain: Model, item: Item, sampling: Sampling, how: How) -> None:
        self._plain, self._sampling, self._stop = plain, sampling, plain.stopping(how.max_new_tokens)
        self.turns = item.turns if how.all_turns else item.turns[:1]
        self._messages = [] if item.system is None else [Message(role="system", content=item.system)]
        self.item = item
        self.turn = -1  # that was asked last
        self.request = Request([], sampling, self._stop)  # the last one

    def ask(self) -> bool:
        """Make the next turn's request; False where there is none, or no room for it in the context."""
        self.turn += 1
        if self.turn >= len(self.turns):
            return False
        self._messages.append(Message(role="user", content=self.turns[self.turn]))
        plain, alone = self._plain, len(self._messages) == 1  # a text needs no chat template
        ids = plain.encode(self.turns[0] if alone else self._messages)
        most = plain.target.spec.max_length
        if len(ids) >= most and self.turn == 0:
            raise InputError(f"the prompt {self.item.id!r} has {len(ids)} tokens; the target's context holds {most}, "
                             f"which must leave room for an answer")  # fmt: skip
        self.request = Request(ids, self._sampling, self._stop)
        return len(ids) < most

    def hear(self, answer: Answer) -> None:
        self._messages.append(Message(role="assistant", content=self._plain.decode(answer.tokens)))


def _talks(plain: Model, items: Sequence[Item], sampling: Sampling, how: How) -> list[_Talk]:
    """Conversations about to begin; prompt i is sample i of the keyed noise."""
    keyed = (replace(sampling, sample=sampling.sample + i) for i in range(len(items)))
    return [_Talk(plain, item, own, how) for item, own in zip(items, keyed, strict=True)]


def first_requests(plain: Model, items: Sequence[Item], sampling: Sampling, how: How) -> list[Request]:
    """What `compare` asks first of each conversation.

    Raises:
        InputError: the target's context has no room for an answer.
    """
    talks = _talks(plain, items, sampling, how)
    for talk in talks:
        talk.ask()
    return [talk.request for talk in talks]


def plain_answers(
    plain: Model, items: Sequence[Item], sampling: Sampling, how: How
) -> Iterator[tuple[Request, Answer]]:
    """What `compare` asks, turn by turn, and what plain decoding answers, which is what a replay needs of a bench.

    Raises:
        InputError: the target's context has no room for an answer.
    """
    for talk in _talks(plain, items, sampling, how):
        while talk.ask():
            (answer,) = _answers(plain, [talk.request], with_logits=False)
            talk.hear(answer)
            yield talk.request, answer


@dataclass
class _Column:
    """What a method has done so far on a workload."""

    method: Method
    answers: list[Answer] = field(default_factory=list)  # of the first run
    divergences: list[dict[str, object]] = field(default_factory=list)
    traced: list[dict[str, object]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # by run
    seconds: list[float] = field(default_factory=list)
    memory: Memory[Any, Any] | None = None  # of the conversation that is being held

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each run."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def speed(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def answer(self, requests: Sequence[Request], judged: bool) -> list[Answer]:
        model = self.method.model
        with_logits = judged and self.method.keyed and rounding(model.target.spec) > 0
        answers = _answers(model, requests, with_logits, self.memory)
        self.tokens[-1] += sum(len(answer.tokens) for answer in answers)
        self.seconds[-1] += sum(answer.seconds for answer in answers)
        return answers

    def keep(self, talk: _Talk, answer: Answer, plain: Answer, num_traced: int) -> None:
        """An answer, without its logits, and where it leaves plain decoding's."""
        if self.method.keyed:
            request, allowed = talk.request, rounding(self.method.model.target.spec)
            found = find_divergence(request.prompt, plain, answer, request.sampling, allowed)
            if found is not None:
                self.divergences.append({"id": talk.item.id, "turn": talk.turn, **asdict(found)})
        self.answers.append(answer.without_logits())
        if len(self.traced) < num_traced:
            self.traced.append(_written_down(self.method.model, talk, answer))


def compare(
    methods: Sequence[Method], items: Sequence[Item], workload: str, sampling: Sampling, how: How
) -> tuple[list[Row], list[list[Answer]]]:
    """Run every method on every conversation; a row for each method, and the answers by method and turn.

    `methods[0]` is plain decoding, which the others are compared with. Prompt i is sample i of the keyed noise. Methods
    take turns at `how.batch` prompts at a time, which share their forwards. A conversation ends before a turn that the
    target's context has no room for.
    """
    plain = methods[0].model
    assert plain.drafter is None, "the first method is plain decoding"
    requests = first_requests(plain, items, sampling, how)  # all of them first: a bad prompt costs no measurement
    several = how.all_turns and any(len(item.turns) > 1 for item in items)
    if several and plain.tokenizer.chat_template is None:
        raise InputError("the target has no chat template, which a conversation's later turns need: give --turns first")
    _warm_up(methods, requests[0])
    columns = [_Column(method) for method in methods]
    answers = sum(len(item.turns) if how.all_turns else 1 for item in items) * len(methods)
    with tqdm(total=answers * how.repeats, desc=workload, unit="answer") as bar:
        for run in range(how.repeats):
            for column in columns:
                column.tokens.append(0)
                column.seconds.append(0.0)
            everyone = _talks(plain, items, sampling, how)
            for first in range(0, len(items), how.batch):
                talks = everyone[first : first + how.batch]
                for column in columns:  # keys and values of earlier turns are kept for one conversation at a time
                    column.memory = Memory() if several and len(talks) == 1 else None
                _hold(talks, columns, how, judged=run == 0)
                bar.update(sum(len(talk.turns) for talk in talks) * len(methods))
    rows = [_row(workload, column, columns[0], sampling, how) for column in columns]
    return rows, [column.answers for column in columns]


def _hold(talks: Sequence[_Talk], columns: Sequence[_Column], how: How, judged: bool) -> None:
    """A few conversations with every method, turn by turn; answers are kept if they are to be judged."""
    while asked := [talk for talk in talks if talk.ask()]:
        answers = [column.answer([talk.request for talk in asked], judged) for column in columns]
        for i, talk in enumerate(asked):
            talk.hear(answers[0][i])
            for column, own in zip(columns, answers, strict=True) if judged else ():
                column.keep(talk, own[i], answers[0][i], how.traced)


def _answers(
    model: Model, requests: Sequence[Request], with_logits: bool, memory: Memory[Any, Any] | None = None
) -> list[Answer]:
    """Answers that share their forwards, each with an equal share of the time; one alone runs as `generate` does."""
    if len(requests) == 1:
        (request,) = requests
        settings = (request.prompt, request.sampling, request.stop, with_logits)
        if memory is None:
            return [timed(model.rounds(*settings))]
        return [timed(generate(model.target, model.drafter, model.policy, *settings, memory))]
    rounds: list[list[Round]] = [[] for _ in requests]
    begun = time.perf_counter()
    for number, round_ in model.many_rounds(requests, len(requests), with_logits):
        rounds[number].append(round_)
    seconds = (time.perf_counter() - begun) / len(requests)
    return [Answer(own, seconds) for own in rounds]


def _warm_up(methods: Sequence[Method], request: Request) -> None:
    for method in methods:
        _answers(method.model, [replace(request, stop=replace(request.stop, max_new_tokens=8))], with_logits=False)


def _row(workload: str, column: _Column, plain: _Column, sampling: Sampling, how: How) -> Row:
    method, answers, spec = column.method, column.answers, column.method.model.target.spec
    rounds = [round_ for answer in answers for round_ in answer.rounds]
    ratios = [own / other for own, other in zip(column.speeds, plain.speeds, strict=True)]
    drafter = method.model.drafter
    return Row(
        workload=workload,
        method=method.name,
        head=method.head,
        tree=method.tree,
        backend=spec.backend,
        dtype=str(spec.dtype).removeprefix("torch."),
        temperature=sampling.temperature,
        seed=sampling.seed,
        sequences=len(answers),
        new_tokens=sum(len(answer.tokens) for answer in answers),
        target_forwards=measure.target_forwards(answers),
        tau=measure.tau(answers),
        alpha_by_depth=measure.alpha_by_depth(answers),
        tokens_per_second=column.speed,
        speedup_vs_plain=column.speed / plain.speed,
        identical=len(answers) - len(column.divergences) if method.keyed else None,
        divergences=column.divergences,
        draft_ms=sum(round_.draft_ms for round_ in rounds),
        verify_ms=sum(round_.verify_ms for round_ in rounds),
        other_ms=sum(round_.other_ms for round_ in rounds),
        peak_memory_bytes=peak_memory_bytes(),
        batch=how.batch,
        max_new_tokens=how.max_new_tokens,
        turns="all" if how.all_turns else "first",
        seconds=sum(column.seconds),
        runs=how.repeats,
        tokens_per_second_interval=_interval(column.speeds),
        speedup_interval=_interval(ratios),
        acceptance_by_depth=measure.acceptance_by_depth(answers),
        acceptance_by_rank=measure.acceptance_by_rank(answers),
        acceptance_by_depth_and_rank=measure.acceptance_by_depth_and_rank(answers),
        n_alpha=measure.n_alpha(answers),
        rejected_outside_vocabulary=drafter and measure.rejected_outside_vocabulary(answers, drafter.can_propose),
        calibration=[asdict(bin_) for bin_ in measure.calibration(answers)],
        path_calibration=[asdict(bin_) for bin_ in measure.path_calibration(answers)],
        draft_ms_by_level=measure.level_ms(answers),
        answers=column.traced,
        guard=method.guarded,
        plain_forwards=measure.plain_forwards(answers),
    )


def _interval(of_runs: Sequence[float]) -> list[float] | None:
    return [min(of_runs), max(of_runs)] if len(of_runs) > 1 else None


def _written_down(model: Model, talk: _Talk, answer: Answer) -> dict[str, object]:
    """An answer and its rounds as plain data: trees with path values, what was accepted, and the texts of tokens."""
    seen = {token for round_ in answer.rounds for token in round_.tokens}
    rounds: list[dict[str, object]] = []
    for round_ in answer.rounds:
        tree = Tree((0,), (-1,)) if round_.tree is None else round_.tree
        rounds.append(
            {
                "tokens": list(tree.tokens) if round_.tree else None,
                "parents": list(tree.parents) if round_.tree else None,
                "values": [round(math.exp(score), 4) for score in tree.scores] if round_.tree else None,
                "path": round_.path,
                "delivered": round_.tokens,
            }
        )
        seen |= set(tree.tokens)
    return {
        "id": talk.item.id,
        "turn": talk.turn,
        "prompt": talk.item.turns[talk.turn],
        "rounds": rounds,
        "texts": {str(token): model.piece(token) for token in sorted(seen)},
    }


def unexplained(rows: Sequence[Row]) -> int:
    """Divergences that rounding does not account for: bugs."""
    return sum(not divergence["explained"] for row in rows for divergence in row.divergences)
