"""Attention calls with poison in unused memory: what must not be read holds NaN, or bytes that decode to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops.call import AttentionCall

K_GLOBAL, V_GLOBAL = 0.0117, 0.0083


def run(call: AttentionCall, **changes: Any) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of `torch_fp4kv.attention` for `call` with some fields changed."""
    fields = {name: getattr(replace(call, **changes), name) for name in AttentionCall.__slots__}
    del fields["return_lse"]
    return torch_fp4kv.attention(**fields, return_lse=True)


def equalized(heads: int = 2, head_dim: int = 64, rotation: int = 16) -> dict[str, Any]:
    """All that K can be transformed by: a bias, factors, an order and a rotation."""
    generator = torch.Generator().manual_seed(3)
    return {
        "k_bias": torch.randn(heads, head_dim, generator=generator),
        "k_factors": torch.rand(heads, head_dim, generator=generator) + 0.5,
        "k_order": torch.stack([torch.randperm(head_dim, generator=generator) for _ in range(heads)]).int(),
        "k_rotation": rotation,
    }


def far_apart(x: Tensor, allocate: Callable[[int], Tensor]) -> Tensor:
    """`x` `[B, H, T, D]` with its tokens a little over 2^30 elements apart, in what `allocate` gives for a size."""
    rows, heads, tokens, d = x.shape
    stride = (1 << 30) + 64
    assert rows * heads * d <= stride
    memory = allocate(stride * (tokens - 1) + rows * heads * d)
    return memory.as_strided(x.shape, (heads * d, d, stride, 1)).copy_(x)


NEEDLE_AT, LONG = 77777, 131072


def needle(share: bool, num_queries: int = 1, dtype: torch.dtype = torch.float32) -> tuple[AttentionCall, float]:
    """A call over 131,072 tokens of one head, and each element of what it gives.

    One key outweighs random others by far; with `share` it weighs as much as all others together, that are alike.
    """
    words = torch.randint(-(2**63), 2**63 - 1, (1, 1, LONG, 4), generator=torch.Generator().manual_seed(0))
    k, v = (torch.zeros_like(words), torch.full_like(words, 0x5555555555555555)) if share else (words, words.flip(2))
    k[:, :, NEEDLE_AT] = 0x7777777777777777
    v[:, :, NEEDLE_AT] = 0xDDDDDDDDDDDDDDDD - 2**64 if share else 0x2222222222222222
    scales = torch.full(words.shape, 0x38, dtype=torch.uint8)
    q, one = torch.ones(1, 1, num_queries, 64, dtype=dtype), torch.tensor(1.0)
    lengths = torch.tensor([LONG], dtype=torch.int32)
    # A key of 64 sixes.
    scale = math.log(LONG - 1) / 384 if share else 0.2
    call = AttentionCall(q, k, scales, v, scales, one, one, lengths, causal=False, scale=scale, out_dtype=torch.float32)
    return call, 0.0 if share else 1.0


def strided(call: AttentionCall) -> AttentionCall:
    """`call` with gaps between the elements of queries, new tokens, and what a row or head has a number of."""
    names = "q k_new v_new k_global v_global lengths q_lengths starts block_table exact_from"
    names += " k_bias k_factors k_order v_bias sink_logits"
    given = {name: getattr(call, name) for name in names.split()}
    return replace(call, **{n: x.repeat_interleave(2, -1)[..., ::2] for n, x in given.items() if x is not None})


def with_everything(num_queries: int = 1, head_dim: int = 64, **options: Any) -> AttentionCall:
    """Two rows with all that rows and heads can have numbers of."""
    options = {"lengths": (90, 33), "capacity": 128, "page_size": 32, "ring": 24, "num_sink_tokens": 4, **options}
    call = make(
        num_queries=num_queries,
        head_dim=head_dim,
        q_lengths=(num_queries, 1),
        starts=(7, 3),
        v_bias=torch.linspace(-0.5, 0.5, 2 * head_dim).view(2, head_dim),
        sink_logits=torch.arange(4.0),
        return_lse=True,
        **equalized(2, head_dim),
        **options,
    )
    return replace(call, k_global=torch.tensor([0.01, 0.013]), v_global=torch.tensor([0.02, 0.005]))


