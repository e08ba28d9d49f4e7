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
# columns 0 to 3 and into the upper for 4 to 7.
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
cvt.rn.f16x2.f32 p, $3, $2;
movmatrix.sync.aligned.m8n8.trans.b16 p, p;
mov.b32 {$0, $1}, p;
}""")
# The lower halves of two words, and the upper halves.
PAIR_ASM = gl.constexpr("""prmt.b32 $0, $2, $3, 0x5410;
prmt.b32 $1, $2, $3, 0x7632;""")


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
    """float32 `[N, columns]` to operand B: `[N, C]`, but for 4 columns `[2N, 8]`, whose row 2t + h and column
    4h' + column is P where h = h', else 0."""
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
        out = gl.inline_asm_elementwise(P_ASM, "=h,=h,r,r", [p0, p1], dtype=(gl.float16,) * 2, is_pure=True, pack=1)
        pairs = gl.reshape(gl.join(out[0], out[1]), [N // 8, 8, C // 8, 4, 2])
        spread = gl.reshape(gl.permute(pairs, (0, 3, 4, 2, 1)), [N, C])
    return gl.convert_layout(spread, B, assert_trivial=True)


@gluon.jit
def pair_tokens(words, scales):
    """V's words `[n, 4, 2, 8, J]` and scales `[n, 4, 2, 8]` with the two tokens of dimension 2 in one word.

    Returns words `[n, 4, 8, 2J]`, each four elements of the first token (lower half) and of the second, and their
    scales `[n, 4, 8]` (first token lowest); for J 4, which is two blocks, `[n, 4, 8, 2, J]` and `[n, 4, 8, 2]`.
    """
    J: gl.constexpr = words.shape[4]
    first, second = gl.split(gl.permute(words, (0, 1, 3, 4, 2)))
    lower, upper = gl.inline_asm_elementwise(
        PAIR_ASM, "=&r,=&r,r,r", [first, second], dtype=(gl.int32,) * 2, is_pure=True, pack=1
    )
    words = gl.join(lower, upper)
    first, second = gl.split(gl.permute(scales, (0, 1, 3, 2)))
    if J == 4:
        words = gl.reshape(words, [words.shape[0], 4, 8, 2, 4])
        scales = gl.join((first & 255) | (second << 8), ((first >> 8) & 255) | (second & -256))
    else:
        words = gl.reshape(words, [words.shape[0], 4, 8, 2 * J])
        scales = first | (second << 8)
    return words, scales


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
    """Queries `[HS, DP]` of a block of columns, in `order` if there is one."""
    Q: gl.constexpr = linear(k_exact_map(HS, DP))
    column = block * C + gl.arange(0, HS, layout=gl.SliceLayout(1, Q)) % C
    channel, inside = channels(order, head, D, DP, Q)
    rows = (head * G + column % G).to(gl.int64) * stride_h + (column // G).to(gl.int64) * stride_l
    mask = (column < G * queries)[:, None]
    if D != DP:
        mask = mask & inside
    pointers = q + b.to(gl.int64) * stride_b + rows[:, None] + channel * stride_d
    return gl.load(pointers, mask=mask, other=0.0)


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
def stored_query(query, bias, factors, order, head, D: gl.constexpr, ROTATION: gl.constexpr):
    """What stored K meets of float32 `query` `[HS, DP]`, which is in `order`, and the products with `bias` `[HS]` (0
    without one): see `format/transform.py`."""
    LAYOUT: gl.constexpr = query.type.layout
    products = gl.zeros([query.shape[0]], gl.float32, gl.SliceLayout(1, LAYOUT))
    if bias is not None:
        channel, inside = channels(order, head, D, query.shape[1], LAYOUT)
        products = gl.sum(query * gl.load(bias + head * D + channel, mask=inside, other=0.0), 1)
    if factors is not None:
        channel, inside = channels(order, head, D, query.shape[1], LAYOUT)
        query = query / gl.load(factors + head * D + channel, mask=inside, other=1.0)
    if ROTATION > 0:
        query = rotate(query, ROTATION)
    return query, products


@gluon.jit
def query_operand(query, B: gl.constexpr, MMA: gl.constexpr):
    """Operand B `[DP, HS]` of `query` `[HS, DP]`, elements in the order in which lanes find K, and columns' factors.

    A power of two puts each row's largest magnitude into [2^12, 2^13), so that f16 holds queries of any size.
    """
    DP: gl.constexpr = query.shape[1]
    query, factor = exact_operand(query, 1)
    query = gl.permute(in_order_of_lanes(query, DP), (1, 0))
    return gl.convert_layout(query, B, assert_trivial=True), gl.convert_layout(factor, gl.SliceLayout(0, MMA))
