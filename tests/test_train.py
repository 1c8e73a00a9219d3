"""Training: what is learned is what decoding uses, at the right places, and a stopped run goes on bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import HEADS, VOCAB, shaken_head, tiny_target
from torch.nn.functional import smooth_l1_loss
from training import MORE_PROMPTS, PROMPTS, answered, answers, reads_for, trainer

from eyas.checkpoint import serving
from eyas.data import Sequence
from eyas.drafters import rollout
from eyas.drafters.base import Batch
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import Eagle3
from eyas.drafters.rollout import Tally, supervised_rows, teacher, token_loss
from eyas.errors import InputError
from eyas.features import Streamed
from eyas.generate import generate
from eyas.initial import draft_vocabulary, new_head
from eyas.measure import tau, timed
from eyas.policies import Chain
from eyas.sampling import Sampling
from eyas.train import TrainConfig, make_batch
from eyas.tree import Tree
from eyas.verify import Stop

EIGHT = [*PROMPTS, *MORE_PROMPTS]


@pytest.mark.parametrize(
    ("kind", "steps", "layers", "prompts", "length"),
    [
        ("eagle", 800, 1, PROMPTS, 24),
        ("eagle3", 800, 1, EIGHT, 16),
        ("eagle3", 500, 2, EIGHT, 16),
        ("small", 200, 2, PROMPTS, 16),
    ],
)
def test_overfitting_gives_accepted_drafts(
    kind: str, steps: int, layers: int, prompts: list[list[int]], length: int
) -> None:
    """The gate between training and serving: what was learned by heart is accepted when decoding."""
    target = tiny_target(torch.float32)
    sequences = answers(target, length, prompts)
    config = TrainConfig(steps=steps, learning_rate=3e-3, warmup=20, clip=1.0)
    learner = trainer(kind, target, sequences, config, layers=layers)
    for _ in range(steps):
        learner.train_step()
    head, stop = serving(learner.head, target), Stop(length + 1)
    decoded = [timed(generate(target, head, Chain(3), s.tokens[: s.spans[0][0]], Sampling(), stop)) for s in sequences]
    assert [a.tokens[:length] for a in decoded] == [s.answer_tokens for s in sequences]
    reached = tau(decoded)
    assert reached is not None and reached >= 0.9 * 4


def test_rows_are_those_whose_prediction_lies_in_the_answer() -> None:
    """Tokens 0..6, answer from 4: pair i predicts token i + 2, so pairs 2 to 4 are trained, and 4 in step 0 only."""
    rows = supervised_rows((0, 7), torch.arange(7) >= 4)
    assert rows.pair_S.tolist() == [2, 3, 4]
    assert [rows.valid(step).tolist() for step in range(3)] == [[True] * 3, [True, True, False], [True, False, False]]
    assert rows.counts(4).tolist() == [3, 2, 1, 0]


def test_rows_of_several_answers_and_sequences() -> None:
    """Sequence 0 is tokens 0..9 with answers 3..4 and 7..9, sequence 1 is tokens 10..13, all of them an answer: what no
    pair precedes is not trained (10, 11), and no step goes on from one answer, or sequence, into the next."""
    answer = [False, False, False, True, True, False, False, True, True, True, True, True, True, True]
    rows = supervised_rows((0, 10, 14), torch.tensor(answer))
    assert rows.token_P.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]
    assert rows.position_P.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert rows.token_S.tolist() == [1, 2, 5, 6, 7, 10, 11]  # they predict tokens 3, 4, 7, 8, 9, 12 and 13
    assert rows.pair_S.tolist() == [1, 2, 5, 6, 7, 9, 10]
    assert rows.last_S.tolist() == [4, 4, 9, 9, 9, 13, 13]
    assert rows.valid(1).tolist() == [True, False, True, True, False, True, False]
    assert (rows.pairs, rows.rows) == ((0, 9, 12), (0, 5, 7))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_loss_reads_the_answer_and_nothing_past_it(kind: str) -> None:
    """Gradient reaches the teacher's state of the token before the answer and of the one before its last, no others."""
    target = tiny_target(torch.float32)
    learner = trainer(kind, target, answers(target), TrainConfig())
    short = Sequence(tuple(range(3, 12)), ((5, 9),))  # tokens 0..8, answer 5..8
    features = Streamed(target, [short, Sequence(tuple(range(3, 20)), ((14, 17),))], reads_for(learner.head))
    batch = make_batch(features, [0, 1], learner.head.reads, seed=0)
    batch = replace(batch, best_T=torch.full_like(batch.best_T, 2))  # a token that every draft vocabulary has

    def loss(final_TD: torch.Tensor) -> float:
        return learner.head.loss(replace(batch, final_TD=final_TD))[0].item()

    whole = loss(batch.final_TD)
    matters = []
    for t in range(20):  # the second sequence begins at 9; its answer at 23
        final_TD = batch.final_TD.clone()
        final_TD[t] = torch.randn(32, generator=torch.Generator().manual_seed(t)) * 3
        matters.append(loss(final_TD) != whole)
    assert [t for t, m in enumerate(matters) if m] == [4, 5, 6, 7]  # token t + 1 is predicted: 5, 6, 7 and the end, 8


