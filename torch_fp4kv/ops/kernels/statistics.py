"""What `ops/statistics.py` computes, each in one launch that reads its input once.

Letters: B rows, H heads, T tokens, D channels, S = D/16 blocks a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import nvfp4

N = 128
"""Blocks of a program, one a thread."""
CHUNK = 512
"""Tokens that a program sums."""
TOKENS = 16
"""Tokens of a tile of a chunk."""


@triton.jit
def sums_kernel(
    x,
    x_strides,
    first,
    total,
    count,
    heads,
    tokens,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """float32 sums and counts `[B, H, chunks, D]` of a chunk's finite values."""
    chunks = tl.cdiv(tokens, CHUNK)
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = tl.load(first + row // heads)
    d = tl.arange(0, BLOCK_D)
    source = x + row // heads * x_strides[0] + row % heads * x_strides[1] + d[None, :] * x_strides[3]
    sums = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    counts = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    for offset in range(0, CHUNK, TOKENS):
        token = chunk * CHUNK + offset + tl.arange(0, TOKENS)
        counted = ((token >= start) & (token < tokens))[:, None] & (d < D)[None, :]
        value = tl.load(source + token.to(tl.int64)[:, None] * x_strides[2], mask=counted, other=0.0).to(tl.float32)
        counted = counted & (tl.abs(value) < float("inf"))
        sums += tl.where(counted, value, 0.0)
        counts += tl.where(counted, 1.0, 0.0)
    target = (row * chunks + chunk) * D + d
    tl.store(total + target, tl.sum(sums, 0), mask=d < D)
    tl.store(count + target, tl.sum(counts, 0), mask=d < D)


@triton.jit
def block_amax_kernel(
    x,
    x_strides,
    first,
    bias,
    out,
    heads,
    tokens,
    S: tl.constexpr,
    ROTATION: tl.constexpr,
    N: tl.constexpr,
):
    """The largest finite magnitudes of N blocks of a head of a row, which follow each other."""
    tiles = tl.cdiv(tokens * S, N)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.load(first + row // heads)
    block = tl.program_id(0) % tiles * N + tl.arange(0, N)
    token = block // S
    inside = token < tokens
    channel = (block % S * 16)[:, None] + tl.arange(0, 8)[None, :]
    source = x + row // heads * x_strides[0] + row % heads * x_strides[1] + channel * x_strides[3]
    source += token.to(tl.int64)[:, None] * x_strides[2]
    lo = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    hi = tl.load(source + 8 * x_strides[3], mask=inside[:, None], other=0.0).to(tl.float32)
    if bias is not None:
        at = bias + row % heads * (S * 16) + channel
        lo -= tl.load(at)
        hi -= tl.load(at + 8)
    if ROTATION > 0:
        lo, hi = nvfp4.rotate(lo, hi, ROTATION, ROTATION**-0.5)
    lo, hi = tl.abs(lo), tl.abs(hi)
    lo = tl.where(lo < float("inf"), lo, 0.0)
    hi = tl.where(hi < float("inf"), hi, 0.0)
    amax = tl.maximum(tl.max(lo, axis=1), tl.max(hi, axis=1))
    at = out + row * tokens * S + block
    tl.store(at, tl.where(token >= start, amax, 0.0), mask=inside)


def channel_sums(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """float32 `[H, D]`: the sum of each channel of `x` `[B, H, T, D]`, and how many values it has."""
    batch, heads, tokens, d = x.shape
    parts = torch.empty((2, batch, heads, triton.cdiv(tokens, CHUNK), d), dtype=torch.float32, device=x.device)
    if parts.numel():
        with nvfp4.on_device(x):
            sums_kernel[(batch * heads * parts.shape[3],)](
                x,
                x.stride(),
                first,
                *parts,
                heads,
                tokens,
                D=d,
                BLOCK_D=triton.next_power_of_2(d),
                CHUNK=CHUNK,
                TOKENS=TOKENS,
            )
    total, count = parts.sum((1, 3))
    return total, count


def block_amax(x: Tensor, first: Tensor, bias: Tensor | None, rotation: int) -> Tensor:
    """float32 `[B, H, T, S]`; see `ops/statistics.py`."""
    batch, heads, tokens, d = x.shape
    out = torch.empty((batch, heads, tokens, d // 16), dtype=torch.float32, device=x.device)
    if out.numel():
        with nvfp4.on_device(x):
            block_amax_kernel[(batch * heads * triton.cdiv(tokens * (d // 16), N),)](
                x,
                x.stride(),
                first,
                bias,
                out,
                heads,
                tokens,
                S=d // 16,
                ROTATION=rotation,
                N=N,
                enable_fp_fusion=False,
            )
    return out
