"""The merge of the decode kernel's partial results. Letters are those of `decode.py`."""

# Gluon builds tuples in unrolled loops.
# mypy: disable-error-code="assignment, has-type"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from .decode_common import (
    CODE_SCALE,
    GROUPS,
    LN2,
    LOG2E,
    finite,
    fold,
    fold_weights,
    power_of_two,
    row_range,
    spans_of_program,
)


@gluon.jit
def units_of_rows(unit, row, first_tile, end_tile, TILES: gl.constexpr, STRIDE: gl.constexpr):
    """uint32 `(unit - first, count)` of the units of TILES of its tiles that each row has results of."""
    first = gl.maximum(first_tile - row + STRIDE - 1, 0) // STRIDE
    end = gl.maximum(end_tile - row + STRIDE - 1, 0) // STRIDE
    count = gl.where(first < end, (end + TILES - 1) // TILES - first // TILES, 0)
    return (unit - first // TILES).to(gl.uint32), count.to(gl.uint32)


@gluon.jit
def unstack(x):
    """The columns of `x` [R, 2^n], which each lane has all, as a tuple of [R]."""
    ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    parts = (x,)
    for i in gl.static_range(x.shape[1].bit_length() - 1):
        halves = ()
        for k in gl.static_range(1 << i):
            part = gl.reshape(parts[k], [x.shape[0], 2, x.shape[1] >> (i + 1)])
            halves = halves + gl.split(gl.permute(part, (0, 2, 1)))
        parts = halves
    columns = ()
    for k in gl.static_range(x.shape[1]):
        column = gl.reshape(parts[k], [x.shape[0]])
        columns = columns + (gl.convert_layout(column, ROWS, assert_trivial=True),)  # noqa: RUF005
    return columns


@gluon.jit
def allocate_units(COUNT: gl.constexpr, STRIDE: gl.constexpr, BLOCK_D: gl.constexpr):
    """Shared memory for accumulators [COUNT, STRIDE, BLOCK_D], maxima and sums [STRIDE, COUNT]."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    return (
        gl.allocate_shared_memory(gl.float32, [COUNT, STRIDE, BLOCK_D], LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STRIDE, COUNT], LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STRIDE, COUNT], LAYOUT),
    )


@gluon.jit
def load_units(
    partials,
    smem,
    slots,
    unit,
    first_tile,
    end_tile,
    TILES: gl.constexpr,
    DV: gl.constexpr,
):
    """Starts the copies of COUNT units' results to `smem` and returns which of them, [STRIDE, COUNT], there are.

    Unit `unit + k` of each row, TILES of its tiles, has its results in slots `slots + k · STRIDE + row`.
    """
    partial_out, partial_max, partial_sum = partials
    acc_smem, top_smem, total_smem = smem
    COUNT: gl.constexpr = acc_smem.shape[0]
    STRIDE: gl.constexpr = acc_smem.shape[1]
    BLOCK_D: gl.constexpr = acc_smem.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    # Through shared memory, since the compiler puts off plain loads until their uses to save registers.
    LANES: gl.constexpr = min(32, BLOCK_D // 4)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32 // LANES, 1, LANES], [1, WARPS, 1], [2, 1, 0])
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
    copies = acc_smem._reinterpret(gl.float32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
    async_copy.async_copy_global_to_shared(copies, pointers, mask=valid)
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 1], [32 // min(COUNT, 32), min(COUNT, 32)], [WARPS, 1], [1, 0])
    row = gl.arange(0, STRIDE, layout=gl.SliceLayout(1, SPREAD))[:, None]
    k = gl.arange(0, COUNT, layout=gl.SliceLayout(0, SPREAD))[None, :]
    first, count = units_of_rows(unit, row, first_tile, end_tile, TILES, STRIDE)
    valid = first + k.to(gl.uint32) < count
    slot = slots + k * STRIDE + row
    async_copy.async_copy_global_to_shared(top_smem, partial_max + slot, mask=valid)
    async_copy.async_copy_global_to_shared(total_smem, partial_sum + slot, mask=valid)
    async_copy.commit_group()
    # Weights are computed once a lane, or all of a row's by each lane where they are few.
    FEW: gl.constexpr = COUNT * STRIDE <= 8 * WARPS
    UNITS: gl.constexpr = gl.BlockedLayout([STRIDE // WARPS, COUNT], [1, 32], [WARPS, 1], [1, 0]) if FEW else SPREAD
    row = gl.arange(0, STRIDE, layout=gl.SliceLayout(1, UNITS))[:, None]
    k = gl.arange(0, COUNT, layout=gl.SliceLayout(0, UNITS))[None, :]
    first, count = units_of_rows(unit, row, first_tile, end_tile, TILES, STRIDE)
    return first + k.to(gl.uint32) < count


@gluon.jit
def add_units(state, valid, smem, SET: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Adds the units of `load_units` to `(maxima, sums, accumulators)` of the rows, once their copies are there.

    GROUP units are added in order, the SET / GROUP groups of a set in pairs, sets in order. As all weights are powers
    of two, these sums round just as those of the decode kernel.
    """
    top, total, acc = state
    acc_smem, top_smem, total_smem = smem
    COUNT: gl.constexpr = acc_smem.shape[0]
    STRIDE: gl.constexpr = acc_smem.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = gl.BlockedLayout([STRIDE // WARPS, COUNT], [1, 32], [WARPS, 1], [1, 0])
    UNITS: gl.constexpr = valid.type.layout
    async_copy.wait_group(0)
    tops = gl.where(valid, top_smem.load(UNITS), -float("inf"))
    totals = total_smem.load(UNITS)
    new_top = gl.maximum(top, gl.convert_layout(gl.max(tops, 1), top.type.layout))
    old_weight = power_of_two(top - new_top)
    total = total * old_weight
    acc = acc * gl.expand_dims(old_weight, 1)
    unit_top = gl.convert_layout(new_top, gl.SliceLayout(1, UNITS))
    weights = power_of_two(tops - gl.expand_dims(unit_top, 1))
    totals = unstack(gl.convert_layout(totals * weights, EACH))
    weights = unstack(gl.convert_layout(weights, EACH))
    group = (total, acc)
    left = group
    pair = group
    for k in gl.static_range(COUNT):
        weight = gl.expand_dims(gl.convert_layout(weights[k], top.type.layout, assert_trivial=True), 1)
        part_total = gl.convert_layout(totals[k], top.type.layout, assert_trivial=True)
        part = acc_smem.index(k).load(LAYOUT)
        if k % GROUP == 0:
            group = (part_total, part * weight)
        else:
            group = (group[0] + part_total, gl.fma(part, gl.broadcast(weight, part)[0], group[1]))
        if k % GROUP == GROUP - 1:
            if k % SET // GROUP % 2 == 1:
                group = (left[0] + group[0], left[1] + group[1])
            if k % SET // GROUP == 3:
                group = (pair[0] + group[0], pair[1] + group[1])
            left = group
            if k % SET // GROUP == 1:
                pair = group
        if k % SET == SET - 1:
            total += group[0]
            acc += group[1]
    return new_top, total, acc


@gluon.jit
def add_sets(
    state,
    partials,
    first_set,
    num_sets,
    first_tile,
    end_tile,
    COUNT: gl.constexpr,
    SET: gl.constexpr,
    GROUP: gl.constexpr,
    TILES: gl.constexpr,
    DV: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Adds a row's sets, each of SET units of TILES tiles, to `(maxima, sums, accumulators)`; see `add_units`."""
    STRIDE: gl.constexpr = state[2].shape[0]
    smem = allocate_units(max(COUNT, SET), STRIDE, state[2].shape[1])
    for unit in range(0, num_sets * SET, max(COUNT, SET)):
        valid = load_units(partials, smem, unit * STRIDE, first_set * SET + unit, first_tile, end_tile, TILES, DV)
        state = add_units(state, valid, smem, SET, GROUP, LAYOUT)
    return state


@gluon.jit(do_not_specialize=["tile_limit", "program_limit"])
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
    SETS: gl.constexpr,
    EXACT: gl.constexpr,
    MOST: gl.constexpr,
    PDL: gl.constexpr,
):
    """Merges the partial results of one column for BLOCK_D output elements, COUNT of each row of tiles at a time.

    Row r of STRIDE adds up the exact parts r, r + STRIDE, …, and the sets of tiles r, r + STRIDE, …; the rows' results
    are summed at the end. So the order of additions follows from the row alone.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([STRIDE // WARPS, BLOCK_D // 32], [1, 32], [WARPS, 1], [1, 0])
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
        b,
        lengths,
        q_lengths,
        starts,
        exact_from,
        queries,
        page_size,
        num_sink_tokens,
        window,
        PAGING,
        CAUSAL,
        WINDOW,
        True,
    )
    first_tile = begin // N
    end_tile = gl.maximum((end + N - 1) // N, first_tile)
    first_set = first_tile // (SET * STRIDE)
    num_sets = gl.cdiv(end_tile, SET * STRIDE) - first_set
    v_scale = gl.load(v_global + head * stride_v_global, cache_modifier=".cg") * CODE_SCALE
    base = program.to(gl.int64) * slot_stride
    partials = (partial_out + base * DV, partial_max + base, partial_sum + base)
    top = gl.full([STRIDE], -float("inf"), gl.float32, ROWS)
    nothing = (top, gl.zeros([STRIDE], gl.float32, ROWS), gl.zeros([STRIDE, BLOCK_D], gl.float32, LAYOUT))
    if PDL:
        gdc_wait()
    if EXACT:
        exact_smem = allocate_units(2, STRIDE, BLOCK_D)
        valid = load_units(partials, exact_smem, stored_slots, 0, 0, num_exact_slots, 1, DV)
    row_sets = (partials, first_set, num_sets, first_tile, end_tile)
    if TILES and end_tile - first_tile <= tile_limit:
        state = add_sets(nothing, *row_sets, COUNT, SET, GROUP, 1, DV, LAYOUT)
    elif SETS:
        state = add_sets(nothing, *row_sets, COUNT, GROUPS // MOST, 1, MOST * GROUP, DV, LAYOUT)
    else:
        spans = spans_of_program(first_set * GROUPS, gl.cdiv(end_tile, SPAN), program_limit // STRIDE, MOST)
        if spans == 1:
            state = add_sets(nothing, *row_sets, COUNT, 4, 1, GROUP, DV, LAYOUT)
        elif spans == 2:
            state = add_sets(nothing, *row_sets, COUNT, 2, 1, 2 * GROUP, DV, LAYOUT)
        else:
            state = add_sets(nothing, *row_sets, COUNT, 1, 1, SET, DV, LAYOUT)
    top, total, acc = state
    acc = acc * v_scale
    stored_total = total
    if EXACT:
        exact = add_units(nothing, valid, exact_smem, 1, 1, LAYOUT)
        for part in range(2 * STRIDE, num_exact_slots, 2 * STRIDE):
            slots = stored_slots + part
            valid = load_units(partials, exact_smem, slots, part // STRIDE, 0, num_exact_slots, 1, DV)
            exact = add_units(exact, valid, exact_smem, 1, 1, LAYOUT)
        top, old_weight, new_weight = fold_weights(exact[0], top)
        stored_total = total * new_weight
        total = fold(exact[1], old_weight, total, new_weight)
        acc = fold(exact[2], gl.expand_dims(old_weight, 1), acc, gl.expand_dims(new_weight, 1))

    # Each lane sums whole columns: Triton's own sum over warps meets one bank of shared memory again and again.
    COLUMNS: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_D // (32 * WARPS)), STRIDE], [32, 1], [WARPS, 1], [1, 0])
    acc = gl.convert_layout(gl.permute(acc, (1, 0)), COLUMNS)
    row_top = gl.convert_layout(top, gl.SliceLayout(0, COLUMNS))
    total = gl.convert_layout(total, gl.SliceLayout(0, COLUMNS))
    element = gl.program_id(1) * BLOCK_D + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, COLUMNS))
    top = finite(gl.max(row_top, 0))
    weight = power_of_two(row_top - top)
    total = gl.sum(total * weight, 0)
    acc = gl.sum(acc * gl.expand_dims(weight, 0), 1)
    if v_bias is not None:
        bias = gl.load(v_bias + head * DV + element, mask=element < DV, other=0.0)
        stored_total = gl.convert_layout(stored_total, gl.SliceLayout(0, COLUMNS))
        acc += gl.sum(stored_total * weight, 0) * bias
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
