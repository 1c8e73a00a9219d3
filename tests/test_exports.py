"""Heads for other runtimes: what is written, what comes back, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from test_cli import refused, run_json
from test_golden import HEADS as GOLDEN_HEADS
from test_golden import load, reproduces
from test_import import LAYERS, hidden, logits
from tiny import HEADS, VOCAB, shaken_head, tiny_target, tiny_tokenizer

from eyas import gguf_head
from eyas.checkpoint import load_target, save_head
from eyas.dialects import DIALECTS
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import Eagle3
from eyas.errors import InputError
from eyas.exports import check, export, serve_command
from eyas.formats import build_head, read_head
from eyas.initial import new_head
from eyas.layouts import AUX_IDS
from eyas.targets.base import TargetSpec
from eyas.targets.eager import EagerTarget
from eyas.targets.families import default_reads

FOLDERS = [name for name in DIALECTS if name not in ("gguf", "openvino")]
KNOWN = [token for token in range(VOCAB) if token % 7]
EXTRA = {"architectures": ["LlamaForCausalLM"], "eyas_target": {"family": "llama"}}


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target(torch.float32, layers=LAYERS, head_dim=8)


def servable(head: Eagle | Eagle3, runtime: str, spec: TargetSpec) -> bool:
    try:
        check(head, runtime, spec)
    except InputError:
        return False
    return True


def without_eyas(folder: Path) -> Path:
    """The folder as a stranger would have written it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("eyas_")}))
    return folder


def again(folder: Path, head: Eagle | Eagle3, default: tuple[int, ...]) -> Eagle | Eagle3:
    return build_head(read_head(folder), head.embedding_VD, head.head_VD, default).eval()


def same(head: Eagle | Eagle3, other: Eagle | Eagle3) -> None:
    assert other.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key
    left, right = (asdict(h.config) | {"steps": 0, "noise": 0} for h in (head, other))
    assert left == right
    ids = [h.draft_vocabulary_Q for h in (head, other) if isinstance(h, Eagle3)]
    assert not ids or (ids[0] is None and ids[1] is None) or torch.equal(*ids)


# -- the numbers of the official implementation ------------------------------------------------------------------------

# Runtimes that can hold a golden head.
HOLDERS = {
    "eagle1_bias": {"sglang", "eagle"},
    "eagle1_nobias_gqa": {"sglang", "vllm", "eagle"},
    "extra_eagle1_qkv_bias": {"sglang", "eagle"},
    "eagle3_gqa": {*FOLDERS},
    "eagle3_full_vocab": {*FOLDERS},
    "extra_eagle3_target_hidden": {*FOLDERS},
    "extra_eagle3_head_dim": {*FOLDERS} - {"eagle"},
}


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_golden_heads_through_every_runtime(tmp_path: Path, name: str) -> None:
    head, golden = load(name)
    if isinstance(head, Eagle3) and head.config.own_embedding is False and name == "extra_eagle3_target_hidden":
        head = with_own_rows(head)
    spec = replace(tiny_target().spec, num_layers=12, vocab_size=211, width=head.config.block.width)
    reads = default_reads(12) if isinstance(head, Eagle3) else (12,)
    head.config = replace(head.config, reads=reads)
    head.reads = reads
    holders = set()
    for runtime in FOLDERS:
        if servable(head, runtime, spec):
            holders.add(runtime)
            export(head, runtime, spec, tmp_path / runtime, torch.float32, EXTRA)
            back = again(without_eyas(tmp_path / runtime), head, reads)
            same(head, back)
            reproduces(back, golden)
    assert holders == HOLDERS[name]


def with_own_rows(head: Eagle3) -> Eagle3:
    """The golden file has the head's rows alone: here they are the head's own, and the target's are wider."""
    rows_VD, wide = head.embedding_VD, torch.zeros(len(head.embedding_VD), head.config.target_width)
    own = Eagle3(replace(head.config, own_embedding=True), wide, wide, head.draft_vocabulary_Q)
    own.load_state_dict({**head.state_dict(), "embedding.weight": rows_VD})
    return own.eval()


