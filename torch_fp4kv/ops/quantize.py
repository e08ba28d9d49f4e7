"""`fp4kv::quantize`: a float tensor to NVFP4 words and block scales."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, checks
from ._library import define
from .flashinfer import quantize as flashinfer
from .format import blocks
from .format.constants import BLOCK


def quantize(
    x: Tensor,
    global_scale: float | Tensor,
    *,
    bias: Tensor | None = None,
    scale_rule: str = "amax",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Quantises `x - bias` to NVFP4: `x ≈ bias + e2m1(code) · e4m3(scale) · global_scale` (docs/format.md).

    Args:
        x: `[..., D]`, float32, float16 or bfloat16, any strides, D a multiple of 16. Not modified.
        global_scale: decode scale, positive: a number, or float32 of shape `[]`, `[H]` with `H = x.shape[-3]` (per
            KV head), or `x.shape[:-1]` (per row), on x's device.
        bias: float32 `[D]` or `[H, D]`, subtracted in float32 first.
        scale_rule: what a block's largest magnitude is divided by: "amax" (6), or searched for the least squared
            error: "4over6" (6, 4) or "mse" (3, 3.5, … 7).
        backend: "auto", or FlashInfer on Blackwell: "cuda", "cute-dsl", or "flashinfer" for "cute-dsl" where it is
            installed and "cuda" else. FlashInfer takes 16-bit x, no bias, "amax" and "4over6"; a code or a scale may
            differ by one from what "auto" gives.

    Returns:
        words: int64 `[..., D/16]`, contiguous; nibble r of a word is the code of element r of its block.
        scales: uint8 `[..., D/16]`, contiguous; e4m3 bits.

    Raises:
        TypeError: x is not floating point, or a tensor argument has another dtype.
        ValueError: D is not a multiple of 16, the scale is not positive and finite, shapes or devices differ, or
            `backend` cannot serve.
    """
    checks.floating(x, "x")
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension")
    checks.head_dim(x.shape[-1], "x")
    checks.scale_rule(scale_rule)
    scale = checks.global_scale(global_scale, x.device, "global_scale")
    check_per_head(scale, bias, tuple(x.shape))
    if backend == "auto":
        words, scales = torch.ops.fp4kv.quantize(x, scale, bias=bias, scale_rule=scale_rule)
        return words, scales
    checks.one_of(backend, ("auto", *flashinfer.BACKENDS), "backend")
    backend = flashinfer.resolve(backend, scale)
    reason = flashinfer.unsupported(x, scale, bias, scale_rule, backend)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot serve this quantize: {reason}")
    words, scales = torch.ops.fp4kv.flashinfer_quantize(x, scale, scale_rule=scale_rule, backend=backend)
    return words, scales


def per_block(global_scale: Tensor, ndim: int) -> Tensor:
    """`global_scale` so shaped that it broadcasts against the `ndim`-dimensional scales of the data it belongs to."""
    if global_scale.ndim == 1 and ndim >= 3:
        return global_scale[:, None, None]
    return global_scale.unsqueeze(-1) if global_scale.ndim else global_scale


def per_element(bias: Tensor) -> Tensor:
    """`bias` `[D]` or `[H, D]` so shaped that it broadcasts against `[..., H, T, D]`."""
    return bias.unsqueeze(-2) if bias.ndim == 2 else bias


def check_per_head(scale: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises unless `scale` is `[]`, `[H]` or one per row, and `bias` None, `[D]` or `[H, D]`, for x of `shape`."""
    per_head = ((shape[-3],),) if len(shape) >= 3 else ()
    checks.scale_shape(scale, (*per_head, shape[:-1]), "global_scale")
    head_biases = ((shape[-3], shape[-1]),) if len(shape) >= 3 else ()
    checks.bias(bias, ((shape[-1],), *head_biases), scale.device, "bias")


def _body(
    x: Tensor, global_scale: Tensor, *, bias: Tensor | None = None, scale_rule: str = "amax"
) -> tuple[Tensor, Tensor]:
    checks.scale_values(global_scale, "global_scale")
    if backends.choose("quantize", x.device).name == "triton":
        from .kernels import quantize as kernel

        return kernel.quantize(x, global_scale, bias, scale_rule)
    if bias is not None:
        x = x.to(torch.float32) - per_element(bias)
    return blocks.encode(x, per_block(global_scale, x.ndim), scale_rule)


def _fake(
    x: Tensor, global_scale: Tensor, *, bias: Tensor | None = None, scale_rule: str = "amax"
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.uint8)


QUANTIZE = define(
    'quantize(Tensor x, Tensor global_scale, *, Tensor? bias=None, str scale_rule="amax") '
    "-> (Tensor words, Tensor scales)",
    body=_body,
    fake=_fake,
)
