"""Folders written here by hand in the layouts of other writers load, and draft as a plain reimplementation does."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import refused, run_json
from test_heads import attention, rms
from tiny import VOCAB, tiny_target, tiny_tokenizer
from torch import Tensor

from eyas.checkpoint import load_head, open_head
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import Eagle3
from eyas.layouts import AUX_IDS, states_read
from eyas.targets.eager import EagerTarget
from eyas.tree import Tree

LAYERS = 8  # of the target: an EAGLE-3 head usually reads the states 2, 4 and 5
TEXT = [1, 8, 4, 4, 30, 17, 55, 2, 9]
CHAIN = [20, 3, 47]
DRAFT_IDS = list(range(1, VOCAB, 3))
WIDTH, HEADS, KV, DIM, FFN = 32, 4, 2, 12, 20  # DIM is not WIDTH / HEADS


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target(torch.float32, layers=LAYERS)


def weights(kind: str, width: int = WIDTH, layers: int = 1, states: int = 3, **more: bool) -> dict[str, Tensor]:
    """Random weights by plain names: `0.q` is the first layer's; every one of them matters."""
    generator = torch.Generator().manual_seed(layers + 10 * states)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 2 / columns**0.5

    def vector(size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator)

    fused = states * WIDTH if kind == "eagle3" else 2 * width
    w = {"fc": matrix(width, fused)}
    if more.get("fc_bias"):
        w["fc.bias"] = vector(width)
    for n in range(layers):
        inner = 2 * width if kind == "eagle3" and n == 0 else width
        w |= {f"{n}.q": matrix(HEADS * DIM, inner), f"{n}.k": matrix(KV * DIM, inner),
              f"{n}.v": matrix(KV * DIM, inner),
              f"{n}.o": matrix(width, HEADS * DIM), f"{n}.gate": matrix(FFN, width), f"{n}.up": matrix(FFN, width),
              f"{n}.down": matrix(width, FFN), f"{n}.mlp_norm": vector(width)}  # fmt: skip
        if more.get("qkv_bias"):
            w |= {f"{n}.{part}.bias": vector(rows * DIM) for part, rows in (("q", HEADS), ("k", KV), ("v", KV))}
        if n:
            w[f"{n}.norm"] = vector(width)
    if kind == "eagle3":
        w |= {"embedding_norm": vector(width), "hidden_norm": vector(width), "norm": vector(width),
              "lm_head": matrix(len(DRAFT_IDS), width)}  # fmt: skip
        if width != WIDTH:
            w["embedding"] = matrix(VOCAB, width)
        w |= {f"fc_norm.{i}": vector(WIDTH) for i in range(states) if more.get("fc_norm")}
        if more.get("norm_before_fc"):
            w["input_norm"] = vector(states * WIDTH)
    return w


