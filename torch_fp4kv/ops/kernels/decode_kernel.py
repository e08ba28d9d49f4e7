"""The decode kernel: one warp streams, unpacks and multiplies; see `decode.py` for how its work is cut.

Raw words go through shared memory (`cp.async`) and are unpacked in registers straight into operands of `mma.m16n8k16`
(see `decode_layouts.py`, `decode_unpack.py`). The warp keeps maximum, sum and accumulator of each column to itself.
Letters are those of `decode.py`; DP and DVP are padded head sizes."""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from .decode_common import CODE_SCALE, EXACT_SLOTS, GROUPS, LOG2E, finite, first_of_group, fold, fold_weights, row_range, spans_of_program
from .decode_layouts import (
    k_exact_map,
    k_scale_map,
    k_swizzle,
    k_word_map,
    out_map,
    v_exact_map,
    v_scale_map,
    v_swizzle,
    v_word_map,
    words_per_lane,
)
from .decode_unpack import unpack_asm, unpack_constraints

# P of two neighbouring columns, packed and transposed 8 by 8: a lane then has two neighbouring tokens of one column.
# The four outputs of FEW are both halves of two operand registers; its prmt selectors put P into the lower half for
# columns 0 to 3 and into the upper for 4 to 7. Else there are registers for both.
P_ASM_FEW = gl.constexpr("""{
.reg .b32 p, first, second;
cvt.rn.f16x2.f32 p, $5, $4;
movmatrix.sync.aligned.m8n8.trans.b16 p, p;
prmt.b32 first, p, 0, $6;
prmt.b32 second, p, 0, $7;
mov.b32 {$0, $1}, first;
mov.b32 {$2, $3}, second;
}""")
P_ASM = gl.constexpr("""{
.reg .b32 p;
.reg .b16 first, second, zero;
cvt.rn.f16x2.f32 p, $9, $8;
movmatrix.sync.aligned.m8n8.trans.b16 p, p;
mov.b32 {first, second}, p;
mov.b16 zero, 0;
mov.b16 $0, first;
mov.b16 $1, zero;
mov.b16 $2, second;
mov.b16 $3, zero;
mov.b16 $4, zero;
mov.b16 $5, first;
mov.b16 $6, zero;
mov.b16 $7, second;
}""")


@constexpr_function
def linear(layout):
    registers, lanes, shape = layout
    return gl.DistributedLinearLayout(registers, lanes, [], [], shape)


@constexpr_function
def swizzled(parameters):
    vec, per_phase, max_phase = parameters
    return gl.SwizzledSharedLayout(vec, per_phase, max_phase, order=[1, 0])


@gluon.jit
def join_word(halves, FIRST: gl.constexpr):
    """8 f16 tensors of a word to `[..., half, r0, r1]` (pair r = r0 + 2 · r1)."""
    even = gl.join(gl.join(halves[FIRST], halves[FIRST + 1]), gl.join(halves[FIRST + 2], halves[FIRST + 3]))
    odd = gl.join(gl.join(halves[FIRST + 4], halves[FIRST + 5]), gl.join(halves[FIRST + 6], halves[FIRST + 7]))
    return gl.join(even, odd)


@gluon.jit
def unpack_words(words, scales, multipliers, COUNT: gl.constexpr, SCALES: gl.constexpr, E4M3: gl.constexpr):
    """int32 `[..., COUNT]` and int16 scale operands `[...]` to f16 `[..., half, r0, r1, j0, j1]`, word j0 + 2 · j1."""
    ASM: gl.constexpr = unpack_asm(COUNT, SCALES, E4M3)
    CONSTRAINTS: gl.constexpr = unpack_constraints(COUNT)
    LAYOUT: gl.constexpr = scales.type.layout
    m1, m5, m9 = multipliers
    if COUNT == 1:
        x = gl.convert_layout(gl.reshape(words, words.shape[:-1]), LAYOUT, assert_trivial=True)
        out = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [x, scales, m1, m5, m9], dtype=(gl.float16,) * 8, is_pure=True, pack=1
        )
        result = join_word(out, 0)
        result = gl.reshape(result, result.shape + [1, 1])  # noqa: RUF005
    elif COUNT == 2:
        x0, x1 = gl.split(words)
        x0 = gl.convert_layout(x0, LAYOUT, assert_trivial=True)
        x1 = gl.convert_layout(x1, LAYOUT, assert_trivial=True)
        out = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [x0, x1, scales, m1, m5, m9], dtype=(gl.float16,) * 16, is_pure=True, pack=1
        )
        result = gl.join(join_word(out, 0), join_word(out, 8))
        result = gl.reshape(result, result.shape + [1])  # noqa: RUF005
    else:
        even, odd = gl.split(gl.reshape(words, words.shape[:-1] + [2, 2]))  # noqa: RUF005
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        x0 = gl.convert_layout(x0, LAYOUT, assert_trivial=True)
        x1 = gl.convert_layout(x1, LAYOUT, assert_trivial=True)
        x2 = gl.convert_layout(x2, LAYOUT, assert_trivial=True)
        x3 = gl.convert_layout(x3, LAYOUT, assert_trivial=True)
        out = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [x0, x1, x2, x3, scales, m1, m5, m9], dtype=(gl.float16,) * 32, is_pure=True, pack=1
        )
        result = gl.join(gl.join(join_word(out, 0), join_word(out, 8)), gl.join(join_word(out, 16), join_word(out, 24)))
    return result


