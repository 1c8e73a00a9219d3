"""Faults that were met in the wild, planted: the doctor names each, and says whether the head is refused or misread."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import refused, run_json
from test_exports import EXTRA, KNOWN
from tiny import VOCAB, shaken_head, tiny_target, tiny_tokenizer
from torch import Tensor

from eyas import doctor
from eyas.checkpoint import save_head
from eyas.doctor import DEPTH, compare, diagnose, doubt
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import Eagle3
from eyas.exports import export
from eyas.initial import new_head
from eyas.layouts import AUX_IDS
from eyas.readers import FAILS, NOTE, SILENT, differences, simulate
from eyas.targets.eager import EagerTarget

LAYERS = 8
TEXTS = [([1, 8, 4, 4, 30, 17, 55, 2, 9, 41, 12, 33, 6], 5), ([1, 20, 3, 47, 11, 9, 8, 40, 21], 4)]
NESTED = "eagle_config"
GONE = "gone"


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target(torch.float32, layers=LAYERS)


@pytest.fixture(scope="module")
def split(target: EagerTarget) -> EagerTarget:
    """A target whose width is divided among its heads, as the official code has it."""
    return tiny_target(torch.float32, layers=LAYERS, head_dim=8)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny target's tokenizer knows no prompts."""
    monkeypatch.setattr(doctor, "_texts", lambda *_: TEXTS)


def made(target: EagerTarget, reads: tuple[int, ...] = (2, 4, 5), **settings: int | bool) -> Eagle3:
    """A random head on given states."""
    head = shaken_head(target, KNOWN, **{"fc_norm": False, **settings})
    if reads == head.reads:
        return head
    config = replace(head.config, reads=reads)
    torch.manual_seed(0)
    other = Eagle3(config, head.embedding_VD, head.head_VD, head.draft_vocabulary_Q)
    return other.eval().requires_grad_(False)


def judged(target: EagerTarget, folder: Path, runtime: str) -> dict:
    return diagnose(str(folder), runtime, target, tiny_tokenizer())


def changed(
    folder: Path, config: dict, tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
) -> Path:
    """A stranger's folder: without what eyas records, and with faults."""
    found = json.loads((folder / "config.json").read_text())
    found = {key: value for key, value in {**found, **config}.items() if value != GONE and key[:5] != "eyas_"}
    (folder / "config.json").write_text(json.dumps(found))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def beside(**more: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, **{name.replace("__", "."): t for name, t in more.items()}}


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": t for name, t in tensors.items()}


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


