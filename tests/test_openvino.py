"""EAGLE-3 heads as OpenVINO IR: read back by OpenVINO, rebuilt by the rules of OpenVINO GenAI, and run on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import refused, run_json
from test_exports import KNOWN, LAYER, shaken_head
from test_import import CHAIN, LAYERS, TEXT, hidden, logits
from tiny import VOCAB, tiny_target, tiny_tokenizer
from torch import Tensor

import eyas
from eyas.checkpoint import save_head
from eyas.drafters.eagle3 import Eagle3
from eyas.formats import head_tensors
from eyas.targets.eager import EagerTarget

if importlib.util.find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)

from eyas import openvino_head  # noqa: E402  # imports openvino in its own way

ov, ops = openvino_head.ov, openvino_head.ops
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
INPUTS = ["input_ids", "hidden_states", "attention_mask", "position_ids", "beam_idx"]


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target(torch.float32, layers=LAYERS, head_dim=8)


def read_back(folder: Path, head: Eagle3, target: EagerTarget, dtype: torch.dtype = torch.float32) -> ov.Model:
    openvino_head.write(folder, head, target.spec, dtype)
    return ov.Core().read_model(folder / "openvino_model.xml")


def of_type(model: ov.Model, kind: str) -> list[ov.Node]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def source(node: ov.Node, number: int) -> ov.Node:
    return node.input_value(number).get_node()


# -- what is in the files ----------------------------------------------------------------------------------------------

FIRST = {*LAYER, "input_layernorm.weight", "hidden_norm.weight"}
NAMES = {
    1: {f"midlayer.{name}" for name in FIRST},
    2: {f"layers.0.{name}" for name in FIRST} | {f"layers.1.{name}" for name in {*LAYER, "input_layernorm.weight"}},
}
KINDS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
AROUND = {"fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t"}


@pytest.mark.parametrize("layers", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_files(target: EagerTarget, tmp_path: Path, kind: str, layers: int) -> None:
    dtype = KINDS[kind]
    head = shaken_head(target, KNOWN, layers=layers)
    model = read_back(tmp_path, head, target, dtype)
    files = {"openvino_model.xml", "openvino_model.bin", "generation_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2]}
    assert [port.any_name for port in model.inputs] == INPUTS
    assert [port.any_name for port in model.outputs] == ["logits", "d2t"]
    assert model.get_rt_info(["eagle3_mode"]).astype(bool)
    # the head reads the states that enter 2, 4 and 5; GenAI's list names the layers that states leave
    assert model.get_rt_info(["hidden_layers_list"]).astype(str) == "1 3 4"
    assert model.get_rt_info(["runtime_options", "KV_CACHE_PRECISION"]).astype(str) == "f16"
    found = {node.get_friendly_name(): node for node in of_type(model, "Constant")}
    wanted = {**head_tensors(head, dtype), "embed_tokens.weight": target.embedding_VD.to(dtype)}
    assert {name for name in found if "." in name or name == "d2t"} == NAMES[layers] | AROUND
    for name in NAMES[layers] | AROUND:
        assert found[name].get_element_type().to_string() == ("i64" if name == "d2t" else kind), name
        bits = np.frombuffer(found[name].data.tobytes(), np.uint8)
        assert np.array_equal(bits, wanted[name].view(torch.uint8).numpy().ravel()), name
        assert list(found[name].shape) == list(wanted[name].shape), name
    assert (found["d2t"].data + np.arange(len(KNOWN))).tolist() == KNOWN


def test_a_full_disk(target: EagerTarget, tmp_path: Path) -> None:
    (tmp_path / "openvino_model.bin").mkdir()
    with pytest.raises(OSError, match="cannot write .*openvino_model.xml"):
        openvino_head.write(tmp_path, shaken_head(target, KNOWN), target.spec, torch.float32)


# -- what it computes --------------------------------------------------------------------------------------------------


def inputs(tokens: list[int], states: Tensor, before: int) -> dict[str, np.ndarray]:
    """Of one sequence, of which `before` tokens went ahead."""
    return {
        "input_ids": np.array([tokens]),
        "hidden_states": states[None].numpy(),
        "attention_mask": np.ones((1, before + len(tokens)), np.int64),
        "position_ids": np.arange(before, before + len(tokens))[None],
        "beam_idx": np.zeros(1, np.int32),
    }


def rebuilt(model: ov.Model) -> ov.Model:
    """The graph as GenAI runs it: fc goes to the target, and what is fed back becomes an output."""
    [fc] = [node for node in of_type(model, "MatMul") if source(node, 0).get_friendly_name() == "hidden_states"]
    for port in fc.output(0).get_target_inputs():
        port.replace_source_output(fc.input_value(0))
    [last] = [node for node in of_type(model, "Add") if "midlayer" in node.get_friendly_name() and ends_a_layer(node)]
    result = ops.result(last)
    result.output(0).set_names({"last_hidden_state"})
    model.add_results([result])
    model.validate_nodes_and_infer_types()
    return model


def ends_a_layer(node: ov.Node) -> bool:
    """A sum whose second part is a product of a matrix with a product: gate times up."""
    product = source(node, 1)
    return product.get_type_name() == "MatMul" and source(product, 0).get_type_name() == "Multiply"


def heads(target: EagerTarget) -> dict[str, Eagle3]:
    plain = shaken_head(target, KNOWN)
    found = {
        "plain": plain,
        "whole vocabulary": shaken_head(target),
        "2 layers": shaken_head(target, KNOWN, layers=2),
        "3 layers": shaken_head(target, KNOWN, layers=3),
        "norm_before_residual": shaken_head(target, KNOWN, norm_before_residual=True),
    }
    block = plain.config.block
    blocks = {
        "biases": replace(block, qkv_bias=True),
        "heads of their own": replace(block, kv_heads=block.heads),
        "other sizes": replace(block, head_dim=6, rope_theta=77.0, norm_eps=0.1),
    }
    configs = {name: replace(plain.config, block=block) for name, block in blocks.items()}
    configs["own rows"] = replace(plain.config, own_embedding=True)
    narrow = replace(block, width=24, attention_width=48)
    configs["narrow"] = replace(plain.config, own_embedding=True, block=narrow)
    for name, config in configs.items():
        torch.manual_seed(3)
        other = Eagle3(config, plain.embedding_VD, plain.head_VD, plain.draft_vocabulary_Q)
        for weight in other.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.3)
        found[name] = other.eval().requires_grad_(False)
    return found


@pytest.mark.parametrize("name", [
    "plain", "whole vocabulary", "2 layers", "3 layers", "norm_before_residual", "biases", "heads of their own",
    "other sizes", "own rows", "narrow", "f64", "f16", "bf16",
])  # fmt: skip
def test_it_drafts_as_the_head_does(target: EagerTarget, tmp_path: Path, name: str) -> None:
    """A text, then a chain fed back: by the graph as GenAI rebuilds it. And the text in two parts, by the graph as it
    lies in the file."""
    head, dtype = heads(target)["plain" if name in KINDS else name], KINDS.get(name, torch.float32)
    head = head.to(dtype).float()  # values that the dtype holds
    head.embedding_VD = head.embedding_VD.to(dtype).float()
    states_TLD = hidden(target, head.reads)
    tokens, num = [*TEXT[1:], 5], len(TEXT)
    expected = logits(head, states_TLD)

    core, wide = ov.Core(), states_TLD.flatten(1)
    request = core.compile_model(read_back(tmp_path, head, target, dtype), "CPU", EXACT).create_infer_request()
    request.infer(inputs(tokens[:3], wide[:3], 0))
    out = request.infer(inputs(tokens[3:], wide[3:], 3))
    close(out["logits"][0, -1], expected[0])

    model = rebuilt(read_back(tmp_path, head, target, dtype))
    request = core.compile_model(model, "CPU", EXACT).create_infer_request()
    out = request.infer(inputs(tokens, head.fc(wide), 0))
    close(out["logits"][0, -1], expected[0])
    for step, token in enumerate(CHAIN):
        fed_back = torch.from_numpy(out["last_hidden_state"][0, -1:].copy())
        out = request.infer(inputs([token], fed_back, num + step))
        close(out["logits"][0, -1], expected[step + 1])


def close(found: np.ndarray, expected: Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found.copy()), expected.flatten(), rtol=1e-4, atol=1e-4)


def test_beams_and_padding(target: EagerTarget, tmp_path: Path) -> None:
    """Two sequences, one of them two tokens shorter and padded on the left; then they change places."""
    head = shaken_head(target, KNOWN, layers=2)
    states_TLD = hidden(target, head.reads)
    tokens, num = [*TEXT[1:], 5], len(TEXT)
    wide, short = states_TLD.flatten(1), num - 2
    core = ov.Core()
    compiled = core.compile_model(read_back(tmp_path, head, target), "CPU", EXACT)
    alone = []
    for length in (num, short):
        request = compiled.create_infer_request()
        request.infer(inputs(tokens[:length], wide[:length], 0))
        alone.append(request.infer(inputs([9], wide[3:4], length))["logits"][0, -1].copy())
    request = compiled.create_infer_request()
    padded = torch.cat((torch.zeros(2, wide.shape[1]), wide[:short]))
    mask = np.ones((2, num + 1), np.int64)
    mask[1, :2] = 0
    request.infer({
        "input_ids": np.array([tokens, [0, 0, *tokens[:short]]]),
        "hidden_states": torch.stack((wide, padded)).numpy(),
        "attention_mask": mask[:, :-1],
        "position_ids": np.array([range(num), [0, 0, *range(short)]]),
        "beam_idx": np.arange(2, dtype=np.int32),
    })  # fmt: skip
    out = request.infer({
        "input_ids": np.array([[9], [9]]),
        "hidden_states": wide[None, 3:4].repeat(2, 1, 1).numpy(),
        "attention_mask": mask[::-1].copy(),
        "position_ids": np.array([[short], [num]]),
        "beam_idx": np.array([1, 0], np.int32),
    })["logits"]  # fmt: skip
    close(out[0, -1], torch.from_numpy(alone[1]))
    close(out[1, -1], torch.from_numpy(alone[0]))


@pytest.mark.parametrize("layers", [1, 3])
def test_its_attention_can_be_paged(target: EagerTarget, tmp_path: Path, layers: int) -> None:
    """OpenVINO's own pass, by which GenAI serves: it knows every attention, and what only they needed goes."""
    from openvino._offline_transformations import paged_attention_transformation

    model = rebuilt(read_back(tmp_path, shaken_head(target, KNOWN, layers=layers), target))
    paged_attention_transformation(model)
    assert len(of_type(model, "PagedAttentionExtension")) == layers
    left = {port.any_name for port in model.inputs}
    assert {"input_ids", "hidden_states", "position_ids"} <= left and not left & {"attention_mask", "beam_idx"}
    assert not of_type(model, "ReadValue") and not of_type(model, "ScaledDotProductAttention")


