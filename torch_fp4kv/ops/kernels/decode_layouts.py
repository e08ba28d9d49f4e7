"""Which lane of the decode kernel's warp holds what, as plain index maths, evaluated while the kernel compiles.

Letters: N tokens a tile, D head size padded to 64, 128 or 256, W = D/8 words of eight codes a token, C columns.
A map is `(registers, lanes, shape)`: for each bit of the register index and of the lane index the coordinates that it
flips, as Triton's linear layouts have it. Lane 4·g + c is (g, c), as in `mma.m16n8k16`, whose operand A gives lane
(g, c) rows g and g + 8 and columns 2c, 2c + 1, 2c + 8 and 2c + 9.

Scores are K · Qᵀ. The order of a contraction is free, so the columns of K are the elements in the order in which lane
c finds them in its own words, and Q is put into that order (`in_order_of_lanes`). Outputs are Vᵀ · Pᵀ, where a register
has two tokens of one element, whose words are put together before they are unpacked (`pair_tokens`). Four columns fill
half of a product: a register there has two elements of one token, so that no word is taken apart, and operand B has P
and 0 in alternate rows, so that columns come in two halves, one for each element of a pair.
"""

from __future__ import annotations

from triton import constexpr_function


@constexpr_function
def bits(size: int) -> list[int]:
    """1, 2, 4, … below `size`, a power of two."""
    return [1 << i for i in range(size.bit_length() - 1)]


@constexpr_function
def words_per_lane(d: int) -> tuple[int, int]:
    """`(K, V)` words that a lane reads at once from a token: K's go to 4 lanes, at most 16 bytes each; V's to 8."""
    return min(d // 32, 4), d // 64


@constexpr_function
def k_word_map(n: int, d: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """`[N, W]` words of K: lane (g, c) has tokens g + 8i and words c·k … c·k + k - 1, k = words_per_lane(d)[0]."""
    k = words_per_lane(d)[0]
    registers = [[0, w] for w in bits(k)] + ([[0, 16]] if d == 256 else [])
    return registers + [[t, 0] for t in bits(n)[3:]], [[0, k], [0, 2 * k], [1, 0], [2, 0], [4, 0]], [n, d // 8]


@constexpr_function
def k_scale_map(n: int, d: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """`[N, 4]` (`[N, 8]` for D 256) scale operands of K: one byte (D 64) or two, those of the lane's words."""
    registers = [[0, 4]] if d == 256 else []
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return registers + [[t, 0] for t in bits(n)[3:]], lanes, [n, 8 if d == 256 else 4]


@constexpr_function
def k_exact_map(n: int, d: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """`[N, D]` exact K, where its words would be."""
    k = words_per_lane(d)[0]
    registers = [[0, e] for e in bits(8 * k)] + ([[0, 128]] if d == 256 else [])
    return registers + [[t, 0] for t in bits(n)[3:]], [[0, 8 * k], [0, 16 * k], [1, 0], [2, 0], [4, 0]], [n, d]


@constexpr_function
def v_word_map(n: int, d: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """`[N/2, 2W]` words of V, two tokens a row: lane (g, c) has words g·k … g·k + k - 1 of both, rows c + 4i."""
    k = words_per_lane(d)[1]
    registers = [[0, w] for w in bits(k)] + [[0, d // 8]] + [[t, 0] for t in bits(n // 2)[2:]]
    return registers, [[1, 0], [2, 0], [0, k], [0, 2 * k], [0, 4 * k]], [n // 2, d // 4]


@constexpr_function
def v_scale_map(n: int, d: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """`[N, 8, 1]` (`[N, 4, 2]` for D 64) scale operands of V by token; D 64 has one for two lanes, D 256 two bytes."""
    lanes = [[0, 0, 1], [0, 1, 0], [0, 2, 0]] if d == 64 else [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    registers = [[1, 0, 0]] + [[t, 0, 0] for t in bits(n)[3:]]
    return registers, [[2, 0, 0], [4, 0, 0], *lanes], [n, 4, 2] if d == 64 else [n, 8, 1]


@constexpr_function
def v_exact_map(n: int, d: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """`[N, D]` exact V, where its words would be."""
    e = 8 * words_per_lane(d)[1]
    registers = [[0, x] for x in bits(e)] + [[1, 0]] + [[t, 0] for t in bits(n)[3:]]
    return registers, [[2, 0], [4, 0], [0, e], [0, 2 * e], [0, 4 * e]], [n, d]


@constexpr_function
def out_map(c: int, d: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """`[C, D]` outputs as the accumulators hold them, with a lane's neighbouring elements in neighbouring registers."""
    k = words_per_lane(d)[1]
    words = [[0, 8 * w] for w in bits(k)]
    elements = [[0, 8 * k], [0, 16 * k], [0, 32 * k]]
    if c == 4:
        return [[0, 1], [0, 2], [1, 0], *words], [[2, 0], [0, 4], *elements], [c, d]
    tiles = [[t, 0] for t in bits(c)[3:]]
    return [[0, 1], [0, 2], [0, 4], [1, 0], *tiles, *words], [[2, 0], [4, 0], *elements], [c, d]


@constexpr_function
def k_swizzle(d: int) -> tuple[int, int, int]:
    """`(vec, per_phase, max_phase)` in words that spreads K's reads over all banks."""
    return (16, 1, 2) if d == 256 else (1, 1, 1)


@constexpr_function
def v_swizzle(d: int) -> tuple[int, int, int]:
    """Likewise for V, in rows of two tokens."""
    return (8, 2, 2) if d == 64 else (8, 1, 4)