def plain_logits(
    kind: str, w: Mapping[str, Tensor], theta: float, eps: float, states_TLD: Tensor, target: EagerTarget, **on: bool
) -> list[Tensor]:
    """Logits after the text and after each drafted token, everything run anew for each, float64."""
    w = {name: t.double() for name, t in w.items()}
    config = {"head_dim": DIM, "rope_theta": theta, "num_attention_heads": HEADS, "num_key_value_heads": KV}
    tokens = [*TEXT[1:], 5, *CHAIN]
    rows_VD = w.get("embedding", target.embedding_VD.double())
    parts = [state.double() for state in states_TLD.unbind(1)]
    if on.get("fc_norm"):
        parts = [rms(part, w[f"fc_norm.{i}"], eps) for i, part in enumerate(parts)]
    fused_TD = torch.cat(parts, -1)
    if on.get("norm_before_fc"):
        fused_TD = rms(fused_TD, w["input_norm"], eps)
    if kind == "eagle3":
        fused_TD = fused_TD @ w["fc"].T + w.get("fc.bias", 0)
    inputs = list(fused_TD)
    found: list[Tensor] = []
    while True:
        g_TD, e_TD = torch.stack(inputs), rows_VD[torch.tensor(tokens[: len(inputs)])]
        if kind == "eagle3":
            normed = rms(g_TD, w["hidden_norm"], eps)
            a_TE = torch.cat((rms(e_TD, w["embedding_norm"], eps), normed), -1)
            x_TD = normed if on.get("norm_before_residual") else g_TD
        else:
            a_TE = x_TD = torch.cat((e_TD, g_TD), -1) @ w["fc"].T + w.get("fc.bias", 0)
        for n in range(1 + max(int(name[0]) for name in w if name[0].isdigit())):
            if n:
                a_TE = rms(x_TD, w[f"{n}.norm"], eps)
            names = {f"self_attn.{part}_proj": f"{n}.{part}" for part in "qkvo"}
            layer = {long: w[short] for long, short in names.items()}
            if f"{n}.q.bias" in w:  # a bias is a weight of an input that is always 1
                a_TE = torch.cat((a_TE, torch.ones(len(a_TE), 1)), -1)
                layer |= {long: torch.cat((w[short], w[f"{short}.bias"][:, None]), -1)
                          for long, short in names.items() if short[-1] != "o"}  # fmt: skip
            x_TD = x_TD + attention(a_TE, layer, config)
            m_TD = rms(x_TD, w[f"{n}.mlp_norm"], eps)
            gate = m_TD @ w[f"{n}.gate"].T
            x_TD = x_TD + (gate * gate.sigmoid() * (m_TD @ w[f"{n}.up"].T)) @ w[f"{n}.down"].T
        last = rms(x_TD[-1], w["norm"], eps) if kind == "eagle3" else x_TD[-1]
        found.append(last @ (w["lm_head"] if kind == "eagle3" else target.head_VD.double()).T)
        if len(found) > len(CHAIN):
            return found
        inputs.append(last if on.get("norm_output") else x_TD[-1])


# -- writers, one a layout: the names stand here once more, by hand ----------------------------------------------------


def layer_names(first: str, later: str, later_norm: str) -> dict[str, str]:
    names = {}
    for n in range(5):
        at = first if n == 0 else later.format(n)
        names |= {f"{n}.{part}{end}": f"{at}self_attn.{part}_proj{end or '.weight'}"
                  for part in "qkvo" for end in ("", ".bias")}  # fmt: skip
        names |= {f"{n}.{part}": f"{at}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names |= {f"{n}.mlp_norm": f"{at}post_attention_layernorm.weight", f"{n}.norm": f"{at}{later_norm}.weight"}
    names |= {"embedding_norm": f"{first}input_layernorm.weight", "hidden_norm": f"{first}hidden_norm.weight"}
    names |= {"fc.bias": "fc.bias", "embedding": "embed_tokens.weight"}
    names |= {f"fc_norm.{i}": f"fc_norm.{i}.weight" for i in range(5)}
    return names | {name: f"{name}.weight" for name in ("fc", "norm", "lm_head", "input_norm")}


NAMES = {
    "official": layer_names("midlayer.", "", ""),
    "vllm": layer_names("layers.0.", "layers.{}.", "input_layernorm"),
    "sglang": layer_names("layers.0.", "layers.{}.", "hidden_norm"),
    "tensorrt": layer_names("midlayer.0.", "midlayer.{}.", "hidden_norm"),
}
SIZES: dict[str, object] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": FFN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
    "torch_dtype": "float16",
}  # fmt: skip
OFFICIAL = {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "pad_token_id": 0,
            "max_position_embeddings": 2048, "draft_vocab_size": len(DRAFT_IDS)}  # fmt: skip
NATIVE = {**SIZES, "num_hidden_layers": 1, "rope_theta": 5e5, "head_dim": DIM, "draft_vocab_size": len(DRAFT_IDS)}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": len(DRAFT_IDS),
    "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    "transformer_layer_config": {**SIZES, "num_hidden_layers": 1, "head_dim": DIM,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model"}},
}  # fmt: skip

