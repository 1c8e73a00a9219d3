"""Trees that were drawn: their law, the engine's law under them, stops, replays and refusals."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from test_lossless import PROMPT, NoRepeat, untrained
from test_verify import variant
from tiny import VOCAB, tiny_target
from torch import Tensor

import eyas.verify
from eyas.drafters.base import Candidates, Drafter
from eyas.errors import InputError
from eyas.generate import generate, generate_plain
from eyas.initial import new_head
from eyas.measure import tau, timed
from eyas.policies import Policy, Sampled, grow, parse_policy
from eyas.sampling import Prefix, Sampling
from eyas.targets.base import Target, Verified
from eyas.targets.eager import EagerTarget
from eyas.tree import DraftLaw, Tree
from eyas.verify import Stop

SMALL = 8  # tokens: laws of whole answers can be written down
Texts = list[list[int]]


@dataclass
class Scripted(Drafter):
    """Draws nothing itself: log-probabilities of all its tokens after a text, best first."""

    logits: Callable[[list[int]], Tensor]
    vocabulary: Sequence[int]
    kind = "eagle"
    reads = ()

    def new_state(self, first: int | None = None) -> Texts:
        return [[]]

    def observe(self, state: Texts, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        state[:] = [[*state[0], *tokens]]
        return self._candidates(state, width)

    def expand(self, state: Texts, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        new = [[*state[row], token] for row, token in zip(rows, tokens, strict=True)]
        state += new
        return self._candidates(new, width)

    def _candidates(self, texts: Texts, width: int) -> Candidates:
        logits_KQ = torch.stack([self.logits(text) for text in texts])
        best = logits_KQ.log_softmax(-1).topk(min(width, len(self.vocabulary)))
        return Candidates(torch.tensor(self.vocabulary)[best.indices], best.values)

    def can_propose(self, token: int) -> bool:
        return token in self.vocabulary

    def rewind(self, state: object, length: int) -> None:
        raise AssertionError("no second turn here")


class Remembered(Target[list[int]]):
    """A tiny model's logits after every text of up to `depth` tokens behind the prompt, computed once."""

    def __init__(self, target: EagerTarget, prompt: Sequence[int], depth: int) -> None:
        self.spec, self._start = target.spec, len(prompt)
        tree = self._all_texts(prompt[-1], depth)
        cache = target.new_cache()
        target.verify([(cache, Tree.chain(prompt[:-1]))], last_only=True)
        target.keep(cache, range(len(prompt) - 1))
        logits_NV = target.verify([(cache, tree)])[0].logits_NV
        self.after = {self._text(tree, n): logits_NV[n] for n in range(len(tree))}

    @staticmethod
    def _all_texts(root: int, depth: int) -> Tree:
        tokens, parents, level = [root], [-1], [0]
        for _ in range(depth):
            begin = len(tokens)
            tokens += list(range(SMALL)) * len(level)
            parents += [node for node in level for _ in range(SMALL)]
            level = list(range(begin, len(tokens)))
        return Tree(tuple(tokens), tuple(parents))

    @staticmethod
    def _text(tree: Tree, node: int) -> tuple[int, ...]:
        return tuple(tree.tokens[n] for n in tree.path(node)[1:])

    def new_cache(self) -> list[int]:
        return []

    def verify(
        self, items: Sequence[tuple[list[int], Tree]], reads: Sequence[int] = (), last_only: bool = False
    ) -> list[Verified]:
        found = []
        for cache, tree in items:
            nodes = [len(tree) - 1] if last_only else range(len(tree))
            texts = [(*cache, tree.tokens[0], *self._text(tree, node)) for node in nodes]
            logits_NV = torch.stack([self.after[text[self._start :]] for text in texts])
            found.append(Verified(logits_NV, torch.zeros(len(tree), 0, 1)))
            self._tree = tree
        return found

    def keep(self, cache: list[int], path: Sequence[int]) -> None:
        cache += [self._tree.tokens[node] for node in path]

    def rewind(self, cache: list[int], length: int) -> None:
        del cache[length:]

    embedding_VD = head_VD = property(lambda self: torch.empty(0))  # type: ignore[assignment]


