"""The command line as scripts use it: JSON keys, exit codes, one plain sentence for a user's mistake."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import needs_core

import eyas
from eyas import native
from eyas.cli import _parser, main
from eyas.commands.train import with_recipe
from eyas.model import TextStream, choose_device
from eyas.verify import Stop

GENERATE_KEYS = {
    "text", "token_ids", "prompt_tokens", "new_tokens", "target_forwards", "tau", "finish_reason", "seconds",
    "tokens_per_second", "target", "head", "tree", "backend", "dtype", "seed", "temperature", "peak_memory_bytes",
}  # fmt: skip
ROW_KEYS = {
    "workload", "method", "head", "tree", "backend", "dtype", "temperature", "seed", "sequences", "new_tokens",
    "target_forwards", "tau", "alpha_by_depth", "tokens_per_second", "speedup_vs_plain", "identical", "divergences",
    "draft_ms", "verify_ms", "other_ms", "peak_memory_bytes",
}  # fmt: skip


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.count("\n") == 1, "one line on standard output"
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main([*arguments])
    out, err = capsys.readouterr()
    assert code == 2, (code, err)
    assert out == ""
    assert "Traceback" not in err
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("eyas: ")
    return sentence


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_generate(capsys: pytest.CaptureFixture[str], folder: Path, kind: str) -> None:
    common = ("generate", "--target", str(folder / "target"), "--prompt", "hello", "--max-new-tokens", "30")
    sampled = ("--temperature", "0.9", "--seed", "3", "--dtype", "float64")
    for settings in ((), sampled):
        plain = run_json(capsys, *common, *settings)
        drafted = run_json(capsys, *common, *settings, "--head", str(folder / kind), "--tree", "chain:2")
        assert GENERATE_KEYS <= plain.keys()
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["text"] == plain["text"]
        assert (plain["tau"], plain["tree"], drafted["tree"]) == (1.0, None, "chain:2")
        assert drafted["new_tokens"] == len(drafted["token_ids"]) == 30
        assert drafted["tau"] == 29 / drafted["target_forwards"]


def test_generate_equals_transformers(folder: Path) -> None:
    model = eyas.load(str(folder / "target"), str(folder / "eagle3"), dtype="float64")
    for prompt in ("one", "another prompt", "x"):
        ids = model.encode(prompt)
        expected = model.target.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)
        assert model.generate(prompt, max_new_tokens=40).token_ids == expected[0, len(ids) :].tolist()


def test_constraint_flags(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    common = ("generate", "--target", str(folder / "target"), "--prompt", "hello", "--max-new-tokens", "30")
    common = (*common, "--dtype", "float64")
    model = eyas.load(str(folder / "target"), dtype="float64")
    drafted = ("--head", str(folder / "eagle3"), "--tree", "chain:2")
    free = run_json(capsys, *common)["token_ids"]
    written = next(token for token in free if model.decode([token]) not in ("", "\ufffd"))  # a whole character
    banned = model.decode([written])
    without = run_json(capsys, *common, "--bad-word", banned, "--bad-word", "zz", *drafted)["token_ids"]
    assert written not in without
    assert without == model.generate("hello", max_new_tokens=30, bad_words=[banned, "zz"]).token_ids
    assert without == model.generate("hello", max_new_tokens=30, bad_words=[[written]]).token_ids
    forced = run_json(capsys, *common, "--logit-bias", "9=1e6", "--logit-bias", f"{free[0]}=-5", *drafted)["token_ids"]
    assert forced == [9] * 30
    ends_at_once = ("--logit-bias", "2=1e6")
    assert run_json(capsys, *common, *ends_at_once, *drafted)["token_ids"] == [2]
    later = run_json(capsys, *common, *ends_at_once, "--min-new-tokens", "7", *drafted)
    assert (later["new_tokens"], later["token_ids"][-1], later["finish_reason"]) == (8, 2, "stop")
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    schema = ("--json-schema", str(tmp_path / "schema.json"))
    assert run_json(capsys, *common, *schema, *drafted)["text"].strip() in ('"yes"', '"no"')
    rows = run_json(
        capsys, "bench", *common[1:3], "--workload", str(folder / "target" / "chat_template.jinja"), "--limit", "1",
        "--dtype", "float64", "--method", f"{folder / 'eagle3'}", *schema, "--bad-word", "y", "--min-new-tokens", "2",
    )["rows"]  # fmt: skip
    assert [(row["identical"], row["sequences"]) for row in rows] == [(1, 1), (1, 1)]
    assert (
        main([*common, *schema, "--min-new-tokens", "99", "--max-new-tokens", "99"]) == 2
    )  # longer than any that fits
    out, err = capsys.readouterr()
    assert "leave no token to draw" in err and "Traceback" not in err


def test_bad_words_as_texts(folder: Path) -> None:
    model = eyas.load(str(folder / "target"))
    blank, a, b = model.tokenizer.encode(" ab")
    assert model.sampling(bad_words=["ab", [5, 6], " b"]).bad_words == ((a, b), (blank, a, b), (5, 6), (blank, b))
    assert model.sampling(bad_words="ab").bad_words == ((a, b), (blank, a, b))
    assert model.sampling().eos_ids == model.target.spec.eos_ids == (2,)


def test_prompt_files_and_forms(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello\n")
    common = ("generate", "--target", str(folder / "target"), "--max-new-tokens", "5")
    from_file = run_json(capsys, *common, "--prompt-file", str(tmp_path / "prompt.txt"))
    assert from_file["prompt_tokens"] == run_json(capsys, *common, "--prompt", "hello")["prompt_tokens"]
    raw = run_json(capsys, *common, "--prompt", "hello", "--raw")
    assert raw["prompt_tokens"] == 5
    model = eyas.load(str(folder / "target"))
    assert model.encode([{"role": "user", "content": "hello"}]) == model.encode("hello", chat=True)
    assert model.generate(model.encode("hello"), max_new_tokens=5).token_ids == from_file["token_ids"]


def test_text_ends_before_the_stop_string(folder: Path) -> None:
    model = eyas.load(str(folder / "target"))
    whole = model.generate("hello", max_new_tokens=60)
    piece = next(c for c in whole.text[3:] if c != "\ufffd" and whole.text.index(c) > 0)
    cut = model.generate("hello", max_new_tokens=60, stop=[piece])
    assert cut.text == whole.text[: whole.text.index(piece)]
    assert cut.finish_reason == "stop"
    assert piece in model.decode(cut.token_ids)


def test_streaming_adds_up_and_never_splits_characters(folder: Path) -> None:
    model = eyas.load(str(folder / "target"), str(folder / "eagle"))
    for seed in range(4):
        settings = {"max_new_tokens": 50, "temperature": 1.0, "seed": seed}
        assert "".join(model.stream("hello", **settings)) == model.generate("hello", **settings).text
    round_ = model.generate("x", max_new_tokens=1).rounds[0]
    ids = model.tokenizer.encode("aé€🦅b", add_special_tokens=False)
    stream = TextStream(Stop(99, strings=("€🦅!",), decode=model.decode), model.decode)
    pieces = []
    for place, token in enumerate(ids):
        reason = "length" if place == len(ids) - 1 else None
        pieces.append(stream.feed(eyas.generate.Round(None, [], [token], reason, None, 0, 0, 0)))
    assert round_.tree is None
    assert "".join(pieces) == "aé€🦅b"
    assert "\ufffd" not in "".join(pieces)


def test_bench(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text('{"id": "a", "turns": ["hello"]}\n{"id": "b", "turns": ["you", "more"]}\n')
    (tmp_path / "lines.txt").write_text("one\n\ntwo\nthree\n")
    record = run_json(
        capsys, "bench", "--target", str(folder / "target"), "--dtype", "float64", "--limit", "2",
        "--workload", str(tmp_path / "set.jsonl"), "--workload", str(tmp_path / "lines.txt"),
        "--method", f"{folder / 'eagle'}@static", "--method", f"{folder / 'eagle'}@dynamic",
        "--method", f"{folder / 'eagle3'}@chain:2", "--max-new-tokens", "20", "--temperature", "0.8",
    )  # fmt: skip
    assert {"machine", "versions", "target", "rows"} <= record.keys()
    assert [row["method"] for row in record["rows"]] == ["plain", "eagle", "eagle2", "eagle3"] * 2
    for row in record["rows"]:
        assert row.keys() >= ROW_KEYS
        assert (row["sequences"], row["identical"], row["divergences"]) == (2, 2, [])
    assert record["rows"][0]["tau"] == 1.0


def test_a_sampled_tree_claims_no_identity(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    common = ["--target", str(folder / "target"), "--max-new-tokens", "20", "--tree", "sampled:levels=2,width=3"]
    work = ["--workload", str(tmp_path / "lines.txt"), "--method", str(folder / "eagle")]
    work += ["--method", f"{folder / 'eagle3'}@chain:2"]
    for dtype in ("float32", "float64"):
        record = run_json(capsys, "bench", *common, *work, "--temperature", "0.8", "--dtype", dtype)
        plain, drawn, chosen = record["rows"]
        assert (plain["identical"], drawn["identical"], chosen["identical"]) == (2, None, 2)
        assert (drawn["tree"], drawn["divergences"]) == ("sampled:levels=2,width=3", [])
    assert main(["bench", *common, *work, "--temperature", "0.8"]) == 0
    assert "sampled:levels=2,width=3" in capsys.readouterr().out
    for command in (["bench", *work], ["generate", "--prompt", "x", "--head", str(folder / "eagle")]):
        assert "temperature above 0" in refused(capsys, *command, *common)
        assert "temperature above 0" in refused(capsys, *command, *common, "--target", "nowhere"), "before it loads"
    demo = ["demo", *common, "--head", str(folder / "eagle"), "--limit", "1", "--temperature", "1"]
    assert [text["identical"] for text in run_json(capsys, *demo)["texts"]] == [None]
    assert main(demo) == 0
    assert "not claimed" in capsys.readouterr().out


def test_demo_on_a_tiny_model(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    record = run_json(
        capsys, "demo", "--target", str(folder / "target"), "--head", str(folder / "eagle3"), "--limit", "2",
        "--max-new-tokens", "12", "--dtype", "float64",
    )  # fmt: skip
    assert [row["method"] for row in record["rows"]] == ["plain", "eagle3"]
    assert [text["identical"] for text in record["texts"]] == [True, True]


def test_inspect(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    record = run_json(capsys, "inspect", "--head", str(folder / "eagle3"), "--target", str(folder / "target"))
    assert record["head"]["kind"] == "eagle3"
    assert record["head"]["draft_vocabulary"] == 130
    assert record["fit"] == {"fits": True, "findings": []}
    assert "wide" in refused(capsys, "inspect", "--head", str(folder / "eagle"), "--target", str(folder / "other"))
    shutil.copytree(folder / "eagle3", tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    save_file({**load_file(weights), "lm_head.weight": torch.zeros(())}, weights)
    assert run_json(capsys, "inspect", "--head", str(tmp_path / "broken"))["head"]["draft_vocabulary"] is None
    assert "must be a matrix" in refused(
        capsys, "inspect", "--head", str(tmp_path / "broken"), "--target", str(folder / "target")
    )


def test_train_resume_and_use(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt_ids": [1, 9, i + 4], "response_ids": [40 + i, 50, 60, 2]}) for i in range(8)]
    answers = tmp_path / "answers.jsonl.gz"
    answers.write_bytes(gzip.compress("\n".join(lines).encode()))
    out = tmp_path / "head"
    common = (
        "train", "--target", str(folder / "target"), "--answers", str(answers), "--out", str(out), "--dtype", "float32",
        "--draft-vocab", "64", "--checkpoint-every", "2", "--kind", "eagle3", "--features", str(tmp_path / "states"),
    )  # fmt: skip
    record = run_json(capsys, *common, "--steps", "3")
    assert record["steps"] == 3
    assert "holds a training" in refused(capsys, *common, "--steps", "5")
    assert run_json(capsys, *common, "--steps", "5", "--resume")["steps"] == 5
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4  # steps 2, 3, 4 and 5
    assert "eagle3 head" in (out / "card.md").read_text()
    assert "5 steps already" in refused(capsys, *common, "--steps", "5", "--resume")
    assert "draft vocabulary" in refused(capsys, *common[:-6], "--draft-vocab", "63", "--steps", "9", "--resume")
    assert "whole numbers" in refused(capsys, *common, "--reads", "1,x")
    elsewhere = [str(folder / "target") if a == str(out) else a for a in common]
    assert "not empty" in refused(capsys, *elsewhere), "a target is never overwritten"
    target = ("generate", "--target", str(folder / "target"), "--prompt", "x", "--max-new-tokens", "9")
    assert run_json(capsys, *target, "--head", str(out))["token_ids"] == run_json(capsys, *target)["token_ids"]


def answers_file(path: Path, count: int = 8) -> str:
    lines = [json.dumps({"prompt_ids": [1, 9, i + 4], "response_ids": [40 + i, 50, 60, 2]}) for i in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


def test_train_by_a_recipe(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    """A recipe's keys are flags, and flags beside it win."""
    recipe = tmp_path / "recipe.toml"
    settings = {"kind": "medusa", "target": str(folder / "target"), "answers": answers_file(tmp_path / "a.jsonl"),
                "out": str(tmp_path / "medusa"), "dtype": "float32", "draft_vocab": 64, "steps": 3, "shard_mb": 1,
                "learning-rate": 1e-3, "validate_prompts": 1, "tensorboard": False}  # fmt: skip
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    recipe.write_text(text)
    record = run_json(capsys, "train", "--steps", "2", "--recipe", str(recipe))
    assert (record["kind"], record["steps"]) == ("medusa", 2)
    assert record["tau"] is not None and record["serving_difference"] < 1e-3
    target = ("generate", "--target", str(folder / "target"), "--prompt", "x", "--max-new-tokens", "9")
    for backend in ("eager", *(("native",) if native.cpu_features() else ())):
        decode = (*target, "--backend", backend)
        drafted = run_json(capsys, *decode, "--head", str(tmp_path / "medusa"))
        assert drafted["token_ids"] == run_json(capsys, *decode)["token_ids"]
    assert run_json(capsys, *target, "--head", f"medusa:{tmp_path / 'medusa'}")["tau"] is not None
    assert "of kind eagle3" in refused(capsys, *target, "--head", f"medusa:{folder / 'eagle3'}")
    assert run_json(capsys, "inspect", "--head", str(tmp_path / "medusa"))["head"]["kind"] == "medusa"
    assert "own layout" in refused(
        capsys, "export", "--head", str(tmp_path / "medusa"), "--target", str(folder / "target"), "--to", "vllm",
        "--out", str(tmp_path / "e"),
    )  # fmt: skip
    for line, message in (("epochs = [1]", "epochs must be"), ("steps 3", "cannot read"), ("epochs = 3", "--epochs=3")):
        recipe.write_text(text + line)
        assert message in refused(capsys, "train", "--recipe", str(recipe))
    assert "cannot read the recipe" in refused(capsys, "train", "--recipe=" + str(tmp_path / "none.toml"))
    assert "cannot read the recipe" in refused(capsys, "train", "--recipe")