def test_which_heads_share_keys(target: EagerTarget, tmp_path: Path) -> None:
    """Heads 0 and 1 read the first keys, 2 and 3 the second. By itself: the CPU plugin puts its own way of sharing in
    the place of any that stands before an attention, right or wrong."""
    model = read_back(tmp_path, shaken_head(target, KNOWN), target)
    [attention] = of_type(model, "ScaledDotProductAttention")
    keys = ops.parameter([1, 2, 1, 8], ov.Type.f32)
    shared = source(attention, 1)
    source(source(shared, 0), 0).input(0).replace_source_output(keys.output(0))  # under a Broadcast, an Unsqueeze
    given = np.arange(16, dtype=np.float32).reshape(1, 2, 1, 8)
    run = ov.compile_model(ov.Model([ops.result(shared)], [keys]), "CPU")
    assert np.array_equal(run(given)[0], given[:, [0, 0, 1, 1]])


@pytest.mark.parametrize("own", [False, True])
def test_which_rows_are_the_targets(target: EagerTarget, tmp_path: Path, own: bool) -> None:
    """GenAI puts the target's embedding in the place of a table of that length that a Gather reads."""
    model = read_back(tmp_path, heads(target)["own rows" if own else "plain"], target)
    shapes = {
        source(node, 0).get_friendly_name(): node.input(0).get_partial_shape() for node in of_type(model, "Gather")
    }
    tables = [name for name, shape in shapes.items() if shape.rank.get_length() > 1 and shape[0] == VOCAB]
    assert tables == ([] if own else ["embed_tokens.weight"])


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: EagerTarget, tmp_path: Path
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(VOCAB - 4).save_pretrained(tmp_path / "target")
    save_head(shaken_head(target, KNOWN), tmp_path / "head", {}, "a head\n")
    arguments = ("export", "--head", str(tmp_path / "head"), "--target", str(tmp_path / "target"), "--to", "openvino")
    record = run_json(capsys, *arguments, "--out", str(tmp_path / "out"))
    assert f"draft_model('{tmp_path / 'out'}', 'CPU')" in record["serve"]
    assert f"optimum-cli export openvino -m {tmp_path / 'target'} --task" in record["serve"]
    model = ov.Core().read_model(tmp_path / "out" / "openvino_model.xml")
    assert [port.any_name for port in model.outputs] == ["logits", "d2t"]
    save_head(shaken_head(target, KNOWN, norm_output=True), tmp_path / "normed", {}, "a head\n")
    normed = [str(tmp_path / "normed") if word == str(tmp_path / "head") else word for word in arguments]
    assert "does not know norm_output" in refused(capsys, *normed, "--out", str(tmp_path / "other"))
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "eyas.openvino_head")
    monkeypatch.delattr(eyas, "openvino_head")
    arguments = [str(tmp_path / "nowhere") if word == str(tmp_path / "target") else word for word in arguments]
    sentence = refused(capsys, *arguments, "--out", str(tmp_path / "other"))  # before any target is loaded
    assert "openvino, which is not installed: pip install 'eyas[openvino]'" in sentence
    assert not (tmp_path / "other").exists()


def test_importing_it_sends_nothing() -> None:
    """openvino reports that it is imported to its makers, by a package that it asks for: here it finds none."""
    from openvino.tools.ovc import telemetry_utils

    assert telemetry_utils.tm.__name__ == "openvino.tools.ovc.telemetry_stub"
