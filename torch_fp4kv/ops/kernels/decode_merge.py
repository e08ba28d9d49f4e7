"""The merge of the decode kernel's partial results. Letters are those of `decode.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from .decode_common import CODE_SCALE, GROUPS, LN2, LOG2E, finite, fold, fold_weights, row_range, spans_of_program


@gluon.jit
def units_of_rows(unit, row, first_tile, end_tile, tiles, STRIDE: gl.constexpr):
    """uint32 `(unit - first, count)` of the units of `tiles` of its tiles that each row has results of."""
    first = gl.maximum(first_tile - row + STRIDE - 1, 0) // STRIDE
    end = gl.maximum(end_tile - row + STRIDE - 1, 0) // STRIDE
    count = gl.where(first < end, (end + tiles - 1) // tiles - first // tiles, 0)
    return (unit - first // tiles).to(gl.uint32), count.to(gl.uint32)


@gluon.jit
def copy_partials(
    partials, smem, stats, slots, unit, num_units, first_tile, end_tile, tiles, DV: gl.constexpr, LAYOUT: gl.constexpr
):
    """Starts the copies of the results of `num_units` units of `tiles` tiles, slots `slots … + num_units · STRIDE`."""
    partial_out, partial_max, partial_sum = partials
    COUNT: gl.constexpr = smem.shape[0]
    STRIDE: gl.constexpr = smem.shape[1]
    BLOCK_D: gl.constexpr = smem.shape[2]
    STEP: gl.constexpr = min(COUNT, 4)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [STRIDE], [0])
    i = gl.arange(0, COUNT * STRIDE, layout=FLAT)
    first, count = units_of_rows(unit, i % STRIDE, first_tile, end_tile, tiles, STRIDE)
    valid = first + (i // STRIDE).to(gl.uint32) < count
    async_copy.async_copy_global_to_shared(stats.index(0), partial_max + slots + i, mask=valid)
    async_copy.async_copy_global_to_shared(stats.index(1), partial_sum + slots + i, mask=valid)
    steps = smem._reinterpret(gl.float32, [COUNT // STEP, STEP * STRIDE, BLOCK_D], smem.layout)
    i = gl.arange(0, STEP * STRIDE, layout=gl.SliceLayout(1, LAYOUT))
    element = gl.program_id(1) * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))
    first, count = units_of_rows(unit, i % STRIDE, first_tile, end_tile, tiles, STRIDE)
    for k in range(0, num_units, STEP):
        wanted = gl.expand_dims(first + (k + i // STRIDE).to(gl.uint32) < count, 1)
        if DV % BLOCK_D:
            wanted = wanted & (gl.expand_dims(element, 0) < DV)
        pointers = partial_out + (gl.expand_dims((slots + k * STRIDE + i) * DV, 1) + gl.expand_dims(element, 0))
        async_copy.async_copy_global_to_shared(steps.index(k // STEP), pointers, mask=wanted)
    async_copy.commit_group()


@gluon.jit
def read_partial(smem, stats, k, first, count, LAYOUT: gl.constexpr):
    """The copied result k, `(maxima [STRIDE], sums [STRIDE], accumulators [STRIDE, BLOCK_D])`, empty if not valid."""
    STRIDE: gl.constexpr = smem.shape[1]
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    valid = first + k.to(gl.uint32) < count
    top = stats.index(0)._reinterpret(gl.float32, [smem.shape[0], STRIDE], stats.layout).index(k).load(ROWS)
    total = stats.index(1)._reinterpret(gl.float32, [smem.shape[0], STRIDE], stats.layout).index(k).load(ROWS)
    acc = smem.index(k).load(LAYOUT)
    top = gl.where(valid, top, -float("inf"))
    return top, gl.where(valid, total, 0.0), gl.where(gl.expand_dims(valid, 1), acc, 0.0)


@gluon.jit
def fold_rows(old, new):
    """Folds partial results into those of the same rows."""
    top, old_weight, new_weight = fold_weights(old[0], new[0])
    total = fold(old[1], old_weight, new[1], new_weight)
    return top, total, fold(old[2], gl.expand_dims(old_weight, 1), new[2], gl.expand_dims(new_weight, 1))


@gluon.jit
def empty(LAYOUT: gl.constexpr, STRIDE: gl.constexpr, BLOCK_D: gl.constexpr):
    """A partial result of nothing."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    top = gl.full([STRIDE], -float("inf"), gl.float32, ROWS)
    return top, gl.zeros([STRIDE], gl.float32, ROWS), gl.zeros([STRIDE, BLOCK_D], gl.float32, LAYOUT)


