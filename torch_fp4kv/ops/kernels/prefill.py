"""Attention of many queries (prefill, chunked prefill) over a quantised history and the exact new keys.

Every tile of 128 query rows would dequantise the whole history again, so the history is decoded once, into a 16-bit
workspace of bounded size, and the attention kernel reads that: `e2m1 · e4m3` has at most 6 significant bits, so that
bf16 and f16 hold it exactly, and the global scales are applied to scores and to the output. The workspace is filled
slab by slab; slabs, and parallel splits of few queries, are merged by log-sum-exp.

Shapes: B batch, Hq query heads, H KV heads, G = Hq / H, L queries a row, D and Dv head sizes, S = D/16, P pages, T
tokens a page, E exact slots, M query rows and N keys of a tile. Row r of a KV head is query `r // G` of its head
`r % G`. Stored tokens are counted from the first one that a row of the batch may see ("index", not position).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import AttentionCall
from . import nvfp4
from .nvfp4 import FAST, INTERPRETED
from .query import stored_query

WORKSPACE_BYTES = 256 << 20
SPLIT_TOKENS = 4096
"""Tokens of a parallel split."""
MAX_ROWS_HEADS = 65_535
"""Rows times KV heads of a launch: programs that CUDA takes along the second axis of a grid."""
FEW_ROWS = 1024
"""Up to this many query rows a KV head (L · G), the history is split to fill the GPU."""
STAGE_BLOCKS = 256
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _row_bounds(
    b,
    rows,
    length_limit,
    num_queries,
    window,
    NUM_SINKS: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    RING: tl.constexpr,
):
    """Positions that bound what row b sees, int32; `rows`: lengths, q_lengths, starts and exact_from.

    Returns `(first_query, num_new, start, first_new, stored, stored_end, ring)`: stored tokens are
    `stored … stored_end - 1`, exact ones in the ring `ring … first_new - 1`. `length_limit` is the size of a ring of
    storage, or 0 with a block table.
    """
    lengths, q_lengths, starts, exact_from = rows
    length = tl.load(lengths + b)
    num_new = num_queries
    if q_lengths is not None:
        num_new = tl.load(q_lengths + b)
    start = 0
    if starts is not None:
        start = tl.load(starts + b)
    first_query = length - num_new
    first_new = first_query if HAS_NEW else length
    sink_end = start + NUM_SINKS
    ring = first_new
    stored_end = first_new
    if HAS_EXACT and exact_from is not None:
        stored_end = tl.minimum(stored_end, tl.load(exact_from + b))
        ring = tl.maximum(tl.maximum(stored_end, sink_end), first_new - RING)
    stored = tl.maximum(sink_end, 0)
    if length_limit > 0:
        stored = tl.maximum(stored, first_new - length_limit)
    if window > 0:
        stored = tl.maximum(stored, first_query - window + 1)
    return first_query, num_new, start, first_new, stored, tl.maximum(stored_end, stored), ring


@triton.jit
def _stage(
    data,
    scales,
    workspace,
    block_table,
    block_table_stride,
    page_size,
    b,
    head,
    first,
    end,
    slab,
    slab_tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    FOUR_TOKEN: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """Decodes stored tokens without their global scale into `workspace` `[b, H, slab_tokens, D]`."""
    S: tl.constexpr = D // 16
    TOKENS: tl.constexpr = N // S
    block = tl.arange(0, N)
    index = tl.program_id(0) * TOKENS + block // S
    position = first + slab + index
    valid = (block < TOKENS * S) & (index < slab_tokens) & (position < end)
    if block_table is not None:
        page = tl.load(block_table + b * block_table_stride + position // page_size, mask=valid, other=0).to(tl.int64)
    else:
        page = b
    s = block % S
    offset = position % page_size
    row = (page * HEADS + head) * page_size + offset
    element = tl.arange(0, 8)[None, :]
    if FORMAT == "nvfp4" or FORMAT == "block-fp4":
        word = tl.load(data + row * S + s, mask=valid, other=0)
        if FOUR_TOKEN:
            QUARTER: tl.constexpr = D // 64
            row += offset // 4 * 4 + s // QUARTER - offset
            s_stored = s % QUARTER * 4 + offset % 4
        else:
            s_stored = s
        bits = tl.load(scales + row * S + s_stored, mask=valid, other=0).to(tl.int32)
        scale = nvfp4.e4m3_decode(bits) if FORMAT == "nvfp4" else nvfp4.power_of_two(bits)
        lo = nvfp4.decode_half(word.to(tl.int32)) * scale[:, None]
        hi = nvfp4.decode_half((word >> 32).to(tl.int32)) * scale[:, None]
    else:
        source = (data + row * D + s * 16)[:, None] + element
        lo = tl.load(source, mask=valid[:, None], other=0)
        hi = tl.load(source + 8, mask=valid[:, None], other=0)
        if FORMAT == "fp8":
            lo = nvfp4.e4m3_decode_signed(lo.to(tl.int32))
            hi = nvfp4.e4m3_decode_signed(hi.to(tl.int32))
    target = workspace + ((b * HEADS + head) * slab_tokens + index) * D + s * 16
    target = target[:, None] + element
    if FORMAT != "exact":
        lo = nvfp4.round_to(lo, workspace.dtype.element_ty, FAST)
        hi = nvfp4.round_to(hi, workspace.dtype.element_ty, FAST)
    tl.store(target, lo, mask=valid[:, None])
    tl.store(target + 8, hi, mask=valid[:, None])


@triton.jit
def stage_kernel(
    k_data,
    k_scales,
    k_workspace,
    v_data,
    v_scales,
    v_workspace,
    block_table,
    block_table_stride,
    rows,
    num_queries,
    page_size,
    length_limit,
    window,
    slab,
    slab_tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_FOUR_TOKEN: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    RING: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """One tile of tokens of one head, K (`program_id(2) == 0`) or V."""
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    bounds = _row_bounds(b, rows, length_limit, num_queries, window, NUM_SINKS, HAS_NEW, HAS_EXACT, RING)
    first, end = bounds[4], bounds[5]
    place = (block_table, block_table_stride, page_size, b, head, first, end, slab, slab_tokens)
    if tl.program_id(2) == 0:
        if first + slab + tl.program_id(0) * (N // (D // 16)) < end:
            _stage(k_data, k_scales, k_workspace, *place, HEADS, D, K_FORMAT, False, N, FAST)
    else:
        if first + slab + tl.program_id(0) * (N // (DV // 16)) < end:
            _stage(v_data, v_scales, v_workspace, *place, HEADS, DV, V_FORMAT, V_FOUR_TOKEN, N, FAST)


@triton.jit
def _fold(q, k, v, top, total, acc, factor, shift, softcap, visible, MASKED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Folds keys `k` `[D, N]` and values `v` `[N, Dv]` into the running softmax, kept in base 2.

    A score is `q·k * factor + shift` (shift `[M]`), soft-capped if SOFTCAP, times log2(e) already.
    """
    scores = tl.dot(q, k)
    if SOFTCAP:
        capped = (scores * factor + shift[:, None]) * (2.0 / softcap)
        scores = (1.0 - 2.0 / (tl.exp2(capped) + 1.0)) * (softcap * LOG2E)
        factor = 1.0
        shift = shift * 0.0
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor + shift)
    base = new_top
    if MASKED:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - (base - shift)[:, None])
    keep = tl.exp2(top - base)
    total = total * keep + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None])
    return new_top, total, acc


