"""Global scales: the one a cache chooses for itself, and conversions between the conventions in use."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops.format.constants import (
    BLOCK,
    DEFAULT_GLOBAL_SCALE,
    E2M1_MAX,
    E4M3_MAX,
    GLOBAL_SCALE_MAX,
    GLOBAL_SCALE_MIN,
)

CONVENTIONS = ("decode", "encode", "amax/448", "amax/2688", "amax/6")
"""What a stored scale may mean. "decode" is ours: `x ≈ code · block_scale · scale`; "encode" its reciprocal; the
others are decode scales that divide the largest magnitude seen by 448, by 448 · 6 or by 6."""


TYPICAL = {"nvfp4": 1.5, "fp8": 0.5}
"""A chosen scale puts the largest magnitude of a typical block at up to this many steps (at least half as many): for
NVFP4 a block scale in (1/8, 1/4], which leaves room for magnitudes 1,792 times larger, and 8 times smaller before
block scales become subnormal; for e4m3 itself 896 times larger and 16 times smaller."""


def choose_global_scale(x: Tensor, weights: Tensor | None = None, storage_format: str = "nvfp4") -> Tensor:
    """Decode scales `[H]` (float32) for `x` `[B, H, T, D]`, powers of two: folding one is exact.

    The scale follows the mean of the blocks' largest magnitudes over the tokens given, and never lets the largest of
    them saturate (at or above amax/448). What comes later may be far larger or smaller than these first tokens; see
    `TYPICAL`. Non-finite values are left out, and so are tokens whose `weights` (`[B, T]`, bool) are False. A head
    without any non-zero value gets a default that covers magnitudes up to 10.5.
    """
    magnitude = x.detach().to(torch.float32).abs()
    seen = magnitude.isfinite()
    if weights is not None:
        seen = seen & weights[:, None, :, None]
    block_amax = torch.where(seen, magnitude, 0.0).unflatten(-1, (-1, BLOCK)).amax(-1)
    amax = block_amax.amax((0, 2, 3))
    filled = (block_amax > 0).sum((0, 2, 3)).clamp(min=1)
    # Divided by the largest first: the sum of many of them could overflow.
    relative = torch.where(amax > 0, amax, 1.0)
    typical = (block_amax / relative[:, None, None]).sum((0, 2, 3)) / filled * relative
    steps = TYPICAL.get(storage_format, TYPICAL["nvfp4"])
    wanted = torch.maximum(amax / E4M3_MAX, typical / steps)
    mantissa, exponent = torch.frexp(wanted)
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
