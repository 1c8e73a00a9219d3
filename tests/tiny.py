"""Tiny random models made in memory: nothing here is trained, and nothing needs a network."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eyas import native
from eyas.drafters.eagle3 import Eagle3
from eyas.initial import new_head
from eyas.targets.eager import EagerTarget

VOCAB = 61
needs_core = pytest.mark.skipif(native.cpu_features() is None, reason="this install has no compiled core")


FAMILY_SETTINGS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 12},
}


def tiny_target(
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    layers: int = 4,
    width: int = 32,
    vocab: int = VOCAB,
    family: str = "llama",
    head_dim: int = 12,
) -> EagerTarget:
    """A model with grouped heads and head_dim != width / heads, its logits spread enough to decide; windows are
    shorter than the texts of the tests."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        **FAMILY_SETTINGS[family],
    )
    return EagerTarget(AutoModelForCausalLM.from_config(config).to(dtype), "tiny")


# EAGLE-3 heads beyond the plain one, as settings of `new_head`.
HEADS: dict[str, dict[str, int | bool]] = {
    "2 layers": {"layers": 2},
    "3 layers": {"layers": 3},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "all": {"layers": 2, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


def shaken_head(target: EagerTarget, vocabulary: list[int] | None = None, **settings: int | bool) -> Eagle3:
    """An EAGLE-3 head of random weights: where training starts from, later layers and norms do next to nothing."""
    head = new_head("eagle3", target, None if vocabulary is None else torch.tensor(vocabulary), **settings)
    assert isinstance(head, Eagle3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return head.eval().requires_grad_(False)


def tiny_tokenizer(letters: int = 256) -> PreTrainedTokenizerFast:
    """One token a byte (the first ones are ! to ~), four special ones, and a chat template: random answers are full of
    broken characters."""
    special = ["<pad>", "<s>", "</s>", "<turn>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:letters]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
    )
    return fast
