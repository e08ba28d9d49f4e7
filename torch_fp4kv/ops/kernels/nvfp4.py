"""Device functions of the format, shared by the append, quantise, dequantise and prefill kernels.

N is the number of blocks a program holds. A block of 16 elements is held as two halves `[N, 8]`: a half of 16-bit
elements is one 16-byte load, and every value of a block stays in one thread, so nothing is shuffled.

`FAST` selects what the interpreter and other vendors lack (a saturating PTX fma, `max` that drops NaN, the hardware's
rounding to bf16). Both settings give the same bytes; kernels that use these functions are launched with
`enable_fp_fusion=False`, because a fused multiply-add rounds once where the format rounds twice.
"""

from __future__ import annotations

import contextlib
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FAST = not INTERPRETED and torch.version.hip is None
SCALE = tl.constexpr(2.0**34)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes `tensor`'s GPU the current one for a launch; Triton would launch on whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@triton.jit
def e4m3_encode(value):
    """Non-negative float32 to e4m3 bits (int32): nearest even, saturating; NaN gives 448."""
    value = tl.where(value < 448.0, value, 448.0)
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = (value + 16384.0).to(tl.int32, bitcast=True) & 15
    return tl.where(value < 0.015625, subnormal, normal)


@triton.jit
def e4m3_decode(bits):
    """Non-negative e4m3 bits (int32) to float32."""
    normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)


@triton.jit
def e4m3_encode_signed(value):
    """float32 to e4m3 bits with sign (int32); NaN gives 0."""
    value = tl.where(value == value, value, 0.0)
    return e4m3_encode(tl.abs(value)) | tl.where(value < 0, 0x80, 0)


@triton.jit
def e4m3_decode_signed(bits):
    """e4m3 bits with sign (int32) to float32."""
    magnitude = e4m3_decode(bits & 0x7F)
    return tl.where(bits >= 0x80, -magnitude, magnitude)


@triton.jit
def round_to(value, dtype: tl.constexpr, FAST: tl.constexpr):
    """float32 to `dtype`, nearest even."""
    if dtype == tl.bfloat16 and not FAST:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)
        result = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(dtype)
    return result


