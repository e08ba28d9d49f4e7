"""Attention in plain Triton for whatever the fast kernels do not take: every format, head size and argument.

Letters: B batch, Hq query heads, H KV heads, G = Hq / H, L queries a row, D and Dv head sizes, P pages, T tokens a
page, E exact slots, M query rows and N tokens of a tile. Row r of a KV head is query `r // G` of its head `r % G`.

A tile gathers N neighbouring positions, each from storage, from an exact copy or from the new tokens. Global scales act
on scores and on probabilities, so that stored values stay exact in the 10 bits that a tf32 product reads. Few query
rows are split over tokens; splits begin at multiples of SPLIT_TOKENS and are merged in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import AttentionCall
from . import nvfp4
from .nvfp4 import FAST
from .rotation import rotated

SPLIT_TOKENS = 512
MERGE_SPLITS = tl.constexpr(16)
"""Splits that the merge takes at once."""
FEW_ROWS = 128
"""Up to this many query rows a KV head (L · G), tokens are split to fill the GPU."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _stored_tile(
    data,
    scales,
    strides,
    scale_strides,
    page,
    slot,
    head,
    valid,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
    FOUR_TOKEN: tl.constexpr,
):
    """float32 `[N, BLOCK_D]` of the tokens at `page`, `slot` (`[N]`), without global scale; 0 where not `valid`."""
    N: tl.constexpr = slot.shape[0]
    at = data + page * strides[0] + head * strides[1] + slot * strides[2]
    if FORMAT == "nvfp4" or FORMAT == "block-fp4":
        S: tl.constexpr = BLOCK_D // 16
        s = tl.arange(0, S)[None, :]
        mask = valid[:, None] & (s < D // 16)
        word = tl.load(at[:, None] + s, mask=mask, other=0)
        row, column = slot[:, None], s
        if FOUR_TOKEN:
            row = slot[:, None] // 4 * 4 + s // (D // 64)
            column = s % (D // 64) * 4 + slot[:, None] % 4
        scale_at = scales + page[:, None] * scale_strides[0] + head * scale_strides[1] + row * scale_strides[2] + column
        bits = tl.reshape(tl.load(scale_at, mask=mask, other=0).to(tl.int32), [N * S])
        scale = nvfp4.e4m3_decode(bits) if FORMAT == "nvfp4" else nvfp4.power_of_two(bits)
        word = tl.reshape(word, [N * S])
        low = nvfp4.decode_half(word.to(tl.int32)) * scale[:, None]
        high = nvfp4.decode_half((word >> 32).to(tl.int32)) * scale[:, None]
        x = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [N, BLOCK_D])
    else:
        d = tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(at[:, None] + d, mask=valid[:, None] & (d < D), other=0)
        x = nvfp4.e4m3_decode_signed(x.to(tl.int32)) if FORMAT == "fp8" else x.to(tl.float32)
    return x


@triton.jit
def _exact_tile(
    exact,
    exact_strides,
    new,
    new_strides,
    b,
    head,
    slot,
    index,
    in_exact,
    in_new,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """float32 `[N, BLOCK_D]`: exact slots where `in_exact`, new tokens where `in_new`, else 0."""
    d = tl.arange(0, BLOCK_D)[None, :]
    x = tl.zeros([slot.shape[0], BLOCK_D], tl.float32)
    if exact is not None:
        at = exact + b * exact_strides[0] + head * exact_strides[1] + slot * exact_strides[2]
        x += tl.load(at[:, None] + d * exact_strides[3], mask=in_exact[:, None] & (d < D), other=0.0).to(tl.float32)
    if new is not None:
        at = new + b * new_strides[0] + head * new_strides[1] + index * new_strides[2]
        x += tl.load(at[:, None] + d * new_strides[3], mask=in_new[:, None] & (d < D), other=0.0).to(tl.float32)
    return x


@triton.jit
def attention_kernel(
    q,
    q_strides,
    q_stored,
    q_stored_strides,
    stored_bias,
    stored_bias_strides,
    k_data,
    k_strides,
    k_scales,
    k_scale_strides,
    v_data,
    v_strides,
    v_scales,
    v_scale_strides,
    k_global,
    k_global_stride,
    v_global,
    v_global_stride,
    v_bias,
    v_bias_stride,
    block_table,
    block_table_stride,
    k_new,
    k_new_strides,
    v_new,
    v_new_strides,
    k_exact,
    k_exact_strides,
    v_exact,
    v_exact_strides,
    exact_from,
    mask,
    mask_strides,
    mask_columns,
    lengths,
    q_lengths,
    starts,
    sink_logits,
    out,
    lse,
    num_queries,
    page_size,
    window,
    scale,
    softcap,
    split_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    FOUR_TOKEN: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    RING: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """M query rows of one KV head against one split of the tokens, the first split with the sinks.

    Writes `out` and `lse`, or with PARTIAL the float32 parts `[num_splits, B, Hq, L, Dv]` and `[num_splits, B, Hq, L]`
    (log-sum-exp in base 2, sink not in) for `merge_kernel`.
    """
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    split = tl.program_id(2)
    batch = tl.num_programs(1) // HEADS
    length = tl.load(lengths + b)
    num_new = num_queries
    if q_lengths is not None:
        num_new = tl.load(q_lengths + b)
    start = 0
    if starts is not None:
        start = tl.load(starts + b)
    first_query = length - num_new
    end = length
    if k_new is not None:
        end = first_query
    ring_from = end
    if RING > 0:
        ring_from = tl.minimum(ring_from, tl.load(exact_from + b))
    sink_end = tl.minimum(start + NUM_SINKS, end)
    stored_from = tl.maximum(sink_end, 0)
    if block_table is None:
        stored_from = tl.maximum(stored_from, end - page_size)

    row = tl.program_id(0) * M + tl.arange(0, M)
    i = row // GROUP
    query = first_query + i
    q_head = head * GROUP + row % GROUP
    real = i < tl.minimum(num_new, num_queries)
    low_query = first_query + tl.program_id(0) * M // GROUP
    high_query = tl.minimum(first_query + (tl.program_id(0) * M + M - 1) // GROUP, length - 1)

    # Tiles of the sinks, then of this split's part of all that follows.
    low = tl.maximum(tl.minimum(stored_from, tl.maximum(ring_from, sink_end)), start)
    high = length
    sink_low = tl.maximum(start, 0)
    if window > 0:
        low = tl.maximum(low, low_query - window + 1)
        sink_low = tl.maximum(sink_low, low_query - window + 1)
    if CAUSAL:
        high = tl.minimum(high, high_query + 1)
    first_split = low // split_tokens
    if PARTIAL:
        low = tl.maximum(low, (first_split + split) * split_tokens)
        high = tl.minimum(high, (first_split + split + 1) * split_tokens)
    num_sink_tiles = 0
    if NUM_SINKS > 0 and split == 0:
        num_sink_tiles = tl.maximum(tl.cdiv(sink_end - sink_low, N), 0)
    num_tiles = num_sink_tiles + tl.maximum(tl.cdiv(high - low, N), 0)

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    in_q = real[:, None] & (d < D)[None, :]
    i64 = i.to(tl.int64)
    q_at = q + b * q_strides[0] + q_head * q_strides[1] + i64 * q_strides[2]
    q_tile = tl.load(q_at[:, None] + d[None, :] * q_strides[3], mask=in_q, other=0.0).to(tl.float32)
    if q_stored is not None:
        q_at = q_stored + b * q_stored_strides[0] + q_head * q_stored_strides[1] + i64 * q_stored_strides[2]
        q_stored_tile = tl.load(q_at[:, None] + d[None, :] * q_stored_strides[3], mask=in_q, other=0.0).to(tl.float32)
    shift = tl.zeros([M], tl.float32)
    if stored_bias is not None:
        at = b * stored_bias_strides[0] + q_head * stored_bias_strides[1] + i64 * stored_bias_strides[2]
        shift = tl.load(stored_bias + at, mask=real, other=0.0)
    k_scale = 1.0
    if K_FORMAT != "exact" and K_FORMAT != "block-fp4":
        k_scale = tl.load(k_global + head * k_global_stride)
    v_scale = 1.0
    if V_FORMAT != "exact" and V_FORMAT != "block-fp4":
        v_scale = tl.load(v_global + head * v_global_stride)
    if v_bias is not None:
        shift_v = tl.load(v_bias + head * v_bias_stride + dv, mask=dv < DV, other=0.0)

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_DV], tl.float32)
    for tile in range(0, num_tiles):
        of_sinks = tile < num_sink_tiles
        base = tl.where(of_sinks, sink_low + tile * N, low + (tile - num_sink_tiles) * N)
        position = base + tl.arange(0, N)
        inside = position < tl.where(of_sinks, sink_end, high)
        is_sink = inside & (position < sink_end)
        is_new = inside & (position >= end)
        in_ring = inside & (position >= sink_end) & (position >= ring_from) & (position < end)
        stored = inside & (position >= stored_from) & (position < ring_from) & (position < end)
        # Positions are not negative here; padding is clamped so that no remainder is.
        slot = tl.maximum(position, 0) % page_size
        if block_table is not None:
            page_at = block_table + b * block_table_stride + position // page_size
            page = tl.load(page_at, mask=stored, other=0).to(tl.int64)
        else:
            page = tl.zeros([N], tl.int64) + b
        exact_slot = position - start
        if RING > 0:
            exact_slot = tl.where(is_sink, exact_slot, NUM_SINKS + tl.maximum(position, 0) % RING)
        k = _stored_tile(
            k_data, k_scales, k_strides, k_scale_strides, page, slot, head, stored, D, BLOCK_D, K_FORMAT, False
        )
        if q_stored is not None:
            scores = tl.dot(q_stored_tile, tl.trans(k), input_precision=PRECISION) * k_scale + shift[:, None]
            k = _exact_tile(
                k_exact,
                k_exact_strides,
                k_new,
                k_new_strides,
                b,
                head,
                exact_slot,
                position - end,
                is_sink | in_ring,
                is_new,
                D,
                BLOCK_D,
            )
            exact_scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
            scores = tl.where(stored[None, :], scores, exact_scores)
        else:
            if k_exact is not None or k_new is not None:
                k += _exact_tile(
                    k_exact,
                    k_exact_strides,
                    k_new,
                    k_new_strides,
                    b,
                    head,
                    exact_slot,
                    position - end,
                    is_sink | in_ring,
                    is_new,
                    D,
                    BLOCK_D,
                )
            scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
            scores *= tl.where(stored, k_scale, 1.0)[None, :]
            scores += tl.where(stored[None, :], shift[:, None], 0.0)
        scores *= scale * LOG2E
        if SOFTCAP:
            scores = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))
        visible = (stored | is_sink | in_ring | is_new)[None, :] & real[:, None]
        if CAUSAL:
            visible = visible & (position[None, :] <= query[:, None])
        if window > 0:
            visible = visible & (position[None, :] > query[:, None] - window)
        if MASK > 0:
            at = b * mask_strides[0] + q_head * mask_strides[1] + i64 * mask_strides[2]
            at = at[:, None] + position.to(tl.int64)[None, :] * mask_strides[3]
            visible = visible & (position < mask_columns)[None, :]
            if MASK == 1:
                visible = visible & (tl.load(mask + at, mask=visible, other=0) != 0)
            else:
                scores += tl.load(mask + at, mask=visible, other=0.0).to(tl.float32) * LOG2E
        scores = tl.where(visible, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - finite_top)
        weights = tl.exp2(scores - finite_top[:, None])
        total = total * keep + tl.sum(weights, axis=1)
        v = _stored_tile(
            v_data, v_scales, v_strides, v_scale_strides, page, slot, head, stored, DV, BLOCK_DV, V_FORMAT, FOUR_TOKEN
        )
        if v_exact is not None or v_new is not None:
            v += _exact_tile(
                v_exact,
                v_exact_strides,
                v_new,
                v_new_strides,
                b,
                head,
                exact_slot,
                position - end,
                is_sink | in_ring,
                is_new,
                DV,
                BLOCK_DV,
            )
        acc *= keep[:, None]
        if v_bias is not None:
            acc += tl.sum(tl.where(stored[None, :], weights, 0.0), axis=1)[:, None] * shift_v[None, :]
        weights *= tl.where(stored, v_scale, 1.0)[None, :]
        acc += tl.dot(weights, v, input_precision=PRECISION)
        top = new_top

    if not PARTIAL and sink_logits is not None:
        sink = tl.load(sink_logits + q_head, mask=real, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        keep = tl.exp2(top - new_top)
        acc *= keep[:, None]
        total = total * keep + tl.exp2(sink - new_top)
        top = new_top
    seen = real & (total > 0.0)
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    log_sum = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    written = i < num_queries
    at = ((split * batch + b) * (HEADS * GROUP) + q_head) * num_queries + i64
    if PARTIAL:
        tl.store(lse + at, log_sum, mask=written)
    elif lse is not None:
        tl.store(lse + at, log_sum * LN2, mask=written)
    result = nvfp4.round_to(acc, out.dtype.element_ty, FAST)
    tl.store(out + at[:, None] * DV + dv[None, :], result, mask=written[:, None] & (dv < DV)[None, :])


@triton.jit
def merge_kernel(
    parts,
    part_sums,
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
    FAST: tl.constexpr,
):
    """One query row: its splits, MERGE_SPLITS after MERGE_SPLITS, and its sink."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, num_splits, MERGE_SPLITS):
        split = first + tl.arange(0, MERGE_SPLITS)
        at = split * num_rows + row
        log_sum = tl.load(part_sums + at, mask=split < num_splits, other=float("-inf"))
        mask = (split < num_splits)[:, None] & (dv < DV)[None, :]
        part = tl.load(parts + at[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - finite_top)
        weight = tl.exp2(log_sum - finite_top)
        acc = acc * keep + tl.sum(part * weight[:, None], 0)
        total = total * keep + tl.sum(weight, 0)
        top = new_top
    if sink_logits is not None:
        sink = tl.load(sink_logits + row // num_queries % num_heads).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        keep = tl.exp2(top - new_top)
        acc = acc * keep
        total = total * keep + tl.exp2(sink - new_top)
        top = new_top
    seen = total > 0.0
    if q_lengths is not None:
        seen = seen & (row % num_queries < tl.load(q_lengths + row // (num_queries * num_heads)))
    result = tl.where(seen, acc / tl.where(seen, total, 1.0), 0.0)
    tl.store(out + row * DV + dv, nvfp4.round_to(result, out.dtype.element_ty, FAST), mask=dv < DV)
    if lse is not None:
        tl.store(lse + row, tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf")))


def unsupported(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None."""
    return None


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves `call`."""
    call = rotated(call, torch.float32)
    q, device = call.q, call.q.device
    batch, query_heads, queries, d = q.shape
    heads, group, dv = call.num_kv_heads, call.group, call.v_head_dim
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    if q.numel() == 0:
        return out, lse
    rows = queries * group
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (d, dv))
    wide = max(block_d, block_dv) > 256
    tile_rows = 16 if rows <= 16 or wide else 32
    tile_tokens = 16 if wide else 32
    # A row may end anywhere, and begin anywhere: one split more than its tokens fill.
    reach = call.capacity + call.ring_size + (queries if call.k_new is not None else 0)
    num_splits = triton.cdiv(reach, SPLIT_TOKENS) + 1 if rows <= FEW_ROWS and reach > SPLIT_TOKENS else 1
    partial = num_splits > 1
    result, sums = out, lse
    if partial:
        result = torch.empty((num_splits, *out.shape), dtype=torch.float32, device=device)
        sums = torch.empty((num_splits, *out.shape[:3]), dtype=torch.float32, device=device)
    mask, mask_strides = None, _strides(None)
    if call.mask is not None:
        mask = call.mask.expand(*q.shape[:3], call.mask.shape[-1])
        mask_strides = mask.stride()
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    exact = call.k_exact is not None
    with nvfp4.on_device(q):
        attention_kernel[(triton.cdiv(rows, tile_rows), batch * heads, num_splits)](
            q,
            q.stride(),
            call.q_stored,
            _strides(call.q_stored),
            call.stored_bias,
            _strides(call.stored_bias),
            call.k_data,
            call.k_data.stride(),
            call.k_scales,
            _strides(call.k_scales),
            call.v_data,
            call.v_data.stride(),
            call.v_scales,
            _strides(call.v_scales),
            call.k_global,
            call.k_global.ndim,
            call.v_global,
            call.v_global.ndim,
            call.v_bias,
            0 if call.v_bias is None else call.v_bias.stride(0),
            call.block_table,
            0 if call.block_table is None else call.block_table.stride(0),
            call.k_new,
            _strides(call.k_new),
            call.v_new,
            _strides(call.v_new),
            call.k_exact,
            _strides(call.k_exact),
            call.v_exact,
            _strides(call.v_exact),
            call.exact_from,
            mask,
            mask_strides,
            0 if mask is None else mask.shape[-1],
            call.lengths,
            call.q_lengths,
            call.starts,
            call.sink_logits,
            result,
            sums,
            queries,
            call.page_size,
            max(call.window, 0),
            call.softmax_scale,
            call.softcap,
            SPLIT_TOKENS,
            HEADS=heads,
            GROUP=group,
            D=d,
            DV=dv,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            K_FORMAT=call.k_format,
            V_FORMAT=call.v_format,
            FOUR_TOKEN=call.v_scale_layout == "4token",
            NUM_SINKS=call.num_sink_tokens if exact else 0,
            RING=call.ring_size if exact and call.exact_from is not None else 0,
            CAUSAL=call.causal,
            SOFTCAP=call.softcap > 0,
            MASK=0 if mask is None else 1 if mask.dtype == torch.uint8 else 2,
            PARTIAL=partial,
            PRECISION="tf32" if _has_tf32(q) else "ieee",
            M=tile_rows,
            N=tile_tokens,
            FAST=FAST,
            num_warps=4,
            num_stages=1,
        )
        if partial:
            merge_kernel[(batch * query_heads * queries,)](
                result,
                sums,
                call.sink_logits,
                call.q_lengths,
                out,
                lse,
                num_splits,
                batch * query_heads * queries,
                query_heads,
                queries,
                DV=dv,
                BLOCK_DV=block_dv,
                FAST=FAST,
                num_warps=1,
            )
    return out, lse


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else x.stride()


def _has_tf32(q: Tensor) -> bool:
    """Whether 10 bits hold `q`, on a GPU that multiplies such numbers."""
    if q.dtype == torch.float32 or not q.is_cuda or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)
