"""An EAGLE-3 head as OpenVINO IR: the graph that OpenVINO GenAI takes as a draft model.

GenAI (2026.4; eagle3_model_transforms.cpp) rebuilds the graph before it runs it, and finds its way by form and by name:
- the product of the parameter `hidden_states` with a weight is fc: it goes to the target, whose states it reads;
- the sum that ends in "midlayer" in its name and adds a product of a product (the MLP's) is what is fed back;
- the first lookup (Gather) in a table of the vocabulary's length is the embedding: the target's takes its place;
- a constant named "d2t" that is an output holds distances from draft tokens to tokens;
- `hidden_layers_list` in `rt_info` names the layers that the states leave.
So what stands around fc, and a norm of what is fed back, cannot be served. Attention over a state with `beam_idx` is
the form that OpenVINO turns into paged attention. Knows no target but what its TargetSpec says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from eyas.drafters.eagle3 import Eagle3
from eyas.drafters.layers import BlockConfig
from eyas.errors import InputError, one_line
from eyas.files import write_text
from eyas.formats import head_tensors
from eyas.targets.base import TargetSpec

try:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # else the next line calls home
    import openvino as ov
    import openvino.opset13 as ops
    from openvino import Node
except ImportError as error:
    raise InputError("IR is written by openvino, which is not installed: pip install 'eyas[openvino]'") from error

FILE = "openvino_model.xml"  # beside it, the weights: openvino_model.bin
_F32, _I64 = ov.Type.f32, ov.Type.i64
_TYPES = {torch.float64: ov.Type.f64, torch.float32: _F32, torch.float16: ov.Type.f16, torch.bfloat16: ov.Type.bf16,
          torch.int64: _I64}  # fmt: skip


def write(folder: Path, head: Eagle3, spec: TargetSpec, dtype: torch.dtype) -> None:
    """Write `head` for the target of `spec`: `FILE` and its weights, in `dtype`, and the tokens that end an answer.

    Raises:
        OSError: the place cannot be written, or the disk is full.
    """
    try:
        ov.save_model(build(head, dtype), folder / FILE, compress_to_fp16=False)
    except RuntimeError as error:  # its way to say so
        raise OSError(f"cannot write {folder / FILE}: {one_line(error)}") from error
    write_text(folder / "generation_config.json", json.dumps({"eos_token_id": list(spec.eos_ids)}) + "\n")


def build(head: Eagle3, dtype: torch.dtype) -> ov.Model:
    """The graph of `head`: token ids, states side by side, mask, positions, beams -> logits over the draft vocabulary.

    Legend: B sequences, T tokens, P tokens before them, L states, D width, H heads, G key/value heads, C size of one, Q
    draft vocabulary. Inputs: `input_ids` [B, T], `hidden_states` [B, T, L * D of the target], `attention_mask`
    [B, P + T], `position_ids` [B, T], `beam_idx` [B]; outputs: `logits` [B, T, Q], and `d2t` [Q] if there is one.
    """
    return _Graph(head, dtype).model()


class _Graph:
    """A graph in the making: its inputs, and what its nodes share."""

    def __init__(self, head: Eagle3, dtype: torch.dtype) -> None:
        self.head, self.block = head, head.config.block
        self.weights = head_tensors(head, dtype)
        self.weights.setdefault("embed_tokens.weight", head.embedding_VD.detach().to(dtype))
        self.tokens_BT = _parameter("input_ids", [-1, -1], _I64)
        self.states = _parameter("hidden_states", [-1, -1, -1], _F32)
        self.mask = _parameter("attention_mask", [-1, -1], _I64)
        self.positions_BT = _parameter("position_ids", [-1, -1], _I64)
        self.beams_B = _parameter("beam_idx", [-1], ov.Type.i32)
        self.sees = _causal(self.tokens_BT, self.mask)
        self.angles = _angles(self.positions_BT, self.block)
        self.sinks: list[Node] = []

    def model(self) -> ov.Model:
        c = self.head.config
        g = self.linear("fc", self.states)
        first = "midlayer" if c.layers == 1 else "layers.0"
        normed = self.norm(f"{first}.hidden_norm", g)
        embedded = self.norm(f"{first}.input_layernorm", self.embedded())
        x = self.layer(0, first, normed if c.norm_before_residual else g, ops.concat([embedded, normed], -1))
        for number in range(1, c.layers):
            name = f"layers.{number}"
            x = self.layer(number, name, x, self.norm(f"{name}.input_layernorm", x))
        x.set_friendly_name("midlayer")
        results = [ops.result(_named(self.linear("lm_head", self.norm("norm", x)), "logits"))]
        if "d2t" in self.weights:
            results.append(ops.result(_named(self.constant("d2t"), "d2t")))
        inputs = [self.tokens_BT, self.states, self.mask, self.positions_BT, self.beams_B]
        model = ov.Model(results, self.sinks, inputs, "eagle3")  # type: ignore[reportGeneralTypeIssues]
        model.set_rt_info(True, ["eagle3_mode"])
        model.set_rt_info([read - 1 for read in self.head.reads], ["hidden_layers_list"])
        model.set_rt_info("f16", ["runtime_options", "KV_CACHE_PRECISION"])  # else keys and values are int8
        return model

    def layer(self, number: int, name: str, x: Node, a: Node) -> Node:
        """One block: residual [B, T, D] and attention input [B, T, E] -> [B, T, D]."""
        y = ops.add(x, self.linear(f"{name}.self_attn.o_proj", self.attention(number, f"{name}.self_attn", a)))
        normed = self.norm(f"{name}.post_attention_layernorm", y)
        gate = ops.swish(self.linear(f"{name}.mlp.gate_proj", normed))
        up = self.linear(f"{name}.mlp.up_proj", normed)
        return ops.add(y, self.linear(f"{name}.mlp.down_proj", ops.multiply(gate, up)))

    def attention(self, number: int, name: str, a: Node) -> Node:
        """[B, T, E] -> [B, T, H * C]; keys and values of all tokens so far are the graph's state."""
        b = self.block
        q = _rotated(self.split(f"{name}.q_proj", a, b.heads), self.angles)
        k = self.extended(number, "key", _rotated(self.split(f"{name}.k_proj", a, b.kv_heads), self.angles))
        v = self.extended(number, "value", self.split(f"{name}.v_proj", a, b.kv_heads))
        attended = ops.scaled_dot_product_attention(q, self.repeated(k), self.repeated(v), self.sees)
        joined = ops.transpose(attended, [0, 2, 1, 3])
        return ops.reshape(joined, [0, 0, b.heads * b.head_dim], special_zero=True)

    def split(self, name: str, a: Node, heads: int) -> Node:
        """A projection by heads: [B, T, E] -> [B, heads, T, C]."""
        rows = ops.reshape(self.linear(name, a), [0, 0, heads, self.block.head_dim], special_zero=True)
        return ops.transpose(rows, [0, 2, 1, 3])

    def extended(self, number: int, part: str, new: Node) -> Node:
        """What is remembered, then `new`: [B, G, P + T, C], remembered in its turn."""
        heads, size = self.block.kv_heads, self.block.head_dim
        name, shape = f"past_key_values.{number}.{part}present.{number}.{part}", ov.PartialShape([-1, heads, -1, size])
        batch = ops.gather(ops.shape_of(self.tokens_BT), [0], 0)
        nothing = ops.broadcast(_number(0.0), ops.concat([batch, [heads], [0], [size]], 0))
        past = ops.gather(ops.read_value(nothing, name, _F32, shape), self.beams_B, 0)
        both = ops.concat([past, new], -2)
        self.sinks.append(ops.assign(both, name))
        return both

    def repeated(self, x: Node) -> Node:
        """[B, G, S, C] -> [B, H, S, C]."""
        b = self.block
        if b.heads == b.kv_heads:
            return x
        times = [1, 1, b.heads // b.kv_heads, 1, 1]
        wide = ops.broadcast(ops.unsqueeze(x, 2), times, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, [0, b.heads, -1, b.head_dim], special_zero=True)

    def embedded(self) -> Node:
        """[B, T, D]. GenAI puts the target's rows in the place of those that a Gather reads, so a head's own are read
        in another way."""
        table = self.constant("embed_tokens.weight")
        if self.head.config.own_embedding:
            return ops.gather_nd(table, ops.unsqueeze(self.tokens_BT, -1))
        return ops.gather(table, self.tokens_BT, 0)

    def linear(self, name: str, x: Node) -> Node:
        y = ops.matmul(x, self.constant(f"{name}.weight"), False, True)
        return ops.add(y, self.constant(f"{name}.bias")) if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Node) -> Node:
        mean = ops.reduce_mean(ops.multiply(x, x), [-1], keep_dims=True)
        scale = ops.sqrt(ops.add(mean, _number(self.block.norm_eps)))
        return ops.multiply(ops.divide(x, scale), self.constant(f"{name}.weight"))

    def constant(self, name: str) -> Node:
        """A weight under its name in eyas' files, read as float32; d2t as it is."""
        tensor = self.weights[name]
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor  # numpy has no bfloat16
        view = ov.Tensor(bits.numpy(), ov.Shape(tensor.shape), _TYPES[tensor.dtype])
        node = ov.op.Constant(view, shared_memory=False)
        node.set_friendly_name(name)
        return node if tensor.dtype in (torch.float32, torch.int64) else ops.convert(node, _F32)