@triton.jit
def _visible(query, position, valid, window, CAUSAL: tl.constexpr):
    """bool `[M, N]`: which of the keys at `position` (where `valid`) each `query` position may look at."""
    visible = tl.broadcast_to(valid[None, :], [query.shape[0], position.shape[0]])
    if CAUSAL:
        visible = visible & (position[None, :] <= query[:, None])
    if window > 0:
        visible = visible & (position[None, :] > query[:, None] - window)
    return visible


@triton.jit
def prefill_kernel(
    q,
    q_strides,
    q_stored,
    q_stored_strides,
    stored_bias,
    stored_bias_strides,
    k_workspace,
    v_workspace,
    k_global,
    k_global_stride,
    v_global,
    v_global_stride,
    v_bias,
    k_new,
    k_new_strides,
    v_new,
    v_new_strides,
    k_exact,
    k_exact_strides,
    v_exact,
    v_exact_strides,
    sink_logits,
    rows,
    out,
    lse,
    scale,
    softcap,
    window,
    num_queries,
    batch,
    length_limit,
    slab,
    slab_tokens,
    split_tokens,
    first_split,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    RING: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """M query rows of one KV head against one split of the stored tokens, the first split with all exact ones.

    Writes `out` and `lse`, or with PARTIAL the float32 parts `[num_splits, B, Hq, L, Dv]` and `[num_splits, B, Hq, L]`
    (log-sum-exp in base 2) for `merge_kernel`.
    """
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    i = row // GROUP
    q_head = head * GROUP + row % GROUP
    first_query, num_new, start, first_new, stored, stored_end, ring = _row_bounds(
        b, rows, length_limit, num_queries, window, NUM_SINKS, HAS_NEW, HAS_EXACT, RING
    )
    real = i < tl.minimum(num_new, num_queries)
    query = first_query + i
    low_query = first_query + tl.program_id(0) * M // GROUP
    high_query = first_query + tl.minimum((tl.program_id(0) * M + M - 1) // GROUP, num_new - 1)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    column = tl.arange(0, N)
    edge = tl.arange(0, EDGE)
    d_valid = d < D
    dv_valid = dv < DV
    i64 = i.to(tl.int64)

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_DV], tl.float32)

    # Stored tokens of this split, as indices into the slab.
    low = tl.program_id(2) * split_tokens
    high = tl.minimum(low + split_tokens, stored_end - stored - slab)
    full_low = low
    full_high = high
    if CAUSAL:
        high = tl.minimum(high, high_query + 1 - stored - slab)
        full_high = tl.minimum(full_high, low_query + 1 - stored - slab)
    if window > 0:
        low = tl.maximum(low, low_query - window + 1 - stored - slab)
        full_low = tl.maximum(full_low, high_query - window + 1 - stored - slab)
    # Tiles full … full_end need no mask. Before and after them, in narrower tiles: the mask takes registers too.
    full_tile = tl.cdiv(full_low, N)
    full_end = tl.maximum(full_high // N, full_tile)
    first_edge = low // EDGE
    end_edge = tl.maximum(tl.cdiv(high, EDGE), first_edge)
    edge_gap = tl.minimum(tl.maximum(full_tile * (N // EDGE), first_edge), end_edge)
    edge_gap_end = tl.minimum(tl.maximum(full_end * (N // EDGE), edge_gap), end_edge)

    q_source = q if q_stored is None else q_stored
    q_source_strides = q_strides if q_stored is None else q_stored_strides
    q_at = q_source + b * q_source_strides[0] + q_head * q_source_strides[1] + i64 * q_source_strides[2]
    q_mask = real[:, None] & d_valid[None, :]
    q_tile = tl.load(q_at[:, None] + d[None, :] * q_source_strides[3], mask=q_mask, other=0.0)
    q_tile = q_tile.to(k_workspace.dtype.element_ty)
    factor = scale * LOG2E
    stored_factor = factor
    if k_global is not None:
        stored_factor = factor * tl.load(k_global + head * k_global_stride)
    shift = tl.zeros([M], tl.float32)
    if stored_bias is not None:
        shift_at = b * stored_bias_strides[0] + q_head * stored_bias_strides[1] + i64 * stored_bias_strides[2]
        shift = tl.load(stored_bias + shift_at, mask=real, other=0.0) * factor
    # Within a head of the workspace, whose size is bounded, int32 offsets do.
    k_head = k_workspace + (b * HEADS + head) * slab_tokens * D
    v_head = v_workspace + (b * HEADS + head) * slab_tokens * DV

    k_edge_at = k_head + edge[None, :] * D + d[:, None]
    v_edge_at = v_head + edge[:, None] * DV + dv[None, :]
    for step in tl.range(first_edge, end_edge - (edge_gap_end - edge_gap), num_stages=1):
        tile = tl.where(step < edge_gap, step, step - edge_gap + edge_gap_end)
        index = tile * EDGE + edge
        present = (index >= low) & (index < high)
        k = tl.load(k_edge_at + tile * (EDGE * D), mask=d_valid[:, None] & present[None, :], other=0.0)
        v = tl.load(v_edge_at + tile * (EDGE * DV), mask=dv_valid[None, :] & present[:, None], other=0.0)
        visible = _visible(query, stored + slab + index, present, window, CAUSAL)
        top, total, acc = _fold(q_tile, k, v, top, total, acc, stored_factor, shift, softcap, visible, True, SOFTCAP)
    k_at = k_head + column[None, :] * D + d[:, None]
    v_at = v_head + column[:, None] * DV + dv[None, :]
    for tile in tl.range(full_tile, full_end, num_stages=NUM_STAGES):
        if BLOCK_D == D:
            k = tl.load(k_at + tile * (N * D))
        else:
            k = tl.load(k_at + tile * (N * D), mask=d_valid[:, None], other=0.0)
        if BLOCK_DV == DV:
            v = tl.load(v_at + tile * (N * DV))
        else:
            v = tl.load(v_at + tile * (N * DV), mask=dv_valid[None, :], other=0.0)
        top, total, acc = _fold(q_tile, k, v, top, total, acc, stored_factor, shift, softcap, None, False, SOFTCAP)
    if v_global is not None:
        acc *= tl.load(v_global + head * v_global_stride)
    if v_bias is not None:
        acc += total[:, None] * tl.load(v_bias + head * DV + dv, mask=dv_valid, other=0.0)[None, :]

    if first_split + tl.program_id(2) == 0:
        zero = tl.zeros([M], tl.float32)
        if q_stored is not None:
            q_at = q + b * q_strides[0] + q_head * q_strides[1] + i64 * q_strides[2]
            q_tile = tl.load(q_at[:, None] + d[None, :] * q_strides[3], mask=q_mask, other=0.0)
        if HAS_EXACT:
            num_sinks = tl.maximum(tl.minimum(first_new - start, NUM_SINKS), 0)
            num_exact = num_sinks + tl.maximum(first_new - ring, 0)
            k_exact_at = k_exact + b * k_exact_strides[0] + head * k_exact_strides[1]
            v_exact_at = v_exact + b * v_exact_strides[0] + head * v_exact_strides[1]
            for tile in tl.range(0, tl.cdiv(num_exact, EDGE), num_stages=1):
                j = tile * EDGE + edge
                present = j < num_exact
                position = tl.where(j < num_sinks, start + j, ring + j - num_sinks)
                slot = j.to(tl.int64)
                if RING > 0:
                    slot = tl.where(j < num_sinks, j, NUM_SINKS + position % RING).to(tl.int64)
                k = tl.load(
                    (k_exact_at + slot * k_exact_strides[2])[None, :] + d[:, None],
                    mask=d_valid[:, None] & present[None, :],
                    other=0.0,
                )
                v = tl.load(
                    (v_exact_at + slot * v_exact_strides[2])[:, None] + dv[None, :],
                    mask=dv_valid[None, :] & present[:, None],
                    other=0.0,
                )
                visible = _visible(query, position, present, window, CAUSAL)
                top, total, acc = _fold(q_tile, k, v, top, total, acc, factor, zero, softcap, visible, True, SOFTCAP)
        if HAS_NEW:
            low = tl.maximum(start - first_new, 0)
            high = tl.minimum(num_new, num_queries)
            if CAUSAL:
                high = tl.minimum(high, high_query + 1 - first_new)
            if window > 0:
                low = tl.maximum(low, low_query - window + 1 - first_new)
            k_new_at = k_new + b * k_new_strides[0] + head * k_new_strides[1] + d[:, None] * k_new_strides[3]
            v_new_at = v_new + b * v_new_strides[0] + head * v_new_strides[1] + dv[None, :] * v_new_strides[3]
            for tile in tl.range(low // EDGE, tl.cdiv(high, EDGE), num_stages=NUM_STAGES):
                j = tile * EDGE + edge
                present = (j >= low) & (j < high)
                wide = j.to(tl.int64)
                k = tl.load(
                    k_new_at + (wide * k_new_strides[2])[None, :], mask=d_valid[:, None] & present[None, :], other=0.0
                )
                v = tl.load(
                    v_new_at + (wide * v_new_strides[2])[:, None], mask=dv_valid[None, :] & present[:, None], other=0.0
                )
                visible = _visible(query, first_new + j, present, window, CAUSAL)
                top, total, acc = _fold(q_tile, k, v, top, total, acc, factor, zero, softcap, visible, True, SOFTCAP)

    if not PARTIAL and sink_logits is not None:
        top, total, acc = _add_sink(sink_logits, q_head, real, top, total, acc)
    acc = tl.where((real & (total > 0))[:, None], acc / total[:, None], 0.0)
    result = tl.where(real & (total > 0), top + tl.log2(total), float("-inf"))
    out_row = (b * (HEADS * GROUP) + q_head) * num_queries + i64
    if PARTIAL:
        out_row += (first_split + tl.program_id(2)).to(tl.int64) * batch * (HEADS * GROUP) * num_queries
    inside = i < num_queries
    tl.store(
        out + out_row[:, None] * DV + dv[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & dv_valid[None, :],
    )
    if lse is not None:
        tl.store(lse + out_row, result if PARTIAL else result * LN2, mask=inside)


@triton.jit
def _add_sink(sink_logits, q_head, real, top, total, acc):
    """Adds `exp(sink)` to the denominators of real queries."""
    sink = tl.where(real, tl.load(sink_logits + q_head).to(tl.float32) * LOG2E, float("-inf"))
    new_top = tl.maximum(top, sink)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - base)
    return new_top, total * keep + tl.exp2(sink - base), acc * keep[:, None]


@triton.jit
def merge_kernel(
    parts,
    part_lse,
    sink_logits,
    q_lengths,
    out,
    lse,
    num_splits,
    num_rows,
    num_heads,
    num_queries,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    M: tl.constexpr,
):
    """Merges `parts` `[num_splits, B, Hq, L, Dv]` in the order of the splits; M rows of `[B, Hq, L]` a program."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    inside = row < num_rows
    dv = tl.arange(0, BLOCK_DV)
    mask = inside[:, None] & (dv < DV)[None, :]
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_DV], tl.float32)
    for split in range(num_splits):
        at = row + split * num_rows
        part_top = tl.load(part_lse + at, mask=inside, other=float("-inf"))
        part = tl.load(parts + at[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, part_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - base)
        weight = tl.exp2(part_top - base)
        total = total * keep + weight
        acc = acc * keep[:, None] + part * weight[:, None]
        top = new_top
    if sink_logits is not None:
        real = inside
        if q_lengths is not None:
            b = row // num_queries // num_heads
            real = real & (row % num_queries < tl.load(q_lengths + b, mask=inside, other=0))
        top, total, acc = _add_sink(sink_logits, row // num_queries % num_heads, real, top, total, acc)
    acc = tl.where((total > 0)[:, None], acc / total[:, None], 0.0)
    tl.store(out + row[:, None] * DV + dv[None, :], acc.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + row, tl.where(total > 0, (top + tl.log2(total)) * LN2, float("-inf")), mask=inside)


def unsupported(call: AttentionCall) -> str | None:
    """Why this backend does not take `call`, or None."""
    if call.mask is not None:
        return "an explicit mask is left to the fallback"
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        return f"queries must be float16 or bfloat16, got {call.q.dtype}"
    if max(call.head_dim, call.v_head_dim) > 256:
        return f"head sizes up to 256, got {call.head_dim} and {call.v_head_dim}"
    if call.softmax_scale <= 0:
        return f"the softmax scale must be positive, got {call.softmax_scale}"
    for storage_format, data in ((call.k_format, call.k_data), (call.v_format, call.v_data)):
        if storage_format == "block-fp4" and call.q.dtype == torch.float16:
            return "block-fp4 values can leave float16's range: needs bfloat16 queries"
        if storage_format == "exact" and data.dtype != call.q.dtype:
            return f"exact storage must have the queries' dtype, got {data.dtype} and {call.q.dtype}"
    for tensor in (call.k_new, call.v_new, call.k_exact, call.v_exact):
        if tensor is not None and tensor.dtype != call.q.dtype:
            return f"exact keys and values must have the queries' dtype, got {tensor.dtype} and {call.q.dtype}"
    return None


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves a call for which `unsupported` gives None; no host synchronisation.

    A row's result depends neither on the batch nor on the capacity: slabs and splits have fixed numbers of tokens.
    """
    call = call.dense()
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    batch, heads, num_queries, _ = call.q.shape
    if out.numel() == 0:
        return out, lse
    token_bytes = 2 * call.num_kv_heads * (call.head_dim + call.v_head_dim)
    slab_tokens = max(1, WORKSPACE_BYTES // token_bytes // SPLIT_TOKENS) * SPLIT_TOKENS
    split_tokens = SPLIT_TOKENS if num_queries * call.group <= FEW_ROWS else slab_tokens
    most = call.capacity if call.window <= 0 else min(call.capacity, call.window + num_queries)
    num_splits = triton.cdiv(most, split_tokens)
    row_bytes = max(token_bytes * min(most, slab_tokens), 4 * num_splits * heads * num_queries * call.v_head_dim)
    rows = max(1, min(WORKSPACE_BYTES // row_bytes, MAX_ROWS_HEADS // call.num_kv_heads))
    with nvfp4.on_device(call.q):
        for first in range(0, batch, rows):
            part = slice(first, min(first + rows, batch))
            row_call = call if rows >= batch else _rows_of(call, part)
            _run_rows(row_call, out[part], None if lse is None else lse[part], most, slab_tokens, split_tokens)
    return out, lse


def _rows_of(call: AttentionCall, part: slice) -> AttentionCall:
    """The call for some rows of the batch."""
    by_row = ["q", "lengths", "q_lengths", "starts", "block_table", "k_new", "v_new", "k_exact", "v_exact"]
    by_row += ["exact_from"]
    if call.block_table is None:
        by_row += ["k_data", "k_scales", "v_data", "v_scales"]
    sliced = {name: getattr(call, name)[part] for name in by_row if getattr(call, name) is not None}
    return dataclasses.replace(call, **sliced)


def _run_rows(
    call: AttentionCall, out: Tensor, lse: Tensor | None, most: int, slab_tokens: int, split_tokens: int
) -> None:
    """Attention of a few rows: for each slab stage and attend, then merge if there were several splits."""
    batch, num_heads, num_queries, head_dim = call.q.shape
    heads, v_head_dim = call.num_kv_heads, call.v_head_dim
    room = min(most, slab_tokens)
    v_dtype = torch.float16 if call.v_format in ("nvfp4", "fp8") else call.q.dtype
    k_workspace = call.q.new_empty((batch, heads, room, head_dim))
    v_workspace = call.q.new_empty((batch, heads, room, v_head_dim), dtype=v_dtype)
    num_splits = triton.cdiv(most, split_tokens)
    partial = num_splits > 1
    parts, part_lse = out, lse
    if partial:
        part_lse = call.q.new_empty((num_splits, batch, num_heads, num_queries), dtype=torch.float32)
        parts = call.q.new_empty((*part_lse.shape, v_head_dim), dtype=torch.float32)
    block_table = call.block_table
    length_limit = call.page_size if block_table is None else 0
    stored = stored_query(call, call.q.dtype)
    row_bounds = (call.lengths, call.q_lengths, call.starts, call.exact_from)
    exact = {
        "NUM_SINKS": call.num_sink_tokens if call.k_exact is not None else 0,
        "HAS_NEW": call.k_new is not None,
        "HAS_EXACT": call.k_exact is not None,
        "RING": call.ring_size,
    }
    block_d, block_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(v_head_dim)
    config = _config(max(block_d, block_dv), num_queries * call.group)
    blocks_a_token = max(head_dim, v_head_dim) // 16
    for slab in range(0, most, slab_tokens):
        tokens = min(most - slab, slab_tokens)
        stage_kernel[(triton.cdiv(tokens, STAGE_BLOCKS // blocks_a_token), batch * heads, 2)](
            call.k_data,
            call.k_scales,
            k_workspace,
            call.v_data,
            call.v_scales,
            v_workspace,
            block_table,
            0 if block_table is None else block_table.stride(0),
            row_bounds,
            num_queries,
            call.page_size,
            length_limit,
            call.window,
            slab,
            room,
            HEADS=heads,
            D=head_dim,
            DV=v_head_dim,
            K_FORMAT=call.k_format,
            V_FORMAT=call.v_format,
            V_FOUR_TOKEN=call.v_scale_layout == "4token",
            **exact,
            N=STAGE_BLOCKS,
            FAST=FAST,
            num_warps=4,
        )
        grid = (triton.cdiv(num_queries * call.group, config["M"]), batch * heads, triton.cdiv(tokens, split_tokens))
        prefill_kernel[grid](
            *_with_strides(call.q, *stored),
            k_workspace,
            v_workspace,
            *_scale_and_stride(call.k_global, call.k_format),
            *_scale_and_stride(call.v_global, call.v_format),
            call.v_bias,
            *_with_strides(call.k_new, call.v_new, call.k_exact, call.v_exact),
            None if partial else call.sink_logits,
            row_bounds,
            parts,
            part_lse,
            call.softmax_scale,
            call.softcap,
            call.window,
            num_queries,
            batch,
            length_limit,
            slab,
            room,
            split_tokens,
            slab // split_tokens,
            HEADS=heads,
            GROUP=call.group,
            D=head_dim,
            DV=v_head_dim,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            **exact,
            CAUSAL=call.causal,
            SOFTCAP=call.softcap > 0,
            PARTIAL=partial,
            **config,
        )
    if partial:
        num_rows = batch * num_heads * num_queries
        merge_kernel[(triton.cdiv(num_rows, 8),)](
            parts,
            part_lse,
            call.sink_logits,
            call.q_lengths,
            out,
            lse,
            num_splits,
            num_rows,
            num_heads,
            num_queries,
            DV=v_head_dim,
            BLOCK_DV=block_dv,
            M=8,
            num_warps=4,
        )


def _config(block_d: int, num_rows: int) -> dict[str, int]:
    """Launch parameters for head size `block_d` on the current GPU, by what its family has of shared memory.

    Hopper's were timed; the others are the largest tiles that compile without spills.
    """
    arch = 0 if INTERPRETED else triton.runtime.driver.active.get_current_target().arch
    if arch == 90:
        m, n, edge, stages, warps = (128, 128, 64, 3, 8) if block_d <= 128 else (128, 32, 32, 3, 8)
    elif arch in (100, 103):
        m, n, edge, stages, warps = (128, 64, 64, 3, 8) if block_d <= 128 else (64, 32, 32, 3, 8)
    elif block_d <= (128 if arch == 80 else 64):
        m, n, edge, stages, warps = 128, 64, 32, 2, 8
    else:
        m, n, edge, stages, warps = 64, 32, 32, 2, 4 if block_d <= 128 else 8
    if num_rows <= 64 and block_d <= 128:
        m, n, edge, stages, warps = 64, 32, 32, stages, 4
    return {"M": m, "N": n, "EDGE": edge, "NUM_STAGES": stages, "num_stages": stages, "num_warps": warps}


def _with_strides(*tensors: Tensor | None) -> list[Tensor | tuple[int, ...] | None]:
    arguments: list[Tensor | tuple[int, ...] | None] = []
    for tensor in tensors:
        arguments += [tensor, None if tensor is None else tensor.stride()]
    return arguments


def _scale_and_stride(global_scale: Tensor, storage_format: str) -> tuple[Tensor | None, int]:
    """The scale, where the format has one, and its stride from head to head."""
    if storage_format in ("exact", "block-fp4"):
        return None, 0
    return global_scale, global_scale.stride(0) if global_scale.ndim else 0