def test_the_training_time_test_drafts_as_the_engine_does() -> None:
    """Train = serve: a step's acceptance, recomputed by drafting the same tokens with `observe` and `expand`."""
    target = tiny_target(torch.float32)
    sequence = answers(target)[0]
    learner = trainer("eagle3", target, [sequence], TrainConfig(sequences=1))
    head = learner.head.eval()
    assert isinstance(head, Eagle3)
    batch = make_batch(learner.features, [0], head.reads, seed=0)
    tokens, states = list(sequence.tokens), batch.states_TLD
    rows = supervised_rows(batch.bounds, batch.answer_T)
    p_SQ, known_S = teacher(batch, rows, head.head_VD, head.draft_vocabulary_Q)
    losses = torch.zeros(3)
    for row, i in enumerate(rows.pair_S.tolist()):
        state = head.new_state()
        candidates = head.observe(state, tokens[1 : i + 2], states[: i + 1], width=40)
        for step in range(3):
            if rows.valid(step)[row]:
                q = torch.zeros(VOCAB).index_put((candidates.tokens_KW[0],), candidates.logprobs_KW[0])
                log_q = q[head.draft_vocabulary_Q]
                losses[step] -= (p_SQ[row + step] * log_q).sum() * known_S[row + step] / rows.valid(step).sum()
            if i + 2 + step < len(tokens):  # the chain is fed the answer's own tokens, as the training-time test is
                candidates = head.expand(state, [step], [tokens[i + 2 + step]], width=40)
    _, metrics = head.loss(batch)
    torch.testing.assert_close(torch.stack([metrics[f"loss_{s}"] for s in (1, 2, 3)]), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, *HEADS.values()], ids=["plain", *HEADS])
def test_logits_in_training_are_those_of_drafting(settings: dict) -> None:
    """At every depth, for every row of a batch, in float64."""
    target = tiny_target()
    head = shaken_head(target, list(range(40)), steps=4, **settings).double()
    sequences = [*answers(target, 9), Sequence(tuple(range(3, 20)), ((4, 7), (9, 15)))]
    batch = make_batch(Streamed(target, sequences, reads_for(head)), range(len(sequences)), head.reads, seed=0)
    rows = supervised_rows(batch.bounds, batch.answer_T)
    trained = list(head.logits(batch, rows))
    assert len(trained) == 4
    places = [(b, row) for b in range(len(sequences)) for row in range(rows.rows[b], rows.rows[b + 1])]
    assert len(places) == len(rows.pair_S)
    for b, row in places:
        tokens, state, i = list(sequences[b].tokens), head.new_state(), int(rows.token_S[row]) - batch.bounds[b]
        states_TLD = batch.states_TLD[batch.bounds[b] : batch.bounds[b] + i + 1]
        head.observe(state, tokens[1 : i + 2], states_TLD, width=1)
        for step, logits_SQ in enumerate(trained):
            if rows.valid(step)[row]:
                drafted_Q = head.lm_head(head.norm(state.hidden_RD[-1]))
                torch.testing.assert_close(logits_SQ[row], drafted_Q, rtol=0, atol=1e-9)
                if i + 2 + step < len(tokens):
                    head.expand(state, [step], [tokens[i + 2 + step]], width=1)
    head.requires_grad_(True).loss(batch)[0].backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in head.parameters())


def test_later_layers_start_as_the_identity() -> None:
    target = tiny_target(torch.float32)
    found = []
    for layers in (1, 3):
        head = new_head("eagle3", target, layers=layers).eval()
        assert isinstance(head, Eagle3)
        states_TLD = target.verify([(target.new_cache(), Tree.chain(PROMPTS[2]))], head.reads)[0].hidden_NLD
        found.append(head.observe(head.new_state(), [*PROMPTS[2][1:], 9], states_TLD, VOCAB))
    assert torch.equal(found[0].logprobs_KW, found[1].logprobs_KW)


