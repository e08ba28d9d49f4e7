"""Global scales: the one a cache chooses for itself, and conversions between the conventions in use."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops.format.constants import DEFAULT_GLOBAL_SCALE, E2M1_MAX, E4M3_MAX, GLOBAL_SCALE_MAX, GLOBAL_SCALE_MIN

CONVENTIONS = ("decode", "encode", "amax/448", "amax/2688", "amax/6")
"""What a stored scale may mean. "decode" is ours: `x ≈ code · block_scale · scale`; "encode" its reciprocal; the
others are decode scales that divide the largest magnitude seen by 448, by 448 · 6 or by 6."""


def choose_global_scale(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Decode scales `[H]` (float32) for `x` `[B, H, T, D]`: the power of two at or above amax/448, per head.

    Non-finite values are left out, and so are tokens whose `weights` (`[B, T]`, bool) are False. A head without any
    non-zero value gets a default that covers magnitudes up to 10.5. Folding a power of two is exact, and six times
    head-room is left: block scales reach 448 only where a token is six times larger than the largest seen here.
    """
    magnitude = x.detach().to(torch.float32).abs()
    seen = magnitude.isfinite()
    if weights is not None:
        seen = seen & weights[:, None, :, None]
    amax = torch.where(seen, magnitude, 0.0).amax((0, 2, 3))
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(amax), exponent).clamp(GLOBAL_SCALE_MIN, GLOBAL_SCALE_MAX)
    return torch.where(amax > 0, scale, DEFAULT_GLOBAL_SCALE)


def to_decode_scale(value: float, convention: str) -> float:
    """A checkpoint's or kernel's scale `value` as our decode scale.

    "amax/448" and "amax/2688" values are decode scales already (they differ in head-room); "encode" is inverted;
    "amax/6" values are read as amax/6 and brought to amax/448.

    Raises:
        ValueError: the convention is unknown, or the value is not positive.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown convention {convention!r}; known: {', '.join(CONVENTIONS)}")
    if not value > 0:
        raise ValueError(f"a scale must be positive, got {value}")
    if convention == "encode":
        return 1.0 / value
    return value * E2M1_MAX / E4M3_MAX if convention == "amax/6" else value
