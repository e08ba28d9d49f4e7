"""PTX that turns words of eight e2m1 codes into scaled f16 pairs, for the decode kernel.

A word holds nibbles e0 … e7 of consecutive elements, e0 lowest. f16 keeps its sign at bit 15 and reads the three
magnitude bits of a code, put at bits 11:9, as `magnitude · 2^-14`, zero and 0.5 included. So one code per half word:

    shifted = (code << 9) + 0x7000    sign at bit 12: adding 7 << 12 carries it to bit 15 and leaves 14:12 to mask
    pair    = shifted & 0x8E008E00    exact value · 2^-14

Four such pairs, (e0, e4), (e1, e5), (e2, e6), (e3, e7), take one mask of the low nibbles, a subtraction that leaves the
high ones, and a shift-with-add and a mask each. The integer ALU is the busiest pipe, so three of the shifts are
multiplications, which run beside the float ones; `ptxas` would undo them for constant powers of two, hence the
multipliers come in as arguments. Multiplying by the e4m3 block scale is exact: a product has at most six significant
bits and is a multiple of 2^-24, the smallest f16.
"""

from __future__ import annotations

from triton import constexpr_function

SHIFTS = (2, 32, 512)
"""Multipliers that the assembly takes as operands."""


@constexpr_function
def unpack_asm(num_words: int, scales_per_operand: int, has_e4m3: bool) -> str:
    """PTX for `num_words` words that share one operand of 1 or 2 block scales (bytes, first block lowest).
    With 0 scales an operand, it has one for the lower and one for the upper half of all words.
    Outputs are 16-bit registers: word by word, pairs (e0, e4), (e1, e5), (e2, e6), (e3, e7), low half first. Inputs are
    the words, the scale operand and the three multipliers. `has_e4m3`: the target converts e4m3 (sm_89); else the byte
    is placed into an f16 and rescaled.
    """
    num_outputs = 8 * num_words
    words = [f"${num_outputs + i}" for i in range(num_words)]
    scales, mul_1, mul_5, mul_9 = (f"${num_outputs + num_words + i}" for i in range(4))
    lines = [".reg .b32 low, high, pair, both, scale0, scale1;", ".reg .b16 half0, half1;"]
    if has_e4m3:
        lines += [f"cvt.rn.f16x2.e4m3x2 both, {scales};"]
    else:
        lines += [
            f"cvt.u32.u16 both, {scales};",
            "prmt.b32 both, both, 0, 0x4140;",
            "and.b32 both, both, 0x007F007F;",
            "shl.b32 both, both, 7;",
            "mov.b32 scale0, 0x5C005C00;",
            "mul.rn.f16x2 both, both, scale0;",
        ]
    lines += ["mov.b32 {half0, half1}, both;", "mov.b32 scale0, {half0, half0};", "mov.b32 scale1, {half1, half1};"]
    output = 0
    for i, word in enumerate(words):
        scale = f"scale{i * scales_per_operand // num_words}" if scales_per_operand else "both"
        lines += [f"and.b32 low, {word}, 0x0F0F0F0F;", f"sub.u32 high, {word}, low;"]
        for shift in (
            f"mad.lo.u32 pair, low, {mul_9}, 0x70007000;",
            f"mad.lo.u32 pair, high, {mul_5}, 0x70007000;",
            f"mad.lo.u32 pair, low, {mul_1}, 0x70007000;",
            "mad.hi.u32 pair, high, 0x20000000, 0x70007000;",
        ):
            lines += [
                shift,
                "and.b32 pair, pair, 0x8E008E00;",
                f"mul.rn.f16x2 pair, pair, {scale};",
                f"mov.b32 {{${output}, ${output + 1}}}, pair;",
            ]
            output += 2
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def unpack_constraints(num_words: int) -> str:
    """Constraints of `unpack_asm`."""
    return ",".join(["=h"] * (8 * num_words) + ["r"] * num_words + ["h"] + ["r"] * 3)
