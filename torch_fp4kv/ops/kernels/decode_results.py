"""What the decode kernel does with scores and with partial results. Letters are those of `decode.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .decode_common import LOG2E, LOWEST, fold, fold_weights
from .decode_layouts import out_map
from .decode_operands import linear


@gluon.jit
def final_scores(
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
    G: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASK: gl.constexpr,
):
    """Soft-cap and mask on scores `[N, HS]` in units of log2(e). MASK 1 is boolean, 2 is added."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x))
        s = softcap * LOG2E * (1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 / softcap))))
    if MASK:
        pointers = mask + b.to(gl.int64) * stride_mask_b
        pointers += ((head * G + column % G).to(gl.int64) * stride_mask_h + (column // G).to(gl.int64) * stride_mask_l)[
            None, :
        ]
        pointers += position.to(gl.int64)[:, None] * stride_mask_m
        inside = ((position >= 0) & (position < mask_columns))[:, None] & (column < G * queries)[None, :]
        if MASK == 1:
            s = gl.where(gl.load(pointers, mask=inside, other=0) != 0, s, -float("inf"))
        else:
            added = gl.load(pointers, mask=inside, other=-float("inf")).to(gl.float32)
            s += gl.where(added == -float("inf"), added, gl.maximum(added, LOWEST) * LOG2E)
    return s


@gluon.jit
def visible_tokens(s, position, seen, query_position, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Scores with -inf where a token, or all of it (`seen` False), is not for the query."""
    visible = gl.broadcast(seen[:, None], s)[0]
    if CAUSAL:
        visible = visible & (position[:, None] <= query_position[None, :])
    if WINDOW:
        visible = visible & (position[:, None] > (query_position - window)[None, :])
    return gl.where(visible, s, -float("inf"))


@gluon.jit
def store_partial(
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
    G: gl.constexpr,
    C: gl.constexpr,
    HS: gl.constexpr,
    DV: gl.constexpr,
    DVP: gl.constexpr,
    MMA: gl.constexpr,
):
    """Accumulators `[C, DV]`, log2 maxima and sums of the program's columns into slot `slot` of each."""
    OUT: gl.constexpr = linear(out_map(C, DVP))
    if C == 4:
        out = gl.permute(gl.reshape(acc, [DVP // 64, 2, 2, 8, 2, C]), (5, 3, 0, 4, 1, 2))
    else:
        out = gl.permute(gl.reshape(acc, [DVP // 8, 8, C]), (2, 1, 0))
    out = gl.convert_layout(gl.reshape(out, [C, DVP]), OUT)
    column = block * C + gl.arange(0, C, layout=gl.SliceLayout(1, OUT))
    element = gl.arange(0, DVP, layout=gl.SliceLayout(0, OUT))
    base = row_head.to(gl.int64) * (G * queries)
    mask = (column < G * queries)[:, None]
    if DV != DVP:
        mask = mask & (element < DV)[None, :]
    rows = (base + column) * slot_stride + slot
    gl.store(partial_out + rows[:, None] * DV + element[None, :], out, mask=mask)
    # All rows of sums are the same.
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    index = gl.arange(0, HS, layout=gl.SliceLayout(0, MMA))
    mask = (row == 0)[:, None] & ((index < C) & (block * C + index < G * queries))[None, :]
    slots = (base + block * C + index) * slot_stride + slot
    gl.store(partial_sum + gl.broadcast(slots[None, :], total)[0], total, mask=mask)
    index = gl.arange(0, HS, layout=gl.SliceLayout(0, MMA))
    mask = (index < C) & (block * C + index < G * queries)
    gl.store(partial_max + (base + block * C + index) * slot_stride + slot, top, mask=mask)


@gluon.jit
def put_aside(waiting, which, acc, total, top):
    """Stores a partial result, all rows of whose sums are the same, in shared memory."""
    waiting[0].index(which).store(acc)
    waiting[1].index(which).store(gl.max(total, 0))
    waiting[2].index(which).store(top)


@gluon.jit
def fold_waiting(waiting, which, acc, total, top, MMA: gl.constexpr):
    """Folds a partial result into an earlier one that waits in shared memory."""
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    top, old_weight, new_weight = fold_weights(waiting[2].index(which).load(ROW), top)
    old_weight = gl.expand_dims(old_weight, 0)
    new_weight = gl.expand_dims(new_weight, 0)
    old_total = gl.broadcast(gl.expand_dims(waiting[1].index(which).load(ROW), 0), total)[0]
    acc = fold(waiting[0].index(which).load(MMA), old_weight, acc, new_weight)
    return acc, fold(old_total, old_weight, total, new_weight), top