@pytest.fixture(scope="module")
def small() -> Remembered:
    return Remembered(tiny_target(vocab=SMALL, layers=2), [1, 5, 3], depth=3)


def law(target: Remembered, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The chance of every answer of `length` tokens, from the target's logits."""
    chances = {(): 1.0}
    for _ in range(length):
        longer = {}
        for answer, chance in chances.items():
            scores_V = sampling.adjusted(target.after[answer], Prefix([1, 5, 3, *answer], 3))
            p_V = sampling.filtered(scores_V).softmax(-1).tolist()
            longer |= {(*answer, token): chance * p for token, p in enumerate(p_V) if p > 0}
        chances = longer
    return chances


def excess(answers: Sequence[tuple[int, ...]], chances: dict[tuple[int, ...], float], place: slice) -> float:
    """Chi-square of the answers' tokens at `place`, in standard deviations above its mean."""
    expected: Counter[tuple[int, ...]] = Counter()
    for answer, chance in chances.items():
        expected[answer[place]] += len(answers) * chance  # type: ignore[assignment]
    observed = Counter(answer[place] for answer in answers)
    assert observed.keys() <= expected.keys(), "an answer that the target rules out"
    rare = [key for key, number in expected.items() if number < 8]
    pairs = [(observed[key], number) for key, number in expected.items() if number >= 8]
    pairs += [(sum(observed[key] for key in rare), sum(expected[key] for key in rare))] if rare else []
    cells = [(o, e) for o, e in pairs if e > 0]
    total = sum((o - e) ** 2 / e for o, e in cells)
    degrees = len(cells) - 1  # cells of fewer than 8 expected answers are counted as one
    assert degrees >= 3, "cells enough to tell"
    return (total - degrees) / (2 * degrees) ** 0.5


def answers(target: Target, policy: Policy, sampling: Sampling, num: int) -> list[tuple[int, ...]]:
    """Four tokens each: one from the prompt, then a tree of two levels that may hold all of the rest but the last."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(SMALL, 4, SMALL - 2, generator=generator, dtype=torch.float64) * 1.5
    drafter = Scripted(lambda text: table[text[-1], len(text) % 4], (7, 0, 3, 4, 6, 1))
    return [
        tuple(
            token
            for round_ in generate(target, drafter, policy, [1, 5, 3], replace(sampling, sample=i), Stop(4), False)
            for token in round_.tokens
        )
        for i in range(num)
    ]


PLACES = [slice(1, 2), slice(2, 3), slice(3, 4), slice(1, 3), slice(2, 4)]  # of the answer, what a round delivered
LAWS = [
    Sampling(1.0, seed=3),
    Sampling(0.7, top_k=6, top_p=0.95, presence_penalty=0.9, seed=4),  # zeros in p, and a law that follows the prefix
]


@pytest.mark.parametrize(
    ("sampling", "policy"), [(LAWS[0], Sampled(2, 2)), (LAWS[1], Sampled(2, 2)), (LAWS[1], Sampled(1, 5))]
)
def test_answers_have_the_targets_law(small: Remembered, sampling: Sampling, policy: Sampled) -> None:
    found = answers(small, policy, sampling, 700)
    chances = law(small, sampling, 4)
    assert sum(chances.values()) == pytest.approx(1)
    for place in PLACES:
        assert excess(found, chances, place) < 4, place


@pytest.mark.parametrize("mistake", ["ratio upside down", "q not renormalised"])
def test_a_wrong_rule_changes_the_law_of_answers(
    small: Remembered, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    monkeypatch.setattr(eyas.verify, "accept_many", lambda *arguments: variant(*arguments, mistake))
    found = answers(small, Sampled(2, 3), LAWS[0], 400)
    chances = law(small, LAWS[0], 4)
    assert max(excess(found, chances, place) for place in PLACES) > 15


def test_a_wrong_draft_law_changes_the_law_of_answers(small: Remembered, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that says that it was drawn from another q than it was."""
    dense = DraftLaw.dense
    monkeypatch.setattr(DraftLaw, "dense", lambda self, size: (q := dense(self, size).sqrt()) / q.sum())
    found = answers(small, Sampled(2, 2), LAWS[0], 400)
    chances = law(small, LAWS[0], 4)
    assert max(excess(found, chances, place) for place in PLACES) > 15


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_law_of_answers_under_real_heads(kind: str) -> None:
    target = tiny_target(vocab=SMALL, layers=3)
    vocabulary = torch.tensor([0, 1, 3, 4, 6]) if kind == "eagle3" else None  # q has fewer tokens than p
    head = new_head(kind, target, vocabulary).double().eval()
    sampling = Sampling(1.0, seed=5)
    found = [
        tuple(timed(generate(target, head, Sampled(2, 2), [1, 5, 3], replace(sampling, sample=i), Stop(4))).tokens)
        for i in range(200)
    ]
    chances = law(Remembered(target, [1, 5, 3], depth=3), sampling, 4)
    for place in PLACES:
        assert excess(found, chances, place) < 4


# -- the tree ----------------------------------------------------------------------------------------------------------


def mirror(target: EagerTarget, vocabulary: Sequence[int] = range(VOCAB)) -> Scripted:
    """The target itself, as a drafter."""

    def logits(text: list[int]) -> Tensor:
        whole = Tree.chain([PROMPT[0], *text])
        return target.verify([(target.new_cache(), whole)], last_only=True)[0].logits_NV[0, list(vocabulary)]

    return Scripted(logits, vocabulary)


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target()


def drawn_tree(logits: Tensor, policy: Sampled, sampling: Sampling, position: int = 9, max_levels: int = 99) -> Tree:
    drafter = Scripted(lambda text: logits, range(len(logits)))
    state = drafter.new_state()
    first = drafter.observe(state, [4], torch.empty(0), policy.width)
    return grow(policy, drafter, state, 4, first, max_levels, sampling, position)


def test_a_drawn_tree_is_full_and_carries_its_laws() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    tree = drawn_tree(logits, Sampled(3, 2), Sampling(0.5, seed=1))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
    assert sorted(tree.laws) == list(range(7))
    q = (logits.double() / 0.5).softmax(-1)  # at the target's temperature
    for node, below in tree.laws.items():
        torch.testing.assert_close(below.dense(4), q, rtol=1e-6, atol=0)
        for child in tree.children(node):
            score = tree.scores[node] + float(q[tree.tokens[child]].log())
            assert tree.scores[child] == pytest.approx(score, rel=1e-5)
    assert len(drawn_tree(logits, Sampled(3, 2), Sampling(0.5), max_levels=2)) == 7
    assert len(drawn_tree(logits, Sampled(3, 2), Sampling(0.5), max_levels=0)) == 1
    assert tree.without_laws() == tree and not tree.without_laws().laws


def test_a_draft_under_filters_has_as_many_children_as_pass() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    tree = drawn_tree(logits, Sampled(2, 3), Sampling(1.0, top_k=2))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2)
    assert set(tree.tokens[1:]) == {1, 2}
    assert tree.laws[0].dense(4)[[0, 3]].tolist() == [0, 0]
    assert len(drawn_tree(logits, Sampled(2, 3), Sampling(5e-324))) == 3  # all of the mass on one token
    broken = drawn_tree(torch.full((4,), torch.nan), Sampled(), Sampling(1.0))
    assert (len(broken), broken.laws) == (1, {})
    assert len(Sampling(1.0, top_p=0.5).draft_law(torch.empty(0))) == 0  # a drafter may have nothing to say