@triton.jit
def butterfly(x, APART: tl.constexpr):
    """Of each two elements of float32 `x` that are APART (a power of two) from each other, sum and difference."""
    pairs = tl.reshape(x, [x.numel // (2 * APART), 2, APART])
    bits = pairs.to(tl.int32, bitcast=True)
    # Both xor one gives the other: one shuffle where a sum and a difference would take two.
    other = (tl.xor_sum(bits, axis=1)[:, None, :] ^ bits).to(tl.float32, bitcast=True)
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None]
    return tl.reshape(other + sign * pairs, x.shape)


@triton.jit
def rotate(lo, hi, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Float32 halves `[N, 8]` of consecutive blocks, rotated in blocks of BLOCK elements: see `format/rotation.py`."""
    for i in tl.static_range(3):
        if 1 << i < BLOCK:
            lo = butterfly(lo, 1 << i)
            hi = butterfly(hi, 1 << i)
    if BLOCK > 8:
        lo, hi = lo + hi, lo - hi
    for i in tl.static_range(4, 13):
        if 1 << i < BLOCK:
            lo = butterfly(lo, 1 << (i - 1))
            hi = butterfly(hi, 1 << (i - 1))
    return lo * NORM, hi * NORM


@triton.jit
def amax_of(lo, hi, FAST: tl.constexpr):
    """Largest magnitude `[N]` of two float32 halves `[N, 8]`; NaN counts as 0."""
    if not FAST:
        lo = tl.where(lo == lo, lo, 0.0)
        hi = tl.where(hi == hi, hi, 0.0)
    amax = tl.maximum(tl.max(tl.abs(lo), axis=1), tl.max(tl.abs(hi), axis=1))
    return tl.maximum(amax, 0.0)


@triton.jit
def _exceeds(x, scaled_limit, SIGN: tl.constexpr, FAST: tl.constexpr):
    """1.0 where `SIGN * x * 2^34 > -scaled_limit`, else 0.0 and for NaN.

    The smallest limit is 2^-11, so that an ulp of it is 2^-34 and any x above a limit saturates to exactly 1. This runs
    on the fma pipe, which idles, where a comparison and a selection would take the integer pipe.
    """
    if not FAST:
        result = tl.where(x * (SIGN * SCALE) + scaled_limit > 0, 1.0, 0.0)
    elif SIGN > 0:
        result = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f50800000, $2;", "=f,f,f", [x, scaled_limit], tl.float32, True, 1
        )
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0fD0800000, $2;", "=f,f,f", [x, scaled_limit], tl.float32, True, 1
        )
    return result


@triton.jit
def _below(limit):
    """The float32 before `limit`, so that `x >= limit` is `x > _below(limit)`."""
    return (limit.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)


@triton.jit
def _half_codes(x, bound, FAST: tl.constexpr):
    """The eight codes of a half `[N, 8]` as int32 `[N]`.

    The code is the number of thresholds passed, or 4 plus those of the upper three. Each is 0.0 or 1.0 and enters with
    the weight of its nibble: four nibbles are exact in a float32, so that packing needs no integer instruction.
    """
    unit = bound[:, None]
    magnitude = tl.abs(x)
    upper = magnitude > _below(1.75 * unit)
    first = _exceeds(magnitude, tl.where(upper, 2.5 * unit * -SCALE, 0.25 * unit * -SCALE), 1, FAST)
    second = _exceeds(magnitude, tl.where(upper, _below(3.5 * unit) * -SCALE, _below(0.75 * unit) * -SCALE), 1, FAST)
    third = _exceeds(magnitude, tl.where(upper, 5.0 * unit * -SCALE, 1.25 * unit * -SCALE), 1, FAST)
    negative = _exceeds(x, 0.25 * unit * -SCALE, -1, FAST)
    weight = ((127 + 4 * (tl.arange(0, 8)[None, :] & 3)) << 23).to(tl.float32, bitcast=True)
    code = tl.where(upper, 4.0 * weight, 0.0)
    code = tl.fma(first, weight, code)
    code = tl.fma(second, weight, code)
    code = tl.fma(third, weight, code)
    code = tl.fma(negative, 8.0 * weight, code)
    quads = tl.sum(tl.reshape(code, [code.shape[0], 2, 4]), axis=2).to(tl.int32)
    return tl.sum(quads << (16 * tl.arange(0, 2)[None, :]), axis=1)


@triton.jit
def _join(lo, hi):
    """Two int32 `[N]` to int64 words."""
    return (hi.to(tl.int64) << 32) | (lo.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _nearest(y):
    """The e2m1 value nearest to `y` in [0, 6].

    A float32 near `2^22 · y` has steps as far apart as e2m1 has at y, of which those at 1 serve below. Subtracting
    keeps the difference among them also where a sum would pass the next power of two.
    """
    big = tl.maximum(y, 1.0 + 2.0**-21)
    return tl.fma(big, 4194304.0, tl.fma(big, -4194304.0, y))


@triton.jit
def _error(magnitude, bound, inverse):
    """What the nearest codes lack of a half `[N, 8]` of magnitudes without NaN; `inverse` is about `1 / bound`.

    No threshold is looked at: near one, both codes have nearly the same error.
    """
    value = _nearest(tl.minimum(magnitude * inverse[:, None], 6.0))
    return magnitude - value * bound[:, None]


@triton.jit
def _scale_bits(amax, g, divisor, SCALE_MAX: tl.constexpr):
    """e4m3 bits (int32) of the block scale for one `divisor` of a block's amax."""
    scale = amax * tl.math.div_rn(1.0, g * divisor)
    if SCALE_MAX < 448.0:
        scale = tl.minimum(scale, SCALE_MAX)
    return e4m3_encode(scale)


@triton.jit
def _search(lo, hi, amax, g, unit, DIVISORS: tl.constexpr, SCALE_MAX: tl.constexpr):
    """Scale bits `[N]` of the divisor of least squared error: see `blocks.encode`."""
    lo = tl.where(lo == lo, tl.abs(lo), 0.0)
    hi = tl.where(hi == hi, tl.abs(hi), 0.0)
    largest = tl.maximum(tl.max(lo, axis=1), tl.max(hi, axis=1))
    best = tl.zeros(amax.shape, tl.int32)
    error = tl.zeros(amax.shape, tl.float32)
    # A loop, not unrolled: nine candidates in a row take long to compile and run out of the code cache.
    for i in tl.range(0, len(DIVISORS), num_stages=1):
        divisor = DIVISORS[0]
        for j in tl.static_range(1, len(DIVISORS)):
            divisor = tl.where(i == j, DIVISORS[j], divisor)
        bits = _scale_bits(amax, g, divisor, SCALE_MAX)
        scale = e4m3_decode(bits)
        bound = scale * unit
        inverse = tl.where(bits > 0, 1.0 / bound, 0.0)
        lo_error = _error(lo, bound, inverse)
        hi_error = _error(hi, bound, inverse)
        new_error = tl.sum(tl.fma(hi_error, hi_error, lo_error * lo_error), axis=1)
        # No divisor leaves a largest code below 3 to a scale for which that matters.
        code = tl.where(largest > 5.0 * bound, 6.0, tl.where(largest >= 3.5 * bound, 4.0, 3.0))
        readable = code * scale <= 448.0
        better = (i == 0) | ((new_error < error) & readable)
        best = tl.where(better, bits, best)
        error = tl.where(better, new_error, error)
    return best


@triton.jit
def encode(lo, hi, g, DIVISORS: tl.constexpr, SCALE_MAX: tl.constexpr, FAST: tl.constexpr):
    """NVFP4 `(words int64 [N], scale bits int32 [N])` of float32 halves `[N, 8]` under `g`, float32 `[]` or `[N]`.

    `DIVISORS` is the entry of `blocks.SCALE_RULES`, `SCALE_MAX` the largest block scale. Values and bounds are compared
    after an exact scaling by the power of two that brings `g` into [1, 2), which leaves every comparison as it was and
    fixes the range of the bounds.
    """
    amax = amax_of(lo, hi, FAST)
    inverse = ((254 << 23) - (g.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
    unit = g * inverse
    # A scalar, or one factor a block.
    if len(g.shape) == 1:
        lo *= inverse[:, None]
        hi *= inverse[:, None]
    else:
        lo *= inverse
        hi *= inverse
    if len(DIVISORS) > 1:
        bits = _search(lo, hi, amax, g, unit, DIVISORS, SCALE_MAX)
    else:
        bits = _scale_bits(amax, g, DIVISORS[0], SCALE_MAX)
    bound = tl.where(bits > 0, e4m3_decode(bits) * unit, float("inf"))
    return _join(_half_codes(lo, bound, FAST), _half_codes(hi, bound, FAST)), bits


@triton.jit
def encode_block_fp4(lo, hi, FAST: tl.constexpr):
    """Block-FP4 `(words int64 [N], exponents int32 [N])` of float32 halves `[N, 8]`: see `blocks.encode_block_fp4`."""
    amax = tl.minimum(tl.maximum(amax_of(lo, hi, FAST), 2.0**-120), 2.0**120)
    exponent = (tl.math.div_rn(amax, 6.0).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    bound = tl.full(amax.shape, 1.0, tl.float32)
    return _join(_half_codes(lo * inverse, bound, FAST), _half_codes(hi * inverse, bound, FAST)), exponent


@triton.jit
def power_of_two(exponent):
    """`2^(exponent - 127)` (float32) of a block-FP4 scale (int32)."""
    # 2^-127 is subnormal and written as such.
    return tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def decode_half(packed):
    """The eight e2m1 values `[N, 8]` (float32) of int32 `[N]`."""
    code = packed[:, None] >> (4 * tl.arange(0, 8)[None, :])
    # As float32 bits the magnitude is its value times 2^-126: the two formats are alike, subnormal included.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126
