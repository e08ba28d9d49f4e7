"""One decode step of a layer, append and attention in one captured graph, beside BF16's append and best SDPA.

    python benchmarks/step.py [results.csv]

Positions are advanced once a step for all layers, so that neither side's time holds it. The L2 cache is flushed before
each replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from attention import KV_HEADS, replayed, sdpa
from timing import Table
from torch.nn.attention import SDPBackend

from torch_fp4kv import NVFP4KVCache

GROUP, DIM = 4, 128
CASES = [(1, 1024), (1, 2048), (1, 4096), (4, 1024), (1, 16384), (16, 16384)]
RECIPES = ("nvfp4-plain", "nvfp4", "k8v4", "fp8")


def bf16_step(backend: SDPBackend, fold: bool, batch: int, tokens: int) -> Callable[[], object]:
    k_cache, v_cache = (torch.zeros(batch, KV_HEADS, tokens, DIM, device="cuda").bfloat16() for _ in range(2))
    q, k, v = projections(batch)
    position = torch.tensor([tokens - 1], device="cuda")
    attend = sdpa(backend, q, k_cache, v_cache, fold)

    def call() -> object:
        k_cache.index_copy_(2, position, k)
        v_cache.index_copy_(2, position, v)
        return attend()

    return call


def our_step(recipe: str, batch: int, tokens: int) -> Callable[[], object]:
    cache = NVFP4KVCache(batch, tokens, KV_HEADS, DIM, torch.bfloat16, device="cuda", recipe=recipe)
    cache.storage.empty = False
    cache.positions.advance(tokens)
    q, k, v = projections(batch)
    return lambda: cache.storage.write(k, v, cache.positions).attend(q)


def projections(batch: int) -> tuple[torch.Tensor, ...]:
    """q, k and v `[batch, heads, 1, DIM]` of one token."""
    torch.manual_seed(0)
    return tuple(
        torch.randn(batch, heads, 1, DIM, device="cuda").bfloat16() for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    )


def main() -> None:
    table = Table("step")
    for batch, tokens in CASES:
        case = f"B {batch} × {tokens}"
        peers = {
            "BF16, SDPA flash": bf16_step(SDPBackend.FLASH_ATTENTION, True, batch, tokens),
            "BF16, SDPA cuDNN": bf16_step(SDPBackend.CUDNN_ATTENTION, False, batch, tokens),
        }
        best = float("inf")
        for name, call in peers.items():
            times = replayed(call)
            best = min(best, times[0])
            table.add(case, name, times)
        for recipe in RECIPES:
            times = replayed(our_step(recipe, batch, tokens))
            table.add(case, recipe, times, over_bf16=best / times[0])
        table.write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    with torch.no_grad():
        main()
