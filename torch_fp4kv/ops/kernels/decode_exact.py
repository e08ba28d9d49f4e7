"""The decode kernel's part for tokens that have exact copies. Letters are those of `decode.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .decode_common import EXACT_SLOTS, finite
from .decode_layouts import k_exact_map, v_exact_map
from .decode_operands import (
    exact_operand,
    in_order_of_lanes,
    linear,
    load_query,
    query_operand,
    spread_probabilities,
)
from .decode_results import final_scores, store_partial, visible_tokens


@gluon.jit
def exact_position(token, length, start, exact_from, ring, num_exact, num_sink_tokens):
    """`(seen, position)` of exact slots: the first tokens of a row, then at slot p % ring the last before `length`."""
    behind = (length - 1 - (token - num_sink_tokens)) % ring
    recent = length - 1 - behind
    is_sink = token < num_sink_tokens
    position = gl.where(is_sink, start + token, recent)
    in_ring = (recent >= exact_from) & (recent >= start + num_sink_tokens) & (recent >= 0)
    return (is_sink | in_ring) & (token < num_exact) & (position < length), position


@gluon.jit
def exact_split(
    q,
    k_exact,
    v_exact,
    mask,
    partial_out,
    partial_max,
    partial_sum,
    b,
    head,
    row_head,
    block,
    first,
    slot,
    slot_stride,
    length,
    n,
    start,
    exact_from,
    ring,
    num_exact,
    stride_q_b,
    stride_q_h,
    stride_q_l,
    stride_q_d,
    stride_ke_b,
    stride_ke_h,
    stride_ke_e,
    stride_ve_b,
    stride_ve_h,
    stride_ve_e,
    stride_mask_b,
    stride_mask_h,
    stride_mask_l,
    stride_mask_m,
    mask_columns,
    queries,
    window,
    num_sink_tokens,
    scale,
    softcap,
    G: gl.constexpr,
    C: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    DV: gl.constexpr,
    DVP: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASK: gl.constexpr,
    MMA: gl.constexpr,
):
    """Partial attention over exact slots `first … first + EXACT_SLOTS - 1`: sinks, then the ring."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HS: gl.constexpr = max(C, 8)
    N: gl.constexpr = EXACT_SLOTS
    K_EXACT: gl.constexpr = linear(k_exact_map(N, DP))
    V_EXACT: gl.constexpr = linear(v_exact_map(N, DVP))
    # Loads before their use: latency is most of what a program takes.
    token = first + gl.arange(0, N, layout=gl.SliceLayout(1, K_EXACT))
    element = gl.arange(0, DP, layout=gl.SliceLayout(0, K_EXACT))[None, :]
    seen, _ = exact_position(token, length, start, exact_from, ring, num_exact, num_sink_tokens)
    k_exact += b.to(gl.int64) * stride_ke_b + head.to(gl.int64) * stride_ke_h
    pointers = k_exact + (token.to(gl.int64) * stride_ke_e)[:, None] + element
    k = gl.load(pointers, mask=seen[:, None] & (element < D), other=0.0)
    token = first + gl.arange(0, N, layout=gl.SliceLayout(1, V_EXACT))
    element = gl.arange(0, DVP, layout=gl.SliceLayout(0, V_EXACT))[None, :]
    seen, _ = exact_position(token, length, start, exact_from, ring, num_exact, num_sink_tokens)
    v_exact += b.to(gl.int64) * stride_ve_b + head.to(gl.int64) * stride_ve_h
    pointers = v_exact + (token.to(gl.int64) * stride_ve_e)[:, None] + element
    v = gl.load(pointers, mask=seen[:, None] & (element < DV), other=0.0)
    query = load_query(
        q, None, b, head, block, queries, stride_q_b, stride_q_h, stride_q_l, stride_q_d, G, C, HS, D, DP
    )
    query, factor = query_operand(query.to(gl.float32), B, MMA)
    factor = factor * scale
    column = block * C + gl.arange(0, HS, layout=gl.SliceLayout(0, MMA)) % C
    query_position = length - n + column // G

    k, k_factor = exact_operand(k.to(gl.float32), 1)
    k = gl.convert_layout(in_order_of_lanes(k, DP), A, assert_trivial=True)
    s = mma_v2(k, query, gl.zeros([N, HS], gl.float32, MMA))
    s = s * gl.convert_layout(k_factor, gl.SliceLayout(1, MMA))[:, None] * factor[None, :]
    token = first + gl.arange(0, N, layout=gl.SliceLayout(1, MMA))
    seen, position = exact_position(token, length, start, exact_from, ring, num_exact, num_sink_tokens)
    s = final_scores(
        s,
        position,
        column,
        b,
        head,
        queries,
        softcap,
        mask,
        stride_mask_b,
        stride_mask_h,
        stride_mask_l,
        stride_mask_m,
        mask_columns,
        G,
        SOFTCAP,
        MASK,
    )
    s = visible_tokens(s, position, seen, query_position, window, CAUSAL, WINDOW)
    top = gl.ceil(gl.max(s, 0))
    p = spread_probabilities(gl.exp2(s - finite(top)[None, :]), N, C, B)

    v, v_factor = exact_operand(v.to(gl.float32), 0)
    if C == 4:
        v = gl.permute(gl.reshape(v, [N // 8, 4, 2, 8, DVP // 64, 2, 4]), (4, 6, 3, 0, 2, 1, 5))
        v = gl.reshape(v, [DVP // 2, 2 * N])
    else:
        v = gl.reshape(gl.permute(gl.reshape(v, [N, 8, DVP // 8]), (2, 1, 0)), [DVP, N])
    v = gl.convert_layout(v, A, assert_trivial=True)
    acc = mma_v2(v, p, gl.zeros([v.shape[0], HS], gl.float32, MMA)) * v_factor
    ones = gl.full([16, v.shape[1]], 1.0, gl.float16, A)
    total = mma_v2(ones, p, gl.zeros([16, HS], gl.float32, MMA))
    store_partial(
        partial_out,
        partial_max,
        partial_sum,
        acc,
        top,
        total,
        row_head,
        block,
        slot,
        slot_stride,
        queries,
        G,
        C,
        HS,
        DV,
        DVP,
        MMA,
    )
