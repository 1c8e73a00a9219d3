"""EAGLE-3 heads of several layers and with the switches of EAGLE-3.1: a slow twin, files both ways, losslessness."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lossless import POLICIES, PROMPT, both
from tiny import HEADS, VOCAB, shaken_head, tiny_target
from torch import Tensor

from eyas import native
from eyas.checkpoint import load_native_head, save_head
from eyas.drafters.eagle3 import SWITCHES, Eagle3
from eyas.drafters.native import NativeDrafter
from eyas.errors import InputError, Unsupported
from eyas.formats import build_head, read_head, write_head
from eyas.generate import generate, generate_plain
from eyas.measure import timed
from eyas.policies import parse_policy
from eyas.sampling import Sampling
from eyas.targets.base import Target
from eyas.targets.eager import EagerTarget
from eyas.targets.native import NativeTarget, pack_target
from eyas.tree import Tree
from eyas.verify import Stop

TEXT = [1, 8, 4, 4, 30, 17, 55, 2, 9, 41, 12, 33]
DRAFTED = [20, 3, 47]  # a chain grown from the last token of the text
KNOWN = [token for token in range(VOCAB) if token % 7]
WINDOWED = {"layers": 2, "window": 2}  # shorter than the texts and than the chains
each_head = pytest.mark.parametrize("settings", [{}, *HEADS.values(), WINDOWED], ids=["plain", *HEADS, "window"])


@pytest.fixture(scope="module")
def target() -> EagerTarget:
    return tiny_target()


def true_states(target: EagerTarget, reads: tuple[int, ...]) -> Tensor:
    return target.verify([(target.new_cache(), Tree.chain(TEXT))], reads)[0].hidden_NLD


# -- a slow twin -------------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x_TC: Tensor, theta: float) -> Tensor:
    half = x_TC.shape[1] // 2
    angles = torch.arange(len(x_TC)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    z = torch.complex(x_TC[:, :half], x_TC[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=1)


def attention(a_TE: Tensor, weight: dict[str, Tensor], config: dict) -> Tensor:
    """One head after the other, over the whole sequence."""
    size, theta = config["head_dim"], config["rope_theta"]
    shared = config["num_attention_heads"] // config["num_key_value_heads"]
    outputs = []
    for h in range(config["num_attention_heads"]):
        g = h // shared
        q = turned(a_TE @ weight["self_attn.q_proj"][h * size : (h + 1) * size].T, theta)
        k = turned(a_TE @ weight["self_attn.k_proj"][g * size : (g + 1) * size].T, theta)
        v = a_TE @ weight["self_attn.v_proj"][g * size : (g + 1) * size].T
        hidden = torch.full((len(q), len(q)), -math.inf).double()
        scores = q @ k.T / math.sqrt(size) + hidden.triu(1)
        if "eyas_window" in config:
            scores = scores + hidden.tril(-config["eyas_window"])
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, dim=-1) @ weight["self_attn.o_proj"].T


def slow_logits(folder: Path, states_TLD: Tensor, tokens: list[int], embedding_VD: Tensor) -> list[Tensor]:
    """Logits after the last true pair and after each drafted one, all layers run anew for each: no cache, no tree."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items() if name not in ("d2t", "t2d")}
    eps, layers = config["rms_norm_eps"], config["num_hidden_layers"]
    parts = [states_TLD[:, n] for n in range(3)]
    if config["fc_norm"]:
        parts = [rms(part, w[f"fc_norm.{n}.weight"], eps) for n, part in enumerate(parts)]
    fused = torch.cat(parts, dim=-1)
    if config["norm_before_fc"]:
        fused = rms(fused, w["input_norm.weight"], eps)
    inputs = list(fused @ w["fc.weight"].T)
    found = []
    while True:
        g_TD = torch.stack(inputs)
        e_TD = embedding_VD[torch.tensor(tokens[: len(inputs)])]
        for n in range(layers):
            prefix = "midlayer." if layers == 1 else f"layers.{n}."
            layer = {k.removeprefix(prefix).removesuffix(".weight"): t for k, t in w.items() if k.startswith(prefix)}
            if n == 0:
                normed = rms(g_TD, layer["hidden_norm"], eps)
                x_TD = normed if config["norm_before_residual"] else g_TD
                a_TE = torch.cat((rms(e_TD, layer["input_layernorm"], eps), normed), dim=-1)
            else:
                a_TE = rms(x_TD, layer["input_layernorm"], eps)
            x_TD = x_TD + attention(a_TE, layer, config)
            m_TD = rms(x_TD, layer["post_attention_layernorm"], eps)
            gate = m_TD @ layer["mlp.gate_proj"].T
            x_TD = x_TD + (gate * gate.sigmoid() * (m_TD @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
        final = rms(x_TD[-1], w["norm.weight"], eps)
        found.append(final @ w["lm_head.weight"].T)
        if len(inputs) == len(tokens):
            return found
        inputs.append(final if config["norm_output"] else x_TD[-1])


@each_head
def test_a_chain_has_the_logits_of_a_slow_twin(target: EagerTarget, tmp_path: Path, settings: dict) -> None:
    head = shaken_head(target, KNOWN, **settings).double()
    states_TLD = true_states(target, head.reads)
    write_head(head, tmp_path, {}, torch.float32)
    tokens = [*TEXT[1:], 5, *DRAFTED]
    slow = slow_logits(tmp_path, states_TLD, tokens, target.embedding_VD)
    state = head.new_state()
    head.observe(state, tokens[:4], states_TLD[:4], 3)
    head.expand(state, [0, 0], [7, 9], 3)  # speculation that must leave no trace
    head.observe(state, tokens[4 : len(TEXT)], states_TLD[4:], 3)
    for step, logits_Q in enumerate(slow):
        # heads rotate by angles of float32
        torch.testing.assert_close(head.lm_head(head.norm(state.hidden_RD[-1])), logits_Q, rtol=1e-5, atol=1e-4)
        if step < len(DRAFTED):
            head.expand(state, [step], [DRAFTED[step]], 3)


# -- files -------------------------------------------------------------------------------------------------------------


def build(folder: Path, target: EagerTarget) -> Eagle3:
    head = build_head(read_head(folder), target.embedding_VD, target.head_VD, default_reads=(1, 2, 3))
    assert isinstance(head, Eagle3)
    return head.eval()


@each_head
def test_a_head_comes_back_as_it_was_written(target: EagerTarget, tmp_path: Path, settings: dict) -> None:
    head = shaken_head(target, KNOWN, **settings)
    write_head(head, tmp_path, {}, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == settings.get("layers", 1)
    assert {switch: config[switch] for switch in SWITCHES} == {s: settings.get(s, False) for s in SWITCHES}
    again = build(tmp_path, target)
    assert {**vars(again.config), "steps": 0} == {**vars(head.config), "steps": 0}
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    states_TLD = true_states(target, head.reads).float()
    ours, theirs = (h.observe(h.new_state(), [*TEXT[1:], 5], states_TLD, 9) for h in (head, again))
    assert torch.equal(ours.tokens_KW, theirs.tokens_KW) and torch.equal(ours.logprobs_KW, theirs.logprobs_KW)


def changed(folder: Path, rename: dict[str, str | None], config: dict[str, object]) -> None:
    """Other names, by prefix, for the tensors of a folder's head (None: dropped), and other fields in its config."""
    tensors = load_file(folder / "model.safetensors")
    for old, new in rename.items():
        for name in [name for name in tensors if name.startswith(old)]:
            tensor = tensors.pop(name).clone()
            if new is not None:
                tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, folder / "model.safetensors")
    found = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value != "absent"}))


