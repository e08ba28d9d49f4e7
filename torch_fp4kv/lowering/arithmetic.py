"""The format's arithmetic in Inductor's `ops`: what `ops/format` says in tensors, said for one element.

Same operations, same order, so the same bytes. Two things are said differently, because compilers would otherwise
round differently: no addition follows a rounded product directly (it would become a fused multiply-add), and divisions
ask for the rounding to nearest that a GPU's usual float32 division does not have (`_compat.divide`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import ops

from ..ops.format.constants import E2M1_THRESHOLDS, E4M3_MAX

F32, I32, I64 = torch.float32, torch.int32, torch.int64


def const(value: float, dtype: torch.dtype = F32) -> Any:
    return ops.constant(value, dtype)


def as_float(bits: Any) -> Any:
    """The float32 whose bits are the int32 `bits`."""
    return ops.to_dtype_bitcast(bits, F32, I32)


def as_bits(value: Any) -> Any:
    """The bits of a float32, as int32."""
    return ops.to_dtype_bitcast(value, I32, F32)


def is_nan(value: Any) -> Any:
    """A comparison, since Inductor's own `isnan` is not vectorised in C++."""
    return ops.ne(value, value)


def positive(value: Any) -> Any:
    """A positive float32, as it is.

    Where it is a constant, Inductor would fold arithmetic on it in float64, without the rounding of each step; it does
    not fold `abs`.
    """
    return ops.abs(value)


def e4m3_encode(value: Any) -> Any:
    """e4m3 bits (int32) of a non-negative float32; see `ops.format.e4m3.encode`."""
    value = ops.where(ops.lt(value, const(E4M3_MAX)), value, const(E4M3_MAX))
    bits = as_bits(value)
    odd = ops.bitwise_and(ops.bitwise_right_shift(bits, const(20, I32)), const(1, I32))
    rounded = ops.bitwise_right_shift(ops.add(ops.add(bits, const(0x7FFFF, I32)), odd), const(20, I32))
    normal = ops.sub(rounded, const(120 << 3, I32))
    # The product is exact, so that fusing it with the addition changes nothing; the sum's last bits are its integer.
    subnormal = ops.bitwise_and(as_bits(ops.add(ops.mul(value, const(2.0**9)), const(2.0**23))), const(15, I32))
    return ops.where(ops.lt(value, const(2.0**-6)), subnormal, normal)


def e4m3_decode(bits: Any) -> Any:
    """float32 value of non-negative e4m3 `bits` (int32)."""
    shifted = ops.bitwise_left_shift(bits, const(20, I32))
    normal = as_float(ops.add(shifted, const(120 << 23, I32)))
    subnormal = ops.mul(ops.to_dtype(bits, F32), const(2.0**-9))
    return ops.where(ops.lt(bits, const(8, I32)), subnormal, normal)


def e4m3_encode_signed(value: Any) -> Any:
    """e4m3 bits with sign (int32) of a float32; NaN gives 0."""
    value = ops.where(is_nan(value), const(0.0), value)
    sign = ops.to_dtype(ops.lt(value, const(0.0)), I32)
    return ops.bitwise_or(e4m3_encode(ops.abs(value)), ops.bitwise_left_shift(sign, const(7, I32)))


def with_sign(magnitude: Any, code: Any, smallest_negative: int) -> Any:
    """float32 `magnitude`, negated where the int32 `code` has its sign bit, that is from `smallest_negative` on."""
    return ops.where(ops.lt(code, const(smallest_negative, I32)), magnitude, ops.neg(magnitude))


def e2m1_encode(x: Any, bound: Any) -> Any:
    """4-bit code (int32) of float32 `x`, where `bound` is the value of code 1.0; see `ops.format.blocks.codes`."""
    magnitude = ops.abs(x)
    code = const(0, I32)
    for threshold, inclusive in E2M1_THRESHOLDS:
        limit = ops.mul(bound, const(threshold))
        passed = ops.ge(magnitude, limit) if inclusive else ops.gt(magnitude, limit)
        code = ops.add(code, ops.to_dtype(passed, I32))
    code = ops.where(ops.gt(bound, const(0.0)), code, const(0, I32))
    negative = ops.logical_and(ops.lt(x, const(0.0)), ops.gt(code, const(0, I32)))
    return ops.bitwise_or(code, ops.bitwise_left_shift(ops.to_dtype(negative, I32), const(3, I32)))


def e2m1_magnitude(code: Any) -> Any:
    """float32 magnitude of a 4-bit code (int32): 0, 0.5, 1, 1.5, 2, 3, 4, 6.

    As the largest of three lines through them: exact, and in C++ vectorised where bit casts are not.
    """
    m = ops.to_dtype(ops.bitwise_and(code, const(7, I32)), F32)
    up_to_two, up_to_four = ops.mul(m, const(0.5)), ops.sub(m, const(2.0))
    above = ops.sub(ops.mul(m, const(2.0)), const(8.0))
    return ops.maximum(ops.maximum(up_to_two, up_to_four), above)


def e2m1_nearest(y: Any) -> Any:
    """The e2m1 value nearest to a float32 in [0, 6]; see `_nearest` in `ops/kernels/nvfp4.py`."""
    big = ops.mul(ops.maximum(y, const(1.0 + 2.0**-21)), const(2.0**22))
    return ops.add(big, ops.sub(y, big))


def power_of_two(exponent: Any) -> Any:
    """float32 `2^(exponent - 127)` of an int32 in [0, 255]; see `ops.format.blocks.decode_block_fp4`."""
    normal = ops.bitwise_left_shift(exponent, const(23, I32))
    return as_float(ops.where(ops.eq(exponent, const(0, I32)), const(1 << 22, I32), normal))


def block_fp4_exponent(amax: Any) -> Any:
    """int32 `e + 127` of the smallest power of two `2^e ≥ amax / 6`, for a positive normal float32."""
    bits = as_bits(amax)
    above = ops.gt(ops.bitwise_and(bits, const(0x7FFFFF, I32)), const(0x400000, I32))
    exponent = ops.sub(ops.bitwise_right_shift(bits, const(23, I32)), const(2, I32))
    return ops.add(exponent, ops.to_dtype(above, I32))


def nibble(word: Any, index: Any) -> Any:
    """4-bit code (int32) number `index` (a size expression, 0 … 15) of an int64 `word`."""
    shifted = ops.bitwise_right_shift(word, ops.index_expr(index * 4, I64))
    return ops.bitwise_and(ops.to_dtype(shifted, I32), const(15, I32))