IDS = torch.tensor(KNOWN)
CUSTOM = {"reads": (1, 3, 6)}
# what is wrong: written for, settings of the head, changed keys, changed tensors, read by, effect, words of the finding
FAULTS: dict[str, tuple] = {
    "ids missing": ("vllm", CUSTOM, {AUX_IDS: GONE, NESTED: GONE}, None, "vllm", NOTE, "into the states [2, 4, 5]"),
    "ids only where SGLang looks": ("sglang", {}, {AUX_IDS: GONE}, None, "vllm", SILENT,
                                    "takes [1, 3, 4], the head is made for [2, 4, 5]"),
    "ids only where vLLM looks": ("vllm", CUSTOM, {}, None, "sglang", SILENT,
                                  "takes [2, 4, 5], the head is made for [1, 3, 6]"),
    "ids in one meaning under both keys": ("vllm", {}, {NESTED: {AUX_IDS: [2, 4, 5]}}, None, "sglang", SILENT,
                                           "takes [3, 5, 6], the head is made for [2, 4, 5]"),
    "ids in another order": ("vllm", {}, {AUX_IDS: [5, 4, 2]}, None, "vllm", SILENT,
                             "takes [2, 4, 5], the head is made for [5, 4, 2]"),
    "custom ids for the official code": ("vllm", CUSTOM, {}, None, "eagle", SILENT, "takes [2, 4, 5]"),
    "the last layer among the ids": ("speculators", {}, {AUX_IDS: [2, 4, 5, 8]}, None, "speculators", FAILS,
                                     "does not hand out"),
    "a fourth id": ("speculators", {}, {AUX_IDS: [2, 4, 5, 7]}, None, "speculators", FAILS,
                    "hands out 4 states [2, 4, 5, 7], and its fc is made for 3"),
    "five ids and no count": ("vllm", {"reads": (1, 2, 3, 4, 6)}, {"num_aux_hidden_states": GONE}, None, "vllm", FAILS,
                              "fc is made for 3"),
    "norm_before_residual left out": ("speculators", {}, {"norm_before_residual": GONE}, None, "vllm", SILENT,
                                      "norm_before_residual: the runtime takes True, the head is made for False"),
    "norm_before_residual unknown": ("vllm", {"norm_before_residual": True}, {}, None, "sglang", SILENT,
                                     "norm_before_residual: the runtime takes False"),
    "norm_output where TensorRT-LLM looks": ("vllm", {"norm_output": True}, {
        "norm_output": GONE, NESTED: {"return_hidden_post_norm": True}}, None, "sglang", SILENT, "norm_output: the"),
    "norm_before_fc where SGLang looks": ("vllm", {"norm_before_fc": True},
                                          {"architectures": ["EAGLE3LlamaForCausalLM"]}, None, "tensorrt-llm", SILENT,
                                          "input_norm.weight: the runtime passes them over"),
    "fc_norm not said": ("vllm", {"fc_norm": True}, {"fc_norm": GONE}, None, "vllm", FAILS, "has no place for them"),
    "fc_norm for llama.cpp": ("vllm", {"fc_norm": True}, {}, None, "gguf", FAILS, "has no place for them"),
    "no d2t": ("vllm", {}, {}, without("d2t", "t2d"), "vllm", SILENT, "no d2t: draft token i counts as token i"),
    "tokens as d2t": ("sglang", {}, {}, beside(d2t=IDS), "sglang", FAILS, "It seems to hold tokens, not distances"),
    "no draft_vocab_size": ("sglang", {}, {"draft_vocab_size": GONE}, None, "sglang", FAILS, "vocab_size is missing"),
    "draft_vocab_size null": ("sglang", {}, {"draft_vocab_size": None}, None, "sglang", FAILS, "is null: the target's"),
    "draft_vocab_size of vLLM's default": ("vllm", {}, {"draft_vocab_size": GONE}, None, "vllm", FAILS, "taken as 61"),
    "a short context": ("vllm", {}, {"max_position_embeddings": 64}, None, "vllm", NOTE, "past 64 tokens"),
    "a context too short": ("sglang", {}, {"max_position_embeddings": 64}, None, "sglang", SILENT, "the target's 256"),
    "no rope_theta": ("vllm", {}, {"rope_theta": GONE}, None, "vllm", NOTE, "no rope_theta: the runtime takes 10000"),
    "no head_dim": ("vllm", {}, {"head_dim": GONE}, None, "vllm", FAILS, "by the config the runtime makes it [32, 64]"),
    "the target's num_hidden_layers": ("sglang", {}, {"num_hidden_layers": 40}, None, "sglang", FAILS, "builds 40"),
    "no num_hidden_layers": ("vllm", {}, {"num_hidden_layers": GONE}, None, "vllm", FAILS, "builds 32"),
    "official architecture": ("sglang", {}, {"architectures": ["LlamaForCausalLM"]}, None, "sglang", FAILS,
                              "architectures is ['LlamaForCausalLM'], which SGLang 0.5.23 does not know"),
    "names with model.": ("vllm", {}, {}, prefixed, "vllm", FAILS, "names begin with 'model.'"),
    "a speculators config": ("speculators", {}, {}, None, "sglang", FAILS, "inside transformer_layer_config"),
    "no speculators config": ("vllm", {}, {}, None, "speculators", FAILS, "no speculators_model_type"),
    "an embedding never trained": ("vllm", {}, {}, beside(embed_tokens__weight=torch.randn(VOCAB, 32)), "vllm", SILENT,
                                   "bears no likeness to the target's rows"),
    "a tied head": ("sglang", {}, {"tie_word_embeddings": True}, None, "sglang", FAILS, "tie_word_embeddings is on"),
    "no target_hidden_size": ("vllm", {}, {"target_hidden_size": 24}, None, "vllm", FAILS, "states as 24 wide"),
    "a later norm by another name": ("vllm", {"layers": 2}, {}, None, "sglang", SILENT,
                                     "layers.1.input_layernorm.weight: SGLang 0.5.23 norms by hidden_norm there"),
    "a later norm by yet another": ("sglang", {"layers": 2}, {}, None, "vllm", SILENT,
                                    "layers.1.hidden_norm.weight: vLLM 0.32 norms by input_layernorm there"),
    "a norm lost": ("sglang", {}, {}, without("midlayer.hidden_norm.weight"), "sglang", SILENT,
                    "midlayer.hidden_norm.weight: not in the file, left as initialised"),
    "a projection lost": ("sglang", {}, {}, without("midlayer.mlp.up_proj.weight"), "sglang", SILENT, "up_proj.weight"),
    "attention biases": ("sglang", {}, {}, beside(midlayer__self_attn__q_proj__bias=torch.ones(48)), "sglang", SILENT,
                         "midlayer.self_attn.q_proj.bias: the runtime passes them over"),
    "an fc bias": ("vllm", {}, {}, beside(fc__bias=torch.ones(32)), "vllm", FAILS, "fc.bias: the runtime has no place"),
    "an fc bias not asked for": ("sglang", {}, {"bias": False}, beside(fc__bias=torch.ones(32)), "sglang", SILENT,
                                         "fc.bias: the runtime passes them over"),
    "one state as wide as the head": ("vllm", {"reads": (4,)}, {NESTED: {AUX_IDS: [3]}}, None, "sglang", FAILS,
                                      "leaves fc out"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(target: EagerTarget, split: EagerTarget, tmp_path: Path, fault: str) -> None:
    written, settings, config, tensors, runtime, effect, words = FAULTS[fault]
    target = split if runtime == "eagle" else target
    export(made(target, **settings), written, target.spec, tmp_path, torch.float32, EXTRA)
    record = judged(target, changed(tmp_path, config, tensors), runtime)
    named = [finding for finding in record["findings"] if words in finding["what"]]
    assert named and named[0]["effect"] == effect and named[0]["fix"], record["findings"]
    effects = {finding["effect"] for finding in record["findings"]}
    assert record["verdict"] == ("fails" if FAILS in effects else "drafts otherwise" if SILENT in effects else "works")
    if effects == {SILENT} and "places" in record and "context" not in fault and "embedding" not in fault:
        assert record["largest_difference"] is None or record["largest_difference"] > 1e-3


@pytest.mark.parametrize("runtime", ["sglang", "vllm", "speculators", "tensorrt-llm", "eagle", "gguf"])
@pytest.mark.parametrize("own", [False, True], ids=["exported", "ours"])
def test_a_sound_head_has_no_findings(split: EagerTarget, tmp_path: Path, runtime: str, own: bool) -> None:
    target, head = split, made(split)
    if own:
        save_head(head, tmp_path, {"family": "llama"}, "a head\n")
    else:
        export(head, "vllm" if runtime == "gguf" else runtime, target.spec, tmp_path, torch.float32, EXTRA)
    record = judged(target, tmp_path, runtime)
    assert record["findings"] == [] and record["verdict"] == "works"
    assert record["largest_difference"] == 0
    assert record["places"] == 10 - 5 + 6 - 4  # answers of 13 and 9 tokens, the last three without a full chain
    assert record["acceptance_by_depth"] == record["acceptance_by_depth_there"]


def test_a_target_whose_states_a_runtime_keeps_to_itself(tmp_path: Path) -> None:
    gemma = tiny_target(torch.float32, layers=LAYERS, family="gemma3_text")
    export(made(gemma), "sglang", gemma.spec, tmp_path, torch.float32, EXTRA)
    assert judged(gemma, changed(tmp_path, {}), "sglang")["verdict"] == "works"
    record = judged(gemma, tmp_path, "vllm")
    assert record["verdict"] == "fails" and "inner states of gemma3_text" in record["findings"][0]["what"]


def test_settings_that_do_not_reach_a_runtime_are_named_for_our_own_heads(target: EagerTarget, tmp_path: Path) -> None:
    save_head(made(target, fc_norm=True), tmp_path, {"family": "llama"}, "a head\n")
    record = judged(target, tmp_path, "gguf")
    assert record["verdict"] == "fails" and "does not know fc_norm" in record["findings"][0]["what"]


EAGLE_FAULTS: dict[str, tuple] = {
    "no fc bias for SGLang": ("sglang", without("fc.bias"), "sglang", SILENT, "fc.bias: not in the file"),
    "an fc bias for vLLM": ("eagle", None, "vllm", FAILS, "fc.bias: the runtime has no place for them"),
    "foreign norms for vLLM": ("vllm", beside(norm__weight=torch.ones(32)), "vllm", FAILS, "norm.weight: the"),
    "foreign norms for SGLang": ("sglang", beside(layers__0__input_layernorm__weight=torch.ones(32)), "sglang",
                                            SILENT, "layers.0.input_layernorm.weight: the runtime passes them over"),
    "an EAGLE-1 head for speculators": ("vllm", None, "tensorrt-llm", FAILS, "serves eagle3 heads only, not eagle"),
}  # fmt: skip


@pytest.mark.parametrize("fault", EAGLE_FAULTS)
def test_planted_faults_of_eagle_heads(split: EagerTarget, tmp_path: Path, fault: str) -> None:
    target = split
    written, tensors, runtime, effect, words = EAGLE_FAULTS[fault]
    head = new_head("eagle", target)
    assert isinstance(head, Eagle) and head.fc.bias is not None
    if written == "eagle":
        torch.nn.init.ones_(head.fc.bias)
    if written != "eagle":
        head = Eagle(replace(head.config, fc_bias=False), head.embedding_VD, head.head_VD)
    export(head, written, target.spec, tmp_path, torch.float32, EXTRA)
    record = judged(target, changed(tmp_path, {}, tensors), runtime)
    assert [f["effect"] for f in record["findings"] if words in f["what"]] == [effect], record["findings"]


@pytest.mark.parametrize("runtime", ["sglang", "vllm", "eagle"])
def test_sound_eagle_heads(split: EagerTarget, tmp_path: Path, runtime: str) -> None:
    export(new_head("eagle", split), runtime, split.spec, tmp_path / runtime, torch.float32, EXTRA)
    record = judged(split, tmp_path / runtime, runtime)
    assert record["findings"] == []
    assert record["verdict"] == "works" and record["findings"] == [] and record["largest_difference"] == 0


def test_doubts() -> None:
    """100 places, 40 and x right: two standard errors are 2 sqrt(2 m (1 - m) / 100) with m = (0.4 + x) / 2, that is
    0.1412 both at x = 0.54 and at 0.55; of 80 places, 0.1579."""
    assert doubt((3, 5, 6), 0.40, (2, 4, 5), 0.54, 100) == []
    (finding,) = doubt((3, 5, 6), 0.40, (2, 4, 5), 0.55, 100)
    assert finding.effect == SILENT and "[3, 5, 6], where 40%" in finding.what and "[2, 4, 5] it is 55%" in finding.what
    assert doubt((3, 5, 6), 0.40, (2, 4, 5), 0.55, 80) == []


def test_a_comparison_counts_what_the_target_wrote(target: EagerTarget) -> None:
    """A head that always drafts one token is right exactly where the text holds it, at every depth by itself only."""
    head = made(target)
    with torch.no_grad():
        head.lm_head.weight.zero_()
        head.norm.weight.zero_()  # all logits 0: the first draft token, which is token 1
    assert KNOWN[0] == 1
    text = [3, 1, 1, 9, 8, 1, 1, 1, 7, 5, 4]
    # places 1 to 7; a draft is right where the next token is 1: tokens 2 to 8 are 1 9 8 1 1 1 7
    record = compare(head, head, target, [(text, 1)])
    assert record["places"] == 7
    assert record["acceptance_by_depth"] == [round(4 / 7, 4), round(2 / 7, 4), round(1 / 7, 4)]


@torch.inference_mode()
def test_drafts_are_those_of_a_head_that_read_all_at_once(target: EagerTarget) -> None:
    head, (tokens, start) = made(target), TEXTS[0]
    states_TLD = doctor._states(target, tokens, head.reads)
    drafts = doctor._drafts(head, tokens, start, states_TLD)
    assert len(drafts) == len(tokens) - DEPTH - start
    for row, i in enumerate(range(start, len(tokens) - DEPTH)):
        state = head.new_state()
        head.observe(state, tokens[1 : i + 1], states_TLD[:i], 1)  # up to the pair (state of i - 1, token i)
        for step, token in enumerate(tokens[i + 1 : i + 1 + DEPTH]):
            expected = head.lm_head(head.norm(state.hidden_RD[-1]))
            torch.testing.assert_close(drafts[row, step], expected, rtol=1e-4, atol=1e-4)
            head.expand(state, [step], [token], 1)


def test_the_command(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = ("inspect", "--head", str(folder / "eagle3"), "--target", str(folder / "target"), "--runtime")
    record = run_json(capsys, *arguments, "vllm")["diagnosis"]
    assert record["runtime"] == "vllm" and {"verdict", "findings", "acceptance_by_depth"} <= record.keys()
    assert "give --head and --target" in refused(
        capsys, "inspect", "--head", str(folder / "eagle3"), "--runtime", "vllm"
    )
    assert "invalid choice" in refused(capsys, *arguments, "ollama")


def test_a_reading_is_that_of_the_files(target: EagerTarget, tmp_path: Path) -> None:
    head = made(target, norm_before_residual=True)
    export(head, "speculators", target.spec, tmp_path, torch.float32, EXTRA)
    reading = simulate("vllm", tmp_path, target)
    assert reading.findings == [] and isinstance(reading.head, Eagle3)
    assert differences(head, reading.head) == []
    for key, tensor in head.state_dict().items():
        assert torch.equal(reading.head.state_dict()[key], tensor)


@pytest.mark.parametrize("runtime", ["sglang", "speculators", "gguf"])
def test_configs_of_any_kind_end_in_findings(target: EagerTarget, tmp_path: Path, runtime: str) -> None:
    """Whatever stands in a config, the simulation ends; sizes alone never take memory."""
    written = "vllm" if runtime == "gguf" else runtime
    export(made(target), written, target.spec, tmp_path, torch.float32, EXTRA)
    whole = json.loads((tmp_path / "config.json").read_text())
    inner = whole.get("transformer_layer_config", {})
    places = [(whole, key) for key in whole] + [(inner, key) for key in inner] + [(whole.get(NESTED, {}), AUX_IDS)]
    for place, key in places:
        kept = place.get(key)
        for value in (None, "x", [], -1, 10**14, ["a"]):
            place[key] = value
            (tmp_path / "config.json").write_text(json.dumps(whole))
            simulate(runtime, tmp_path, target)
        place[key] = kept