# layout, names, config, settings of `weights` and `plain_logits`, states that must be read, prefix of every name
EAGLE3_FOLDERS: dict[str, tuple[str, dict[str, object], dict, list[int], str]] = {
    "official": ("official", OFFICIAL, {}, [2, 4, 5], ""),
    "official, own embedding": ("official", {**OFFICIAL, "hidden_size": 24, "target_hidden_size": WIDTH},
                                {"width": 24}, [2, 4, 5], ""),
    "sglang": ("official", {**NATIVE, "eagle_config": {AUX_IDS: [0, 2, 5], "use_aux_hidden_state": True}},
               {}, [1, 3, 6], ""),
    "sglang, model.": ("sglang", NATIVE, {}, [2, 4, 5], "model."),
    "sglang, two layers, bias": ("sglang", {**NATIVE, "bias": True}, {"layers": 2, "fc_bias": True}, [2, 4, 5], ""),
    "sglang, five states": ("sglang", {**NATIVE, "eagle_config": {AUX_IDS: [0, 1, 2, 3, 5]}}, {"states": 5},
                            [1, 2, 3, 4, 6], ""),
    "vllm": ("vllm", {**NATIVE, AUX_IDS: [1, 3, 6]}, {}, [1, 3, 6], ""),
    "vllm, one state, model.": ("vllm", {**NATIVE, AUX_IDS: [6]}, {"states": 1}, [6], "model."),
    "vllm, three layers, biases": ("vllm", {**NATIVE, "attention_bias": True}, {"layers": 3, "qkv_bias": True},
                                   [2, 4, 5], ""),
    "vllm, 3.1": ("vllm", {**NATIVE, "fc_norm": True, "norm_output": True},
                  {"fc_norm": True, "norm_output": True}, [2, 4, 5], ""),
    "speculators": ("vllm", SPECULATORS, {"norm_before_residual": True}, [1, 3, 6], ""),
    "speculators, gpt-oss": ("vllm", {**SPECULATORS, "norm_before_fc": True},
                             {"norm_before_residual": True, "norm_before_fc": True}, [1, 3, 6], ""),
    "tensorrt": ("tensorrt", NATIVE, {"layers": 2}, [2, 4, 5], ""),
    "tensorrt, post norm": ("official", {**NATIVE, "eagle_config": {"return_hidden_post_norm": True}},
                            {"norm_output": True}, [2, 4, 5], ""),
}  # fmt: skip


def write(folder: Path, config: dict, tensors: dict[str, Tensor], as_bin: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if as_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def vocabulary() -> dict[str, Tensor]:
    ids = torch.tensor(DRAFT_IDS)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}


def hidden(target: EagerTarget, reads: tuple[int, ...]) -> Tensor:
    return target.verify([(target.new_cache(), Tree.chain(TEXT))], reads)[0].hidden_NLD


def logits(head: Eagle | Eagle3, states_TLD: Tensor) -> list[Tensor]:
    state = head.new_state()
    head.observe(state, [*TEXT[1:], 5], states_TLD, 2)
    found = []
    for step in range(len(CHAIN) + 1):
        out = state.hidden_RD[-1]
        found.append(head.lm_head(head.norm(out)) if isinstance(head, Eagle3) else out @ head.head_VD.T)
        if step < len(CHAIN):
            head.expand(state, [step], [CHAIN[step]], 2)
    return found


