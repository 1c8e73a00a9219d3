"""Methods side by side on the same prompts, in one alternated run: the rows of `eyas bench` and `eyas demo`.

Speed-up is total tokens over total time of each method on the same prompts with the same stop rules; plain always runs,
and each prompt (or batch of them) is answered by every method before the next one is begun, so that a drifting machine
slows all alike.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from eyas.errors import InputError, one_line
from eyas.generate import Request, Round
from eyas.measure import Answer, Divergence, alpha_by_depth, find_divergence, rounding, target_forwards, tau, timed
from eyas.model import Model
from eyas.native import cpu_features, threads_in_use
from eyas.policies import Dynamic
from eyas.sampling import Sampling


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
        if self.model.drafter.kind == "eagle" and isinstance(self.model.policy, Dynamic):
            return "eagle2"
        return self.model.drafter.kind

    @property
    def keyed(self) -> bool:
        """Is its output held to plain decoding's, token for token? A sampled tree's has the same law, no more."""
        return self.model.drafter is None or self.model.policy.keyed

    @property
    def tree(self) -> str | None:
        return None if self.model.drafter is None else str(self.model.policy)


@dataclass(frozen=True)
class Row:
    """A method's figures on a workload: one row of the JSON that `--json` prints."""

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


@dataclass(frozen=True)
class Item:
    """One prompt of a workload."""

    id: str
    text: str


