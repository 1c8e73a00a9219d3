"""Many answers at once, and one after the other: what runs beside an answer, or ran before it, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_target, tiny_tokenizer
from torch import Tensor
from transformers import TextStreamer

import eyas
from eyas import bench
from eyas.drafters.base import Drafter
from eyas.drafters.lookup import Lookup
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError
from eyas.generate import Memory, Request, generate, generate_many, generate_plain
from eyas.initial import new_head
from eyas.measure import timed
from eyas.model import Model
from eyas.policies import Chain, parse_policy
from eyas.prompts import read_workload
from eyas.sampling import Sampling
from eyas.targets.base import Target
from eyas.targets.eager import EagerTarget
from eyas.tree import Tree
from eyas.verify import Stop

POLICIES = ["chain:3", "static", "dynamic:levels=4,top_k=3,nodes=11"]


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: EagerTarget) -> Drafter:
    return new_head("eagle3", target).double().eval()


@pytest.fixture(scope="module")
def texts(target: EagerTarget) -> Model:
    """A tiny model with a tokenizer, float64."""
    model = tiny_target(vocab=260)
    return Model(model, tiny_tokenizer(), new_head("eagle3", model).double().eval(), parse_policy(POLICIES[2]))


def drafter_of(kind: str, target: EagerTarget) -> Drafter:
    if kind == "lookup":
        return Lookup()
    if kind == "small":
        return SmallModel(tiny_target(seed=1, layers=2))
    return new_head(kind, target).double().eval()


def requests(temperature: float, count: int = 6) -> list[Request]:
    """Prompts and budgets of different lengths, so that answers end at different times."""
    return [
        Request(
            [(3 + 7 * i + 5 * j) % VOCAB for j in range(1 + 4 * i)],
            Sampling(temperature, seed=5, sample=i),
            Stop(3 + 6 * ((i * 5) % 4)),
        )
        for i in range(count)
    ]


class Watched(Target):
    """A target that notes how many trees, and how many rows, each forward had."""

    def __init__(self, target: Target) -> None:
        self.target, self.spec = target, target.spec
        self.trees: list[int] = []
        self.rows: list[int] = []

    def new_cache(self) -> object:
        return self.target.new_cache()

    def verify(self, items: Sequence[tuple], reads: Sequence[int] = (), last_only: bool = False) -> list:
        self.trees.append(len(items))
        self.rows.append(sum(len(tree) for _, tree in items))
        return self.target.verify(items, reads, last_only)

    def keep(self, cache: object, path: Sequence[int]) -> None:
        self.target.keep(cache, path)

    def rewind(self, cache: object, length: int) -> None:
        self.target.rewind(cache, length)

    @property
    def embedding_VD(self) -> Tensor:
        return self.target.embedding_VD

    @property
    def head_VD(self) -> Tensor:
        return self.target.head_VD


@pytest.mark.parametrize("slots", [1, 2, 4, 99])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("policy", [*POLICIES, None])
def test_each_answer_is_its_own(
    target: EagerTarget, head: Drafter, policy: str | None, temperature: float, slots: int
) -> None:
    asked = requests(temperature)
    found: list[list[int]] = [[] for _ in asked]
    drafter = None if policy is None else head
    for number, round_ in generate_many(target, drafter, parse_policy(policy or "chain:1"), asked, slots):
        found[number] += round_.tokens
    for request, tokens in zip(asked, found, strict=True):
        assert tokens == timed(generate_plain(target, request.prompt, request.sampling, request.stop)).tokens


def test_a_request_is_admitted_when_another_ends(target: EagerTarget) -> None:
    watched = Watched(target)
    asked = [
        replace(request, stop=Stop(budget)) for request, budget in zip(requests(0.0), (2, 9, 2, 2, 2, 2), strict=True)
    ]
    list(generate_many(watched, None, Chain(1), asked, 2))
    prompts = [len(request.prompt) for request in asked]
    # two prompts, then a forward for both; the short one has ended, so the next prompt follows, and so on
    assert watched.rows == [
        prompts[0],
        prompts[1],
        2,
        prompts[2],
        2,
        prompts[3],
        2,
        prompts[4],
        2,
        prompts[5],
        2,
        1,
        1,
        1,
    ]
    assert max(watched.trees) == 2


def test_a_bad_prompt_costs_no_forward(target: EagerTarget) -> None:
    watched = Watched(target)
    asked = [*requests(0.0), Request([], Sampling(), Stop(3))]
    with pytest.raises(InputError, match="empty"):
        next(generate_many(watched, None, Chain(1), asked, 2))
    assert not watched.rows


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "lookup", "small", None])
def test_the_next_turn_is_read_from_where_it_parts(target: EagerTarget, kind: str | None) -> None:
    """Same tokens, same trees, as if nothing had been kept; and no row is computed twice but one."""
    drafter = None if kind is None else drafter_of(kind, target)
    policy, sampling, stop = parse_policy(POLICIES[2]), Sampling(0.9, seed=3), Stop(14)
    memory, watched = Memory(), Watched(target)
    first = [1, 8, 4, 4, 30, 7, 9]
    answer = timed(generate(watched, drafter, policy, first, sampling, stop, memory=memory)).tokens
    for prompt, most_rows in (
        ([*first, *answer, 5, 6], 2 + 1 + 1 + 5),  # the next turn; the last round's tokens were not observed yet
        (first, 2 + 5),
        ([*first[:4], 9, 9, 9], 3 + 1),
        ([50, 51], 2),
        ([50], 1),
        ([50, 51, 52], 3),
    ):
        watched.rows.clear()
        again = timed(generate(watched, drafter, policy, prompt, sampling, stop, memory=memory))
        fresh = timed(generate(target, drafter, policy, prompt, sampling, stop))
        assert again.tokens == fresh.tokens
        assert [round_.tree and round_.tree.tokens for round_ in again.rounds] == [
            round_.tree and round_.tree.tokens for round_ in fresh.rounds
        ]
        assert watched.rows[0] <= most_rows, prompt


def test_an_answer_that_is_broken_off_leaves_nothing(target: EagerTarget, head: Drafter) -> None:
    memory = Memory()
    prompt, settings = [1, 8, 4, 4, 30], (Sampling(), Stop(14))
    timed(generate(target, head, Chain(3), prompt, *settings, memory=memory))
    rounds = generate(target, head, Chain(3), prompt, *settings, memory=memory)
    next(rounds), next(rounds)
    assert memory.kept is None
    rounds.close()
    again = timed(generate(target, head, Chain(3), prompt, *settings, memory=memory))
    assert again.tokens == timed(generate_plain(target, prompt, *settings)).tokens


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_long_prompts_are_read_in_pieces(
    target: EagerTarget, head: Drafter, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(5 * i) % VOCAB for i in range(130)]
    whole = timed(generate(target, head, Chain(4), prompt, Sampling(), Stop(12)))
    monkeypatch.setattr("eyas.generate.PREFILL_ROWS", rows)
    watched = Watched(target)
    pieces = timed(generate(watched, head, Chain(4), prompt, Sampling(), Stop(12)))
    assert pieces.tokens == whole.tokens
    assert [round_.path for round_ in pieces.rounds] == [round_.path for round_ in whole.rounds]
    assert max(watched.rows) == max(rows, 5)
    assert timed(generate_plain(target, prompt, Sampling(), Stop(12))).tokens == whole.tokens


# -- through `eyas.Model` ----------------------------------------------------------------------------------------------


def test_lists_and_samples(texts: Model) -> None:
    prompts = ["one", "and two", "three of them"]
    settings = {"max_new_tokens": 9, "temperature": 1.0, "seed": 4}
    one = [texts.generate(prompt, sample=i, **settings).token_ids for i, prompt in enumerate(prompts)]
    assert [output.token_ids for output in texts.generate(prompts, batch_size=2, **settings)] == one
    both = texts.generate(prompts, n=2, **settings)
    assert [[output.token_ids for output in samples] for samples in both] == [
        [own, texts.generate(prompt, sample=3 + i, **settings).token_ids]
        for i, (own, prompt) in enumerate(zip(one, prompts, strict=True))
    ]
    samples = texts.generate(prompts[0], n=3, **settings)
    assert [output.token_ids for output in samples] == [
        texts.generate(prompts[0], sample=j, **settings).token_ids for j in range(3)
    ]
    assert isinstance(texts.generate([[5, 6, 7], [8]], max_new_tokens=2), list)
    assert isinstance(texts.generate([5, 6, 7], max_new_tokens=2), eyas.Output)
    conversation = [{"role": "user", "content": "hi"}]
    assert isinstance(texts.generate(conversation, max_new_tokens=2), eyas.Output)
    assert len(texts.generate([conversation, "hi"], max_new_tokens=2)) == 2


def test_the_next_turn_of_a_conversation(texts: Model) -> None:
    """The second call finds the first one's tokens and reads the new ones only."""
    model = replace(texts, target=Watched(texts.target))
    first = [{"role": "user", "content": "tell me something"}]
    answer = model.generate(first, max_new_tokens=20)
    ids = [*model.encode(first), *answer.token_ids, 9, 9, 9]
    model.target.rows.clear()
    again = model.generate(ids, max_new_tokens=8)
    assert model.target.rows[0] < 3 + 7
    assert again.token_ids == texts.generate([*ids], max_new_tokens=8).token_ids
    assert "".join(model.stream(ids, max_new_tokens=8)) == again.text