# -- round trips -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict] = {"plain": {}, **HEADS}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("runtime", FOLDERS)
def test_round_trips(target: EagerTarget, tmp_path: Path, runtime: str, variant: str) -> None:
    """Weights equal to the bit and draft logits equal, or a refusal for a reason that the row of the runtime gives."""
    settings = VARIANTS[variant]
    head = shaken_head(target, KNOWN, **settings)
    row = DIALECTS[runtime]
    known = all(name == "layers" or name in row.switches for name in settings)
    assert servable(head, runtime, target.spec) == (known and settings.get("layers", 1) <= row.most_layers)
    if not servable(head, runtime, target.spec):
        with pytest.raises(InputError, match="it does not know|decoder layers"):
            export(head, runtime, target.spec, tmp_path, torch.float32, EXTRA)
        return
    export(head, runtime, target.spec, tmp_path, torch.float32, EXTRA)
    back = again(without_eyas(tmp_path), head, default_reads(LAYERS))
    same(head, back)
    states_TLD = hidden(target, head.reads)
    assert all(torch.equal(*pair) for pair in zip(logits(head, states_TLD), logits(back, states_TLD), strict=True))


@pytest.mark.parametrize(("runtime", "ids"), [
    ("sglang", {"eagle_config": {AUX_IDS: [-1, 0, 6], "use_aux_hidden_state": True}}),
    ("vllm", {AUX_IDS: [0, 1, 7], "eagle_config": {"use_aux_hidden_state": True}}),
    ("speculators", {AUX_IDS: [0, 1, 7]}),
    ("tensorrt-llm", {}),
    ("eagle", None),
])  # fmt: skip
def test_custom_layer_ids(target: EagerTarget, tmp_path: Path, runtime: str, ids: dict | None) -> None:
    """States 0, 1 and 7 enter layers 0, 1, 7 and leave layers -1, 0, 6: one folder a runtime."""
    head = shaken_head(target, KNOWN)
    head.config = replace(head.config, reads=(0, 1, 7))
    head.reads = (0, 1, 7)
    if ids is None:
        with pytest.raises(InputError, match=r"reads the states \[2, 4, 5\], the head \[0, 1, 7\]"):
            check(head, runtime, target.spec)
        return
    export(head, runtime, target.spec, tmp_path, torch.float32, EXTRA)
    config = json.loads((tmp_path / "config.json").read_text())
    switches = ("norm_before_fc", "return_hidden_post_norm")
    inner = {key: value for key, value in config.get("eagle_config", {}).items() if key not in switches}
    found = {key: value for key, value in {AUX_IDS: config.get(AUX_IDS), "eagle_config": inner}.items() if value}
    assert found == ids
    if runtime == "tensorrt-llm":
        assert "eagle3_layers_to_capture=[-1, 0, 6]" in serve_command(head, runtime, target.spec, "x")


def test_the_usual_ids_make_one_folder_for_several_runtimes(target: EagerTarget, tmp_path: Path) -> None:
    head = shaken_head(target, KNOWN)
    for runtime in ("sglang", "vllm"):
        export(head, runtime, target.spec, tmp_path / runtime, torch.float32, EXTRA)
        config = json.loads((tmp_path / runtime / "config.json").read_text())
        assert config[AUX_IDS] == [2, 4, 5]
        assert config["eagle_config"] == {AUX_IDS: [1, 3, 4], "use_aux_hidden_state": True}


# -- recorded keys -----------------------------------------------------------------------------------------------------

