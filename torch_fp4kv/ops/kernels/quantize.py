"""`quantize` and `dequantize` on a GPU, stand-alone.

Shapes: inputs are seen as `[A, H, C, D]` (leading dimensions folded into A, missing ones of size 1), S = D/16 blocks a
row. A program holds N blocks, counted through the rows of the whole tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..format.blocks import SCALE_RULES
from ..format.constants import BLOCK
from . import nvfp4
from .nvfp4 import FAST

N = 128
NUM_WARPS = 4


@triton.jit
def _locate(num_blocks, heads, columns, S: tl.constexpr, N: tl.constexpr):
    """This program's blocks: `(block, valid, a, h, c, s)`, where `[a, h, c, s]` is the index of each, all int64."""
    # int32 where it fits (as `num_blocks` is then): 64-bit divisions would cost more than the blocks themselves.
    block = tl.program_id(0).to(num_blocks.dtype) * N + tl.arange(0, N)
    row = block // S
    a = row // columns // heads
    h = row // columns - a * heads
    c = row % columns
    valid = (block >= 0) & (block < num_blocks)
    return block.to(tl.int64), valid, a.to(tl.int64), h.to(tl.int64), c.to(tl.int64), (block % S).to(tl.int64)


@triton.jit(do_not_specialize=["num_blocks"])
def quantize_kernel(
    x,
    x_strides,
    global_scale,
    global_strides,
    bias,
    bias_stride,
    words,
    scales,
    num_blocks,
    heads,
    columns,
    D: tl.constexpr,
    DIVISORS: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    block, valid, a, h, c, s = _locate(num_blocks, heads, columns, D // 16, N)
    element = s[:, None] * 16 + tl.arange(0, 8)[None, :]
    source = (x + a * x_strides[0] + h * x_strides[1] + c * x_strides[2])[:, None] + element * x_strides[3]
    lo = tl.load(source, mask=valid[:, None], other=0.0).to(tl.float32)
    hi = tl.load(source + 8 * x_strides[3], mask=valid[:, None], other=0.0).to(tl.float32)
    if bias is not None:
        shift = bias + (h * bias_stride)[:, None] + element
        lo -= tl.load(shift, mask=valid[:, None], other=0.0)
        hi -= tl.load(shift + 8, mask=valid[:, None], other=0.0)
    at = global_scale + a * global_strides[0] + h * global_strides[1] + c * global_strides[2]
    word, bits = nvfp4.encode(lo, hi, tl.load(at, mask=valid, other=1.0), DIVISORS, 448.0, FAST)
    tl.store(words + block, word, mask=valid)
    tl.store(scales + block, bits.to(tl.uint8), mask=valid)


@triton.jit(do_not_specialize=["num_blocks"])
def dequantize_kernel(
    data,
    scales,
    global_scale,
    global_strides,
    bias,
    bias_stride,
    out,
    num_blocks,
    heads,
    columns,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    FOUR_TOKEN: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    block, valid, a, h, c, s = _locate(num_blocks, heads, columns, D // 16, N)
    g = tl.load(
        global_scale + a * global_strides[0] + h * global_strides[1] + c * global_strides[2], mask=valid, other=1.0
    )
    element = tl.arange(0, 8)[None, :]
    if FORMAT == "fp8":
        source = (data + block * 16)[:, None] + element
        lo = nvfp4.e4m3_decode_signed(tl.load(source, mask=valid[:, None], other=0).to(tl.int32)) * g[:, None]
        hi = nvfp4.e4m3_decode_signed(tl.load(source + 8, mask=valid[:, None], other=0).to(tl.int32)) * g[:, None]
    else:
        word = tl.load(data + block, mask=valid, other=0)
        if FOUR_TOKEN:
            QUARTER: tl.constexpr = D // 64
            token = c // 4 * 4 + s // QUARTER
            scale_block = block - s + (token - c) * (D // 16) + s % QUARTER * 4 + c % 4
        else:
            scale_block = block
        bits = tl.load(scales + scale_block, mask=valid, other=0).to(tl.int32)
        scale = nvfp4.e4m3_decode(bits) * g if FORMAT == "nvfp4" else nvfp4.power_of_two(bits)
        lo = nvfp4.decode_half(word.to(tl.int32)) * scale[:, None]
        hi = nvfp4.decode_half((word >> 32).to(tl.int32)) * scale[:, None]
    if bias is not None:
        shift = bias + (h * bias_stride + s * 16)[:, None] + element
        lo += tl.load(shift, mask=valid[:, None], other=0.0)
        hi += tl.load(shift + 8, mask=valid[:, None], other=0.0)
    target = (out + block * 16)[:, None] + element
    tl.store(target, nvfp4.round_to(lo, out.dtype.element_ty, FAST), mask=valid[:, None])
    tl.store(target + 8, nvfp4.round_to(hi, out.dtype.element_ty, FAST), mask=valid[:, None])


def quantize(
    x: Tensor, global_scale: Tensor, bias: Tensor | None = None, scale_rule: str = "amax"
) -> tuple[Tensor, Tensor]:
    """NVFP4 `(words int64, scales uint8)` `[..., D/16]`, contiguous, of `x` `[..., D]`; see `ops/quantize.py`.

    `x` may have any strides; it is copied only where leading dimensions beyond the third cannot be folded in place.
    """
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    words, scales = x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.uint8)
    if words.numel() == 0:
        return words, scales
    x4 = _fold(x, x.ndim - 1)
    with nvfp4.on_device(x):
        quantize_kernel[(triton.cdiv(words.numel(), N),)](
            x4,
            x4.stride(),
            *_scale_and_strides(global_scale, x.ndim),
            *_bias_and_stride(bias),
            words,
            scales,
            words.numel(),
            x4.shape[1],
            x4.shape[2],
            D=x.shape[-1],
            DIVISORS=SCALE_RULES[scale_rule],
            N=N,
            FAST=FAST,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return words, scales


def dequantize(
    data: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    storage_format: str = "nvfp4",
    scale_layout: str = "linear",
) -> Tensor:
    """Values `[..., D]`, contiguous, in `dtype`; see `ops/dequantize.py`."""
    head_dim = data.shape[-1] * (1 if storage_format == "fp8" else BLOCK)
    out = data.new_empty((*data.shape[:-1], head_dim), dtype=dtype)
    if out.numel() == 0:
        return out
    *_, heads, columns = (1, 1, *data.shape[:-1])
    with nvfp4.on_device(data):
        dequantize_kernel[(triton.cdiv(out.numel(), N * BLOCK),)](
            data.contiguous(),
            None if scales is None else scales.contiguous(),
            *_scale_and_strides(global_scale, data.ndim),
            *_bias_and_stride(bias),
            out,
            out.numel() // BLOCK,
            heads,
            columns,
            D=head_dim,
            FORMAT=storage_format,
            FOUR_TOKEN=scale_layout == "4token",
            N=N,
            FAST=FAST,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def _fold(x: Tensor, lead: int) -> Tensor:
    """`x` with its first `lead` dimensions as three: a view wherever torch can make one."""
    if lead > 3:
        return x.flatten(0, lead - 3)
    return x[(None,) * (3 - lead)]


def _scale_and_strides(global_scale: Tensor, ndim: int) -> tuple[Tensor, tuple[int, int, int]]:
    """The scale of a tensor of `ndim` dimensions and its strides along `[A, H, C]`."""
    if global_scale.ndim == 0:
        return global_scale, (0, 0, 0)
    if global_scale.ndim == 1 and ndim >= 3:
        return global_scale, (0, global_scale.stride(0), 0)
    folded = _fold(global_scale, global_scale.ndim)
    return folded, (folded.stride(0), folded.stride(1), folded.stride(2))


def _bias_and_stride(bias: Tensor | None) -> tuple[Tensor | None, int]:
    if bias is None:
        return None, 0
    return bias.contiguous(), bias.shape[-1] if bias.ndim == 2 else 0
