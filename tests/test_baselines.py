"""Drafters without training: n-gram lookup by hand, a small model against recomputation, both lossless."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_cli import refused, run_json
from test_lossless import FILTERS, POLICIES, PROMPT, both
from tiny import FAMILY_SETTINGS, needs_core, tiny_target, tiny_tokenizer
from torch import Tensor

import eyas
from eyas import native
from eyas.drafters.base import Candidates, Drafter, best_candidates
from eyas.drafters.lookup import Lookup, LookupState
from eyas.drafters.small_model import SmallModel, SmallState
from eyas.generate import generate, generate_plain
from eyas.measure import alpha_by_depth, tau, timed
from eyas.policies import Chain, Dynamic, grow, parse_policy
from eyas.sampling import Sampling
from eyas.targets.base import Target
from eyas.targets.eager import EagerTarget
from eyas.targets.native import NativeTarget, pack_target
from eyas.tree import Tree
from eyas.verify import Stop

NO_STATES = torch.empty(0)


# -- lookup by hand ----------------------------------------------------------------------------------------------------


def after(text: Sequence[int], width: int) -> tuple[LookupState, Candidates]:
    """A text that was observed, and the candidates that come next."""
    lookup = Lookup()
    state = lookup.new_state(text[0])
    return state, lookup.observe(state, text[1:], NO_STATES, width)


def listed(candidates: Candidates) -> list[list[tuple[int, float]]]:
    """By node: tokens and probabilities, without what fills a row up."""
    pairs = zip(candidates.tokens_KW.tolist(), candidates.logprobs_KW.exp().tolist(), strict=True)
    return [[(t, round(p, 5)) for t, p in zip(*row, strict=True) if p > 0] for row in pairs]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        # 1 2 was followed by 3 and, later, by 4: a match of two tokens is worth 3/4
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [(4, 0.375)]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [(4, 0.375), (3, 0.375)]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 9, [(4, 0.375), (3, 0.375)]),  # no more than there are
        # 1 2 was followed by 3; of the quarter that is left, a match of one token (2: by 3 and 4) is worth a half
        ([1, 2, 3, 9, 2, 4, 1, 2], 1, [(3, 0.75)]),
        ([1, 2, 3, 9, 2, 4, 1, 2], 2, [(3, 0.75), (4, 0.0625)]),
        ([7, 2, 3, 8, 2, 3, 9, 2, 4, 6, 2], 2, [(3, 0.33333), (4, 0.16667)]),  # more often goes before more recent
        ([5, 6, 7, 8, 9, 5, 6, 7, 8], 3, [(9, 0.9375)]),  # four tokens: 15/16
        ([0, 5, 6, 7, 8, 9, 1, 5, 6, 7, 8], 3, [(9, 0.9375)]),  # and not more with what stands before them
        ([1, 2, 1], 3, [(2, 0.5)]),  # the first token counts
        ([4, 4], 3, [(4, 0.5)]),
        ([4, 4, 4], 3, [(4, 0.75)]),  # 4 4 by 4; that 4 was followed by 4 too adds nothing
        ([5, 6, 7], 3, []),
        ([0, 0, 3, 0], 2, [(3, 0.25), (0, 0.25)]),
    ],
)
def test_lookup_by_hand(text: list[int], width: int, expected: list[tuple[int, float]]) -> None:
    state, found = after(text, width)
    assert listed(found) == [expected]
    assert found.tokens_KW.shape == found.logprobs_KW.shape == (1, len(expected))
    assert found.tokens_KW.dtype == torch.int64 and found.logprobs_KW.dtype == torch.float32
    assert bool((found.logprobs_KW < 0).all())


def test_lookup_goes_on_below_its_guesses() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    state, _ = after(text, 3)
    lookup = Lookup()
    found = lookup.expand(state, [0, 0, 0], [4, 3, 9], 3)  # rows 1, 2 and 3
    assert listed(found) == [[(1, 0.875)], [(1, 0.875)], []]  # 1 2 4 by 1, 1 2 3 by 1, and 9 never stood there
    assert listed(lookup.expand(state, [2, 1], [1, 1], 3)) == [[(2, 0.9375)], [(2, 0.9375)]]
    assert listed(lookup.expand(state, [5], [2], 3)) == [[(4, 0.375), (3, 0.375)]]  # 2 4 1 2: only 1 2 stood there
    # what was guessed is not text: after one more true token, the candidates are those of a text observed at once
    again = lookup.observe(state, [3, 1], NO_STATES, 3)
    fresh_state, fresh = after([*text, 3, 1], 3)
    assert listed(again) == listed(fresh) == [[(2, 0.9375)]]
    assert state.followers == fresh_state.followers
    assert [list(counts) for counts in state.followers.values()] == [list(c) for c in fresh_state.followers.values()]


def test_lookup_observes_a_text_in_any_pieces() -> None:
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(0, 4, (60,), generator=draw).tolist()
    lookup, place = Lookup(), 1
    state = lookup.new_state(text[0])
    for size in (1, 5, 2, 20, 1, 1, 29):
        found = lookup.observe(state, text[place : place + size], NO_STATES, 4)
        lookup.expand(state, [0], [3], 4)
        place += size
        fresh_state, fresh = after(text[:place], 4)
        assert listed(found) == listed(fresh)
        assert state.followers == fresh_state.followers


def test_lookup_finds_what_a_scan_of_the_text_finds() -> None:
    """The slow twin: every earlier place where the last n tokens stand, longest n first."""
    text = torch.randint(0, 5, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    for end in range(2, len(text)):
        seen = text[:end]
        expected: list[int] = []
        for n in range(4, 0, -1):
            places = [i for i in range(end - n) if seen[i : i + n] == seen[end - n :]] if n < end else []
            next_ones = [seen[i + n] for i in places]
            newest_first = list(dict.fromkeys(reversed(next_ones)))
            new = [token for token in newest_first if token not in expected]
            expected += sorted(new, key=next_ones.count, reverse=True)  # stable
        found = [token for token, _ in listed(after(seen, 99)[1])[0]]
        assert set(found) == set(expected)
        one = listed(after(seen, 1)[1])[0]
        assert [token for token, _ in one] == expected[:1]


def test_the_best_are_the_first_of_any_more() -> None:
    """Also where a shorter match has a better one than the last of a longer match: a replay counts on it."""
    # 1 2 was followed by ten tokens, .075 for each; 2 alone by 8 nearly always, which has a good half of .125
    crowded = [token for k in range(10, 20) for token in (1, 2, k)] + [2, 8] * 40 + [9, 1, 2]
    assert listed(after(crowded, 1)[1])[0] == [(8, 0.1)]
    random = torch.randint(0, 5, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    for text in (crowded, *(random[:end] for end in range(2, len(random)))):
        every = listed(after(text, 99)[1])[0]
        for width in range(1, 7):
            assert listed(after(text, width)[1])[0] == every[:width]


SHAPES = [
    (Chain(4), (2, 4, 1, 2, 4), (-1, 0, 1, 2, 3)),
    (eyas.Static(((0,), (1,), (3,), (0, 0), (1, 0), (1, 1), (3, 0))), (2, 4, 3, 1, 1), (-1, 0, 0, 1, 2)),
    (Dynamic(3, 2, 99), (2, 4, 3, 1, 1, 2, 2), (-1, 0, 0, 1, 2, 3, 4)),
    (Dynamic(3, 4, 4), (2, 4, 3, 1, 1), (-1, 0, 0, 1, 2)),
]


@pytest.mark.parametrize(("policy", "tokens", "parents"), SHAPES)
def test_trees_grow_with_as_many_candidates_as_there_are(
    policy: eyas.Policy, tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    lookup = Lookup()
    state, first = after([1, 2, 3, 1, 2, 4, 1, 2], policy.width)
    tree = grow(policy, lookup, state, 2, first, max_levels=9)
    assert (tree.tokens, tree.parents) == (tokens, parents)
    state, first = after([5, 6, 7], policy.width)
    assert grow(policy, lookup, state, 7, first, max_levels=9) == Tree((7,), (-1,))


def test_filled_up_rows_give_no_nodes() -> None:
    """Rows of two and of no candidates, and ranks that stay what they were."""
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    lookup = Lookup()
    state, _ = after(text, 2)
    first = Candidates(torch.tensor([[4, 9, 0]]), torch.tensor([[-0.5, -1.0, -math.inf]]))
    tree = grow(Dynamic(2, 3, 9), lookup, state, 2, first, max_levels=9)
    assert (tree.tokens, tree.parents) == ((2, 4, 9, 1), (-1, 0, 0, 1))
    state, _ = after(text, 2)
    static = eyas.Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0)))
    tree = grow(static, lookup, state, 2, first, max_levels=9)
    assert (tree.tokens, tree.parents) == ((2, 4, 9, 1), (-1, 0, 0, 1))
    nothing = Candidates(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0))
    for policy in (Chain(3), static, Dynamic(2, 3, 9)):
        assert grow(policy, lookup, state, 2, nothing, max_levels=9) == Tree((2,), (-1,))


# -- a small model -----------------------------------------------------------------------------------------------------


def rough(target: EagerTarget, amount: float) -> EagerTarget:
    """The target with noise in its weights: right now and then."""
    model = copy.deepcopy(target.model)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += amount * torch.randn_like(parameter) * parameter.std()
    return EagerTarget(model, "rough")


class Checked(SmallModel):
    """Holds every candidate of every level against a model that reads that text alone, from its first token."""

    def __init__(self, model: Target, exact: bool) -> None:
        super().__init__(model)
        self.exact, self.levels = exact, 0
        self.text: list[int] = []
        self.texts: list[list[int]] = []

    def new_state(self, first: int | None = None) -> SmallState:
        assert first is not None
        self.text = [first]
        return super().new_state(first)

    def observe(self, state: SmallState, tokens: Sequence[int], hidden_TLD: Tensor, width: int) -> Candidates:
        self.text += tokens
        self.texts = [list(self.text)]
        return self.checked(super().observe(state, tokens, hidden_TLD, width), self.texts, width)

    def expand(self, state: SmallState, rows: Sequence[int], tokens: Sequence[int], width: int) -> Candidates:
        new = [[*self.texts[row], token] for row, token in zip(rows, tokens, strict=True)]
        self.texts += new
        return self.checked(super().expand(state, rows, tokens, width), new, width)

    def checked(self, found: Candidates, texts: list[list[int]], width: int) -> Candidates:
        self.levels += 1
        alone = [(self.model.new_cache(), Tree.chain(text)) for text in texts]
        logits = [self.model.verify([item], last_only=True)[0].logits_NV for item in alone]
        expected = best_candidates(torch.cat(logits), width, None)
        assert torch.equal(found.tokens_KW, expected.tokens_KW)
        allowed = 0.0 if self.exact else 1e-6
        torch.testing.assert_close(found.logprobs_KW, expected.logprobs_KW, rtol=0, atol=allowed)
        return found


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_small_model_drafts_as_one_that_reads_the_text_anew(family: str, policy: str) -> None:
    target = tiny_target(family=family)
    small = Checked(rough(target, 0.3), exact=False)
    plain, drafted = both(target, small, parse_policy(policy), Sampling(0.7), Stop(30))
    assert drafted.tokens == plain.tokens
    assert small.text == [*PROMPT, *plain.tokens][: len(small.text)]
    rejected = [round_ for round_ in drafted.rounds[1:] if round_.tree and len(round_.path) <= max(round_.tree.depths)]
    assert len(rejected) > 3 and small.levels > 20


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_the_target_as_its_own_small_model_delivers_levels_plus_one(target: EagerTarget, levels: int) -> None:
    plain, drafted = both(target, SmallModel(target), Chain(levels), Sampling(), Stop(1 + 5 * (levels + 1)))
    assert drafted.tokens == plain.tokens
    assert tau([drafted]) == levels + 1
    assert alpha_by_depth([drafted]) == [1.0] * levels


# -- losslessness ------------------------------------------------------------------------------------------------------


def drafters(target: EagerTarget) -> dict[str, Drafter]:
    return {"lookup": Lookup(), "small": SmallModel(rough(target, 0.3))}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["lookup", "small"])
def test_speculative_equals_plain(
    target: EagerTarget, kind: str, policy: str, temperature: float, filters: dict
) -> None:
    sampling = Sampling(temperature, seed=3, sample=1, **filters)
    plain, drafted = both(target, drafters(target)[kind], parse_policy(policy), sampling, Stop(40))
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 40


@pytest.mark.parametrize("kind", ["lookup", "small"])
@pytest.mark.parametrize("family", [family for family in FAMILY_SETTINGS if family != "llama"])
def test_every_family_is_lossless(family: str, kind: str) -> None:
    target = tiny_target(family=family)
    for policy, temperature in zip(POLICIES, (0.0, 0.7, 1.0), strict=True):
        sampling = Sampling(temperature, seed=1)
        plain, drafted = both(target, drafters(target)[kind], parse_policy(policy), sampling, Stop(30))
        assert drafted.tokens == plain.tokens, policy


def test_lookup_repeats_what_repeats(target: EagerTarget) -> None:
    """A text of one period of 5, and nothing that the target says: the drafts of a chain are that period."""
    lookup, period = Lookup(), [3, 1, 4, 1, 5]
    state = lookup.new_state(3)
    first = lookup.observe(state, (period * 3)[1:], NO_STATES, 1)
    assert grow(Chain(7), lookup, state, 5, first, max_levels=99).tokens == (5, 3, 1, 4, 1, 5, 3, 1)


@needs_core
@pytest.mark.parametrize("weights", native.WEIGHTS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_native_is_lossless_bit_for_bit(family: str, weights: str) -> None:
    eager = tiny_target(torch.float32, family=family)
    target = NativeTarget(*pack_target(eager, weights), "tiny")
    small = NativeTarget(*pack_target(rough(eager, 0.3), weights), "rough")
    prompt = [(7 * i) % 13 for i in range(60)]
    for drafter in (Lookup(), Checked(small, exact=True)):
        for number, policy in enumerate(POLICIES):
            for temperature in (0.0, 0.7, 1.0):
                sampling = Sampling(temperature, seed=number)
                plain = timed(generate_plain(target, prompt, sampling, Stop(24)))
                drafted = timed(generate(target, drafter, parse_policy(policy), prompt, sampling, Stop(24)))
                assert drafted.tokens == plain.tokens
                for place in range(len(plain.tokens)):
                    assert torch.equal(drafted.logits(place), plain.logits(place))
    plain = timed(generate_plain(target, prompt, Sampling(), Stop(21)))
    own = timed(generate(target, SmallModel(target), Chain(3), prompt, Sampling(), Stop(21)))
    assert own.tokens == plain.tokens and tau([own]) == 4


# -- as users name them ------------------------------------------------------------------------------------------------

BACKENDS = [("eager", "float64"), pytest.param("native", "int8", marks=needs_core)]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_heads_by_name(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, backend: str, dtype: str
) -> None:
    model = ("--target", str(folder / "target"), "--backend", backend, "--dtype", dtype, "--max-new-tokens", "21")
    plain = run_json(capsys, "generate", *model, "--prompt", "hello hello hello")
    own, other = f"small:{folder / 'target'}", f"small:{folder / 'other'}"
    for head in ("lookup", own, other):
        found = run_json(
            capsys, "generate", *model, "--prompt", "hello hello hello", "--head", head, "--tree", "chain:3"
        )
        assert (found["token_ids"], found["head"], found["backend"]) == (plain["token_ids"], head, backend)
        assert head != own or found["tau"] == 4
    (tmp_path / "set.txt").write_text("hello hello\nab ab ab\n")
    record = run_json(
        capsys, "bench", *model, "--workload", str(tmp_path / "set.txt"), "--method", "lookup@chain:4",
        "--method", "lookup", "--method", f"{other}@static", "--method", own,
    )  # fmt: skip
    assert [row["method"] for row in record["rows"]] == ["plain", "lookup", "lookup", "small", "small"]
    assert all((row["identical"], row["divergences"]) == (2, []) for row in record["rows"])
    demo = run_json(capsys, "demo", *model, "--head", "lookup", "--limit", "1")
    assert [row["method"] for row in demo["rows"]] == ["plain", "lookup"]


def test_a_path_with_an_at_sign(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "other", tmp_path / "b@c")
    (tmp_path / "set.txt").write_text("hello\n")
    common = ("bench", "--target", str(folder / "target"), "--dtype", "float64", "--max-new-tokens", "8")
    for method in (f"small:{tmp_path / 'b@c'}", f"small:{tmp_path / 'b@c'}@chain:2"):
        rows = run_json(capsys, *common, "--workload", str(tmp_path / "set.txt"), "--method", method)["rows"]
        assert rows[1]["head"] == f"small:{tmp_path / 'b@c'}"


def test_inspect(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    target, small = ("--target", str(folder / "target")), f"small:{folder / 'other'}"
    found = run_json(capsys, "inspect", "--head", "lookup", *target)
    assert found["head"] == {"name": "lookup", "kind": "lookup", "longest_match": 4, "parameters": 0}
    assert found["fit"] == {"fits": True, "findings": []}
    found = run_json(capsys, "inspect", "--head", small, *target)
    assert (found["head"]["name"], found["head"]["kind"], found["head"]["width"]) == (small, "small", 48)
    assert found["fit"] == {"fits": True, "findings": []}


def test_wrong_small_models_are_refused(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    smaller = tiny_target(torch.float32, vocab=250)
    smaller.model.save_pretrained(tmp_path / "smaller")
    tiny_tokenizer().save_pretrained(tmp_path / "smaller")
    shutil.copytree(folder / "other", tmp_path / "renamed")
    text = (tmp_path / "renamed" / "tokenizer.json").read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    changed = json.loads(text)
    changed["model"]["vocab"] = vocabulary
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(changed))
    (tmp_path / "set.txt").write_text("hello\n")
    common = ("--target", str(folder / "target"), "--dtype", "float32")
    for name, message in (
        (f"small:{tmp_path / 'smaller'}", "vocabulary of 250 tokens"),
        (f"small:{tmp_path / 'renamed'}", "other ids"),
        ("small:nowhere", "unknown target 'nowhere'"),
        ("small:", "unknown target ''"),
        ("small", "small:TARGET"),
        (f"small:{folder / 'eagle'}", "small:"),
    ):
        assert message in refused(capsys, "generate", *common, "--prompt", "x", "--head", name)
        assert message in refused(
            capsys, "bench", *common, "--workload", str(tmp_path / "set.txt"), "--method", f"{name}@chain:2"
        )
        assert message in refused(capsys, "inspect", *common, "--head", name)