TENSORRT = {"layers.1.input_layernorm.": "midlayer.1.hidden_norm.", "layers.": "midlayer."}


@pytest.mark.parametrize(
    ("settings", "rename", "config"),
    [
        ({}, {"midlayer.": "layers.0."}, {}),
        ({}, {"midlayer.": "midlayer.0."}, {}),
        ({}, {}, {"eyas_kind": "absent", "num_hidden_layers": 40, **{switch: "absent" for switch in SWITCHES}}),
        ({"layers": 2}, {"layers.0.": "midlayer."}, {}),
        ({"layers": 2}, TENSORRT, {}),
        ({"layers": 3}, {"layers.2.input_layernorm.": "midlayer.2.hidden_norm.", **TENSORRT}, {}),
        ({"fc_norm": True}, {f"fc_norm.{n}.": f"aux_norm_{name}." for n, name in enumerate(("low", "mid", "high"))},
         {"fc_norm": "absent", "use_aux_norm": True}),
        ({"norm_output": True}, {}, {"norm_output": "absent", "eagle_config": {"return_hidden_post_norm": True}}),
        ({"norm_before_fc": True}, {}, {"norm_before_fc": "absent", "eagle_config": {"norm_before_fc": True}}),
    ],
)  # fmt: skip
def test_layouts_of_other_writers_are_read(
    target: EagerTarget, tmp_path: Path, settings: dict, rename: dict, config: dict
) -> None:
    head = shaken_head(target, KNOWN, **settings)
    write_head(head, tmp_path, {}, torch.float32)
    changed(tmp_path, rename, config)
    again = build(tmp_path, target)
    assert {**vars(again.config), "steps": 0} == {**vars(head.config), "steps": 0}
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