def _number(value: float) -> Node:
    return ops.constant(value, _F32)


def _parameter(name: str, shape: list[int], kind: ov.Type) -> Node:
    return _named(ops.parameter(shape, kind), name)


def _named(node: Node, name: str) -> Node:
    """The node, whose output is called `name`."""
    node.set_friendly_name(name)
    node.output(0).set_names({name})
    return node


def _causal(tokens_BT: Node, mask: Node) -> Node:
    """Which of the P + T tokens each of the T sees: [B, 1, T, P + T]."""
    length, total = (ops.gather(ops.shape_of(x), 1, 0) for x in (tokens_BT, mask))
    rows = ops.unsqueeze(ops.range(ops.subtract(total, length), total, 1, _I64), 1)
    until = ops.less_equal(ops.range(0, total, 1, _I64), rows)
    return ops.logical_and(until, ops.unsqueeze(ops.convert(mask, ov.Type.boolean), [1, 2]))


def _angles(positions_BT: Node, block: BlockConfig) -> Node:
    """Of the rotation: [B, 1, T, C / 2]."""
    half = block.head_dim // 2
    frequencies = block.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    return ops.multiply(ops.unsqueeze(ops.convert(positions_BT, _F32), [1, 3]), ops.constant(frequencies.numpy()))


def _rotated(x: Node, angles: Node) -> Node:
    """[B, heads, T, C], the first half of C paired with the second."""
    first, second = ops.split(x, -1, 2).outputs()
    cos, sin = ops.cos(angles), ops.sin(angles)
    turned = ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin))
    other = ops.add(ops.multiply(second, cos), ops.multiply(first, sin))
    return ops.concat([turned, other], -1)