def test_the_shipped_recipe_is_made_of_flags() -> None:
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
    arguments = _parser().parse_args(
        ["train", *with_recipe(["--recipe", str(recipe), "--target=t", "--answers=a", "--out=o"])]
    )
    assert (arguments.kind, arguments.seconds, arguments.sequences) == ("eagle3", 600.0, 4)


def test_train_on_from_a_head(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    """Its weights, a fresh optimiser: with a learning rate of nearly nothing it stays what it was."""
    answers, start = answers_file(tmp_path / "a.jsonl"), str(folder / "eagle3")
    common = ("train", "--target", str(folder / "target"), "--answers", answers, "--dtype", "float32", "--start", start)
    out = tmp_path / "on"
    run_json(capsys, *common, "--out", str(out), "--steps", "2", "--learning-rate", "1e-12", "--ttt-steps", "2")
    before, after = (load_file(path / "model.safetensors") for path in (folder / "eagle3", out))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-2, atol=1e-6)
    assert "of kind eagle3" in refused(capsys, *common, "--out", str(tmp_path / "x"), "--kind", "eagle")
    assert "tensorboard" in refused(capsys, *common, "--out", str(tmp_path / "y"), "--tensorboard")
    assert "torchrun" in refused(capsys, *common, "--out", str(tmp_path / "z"), "--shard-target")
    for shape in (["--layers", "2"], ["--reads", "0,1,2"], ["--norm-output"]):
        assert f"{shape[0]} shapes a new head" in refused(capsys, *common, "--out", str(tmp_path / "w"), *shape)