def drafts_like_the_plain_one(head: Eagle | Eagle3, expected: list[Tensor], states_TLD: Tensor) -> None:
    for ours, plain in zip(logits(head, states_TLD), expected, strict=True):
        torch.testing.assert_close(ours.double(), plain, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("case", EAGLE3_FOLDERS)
def test_eagle3_folders(target: EagerTarget, tmp_path: Path, case: str, as_bin: bool) -> None:
    names, config, settings, reads, prefix = EAGLE3_FOLDERS[case]
    w = weights("eagle3", **settings)
    tensors = {prefix + NAMES[names][name]: tensor for name, tensor in w.items()} | vocabulary()
    head = load_head(str(write(tmp_path / "head", config, tensors, as_bin)), target)
    assert head.reads == tuple(reads)
    assert isinstance(head, Eagle3) and head.draft_vocabulary_Q is not None
    assert head.draft_vocabulary_Q.tolist() == DRAFT_IDS
    states_TLD = hidden(target, head.reads)
    theta = 10000.0 if case.startswith("official") else 5e5  # the official folder names none
    on = {name: value for name, value in settings.items() if "norm" in name}
    drafts_like_the_plain_one(head, plain_logits("eagle3", w, theta, 1e-5, states_TLD, target, **on), states_TLD)


EAGLE_CONFIG = {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
EAGLE_FOLDERS: dict[str, tuple[dict, dict, list[str]]] = {
    "bias": (EAGLE_CONFIG, {"fc_bias": True}, ["embed_tokens.weight", "layers.0.self_attn.rotary_emb.inv_freq"]),
    "no bias": ({**EAGLE_CONFIG, "bias": False, "rope_theta": 5e5}, {}, []),
    "zero bias": (
        {**EAGLE_CONFIG, "bias": False, "rope_theta": 5e5},
        {},
        ["fc.bias", "layers.0.self_attn.o_proj.bias"],
    ),
    "biases of qkv": ({**EAGLE_CONFIG, "bias": False, "qkv_bias": True, "rope_theta": 5e5}, {"qkv_bias": True}, []),
    "nested": ({"model_type": "eagle", "eagle_fc_bias": True, "model": EAGLE_CONFIG}, {"fc_bias": True}, []),
}


@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("case", EAGLE_FOLDERS)
def test_eagle_folders(target: EagerTarget, tmp_path: Path, case: str, as_bin: bool) -> None:
    config, settings, idle = EAGLE_FOLDERS[case]
    w = weights("eagle", **settings)
    tensors = {NAMES["vllm"][name]: tensor for name, tensor in w.items()}
    for name in idle:  # what released files carry beside: it changes nothing
        rows = target.embedding_VD.clone() if name == "embed_tokens.weight" else torch.zeros(WIDTH)
        tensors[name] = rows
    head = load_head(str(write(tmp_path / "head", config, tensors, as_bin)), target)
    assert isinstance(head, Eagle) and head.reads == (LAYERS,)
    states_TLD = hidden(target, head.reads)
    theta = config.get("rope_theta", 10000.0)
    drafts_like_the_plain_one(head, plain_logits("eagle", w, theta, 1e-6, states_TLD, target), states_TLD)


# -- where files leave a choice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reads", "why"),
    [
        ({}, (2, 4, 5), "none named"),
        ({AUX_IDS: [1, 3, 6]}, (1, 3, 6), "the states enter"),
        ({"eagle_config": {AUX_IDS: [1, 3, 6]}}, (2, 4, 7), "as SGLang reads them"),
        ({"eagle_config": {AUX_IDS: [1, 3, 4]}}, (2, 4, 5), "as SGLang reads them"),
        ({"eagle_config": {AUX_IDS: [2, 4, 5]}}, (3, 5, 6), "which is what vLLM takes"),
        ({AUX_IDS: [2, 4, 5], "eagle_config": {AUX_IDS: [1, 3, 4]}}, (2, 4, 5), "the states enter"),
        ({AUX_IDS: [2, 4, 5], "eagle_config": {AUX_IDS: [2, 4, 5]}}, (2, 4, 5), "passed over"),
        ({"eyas_reads": [0, 1, 8], AUX_IDS: [2, 4, 5]}, (0, 1, 8), "own record"),
    ],
)
def test_layer_ids_in_their_writers_meaning(config: dict, reads: tuple[int, ...], why: str) -> None:
    found, reason = states_read(config, (2, 4, 5))
    assert found == reads
    assert why in reason
    assert ("passed over" in reason) == (why == "passed over")


def test_what_the_files_leave_open_is_said(target: EagerTarget, tmp_path: Path) -> None:
    w = weights("eagle3")
    tensors = {NAMES["official"][name]: tensor for name, tensor in w.items()} | vocabulary()
    file, head, why = open_head(str(write(tmp_path / "head", OFFICIAL, tensors)), target)
    assert file.layout == "official" and why.startswith("none named")
    said = " ".join(file.notes)
    for part in ("num_hidden_layers is 40", "no rope_theta: 10000", "says float16, the weights are float32"):
        assert part in said
    config = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    tensors = {NAMES["vllm"][name]: tensor for name, tensor in w.items()} | vocabulary()
    file, head, _ = open_head(str(write(tmp_path / "other", config, tensors)), target)
    assert file.layout == "speculators" and "vLLM takes such a folder as on" in " ".join(file.notes)
    assert isinstance(head, Eagle3) and not head.config.norm_before_residual


def test_rows_of_the_target(target: EagerTarget, tmp_path: Path) -> None:
    """A copy of the target's embedding is no embedding of the head's own; without an output matrix, the target's."""
    w = weights("eagle3")
    tensors = {NAMES["official"][name]: tensor for name, tensor in w.items()} | vocabulary()
    tensors["embed_tokens.weight"] = target.embedding_VD.to(torch.float16)
    head = load_head(str(write(tmp_path / "copy", OFFICIAL, tensors)), target)
    assert isinstance(head, Eagle3) and not head.config.own_embedding
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1
    head = load_head(str(write(tmp_path / "own", OFFICIAL, tensors)), target)
    assert isinstance(head, Eagle3) and head.config.own_embedding
    for name in ("lm_head.weight", "d2t", "t2d", "embed_tokens.weight"):
        del tensors[name]
    head = load_head(str(write(tmp_path / "shared", {**OFFICIAL, "draft_vocab_size": None}, tensors)), target)
    assert isinstance(head, Eagle3) and torch.equal(head.lm_head.weight, target.head_VD)
    assert head.draft_vocabulary_Q is None


def test_a_head_in_parts(target: EagerTarget, tmp_path: Path) -> None:
    tensors = {NAMES["official"][name]: tensor for name, tensor in weights("eagle3").items()} | vocabulary()
    whole = load_head(str(write(tmp_path / "whole", OFFICIAL, tensors)), target)
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OFFICIAL))
    names = sorted(tensors)
    for n, part in enumerate((names[:5], names[5:]), start=1):
        save_file({name: tensors[name] for name in part}, folder / f"model-0000{n}-of-00002.safetensors")
    for key, tensor in load_head(str(folder), target).state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[key]), key


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict, dict[str, Tensor | None], str]] = {
    "absurd draft_vocab_size": ({"draft_vocab_size": 10**12}, {}, "draft_vocab_size is 1000000000000"),
    "negative draft_vocab_size": ({"draft_vocab_size": -3}, {}, "draft_vocab_size is -3"),
    "tokens as d2t": ({}, {"d2t": torch.tensor(DRAFT_IDS)}, "is it a list of tokens?"),
    "d2t of floats": ({}, {"d2t": torch.zeros(len(DRAFT_IDS))}, "d2t, which is"),
    "d2t out of range": ({}, {"d2t": torch.full((len(DRAFT_IDS),), 60)}, "outside 0 to 60"),
    "head_dim": ({"head_dim": 16}, {}, "4 heads of 16 numbers, and q_proj has 48 rows"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor = 0.5"),
    "scaled rotation": ({"rope_scaling": {"type": "yarn", "factor": 4}}, {}, "of type 'yarn'"),
    "next layers": ({"eagle_config": {"next_layer_regular": False}}, {}, "next_layer_regular = False"),
    "a parallel head": ({"speculators_model_type": "peagle"}, {}, "speculator of type 'peagle'"),
    "a mask": ({}, {"mask_hidden": torch.zeros(3)}, "unknown ['mask_hidden']"),
    "qwen3 norms": ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(DIM)}, "unknown ['midlayer.self_attn.q_norm"),
    "o_proj bias": ({}, {"midlayer.self_attn.o_proj.bias": torch.ones(WIDTH)}, "unknown ['midlayer.self_attn.o_proj"),
    "too many states": (
        {AUX_IDS: [2, 4, 5, 7]},
        {},
        "3 states of the target's width 32, and reads the states [2, 4, 5",
    ),
    "ids that are none": ({AUX_IDS: "2,4,5"}, {}, "must be a list of layer numbers"),
    "one tensor twice": ({}, {"model.norm.weight": torch.ones(WIDTH)}, "holds norm.weight twice"),
    "NaN": ({}, {"norm.weight": torch.full((WIDTH,), torch.nan)}, "norm.weight holds values that are not finite"),
    "no norm": ({}, {"norm.weight": None}, "missing ['norm.weight']"),
}


