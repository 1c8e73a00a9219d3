"""A small model distilled on the target's answers: the slice that it starts from, its objective, its folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli import answers_file, refused, run_json
from tiny import FAMILY_SETTINGS, VOCAB, needs_core, tiny_target, tiny_tokenizer
from torch import Tensor, nn
from training import answered, answers, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from eyas.checkpoint import save_student
from eyas.drafters import student
from eyas.drafters.small_model import SmallModel
from eyas.drafters.student import Student
from eyas.errors import InputError
from eyas.fit import serving_difference
from eyas.initial import new_head, spread
from eyas.train import TrainConfig, make_batch

TOKENS = torch.tensor([[1, 5, 9, 3, 20, 33, 4, 8, 50, 11, 12]])  # longer than the windows


def logits(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits[0]


def test_layers_are_spread_by_hand() -> None:
    assert spread(4, 30) == [0, 10, 19, 29]
    assert spread(3, 5) == [0, 2, 4]
    assert spread(2, 30) == [0, 29]
    assert spread(1, 30) == [0]
    assert spread(4, 4) == [0, 1, 2, 3]
    for count in (-1, 0, 5):
        with pytest.raises(InputError, match="1 to 4 layers"):
            spread(count, 4)


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_a_slice_is_the_target_without_the_other_layers(family: str, tmp_path: Path) -> None:
    """Each layer of its own kind still, whatever kind its place had; and transformers reads the folder as the same."""
    target = tiny_target(torch.float32, family=family, layers=6)
    learner = new_head("small", target, layers=3)
    assert isinstance(learner, Student) and learner.config.layers == (0, 2, 5)
    whole = target.model.base_model
    pruned = copy.deepcopy(target.model)
    pruned.base_model.layers = nn.ModuleList([copy.deepcopy(whole.layers[i]) for i in (0, 2, 5)])
    kinds = target.model.config.to_dict().get("layer_types")
    pruned.config.num_hidden_layers = 3
    if kinds:
        pruned.config.layer_types = [kinds[i] for i in (0, 2, 5)]
        assert len(set(pruned.config.layer_types)) == 2, "the test wants layers of both kinds"
    torch.testing.assert_close(logits(learner.model), logits(pruned), rtol=0, atol=1e-5)
    save_student(learner, tiny_tokenizer(), tmp_path, "a card\n", torch.float32)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644, "others may read it"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.num_hidden_layers == 3
    torch.testing.assert_close(logits(loaded), logits(learner.model), rtol=0, atol=1e-5)
    assert loaded.generation_config.eos_token_id == [2]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []


def plain_loss(learner: Student, target_logits: list[Tensor], sequences: list) -> tuple[Tensor, float]:
    """Cross-entropy of the target's distribution at every answer token but one that begins the text, and the share of
    best tokens that agree."""
    losses, hits = [], []
    for sequence, p_TV in zip(sequences, target_logits, strict=True):
        q_TV = learner.model(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0].log_softmax(-1)
        for first, last in sequence.spans:
            for place in range(max(first, 2), last):
                p_V = p_TV[place - 1].softmax(-1)
                losses.append(-(p_V * q_TV[place - 1]).sum())
                hits.append(bool(p_V.argmax() == q_TV[place - 1].argmax()))
    return torch.stack(losses).mean(), sum(hits) / len(hits)


@pytest.mark.parametrize("piece", [512, 7])
def test_the_loss_is_that_of_a_plain_reimplementation(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """In one piece and in several, with its gradient; embedding and output head have none."""
    monkeypatch.setattr(student, "_PIECE", piece)
    target = tiny_target()
    sequences = [answered((1, 5), range(3, 9)), answered((), range(9, 20)), *answers(target, 12)[:2]]
    learner = trainer("small", target, sequences, TrainConfig(), layers=2)
    small = learner.head.double()
    assert isinstance(small, Student)
    batch = make_batch(learner.features, [0, 1, 2, 3], small.reads, 0)
    expected, hits = plain_loss(small, [logits(target.model, torch.tensor([s.tokens])) for s in sequences], sequences)
    expected.backward()
    grads = {name: weight.grad.clone() for name, weight in small.named_parameters() if weight.grad is not None}
    small.zero_grad()
    loss, metrics = small.loss(batch)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    assert metrics["loss_1"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["accept_1"].item() == metrics["reach_1"].item() == pytest.approx(hits)
    found = {name: weight.grad for name, weight in small.named_parameters() if weight.grad is not None}
    assert found.keys() == grads.keys() and not any("embed" in name or "lm_head" in name for name in found)
    for name, grad in found.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-8)


def test_a_batch_without_an_answer_weighs_nothing() -> None:
    target = tiny_target(torch.float32)
    learner = trainer("small", target, answers(target, 5), TrainConfig(sequences=1))
    batch = make_batch(learner.features, [0], (), 0)
    batch.answer_T[:] = False
    loss, metrics = learner.head.loss(batch)
    loss.backward()
    assert loss.item() == 0 and set(metrics) == {"loss_1", "accept_1", "reach_1"}


def test_embedding_and_output_head_stay(tmp_path: Path) -> None:
    target = tiny_target(torch.float32)
    learner = trainer("small", target, answers(target), TrainConfig(sequences=2, weight_decay=0.5))
    before = {name: weight.clone() for name, weight in learner.head.named_parameters()}
    learner.train_step()
    changed = {name for name, weight in learner.head.named_parameters() if not torch.equal(weight, before[name])}
    assert before.keys() - changed == {"model.model.embed_tokens.weight", "model.lm_head.weight"}
    assert changed == set(learner.weights)
    learner.save(tmp_path / "state")
    assert not [name for name in load_file(tmp_path / "state") if "embed" in name or "lm_head" in name]


def test_drafting_is_what_was_trained() -> None:
    """And a model that drafts as something else is found out."""
    target = tiny_target(torch.float32)
    learner = trainer("small", target, answers(target, 9), TrainConfig(), layers=2)
    learner.train_step()
    assert serving_difference(learner.head, learner.features) < 1e-4
    reads = SmallModel.observe

    def shifted(self, state, tokens, hidden_TLD, width):
        return reads(self, state, [(token + 1) % VOCAB for token in tokens], hidden_TLD, width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SmallModel, "observe", shifted)
        assert serving_difference(learner.head, learner.features) > 1e-2


BACKENDS = ["eager", pytest.param("native", marks=needs_core)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_train_resume_and_use(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, backend: str) -> None:
    out, dtype = tmp_path / "small", "bfloat16" if backend == "native" else "float32"
    common = ("--target", str(folder / "target"), "--backend", backend, "--dtype", dtype)
    train = ("train", *common, "--answers", answers_file(tmp_path / "a.jsonl"), "--out", str(out), "--kind", "small",
             "--layers", "2", "--features", str(tmp_path / "states"), "--validate-tree", "chain:2")  # fmt: skip
    record = run_json(capsys, *train, "--steps", "2")
    assert (record["kind"], record["steps"]) == ("small", 2)
    assert record["tau"] is not None and record["serving_difference"] < 1e-3
    assert run_json(capsys, *train, "--steps", "4", "--resume")["steps"] == 4
    card = (out / "card.md").read_text()
    assert "small model for" in card and "started from layers [0, 3] of the target" in card
    head = f"small:{out}"
    decode = ("generate", *common, "--prompt", "x", "--max-new-tokens", "9")
    drafted = run_json(capsys, *decode, "--head", head, "--tree", "chain:2")
    assert drafted["token_ids"] == run_json(capsys, *decode)["token_ids"] and drafted["backend"] == backend
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny_tokenizer().get_vocab()
    assert "cannot resume" in refused(capsys, *train, "--steps", "9", "--resume", "--layers", "3")


def test_any_small_model_of_the_vocabulary_can_be_trained_on(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    """Of another width: with a learning rate of nearly nothing it stays what it was."""
    out = tmp_path / "on"
    run_json(
        capsys, "train", "--target", str(folder / "target"), "--answers", answers_file(tmp_path / "a.jsonl"), "--out",
        str(out), "--kind", "small", "--start", f"small:{folder / 'other'}", "--dtype", "float32", "--steps", "2",
        "--learning-rate", "1e-12", "--shard-mb", "1",
    )  # fmt: skip
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder / "other", out))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name].float(), weight, rtol=1e-2, atol=1e-6)
    assert "a model of its own" in (out / "card.md").read_text()


def test_refusals(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    train = ("train", "--answers", answers_file(tmp_path / "a.jsonl"), "--kind", "small", "--dtype", "float32")
    common = (*train, "--target", str(folder / "target"), "--out", str(tmp_path / "out"))
    assert "1 to 4 layers, as many as its target, got 5" in refused(capsys, *common, "--layers", "5")
    assert "one depth deep, got 2" in refused(capsys, *common, "--ttt-steps", "2")
    assert "EAGLE-3 heads only" in refused(capsys, *common, "--fc-norm")
    assert "unknown target" in refused(capsys, *common, "--start", "small:nowhere")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2))
    gpt2.save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    said = refused(capsys, *train, "--target", str(tmp_path / "gpt2"), "--out", str(tmp_path / "out"))
    assert "models of type 'gpt2' are not supported" in said
    assert not (tmp_path / "out" / "model.safetensors").exists()
