"""The format as a scalar program, one block at a time: the specification that every backend's bytes are held against.

Pure Python. float32 is emulated by rounding each float64 result once: for +, *, / of float32 operands that gives the
float32 result exactly (the float64 significand is wider than 2·24 + 2 bits).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from .constants import BLOCK, E2M1_THRESHOLDS, E2M1_VALUES, E4M3_MAX


def f32(value: float) -> float:
    """`value` rounded to float32 (nearest even; overflow gives ±inf)."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def e4m3_value(bits: int) -> float:
    """Value of the non-negative e4m3 `bits`."""
    exponent, mantissa = bits >> 3, bits & 7
    return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)


def e4m3_bits(value: float) -> int:
    """Bits of the e4m3 number nearest to the non-negative `value`, ties to even, saturating at 448 (0x7E)."""
    if value >= E4M3_MAX or math.isnan(value):
        return 0x7E
    return min(range(0x7F), key=lambda bits: (abs(e4m3_value(bits) - value), bits & 1))


def quantize_block(block: Sequence[float], global_scale: float) -> tuple[list[int], int]:
    """`(codes, scale_bits)` of 16 float32 values under the decode scale `global_scale`."""
    assert len(block) == BLOCK
    amax = max((abs(x) for x in block if not math.isnan(x)), default=0.0)
    inverse = f32(1.0 / f32(6.0 * global_scale))
    scale = e4m3_bits(f32(amax * inverse))
    bound = f32(e4m3_value(scale) * global_scale)
    return [_code(x, bound) if scale else 0 for x in block], scale


def dequantize_block(codes: Sequence[int], scale_bits: int, global_scale: float) -> list[float]:
    """float32 values of a block."""
    bound = f32(e4m3_value(scale_bits) * global_scale)
    return [f32(math.copysign(E2M1_VALUES[code & 7], -1.0 if code & 8 else 1.0) * bound) for code in codes]


def _code(x: float, bound: float) -> int:
    if math.isnan(x):
        return 0
    magnitude = 0
    for threshold, inclusive in E2M1_THRESHOLDS:
        limit = f32(threshold * bound)
        magnitude += abs(x) >= limit if inclusive else abs(x) > limit
    return magnitude | (8 if x < 0 and magnitude else 0)
