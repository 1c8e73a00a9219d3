"""Tiny random models made in memory: nothing here is trained, and nothing needs a network."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.targets.eager import EagerTarget

VOCAB = 61


def tiny_target(dtype: torch.dtype = torch.float64, seed: int = 0, layers: int = 4, width: int = 32) -> EagerTarget:
    """A Llama with grouped heads and head_dim != width / heads, its logits spread enough to decide."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    return EagerTarget(LlamaForCausalLM(config).to(dtype), "tiny")
