"""The merge of the decode kernel's partial results. Letters are those of `decode.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from .decode_common import CODE_SCALE, LN2, LOG2E, MERGE_ROWS, finite, first_of_group, fold, fold_weights, row_range


@gluon.jit
def load_partials(partial_out, partial_max, partial_sum, index, rows, valid, offset, DV: gl.constexpr):
    """Maxima and sums `[WARPS, 8]`, accumulators `[WARPS, 8, BLOCK_D]` of slots `index`; empty where not valid.

    `rows` is `index` in the accumulators' layout.
    """
    top = gl.load(partial_max + index, mask=valid, other=-float("inf"))
    total = gl.load(partial_sum + index, mask=valid, other=0.0)
    row_valid = gl.expand_dims(gl.convert_layout(valid.to(gl.int32), rows.type.layout), 2) != 0
    pointers = partial_out + (gl.expand_dims(rows * DV, 2) + offset)
    return top, total, gl.load(pointers, mask=row_valid & (offset < DV), other=0.0)


@gluon.jit
def fold_rows(top, total, acc, new_top, new_total, new_acc, ROWS: gl.constexpr):
    """Folds partial results into those of the same rows."""
    top, old_weight, new_weight = fold_weights(top, new_top)
    acc_old_weight = gl.expand_dims(gl.convert_layout(old_weight, ROWS), 2)
    acc_new_weight = gl.expand_dims(gl.convert_layout(new_weight, ROWS), 2)
    return top, fold(total, old_weight, new_total, new_weight), fold(acc, acc_old_weight, new_acc, acc_new_weight)


@gluon.jit
def sum_rows(top, total, acc, sums, LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    """Sums each warp's rows, `[WARPS, BLOCK_D]` each; more than one warp leaves the results in `sums`."""
    block_top = gl.max(top, 1)
    weight = gl.exp2(top - gl.expand_dims(finite(block_top), 1))
    block_total = gl.sum(total * weight, 1)
    acc_weight = gl.convert_layout(weight, gl.SliceLayout(2, LAYOUT))
    block_acc = gl.sum(acc * gl.expand_dims(acc_weight, 2), 1)
    COLUMN: gl.constexpr = gl.SliceLayout(1, block_acc.type.layout)
    block_top = gl.broadcast(gl.expand_dims(gl.convert_layout(block_top, COLUMN), 1), block_acc)[0]
    block_total = gl.broadcast(gl.expand_dims(gl.convert_layout(block_total, COLUMN), 1), block_acc)[0]
    if WARPS > 1:
        sums.index(0).store(block_top)
        sums.index(1).store(block_total)
        sums.index(2).store(block_acc)
    return block_top, block_total, block_acc


@gluon.jit
def sums_of_warp(top, total, acc, sums, k, ROW: gl.constexpr, WARPS: gl.constexpr):
    """Sums of warp `k`, `[BLOCK_D]`, in every warp."""
    if WARPS > 1:
        top = sums.index(0).slice(k, 1).load(ROW)
        total = sums.index(1).slice(k, 1).load(ROW)
        acc = sums.index(2).slice(k, 1).load(ROW)
    SIZE: gl.constexpr = acc.shape[1]
    ELEMENTS: gl.constexpr = gl.SliceLayout(0, ROW)
    top = gl.convert_layout(gl.reshape(top, [SIZE]), ELEMENTS)
    total = gl.convert_layout(gl.reshape(total, [SIZE]), ELEMENTS)
    return top, total, gl.convert_layout(gl.reshape(acc, [SIZE]), ELEMENTS)