LAYER = {
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight",
}  # fmt: skip
AROUND = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
SIZES = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling",
    "max_position_embeddings", "vocab_size", "tie_word_embeddings", "torch_dtype",
}  # fmt: skip
OURS = {"eyas_reads", "eyas_target"}
SWITCH_KEYS = {"fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"}
EAGLE3_KEYS = SIZES | OURS | {"draft_vocab_size", "target_hidden_size", "num_aux_hidden_states"}
CONFIG_KEYS = {
    ("sglang", "eagle3"): EAGLE3_KEYS | SWITCH_KEYS | {AUX_IDS, "eagle_config", "bias"},
    ("vllm", "eagle3"): EAGLE3_KEYS | SWITCH_KEYS | {AUX_IDS, "eagle_config", "attention_bias"},
    ("speculators", "eagle3"): OURS | SWITCH_KEYS | {
        "architectures", "speculators_model_type", "speculators_version", "draft_vocab_size", "tie_word_embeddings",
        "embed_requires_grad", "torch_dtype", AUX_IDS, "transformer_layer_config", "speculators_config"},
    ("tensorrt-llm", "eagle3"): EAGLE3_KEYS | {"bias", "fc_norm", "norm_output", "eagle_config"},
    ("eagle", "eagle3"): SIZES | OURS | {"draft_vocab_size"},
    ("sglang", "eagle"): SIZES | OURS | {"attention_bias"},
    ("vllm", "eagle"): SIZES | OURS | {"qkv_bias"},
    ("eagle", "eagle"): SIZES | OURS | {"bias", "qkv_bias"},
}  # fmt: skip


def names(first: str, later: str = "", later_norm: str = "") -> set[str]:
    found = {first + name for name in LAYER | {"input_layernorm.weight", "hidden_norm.weight"}}
    return AROUND | found | ({later + name for name in LAYER | {later_norm}} if later else set())


TENSORS = {
    ("sglang", 1): names("midlayer."),
    ("vllm", 1): names("midlayer."),
    ("speculators", 1): names("layers.0."),
    ("tensorrt-llm", 1): names("midlayer."),
    ("eagle", 1): names("midlayer."),
    ("sglang", 2): names("layers.0.", "layers.1.", "hidden_norm.weight"),
    ("vllm", 2): names("layers.0.", "layers.1.", "input_layernorm.weight"),
    ("speculators", 2): names("layers.0.", "layers.1.", "input_layernorm.weight"),
    ("tensorrt-llm", 2): names("midlayer.0.", "midlayer.1.", "hidden_norm.weight"),
}


