"""float8_e4m3fn bits by integer arithmetic: the same result on every device, and no fp8 dtype in any schema."""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import E4M3_MAX


def encode(value: Tensor) -> Tensor:
    """Rounds non-negative float32 to e4m3 bits (int32): nearest, ties to even, saturating at 448.

    NaN and values above 448 give 0x7E; values at or below 2^-10 give 0. A NaN byte is never produced.
    """
    value = torch.where(value < E4M3_MAX, value, E4M3_MAX)
    bits = value.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14 leaves multiples of 2^-9, the subnormal step, in the low mantissa bits, rounded to nearest even.
    subnormal = (value + 16384.0).view(torch.int32) & 15
    return torch.where(value < 2.0**-6, subnormal, normal)


def decode(bits: Tensor) -> Tensor:
    """float32 value of non-negative e4m3 `bits` (any integer dtype)."""
    bits = bits.to(torch.int32)
    normal = ((bits << 20) + (120 << 23)).view(torch.float32)
    return torch.where(bits < 8, bits.to(torch.float32) * 2.0**-9, normal)


def encode_signed(value: Tensor) -> Tensor:
    """Rounds float32 to e4m3 bits with sign (int32), saturating at ±448; NaN gives 0."""
    value = torch.where(value.isnan(), 0.0, value)
    return encode(value.abs()) | ((value < 0).to(torch.int32) << 7)


def decode_signed(bits: Tensor) -> Tensor:
    """float32 value of e4m3 `bits` with sign."""
    bits = bits.to(torch.int32)
    magnitude = decode(bits & 0x7F)
    return torch.where(bits >= 0x80, -magnitude, magnitude)
