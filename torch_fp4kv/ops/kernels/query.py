"""What stored keys meet (`format/transform.py`), in one launch, for kernels that do not make it of their own queries.

A program holds N blocks of 16 elements, one a thread: ROWS queries, each of S blocks of which D/16 are there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import AttentionCall
from . import nvfp4
from .nvfp4 import FAST

N = 128


@triton.jit
def query_kernel(
    q,
    q_0,
    q_1,
    q_2,
    q_3,
    k_bias,
    k_factors,
    k_order,
    stored,
    stored_bias,
    heads,
    group,
    queries,
    num_rows,
    D: tl.constexpr,
    S: tl.constexpr,
    ROTATION: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
):
    block = tl.arange(0, ROWS * S)
    row = tl.program_id(0).to(tl.int64) * ROWS + block // S
    b = row // (heads * queries)
    head = row // queries % heads
    i = row % queries
    element = (block % S * 16)[:, None] + tl.arange(0, 8)[None, :]
    mask = ((row < num_rows) & (block % S < D // 16))[:, None]
    of_head = (head // group * D)[:, None]
    lo_channel = element
    hi_channel = element + 8
    if k_order is not None:
        lo_channel = tl.load(k_order + of_head + element, mask=mask, other=0)
        hi_channel = tl.load(k_order + of_head + element + 8, mask=mask, other=0)
    source = (q + b * q_0 + head * q_1 + i * q_2)[:, None]
    lo = tl.load(source + lo_channel.to(tl.int64) * q_3, mask=mask, other=0.0).to(tl.float32)
    hi = tl.load(source + hi_channel.to(tl.int64) * q_3, mask=mask, other=0.0).to(tl.float32)
    if stored_bias is not None:
        lo_bias = tl.load(k_bias + of_head + lo_channel, mask=mask, other=0.0)
        hi_bias = tl.load(k_bias + of_head + hi_channel, mask=mask, other=0.0)
        products = tl.reshape(tl.sum(lo * lo_bias + hi * hi_bias, axis=1), [ROWS, S])
        own_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(stored_bias + own_row, tl.sum(products, axis=1), mask=own_row < num_rows)
    if stored is not None:
        if k_factors is not None:
            lo /= tl.load(k_factors + of_head + lo_channel, mask=mask, other=1.0)
            hi /= tl.load(k_factors + of_head + hi_channel, mask=mask, other=1.0)
        if ROTATION > 0:
            lo, hi = nvfp4.rotate(lo, hi, ROTATION, ROTATION**-0.5)
        target = stored + row[:, None] * D + element
        tl.store(target, nvfp4.round_to(lo, stored.dtype.element_ty, FAST), mask=mask)
        tl.store(target + 8, nvfp4.round_to(hi, stored.dtype.element_ty, FAST), mask=mask)


def stored_query(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """`(q_stored, stored_bias)`: `[B, Hq, L, D]` in `dtype`, None where stored keys meet q itself, and float32
    `[B, Hq, L]`, None where nothing is added to their scores; both contiguous."""
    q, transform = call.q, call.transform
    stored = torch.empty(q.shape, dtype=dtype, device=q.device) if transform.moves_queries else None
    stored_bias = None if call.k_bias is None else call.empty_lse()
    if (stored is None and stored_bias is None) or q.numel() == 0:
        return stored, stored_bias
    batch, heads, queries, d = q.shape
    blocks = triton.next_power_of_2(d // 16)
    rows, num_rows = max(1, N // blocks), batch * heads * queries
    with nvfp4.on_device(q):
        query_kernel[(triton.cdiv(num_rows, rows),)](
            q,
            *q.stride(),
            nvfp4.contiguous(call.k_bias),
            nvfp4.contiguous(call.k_factors),
            nvfp4.contiguous(call.k_order),
            stored,
            stored_bias,
            heads,
            call.group,
            queries,
            num_rows,
            D=d,
            S=blocks,
            ROTATION=call.k_rotation,
            ROWS=rows,
            FAST=FAST,
            enable_fp_fusion=False,
        )
    return stored, stored_bias