@needs_core
@pytest.mark.parametrize(("kind", "dtype"), [("eagle3", "int8"), ("eagle", "bfloat16"), ("medusa", "int8")])
def test_train_on_the_states_that_will_serve(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, kind: str, dtype: str
) -> None:
    out = tmp_path / "head"
    common = ("--target", str(folder / "target"), "--backend", "native", "--dtype", dtype)
    record = run_json(
        capsys, "train", *common, "--answers", answers_file(tmp_path / "a.jsonl"), "--out", str(out), "--kind", kind,
        "--steps", "2", "--draft-vocab", "64", "--features", str(tmp_path / "states"), "--validate-tree", "chain:2",
    )  # fmt: skip
    assert record["tau"] is not None and record["serving_difference"] < 1e-3
    assert json.loads((out / "config.json").read_text())["eyas_target"]["dtype"] == dtype
    assert f"native back end, {dtype}" in (out / "card.md").read_text()
    states = load_file(tmp_path / "states" / "states-00000.safetensors")["states"]
    assert states.dtype == torch.bfloat16
    decode = ("generate", *common, "--prompt", "x", "--max-new-tokens", "9")
    assert run_json(capsys, *decode, "--head", str(out))["token_ids"] == run_json(capsys, *decode)["token_ids"]


def test_train_a_head_of_two_layers(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(
        "".join(json.dumps({"prompt_ids": [1, 9, n], "response_ids": [40 + n, 50, 60, 2]}) + "\n" for n in range(4, 12))
    )
    out = str(tmp_path / "head")
    common = (
        "train", "--target", str(folder / "target"), "--answers", str(answers), "--out", out, "--dtype", "float32",
        "--draft-vocab", "64", "--steps", "2",
    )  # fmt: skip
    assert "1 to 5" in refused(capsys, *common, "--layers", "6")
    assert "EAGLE-1" in refused(capsys, *common, "--layers", "2", "--kind", "eagle")
    run_json(capsys, *common, "--layers", "2")
    assert "layers: 2" in (Path(out) / "card.md").read_text()
    found = run_json(capsys, "inspect", "--head", out)["head"]
    assert (found["layers"], found["switches"]) == (2, [])
    for backend in ("eager", *(("native",) if native.cpu_features() else ())):
        target = ("generate", "--target", str(folder / "target"), "--prompt", "x", "--backend", backend)
        plain = run_json(capsys, *target, "--max-new-tokens", "12")
        assert main([*target, "--max-new-tokens", "12", "--head", out, "--json"]) == 0
        written = capsys.readouterr()
        assert json.loads(written.out)["token_ids"] == plain["token_ids"]
        assert ("drafts in PyTorch" in written.err) == (backend == "native")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "nowhere", "--prompt", "x"], "unknown target 'nowhere'"),
        (["--target", "{empty}", "--prompt", "x"], "no config.json"),
        (["--target", "{t}", "--prompt", ""], "prompt is empty"),
        (["--target", "{t}", "--prompt", "x" * 400], "context holds 256"),
        (["--target", "{t}", "--prompt", "x", "--top-p", "0"], "top_p"),
        (["--target", "{t}", "--prompt", "x", "--top-p", "1.01"], "top_p"),
        (["--target", "{t}", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--target", "{t}", "--prompt", "x", "--top-k", "-2"], "top_k"),
        (["--target", "{t}", "--prompt", "x", "--min-new-tokens", "-1"], "min_new_tokens"),
        (["--target", "{t}", "--prompt", "x", "--logit-bias", "5"], "ID=NUMBER"),
        (["--target", "{t}", "--prompt", "x", "--logit-bias", "a=1"], "ID=NUMBER"),
        (["--target", "{t}", "--prompt", "x", "--logit-bias", "5=nan"], "logit_bias"),
        (["--target", "{t}", "--prompt", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], "once"),
        (["--target", "{t}", "--prompt", "x", "--logit-bias", "260=1"], "between 0 and 259"),
        (["--target", "{t}", "--prompt", "x", "--bad-word", ""], "at least one character"),
        (["--target", "{t}", "--prompt", "x", "--json-schema", "{t}/nothing"], "cannot read"),
        (["--target", "{t}", "--prompt", "x", "--json-schema", "{t}/config.json/x"], "cannot read"),
        (["--target", "{t}", "--prompt", "x", "--json-schema", "{t}/model.safetensors"], "cannot read"),
        (["--target", "{t}", "--prompt", "x", "--json-schema", "{t}/chat_template.jinja"], "not JSON"),
        (["--target", "{t}", "--prompt", "x", "--json-schema", "{schema}"], "--json-schema"),
        (["--target", "{t}", "--prompt", "x", "--max-new-tokens", "0"], "must be between 1"),
        (["--target", "{t}", "--prompt", "x", "--max-new-tokens", "many"], "must be between 1 and 1000000, got many"),
        (["--target", "{t}", "--prompt", "x", "--tree", "bush"], "unknown tree 'bush'"),
        (["--target", "{t}", "--prompt", "x", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--target", "{t}", "--prompt", "x", "--dtype", "float16"], "float16 is for GPUs"),
        (["--target", "{t}", "--prompt", "x", "--device", "cuda:99"], "no device 'cuda:99'"),
        (["--target", "{t}", "--prompt", "x", "--device", "meta"], "no device 'meta'"),
        (["--target", "{t}", "--prompt", "x", "--device", "toaster"], "unknown device 'toaster'"),
        (["--target", "{t}", "--prompt", "x", "--head", "nowhere"], "unknown head 'nowhere'"),
        (["--target", "{t}", "--prompt", "x", "--threads", "0"], "--threads"),
        (["--target", "{t}", "--prompt", "x", "--stop", ""], "stop string"),
        (["--target", "{t}", "--prompt-file", "{t}/nothing"], "cannot read the prompt file"),
        (["--target", "{t}"], "prompt"),
        (["--target", "{t}", "--prompt", "x", "--wings"], "unrecognized arguments"),
        (["--target", "{gguf}", "--prompt", "x"], "cannot read the GGUF file"),
        (["--target", "{broken}", "--prompt", "x"], "cannot load the target"),
    ],
)
def test_bad_input_is_one_plain_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text((folder / "target" / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "broken" / name).write_text((folder / "target" / name).read_text())
    weights = (folder / "target" / "model.safetensors").read_bytes()
    (tmp_path / "broken" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (tmp_path / "schema.json").write_text('{"type": "colour"}')
    places = {"t": folder / "target", "empty": tmp_path / "empty", "gguf": tmp_path / "model.gguf"}
    places["schema"] = tmp_path / "schema.json"
    filled = [a.format(**places, broken=tmp_path / "broken") for a in arguments]
    assert message in refused(capsys, "generate", *filled)
    assert message in refused(capsys, "generate", *filled, "--json")
    assert not (tmp_path / "cache" / "targets").exists(), "nothing half-written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-file=--"], "--prompt-file needs another value than --"),
        (["--prompt-file", "\x00"], "without null characters"),
        (["--prompt-file", "\ud800"], "must be a text"),
        (["--head", "x" * 5000], "unknown head"),
        (["a\nb\x1b[2J\u2028c"], "unrecognized arguments: a b\\x1b[2J c (see"),
        (["--threads", "x"], "must be between 1 and 1024, got x"),
        (["--tree", "chain:" + "9" * 5000], "unknown tree"),
        (["--json-schema", "{nan}"], "nan.json: json_schema: "),
        (["--repetition-penalty", "1e-300", "--temperature", "1"], "the penalties"),
    ],
)
def test_a_sentence_has_one_line_that_can_be_printed(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "nan.json").write_text('{"enum": [NaN]}')
    filled = [argument.replace("{nan}", str(tmp_path / "nan.json")) for argument in arguments]
    for form in ((), ("--json",)):
        sentence = refused(capsys, "generate", "--target", str(folder / "target"), "--prompt", "x", *form, *filled)
        assert message in sentence and sentence.isprintable() and len(sentence) < 2100


