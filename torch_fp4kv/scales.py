"""Global scales: the one a cache chooses for itself, and conversions between the conventions in use."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops.format.constants import (
    DEFAULT_GLOBAL_SCALE,
    E2M1_MAX,
    E4M3_MAX,
    GLOBAL_SCALE_MAX,
    GLOBAL_SCALE_MIN,
    SCALE_MAX,
)
from .ops.statistics import Stored, block_amax, on_gpu

CONVENTIONS = {
    "decode": "ours: `x ≈ code · block_scale · scale` (FlashInfer's KV quantise, append and dequantise)",
    "amax/448": "a decode scale with six times head-room (ModelOpt's Hugging Face export, FP8 and NVFP4 alike)",
    "amax/2688": "a decode scale without head-room (auto-round's export of NVFP4 scales; two of ModelOpt's helpers)",
    "encode": "the reciprocal of a decode scale (FlashInfer's fp4_quantize: 2688/amax; its paged quantise: 448/amax)",
    "amax/6": "what maps the largest magnitude to code 6 with a block scale of 1 (llm-compressor, as reported)",
    "sglang": "as SGLang reads a checkpoint on SM100: six times the number, unless that is exactly 1",
}
"""What a stored scale may mean. Nothing in the number tells; a checkpoint's reader must be told."""

TYPICAL = {"nvfp4": 1.5, "fp8": 0.5}
"""A chosen scale puts the largest magnitude of a typical block at up to this many steps (at least half as many): for
NVFP4 a block scale in (1/8, 1/4], which leaves room for magnitudes 1,792 times larger, and 8 times smaller before
block scales become subnormal; for e4m3 itself 896 times larger and 16 times smaller."""


def set_global_scales(first: Tensor, *stored: Stored) -> None:
    """Chooses a scale for K, for V or for both, by `choose_global_scale`, and writes it to their `global_scale`.

    Of row b the tokens from `first[b]` (int `[B]`) on count.
    """
    if on_gpu(stored[0].x):
        from .ops.kernels import statistics

        statistics.set_global_scales(first, stored, [_typical(one.storage_format) for one in stored])
        return
    for one in stored:
        sizes = block_amax(one.x, first, one.bias, one.rotation)
        one.global_scale.copy_(choose_global_scale(sizes, one.storage_format))


def choose_global_scale(block_amax: Tensor, storage_format: str = "nvfp4") -> Tensor:
    """Decode scales `[H]` (float32), powers of two: folding one is exact.

    `block_amax` float32 `[B, H, T, S]` has the largest magnitude of each block, 0 for one that does not count. The
    scale follows their mean, and never lets the largest of them saturate (at or above amax/448). What comes later may
    be far larger or smaller than these first tokens; see `TYPICAL`. A head without any non-zero value gets a default
    that covers magnitudes up to 10.5.
    """
    if block_amax.shape[0] == 0 or block_amax.shape[2] == 0:
        return torch.full(block_amax.shape[1:2], DEFAULT_GLOBAL_SCALE, device=block_amax.device)
    amax = block_amax.amax((0, 2, 3))
    filled = (block_amax > 0).sum((0, 2, 3)).clamp(min=1)
    # Divided by the largest first: the sum of many of them could overflow.
    relative = torch.where(amax > 0, amax, 1.0)
    typical = (block_amax / relative[:, None, None]).sum((0, 2, 3)) / filled * relative
    wanted = torch.maximum(amax / E4M3_MAX, typical / _typical(storage_format))
    # The limits are powers of two; beyond float32, which some ask for, there is no exponent.
    mantissa, exponent = torch.frexp(wanted.clamp(GLOBAL_SCALE_MIN, GLOBAL_SCALE_MAX))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), DEFAULT_GLOBAL_SCALE)


def _typical(storage_format: str) -> float:
    return TYPICAL.get(storage_format, TYPICAL["nvfp4"])


def scale_without_clipping(block_amax: Tensor) -> Tensor:
    """amax/432 `[H]` (float32): the least decode scale under which no scale of blocks with largest magnitudes
    `block_amax` `[B, H, T, S]` exceeds 72."""
    return block_amax.amax((0, 2, 3)) / (E2M1_MAX * SCALE_MAX["4token"])


def to_decode_scale(value: float, convention: str) -> float:
    """A checkpoint's or kernel's scale `value` as our decode scale.

    "amax/448" and "amax/2688" values are decode scales already (they differ in head-room); "encode" is inverted;
    "amax/6" is brought to amax/448; "sglang" multiplies by 6 unless the value is exactly 1.

    Raises:
        ValueError: the convention is unknown, or the value is not positive and finite.
    """
    _check(value, convention)
    if convention == "encode":
        return 1.0 / value
    if convention == "amax/6":
        return value * E2M1_MAX / E4M3_MAX
    return value * 6.0 if convention == "sglang" and value != 1.0 else value


def from_decode_scale(value: float, convention: str) -> float:
    """The inverse of `to_decode_scale`; errors as there."""
    _check(value, convention)
    if convention == "encode":
        return 1.0 / value
    if convention == "amax/6":
        return value * E4M3_MAX / E2M1_MAX
    return value / 6.0 if convention == "sglang" and value != 1.0 else value


def scale_of_amax(amax: float, convention: str) -> float:
    """What a writer of `convention` stores for data whose largest magnitude is `amax`; "decode" and "encode" without
    head-room, as FlashInfer's examples have it, "sglang" as ModelOpt writes it. Errors as in `to_decode_scale`."""
    _check(amax, convention)
    without = amax / (E4M3_MAX * E2M1_MAX)
    by_convention = {"decode": without, "amax/2688": without, "encode": 1.0 / without, "amax/6": amax / E2M1_MAX}
    return by_convention.get(convention, amax / E4M3_MAX)


def _check(value: float, convention: str) -> None:
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown convention {convention!r}; known: {', '.join(CONVENTIONS)}")
    if not 0 < value < float("inf"):
        raise ValueError(f"a scale must be positive and finite, got {value}")
