"""Tiny random models and the generation settings that tests share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

VOCABULARY = 64


SETTINGS = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}


def llama(seed: int = 0, **config: Any) -> PreTrainedModel:
    """A two-layer Llama with 4 query and 2 KV heads of size 64."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SETTINGS, **config})).eval()


def mistral(sliding_window: int, **config: Any) -> PreTrainedModel:
    """The same with a sliding window."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**{**SETTINGS, **config}, sliding_window=sliding_window)).eval()


def prompt(batch: int = 2, tokens: int = 30, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(tokens: int) -> dict[str, Any]:
    """`generate` arguments for exactly `tokens` greedy tokens."""
    return {
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def compile_everywhere(**options) -> CompileConfig:
    """What `generate` compiles decoding with, made to apply on the CPU too."""
    config = CompileConfig(fullgraph=True, **{"mode": "default", **options})
    config._compile_all_devices = True
    return config