@pytest.mark.parametrize(
    ("settings", "rename", "config", "message"),
    [
        ({"layers": 2}, {"layers.1.input_layernorm.": None}, {}, "missing .*layers.1.input_layernorm.weight"),
        ({"layers": 2}, {"layers.0.input_layernorm.": None}, {}, "missing .*layers.0.input_layernorm.weight"),
        ({"layers": 2}, {"layers.1.mlp.up_proj.": None}, {}, "missing .*layers.1.mlp.up_proj.weight"),
        ({"layers": 2}, {"layers.1.mlp.up_proj.": "layers.1.mlp.extra."}, {}, "unknown .*layers.1.mlp.extra.weight"),
        ({"layers": 2}, {"layers.1.": None}, {}, "num_hidden_layers is 2, and its tensors are those of 1"),
        ({"layers": 3}, {"layers.1.": None}, {}, "missing .*layers.1."),
        ({"layers": 2}, {"layers.0.hidden_norm.": "layers.1.hidden_norm."}, {}, "layers.1.input_layernorm.* twice"),
        ({"layers": 2}, {"layers.1.": "layers.7."}, {"num_hidden_layers": 8}, "1 to 5 decoder layers, got 8"),
        ({"layers": 2}, {"layers.0.self_attn.q_proj.": None}, {}, "no EAGLE head"),
        ({"fc_norm": True}, {"fc_norm.1.": None}, {}, "missing .*fc_norm.1.weight"),
        ({"fc_norm": True}, {"fc_norm.1.": "fc_norm.3."}, {}, "unknown .*fc_norm.3.weight"),
        ({"fc_norm": True}, {}, {"fc_norm": False}, "unknown .*fc_norm.0.weight"),
        ({}, {}, {"fc_norm": True}, "missing .*fc_norm.0.weight"),
        ({"norm_before_fc": True}, {"input_norm.": None}, {}, "missing .*input_norm.weight"),
        ({"norm_before_fc": True}, {}, {"norm_before_fc": None}, "unknown .*input_norm.weight"),
        ({}, {}, {"norm_before_fc": True}, "missing .*input_norm.weight"),
        ({"norm_before_fc": True}, {}, {"fc_norm": True}, "not both"),
        ({}, {}, {"norm_output": "yes"}, "norm_output must be true or false"),
        ({}, {}, {"norm_before_residual": [True]}, "norm_before_residual must be true or false"),
        ({}, {}, {"norm_output": True, "eagle_config": {"return_hidden_post_norm": False}}, "norm_output must be"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_its_config_is_refused(
    target: EagerTarget, tmp_path: Path, settings: dict, rename: dict, config: dict, message: str
) -> None:
    write_head(shaken_head(target, KNOWN, **settings), tmp_path, {}, torch.float32)
    changed(tmp_path, rename, config)
    with pytest.raises(InputError, match=message) as refusal:
        build(tmp_path, target)
    assert "\n" not in str(refusal.value)


# -- decoding ----------------------------------------------------------------------------------------------------------


@each_head
def test_speculative_equals_plain(target: EagerTarget, settings: dict) -> None:
    head = shaken_head(target, KNOWN, **settings).double()
    for number, policy in enumerate(POLICIES):
        for temperature in (0.0, 0.8):
            sampling = Sampling(temperature, top_p=0.9, seed=number)
            plain, drafted = both(target, head, parse_policy(policy), sampling, Stop(16))
            assert drafted.tokens == plain.tokens, (policy, temperature)


@pytest.mark.skipif(native.cpu_features() is None, reason="this install has no compiled core")
@pytest.mark.parametrize("weights", native.WEIGHTS)
@pytest.mark.parametrize("settings", [{}, *HEADS.values()], ids=["plain", *HEADS])
def test_over_a_native_target(tmp_path: Path, settings: dict, weights: str) -> None:
    """What the core does not know drafts in PyTorch, and output stays equal to the last bit of its logits."""
    eager = tiny_target(torch.float32)
    target: Target = NativeTarget(*pack_target(eager, weights), "tiny")
    assert isinstance(target, NativeTarget)
    native.core().set_num_threads(1)  # tiny products, as in conftest.py
    head = shaken_head(eager, KNOWN, **settings)
    save_head(head, tmp_path, {}, "a head\n")
    drafter = load_native_head(str(tmp_path), target)
    assert isinstance(drafter, Eagle3 if settings else NativeDrafter)
    if settings:
        with pytest.raises(Unsupported, match="one layer"):
            NativeDrafter(head, weights)
    for number, policy in enumerate(POLICIES):
        sampling = Sampling(0.7 * (number % 2), seed=number)
        plain = timed(generate_plain(target, PROMPT, sampling, Stop(24)))
        drafted = timed(generate(target, drafter, parse_policy(policy), PROMPT, sampling, Stop(24)))
        assert drafted.tokens == plain.tokens
        assert all(torch.equal(drafted.logits(place), plain.logits(place)) for place in range(len(plain.tokens)))