def test_logprobs_are_the_targets_own(texts: Model) -> None:
    output = texts.generate("abc", max_new_tokens=12, temperature=0.8, top_k=5, repetition_penalty=1.3, logprobs=True)
    ids = [*texts.encode("abc"), *output.token_ids]
    logits_TV = texts.target.verify([(texts.target.new_cache(), Tree.chain(ids))])[0].logits_NV
    expected = [float(logits_TV[i - 1].log_softmax(-1)[ids[i]]) for i in range(output.prompt_tokens, len(ids))]
    torch.testing.assert_close(torch.tensor(output.logprobs), torch.tensor(expected), rtol=0, atol=1e-5)
    assert texts.generate("abc", max_new_tokens=3).logprobs is None
    assert set(output.timing) == {"draft_ms", "verify_ms", "other_ms"}


def test_a_streamer_of_transformers(texts: Model, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(texts.tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = texts.generate("abc", max_new_tokens=12, streamer=streamer)
    assert capsys.readouterr().out == output.text + "\n"
    with pytest.raises(InputError, match="single"):
        texts.generate(["abc"], streamer=streamer)


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 1.5}, {"batch_size": 0}, {"max_new_tokens": 0}, {"stop": ("",)}])
def test_wrong_settings_are_refused(texts: Model, wrong: dict) -> None:
    with pytest.raises(InputError):
        texts.generate("abc", **wrong)


def test_bench_in_batches(texts: Model, tmp_path: Path) -> None:
    file = tmp_path / "w.txt"
    file.write_text("".join(f"prompt {i}\n" for i in range(7)))
    methods = [bench.Method(None, replace(texts, drafter=None)), bench.Method("x", texts)]
    settings = (read_workload(file, None), "w", Sampling(0.7))
    alone, answers_alone = bench.compare(methods, *settings, bench.How(10))
    batched, answers = bench.compare(methods, *settings, bench.How(10, batch=3))
    assert [row.batch for row in batched] == [3, 3]
    assert [row.identical for row in batched] == [row.identical for row in alone] == [7, 7]
    assert [[a.tokens for a in side] for side in answers] == [[a.tokens for a in side] for side in answers_alone]
    assert [row.tau for row in batched] == [row.tau for row in alone]