@pytest.fixture(scope="module")
def target_folder(target: EagerTarget, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    tiny_tokenizer(VOCAB - 4).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(capsys: pytest.CaptureFixture[str], target_folder: str, tmp_path: Path, case: str) -> None:
    config, changes, sentence = REFUSED[case]
    tensors = {NAMES["official"][name]: tensor for name, tensor in weights("eagle3").items()} | vocabulary()
    kept = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    head = write(tmp_path / "head", {**OFFICIAL, **config}, kept)
    assert sentence in refused(capsys, "import", str(head), "--target", target_folder, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_files_that_are_none(capsys: pytest.CaptureFixture[str], target_folder: str, tmp_path: Path) -> None:
    tensors = {NAMES["official"][name]: tensor for name, tensor in weights("eagle3").items()} | vocabulary()
    head, out = write(tmp_path / "head", OFFICIAL, tensors), tmp_path / "out"
    arguments = ("import", str(head), "--target", target_folder, "--out", str(out))
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:900])
    assert "cannot read the head" in refused(capsys, *arguments)
    (head / "model.safetensors").unlink()
    (head / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Hostile(tmp_path / "was_run")}))
    assert "a pickle of more than tensors" in refused(capsys, *arguments)
    assert not (tmp_path / "was_run").exists() and not out.exists()
    out.mkdir()
    (out / "mine").touch()
    assert "not empty" in refused(capsys, *arguments)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_rows_of_another_target_are_not_lost(
    capsys: pytest.CaptureFixture[str], target: EagerTarget, target_folder: str, tmp_path: Path
) -> None:
    """An EAGLE-1 head drafts with the embedding in its file; other layouts would drop one that is not the target's."""
    tensors = {NAMES["vllm"][name]: tensor for name, tensor in weights("eagle", fc_bias=True).items()}
    for factor, code in ((1.0, 0), (1.001, 0), (1.2, 2)):
        rows = {"embed_tokens.weight": factor * target.embedding_VD}
        head = write(tmp_path / f"head{factor}", EAGLE_CONFIG, tensors | rows)
        for command in (("import", str(head)), ("export", "--to", "sglang", "--head", str(head))):
            out = tmp_path / f"{command[0]}{factor}"
            arguments = (*command, "--target", target_folder, "--out", str(out))
            if code:
                assert "made for another target" in refused(capsys, *arguments)
            else:
                run_json(capsys, *arguments)


def test_import(capsys: pytest.CaptureFixture[str], target: EagerTarget, target_folder: str, tmp_path: Path) -> None:
    w = {name: tensor.half() for name, tensor in weights("eagle3").items()}
    tensors = {NAMES["official"][name]: tensor for name, tensor in w.items()} | vocabulary()
    head = write(tmp_path / "head", OFFICIAL, tensors, as_bin=True)
    record = run_json(capsys, "import", str(head), "--target", target_folder, "--out", str(tmp_path / "ours"))
    assert record["kind"] == "eagle3" and record["layout"] == "official" and record["reads"] == [2, 4, 5]
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype, name
    states_TLD = hidden(target, (2, 4, 5))
    first, again = (load_head(str(folder), target) for folder in (head, tmp_path / "ours"))
    assert all(torch.equal(*pair) for pair in zip(logits(first, states_TLD), logits(again, states_TLD), strict=True))
