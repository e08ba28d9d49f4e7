"""Models, prompts and the clock that the benches share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..evaluation.scoring import cache_argument, model_source

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
"""Configs of well-known models; their weights are random and are made on the device."""


def batches_of(batches: list[int], tokens: list[int], name: str) -> list[tuple[int, int]]:
    """The pairs of `--batch` and the option `name`; ValueError where these are none."""
    if len(batches) != len(tokens):
        raise ValueError(f"--batch has {len(batches)} numbers, {name} has {len(tokens)}: give one for each run")
    if min(*batches, *tokens) < 1:
        raise ValueError(f"--batch and {name} must be positive")
    return list(zip(batches, tokens, strict=True))


def check_source(args: argparse.Namespace) -> None:
    """Raises ValueError where `load_model` has nothing at `args.model`, or can do nothing with `args.layers`."""
    if args.model:
        model_source(args.model)
    if args.layers is not None and args.model:
        raise ValueError("--layers is for --shape: a model has the layers of its weights")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"--layers must be 1 or more, got {args.layers}")


class Clock:
    """A streamer that notes when the prompt and each token reached the host, and calls `advance(1)` for each."""

    def __init__(self, advance: Callable[[int], Any] = lambda count: None) -> None:
        self.times: list[float] = []
        self._advance = advance

    def put(self, value: Tensor) -> None:
        value.cpu()
        self.times.append(time.perf_counter())
        self._advance(1)

    def end(self) -> None:
        pass


def load_model(args: argparse.Namespace, device: torch.device, tokens: int) -> Any:
    """The model `args.model`, a directory or a GGUF file, or one of `args.shape` for `tokens` tokens with random
    weights; float32 on the CPU, bfloat16 on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.model:
        folder, source = model_source(args.model)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **source).to(device).eval()
    settings = dict(SHAPES[args.shape])
    if args.layers is not None:
        settings["num_hidden_layers"] = args.layers
    config = AutoConfig.for_model(settings.pop("model_type"), max_position_embeddings=tokens, **settings)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompt_ids(model: Any, batch: int, prompt: int) -> Tensor:
    """`[batch, prompt]` tokens, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (batch, prompt), generator=generator).to(model.device)


def generate_greedily(model: Any, ids: Tensor, cache: Any, new_tokens: int, streamer: Any, **options: Any) -> Any:
    """`new_tokens` tokens of `model.generate` after prompt `ids` `[B, L]`, no fewer; `streamer` may be None."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
        **{cache_argument(model.forward): cache},
        **options,
    )
