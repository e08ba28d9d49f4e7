"""The merge of the decode kernel's partial results. Letters are those of `decode.py`."""

# Gluon builds tuples in unrolled loops.
# mypy: disable-error-code="assignment, has-type"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from .decode_common import CODE_SCALE, GROUPS, LN2, LOG2E, finite, fold, fold_weights, row_range, spans_of_program


@gluon.jit
def units_of_rows(unit, row, first_tile, end_tile, TILES: gl.constexpr, STRIDE: gl.constexpr):
    """uint32 `(unit - first, count)` of the units of TILES of its tiles that each row has results of."""
    first = gl.maximum(first_tile - row + STRIDE - 1, 0) // STRIDE
    end = gl.maximum(end_tile - row + STRIDE - 1, 0) // STRIDE
    count = gl.where(first < end, (end + TILES - 1) // TILES - first // TILES, 0)
    return (unit - first // TILES).to(gl.uint32), count.to(gl.uint32)


@gluon.jit
def load_partials(
    partials,
    smem,
    slots,
    unit,
    first_tile,
    end_tile,
    COUNT: gl.constexpr,
    TILES: gl.constexpr,
    DV: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Results `(maxima [STRIDE], sums [STRIDE], accumulators [STRIDE, BLOCK_D])` of COUNT units, in one wait.

    Unit `unit + k` of each row, TILES of its tiles, has its results in slots `slots + k · STRIDE + row`.
    """
    partial_out, partial_max, partial_sum = partials
    STRIDE: gl.constexpr = smem.shape[1]
    BLOCK_D: gl.constexpr = smem.shape[2]
    # Through shared memory, since the compiler puts off plain loads until their uses to save registers.
    COPY: gl.constexpr = gl.BlockedLayout([COUNT, 1, BLOCK_D // 32], [1, 1, 32], [1, STRIDE, 1], [2, 1, 0])
    k = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None]
    row = gl.arange(0, STRIDE, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :]
    element = gl.program_id(1) * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    element = element[None, None, :]
    first, count = units_of_rows(unit, row, first_tile, end_tile, TILES, STRIDE)
    valid = gl.expand_dims(first + k.to(gl.uint32) < count, 2)
    if DV % BLOCK_D:
        valid = valid & (element < DV)
    # A lane's own part, then the part that all lanes share and that becomes an immediate of each copy.
    pointers = partial_out + (gl.expand_dims((slots + row) * DV, 2) + element)
    pointers += gl.expand_dims(k * (STRIDE * DV), 2)
    SHAPE: gl.constexpr = [COUNT, STRIDE, BLOCK_D]
    copies = smem._reinterpret(gl.float32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
    async_copy.async_copy_global_to_shared(copies, pointers, mask=valid)
    async_copy.commit_group()
    row = gl.arange(0, STRIDE, layout=gl.SliceLayout(1, LAYOUT))
    first, count = units_of_rows(unit, row, first_tile, end_tile, TILES, STRIDE)
    tops = ()
    totals = ()
    for k in gl.static_range(COUNT):
        valid = first + k < count
        slot = slots + k * STRIDE + row
        tops = tops + (gl.load(partial_max + slot, mask=valid, other=-float("inf")),)  # noqa: RUF005
        totals = totals + (gl.load(partial_sum + slot, mask=valid, other=0.0),)  # noqa: RUF005
    async_copy.wait_group(0)
    result = ()
    for k in gl.static_range(COUNT):
        valid = first + k < count
        acc = gl.where(gl.expand_dims(valid, 1), smem.index(k).load(LAYOUT), 0.0)
        result = result + ((tops[k], totals[k], acc),)  # noqa: RUF005
    return result


@gluon.jit
def fold_rows(old, new):
    """Folds partial results into those of the same rows."""
    top, old_weight, new_weight = fold_weights(old[0], new[0])
    total = fold(old[1], old_weight, new[1], new_weight)
    return top, total, fold(old[2], gl.expand_dims(old_weight, 1), new[2], gl.expand_dims(new_weight, 1))


@gluon.jit
def fold_sets(
    state,
    partials,
    smem,
    first_set,
    num_sets,
    first_tile,
    end_tile,
    v_scale,
    UNITS: gl.constexpr,
    GROUP_UNITS: gl.constexpr,
    TILES: gl.constexpr,
    DV: gl.constexpr,
    V_BIAS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Folds sets of UNITS results, each of TILES tiles, into `(maxima, sums, accumulators, sums of stored tokens)`.

    GROUP_UNITS of them are folded in order, what results then in pairs.
    """
    STRIDE: gl.constexpr = smem.shape[1]
    COUNT: gl.constexpr = smem.shape[0]
    SETS: gl.constexpr = max(1, COUNT // UNITS)
    top, total, acc, stored_total = state
    for i in range(0, num_sets, SETS):
        for k in gl.static_range(0, SETS * UNITS, COUNT):
            unit = i * UNITS + k
            parts = load_partials(
                partials,
                smem,
                unit * STRIDE,
                first_set * UNITS + unit,
                first_tile,
                end_tile,
                COUNT,
                TILES,
                DV,
                LAYOUT,
            )
            if k == 0:
                left = parts[0]
                pair = parts[0]
                group = parts[0]
            for j in gl.static_range(COUNT):
                group = parts[j] if (k + j) % GROUP_UNITS == 0 else fold_rows(group, parts[j])
                if (k + j) % GROUP_UNITS == GROUP_UNITS - 1:
                    if (k + j) % UNITS // GROUP_UNITS % 2 == 1:
                        group = fold_rows(left, group)
                    if (k + j) % UNITS // GROUP_UNITS == 3:
                        group = fold_rows(pair, group)
                    left = group
                    if (k + j) % UNITS // GROUP_UNITS == 1:
                        pair = group
                if (k + j) % UNITS == UNITS - 1:
                    top, old_weight, new_weight = fold_weights(top, group[0])
                    total = fold(total, old_weight, group[1], new_weight)
                    if V_BIAS:
                        stored_total = fold(stored_total, old_weight, group[1], new_weight)
                    old_weight = gl.expand_dims(old_weight, 1)
                    acc = fold(acc, old_weight, group[2] * v_scale, gl.expand_dims(new_weight, 1))
    return top, total, acc, stored_total


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
    tile_limit,
    program_limit,
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
    COUNT: gl.constexpr,
    TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Merges the partial results of one column for BLOCK_D output elements; a warp loads COUNT at a time.

    Warp r of STRIDE folds, in order, the exact parts r, r + STRIDE, …, then the sets of tiles r, r + STRIDE, …; the
    warps' results are summed at the end. So the order of operations follows from the row alone.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 32], [1, 32], [STRIDE, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    SPAN: gl.constexpr = GROUP * STRIDE
    SET: gl.constexpr = GROUP * GROUPS
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
    first_set = first_tile // (SET * STRIDE)
    num_sets = gl.cdiv(end_tile, SET * STRIDE) - first_set
    v_scale = gl.load(v_global + head * stride_v_global) * CODE_SCALE
    V_BIAS: gl.constexpr = v_bias is not None
    base = program.to(gl.int64) * slot_stride
    partials = (partial_out + base * DV, partial_max + base, partial_sum + base)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [COUNT, STRIDE, BLOCK_D], SHARED)
    top = gl.full([STRIDE], -float("inf"), gl.float32, ROWS)
    exact = (top, gl.zeros([STRIDE], gl.float32, ROWS), gl.zeros([STRIDE, BLOCK_D], gl.float32, LAYOUT))
    if PDL:
        gdc_wait()
    for part in range(0, num_exact_slots, 2 * STRIDE):
        parts = load_partials(partials, smem, stored_slots + part, part // STRIDE, 0, num_exact_slots, 2, 1, DV, LAYOUT)
        exact = fold_rows(fold_rows(exact, parts[0]), parts[1])
    state = (exact[0], exact[1], exact[2], gl.zeros([STRIDE], gl.float32, ROWS))
    row_sets = (partials, smem, first_set, num_sets, first_tile, end_tile, v_scale)
    if TILES and end_tile - first_tile <= tile_limit:
        state = fold_sets(state, *row_sets, SET, GROUP, 1, DV, V_BIAS, LAYOUT)
    else:
        spans = spans_of_program(first_set * GROUPS, gl.cdiv(end_tile, SPAN), program_limit // STRIDE)
        if spans == 1:
            state = fold_sets(state, *row_sets, 4, 1, GROUP, DV, V_BIAS, LAYOUT)
        elif spans == 2:
            state = fold_sets(state, *row_sets, 2, 1, 2 * GROUP, DV, V_BIAS, LAYOUT)
        else:
            state = fold_sets(state, *row_sets, 1, 1, SET, DV, V_BIAS, LAYOUT)

    # Each lane sums whole columns: Triton's own sum over warps meets one bank of shared memory again and again.
    FINAL: gl.constexpr = gl.BlockedLayout([STRIDE, 1], [1, 32], [1, STRIDE], [0, 1])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    rows = gl.allocate_shared_memory(gl.float32, [3, STRIDE], FLAT)
    for i in gl.static_range(3 if V_BIAS else 2):
        rows.index(i).store(state[(0, 1, 3)[i]])
    smem.index(0).store(state[2])
    row_top = rows.index(0).load(gl.SliceLayout(1, FINAL))
    element = gl.program_id(1) * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, FINAL))
    top = finite(gl.max(row_top, 0))
    weight = gl.exp2(row_top - top)
    total = gl.sum(rows.index(1).load(gl.SliceLayout(1, FINAL)) * weight, 0)
    acc = gl.sum(smem.index(0).load(FINAL) * gl.expand_dims(weight, 1), 0)
    if V_BIAS:
        bias = gl.load(v_bias + head * DV + element, mask=element < DV, other=0.0)
        acc += gl.sum(rows.index(2).load(gl.SliceLayout(1, FINAL)) * weight, 0) * bias
    if sink_logits is not None:
        sink = gl.load(sink_logits + query_head).to(gl.float32) * LOG2E
        new_top = gl.where(total > 0.0, gl.maximum(top, sink), sink)
        weight = gl.where(total > 0.0, gl.exp2(top - new_top), 0.0)
        acc = acc * weight
        total = total * weight + gl.exp2(sink - new_top)
        top = new_top
    seen = (total > 0.0) & (column // G < n)
    total = gl.where(seen, total, 1.0)
    at_row = (b * (H * G) + query_head).to(gl.int64) * queries + column // G
    values = gl.where(seen, acc / total, 0.0).to(out.dtype.element_ty)
    gl.store(out + at_row * DV + element, values, mask=element < DV)
    if lse is not None:
        value = gl.where(seen, (top + gl.log2(total)) * LN2, -float("inf"))
        gl.store(lse + at_row + element * 0, value, mask=element == 0)