def test_children_are_drawn_without_replacement() -> None:
    q, num = torch.tensor([0.55, 0.3, 0.15]), 3000
    seen: Counter[tuple[int, ...]] = Counter()
    for position in range(1000):  # three nodes of a tree, each with noise of its own
        tree = drawn_tree(q.log(), Sampled(2, 2), Sampling(1.0, seed=2), position)
        seen.update(tuple(tree.tokens[child] for child in tree.children(node)) for node in range(3))
    expected = {(a, b): num * float(q[a] * q[b] / (1 - q[a])) for a, b in itertools.permutations(range(3), 2)}
    assert seen.keys() == expected.keys()
    assert sum((seen[pair] - e) ** 2 / e for pair, e in expected.items()) < 20.52  # 5 degrees of freedom, 0.1 %


def test_noise_of_a_tree_is_keyed() -> None:
    logits = torch.zeros(1000)
    sampling = Sampling(1.0, seed=1, sample=2)
    tree = drawn_tree(logits, Sampled(3, 2), sampling)
    assert tree == drawn_tree(logits, Sampled(3, 2), sampling)
    assert len(set(tree.tokens)) > 12, "no two nodes share their noise"
    others = [replace(sampling, seed=2), replace(sampling, sample=3)]
    assert all(tree != drawn_tree(logits, Sampled(3, 2), other) for other in others)
    assert tree != drawn_tree(logits, Sampled(3, 2), sampling, position=10)
    plain = sampling.draw(logits, Prefix(range(9), 0))
    assert plain not in tree.tokens[1:3], "not the noise that the target draws with"