@gluon.jit
def merge_kernel(
    partial_out,
    partial_max,
    partial_sum,
    out,
    lse,
    lengths,
    q_lengths,
    starts,
    exact_from,
    sink_logits,
    v_global,
    v_bias,
    stride_v_global,
    queries,
    page_size,
    window,
    num_sink_tokens,
    num_exact_slots,
    num_slots,
    tile_stride,
    stored_slots,
    slot_stride,
    H: gl.constexpr,
    G: gl.constexpr,
    DV: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,
    STRIDE: gl.constexpr,
    PAGING: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_D: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Merges the partial results of one column for BLOCK_D output elements.

    A warp takes MERGE_ROWS pairs at a time and sums them in its own registers, then the warps' sums are folded one by
    one: the order of operations depends on neither BLOCK_D nor WARPS.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, MERGE_ROWS, BLOCK_D // 32], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 32], [1, 32], [WARPS, 1], [1, 0])
    ELEMENTS: gl.constexpr = gl.SliceLayout(0, ROW)
    SPAN: gl.constexpr = GROUP * STRIDE
    if PDL:
        gdc_wait()
    program = gl.program_id(0)
    column = program % (G * queries)
    row_head = program // (G * queries)
    b = row_head // H
    head = row_head % H
    query_head = head * G + column % G
    _length, n, _start, begin, end, _inner_begin, _inner_end = row_range(
        b, lengths, q_lengths, starts, exact_from, queries, page_size, num_sink_tokens, window, PAGING, CAUSAL, WINDOW
    )
    first_tile = begin // N
    end_tile = gl.maximum((end + N - 1) // N, first_tile)
    first_span = first_tile // (2 * SPAN) * 2
    num_groups = (gl.cdiv(end_tile, SPAN) - first_span) * STRIDE
    num_pairs = (gl.cdiv(end_tile, 2 * SPAN) - first_span // 2) * STRIDE
    a_tile_each = end_tile - first_tile <= num_slots
    a_group_each = num_groups <= num_slots

    at = program.to(gl.int64) * slot_stride
    partial_out += at * DV
    partial_max += at
    partial_sum += at
    index = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, LANES)) * MERGE_ROWS, 1)
    index += gl.expand_dims(gl.arange(0, MERGE_ROWS, layout=gl.SliceLayout(0, LANES)), 0)
    rows = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, ROWS)) * MERGE_ROWS, 1)
    rows += gl.expand_dims(gl.arange(0, MERGE_ROWS, layout=gl.SliceLayout(0, ROWS)), 0)
    offset = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))) + gl.program_id(1) * BLOCK_D
    offset = gl.expand_dims(gl.expand_dims(offset, 0), 0)
    element = gl.program_id(1) * BLOCK_D + gl.arange(0, BLOCK_D, layout=ELEMENTS)
    v_scale = gl.load(v_global + head * stride_v_global) * CODE_SCALE
    sums = gl.allocate_shared_memory(gl.float32, [3, WARPS, BLOCK_D], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))

    top = gl.full([BLOCK_D], -float("inf"), gl.float32, ELEMENTS)
    exact_total = gl.zeros([BLOCK_D], gl.float32, ELEMENTS)
    stored_total = gl.zeros([BLOCK_D], gl.float32, ELEMENTS)
    acc = gl.zeros([BLOCK_D], gl.float32, ELEMENTS)
    for first in range(0, num_exact_slots, MERGE_ROWS * WARPS):
        block_top, block_total, block_acc = load_partials(
            partial_out,
            partial_max,
            partial_sum,
            stored_slots + first + index,
            stored_slots + first + rows,
            first + index < num_exact_slots,
            offset,
            DV,
        )
        block_top, block_total, block_acc = sum_rows(block_top, block_total, block_acc, sums, LAYOUT, WARPS)
        for k in gl.static_range(WARPS):
            warp_top, warp_total, warp_acc = sums_of_warp(block_top, block_total, block_acc, sums, k, ROW, WARPS)
            top, old_weight, new_weight = fold_weights(top, warp_top)
            acc = fold(acc, old_weight, warp_acc, new_weight)
            exact_total = fold(exact_total, old_weight, warp_total, new_weight)
    for first in range(0, num_pairs, MERGE_ROWS * WARPS):
        if a_group_each or a_tile_each:
            pair_top = gl.full([WARPS, MERGE_ROWS], -float("inf"), gl.float32, LANES)
            pair_total = gl.zeros([WARPS, MERGE_ROWS], gl.float32, LANES)
            pair_acc = gl.zeros([WARPS, MERGE_ROWS, BLOCK_D], gl.float32, LAYOUT)
            for half in range(2):
                span = (first + index) // STRIDE * 2 + half
                group_index = span * STRIDE + index % STRIDE
                group_rows = ((first + rows) // STRIDE * 2 + half) * STRIDE + rows % STRIDE
                if a_tile_each:
                    group_top = gl.full([WARPS, MERGE_ROWS], -float("inf"), gl.float32, LANES)
                    group_total = gl.zeros([WARPS, MERGE_ROWS], gl.float32, LANES)
                    group_acc = gl.zeros([WARPS, MERGE_ROWS, BLOCK_D], gl.float32, LAYOUT)
                    for k in gl.static_range(GROUP):
                        i = (first_span + span) * SPAN + k * STRIDE + index % STRIDE
                        tile_top, tile_total, tile_acc = load_partials(
                            partial_out,
                            partial_max,
                            partial_sum,
                            k * tile_stride + group_index,
                            k * tile_stride + group_rows,
                            (i >= first_tile) & (i < end_tile),
                            offset,
                            DV,
                        )
                        group_top, group_total, group_acc = fold_rows(
                            group_top, group_total, group_acc, tile_top, tile_total, tile_acc, ROWS
                        )
                else:
                    i = first_of_group((first_span + span) * SPAN + index % STRIDE, first_tile, STRIDE)
                    group_top, group_total, group_acc = load_partials(
                        partial_out,
                        partial_max,
                        partial_sum,
                        group_index,
                        group_rows,
                        i < gl.minimum((first_span + span + 1) * SPAN, end_tile),
                        offset,
                        DV,
                    )
                pair_top, pair_total, pair_acc = fold_rows(
                    pair_top, pair_total, pair_acc, group_top, group_total, group_acc, ROWS
                )
        else:
            span = first_span + (first + index) // STRIDE * 2
            i = first_of_group(span * SPAN + index % STRIDE, first_tile, STRIDE)
            pair_top, pair_total, pair_acc = load_partials(
                partial_out,
                partial_max,
                partial_sum,
                first + index,
                first + rows,
                i < gl.minimum((span + 2) * SPAN, end_tile),
                offset,
                DV,
            )
        block_top, block_total, block_acc = sum_rows(pair_top, pair_total, pair_acc, sums, LAYOUT, WARPS)
        for k in gl.static_range(WARPS):
            warp_top, warp_total, warp_acc = sums_of_warp(block_top, block_total, block_acc, sums, k, ROW, WARPS)
            top, old_weight, new_weight = fold_weights(top, warp_top)
            acc = fold(acc, old_weight, warp_acc * v_scale, new_weight)
            exact_total = exact_total * old_weight
            stored_total = fold(stored_total, old_weight, warp_total, new_weight)
    if v_bias is not None:
        acc += stored_total * gl.load(v_bias + head * DV + element, mask=element < DV, other=0.0)
    total = exact_total + stored_total
    top = finite(top)
    if sink_logits is not None:
        sink = gl.load(sink_logits + query_head).to(gl.float32) * LOG2E
        new_top = gl.where(total > 0.0, gl.maximum(top, sink), sink)
        weight = gl.where(total > 0.0, gl.exp2(top - new_top), 0.0)
        acc = acc * weight
        total = total * weight + gl.exp2(sink - new_top)
        top = new_top
    seen = (total > 0.0) & (column // G < n)
    total = gl.where(seen, total, 1.0)
    row = (b * (H * G) + query_head).to(gl.int64) * queries + column // G
    gl.store(out + row * DV + element, gl.where(seen, acc / total, 0.0).to(out.dtype.element_ty), mask=element < DV)
    if lse is not None:
        value = gl.where(seen, (top + gl.log2(total)) * LN2, -float("inf"))
        gl.store(lse + row + element * 0, value, mask=element == 0)