@pytest.mark.parametrize(("runtime", "layers"), TENSORS)
def test_keys_of_eagle3_heads(target: EagerTarget, tmp_path: Path, runtime: str, layers: int) -> None:
    head = shaken_head(target, KNOWN, layers=layers)
    export(head, runtime, target.spec, tmp_path, torch.bfloat16, EXTRA)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert tensors.keys() == TENSORS[runtime, layers]
    assert config.keys() == CONFIG_KEYS[runtime, "eagle3"]
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
    assert (torch.arange(len(KNOWN)) + tensors["d2t"]).tolist() == KNOWN
    inner = config.get("transformer_layer_config", config)
    assert inner["max_position_embeddings"] == 256 and inner["num_hidden_layers"] == layers
    assert inner["rope_theta"] == 10000 and inner["rope_scaling"] is None and inner["head_dim"] == 8
    assert config["draft_vocab_size"] == len(KNOWN)
    architectures = {"sglang": "LlamaForCausalLMEagle3", "vllm": "LlamaForCausalLMEagle3", "eagle": "LlamaForCausalLM",
                     "speculators": "Eagle3DraftModel", "tensorrt-llm": "EAGLE3LlamaForCausalLM"}  # fmt: skip
    assert config["architectures"] == [architectures[runtime]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("runtime", ["sglang", "vllm", "eagle"])
def test_keys_of_eagle_heads(target: EagerTarget, tmp_path: Path, runtime: str, bias: bool) -> None:
    head = new_head("eagle", target)
    assert isinstance(head, Eagle) and head.fc.bias is not None
    if not bias:
        head = Eagle(replace(head.config, fc_bias=False), head.embedding_VD, head.head_VD)
    export(head, runtime, target.spec, tmp_path, torch.float32, EXTRA)
    tensors = load_file(tmp_path / "model.safetensors")
    # a new head's bias is zero: SGLang's fc has one in every case, vLLM's in none
    with_bias = {"sglang": True, "vllm": False, "eagle": bias}[runtime]
    assert tensors.keys() == {f"layers.0.{name}" for name in LAYER} | {"fc.weight"} | (
        {"fc.bias"} if with_bias else set()
    )
    assert json.loads((tmp_path / "config.json").read_text()).keys() == CONFIG_KEYS[runtime, "eagle"]
    assert not with_bias or not tensors["fc.bias"].any()


def test_biases_where_a_runtime_makes_them(target: EagerTarget, tmp_path: Path) -> None:
    """A config that asks SGLang or vLLM for a bias gives o_proj one too: it is there, and zero."""
    head = shaken_head(target, KNOWN)
    with_fc = Eagle3(
        replace(head.config, fc_bias=True), head.embedding_VD, head.head_VD, head.draft_vocabulary_Q
    ).eval()
    export(with_fc, "sglang", target.spec, tmp_path / "sglang", torch.float32, EXTRA)
    tensors = load_file(tmp_path / "sglang" / "model.safetensors")
    assert not tensors["midlayer.self_attn.o_proj.bias"].any() and tensors["fc.bias"].any()
    same(with_fc, again(tmp_path / "sglang", with_fc, (2, 4, 5)))
    block = replace(head.config.block, qkv_bias=True)
    config = replace(head.config, block=block)
    with_qkv = Eagle3(config, head.embedding_VD, head.head_VD, head.draft_vocabulary_Q).eval()
    for runtime in ("vllm", "speculators"):
        export(with_qkv, runtime, target.spec, tmp_path / runtime, torch.float32, EXTRA)
        tensors = load_file(tmp_path / runtime / "model.safetensors")
        assert [name for name, t in tensors.items() if name.endswith("o_proj.bias") and not t.any()]
        same(with_qkv, again(tmp_path / runtime, with_qkv, (2, 4, 5)))


# -- refusals ----------------------------------------------------------------------------------------------------------


def changed(head: Eagle3, **settings: object) -> Eagle3:
    """A head of other sizes; its weights do not matter here."""
    config = replace(head.config, **settings)
    other = Eagle3(config, head.embedding_VD, head.head_VD, head.draft_vocabulary_Q)
    return other.eval()


@pytest.mark.parametrize(("runtime", "settings", "spec", "reason"), [
    ("tensorrt-llm", {"norm_before_residual": True}, {}, "does not know norm_before_residual"),
    ("sglang", {"norm_before_residual": True}, {}, "does not know norm_before_residual"),
    ("gguf", {"fc_norm": True, "norm_output": True}, {}, "does not know fc_norm, norm_output"),
    ("vllm", {"fc_bias": True}, {}, "fc has a bias"),
    ("eagle", {"layers": 2}, {}, "2 decoder layers"),
    ("gguf", {"layers": 2}, {}, "2 decoder layers"),
    ("gguf", {"reads": (2, 4)}, {}, "reads 2 states, the runtime gives 3 to 3"),
    ("sglang", {"reads": (4,)}, {}, "leaves fc out"),
    ("vllm", {"reads": (4, 2, 5)}, {}, "ascending"),
    ("vllm", {"reads": (2, 4, 8)}, {}, "last, normed state"),
    ("vllm", {}, {"family": "gemma3_text"}, "inner states of gemma3_text"),
    ("gguf", {}, {"family": "qwen2"}, "inner states of qwen2"),
    ("eagle", {}, {"family": "mistral"}, "inner states of mistral"),
    ("sglang", {"own_embedding": True}, {}, "replaces with the target's"),
    ("openvino", {"norm_before_fc": True, "norm_output": True}, {}, "does not know norm_output, norm_before_fc"),
    ("openvino", {"fc_norm": True}, {}, "does not know fc_norm"),
    ("openvino", {"fc_bias": True}, {}, "fc has a bias"),
    ("openvino", {"reads": (2, 4)}, {}, "reads 2 states, the runtime gives 3 to 3"),
    ("openvino", {"reads": (0, 2, 4)}, {}, "state 0, the embedding"),
    ("openvino", {"reads": (4, 2, 5)}, {}, "ascending"),
    ("openvino", {"reads": (2, 4, 8)}, {}, "last, normed state"),
    ("openvino", {}, {"family": "gemma3_text"}, "inner states of gemma3_text"),
])  # fmt: skip
def test_refusals(target: EagerTarget, runtime: str, settings: dict, spec: dict, reason: str) -> None:
    head = changed(shaken_head(target, KNOWN), **settings)
    with pytest.raises(InputError, match="cannot serve this eagle3 head: .*" + reason):
        check(head, runtime, replace(target.spec, **spec))


def test_refusals_of_eagle_heads(target: EagerTarget) -> None:
    head = new_head("eagle", target)
    assert isinstance(head, Eagle) and head.fc.bias is not None
    for runtime in ("speculators", "tensorrt-llm", "gguf", "openvino"):
        with pytest.raises(InputError, match="it serves eagle3 heads only"):
            check(head, runtime, target.spec)
    torch.nn.init.ones_(head.fc.bias)
    with pytest.raises(InputError, match="its fc has a bias"):
        check(head, "vllm", target.spec)
    check(head, "sglang", target.spec)


# -- GGUF --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a tokenizer of VOCAB tokens, as a target's has."""
    path = tmp_path_factory.mktemp("gguf") / "target.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_bos_token_id(1)
    writer.add_tensor("token_embd.weight", torch.zeros(VOCAB, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_NAMES = {
    "fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight",
    "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    "blk.0.attn_q.weight": "midlayer.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "midlayer.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight", "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("switch", ["", "norm_before_residual", "norm_before_fc"])
def test_gguf(target: EagerTarget, vocabulary: Path, tmp_path: Path, switch: str, dtype: torch.dtype) -> None:
    head = shaken_head(target, KNOWN, **({switch: True} if switch else {}))
    head = head.to(dtype).float()  # values that the dtype holds
    gguf_head.write(tmp_path / "head.gguf", head, target.spec, vocabulary, dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["head.gguf"]
    reader = gguf.GGUFReader(tmp_path / "head.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == fields["eagle3.extract_layers"] == [2, 4, 5]
    assert fields["eagle3.target_hidden_size"] == 32 and fields["eagle3.block_count"] == 1
    assert fields["eagle3.attention.head_count"] == 4 and fields["eagle3.attention.head_count_kv"] == 2
    assert fields["eagle3.rope.dimension_count"] == fields["eagle3.attention.key_length"] == 8
    assert fields["eagle3.rope.freq_base"] == 10000 and fields["eagle3.context_length"] == 256
    for name in ("norm_before_residual", "norm_before_fc"):
        assert fields[f"eagle3.{name}"] == (switch == name)
    assert fields["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(VOCAB)]
    assert fields["tokenizer.ggml.bos_token_id"] == 1 and fields["tokenizer.ggml.model"] == "gpt2"
    wanted = {"enc.output_norm.weight": "input_norm.weight"} if switch == "norm_before_fc" else {}
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found.keys() == GGUF_NAMES.keys() | wanted | {"d2t"}
    assert found["d2t"].tensor_type == gguf.GGMLQuantizationType.I64 and found["d2t"].data.tolist() == KNOWN
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for name, tensor in found.items():
        if name != "d2t":
            assert tensor.tensor_type.name == ("F32" if "norm" in name else kinds[dtype]), name
    _, tensors = gguf_head.read(tmp_path / "head.gguf")
    ours = {**{key.replace("block.", "midlayer."): t for key, t in head.state_dict().items()}}
    ours["midlayer.input_layernorm.weight"] = ours.pop("embedding_norm.weight")
    ours["midlayer.hidden_norm.weight"] = ours.pop("hidden_norm.weight")
    for theirs, name in (GGUF_NAMES | wanted).items():
        assert torch.equal(tensors[name], ours[name]), name
        raw = torch.from_numpy(gguf.quants.dequantize(found[theirs].data, found[theirs].tensor_type).copy())
        if theirs in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            assert torch.equal(raw[:8], ours[name][[0, 4, 1, 5, 2, 6, 3, 7]])  # heads of 8: halves become neighbours
            assert torch.equal(raw[8:16], ours[name][[8, 12, 9, 13, 10, 14, 11, 15]])
        else:
            assert torch.equal(raw, ours[name]), theirs


def test_gguf_vocabularies_that_do_not_fit(target: EagerTarget, vocabulary: Path, tmp_path: Path) -> None:
    head = changed(shaken_head(target, KNOWN), vocab_size=VOCAB + 1)
    with pytest.raises(InputError, match=f"62 tokens, and .* has {VOCAB}"):
        gguf_head.write(tmp_path / "head.gguf", head, target.spec, vocabulary, torch.float32)
    (tmp_path / "broken.gguf").write_bytes(vocabulary.read_bytes()[:40])
    for path in (tmp_path / "broken.gguf", tmp_path / "none.gguf"):
        with pytest.raises(InputError, match="cannot read the vocabulary"):
            gguf_head.write(tmp_path / "head.gguf", head, target.spec, path, torch.float32)
    with pytest.raises(InputError, match="cannot read the head"):
        gguf_head.read(vocabulary)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(target: EagerTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    target.model.save_pretrained(root / "target")
    tiny_tokenizer(VOCAB - 4).save_pretrained(root / "target")
    save_head(shaken_head(target, KNOWN), root / "head", {"family": "llama"}, "a head\n")
    return root


@pytest.mark.parametrize("runtime", FOLDERS)
def test_the_command(capsys: pytest.CaptureFixture[str], folders: Path, tmp_path: Path, runtime: str) -> None:
    arguments = ("--head", str(folders / "head"), "--target", str(folders / "target"), "--to", runtime)
    record = run_json(capsys, "export", *arguments, "--out", str(tmp_path / "out"))
    assert {"out", "to", "kind", "reads", "serve", "title", "warnings"} <= record.keys()
    assert str(folders / "target") in record["serve"] and str(tmp_path / "out") in record["serve"]
    back, _ = load_target(str(folders / "target"))
    ours = read_head(folders / "head")
    theirs = build_head(read_head(tmp_path / "out"), back.embedding_VD, back.head_VD, (2, 4, 5))
    same(build_head(ours, back.embedding_VD, back.head_VD, (2, 4, 5)), theirs)
    assert read_head(tmp_path / "out").config["eyas_target"] == {"family": "llama"}
    assert "not empty" in refused(capsys, "export", *arguments, "--out", str(tmp_path / "out"))


def test_a_serve_command_is_json_for_vllm(target: EagerTarget) -> None:
    command = serve_command(shaken_head(target, KNOWN), "vllm", target.spec, "/heads/mine")
    start, _, rest = command.partition(" --speculative-config ")
    assert start == "vllm serve tiny"
    assert json.loads(rest.strip("'")) == {"method": "eagle3", "model": "/heads/mine", "num_speculative_tokens": 3}


def test_refusals_on_the_command_line(capsys: pytest.CaptureFixture[str], folders: Path, tmp_path: Path) -> None:
    common = (
        "export",
        "--head",
        str(folders / "head"),
        "--target",
        str(folders / "target"),
        "--out",
        str(tmp_path / "o"),
    )
    assert "GGUF file" in refused(capsys, *common, "--to", "gguf")
    assert "invalid choice" in refused(capsys, *common, "--to", "onnx")
    save_head(shaken_head(load_target(str(folders / "target"))[0], KNOWN, layers=2), tmp_path / "two", {}, "a head\n")
    sentence = refused(capsys, *common[:2], str(tmp_path / "two"), *common[3:], "--to", "eagle")
    assert "the head has 2 decoder layers, the runtime's have 1" in sentence
    assert not (tmp_path / "o").exists()
