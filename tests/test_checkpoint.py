"""Targets by name: a GGUF file is converted once into the cache, and gives the logits of the model it was made from."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
import torch
from tiny import tiny_target, tiny_tokenizer

from eyas.checkpoint import atomic_folder, cache_folder, head_folder, load_target, target_fingerprint, target_folder
from eyas.errors import InputError
from eyas.targets.eager import EagerTarget
from eyas.tree import Tree

BYTES = 261  # 256 bytes, four special tokens, and one merged pair, without which no reader takes a BPE


def write_gguf(path: Path, target: EagerTarget) -> None:
    """The target as llama.cpp's converter would write it, float32."""
    spec, state = target.spec, target.model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(spec.max_length)
    writer.add_embedding_length(spec.width)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.ffn_width)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_vocab_size(spec.vocab_size)
    vocabulary = [*sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1]), ("ab", 260)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if i < 4 else 1 for i in range(len(vocabulary))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    for layer in range(spec.num_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):  # llama.cpp pairs neighbours where Llama pairs halves
                heads = spec.num_heads if theirs == "attn_q" else spec.num_kv_heads
                weight = weight.reshape(heads, 2, spec.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    original = tiny_target(torch.float32, vocab=BYTES, width=48, head_dim=12)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original)
    target, tokenizer = load_target(str(path))
    tree = Tree.chain([1, 9, 100, 42])
    for model in (target, load_target(str(path))[0]):  # converted, then read from the cache
        logits = model.verify([(model.new_cache(), tree)])[0].logits_NV
        expected = original.verify([(original.new_cache(), tree)])[0].logits_NV
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    folders = list((tmp_path / "cache" / "targets").iterdir())
    assert len(folders) == 1
    os.utime(path, ns=(0, 0))  # another file under the same name
    load_target(str(path))
    assert len(list((tmp_path / "cache" / "targets").iterdir())) == 2
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("cache", "tiny.gguf")] == [], (
        "nothing beside the model"
    )


def test_a_truncated_gguf_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, tiny_target(torch.float32, vocab=BYTES, width=48))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(InputError, match="cannot read the GGUF file"):
        load_target(str(cut))
    assert not (tmp_path / "cache").exists()


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "made") as temporary:
        (temporary / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for text in ("one", "two"):
        with atomic_folder(tmp_path / "made") as temporary:
            (temporary / "file").write_text(text)
    assert (tmp_path / "made" / "file").read_text() == "two"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.setenv("EYAS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/eyas")


def test_fingerprints_tell_models_apart_and_not_dtypes() -> None:
    tokenizer = tiny_tokenizer()
    target = tiny_target(torch.float32, vocab=BYTES)
    whole = target_fingerprint(target, tokenizer)
    narrow = target_fingerprint(EagerTarget(target.model.to(torch.bfloat16), "x"), tokenizer)
    assert {key for key in whole if whole[key] != narrow[key]} == {"dtype"}
    with torch.no_grad():
        target.model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] += (
            1  # any weight, not only the last layer's
        )
    assert target_fingerprint(target, tokenizer)["weights"] != narrow["weights"]


def test_a_hub_id_is_a_folder_of_the_hubs_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "owner/absent":
            raise OSError("no such repository\nand a page more")
        return str(folder / ("eagle3" if "head" in name else "target"))

    monkeypatch.setattr("eyas.checkpoint.snapshot_download", download)
    target, _ = load_target("owner/model-1.0")
    assert target.spec.name == "owner/model-1.0" and target.spec.family == "llama"
    assert head_folder("owner/head") == folder / "eagle3"
    assert not any("bin" in pattern or "py" in pattern for _, patterns in asked for pattern in patterns)
    for function in (target_folder, head_folder):
        with pytest.raises(InputError, match="hub does not give it: no such repository"):
            function("owner/absent")
    count = len(asked)
    for path in ("./owner/absent", "/owner/absent", "a/b/c", "absent", "owner/ab sent"):
        with pytest.raises(InputError, match="unknown"):
            target_folder(path)
    assert len(asked) == count, "a path is no hub id"