@gluon.jit
def spread_probabilities(p, N: gl.constexpr, C: gl.constexpr, B: gl.constexpr):
    """float32 `[N, columns]` to operand B `[2N, 2C]`: row 2t + h, column h' · C + column is P where h = h', else 0."""
    if C == 4:
        p0, p1 = gl.split(gl.reshape(p, [N, 4, 2]))
        lower_half = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, p0.type.layout)), 1) & 4 == 0
        args = [p0, p1, gl.where(lower_half, 0x4410, 0x1044), gl.where(lower_half, 0x4432, 0x3244)]
        out = gl.inline_asm_elementwise(
            P_ASM_FEW, "=h,=h,=h,=h,r,r,r,r", args, dtype=(gl.float16,) * 4, is_pure=True, pack=1
        )
        pairs = gl.join(gl.join(out[0], out[2]), gl.join(out[1], out[3]))
        pairs = gl.reshape(pairs, [N // 8, 8, 4, 2, 2])
        spread = gl.reshape(gl.permute(pairs, (0, 3, 2, 4, 1)), [2 * N, 8])
    else:
        p0, p1 = gl.split(gl.reshape(p, [N, C // 2, 2]))
        out = gl.inline_asm_elementwise(
            P_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [p0, p1], dtype=(gl.float16,) * 8, is_pure=True, pack=1
        )
        lower = gl.join(gl.join(out[0], out[2]), gl.join(out[1], out[3]))
        upper = gl.join(gl.join(out[4], out[6]), gl.join(out[5], out[7]))
        pairs = gl.reshape(gl.join(lower, upper), [N // 8, 8, C // 8, 4, 2, 2, 2])
        spread = gl.reshape(gl.permute(pairs, (0, 4, 3, 5, 6, 2, 1)), [2 * N, 2 * C])
    return gl.convert_layout(spread, B, assert_trivial=True)


@gluon.jit
def column_halves(x, C: gl.constexpr, MMA: gl.constexpr):
    """`[columns]` of scores to the columns of outputs, `[1, HV]`."""
    if C > 4:
        both = gl.reshape(gl.permute(gl.join(x, x), (1, 0)), [2 * C])
        x = gl.convert_layout(both, gl.SliceLayout(0, MMA), assert_trivial=True)
    return gl.expand_dims(x, 0)


@gluon.jit
def next_lap(wrapped, position, T):
    """Tokens in the laps that a ring of T slots has completed before `position`, from those at an earlier one."""
    if position - wrapped >= T:
        wrapped = position // T * T
    return wrapped


@gluon.jit
def token_slots(token, position, wrapped, first, last, row_pages, stride, T, LOG_T, PAGING: gl.constexpr):
    """Page offset and slot of tokens `position + token`, clamped to first … last: pages of others may not exist."""
    if PAGING == 1 or PAGING == 2:
        token = gl.maximum(gl.minimum(position + token, last), first)
        page_offset = gl.load(row_pages + (token >> LOG_T)).to(gl.int64) * stride
        slot = token & (T - 1)
    else:
        slot = position - wrapped + token
        slot = gl.where(slot >= T, slot - T, slot)
        page_offset = (slot * 0).to(gl.int64)
    return page_offset, slot


@gluon.jit
def copy_tile(
    words_smem,
    scales_smem,
    words,
    scales,
    stride_words,
    stride_scales,
    position,
    wrapped,
    page,
    first,
    last,
    row_pages,
    T,
    LOG_T,
    N: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    TOKENS_A_ROW: gl.constexpr,
    PAGING: gl.constexpr,
):
    """Starts the copy of a tile's words to `[N / TOKENS_A_ROW, TOKENS_A_ROW · DP/8]` and of its scales to `[N · D/64]`.

    `words` and `scales` (int32) point at the head, without a table in the row's page. PAGING 0: slots follow one
    another; 1: the whole tile lies in `page`; 2: every 16 tokens may lie in another page; 3: slots wrap at T. With a
    padded head size scales stay behind (see `direct_scales`).
    """
    W: gl.constexpr = D // 8
    WP: gl.constexpr = DP // 8
    COLUMNS: gl.constexpr = TOKENS_A_ROW * WP
    ROWS: gl.constexpr = 128 // COLUMNS
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [ROWS, COLUMNS // 4], [1, 1], [1, 0])
    row = gl.arange(0, N // TOKENS_A_ROW, layout=gl.SliceLayout(1, WORDS))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WORDS))[None, :]
    if D == DP:
        S4: gl.constexpr = D // 64
        SCALES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
        unit = gl.arange(0, N * S4, layout=SCALES)
    if D == DP and (PAGING == 0 or PAGING == 1):
        if PAGING == 1:
            words += page.to(gl.int64) * stride_words
            scales += page.to(gl.int64) * stride_scales
            slot = gl.multiple_of(position & (T - 1), 16)
        else:
            slot = gl.multiple_of(position - wrapped, 16)
        # A lane's own part, then the part that all lanes share and that becomes an immediate of each copy.
        pointers = words + slot * W + ((row & (ROWS - 1)) * COLUMNS + column)
        pointers += (row & -ROWS) * COLUMNS
        async_copy.async_copy_global_to_shared(words_smem, pointers)
        async_copy.async_copy_global_to_shared(scales_smem, scales + slot * S4 + unit)
    else:
        token = row * TOKENS_A_ROW + column // WP
        page_offset, slot = token_slots(
            token, position, wrapped, first, last, row_pages, stride_words, T, LOG_T, PAGING
        )
        pointers = words + page_offset + slot * W + column % WP
        if D == DP:
            async_copy.async_copy_global_to_shared(words_smem, pointers)
            page_offset, slot = token_slots(
                unit // S4, position, wrapped, first, last, row_pages, stride_scales, T, LOG_T, PAGING
            )
            async_copy.async_copy_global_to_shared(scales_smem, scales + page_offset + slot * S4 + unit % S4)
        else:
            async_copy.async_copy_global_to_shared(words_smem, pointers, mask=column % WP + row * 0 < W)


@gluon.jit
def direct_scales(
    scales,
    stride,
    position,
    wrapped,
    first,
    last,
    row_pages,
    T,
    LOG_T,
    N: gl.constexpr,
    D: gl.constexpr,
    OPERANDS: gl.constexpr,
    BYTES: gl.constexpr,
    LAYOUT: gl.constexpr,
    PAGING: gl.constexpr,
):
    """int16 scale operands `[N, OPERANDS]` of BYTES bytes, 0 in the padding, read from `scales` (uint8) in place."""
    token = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT)), 1)
    index = gl.expand_dims(gl.arange(0, OPERANDS, layout=gl.SliceLayout(0, LAYOUT)), 0) * BYTES
    page_offset, slot = token_slots(token, position, wrapped, first, last, row_pages, stride, T, LOG_T, PAGING)
    pointers = scales + page_offset + slot * (D // 16) + index
    result = gl.load(pointers, mask=index + token * 0 < D // 16, other=0).to(gl.int16)
    if BYTES == 2:
        second = gl.load(pointers + 1, mask=index + 1 + token * 0 < D // 16, other=0).to(gl.int16)
        result = result | (second << 8)
    return result


@gluon.jit
def exact_operand(x, LARGEST: gl.constexpr):
    """float32 to f16 with a power of two for each row (LARGEST 1) or the whole (0): `(f16, factor)`."""
    largest = gl.max(gl.abs(x), 1)
    if LARGEST == 0:
        largest = gl.max(largest, 0)
    exponent = gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) & 255, 13)
    inverse = ((266 - exponent) << 23).to(gl.float32, bitcast=True)
    factor = ((exponent - 12) << 23).to(gl.float32, bitcast=True)
    if LARGEST == 1:
        inverse = gl.expand_dims(inverse, 1)
    return (x * inverse).to(gl.float16), factor


@gluon.jit
def in_order_of_lanes(x, DP: gl.constexpr):
    """`[rows, DP]` with its columns in the order in which lanes find those of K, which moves nothing between lanes."""
    ROWS: gl.constexpr = x.shape[0]
    KJ: gl.constexpr = words_per_lane(DP)[0]
    if DP == 256:
        x = gl.permute(gl.reshape(x, [ROWS, 2, 4, KJ, 2, 4]), (0, 1, 3, 5, 2, 4))
    else:
        x = gl.permute(gl.reshape(x, [ROWS, 4, KJ, 2, 4]), (0, 2, 4, 1, 3))
    return gl.reshape(x, [ROWS, DP])


@gluon.jit
def rotate(x, BLOCK: gl.constexpr):
    """Rows of `x` rotated in blocks of BLOCK elements, up to 256: see `format/rotation.py`."""
    element = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    for i in gl.static_range(8):
        if BLOCK > 1 << i:
            own = gl.where(element & (1 << i) == 0, x, -x)
            bits = gl.reshape(x.to(gl.int32, bitcast=True), [x.shape[0], x.shape[1] >> (i + 1), 2, 1 << i])
            # Both xor one gives the other, with one shuffle where another lane has it.
            other = gl.reshape(gl.expand_dims(gl.xor_sum(bits, 2), 2) ^ bits, x.shape).to(gl.float32, bitcast=True)
            x = own + gl.convert_layout(other, x.type.layout, assert_trivial=True)
    return x * BLOCK**-0.5


@gluon.jit
def load_query(
    q,
    b,
    head,
    block,
    queries,
    stride_b,
    stride_h,
    stride_l,
    stride_d,
    G: gl.constexpr,
    C: gl.constexpr,
    HS: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    ROTATION: gl.constexpr,
    B: gl.constexpr,
    MMA: gl.constexpr,
):
    """Queries as operand B `[DP, HS]`, elements in the order in which lanes find K, and the factor of each column.

    ROTATION: as stored K is rotated, or 0.
    A power of two puts each row's largest magnitude into [2^12, 2^13), so that f16 holds queries of any size.
    """
    Q: gl.constexpr = linear(k_exact_map(HS, DP))
    column = block * C + gl.arange(0, HS, layout=gl.SliceLayout(1, Q)) % C
    element = gl.arange(0, DP, layout=gl.SliceLayout(0, Q))[None, :]
    rows = (head * G + column % G).to(gl.int64) * stride_h + (column // G).to(gl.int64) * stride_l
    mask = (column < G * queries)[:, None]
    if D != DP:
        mask = mask & (element < D)
    pointers = q + b.to(gl.int64) * stride_b + rows[:, None] + element * stride_d
    query = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    if ROTATION > 0:
        query = rotate(query, ROTATION)
    query, factor = exact_operand(query, 1)
    query = gl.permute(in_order_of_lanes(query, DP), (1, 0))
    return gl.convert_layout(query, B, assert_trivial=True), gl.convert_layout(factor, gl.SliceLayout(0, MMA))


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
            s += gl.load(pointers, mask=inside, other=-float("inf")).to(gl.float32) * LOG2E
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
    HV: gl.constexpr = 2 * C
    OUT: gl.constexpr = linear(out_map(C, DVP))
    out = gl.reshape(acc, [DVP // 64, 2, 2, 8, 2, C])
    out = gl.convert_layout(gl.reshape(gl.permute(out, (5, 3, 0, 4, 1, 2)), [C, DVP]), OUT)
    column = block * C + gl.arange(0, C, layout=gl.SliceLayout(1, OUT))
    element = gl.arange(0, DVP, layout=gl.SliceLayout(0, OUT))
    base = row_head.to(gl.int64) * (G * queries)
    mask = (column < G * queries)[:, None]
    if DV != DVP:
        mask = mask & (element < DV)[None, :]
    rows = (base + column) * slot_stride + slot
    gl.store(partial_out + rows[:, None] * DV + element[None, :], out, mask=mask)
    index = gl.arange(0, HV, layout=gl.SliceLayout(0, MMA))
    mask = (index < C) & (block * C + index < G * queries)
    gl.store(partial_sum + (base + block * C + index) * slot_stride + slot, gl.max(total, 0), mask=mask)
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
def fold_waiting(waiting, which, acc, total, top, C: gl.constexpr, MMA: gl.constexpr):
    """Folds a partial result into an earlier one that waits in shared memory."""
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    top, old_weight, new_weight = fold_weights(waiting[2].index(which).load(ROW), top)
    old_weight = column_halves(old_weight, C, MMA)
    new_weight = column_halves(new_weight, C, MMA)
    old_total = gl.broadcast(gl.expand_dims(waiting[1].index(which).load(ROW), 0), total)[0]
    acc = fold(waiting[0].index(which).load(MMA), old_weight, acc, new_weight)
    return acc, fold(old_total, old_weight, total, new_weight), top


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
    HV: gl.constexpr = 2 * C
    N: gl.constexpr = EXACT_SLOTS
    K_EXACT: gl.constexpr = linear(k_exact_map(N, DP))
    V_EXACT: gl.constexpr = linear(v_exact_map(N, DVP))
    # Loads before their use: latency is most of what a program takes.
    token = first + gl.arange(0, N, layout=gl.SliceLayout(1, K_EXACT))
    element = gl.arange(0, DP, layout=gl.SliceLayout(0, K_EXACT))[None, :]
    seen, _ = exact_position(token, length, start, exact_from, ring, num_exact, num_sink_tokens)
    k_exact += b.to(gl.int64) * stride_ke_b + head.to(gl.int64) * stride_ke_h
    pointers = k_exact + (token * stride_ke_e)[:, None] + element
    k = gl.load(pointers, mask=seen[:, None] & (element < D), other=0.0)
    token = first + gl.arange(0, N, layout=gl.SliceLayout(1, V_EXACT))
    element = gl.arange(0, DVP, layout=gl.SliceLayout(0, V_EXACT))[None, :]
    seen, _ = exact_position(token, length, start, exact_from, ring, num_exact, num_sink_tokens)
    v_exact += b.to(gl.int64) * stride_ve_b + head.to(gl.int64) * stride_ve_h
    pointers = v_exact + (token * stride_ve_e)[:, None] + element
    v = gl.load(pointers, mask=seen[:, None] & (element < DV), other=0.0)
    query, factor = load_query(
        q, b, head, block, queries, stride_q_b, stride_q_h, stride_q_l, stride_q_d, G, C, HS, D, DP, 0, B, MMA
    )
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
    top = gl.max(s, 0)
    p = spread_probabilities(gl.exp2(s - finite(top)[None, :]), N, C, B)

    v, v_factor = exact_operand(v.to(gl.float32), 0)
    v = gl.permute(gl.reshape(v, [N // 8, 4, 2, 8, DVP // 64, 2, 4]), (4, 6, 3, 0, 2, 1, 5))
    v = gl.convert_layout(gl.reshape(v, [DVP // 2, 2 * N]), A, assert_trivial=True)
    acc = mma_v2(v, p, gl.zeros([DVP // 2, HV], gl.float32, MMA)) * v_factor
    ones = gl.full([16, 2 * N], 1.0, gl.float16, A)
    total = mma_v2(ones, p, gl.zeros([16, HV], gl.float32, MMA))
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
def decode_kernel(
    q,
    q_stored,
    k_data,
    k_scales,
    v_data,
    v_scales,
    k_global,
    lengths,
    q_lengths,
    starts,
    block_table,
    exact_from,
    bias,
    mask,
    k_exact,
    v_exact,
    partial_out,
    partial_max,
    partial_sum,
    stride_q_b,
    stride_q_h,
    stride_q_l,
    stride_q_d,
    stride_qs_b,
    stride_qs_h,
    stride_qs_l,
    stride_qs_d,
    stride_k_p,
    stride_k_h,
    stride_ks_p,
    stride_ks_h,
    stride_v_p,
    stride_v_h,
    stride_vs_p,
    stride_vs_h,
    stride_table,
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
    stride_k_global,
    batch,
    queries,
    page_size,
    log_page_size,
    window,
    num_sink_tokens,
    ring,
    num_exact,
    num_stored,
    num_blocks,
    tile_limit,
    program_limit,
    stored_slots,
    slot_stride,
    scale,
    softcap,
    multiplier_1,
    multiplier_5,
    multiplier_9,
    H: gl.constexpr,
    G: gl.constexpr,
    C: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    DV: gl.constexpr,
    DVP: gl.constexpr,
    ROTATION: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,
    STRIDE: gl.constexpr,
    STAGES: gl.constexpr,
    PAGING: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASK: gl.constexpr,
    EXACT: gl.constexpr,
    E4M3: gl.constexpr,
    PDL: gl.constexpr,
):
    """Partial attention of a tile, or of one to GROUPS groups, of a row, KV head and block of columns; see `decode.py`.

    `scale` is in units of log2(e). Words and scales are int32 views, scales of padded head sizes uint8.
    Accumulators are stored in units of v_global / CODE_SCALE.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HS: gl.constexpr = max(C, 8)
    HV: gl.constexpr = 2 * C
    W: gl.constexpr = DP // 8
    WV: gl.constexpr = DVP // 8
    KJ: gl.constexpr = words_per_lane(DP)[0]
    VJ: gl.constexpr = words_per_lane(DVP)[1]
    K_SCALES: gl.constexpr = linear(k_scale_map(N, DP))
    V_SCALES: gl.constexpr = linear(v_scale_map(N, DVP))
    multipliers = (multiplier_1, multiplier_5, multiplier_9)
    if PDL:
        gdc_launch_dependents()

    rows_heads = batch * H
    program = gl.program_id(0)
    if EXACT:
        # These are short: last, they fill the gaps that others leave.
        if program >= num_stored:
            program -= num_stored
            block = program % num_blocks
            row_head = program // num_blocks % rows_heads
            part = program // (num_blocks * rows_heads)
            b = row_head // H
            head = row_head % H
            length, n, start, begin, end, inner_begin, inner_end = row_range(
                b, lengths, q_lengths, starts, None, queries, page_size, num_sink_tokens, window, 2, False, False
            )
            ring_from = length
            if exact_from is not None:
                ring_from = gl.load(exact_from + b)
            exact_split(
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
                part * EXACT_SLOTS,
                stored_slots + part,
                slot_stride,
                length,
                n,
                start,
                ring_from,
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
                G,
                C,
                D,
                DP,
                DV,
                DVP,
                CAUSAL,
                WINDOW,
                SOFTCAP,
                MASK,
                MMA,
            )
            return
    # STRIDE neighbours read neighbouring tokens. Slots that short rows leave empty come last.
    slot = program // (STRIDE * num_blocks * rows_heads) * STRIDE + program % STRIDE
    row_head = program // (STRIDE * num_blocks) % rows_heads
    block = program // STRIDE % num_blocks
    b = row_head // H
    head = row_head % H

    length, n, start, begin, end, inner_begin, inner_end = row_range(
        b, lengths, q_lengths, starts, exact_from, queries, page_size, num_sink_tokens, window, PAGING, CAUSAL, WINDOW
    )
    SPAN: gl.constexpr = GROUP * STRIDE
    first_tile = begin // N
    end_tile = (end + N - 1) // N
    first_span = first_tile // (SPAN * GROUPS) * GROUPS
    if end_tile - first_tile <= tile_limit:
        first = first_tile + slot
        stop = gl.minimum(first + 1, end_tile)
        slot = first - first_span * SPAN
    else:
        spans = spans_of_program(first_span, gl.cdiv(end_tile, SPAN), program_limit // STRIDE)
        span = first_span + slot // STRIDE * spans
        first = first_of_group(span * SPAN + slot % STRIDE, first_tile, STRIDE)
        stop = gl.minimum((span + spans) * SPAN, end_tile)
    if first >= stop:
        return

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    k_smem = gl.allocate_shared_memory(gl.int32, [STAGES, N, W], swizzled(k_swizzle(DP)))
    v_smem = gl.allocate_shared_memory(gl.int32, [STAGES, N // 2, 2 * WV], swizzled(v_swizzle(DVP)))
    ks_smem = gl.allocate_shared_memory(gl.int32, [STAGES, N * DP // 64], FLAT)
    vs_smem = gl.allocate_shared_memory(gl.int32, [STAGES, N * DVP // 64], FLAT)
    # A group, and a pair of them, that wait to be folded.
    waiting_acc = gl.allocate_shared_memory(gl.float32, [2, DVP // 2, HV], ROWS)
    waiting_total = gl.allocate_shared_memory(gl.float32, [2, HV], FLAT)
    waiting_top = gl.allocate_shared_memory(gl.float32, [2, HS], FLAT)
    waiting = (waiting_acc, waiting_total, waiting_top)
    k_data += head.to(gl.int64) * stride_k_h
    v_data += head.to(gl.int64) * stride_v_h
    k_scales += head.to(gl.int64) * stride_ks_h
    v_scales += head.to(gl.int64) * stride_vs_h
    row_pages = block_table
    wrapped = 0
    page = b
    if PAGING == 0 or PAGING == 3:
        k_data += b.to(gl.int64) * stride_k_p
        v_data += b.to(gl.int64) * stride_v_p
        k_scales += b.to(gl.int64) * stride_ks_p
        v_scales += b.to(gl.int64) * stride_vs_p
        wrapped = first * N // page_size * page_size
    else:
        row_pages += b.to(gl.int64) * stride_table
        if PAGING == 1:
            page = gl.load(row_pages + (first * N >> log_page_size))
    for stage in gl.static_range(STAGES):
        ahead = first + stage * STRIDE
        if ahead < stop:
            copy_tile(
                k_smem.index(stage),
                ks_smem.index(stage),
                k_data,
                k_scales,
                stride_k_p,
                stride_ks_p,
                ahead * N,
                wrapped,
                page,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                D,
                DP,
                1,
                PAGING,
            )
        async_copy.commit_group()
        if ahead < stop:
            copy_tile(
                v_smem.index(stage),
                vs_smem.index(stage),
                v_data,
                v_scales,
                stride_v_p,
                stride_vs_p,
                ahead * N,
                wrapped,
                page,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                DV,
                DVP,
                2,
                PAGING,
            )
        async_copy.commit_group()
        if PAGING == 0 or PAGING == 3:
            wrapped = next_lap(wrapped, (ahead + STRIDE) * N, page_size)
        elif PAGING == 1:
            page = gl.load(row_pages + (gl.minimum((ahead + STRIDE) * N, end - 1) >> log_page_size))

    query, factor = load_query(
        q_stored,
        b,
        head,
        block,
        queries,
        stride_qs_b,
        stride_qs_h,
        stride_qs_l,
        stride_qs_d,
        G,
        C,
        HS,
        D,
        DP,
        ROTATION,
        B,
        MMA,
    )
    # Not 0, which -inf would turn into NaN.
    factor = gl.maximum(factor * (scale * CODE_SCALE * gl.load(k_global + head * stride_k_global)), 1.2e-38)
    column = block * C + gl.arange(0, HS, layout=gl.SliceLayout(0, MMA)) % C
    query_position = length - n + column // G
    if bias is not None:
        bias_row = ((b * H + head) * G + column % G).to(gl.int64) * queries + column // G
        shift = gl.load(bias + bias_row, mask=column < G * queries, other=0.0) * scale

    ones = gl.full([16, 2 * N], 1.0, gl.float16, A)
    acc = gl.zeros([DVP // 2, HV], gl.float32, MMA)
    total = gl.zeros([16, HV], gl.float32, MMA)
    top = gl.full([HS], -float("inf"), gl.float32, gl.SliceLayout(0, MMA))
    group_waits = 0
    pair_waits = 0
    KS_TYPE: gl.constexpr = gl.uint8 if DP == 64 else gl.int16
    VS_TYPE: gl.constexpr = gl.int16 if DVP == 256 else gl.uint8
    KR: gl.constexpr = 8 if DP == 256 else 4
    VR: gl.constexpr = 4 if DVP == 64 else 8
    stage = 0
    for i in range(first, stop, STRIDE):
        start = i * N
        ahead = i + STAGES * STRIDE
        whole = (start >= inner_begin) & (start + N <= inner_end)
        position = start + gl.arange(0, N, layout=gl.SliceLayout(1, MMA))

        async_copy.wait_group(2 * STAGES - 1)
        words = k_smem.index(stage).load(linear(k_word_map(N, DP)))
        if D == DP:
            ks = ks_smem.index(stage)._reinterpret(KS_TYPE, [N, KR], ROWS).load(K_SCALES).to(gl.int16)
        else:
            ks = direct_scales(
                k_scales,
                stride_ks_p,
                start,
                start // page_size * page_size,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                D,
                KR,
                2,
                K_SCALES,
                PAGING,
            )
        if DP == 256:
            words = gl.permute(gl.reshape(words, [N, 2, 4, KJ]), (0, 2, 1, 3))
            ks = gl.permute(gl.reshape(ks, [N, 2, 4]), (0, 2, 1))
            k = unpack_words(words, ks, multipliers, KJ, 2, E4M3)
            k = gl.permute(k, (0, 2, 7, 6, 5, 4, 1, 3))
        else:
            k = unpack_words(gl.reshape(words, [N, 4, KJ]), ks, multipliers, KJ, DP // 64, E4M3)
            k = gl.permute(k, (0, 6, 5, 4, 3, 1, 2))
        k = gl.convert_layout(gl.reshape(k, [N, DP]), A, assert_trivial=True)
        s = mma_v2(k, query, gl.zeros([N, HS], gl.float32, MMA))
        if ahead < stop:
            copy_tile(
                k_smem.index(stage),
                ks_smem.index(stage),
                k_data,
                k_scales,
                stride_k_p,
                stride_ks_p,
                ahead * N,
                wrapped,
                page,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                D,
                DP,
                1,
                PAGING,
            )
        async_copy.commit_group()

        FACTOR_LATER: gl.constexpr = bias is None and not SOFTCAP and not MASK
        if not FACTOR_LATER:
            s = s * factor[None, :]
            if bias is not None:
                s += shift[None, :]
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
        if not whole:
            seen = (position >= begin) & (position < end)
            s = visible_tokens(s, position, seen, query_position, window, CAUSAL, WINDOW)
        if FACTOR_LATER:
            tile_top = gl.max(s, 0) * factor
            shifted = gl.fma(s, gl.broadcast(factor[None, :], s)[0], gl.broadcast(-finite(tile_top)[None, :], s)[0])
        else:
            tile_top = gl.max(s, 0)
            shifted = s - finite(tile_top)[None, :]
        p = spread_probabilities(gl.exp2(shifted), N, C, B)

        async_copy.wait_group(2 * STAGES - 1)
        words = v_smem.index(stage).load(linear(v_word_map(N, DVP)))
        if DV == DVP:
            vs = (
                vs_smem.index(stage)._reinterpret(VS_TYPE, [N, VR], ROWS).load(gl.SliceLayout(2, V_SCALES)).to(gl.int16)
            )
        else:
            vs = direct_scales(
                v_scales,
                stride_vs_p,
                start,
                start // page_size * page_size,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                DV,
                VR,
                DVP // 128,
                gl.SliceLayout(2, V_SCALES),
                PAGING,
            )
        if not whole:
            # Slots never written may hold NaN scales, which a probability of 0 does not hide.
            token = start + gl.arange(0, N, layout=gl.SliceLayout(1, vs.type.layout))
            vs = gl.where(((token >= begin) & (token < end))[:, None], vs, gl.zeros_like(vs))
        vs = gl.expand_dims(vs, 2)
        if DVP == 64:
            vs = gl.broadcast(vs, gl.full([N, 4, 2], 0, gl.int16, V_SCALES))[0]
        vs = gl.reshape(gl.permute(gl.reshape(vs, [N // 8, 4, 2, 8]), (0, 2, 1, 3)), [N, 8])
        words = gl.permute(gl.reshape(words, [N // 8, 4, 2, 8, VJ]), (0, 2, 1, 3, 4))
        v = unpack_words(gl.reshape(words, [N, 8, VJ]), vs, multipliers, VJ, 2 if DVP == 256 else 1, E4M3)
        v = gl.reshape(v, [N // 8, 2, 4] + v.shape[1:])  # noqa: RUF005
        v = gl.permute(v, (8, 7, 6, 5, 3, 0, 1, 2, 4))
        v = gl.convert_layout(gl.reshape(v, [DVP // 2, 2 * N]), A, assert_trivial=True)
        tile_acc = mma_v2(v, p, gl.zeros([DVP // 2, HV], gl.float32, MMA))
        tile_total = mma_v2(ones, p, gl.zeros([16, HV], gl.float32, MMA))
        if ahead < stop:
            copy_tile(
                v_smem.index(stage),
                vs_smem.index(stage),
                v_data,
                v_scales,
                stride_v_p,
                stride_vs_p,
                ahead * N,
                wrapped,
                page,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                DV,
                DVP,
                2,
                PAGING,
            )
        async_copy.commit_group()
        if PAGING == 0 or PAGING == 3:
            wrapped = next_lap(wrapped, (ahead + STRIDE) * N, page_size)
        elif PAGING == 1:
            page = gl.load(row_pages + (gl.minimum((ahead + STRIDE) * N, end - 1) >> log_page_size))

        top, old_weight, new_weight = fold_weights(top, tile_top)
        old_weight = column_halves(old_weight, C, MMA)
        new_weight = column_halves(new_weight, C, MMA)
        acc = fold(acc, old_weight, tile_acc, new_weight)
        total = fold(total, old_weight, tile_total, new_weight)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        if (i % SPAN >= SPAN - STRIDE) & (i + STRIDE < stop):
            odd = i // SPAN % 2
            if odd & group_waits:
                acc, total, top = fold_waiting(waiting, 0, acc, total, top, C, MMA)
            put_aside(waiting, odd, acc, total, top)
            group_waits = 1 - odd
            pair_waits |= odd
            acc = gl.zeros([DVP // 2, HV], gl.float32, MMA)
            total = gl.zeros([16, HV], gl.float32, MMA)
            top = gl.full([HS], -float("inf"), gl.float32, gl.SliceLayout(0, MMA))
    async_copy.wait_group(0)
    if group_waits > 0:
        acc, total, top = fold_waiting(waiting, 0, acc, total, top, C, MMA)
    if pair_waits > 0:
        acc, total, top = fold_waiting(waiting, 1, acc, total, top, C, MMA)
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
