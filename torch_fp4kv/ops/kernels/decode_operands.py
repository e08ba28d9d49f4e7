"""How the decode kernel makes operands of `mma.m16n8k16` in registers: K and V from words, P, and the queries.

Letters are those of `decode.py`; DP is a padded head size."""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .decode_layouts import k_exact_map, words_per_lane
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
        if 1 << i < BLOCK:
            own = gl.where(element & (1 << i) == 0, x, -x)
            bits = gl.reshape(x.to(gl.int32, bitcast=True), [x.shape[0], x.shape[1] >> (i + 1), 2, 1 << i])
            # Both xor one gives the other, with one shuffle where another lane has it.
            other = gl.reshape(gl.expand_dims(gl.xor_sum(bits, 2), 2) ^ bits, x.shape).to(gl.float32, bitcast=True)
            x = own + gl.convert_layout(other, x.type.layout, assert_trivial=True)
    return x * BLOCK**-0.5


@gluon.jit
def load_query(
    q,
    bias,
    order,
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
):
    """float32 queries `[HS, DP]` of a block of columns, in `order` if there is one, and their products with `bias`
    `[HS]` (0 without one): see `format/transform.py`."""
    Q: gl.constexpr = linear(k_exact_map(HS, DP))
    column = block * C + gl.arange(0, HS, layout=gl.SliceLayout(1, Q)) % C
    channel, inside = channels(order, head, D, DP, Q)
    rows = (head * G + column % G).to(gl.int64) * stride_h + (column // G).to(gl.int64) * stride_l
    mask = (column < G * queries)[:, None]
    if D != DP:
        mask = mask & inside
    pointers = q + b.to(gl.int64) * stride_b + rows[:, None] + channel * stride_d
    query = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    products = gl.zeros([HS], gl.float32, gl.SliceLayout(1, Q))
    if bias is not None:
        products = gl.sum(query * gl.load(bias + head * D + channel, mask=inside, other=0.0), 1)
    return query, products


@gluon.jit
def channels(order, head, D: gl.constexpr, DP: gl.constexpr, Q: gl.constexpr):
    """Channels `[1, DP]` of `head` as stored K has them, and which of these there are."""
    element = gl.arange(0, DP, layout=gl.SliceLayout(0, Q))[None, :]
    inside = element < D
    channel = element
    if order is not None:
        channel = gl.load(order + head * D + element, mask=inside, other=0)
    return channel, inside


@gluon.jit
def stored_query(query, factors, order, head, D: gl.constexpr, ROTATION: gl.constexpr):
    """What stored K meets of `query` `[HS, DP]`, which is in `order`."""
    if factors is not None:
        LAYOUT: gl.constexpr = query.type.layout
        channel, inside = channels(order, head, D, query.shape[1], LAYOUT)
        query = query / gl.load(factors + head * D + channel, mask=inside, other=1.0)
    if ROTATION > 0:
        query = rotate(query, ROTATION)
    return query


@gluon.jit
def query_operand(query, B: gl.constexpr, MMA: gl.constexpr):
    """Operand B `[DP, HS]` of `query` `[HS, DP]`, elements in the order in which lanes find K, and columns' factors.

    A power of two puts each row's largest magnitude into [2^12, 2^13), so that f16 holds queries of any size.
    """
    DP: gl.constexpr = query.shape[1]
    query, factor = exact_operand(query, 1)
    query = gl.permute(in_order_of_lanes(query, DP), (1, 0))
    return gl.convert_layout(query, B, assert_trivial=True), gl.convert_layout(factor, gl.SliceLayout(0, MMA))
