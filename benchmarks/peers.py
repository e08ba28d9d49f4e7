"""Split-KV decode attention over BF16 and FP8 in plain Triton: the peers that the decode benchmark tunes and times.

Letters: B batch, H KV heads, G query heads a KV head, D head size, N tokens a tile. FP8 is e4m3 without scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

CONFIGURATIONS = [(32, 4, 3), (64, 4, 3), (128, 4, 3), (128, 8, 3), (64, 4, 2)]
"""`(N, warps, stages)`."""
PROGRAMS_PER_SM = (1, 2, 3, 4)


@triton.jit
def peer_kernel(
    q,
    k,
    v,
    parts,
    sums,
    tokens,
    scale,
    split_tokens,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One split of one row and KV head; K and V `[B · H, tokens, D]`, bf16, or e4m3 that is widened to f16."""
    row, split, num_splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    m, d, n = tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    query = tl.load(q + (row * G + m)[:, None] * D + d, mask=(m < G)[:, None], other=0.0)
    NARROW: tl.constexpr = k.dtype.element_ty == tl.float8e4nv
    if NARROW:
        query = query.to(tl.float16)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tokens)
    acc = tl.zeros([M, D], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    k += row * tokens * D
    v += row * tokens * D
    offset = n[:, None] * D + d
    for i in range(start, end, N):
        keys, values = tl.load(k + i * D + offset), tl.load(v + i * D + offset)
        if NARROW:
            keys, values = keys.to(tl.float16), values.to(tl.float16)
        s = tl.dot(query, keys.T) * (scale * 1.4426950408889634)
        s = tl.where((i + n)[None, :] < end, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p, keep = tl.exp2(s - new_top[:, None]), tl.exp2(top - new_top)
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None])
        top = new_top
    at = (row * num_splits + split) * G + m
    tl.store(parts + at[:, None] * D + d, acc / total[:, None], mask=(m < G)[:, None])
    tl.store(sums + at, top + tl.log2(total), mask=m < G)


@triton.jit
def peer_merge_kernel(parts, sums, out, num_splits, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr):
    """Merges the splits of one query head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, S), tl.arange(0, D)
    at = (row * num_splits + s) * G + head
    weight = tl.load(sums + at, mask=s < num_splits, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    weight /= tl.sum(weight, 0)
    part = tl.load(parts + at[:, None] * D + d, mask=(s < num_splits)[:, None], other=0.0)
    tl.store(out + (row * G + head) * D + d, tl.sum(part * weight[:, None], 0).to(out.dtype.element_ty))


def calls(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Callable[[], Tensor]]:
    """The whole op, merge included, in each configuration; q `[B, H · G, 1, D]`, k and v `[B, H, tokens, D]`."""
    batch, heads, tokens, d = k.shape
    group = q.shape[1] // heads
    rows = batch * heads
    out = torch.empty_like(q)
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    seen = set()
    for n, warps, stages in CONFIGURATIONS:
        for programs in PROGRAMS_PER_SM:
            splits = max(1, min(round(multiprocessors * programs / rows), tokens // (2 * n)))
            split_tokens = triton.cdiv(triton.cdiv(tokens, splits), n) * n
            splits = triton.cdiv(tokens, split_tokens)
            if (n, warps, stages, splits) in seen:
                continue
            seen.add((n, warps, stages, splits))
            parts = torch.empty(rows, splits, group, d, device=q.device)
            sums = torch.empty(rows, splits, group, device=q.device)

            def call(
                n: int = n,
                warps: int = warps,
                stages: int = stages,
                splits: int = splits,
                split_tokens: int = split_tokens,
                parts: Tensor = parts,
                sums: Tensor = sums,
            ) -> Tensor:
                m = max(16, triton.next_power_of_2(group))
                peer_kernel[(rows, splits)](
                    q,
                    k,
                    v,
                    parts,
                    sums,
                    tokens,
                    d**-0.5,
                    split_tokens,
                    group,
                    d,
                    m,
                    n,
                    num_warps=warps,
                    num_stages=stages,
                )
                peer_merge_kernel[(rows, group)](
                    parts, sums, out, splits, group, d, max(2, triton.next_power_of_2(splits)), num_warps=4
                )
                return out

            yield call