def test_a_head_of_other_states_starts_from_the_highest_one() -> None:
    target = tiny_target(torch.float32)
    found = []
    for reads in ((3,), (1, 3), (0, 1, 2, 3)):
        head = new_head("eagle3", target, reads=reads).eval()
        assert head.reads == reads
        states_TLD = target.verify([(target.new_cache(), Tree.chain(PROMPTS[2]))], reads)[0].hidden_NLD
        found.append(head.observe(head.new_state(), [*PROMPTS[2][1:], 9], states_TLD, VOCAB).logprobs_KW)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-5)
    for wrong in ((), (3, 1), (1, 1), (-1,), (target.spec.num_layers + 1,), (0, 1, 2, 3, 4, 4)):
        with pytest.raises(InputError, match="one to five states, ascending"):
            new_head("eagle3", target, reads=wrong)
    with pytest.raises(InputError, match="EAGLE-3 heads only"):
        new_head("eagle", target, reads=(1,))


def test_a_run_with_another_recipe_or_a_broken_state_is_refused(tmp_path: Path) -> None:
    target = tiny_target(torch.float32)
    sequences = answers(target, 6)
    learner = trainer("eagle", target, sequences, TrainConfig(steps=2))
    learner.save(tmp_path / "state.safetensors")
    others = {
        "learning_rate": trainer("eagle", target, sequences, TrainConfig(learning_rate=1.0)),
        "head": trainer("eagle", target, sequences, TrainConfig(), noise=0.2),
        "answers": trainer("eagle", target, sequences[:-1] + sequences[:1], TrainConfig()),
        "target's weights": trainer("eagle", target, sequences, TrainConfig()),
    }
    others["target's weights"].identity["target's weights"] = "of another model"
    for what, other in others.items():
        with pytest.raises(InputError, match=f"its {what} was"):
            other.restore(tmp_path / "state.safetensors")
    with pytest.raises(InputError, match="head|draft vocabulary"):
        trainer("eagle3", target, sequences, TrainConfig()).restore(tmp_path / "state.safetensors")
    (tmp_path / "state.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(InputError, match="cannot resume"):
        learner.restore(tmp_path / "state.safetensors")


def test_sequences_shorter_than_the_training_time_test(tmp_path: Path) -> None:
    target = tiny_target(torch.float32)
    short = [answered((1, 5), (9,)), answered((1,), (5, 9, 4))]
    for kind in ("eagle", "eagle3"):
        learner = trainer(kind, target, short, TrainConfig(sequences=1))
        assert all(math.isfinite(value) for _ in range(2) for value in learner.train_step().values())


def test_draft_vocabulary_by_frequency_specials_first() -> None:
    sequences = [answered((9, 9, 9), (4, 5, 5, 6)), answered((9,), (5, 6, 2))]  # prompts (9) do not count
    vocabulary, covered = draft_vocabulary(sequences, 3, special_ids=(2,))
    assert vocabulary.tolist() == [2, 5, 6]  # 5 three times, 6 twice, 2 forced in; 4 falls out
    assert covered == 6 / 7
    filled, covered = draft_vocabulary(sequences, 7, special_ids=(2,))
    assert filled.tolist() == [0, 1, 2, 3, 4, 5, 6]  # fewer seen than asked for: filled with the lowest ids
    assert covered == 1.0


def test_learning_rate_by_hand() -> None:
    target = tiny_target(torch.float32)
    for last, expected in ((0.1, [0.5, 1.0, 1.0, 0.55, 0.1]), (1.0, [0.5, 1.0, 1.0, 1.0, 1.0])):
        config = TrainConfig(steps=12, warmup=2, learning_rate=1.0, last_rate=last)
        learner, rates = trainer("eagle3", target, answers(target, 4), config), []
        for learner.step in (0, 1, 2, 7, 12):
            rates.append(learner.learning_rate())
        assert rates == pytest.approx(expected)


def test_an_absurd_recipe_is_refused() -> None:
    for wrong in (
        {"steps": 0}, {"sequences": -1}, {"learning_rate": 0.0}, {"learning_rate": math.nan}, {"warmup": -1},
        {"clip": 0.0}, {"clip": math.nan}, {"weight_decay": -1.0}, {"seed": -1}, {"seed": 2**63}, {"accumulate": 5},
        {"seconds": math.nan}, {"validate_tokens": 1}, {"last_rate": 1.1}, {"last_rate": -0.1},
    ):  # fmt: skip
        with pytest.raises(InputError):
            TrainConfig(**wrong)  # type: ignore[arg-type]
    target = tiny_target(torch.float32)
    for settings in (
        {"steps": -1}, {"noise": math.nan}, {"noise": -1.0}, {"vocabulary_Q": torch.arange(VOCAB + 1)}, {"layers": 0},
        {"layers": 6}, {"fc_norm": True, "norm_before_fc": True},
    ):  # fmt: skip
        with pytest.raises(InputError):
            new_head("eagle3", target, **settings)
    for settings in ({"layers": 2}, {"norm_output": True}):
        with pytest.raises(InputError, match="EAGLE-"):
            new_head("eagle", target, **settings)
    with pytest.raises(InputError, match="a step takes 5"):
        trainer("eagle", target, answers(target, 6), TrainConfig(sequences=5))
    with pytest.raises(InputError, match="at least 2"):
        draft_vocabulary(answers(target, 6), 1, special_ids=(2, 3))


def test_a_batch_is_what_was_asked_for() -> None:
    target = tiny_target(torch.float32)
    head = new_head("eagle3", target)
    batch = make_batch(Streamed(target, answers(target, 6), reads_for(head)), [2, 0], head.reads, seed=7)
    assert isinstance(batch, Batch)
    assert (batch.bounds, batch.seed, len(batch.tokens_T)) == ((0, 11, 21), 7, 21)
    assert batch.answer_T.tolist() == [False] * 5 + [True] * 6 + [False] * 4 + [True] * 6
    assert batch.states_TLD.shape == (21, 3, 32)


@pytest.mark.parametrize(
    ("kind", "settings"), [("eagle", {"steps": 2}), ("eagle3", {}), ("medusa", {}), ("small", {"layers": 2})]
)
def test_a_step_in_parts_is_the_same_step(kind: str, settings: dict) -> None:
    """Sequences of different lengths in different parts weigh by their rows, as in one part."""
    target = tiny_target(torch.float32)
    sequences = [answered((1, 5), range(3, 9)), answered((1,), range(9, 40)), *answers(target, 12)[:2]]
    found = []
    for parts in (1, 2, 4):
        learner = trainer(kind, target, sequences, TrainConfig(accumulate=parts, clip=1e9, warmup=0), **settings)
        metrics = dict(learner.train_step())
        grads = torch.cat([weight.grad.flatten() for weight in learner.head.parameters() if weight.grad is not None])
        found.append((metrics, grads))
    for metrics, grads in found[1:]:
        torch.testing.assert_close(grads, found[0][1], rtol=1e-4, atol=1e-6)
        assert metrics == pytest.approx(found[0][0], rel=1e-4)


def test_hass_reads_its_own_features() -> None:
    """Step 2 of a row is the block over true pairs up to the row's and one more: (its own guess, the next token)."""
    target = tiny_target()
    learner = trainer("eagle", target, answers(target, 9), TrainConfig(), steps=2)
    head = learner.head.double().eval()
    assert isinstance(head, Eagle)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    batch = make_batch(learner.features, [0], head.reads, 0)
    rows = supervised_rows(batch.bounds, batch.answer_T)
    tokens, features_TD = batch.tokens_T.tolist(), batch.states_TLD[:, 0]
    _, metrics = head.loss(batch)
    total = 0.0
    for row, i in enumerate(rows.token_S.tolist()):
        state = head.new_state()
        head.observe(state, tokens[1 : i + 2], features_TD[: i + 1, None], 1)
        if rows.valid(1)[row]:
            head.expand(state, [0], [tokens[i + 2]], 1)
            total += smooth_l1_loss(state.hidden_RD[1], batch.final_TD[i + 2]).item()
    assert metrics["feature_loss_2"].item() == pytest.approx(total / rows.counts(2)[1].item(), rel=1e-5)
    with_one = replace(head.config, steps=1)
    head.config = with_one
    assert "feature_loss_2" not in head.loss(batch)[1]


def test_the_acceptance_loss_is_the_chance_of_acceptance() -> None:
    logits_SQ, p_SQ = torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    q = torch.tensor([9.0, 0.0]).softmax(-1)[0].item()
    expected = torch.tensor([-math.log(0.75), -math.log(q)])  # min(.75, .5) + min(.25, .5); min(1, q) + min(0, 1 - q)
    torch.testing.assert_close(token_loss(logits_SQ, p_SQ, "lk"), expected)
    torch.testing.assert_close(token_loss(logits_SQ, p_SQ, "ce"), torch.tensor([math.log(2), -math.log(q)]))
    with pytest.raises(InputError, match="ce, lk"):
        token_loss(logits_SQ, p_SQ, "mse")


def test_reach_is_the_share_of_rows_whose_guesses_all_hold() -> None:
    """Four rows of one answer; the target's best token is 0 everywhere. Step 1 hits rows 0, 1, 3; step 2, which has
    three rows, hits 1 and 2: accepted are 3/4 and 2/3, all guesses up to the second hold in row 1 only."""
    rows = supervised_rows((0, 6), torch.arange(6) >= 2)
    p_SQ = torch.tensor([[0.9, 0.1]]).expand(4, 2)
    tally = Tally(rows, p_SQ, torch.ones(4, dtype=torch.bool), rows.counts(2))
    good, bad = [1.0, 0.0], [0.0, 1.0]
    tally.add(0, torch.tensor([good, good, bad, good]))
    tally.add(1, torch.tensor([bad, good, good, good]))
    found = {name: round(value.item(), 4) for name, value in tally.metrics.items() if "loss" not in name}
    assert found == {"accept_1": 0.75, "reach_1": 0.75, "accept_2": 0.6667, "reach_2": 0.3333}


def test_long_sequences_give_the_gradients_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in pieces whose scores are made again on the way back: a piece of 4 against one of 512."""
    target = tiny_target()
    found = []
    for piece in (512, 4):
        monkeypatch.setattr(rollout, "_PIECE", piece)
        head = shaken_head(target, list(range(40)), steps=3, layers=2).double().requires_grad_(True)
        batch = make_batch(Streamed(target, answers(target, 12), reads_for(head)), [0, 1, 2], head.reads, 0)
        head.loss(batch)[0].backward()
        found.append([weight.grad for weight in head.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_what_is_kept_of_a_long_sequence_grows_with_its_length() -> None:
    """Not with its square: tensors saved for the way back, by their bytes, from 1,100 to 2,200 tokens."""
    target = tiny_target(torch.float32, layers=3)
    sizes = []
    for length in (1100, 2200):
        head = new_head("eagle3", target, torch.arange(8), steps=3)
        tokens = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(0))
        states_TLD = torch.randn(length, 3, 32, generator=torch.Generator().manual_seed(0))
        batch = Batch(
            tokens,
            (0, length),
            torch.arange(length) >= 10,
            states_TLD,
            states_TLD[:, 0],
            torch.zeros(length, dtype=torch.int64),
            0,
        )
        saved: list[int] = []

        def keep(x: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            head.loss(batch)[0].backward()
        sizes.append(sum(saved))
    assert sizes[1] < 2.5 * sizes[0], sizes


def test_a_tree_of_answers_trains_each_of_them() -> None:
    """Gradients at the boundaries: the first and the last token of every answer are taught, and nothing between."""
    target = tiny_target(torch.float32)
    learner = trainer("eagle3", target, [Sequence(tuple(range(3, 23)), ((4, 7), (12, 15)))], TrainConfig(sequences=1))
    batch = make_batch(learner.features, [0], learner.head.reads, 0)
    batch = replace(batch, best_T=torch.full_like(batch.best_T, 2))  # a token that every draft vocabulary has
    whole = learner.head.loss(batch)[0].item()
    taught = []
    for t in range(20):
        final_TD = batch.final_TD.clone()
        final_TD[t] = torch.randn(32, generator=torch.Generator().manual_seed(t)) * 3
        if learner.head.loss(replace(batch, final_TD=final_TD))[0].item() != whole:
            taught.append(t + 1)  # the state of token t is the teacher of token t + 1
    assert taught == [4, 5, 6, 12, 13, 14]


def test_an_eagle_head_starts_from_the_copy_of_the_feature() -> None:
    """Whatever the token, it guesses that the feature stays; q, k and v are the last layer's, its norm folded in at the
    size of features."""
    target = tiny_target(torch.float32)
    with torch.no_grad():
        target.model.get_parameter("model.norm.weight").mul_(3)
        target.model.get_parameter("model.layers.3.input_layernorm.weight").copy_(torch.linspace(0.5, 2, 32))
    head = new_head("eagle", target)
    assert isinstance(head, Eagle)
    layer = target.layer(-1)
    expected = layer["self_attn.k_proj.weight"] * layer["input_layernorm.weight"] / 3  # the final norm's mean size
    torch.testing.assert_close(head.state_dict()["block.self_attn.k_proj.weight"], expected)
    states_TLD = target.verify([(target.new_cache(), Tree.chain(PROMPTS[0]))], head.reads)[0].hidden_NLD
    state = head.new_state()
    head.observe(state, [*PROMPTS[0][1:], 9], states_TLD, 1)
    error = (state.hidden_RD[0] - states_TLD[-1, 0]).abs().max() / states_TLD[-1, 0].abs().max()
    assert error < 0.1, "small weights on the embedding are all that differs"