def test_every_round_has_noise_of_its_own(target: EagerTarget) -> None:
    flat = Scripted(lambda text: torch.zeros(VOCAB), range(VOCAB))
    answer = timed(generate(target, flat, Sampled(2, 2), PROMPT, Sampling(1.0, seed=1), Stop(20)))
    first = [round_.tree.tokens[1:3] for round_ in answer.rounds if round_.tree is not None and len(round_.tree) > 2]
    assert len(set(first)) == len(first) > 10


def test_trees_without_a_law_for_each_inner_node_are_refused() -> None:
    below = DraftLaw(torch.arange(3), torch.ones(3).double() / 3)
    with pytest.raises(ValueError, match="law for each node"):
        Tree((1, 2, 0), (-1, 0, 1), (), {0: below})
    with pytest.raises(ValueError, match="law for each node"):
        Tree((1, 2), (-1, 0), (), {0: below, 1: below})


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sampled:levels=1,width=1", "sampled:levels=4,width=1", "sampled:levels=2,width=3"])
def test_self_drafting_delivers_levels_plus_one(target: EagerTarget, policy: str) -> None:
    """Where q is p the first candidate is always accepted: filters, temperature and all."""
    parsed, rounds = parse_policy(policy), 5
    stop = Stop(1 + rounds * (parsed.levels + 1))
    answer = timed(generate(target, mirror(target), parsed, PROMPT, Sampling(0.8, top_p=0.9, seed=6), stop))
    assert tau([answer]) == parsed.levels + 1
    assert len(set(answer.tokens)) > 3


def test_the_same_key_gives_the_same_answer(target: EagerTarget) -> None:
    head = untrained("eagle3", target)

    def run(policy: str, **key: int) -> list[int]:
        return timed(generate(target, head, parse_policy(policy), PROMPT, Sampling(1.0, **key), Stop(30))).tokens

    assert run("sampled") == run("sampled")
    assert run("sampled") != run("sampled", seed=1)
    assert run("sampled") != run("sampled", sample=1)
    assert run("sampled") != timed(generate_plain(target, PROMPT, Sampling(1.0), Stop(30))).tokens


