"""`fp4kv::dequantize`: stored K or V back to a float tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, checks
from ._library import define
from .call import head_dim_of
from .format import blocks, e4m3, layout
from .quantize import check_per_head, per_block, per_element


def dequantize(
    words: Tensor,
    scales: Tensor | None,
    global_scale: float | Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    format: str = "nvfp4",
    scale_layout: str = "linear",
) -> Tensor:
    """Values of stored data: `bias + e2m1(code) · (e4m3(scale) · global_scale)`, computed in float32.

    Args:
        words: int64 `[..., D/16]` ("nvfp4", "block-fp4") or uint8 e4m3 bits `[..., D]` ("fp8").
        scales: uint8 `[..., D/16]`; None for "fp8".
        global_scale: as in `quantize`; not used by "block-fp4".
        bias: float32 `[D]` or `[H, D]`, added in float32 last.
        dtype: of the result; the float32 value is rounded to it once.
        format: "nvfp4", "fp8" or "block-fp4".
        scale_layout: "linear", or "4token" for V scales in the order of SM100 kernels.

    Returns:
        `[..., D]`, contiguous.

    Raises:
        TypeError, ValueError: dtype, shape, device or value of an argument is not as above.
    """
    checks.one_of(format, ("nvfp4", "fp8", "block-fp4"), "format")
    checks.has_dtype(words, torch.uint8 if format == "fp8" else torch.int64, "words")
    if words.ndim == 0:
        raise ValueError("words must have at least one dimension")
    if dtype not in checks.FLOATING:
        raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    if format == "fp8":
        if scales is not None:
            raise ValueError("format 'fp8' has no block scales; pass scales=None")
    else:
        if scales is None:
            raise ValueError(f"format {format!r} needs block scales")
        checks.has_dtype(scales, torch.uint8, "scales")
        checks.shape(scales, tuple(words.shape), "scales")
        checks.same_device(scales, words.device, "scales")
    checks.scale_layout(scale_layout, scales)
    head_dim = head_dim_of(words, format)
    checks.head_dim(head_dim, "words")
    scale = checks.global_scale(global_scale, words.device, "global_scale")
    check_per_head(scale, bias, (*words.shape[:-1], head_dim))
    out: Tensor = torch.ops.fp4kv.dequantize(
        words, scales, scale, bias=bias, dtype=dtype, format=format, scale_layout=scale_layout
    )
    return out


def values(
    data: Tensor, scales: Tensor | None, global_scale: Tensor, storage_format: str, scale_layout: str = "linear"
) -> Tensor:
    """float32 `[..., D]` of stored data in any format, without bias; `global_scale` is `[]`, `[H]` or per row."""
    if storage_format == "exact":
        return data.to(torch.float32)
    if storage_format == "fp8":
        return e4m3.decode_signed(data) * per_block(global_scale, data.ndim)
    assert scales is not None
    if scale_layout == "4token":
        scales = layout.v_scales_from_4token(scales)
    if storage_format == "block-fp4":
        return blocks.decode_block_fp4(data, scales)
    return blocks.decode(data, scales, per_block(global_scale, data.ndim))


def _body(
    words: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype,
    format: str = "nvfp4",
    scale_layout: str = "linear",
) -> Tensor:
    checks.scale_values(global_scale, "global_scale")
    if backends.choose("dequantize", words.device).name == "triton":
        from .kernels import quantize as kernel

        return kernel.dequantize(words, scales, global_scale, bias, dtype, format, scale_layout)
    x = values(words, scales, global_scale, format, scale_layout)
    if bias is not None:
        x = x + per_element(bias)
    return x.to(dtype).contiguous()


def _fake(
    words: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype,
    format: str = "nvfp4",
    scale_layout: str = "linear",
) -> Tensor:
    return words.new_empty((*words.shape[:-1], head_dim_of(words, format)), dtype=dtype)


DEQUANTIZE = define(
    "dequantize(Tensor words, Tensor? scales, Tensor global_scale, *, Tensor? bias=None, ScalarType dtype, "
    'str format="nvfp4", str scale_layout="linear") -> Tensor',
    body=_body,
    fake=_fake,
)