@gluon.jit
def fold_sets(
    state,
    partials,
    smem,
    stats,
    first_set,
    num_sets,
    first_tile,
    end_tile,
    v_scale,
    pairs,
    halves,
    tiles,
    UNITS: gl.constexpr,
    DV: gl.constexpr,
    V_BIAS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Folds the results of sets into `(maxima, sums, accumulators, sums of stored tokens)`.

    A set is `pairs` pairs of `halves` halves of UNITS results of `tiles` tiles each. Loops, since a kernel as short as
    this one waits for its instructions first of all.
    """
    COUNT: gl.constexpr = smem.shape[0]
    STRIDE: gl.constexpr = smem.shape[1]
    BLOCK_D: gl.constexpr = smem.shape[2]
    top, total, acc, stored_total = state
    units = pairs * halves * UNITS
    row = gl.arange(0, STRIDE, layout=top.type.layout)
    for i in range(0, num_sets * units, COUNT):
        num_units = gl.minimum(COUNT, num_sets * units - i)
        unit = first_set * units + i
        copy_partials(
            partials,
            smem,
            stats,
            i * STRIDE,
            unit,
            num_units,
            first_tile,
            end_tile,
            tiles,
            DV,
            LAYOUT,
        )
        first, count = units_of_rows(unit, row, first_tile, end_tile, tiles, STRIDE)
        async_copy.wait_group(0)
        k = 0
        while k < num_units:
            whole = empty(LAYOUT, STRIDE, BLOCK_D)
            for _ in range(pairs):
                pair = empty(LAYOUT, STRIDE, BLOCK_D)
                for _ in range(halves):
                    group = read_partial(smem, stats, k, first, count, LAYOUT)
                    for j in gl.static_range(1, UNITS):
                        group = fold_rows(group, read_partial(smem, stats, k + j, first, count, LAYOUT))
                    pair = fold_rows(pair, group)
                    k += UNITS
                whole = fold_rows(whole, pair)
            top, old_weight, new_weight = fold_weights(top, whole[0])
            total = fold(total, old_weight, whole[1], new_weight)
            if V_BIAS:
                stored_total = fold(stored_total, old_weight, whole[1], new_weight)
            acc = fold(acc, gl.expand_dims(old_weight, 1), whole[2] * v_scale, gl.expand_dims(new_weight, 1))
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
    TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Merges the partial results of one column for BLOCK_D output elements.

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
    COUNT: gl.constexpr = max(32, SET) if TILES else GROUPS
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [COUNT, STRIDE, BLOCK_D], SHARED)
    stats = gl.allocate_shared_memory(gl.float32, [2, COUNT * STRIDE], FLAT)
    row = gl.arange(0, STRIDE, layout=ROWS)
    exact = empty(LAYOUT, STRIDE, BLOCK_D)
    if PDL:
        gdc_wait()
    for i in range(0, num_exact_slots, STRIDE):
        # One result a row.
        copy_partials(partials, smem, stats, stored_slots + i, i // STRIDE, 1, 0, num_exact_slots, 1, DV, LAYOUT)
        first, count = units_of_rows(i // STRIDE, row, 0, num_exact_slots, 1, STRIDE)
        async_copy.wait_group(0)
        exact = fold_rows(exact, read_partial(smem, stats, i * 0, first, count, LAYOUT))
    state = (exact[0], exact[1], exact[2], gl.zeros([STRIDE], gl.float32, ROWS))
    common = (partials, smem, stats, first_set, num_sets, first_tile, end_tile, v_scale)
    if TILES and end_tile - first_tile <= tile_limit:
        state = fold_sets(state, *common, 2, 2, 1, GROUP, DV, V_BIAS, LAYOUT)
    else:
        spans = spans_of_program(first_set * GROUPS, gl.cdiv(end_tile, SPAN), program_limit // STRIDE)
        pairs = gl.where(spans < 4, 2, 1)
        state = fold_sets(state, *common, pairs, GROUPS // (spans * pairs), spans * GROUP, 1, DV, V_BIAS, LAYOUT)

    # Each lane sums whole columns: Triton's own sum over warps meets one bank of shared memory again and again.
    FINAL: gl.constexpr = gl.BlockedLayout([STRIDE, 1], [1, 32], [1, STRIDE], [0, 1])
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