def read_workload(path: Path, limit: int | None) -> list[Item]:
    """First turns of a workload file: JSONL with `turns` (and `id`), or plain text, one prompt a line.

    Raises:
        InputError: the file cannot be read, a line is malformed (named), or there is no prompt in it.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON may hold other line ends
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path that cannot be
        raise InputError(f"cannot read the workload {str(path)!r}: {one_line(error)}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(items) >= limit:
            break
        if line.strip():
            items.append(_item(line, path, number))
    if not items:
        raise InputError(f"the workload {str(path)!r} holds no prompt")
    return items


def _item(line: str, path: Path, number: int) -> Item:
    if path.suffix != ".jsonl":
        return Item(str(number), line)
    try:
        record = json.loads(line)
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise TypeError
        return Item(str(record.get("id", number)), turns[0])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: expected an object with turns, a list of texts") from error


def compare(
    methods: Sequence[Method],
    items: Sequence[Item],
    workload: str,
    sampling: Sampling,
    max_new_tokens: int,
    batch: int = 1,
) -> tuple[list[Row], list[list[Answer]]]:
    """Run every method on every prompt; a row for each method, and the answers by method and prompt.

    `methods[0]` is plain decoding, which the others are compared with. Prompt i is sample i of the keyed noise. Methods
    take turns at `batch` prompts at a time, which share their forwards.
    """
    assert methods[0].model.drafter is None, "the first method is plain decoding"
    stop = methods[0].model.stopping(max_new_tokens)
    prompts = [_encode(methods[0].model, item) for item in items]  # all of them first: a bad one costs no measurement
    requests = [Request(ids, replace(sampling, sample=sampling.sample + i), stop) for i, ids in enumerate(prompts)]
    _warm_up(methods, requests[0])
    allowed = rounding(methods[0].model.target.spec)
    answers: list[list[Answer]] = [[] for _ in methods]
    divergences: list[list[dict[str, object]]] = [[] for _ in methods]
    with tqdm(total=len(items) * len(methods), desc=workload, unit="answer") as bar:
        for first in range(0, len(items), batch):
            turn = requests[first : first + batch]
            for m, method in enumerate(methods):
                answers[m] += _answers(method.model, turn, with_logits=method.keyed and allowed > 0)
                for i, request in enumerate(turn, start=first) if method.keyed else ():
                    found = find_divergence(request.prompt, answers[0][i], answers[m][i], request.sampling, allowed)
                    if found is not None:
                        divergences[m].append(_record(items[i], found))
                bar.update(len(turn))
            for side in answers:
                side[first:] = [answer.without_logits() for answer in side[first:]]
    rows = [
        _row(workload, method, answers[m], answers[0], divergences[m], sampling, batch)
        for m, method in enumerate(methods)
    ]
    return rows, answers


def _answers(model: Model, requests: Sequence[Request], with_logits: bool) -> list[Answer]:
    """Answers that share their forwards, each with an equal share of the time; one alone runs as `generate` does."""
    if len(requests) == 1:
        (request,) = requests
        return [timed(model.rounds(request.prompt, request.sampling, request.stop, with_logits))]
    rounds: list[list[Round]] = [[] for _ in requests]
    begun = time.perf_counter()
    for number, round_ in model.many_rounds(requests, len(requests), with_logits):
        rounds[number].append(round_)
    seconds = (time.perf_counter() - begun) / len(requests)
    return [Answer(own, seconds) for own in rounds]


def _encode(model: Model, item: Item) -> list[int]:
    ids = model.encode(item.text)
    if len(ids) >= model.target.spec.max_length:
        raise InputError(f"the prompt {item.id!r} has {len(ids)} tokens; the target's context holds "
                         f"{model.target.spec.max_length}, which must leave room for an answer")  # fmt: skip
    return ids


def _warm_up(methods: Sequence[Method], request: Request) -> None:
    for method in methods:
        _answers(method.model, [replace(request, stop=replace(request.stop, max_new_tokens=8))], with_logits=False)


def _record(item: Item, divergence: Divergence) -> dict[str, object]:
    return {"id": item.id, **asdict(divergence)}


def _row(
    workload: str,
    method: Method,
    answers: Sequence[Answer],
    plain: Sequence[Answer],
    divergences: list[dict[str, object]],
    sampling: Sampling,
    batch: int,
) -> Row:
    rounds = [round_ for answer in answers for round_ in answer.rounds]
    speed, plain_speed = (
        sum(len(answer.tokens) for answer in side) / sum(answer.seconds for answer in side) for side in (answers, plain)
    )
    return Row(
        workload=workload,
        method=method.name,
        head=method.head,
        tree=method.tree,
        backend=method.model.target.spec.backend,
        dtype=str(method.model.target.spec.dtype).removeprefix("torch."),
        temperature=sampling.temperature,
        seed=sampling.seed,
        sequences=len(answers),
        new_tokens=sum(len(answer.tokens) for answer in answers),
        target_forwards=target_forwards(answers),
        tau=tau(answers),
        alpha_by_depth=alpha_by_depth(answers),
        tokens_per_second=speed,
        speedup_vs_plain=speed / plain_speed,
        identical=len(answers) - len(divergences) if method.keyed else None,
        divergences=divergences,
        draft_ms=sum(round_.draft_ms for round_ in rounds),
        verify_ms=sum(round_.verify_ms for round_ in rounds),
        other_ms=sum(round_.other_ms for round_ in rounds),
        peak_memory_bytes=peak_memory_bytes(),
        batch=batch,
    )


def unexplained(rows: Sequence[Row]) -> int:
    """Divergences that rounding does not account for: bugs."""
    return sum(not divergence["explained"] for row in rows for divergence in row.divergences)


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine() -> dict[str, object]:
    """What a figure must stand beside."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.processor()
    )
    features = [name for name, found in (cpu_features() or {}).items() if found]
    return {"cpu": model, "features": features, "system": platform.platform(), "threads": threads_in_use()}


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def versions() -> dict[str, str]:
    """Versions that figures depend on."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def table(rows: Sequence[Row]) -> str:
    """Rows for people."""
    lines = [
        f"{'method':8} {'tree':40} {'tau':>5} {'tokens/s':>9} {'speed-up':>8} {'identical':>9}  draft/verify/rest %"
    ]
    for row in rows:
        parts = (row.draft_ms, row.verify_ms, row.other_ms)
        shares = "/".join(f"{100 * part / sum(parts):.0f}" for part in parts)
        tau_text = "-" if row.tau is None else f"{row.tau:.2f}"
        same = "-" if row.identical is None else f"{row.identical:4}/{row.sequences:<4}"
        lines.append(
            f"{row.method:8} {row.tree or '-':40} {tau_text:>5} {row.tokens_per_second:9.1f} "
            f"{row.speedup_vs_plain:7.2f}x {same:>9}  {shares}"
        )
    return "\n".join(lines)