@pytest.mark.parametrize("budget", range(1, 10))
def test_budgets_end_inside_a_path(target: EagerTarget, budget: int) -> None:
    answer = timed(generate(target, mirror(target), Sampled(3, 2), PROMPT, Sampling(1.0), Stop(budget)))
    assert (len(answer.tokens), answer.rounds[-1].finish_reason) == (budget, "length")
    whole = timed(generate(target, mirror(target), Sampled(3, 2), PROMPT, Sampling(1.0), Stop(12))).tokens
    # the last tree has fewer levels, drawn as before; its last token is no candidate any more but the target's own draw
    assert answer.tokens[:-1] == whole[: budget - 1]


def test_end_tokens_and_stop_strings_inside_a_path(target: EagerTarget) -> None:
    def decode(ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    def run(stop: Stop) -> tuple[list[int], str | None]:
        answer = timed(generate(target, mirror(target), Sampled(3, 2), PROMPT, Sampling(1.0, seed=2), stop))
        return answer.tokens, answer.rounds[-1].finish_reason

    tokens, _ = run(Stop(13))
    for place in range(1, 12):
        assert run(Stop(13, eos_ids=(tokens[place],))) == (tokens[: tokens.index(tokens[place]) + 1], "stop")
        at_string = Stop(13, strings=(decode(tokens[place : place + 2]),), decode=decode)
        stopped, reason = run(at_string)
        assert (stopped, reason) == (tokens[: len(stopped)], "stop")
        assert at_string.cut(decode(stopped)) is not None and at_string.cut(decode(stopped[:-1])) is None


def test_processors_see_each_prefix_once(target: EagerTarget) -> None:
    seen: list[list[int]] = []

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return NoRepeat()(ids, scores)

    head = untrained("eagle", target)
    sampling = Sampling(0.9, processors=(processor,), seed=3)
    tokens = timed(generate(target, head, Sampled(3, 3), PROMPT, sampling, Stop(30))).tokens
    assert seen == [[*PROMPT, *tokens[:place]] for place in range(30)]
    assert all(token not in [*PROMPT, *tokens][place + 1 : place + 5] for place, token in enumerate(tokens))


def test_laws_are_kept_only_where_logits_are(target: EagerTarget) -> None:
    head = untrained("eagle", target)
    for with_logits in (True, False):
        answer = timed(generate(target, head, Sampled(), PROMPT, Sampling(1.0), Stop(9), with_logits))
        assert all(bool(r.tree is not None and r.tree.laws) == with_logits for r in answer.rounds[1:-1])
        assert not any(r.tree is not None and r.tree.laws for r in answer.without_logits().rounds)


def test_logits_that_are_not_numbers_are_refused() -> None:
    for logits in (torch.tensor([0.0, torch.nan]), torch.tensor([-torch.inf, -torch.inf])):
        with pytest.raises(FloatingPointError):
            Sampling(1.0).probabilities(logits, Prefix([1], 1))


# -- names and refusals ------------------------------------------------------------------------------------------------


def test_parse() -> None:
    assert parse_policy("sampled") == parse_policy("sampled:") == Sampled(3, 2)
    assert parse_policy("sampled:width=4,levels=1") == Sampled(1, 4)
    assert str(parse_policy("sampled:width=4")) == "sampled:levels=3,width=4"


@pytest.mark.parametrize(
    "text",
    ["sampled:3", "sampled:levels=0", "sampled:width=0", "sampled:top_k=3", "sampled:levels=", "sampled:levels=-1"]
    + ["sampled:levels=10,width=10", "sampled:levels=999999999", "sampled:width=" + "9" * 5000],
)
def test_refuses_impossible_trees(text: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_policy(text)
    assert "sampled" in str(refusal.value)


def test_refuses_temperature_0(target: EagerTarget) -> None:
    with pytest.raises(InputError, match="temperature above 0"):
        next(generate(target, untrained("eagle", target), Sampled(), PROMPT, Sampling(), Stop(4)))
