"""The Medusa drafter: independent heads on one state, drafted losslessly, trained, kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_target
from torch.nn.functional import linear, silu
from training import answers, trainer

from eyas.checkpoint import read_head_for, save_head, serving
from eyas.drafters.medusa import Medusa
from eyas.drafters.rollout import supervised_rows
from eyas.errors import InputError
from eyas.generate import generate, generate_plain
from eyas.initial import for_training, new_head
from eyas.measure import tau, timed
from eyas.policies import Chain, parse_policy
from eyas.sampling import Sampling
from eyas.train import TrainConfig, make_batch
from eyas.tree import Tree
from eyas.verify import Stop

PROMPT = [1, 20, 33, 4, 8]


def shaken(target, vocabulary: list[int] | None = None, **settings: int) -> Medusa:
    ids_Q = None if vocabulary is None else torch.tensor(vocabulary)
    head = new_head("medusa", target, ids_Q, **settings)
    assert isinstance(head, Medusa)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return head.to(target.spec.dtype).eval().requires_grad_(False)


def test_candidates_are_those_of_the_heads() -> None:
    """Level j is the j-th head's guess from the last true state, whatever was drafted above; below the last, none."""
    target = tiny_target()
    head = shaken(target, list(range(0, 60, 2)), steps=2, layers=2)
    hidden_TLD = target.verify([(target.new_cache(), Tree.chain(PROMPT))], head.reads)[0].hidden_NLD
    state = head.new_state(PROMPT[0])
    levels = [head.observe(state, [*PROMPT[1:], 9], hidden_TLD, 3)]
    levels += [head.expand(state, [0, 0], [2, 4], 3), head.expand(state, [1], [5], 3)]
    f_D = hidden_TLD[-1, 0]
    for level in (0, 1):
        h_D = f_D
        for block in range(2):
            weight, bias = (head.state_dict()[f"heads.{level}.{block}.linear.{name}"] for name in ("weight", "bias"))
            h_D = h_D + silu(linear(h_D, weight, bias))
        q_Q = linear(h_D, target.head_VD[torch.arange(0, 60, 2)]).float().log_softmax(-1)
        expected = (2 * q_Q.topk(3).indices).tolist()
        for row in range(1 + level):
            assert levels[level].tokens_KW[row].tolist() == expected
            torch.testing.assert_close(levels[level].logprobs_KW[row], q_Q.topk(3).values)
    assert levels[2].tokens_KW.shape == (1, 0)
    assert head.can_propose(4) and not head.can_propose(5)


@pytest.mark.parametrize("tree", ["chain:3", "static", "dynamic:levels=4,top_k=3,nodes=8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafted_is_plain(tree: str, temperature: float) -> None:
    target = tiny_target()
    sampling, stop = Sampling(temperature=temperature, seed=3), Stop(30, (2,))
    plain = timed(generate_plain(target, PROMPT, sampling, stop))
    for vocabulary in (None, list(range(40))):
        drafted = timed(generate(target, shaken(target, vocabulary), parse_policy(tree), PROMPT, sampling, stop))
        assert drafted.tokens == plain.tokens


def test_rows_are_held_to_the_target_further_on() -> None:
    """Head j's loss of a row is the cross-entropy of the target's distribution j places after its first prediction."""
    target = tiny_target(torch.float32)
    learner = trainer("medusa", target, answers(target, 9), TrainConfig())
    head = learner.head
    assert isinstance(head, Medusa)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2
    batch = make_batch(learner.features, [0, 1], head.reads, 0)
    rows = supervised_rows(batch.bounds, batch.answer_T)
    _, metrics = head.loss(batch)
    ids_Q = head.draft_vocabulary_Q
    assert ids_Q is not None
    for step, module in enumerate(head.heads):
        losses, hits, count = 0.0, 0, 0
        for row, place in enumerate(rows.token_S.tolist()):
            if rows.valid(step)[row]:
                p_V = linear(batch.final_TD[place + 1 + step], target.head_VD)
                q_Q = linear(module(batch.states_TLD[place, 0]), target.head_VD[ids_Q]).log_softmax(-1)
                known = int(p_V.argmax()) in ids_Q.tolist()
                losses -= (p_V[ids_Q].softmax(-1) * q_Q).sum().item() * known
                hits += known and int(ids_Q[q_Q.argmax()]) == int(p_V.argmax())
                count += 1
        torch.testing.assert_close(metrics[f"loss_{step + 1}"].item(), losses / count, rtol=1e-4, atol=1e-5)
        assert metrics[f"accept_{step + 1}"].item() == pytest.approx(hits / count)


def test_training_makes_drafts_that_are_accepted() -> None:
    target = tiny_target(torch.float32)
    sequences = answers(target, 13)
    config = TrainConfig(steps=400, learning_rate=3e-2, warmup=20, clip=5.0)
    learner = trainer("medusa", target, sequences, config)
    for _ in range(400):
        learner.train_step()
    drafter = serving(learner.head, target)
    decoded = [
        timed(generate(target, drafter, Chain(3), s.tokens[: s.spans[0][0]], Sampling(), Stop(13))) for s in sequences
    ]
    assert [a.tokens for a in decoded] == [s.answer_tokens for s in sequences]
    length = tau(decoded)
    assert length is not None and length > 2.5


def test_it_is_kept_on_disk_and_trained_on(tmp_path: Path) -> None:
    target = tiny_target(torch.float32)
    head = shaken(target, list(range(5, 45)), steps=3, layers=2)
    save_head(head, tmp_path, {}, "card\n", torch.float32, shard_mb=1)
    again = read_head_for(str(tmp_path), target)
    assert isinstance(again, Medusa) and (again.config.heads, again.config.layers, again.reads) == (3, 2, (4,))
    assert again.draft_vocabulary_Q is not None and again.draft_vocabulary_Q.tolist() == list(range(5, 45))
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    learner = for_training(again, 3, 0.0, "lk")
    assert learner.config.token_loss == "lk" and all(weight.requires_grad for weight in learner.parameters())
    with pytest.raises(InputError, match="3 heads"):
        for_training(again, 4, 0.0, "ce")


def test_absurd_settings_are_refused() -> None:
    target = tiny_target(torch.float32)
    for settings in ({"steps": 17}, {"layers": 17}, {"norm_output": True}):
        with pytest.raises(InputError):
            new_head("medusa", target, **settings)
    with pytest.raises(InputError, match="medusa"):
        new_head("hydra", target)
    assert VOCAB == target.spec.vocab_size
