"""`warmup`: what a serving process compiles and captures, before its first request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .evaluation.scoring import cache_argument

NUM_NEW = 6
"""The prompt gives a token, then steps that compile, run once more before capture, are captured, and are replayed."""


@dataclass(frozen=True)
class Warmup:
    """What `warmup` did.

    Attributes:
        seconds: all of it.
        graphs_compiled: graphs that Inductor compiled anew; 0 where decoding is not compiled, or all were known.
        graphs_from_cache: graphs that came from Inductor's cache on disk.
    """

    seconds: float
    graphs_compiled: int
    graphs_from_cache: int


def warmup(
    model: Any,
    cache: Any,
    *,
    batch_size: int = 1,
    prompt_tokens: Sequence[int] = (64,),
    left_padding: bool = False,
    **options: Any,
) -> Warmup:
    """Generates a few tokens with `cache`, so that no request waits for compilers, kernels or CUDA graphs.

    One graph serves a batch size, so call it once for each that will come, the largest first: then the cache's buffers,
    whose addresses captured graphs hold, are made once. The cache is reset afterwards and keeps buffers and graphs.

    Args:
        model: a Hugging Face decoder.
        cache: an empty `NVFP4Cache` with `max_cache_len`, the one that will serve. Mutated: allocated, and reset.
        batch_size: rows of the requests.
        prompt_tokens: prompt lengths to run. Kernels of prefill may depend on them. Compiled decoding does so in one
            case: a prompt of fewer than 8 tokens gives no bias, and under a recipe that takes one from the prompt its
            decoding is a graph of its own. Name such a length too if they come.
        left_padding: run each prompt once more with padding, whose decoding is a graph of its own.
        **options: for `model.generate`, such as `compile_config=`; those that requests will use. `max_new_tokens` and
            `eos_token_id` are set here.

    Returns:
        How long it took, and where the graphs came from.

    Raises:
        ValueError: there is nothing to run, or the cache grows, is a pool, holds tokens, or is too small for a prompt;
            nothing was run.
    """
    if batch_size < 1 or not prompt_tokens or min(prompt_tokens) < 1:
        raise ValueError(
            "warmup needs one row or more and prompts of one token or more, "
            f"got batch_size={batch_size} and prompt_tokens={tuple(prompt_tokens)}"
        )
    capacity = getattr(cache.layers[0], "max_cache_len", None) if getattr(cache, "layers", None) else None
    if capacity is None:
        raise ValueError(
            f"warmup takes an NVFP4Cache made with max_cache_len, got {type(cache).__name__}: one that grows is not "
            "compiled, and a pool is warmed by steps of its own"
        )
    if int(cache.get_seq_length()):
        raise ValueError(f"the cache holds {int(cache.get_seq_length())} tokens, which warmup would lose: reset() it")
    if max(prompt_tokens) + NUM_NEW > capacity:
        raise ValueError(f"a prompt of {max(prompt_tokens)} and {NUM_NEW} tokens do not fit max_cache_len={capacity}")
    start, before = time.perf_counter(), graph_counts()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for length in prompt_tokens:
        # Unlike tokens, so that scales and bias are ordinary; seeded apart from the caller's generator.
        ids = torch.randint(vocabulary, (batch_size, length), generator=torch.Generator().manual_seed(0))
        ids = ids.to(model.device)
        settings = {"do_sample": False, "pad_token_id": 0, **options, "max_new_tokens": NUM_NEW, "eos_token_id": None}
        settings[cache_argument(model.forward)] = cache
        for padding in range(1 + left_padding):
            mask = torch.ones_like(ids)
            mask[0, :padding] = 0
            try:
                if padding:
                    cache.set_padding(mask)
                model.generate(ids, attention_mask=mask, **settings)
            finally:
                cache.reset()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    compiled, loaded = (after - count for after, count in zip(graph_counts(), before))
    return Warmup(time.perf_counter() - start, compiled, loaded)


def graph_counts() -> tuple[int, int]:
    """Graphs that this process compiled anew, and those that came from Inductor's cache."""
    from torch._dynamo.utils import counters

    loaded = max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
    return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"], loaded