def test_a_number_of_threads_that_is_none(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("0", "1025", "x", "9" * 5000):
        monkeypatch.setenv("EYAS_NUM_THREADS", number)
        assert "from 1 to 1024" in refused(capsys, "inspect", "--target", str(folder / "target"))


def test_what_goes_wrong_in_an_answer_is_said_on_its_own_line(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text('{"const": "yes"}')
    common = ("generate", "--target", str(folder / "target"), "--prompt", "x", "--min-new-tokens", "99")
    common = (*common, "--json-schema", str(tmp_path / "schema.json"))
    assert main([*common, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-2].strip() == '"yes"'
    assert err.splitlines()[-1].startswith("eyas: bad words")
    assert main([*common]) == 2
    out, err = capsys.readouterr()
    assert out.strip() == '"yes"' and err.splitlines()[-1].startswith("eyas: bad words")


@pytest.mark.parametrize(
    "content", ["", "{\n", '{"turns": []}', '{"turns": [3]}', '{"turns": "hello"}', "[1]", "[" * 99_999]
)
def test_bad_workloads(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "set.jsonl").write_text(content)
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "whale", "turns": ["x" * 999]}))
    assert "whale" in refused(
        capsys, "bench", "--target", str(folder / "target"), "--workload", str(tmp_path / "long.jsonl")
    )
    refused(capsys, "bench", "--target", str(folder / "target"), "--workload", str(tmp_path / "set.jsonl"))
    refused(capsys, "bench", "--target", str(folder / "target"), "--workload", str(tmp_path / "missing.jsonl"))


