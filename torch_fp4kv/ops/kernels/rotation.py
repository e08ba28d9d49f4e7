"""Rotated queries, in one launch, for attention kernels that do not rotate theirs themselves.

A program holds N blocks of 16 elements, one a thread; S = D/16 blocks are a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import AttentionCall
from . import nvfp4
from .nvfp4 import FAST

N = 128


@triton.jit
def rotate_kernel(
    x,
    x_0,
    x_1,
    x_2,
    x_3,
    out,
    heads,
    tokens,
    blocks,
    S: tl.constexpr,
    ROTATION: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row = block // S
    b = row // (heads * tokens)
    head = row // tokens % heads
    token = row % tokens
    element = tl.arange(0, 8)[None, :]
    mask = (block < blocks)[:, None]
    source = (x + b * x_0 + head * x_1 + token * x_2)[:, None]
    source += ((block % S * 16)[:, None] + element) * x_3
    lo = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    hi = tl.load(source + 8 * x_3, mask=mask, other=0.0).to(tl.float32)
    lo, hi = nvfp4.rotate(lo, hi, ROTATION, ROTATION**-0.5)
    target = out + block[:, None] * 16 + element
    tl.store(target, nvfp4.round_to(lo, out.dtype.element_ty, FAST), mask=mask)
    tl.store(target + 8, nvfp4.round_to(hi, out.dtype.element_ty, FAST), mask=mask)


def rotated(call: AttentionCall, dtype: torch.dtype) -> AttentionCall:
    """The same call with rotated queries in `dtype` as `q_stored`."""
    if not call.k_rotation:
        return call
    return replace(call, q_stored=rotate(call.query_of_stored, call.k_rotation, dtype), k_rotation=0)


def rotate(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """`format.rotation.rotate` of `x` `[B, H, L, D]`, any strides; contiguous, in `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    blocks = x.numel() // 16
    if blocks:
        with nvfp4.on_device(x):
            rotate_kernel[(triton.cdiv(blocks, N),)](
                x,
                *x.stride(),
                out,
                x.shape[1],
                x.shape[2],
                blocks,
                S=x.shape[3] // 16,
                ROTATION=block,
                N=N,
                FAST=FAST,
                enable_fp_fusion=False,
            )
    return out
