"""An EAGLE-3 head as a GGUF file, in the layout that llama.cpp's loader of the architecture "eagle3" reads, and back.

The file holds the target's vocabulary too (the loader asks for one): it is copied from the target's own GGUF file. The
rows of q and k are in llama.cpp's order, which turns neighbours where transformers turns halves. Knows no other layout.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from eyas.drafters.eagle3 import Eagle3
from eyas.errors import InputError, one_line
from eyas.files import whole
from eyas.formats import head_tensors
from eyas.targets.base import TargetSpec

ARCHITECTURE = "eagle3"
NAMES = {  # ours, of a head of one layer, and the file's
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "embed_tokens": "token_embd",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}
_QUANTIZATION = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


def write(path: Path, head: Eagle3, spec: TargetSpec, vocabulary: Path, dtype: torch.dtype) -> None:
    """Write `head` to `path` for the target whose GGUF file is `vocabulary`; norms are float32 whatever the dtype.

    Raises:
        InputError: the target's file cannot be read, or holds another number of tokens.
    """
    with whole(path) as temporary:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        _write_vocabulary(writer, vocabulary, head.config.vocab_size)
        _write_keys(writer, head, spec)
        _write_tensors(writer, head, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _write_tensors(writer: gguf.GGUFWriter, head: Eagle3, dtype: torch.dtype) -> None:
    block = head.config.block
    for name, tensor in head_tensors(head, torch.float32).items():
        if name == "d2t":
            writer.add_tensor("d2t", (tensor + torch.arange(len(tensor))).numpy())  # tokens here, not distances
        elif name != "t2d":
            stem = name.removesuffix(".weight")
            if stem.endswith(("q_proj", "k_proj")):
                tensor = interleaved(tensor, block.heads if stem.endswith("q_proj") else block.kv_heads)
            kind = _QUANTIZATION[dtype if tensor.dim() > 1 else torch.float32]
            writer.add_tensor(f"{NAMES[stem]}.weight", gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)


def _write_keys(writer: gguf.GGUFWriter, head: Eagle3, spec: TargetSpec) -> None:
    c, block = head.config, head.config.block
    writer.add_name(f"EAGLE-3 head for {Path(spec.name).name}")
    writer.add_block_count(1)
    writer.add_context_length(spec.max_length)
    writer.add_embedding_length(block.width)
    writer.add_feed_forward_length(block.ffn_width)
    writer.add_head_count(block.heads)
    writer.add_head_count_kv(block.kv_heads)
    writer.add_key_length(block.head_dim)
    writer.add_value_length(block.head_dim)
    writer.add_rope_dimension_count(block.head_dim)
    writer.add_rope_freq_base(block.rope_theta)
    writer.add_layer_norm_rms_eps(block.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    for key in ("target_layers", "extract_layers"):  # the second is what the loader's first releases read
        writer.add_array(f"{ARCHITECTURE}.{key}", list(head.reads))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", c.target_width)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", c.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", c.norm_before_fc)


def _write_vocabulary(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    try:
        fields = gguf.GGUFReader(source).fields
        tokens = len(fields["tokenizer.ggml.tokens"].data)
    except Exception as error:  # readers of broken files raise whatever they stumble over
        raise InputError(f"cannot read the vocabulary of {str(source)!r}: {one_line(error)}") from error
    if tokens != vocab_size:
        raise InputError(f"the head was made for a vocabulary of {vocab_size} tokens, and {str(source)!r} has {tokens}")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)


def read(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Metadata, the vocabulary left out, and tensors by our names, q and k in our order, `d2t` as distances.

    Raises:
        InputError: not a GGUF file of this architecture.
    """
    try:
        reader = gguf.GGUFReader(path)
        found = {key: f.contents() for key, f in reader.fields.items() if not key.startswith(("tokenizer.", "GGUF."))}
        ours = {f"{theirs}.weight": f"{name}.weight" for name, theirs in NAMES.items()}
        tensors = {ours.get(t.name, t.name): _tensor(t) for t in reader.tensors}
        if found["general.architecture"] != ARCHITECTURE:
            raise ValueError(f"its architecture is {found['general.architecture']!r}, not {ARCHITECTURE!r}")
        for part, count in (("q", "head_count"), ("k", "head_count_kv")):
            name = f"midlayer.self_attn.{part}_proj.weight"
            tensors[name] = interleaved(tensors[name], int(found[f"{ARCHITECTURE}.attention.{count}"]), undo=True)
        if "d2t" in tensors:
            tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    except Exception as error:  # readers of broken files raise whatever they stumble over
        raise InputError(f"cannot read the head {str(path)!r}: {one_line(error)}") from error
    return found, tensors


def _tensor(tensor: gguf.ReaderTensor) -> Tensor:
    if tensor.tensor_type == gguf.GGMLQuantizationType.I64:
        return torch.from_numpy(np.array(tensor.data))
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


def interleaved(rows: Tensor, heads: int, undo: bool = False) -> Tensor:
    """Rows of q or k, [heads * C, E], the second half of each head's C rows between those of the first; or back."""
    halves = (-1, 2) if undo else (2, -1)
    return rows.unflatten(0, (heads, *halves)).transpose(1, 2).flatten(0, 2).contiguous()