def test_random_flags_never_give_a_traceback(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Exit code 0 or 2 for whatever stands on the command line."""
    draw = random.Random(0)
    values = {
        "--temperature": ["0", "0.5", "1", "-1", "nan", "inf", "x", "1e-30", "1e30"],
        "--top-k": ["0", "1", "5", "-1", "999999999", "1.5"],
        "--top-p": ["1", "0.5", "0", "1e-9", "-1", "nan"],
        "--min-p": ["0", "0.3", "-1", "2"],
        "--repetition-penalty": ["1", "1.3", "0", "-1", "nan"],
        "--presence-penalty": ["0.5", "inf"],
        "--frequency-penalty": ["-0.5", "x"],
        "--min-new-tokens": ["0", "3", "99", "-1", "x"],
        "--logit-bias": ["5=2.5", "2=99", "260=1", "5=inf", "=", "5"],
        "--bad-word": ["a", "", "\ufffd", "</s>"],
        "--json-schema": [str(folder / "schema.json"), "nowhere"],
        "--seed": ["0", "-5", "9223372036854775807", "9223372036854775808", "x"],
        "--max-new-tokens": ["1", "2", "9", "0", "-1"],
        "--tree": [
            "auto",
            "chain:1",
            "chain:99",
            "static",
            "dynamic:nodes=3",
            "dynamic:levels=9,top_k=400,nodes=7",
            "?",
        ],
        "--head": ["none", str(folder / "eagle"), str(folder / "eagle3"), "nothing"],
        "--prompt": ["x", "", "é€", "\x00", "<s></s>"],
        "--stop": ["a", "", "\ufffd"],
        "--dtype": ["float32", "float64", "bfloat16", "int8"],
    }
    (folder / "schema.json").write_text('{"type": "array", "items": {"type": "boolean"}}')
    outcomes = []
    for _ in range(120):
        chosen = draw.sample(sorted(values), draw.randint(1, 6))
        flags = [part for flag in chosen for part in (flag, draw.choice(values[flag]))]
        outcomes.append(main(["generate", "--target", str(folder / "target"), "--max-new-tokens", "4", *flags]))
        assert "Traceback" not in capsys.readouterr().err
    assert set(outcomes) == {0, 2}


def test_a_target_whose_weights_do_not_fit_its_config_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "less")
    tensors = load_file(tmp_path / "less" / "model.safetensors")
    taken = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, tmp_path / "less" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(eyas.InputError, match="missing_keys model.layers.1.self_attn.q_proj.weight"):
        eyas.load(str(tmp_path / "less"))
    save_file({**tensors, "model.layers.1.self_attn.q_proj.weight": taken, "model.layers.9.x": taken.clone()},
              tmp_path / "less" / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(eyas.InputError, match="unexpected_keys model.layers.9.x"):
        eyas.load(str(tmp_path / "less"))


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ x", "{{ raise_exception('a\nb') }}"])
def test_a_chat_template_that_fails(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, template: str
) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    common = ("generate", "--target", str(tmp_path / "target"), "--prompt", "x", "--max-new-tokens", "2")
    assert "chat template" in refused(capsys, *common)
    run_json(capsys, *common, "--raw")


def test_end_tokens_that_are_none(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    settings = tmp_path / "target" / "generation_config.json"
    config = json.loads(settings.read_text())
    for wrong in ("x", True, [2, 2.5], [None]):
        settings.write_text(json.dumps({**config, "eos_token_id": wrong}))
        with pytest.raises(eyas.InputError, match="end tokens|eos_token_id"):
            eyas.load(str(tmp_path / "target"), dtype="float32")
    settings.write_text(json.dumps({**config, "eos_token_id": [-1, 2, 260]}))
    model = eyas.load(str(tmp_path / "target"), dtype="float32")
    assert model.target.spec.eos_ids == (2,), "of those outside the vocabulary none is ever drawn"


def test_wrong_types_are_refused(folder: Path) -> None:
    model = eyas.load(str(folder / "target"), str(folder / "eagle"), tree=eyas.Chain(2))
    for prompt in (
        None,
        3,
        torch.tensor(3),
        np.array(3),
        [],
        [True],
        [1.5],
        [999],
        [None],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        "\ud800",
    ):
        with pytest.raises(eyas.InputError):
            model.generate(prompt)  # type: ignore[arg-type]
    for wrong in (
        {"max_new_tokens": "3"},
        {"max_new_tokens": 2.5},
        {"temperature": None},
        {"seed": 1.5},
        {"stop": [3]},
        {"bad_words": 3},
        {"bad_words": [3]},
        {"bad_words": [""]},
        {"bad_words": ["\ud800"]},
        {"bad_words": [[260]]},
        {"logit_bias": {"5": 1.0}},
        {"min_new_tokens": "3"},
        {"json_schema": "{"},
        {"regex": None},
        {"regex": "\ud800"},
        {"stop": 3},
        {"stop": None},
        {"chat": "yes"},
        {"chat": np.array([1, 2])},
        {"n": 10**9},
        {"logprobs": torch.tensor([5, 6])},
        {"logits_processor": 3},
        {"logits_processor": [3]},
        {"streamer": 3},
        {"bad_words": [[token] for token in range(260)], "min_new_tokens": 9},
    ):
        with pytest.raises(eyas.InputError):
            model.generate("x", **wrong)  # type: ignore[arg-type]
    for wrong in (
        {"target": 3},
        {"target": "x" * 5000},
        {"head": 3},
        {"head": "x" * 5000},
        {"head": ["lookup"]},
        {"tree": None},
        {"tree": 3},
        {"tree": "static:\x00"},
        {"backend": ["eager"]},
        {"backend": np.array([1, 2])},
        {"dtype": np.array([1, 2])},
        {"dtype": 3},
        {"device": 1.5},
    ):
        with pytest.raises(eyas.InputError):
            eyas.load(**{"target": str(folder / "target"), **wrong})  # type: ignore[arg-type]
    assert model.generate("x", max_new_tokens=3, logits_processor=None) is not None
    ids = np.array(model.encode("x"))
    assert model.generate(ids, max_new_tokens=3).token_ids == model.generate("x", max_new_tokens=3).token_ids
    whole = model.generate("x", max_new_tokens=9)
    assert model.generate("x", max_new_tokens=9, stop="never there").text == whole.text


# -- back ends ---------------------------------------------------------------------------------------------------------


@needs_core
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_native_generation(capsys: pytest.CaptureFixture[str], folder: Path, kind: str, dtype: str) -> None:
    common = ("generate", "--target", str(folder / "target"), "--prompt", "hello", "--max-new-tokens", "30")
    common = (*common, "--backend", "native", "--dtype", dtype)
    for settings in ((), ("--temperature", "0.9", "--seed", "3", "--threads", "1")):
        plain = run_json(capsys, *common, *settings)
        drafted = run_json(capsys, *common, *settings, "--head", str(folder / kind), "--tree", "static")
        assert (drafted["backend"], drafted["dtype"]) == ("native", dtype)
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["tau"] == 29 / drafted["target_forwards"]


def test_auto_takes_the_native_back_end_where_it_can(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(folder / "target")
    fast = native.fast_kernels()
    for dtype, backend in ((None, "native"), ("bfloat16", "native"), ("float32", "eager"), ("float64", "eager")):
        spec = eyas.load(target, dtype=dtype).target.spec
        assert spec.backend == (backend if fast else "eager")
        assert dtype is None or str(spec.dtype) == f"torch.{dtype}"
    monkeypatch.setattr(native, "fast_kernels", lambda: False)  # another CPU, or no compiler at install
    spec = eyas.load(target).target.spec
    assert (spec.backend, spec.dtype) == ("eager", torch.float32)
    with pytest.raises(eyas.InputError, match="int8"):
        eyas.load(target, dtype="int8")
    for backend, dtype in (("native", "float32"), ("eager", "int8"), ("gpu", None), ("auto", "int4")):
        with pytest.raises(eyas.InputError, match="int8|gpu"):
            eyas.load(target, backend=backend, dtype=dtype)


@needs_core
def test_auto_falls_back_where_the_core_does_not_know_the_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "gelu")
    config = json.loads((tmp_path / "gelu" / "config.json").read_text())
    (tmp_path / "gelu" / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    assert eyas.load(str(tmp_path / "gelu"), dtype="bfloat16").target.spec.backend == "eager"
    for dtype, backend in (("bfloat16", "native"), ("int8", "auto")):
        with pytest.raises(eyas.InputError, match="activations"):
            eyas.load(str(tmp_path / "gelu"), dtype=dtype, backend=backend)


@needs_core
def test_packed_weights_are_kept_and_follow_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder / "target", tmp_path / "target")
    load = partial(eyas.load, str(tmp_path / "target"), backend="native", dtype="int8")
    first = load().generate("hello", max_new_tokens=9).token_ids
    (packed,) = (tmp_path / "cache" / "packed").iterdir()
    written = packed.stat().st_mtime_ns
    assert load().generate("hello", max_new_tokens=9).token_ids == first
    assert packed.stat().st_mtime_ns == written, "the second start reads"
    weights = tmp_path / "target" / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    assert load().generate("hello", max_new_tokens=9).token_ids != first
    assert len(list((tmp_path / "cache" / "packed").iterdir())) == 2


@needs_core
def test_what_int8_costs(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(
        "".join(json.dumps({"prompt_ids": [1, 5, n], "response_ids": [n, 7, 2]}) + "\n" for n in range(9, 14))
    )
    common = ("inspect", "--target", str(folder / "target"), "--dtype", "int8")
    found = run_json(capsys, *common, "--answers", str(answers), "--limit", "4")["quality"]
    assert found["tokens"] == 12
    assert abs(found["int8_costs_percent"]) < 25 and min(found["perplexity"].values()) > 1
    assert "answer" in refused(capsys, *common, "--answers", str(tmp_path / "missing.jsonl"))


@needs_core
def test_a_broken_draft_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "eagle", tmp_path / "eagle")
    listed = tmp_path / "eagle" / "vocabulary.json"
    listed.write_text(json.dumps(list(range(0, 200, 2))))
    model = eyas.load(str(folder / "target"), str(tmp_path / "eagle"), backend="native")
    assert model.drafter is not None and model.drafter.can_propose(4) and not model.drafter.can_propose(5)
    for wrong in ("[3, 2]", "[1, 1]", "[-1]", "[9999]", "[]", "{}", "[1.0]", "x"):
        listed.write_text(wrong)
        with pytest.raises(eyas.InputError, match="vocabulary.json"):
            eyas.load(str(folder / "target"), str(tmp_path / "eagle"), backend="native")


@pytest.mark.parametrize("device", [10**30, "toaster", 1.5, "cuda:99", "meta"])
def test_devices_that_are_none_here(device: object) -> None:
    with pytest.raises(eyas.InputError, match="device"):
        choose_device(device)  # type: ignore[arg-type]  # wrong types are the point