def empty_storage(
    pages: int,
    heads: int,
    tokens: int,
    head_dim: int,
    storage_format: str = "nvfp4",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """`(data, scales)` as memory never written may be: all bits set, scales alternately 0xFF and 0x7F."""
    if storage_format == "exact":
        return torch.full((pages, heads, tokens, head_dim), torch.nan, dtype=dtype), None
    if storage_format == "fp8":
        return torch.full((pages, heads, tokens, head_dim), 0xFF, dtype=torch.uint8), None
    scales = torch.full((pages, heads, tokens, head_dim // 16), 0xFF, dtype=torch.uint8)
    scales[:, :, ::2] = 0x7F
    return torch.full(scales.shape, -1, dtype=torch.int64), scales


def make(
    *,
    lengths: Sequence[int] = (37,),
    num_queries: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    capacity: int = 64,
    page_size: int | None = None,
    q_lengths: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    k_format: str = "nvfp4",
    v_format: str = "nvfp4",
    v_scale_layout: str = "linear",
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    k_factors: Tensor | None = None,
    k_order: Tensor | None = None,
    k_rotation: int = 0,
    new: bool = False,
    num_sink_tokens: int = 0,
    ring: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> AttentionCall:
    """A call over random tokens: storage holds those that no exact copy stands in for, all else is poison.

    `page_size` asks for pages of that size behind a shuffled block table; without it each row has one page of
    `capacity`. `ring` recent tokens and `num_sink_tokens` first ones are exact; `new` passes the queries' own tokens.
    """
    torch.manual_seed(seed)
    batch, v_head_dim = len(lengths), v_head_dim or head_dim
    counts = [num_queries] * batch if q_lengths is None else list(q_lengths)
    first = [0] * batch if starts is None else list(starts)
    longest = max(lengths, default=0)
    k = torch.randn(batch, kv_heads, longest, head_dim).to(dtype)
    v = torch.randn(batch, kv_heads, longest, v_head_dim).to(dtype)
    q = torch.randn(batch, heads, num_queries, head_dim).to(dtype)
    table, pages, tokens = None, batch, capacity
    if page_size is not None:
        per_row = -(-capacity // page_size)
        pages, tokens = batch * per_row + 2, page_size
        table = torch.randperm(pages)[: batch * per_row].view(batch, per_row).to(torch.int32)
    k_data, k_scales = empty_storage(pages, kv_heads, tokens, head_dim, k_format, dtype)
    v_data, v_scales = empty_storage(pages, kv_heads, tokens, v_head_dim, v_format, dtype)
    exact = {}
    if ring or num_sink_tokens:
        slots = num_sink_tokens + ring + 1
        exact["k_exact"] = torch.full((batch + 1, kv_heads, slots, head_dim), torch.nan, dtype=dtype)
        exact["v_exact"] = torch.full((batch + 1, kv_heads, slots, v_head_dim), torch.nan, dtype=dtype)
    if new:
        exact["k_new"] = torch.full((batch, kv_heads, num_queries, head_dim), torch.nan, dtype=dtype)
        exact["v_new"] = torch.full((batch, kv_heads, num_queries, v_head_dim), torch.nan, dtype=dtype)
    exact_from = []
    for b, (length, count) in enumerate(zip(lengths, counts)):
        q[b, :, count:] = torch.nan
        end = length - count if new else length
        recent = max(0, end - ring)
        exact_from.append(recent)
        if new:
            exact["k_new"][b, :, :count] = k[b, :, end:length]
            exact["v_new"][b, :, :count] = v[b, :, end:length]
        stored = []
        for p in range(first[b], end):
            if p - first[b] < num_sink_tokens:
                slot = p - first[b]
            elif ring and p >= recent:
                slot = num_sink_tokens + p % ring
            else:
                stored.append(p)
                continue
            exact["k_exact"][b, :, slot], exact["v_exact"][b, :, slot] = k[b, :, p], v[b, :, p]
        if table is None:
            stored = [p for p in stored if p >= end - tokens]
        p = torch.tensor(stored, dtype=torch.int64)
        page = torch.full_like(p, b) if table is None else table[b, p // tokens].long()
        if table is not None:
            unused = sorted(set(range(table.shape[1])) - set((p // tokens).tolist()))
            garbage = torch.tensor([-7, 2**31 - 1, 10**6], dtype=torch.int32)
            table[b, unused] = garbage.repeat(len(unused))[: len(unused)]
        torch_fp4kv.append(
            k_data,
            k_scales,
            v_data,
            v_scales,
            k[b : b + 1, :, p],
            v[b : b + 1, :, p],
            (page * tokens + p % tokens)[None],
            K_GLOBAL,
            V_GLOBAL,
            k_bias=k_bias,
            v_bias=v_bias,
            k_factors=k_factors,
            k_order=k_order,
            k_rotation=k_rotation,
            k_format=k_format,
            v_format=v_format,
            v_scale_layout=v_scale_layout,
        )
    rows = {"q_lengths": q_lengths, "starts": starts, "exact_from": exact_from if ring else None}
    return AttentionCall(
        q,
        k_data,
        k_scales,
        v_data,
        v_scales,
        torch.tensor(K_GLOBAL),
        torch.tensor(V_GLOBAL),
        torch.tensor(lengths, dtype=torch.int32),
        **{name: torch.tensor(row, dtype=torch.int32) for name, row in rows.items() if row is not None},
        block_table=table,
        **exact,
        num_sink_tokens=num_sink_tokens,
        k_bias=k_bias,
        k_factors=k_factors,
        k_order=k_order,
        k_rotation=k_rotation,
        v_bias=v_bias,
        k_format=k_format,
        v_format=v_format,
        v_scale_layout=v_scale_layout,
        **options,
    )
