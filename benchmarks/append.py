"""Append of K and V to an NVFP4 cache: bytes against the reference first, then time beside its peers in one run.

    python benchmarks/append.py [results.csv]

Bytes are those of the new K and V read once and of the words, or of BF16, written once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from timing import Table, captured, copy_bandwidth, quantiles
from torch import Tensor

from torch_fp4kv.ops.format import blocks
from torch_fp4kv.ops.kernels.append import append

HEADS, HEAD_DIM = 8, 128


def new_tokens(batch: int, tokens: int) -> Tensor:
    """bf16 `[B, H, L, D]`, a view of a projection's output `[B, L, H, D]`."""
    return torch.randn(batch, tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def cases(batch: int, tokens: int, capacity: int, rule: str):
    """`(ours, BF16 peer)`, after a check of our bytes."""
    k, v = new_tokens(batch, tokens), new_tokens(batch, tokens)
    storage = []
    for _ in range(2):
        words = torch.full((batch, HEADS, capacity, HEAD_DIM // 16), -1, dtype=torch.int64, device="cuda")
        storage += [words, torch.full(words.shape, 0xFF, dtype=torch.uint8, device="cuda")]
    first = capacity // 2 - tokens // 2
    position = torch.arange(first, first + tokens, device="cuda")
    slots = position + capacity * torch.arange(batch, device="cuda")[:, None]
    g = torch.tensor(0.01, device="cuda")

    def ours() -> None:
        append(*storage, k, v, slots, g, g, scale_rule=rule)

    ours()
    if rule == "amax":
        for x, words, scales in ((k, *storage[:2]), (v, *storage[2:])):
            expected_words, expected_scales = blocks.encode(x, g)
            assert torch.equal(words[:, :, position], expected_words), "words differ from the reference"
            assert torch.equal(scales[:, :, position], expected_scales), "scales differ from the reference"
    caches = [torch.empty(batch, HEADS, capacity, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def bf16() -> None:
        caches[0].index_copy_(2, position, k)
        caches[1].index_copy_(2, position, v)

    return ours, bf16


def main() -> None:
    table = Table("append")
    copy = copy_bandwidth()
    print(f"copy {copy / 1e12:.3f} TB/s")
    for batch, tokens, capacity in ((1, 32768, 34816), (4, 2048, 8192), (64, 1, 8192), (1, 1, 8192)):
        for rule in ("amax", "4over6", "mse"):
            ours, bf16 = cases(batch, tokens, capacity, rule)
            read = 2 * batch * tokens * HEADS * HEAD_DIM * 2
            case = f"B {batch} x {tokens}"
            timer = quantiles if tokens > 1 else captured
            for name, call, num_bytes in (
                (f"NVFP4 {rule}", ours, read + 2 * batch * tokens * HEADS * HEAD_DIM // 16 * 9),
                ("BF16 index_copy_", bf16, 2 * read),
            ):
                if name.startswith("BF16") and rule != "amax":
                    continue
                times = timer(call)
                speed = num_bytes / (times[0] * 1e-3)
                table.add(
                    case,
                    name,
                    times,
                    bytes=num_bytes,
                    tb_per_s=speed / 1e12,
                    share_of_copy=speed / copy,
                    copy_tb_per_s=copy / 1e12,
                )
    table.write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
