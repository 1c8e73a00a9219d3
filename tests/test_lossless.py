"""The property that eyas stands on: speculative output equals plain output, token for token.

Float64 on tiny models, where equality is absolute: drafters x policies x temperatures x families x settings, budgets
and stops that fall into the middle of an accepted path, drafters that are always right and always wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from tiny import FAMILY_SETTINGS, VOCAB, tiny_target, tiny_tokenizer
from torch import Tensor

from eyas.drafters.base import Candidates, Drafter
from eyas.drafters.lookup import Lookup
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError
from eyas.generate import generate, generate_plain
from eyas.grammar import Grammar
from eyas.initial import new_head
from eyas.measure import Answer, alpha_by_depth, tau, timed
from eyas.policies import Chain, Level, Policy, parse_policy
from eyas.sampling import Prefix, Sampling
from eyas.targets.eager import EagerTarget
from eyas.tree import Tree
from eyas.verify import Stop, walk

PROMPT = [1, 8, 4, 4, 30]
POLICIES = ["chain:3", "static", "dynamic:levels=4,top_k=3,nodes=11"]


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target()


def untrained(kind: str, target: EagerTarget) -> Drafter:
    """What it guesses is often right for the first token and mostly wrong below."""
    vocabulary = torch.tensor([token for token in range(VOCAB) if token % 7])
    return new_head(kind, target, vocabulary if kind == "eagle3" else None).double().eval()


@pytest.fixture(scope="module")
def heads(target: EagerTarget) -> dict[str, Drafter]:
    return {kind: untrained(kind, target) for kind in ("eagle", "eagle3")}


@dataclass
class Oracle(Drafter):
    """Knows the target's greedy continuation; names the token `offset` places beside it, after `decoys` wrong ones."""

    target: EagerTarget
    offset: int = 0
    decoys: int = 0
    kind = "eagle"
    reads = (1, 2, 4)
    shown: list[tuple[list[int], Tensor]] = field(default_factory=list)  # what `observe` was given

    def new_state(self, first: int | None = None) -> list[list[int]]:
        """The texts that end in the rows of this round, the first one verified."""
        assert first is not None
        return [[first]]

    def observe(self, state: list[list[int]], tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        self.shown.append((list(tokens), hidden_TLD))
        state[:] = [[*state[0], *tokens]]
        return self._candidates(state)

    def expand(self, state: list[list[int]], rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        new = [[*state[row], token] for row, token in zip(rows, tokens, strict=True)]
        state += new
        return self._candidates(new)

    def _candidates(self, texts: list[list[int]]) -> Candidates:
        prompts = [(self.target.new_cache(), Tree.chain(text)) for text in texts]
        best = [int(v.logits_NV[0].argmax()) + self.offset for v in self.target.verify(prompts, last_only=True)]
        tokens = [[(token + 1 + decoy) % VOCAB for decoy in range(self.decoys)] + [token % VOCAB] for token in best]
        return Candidates(torch.tensor(tokens), torch.zeros(len(texts), self.decoys + 1))

    def rewind(self, state: list[list[int]], length: int) -> None:
        state[:] = [state[0][: length + 1]]

    def can_propose(self, token: int) -> bool:
        return True


def both(
    target: EagerTarget, drafter: Drafter, policy: Policy, sampling: Sampling, stop: Stop
) -> tuple[Answer, Answer]:
    plain = timed(generate_plain(target, PROMPT, sampling, stop))
    return plain, timed(generate(target, drafter, policy, PROMPT, sampling, stop))


class NoRepeat:
    """A processor whose answer depends on the whole prefix: never the token before, never one of the last four."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, ids[0, -4:].unique(), -torch.inf)


ENDS = (3, 17, 28, 51)
PAIRS = [[first, last] for first in range(VOCAB) for last in range(first % 3, VOCAB, 3)]
GRAMMAR = Grammar("regex", "([A-H]{1,3}([0-9]+|,[I-Y]))*", tiny_tokenizer(letters=VOCAB - 4), VOCAB, eos_ids=(2,))
FILTERS = [
    {},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"processors": (NoRepeat(),)},
    {"logit_bias": {5: 1.5, 20: -2.0, 41: 3.0}, "repetition_penalty": 1.2},
    {"bad_words": PAIRS},
    {"min_new_tokens": 17, "eos_ids": ENDS, "logit_bias": dict.fromkeys(ENDS, 2.0)},
    {"constraint": GRAMMAR, "top_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_speculative_equals_plain(
    target: EagerTarget, heads: dict[str, Drafter], kind: str, policy: str, temperature: float, filters: dict
) -> None:
    for seed in range(2):
        sampling = Sampling(temperature, seed=seed, sample=seed, **filters)
        plain, drafted = both(target, heads[kind], parse_policy(policy), sampling, Stop(40))
        assert drafted.tokens == plain.tokens
        assert len(plain.tokens) == 40
        assert all(len(r.tokens) <= len(r.path) for r in drafted.rounds[1:])


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def cases(target: EagerTarget, temperature: float) -> dict[str, tuple[Sampling, Stop, list[int]]]:
    """Everything that decides where an answer goes and ends, with plain decoding's tokens."""
    keyed = Sampling(temperature, seed=1, eos_ids=(2,))
    filtered = replace(keyed, top_k=40, top_p=0.9, min_p=0.01)
    penalised = replace(keyed, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    tokens = timed(generate_plain(target, PROMPT, filtered, Stop(18))).tokens
    asked = {
        "filters": (filtered, Stop(18)),
        "penalties": (penalised, Stop(18)),
        "grammar": (replace(keyed, constraint=GRAMMAR), Stop(18)),
        "stop string": (filtered, Stop(18, strings=(text_of(tokens[12:14]),), decode=text_of)),
        "budget": (filtered, Stop(12)),
        "end token": (filtered, Stop(18, eos_ids=(tokens[13],))),
    }
    return {name: (*case, timed(generate_plain(target, PROMPT, *case)).tokens) for name, case in asked.items()}


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_every_drafter_tree_and_setting_is_lossless(family: str) -> None:
    """The whole grid, on texts longer than the windows of the windowed families. The small model is the target itself:
    its trees hold the right tokens, so answers end inside of paths."""
    target = tiny_target(family=family)
    drafters = {kind: untrained(kind, target) for kind in ("eagle", "eagle3")}
    drafters |= {"lookup": Lookup(), "small": SmallModel(target)}
    mid_path = 0
    for temperature in (0.0, 0.7, 1.0):
        for case, (sampling, stop, tokens) in cases(target, temperature).items():
            for (kind, drafter), policy in itertools.product(drafters.items(), POLICIES):
                drafted = timed(generate(target, drafter, parse_policy(policy), PROMPT, sampling, stop))
                assert drafted.tokens == tokens, (temperature, case, kind, policy)
                last = drafted.rounds[-1]
                mid_path += last.tree is not None and any(last.tree.children(node) for node in last.path[-1:])
    assert mid_path > 20, "answers end above nodes that a wrong rule would go on to"


@pytest.mark.parametrize("budget", range(1, 12))
def test_budget_ends_inside_a_path(target: EagerTarget, budget: int) -> None:
    plain, drafted = both(target, Oracle(target), Chain(4), Sampling(), Stop(budget))
    assert drafted.tokens == plain.tokens
    assert len(drafted.tokens) == budget
    assert drafted.rounds[-1].finish_reason == plain.rounds[-1].finish_reason == "length"
    left = budget - 1
    for round_ in drafted.rounds[1:]:  # no level is drafted that the budget cannot deliver
        assert round_.tree is not None and max(round_.tree.depths) == min(4, left - 1)
        left -= len(round_.tokens)


def test_end_token_and_stop_string_inside_a_path(target: EagerTarget) -> None:
    tokens = timed(generate_plain(target, PROMPT, Sampling(), Stop(20))).tokens
    for place in range(1, 12):
        ends_there = Stop(20, eos_ids=(tokens[place],))
        plain, drafted = both(target, Oracle(target), Chain(4), Sampling(), ends_there)
        assert drafted.tokens == plain.tokens == tokens[: tokens.index(tokens[place]) + 1]
        assert drafted.rounds[-1].finish_reason == "stop"
        text = "".join(f"<{token}>" for token in tokens[place : place + 2])
        at_string = Stop(20, strings=(text,), decode=lambda ids: "".join(f"<{token}>" for token in ids))
        plain, drafted = both(target, Oracle(target), Chain(4), Sampling(), at_string)
        assert drafted.tokens == plain.tokens
        assert drafted.rounds[-1].finish_reason == plain.rounds[-1].finish_reason == "stop"
        assert drafted.tokens == tokens[: len(drafted.tokens)]


def test_the_least_length_is_reached_inside_a_path(target: EagerTarget) -> None:
    """The end token is the best one throughout, so it comes at the first place where it may."""
    end = 7
    for least in range(1, 12):
        sampling = Sampling(logit_bias={end: 1e3}, min_new_tokens=least, eos_ids=(end,))
        plain, drafted = both(target, Oracle(target), Chain(4), sampling, Stop(20, eos_ids=(end,)))
        assert drafted.tokens == plain.tokens
        assert drafted.tokens.index(end) == least == len(drafted.tokens) - 1


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_self_drafting_delivers_levels_plus_one(target: EagerTarget, levels: int) -> None:
    rounds = 5
    plain, drafted = both(target, Oracle(target), Chain(levels), Sampling(), Stop(1 + rounds * (levels + 1)))
    assert drafted.tokens == plain.tokens
    assert tau([drafted]) == levels + 1
    assert alpha_by_depth([drafted]) == [1.0] * levels


def test_always_wrong_drafts_cost_nothing_but_time(target: EagerTarget) -> None:
    plain, drafted = both(target, Oracle(target, offset=1), Chain(3), Sampling(), Stop(20))
    assert drafted.tokens == plain.tokens
    assert tau([drafted]) == 1.0
    assert alpha_by_depth([drafted]) == [0.0]


def test_the_answer_ends_with_the_context(target: EagerTarget) -> None:
    prompt = [(5 * i) % VOCAB for i in range(target.spec.max_length - 7)]
    plain = timed(generate_plain(target, prompt, Sampling(), Stop(99)))
    oracle = new_head("eagle", target).double().eval()
    drafted = timed(generate(target, oracle, Chain(4), prompt, Sampling(), Stop(99)))
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 7
    assert plain.rounds[-1].finish_reason == "length"


def test_refuses_prompts_without_room(target: EagerTarget) -> None:
    for prompt, message in (([], "empty"), ([1] * target.spec.max_length, "context")):
        with pytest.raises(InputError, match=message):
            next(generate_plain(target, prompt, Sampling(), Stop(4)))
        with pytest.raises(InputError, match=message):
            next(generate(target, Oracle(target), Chain(2), prompt, Sampling(), Stop(4)))


def test_a_head_observes_the_true_states_of_the_accepted_tokens(target: EagerTarget) -> None:
    """Also where the accepted path is not the first nodes of the tree: here the right token is the second child."""
    oracle = Oracle(target, decoys=1)
    policy = parse_policy("dynamic:levels=3,top_k=2,nodes=9")
    answer = timed(generate(target, oracle, policy, PROMPT, Sampling(), Stop(30)))
    assert all(round_.path[1] == 2 for round_ in answer.rounds[1:] if len(round_.path) > 1)
    assert (tau([answer]) or 0) > 1.5
    text = [*PROMPT, *answer.tokens]
    states_TLD = target.verify([(target.new_cache(), Tree.chain(text))], oracle.reads)[0].hidden_NLD
    place = 0
    for tokens, hidden_TLD in oracle.shown:
        assert tokens == text[place + 1 : place + 1 + len(tokens)]
        torch.testing.assert_close(hidden_TLD, states_TLD[place : place + len(tokens)], rtol=0, atol=1e-10)
        place += len(tokens)


@dataclass(frozen=True)
class InTurn(Policy):
    """One policy after the other; None is a plain round."""

    turns: Sequence[Policy | None]
    levels, width = 0, 0  # never asked for: rounds have policies of their own

    def expands(self, level: Level) -> list[int]:
        raise AssertionError

    def pilot(self) -> Taking:
        return Taking(itertools.cycle(self.turns), [])


@dataclass
class Taking:
    turns: Iterator[Policy | None]
    seen: list[tuple[int, int]]

    def choose(self) -> Policy | None:
        return next(self.turns)

    def see(self, tree: Tree, path: Sequence[int], rows: Sequence[int]) -> None:
        self.seen.append((len(tree), len(path)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_policies_may_change_from_round_to_round(target: EagerTarget, temperature: float) -> None:
    """Plain rounds between: what they verified reaches the drafter in one piece, each token with its true state."""
    turns = [Chain(2), None, None, parse_policy("dynamic:levels=3,top_k=2,nodes=5"), None, Chain(1), Chain(4)]
    oracle, sampling = Oracle(target), Sampling(temperature, seed=3)
    plain, drafted = both(target, oracle, InTurn(turns), sampling, Stop(60))
    assert drafted.tokens == plain.tokens
    drafting = itertools.cycle(turn is not None for turn in turns)
    for round_, drafts in zip(drafted.rounds[1:-2], drafting, strict=False):
        assert round_.tree is not None and (len(round_.tree) > 1) == drafts == (round_.draft_ms > 0)
        assert drafts or len(round_.tokens) == 1
    assert any(len(round_.tokens) > 2 for round_ in drafted.rounds), "a drafter that was brought back guesses well"
    place, text = 0, [*PROMPT, *drafted.tokens]
    states_TLD = target.verify([(target.new_cache(), Tree.chain(text))], oracle.reads)[0].hidden_NLD
    for tokens, hidden_TLD in oracle.shown:
        assert tokens == text[place + 1 : place + 1 + len(tokens)]
        torch.testing.assert_close(hidden_TLD, states_TLD[place : place + len(tokens)], rtol=0, atol=1e-10)
        place += len(tokens)


def test_walk_by_hand() -> None:
    """Token 3 below the root, token 4 below it; the target wants 3, then 4, then 9."""
    tree = Tree((1, 3, 5, 4), (-1, 0, 0, 1))
    logits = torch.full((4, 10), -9.0)
    for node, token in enumerate((3, 4, 7, 9)):
        logits[node, token] = 0.0
    whole = walk(tree, logits, Sampling(), Prefix([0, 1], 1), stop=Stop(99))
    assert (whole.path, whole.tokens, whole.finish_reason) == ([0, 1, 3], [3, 4, 9], None)
    # the budget of 3 counts the root, which was emitted before: two more tokens, and no draw after them
    cut = walk(tree, logits, Sampling(), Prefix([0, 1], 1), stop=Stop(3))
    assert (cut.path, cut.tokens, cut.finish_reason) == ([0, 1, 3], [3, 4], "length")
    ended = walk(tree, logits, Sampling(), Prefix([0, 1], 1), stop=Stop(99, eos_ids=(3,)))
    assert (ended.path, ended.tokens, ended.finish_reason) == ([0, 1], [3], "stop")


def test_stale_draft_keys_are_noticed(target: EagerTarget, heads: dict[str, Drafter]) -> None:
    """After an accepted round, a head that absorbed true states drafts as one that sees the whole text at once."""
    head = heads["eagle3"]
    rounds = list(generate(target, head, parse_policy(POLICIES[2]), PROMPT, Sampling(), Stop(30)))
    text = [*PROMPT, *(token for round_ in rounds for token in round_.tokens)]
    verified = target.verify([(target.new_cache(), Tree.chain(text[:-1]))], head.reads)[0]
    fresh = head.observe(head.new_state(), text[1:], verified.hidden_NLD, 5)
    cut = len(PROMPT) + 3
    state = head.new_state()
    first = head.observe(state, text[1:cut], verified.hidden_NLD[: cut - 1], 5)
    head.expand(state, [0] * 5, first.tokens_KW[0].tolist(), 5)  # speculation that must leave no trace
    again = head.observe(state, text[cut:], verified.hidden_NLD[cut - 1 :], 5)
    assert torch.equal(again.tokens_KW, fresh.tokens_KW)
    torch.testing.assert_close(again.logprobs_KW, fresh.logprobs_KW, rtol=0, atol=1e-6)
