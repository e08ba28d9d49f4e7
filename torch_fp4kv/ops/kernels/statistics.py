"""What `ops/statistics.py` computes: a launch that reads its input once, and one that puts the parts together.

Letters: B rows, H heads, T tokens, D channels, S = D/16 blocks a token, N parts of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..format.constants import DEFAULT_GLOBAL_SCALE, E4M3_MAX, GLOBAL_SCALE_MAX, GLOBAL_SCALE_MIN
from ..statistics import Stored
from . import nvfp4

BLOCKS = 128
"""Blocks of a part, one a thread."""
CHUNK = 128
"""Tokens that a program sums."""
TOKENS = 16
"""Tokens of a tile of a chunk."""
PARTS = 64
"""Parts that a program puts together at once, of 32 channels."""
WIDE = 1024
"""Parts whose sizes a program puts together at once."""

MAX_E4M3 = tl.constexpr(E4M3_MAX)
LEAST, MOST = tl.constexpr(GLOBAL_SCALE_MIN), tl.constexpr(GLOBAL_SCALE_MAX)
DEFAULT = tl.constexpr(DEFAULT_GLOBAL_SCALE)


@triton.jit(do_not_specialize=["num_parts", "tokens"])
def sums_kernel(
    x,
    x_strides,
    first,
    parts,
    heads,
    num_parts,
    tokens,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """float32 sums and counts `[2, H, N, D]` of a chunk's finite values."""
    chunks = tl.cdiv(tokens, CHUNK)
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
    b, head = row // heads, row % heads
    start = tl.load(first + b)
    d = tl.arange(0, BLOCK_D)
    source = x + b * x_strides[0] + head * x_strides[1] + d[None, :] * x_strides[3]
    sums = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    counts = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    for offset in range(0, CHUNK, TOKENS):
        token = chunk * CHUNK + offset + tl.arange(0, TOKENS)
        counted = ((token >= start) & (token < tokens))[:, None] & (d < D)[None, :]
        value = tl.load(source + token.to(tl.int64)[:, None] * x_strides[2], mask=counted, other=0.0).to(tl.float32)
        counted = counted & (tl.abs(value) < float("inf"))
        sums += tl.where(counted, value, 0.0)
        counts += tl.where(counted, 1.0, 0.0)
    target = parts + (head * num_parts + b * chunks + chunk) * D + d
    tl.store(target, tl.sum(sums, 0), mask=d < D)
    tl.store(target + (heads * num_parts).to(tl.int64) * D, tl.sum(counts, 0), mask=d < D)


@triton.jit(do_not_specialize=["num_parts"])
def means_kernel(parts, out, heads, num_parts, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
    """The means `[H, D]` of the sums and counts `[2, H, N, D]` of parts."""
    columns: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    head = (tl.program_id(0) // columns).to(tl.int64)
    d = tl.program_id(0) % columns * BLOCK_D + tl.arange(0, BLOCK_D)
    sums = tl.zeros([PARTS, BLOCK_D], tl.float32)
    counts = tl.zeros([PARTS, BLOCK_D], tl.float32)
    for offset in range(0, num_parts, PARTS):
        part = offset + tl.arange(0, PARTS)
        inside = (part < num_parts)[:, None] & (d < D)[None, :]
        source = parts + (head * num_parts + part)[:, None] * D + d[None, :]
        sums += tl.load(source, mask=inside, other=0.0)
        counts += tl.load(source + (heads * num_parts).to(tl.int64) * D, mask=inside, other=0.0)
    mean = tl.math.div_rn(tl.sum(sums, 0), tl.maximum(tl.sum(counts, 0), 1.0))
    tl.store(out + head * D + d, mean, mask=d < D)


@triton.jit
def _sizes(
    program, tokens_of, first, parts, stride, heads, length, S: tl.constexpr, ROTATION: tl.constexpr, N: tl.constexpr
):
    """Sizes of N blocks of a head of a row, which follow each other: see `sizes_kernel`."""
    x, bias, stride_b, stride_h, stride_t, stride_d = tokens_of
    tiles = tl.cdiv(length * S, N)
    tile = program % tiles
    row = (program // tiles).to(tl.int64)
    b, head = row // heads, row % heads
    block = tile * N + tl.arange(0, N)
    token = block // S
    inside = token < length
    channel = (block % S * 16)[:, None] + tl.arange(0, 8)[None, :]
    source = x + b * stride_b + head * stride_h + channel * stride_d
    source += token.to(tl.int64)[:, None] * stride_t
    lo = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    hi = tl.load(source + 8 * stride_d, mask=inside[:, None], other=0.0).to(tl.float32)
    if bias is not None:
        at = bias + head * (S * 16) + channel
        lo -= tl.load(at)
        hi -= tl.load(at + 8)
    if ROTATION > 0:
        lo, hi = nvfp4.rotate(lo, hi, ROTATION, ROTATION**-0.5)
    lo, hi = tl.abs(lo), tl.abs(hi)
    lo = tl.where(lo < float("inf"), lo, 0.0)
    hi = tl.where(hi < float("inf"), hi, 0.0)
    size = tl.maximum(tl.max(lo, axis=1), tl.max(hi, axis=1))
    size = tl.where(inside & (token >= tl.load(first + b)), size, 0.0)
    largest = tl.max(size, 0)
    filled = tl.sum(tl.where(size > 0, 1.0, 0.0), 0)
    # Divided by the largest first: the sum of many of them could overflow.
    relative = tl.sum(tl.math.div_rn(size, tl.where(largest > 0, largest, 1.0)), 0)
    target = parts + head * stride + b * tiles + tile
    tl.store(target, largest)
    tl.store(target + (heads * stride).to(tl.int64), tl.math.div_rn(relative, tl.maximum(filled, 1.0)) * largest)
    tl.store(target + (heads * stride).to(tl.int64) * 2, filled)


@triton.jit(do_not_specialize=["length", "num_k_parts", "num_parts", "num_k_programs"])
def sizes_kernel(
    k,
    v,
    first,
    parts,
    heads,
    length,
    num_k_parts,
    num_parts,
    num_k_programs,
    K_BLOCKS: tl.constexpr,
    V_BLOCKS: tl.constexpr,
    K_ROTATION: tl.constexpr,
    V_ROTATION: tl.constexpr,
    N: tl.constexpr,
):
    """float32 `[3, H, N]`: of each part of K, then of V, the largest magnitude, the mean of its blocks' largest ones
    and how many of them are not 0. The first `num_k_programs` programs take K."""
    program = tl.program_id(0)
    if program < num_k_programs:
        _sizes(program, k, first, parts, num_parts, heads, length, K_BLOCKS, K_ROTATION, N)
    else:
        parts += num_k_parts
        _sizes(program - num_k_programs, v, first, parts, num_parts, heads, length, V_BLOCKS, V_ROTATION, N)


@triton.jit
def _scale(parts, head, begin, end, stride, out, STEPS: tl.constexpr, WIDE: tl.constexpr):
    """The scale of parts `begin` to `end` of a head: see `scales_kernel`."""
    most = tl.zeros([WIDE], tl.float32)
    for offset in range(begin, end, WIDE):
        part = offset + tl.arange(0, WIDE)
        most = tl.maximum(most, tl.load(parts + part, mask=part < end, other=0.0))
    largest = tl.max(most, 0)
    divisor = tl.where(largest > 0, largest, 1.0)
    sums = tl.zeros([WIDE], tl.float32)
    counts = tl.zeros([WIDE], tl.float32)
    for offset in range(begin, end, WIDE):
        part = offset + tl.arange(0, WIDE)
        mean = tl.load(parts + stride + part, mask=part < end, other=0.0)
        filled = tl.load(parts + 2 * stride + part, mask=part < end, other=0.0)
        sums += tl.math.div_rn(mean, divisor) * filled
        counts += filled
    typical = tl.math.div_rn(tl.sum(sums, 0), tl.maximum(tl.sum(counts, 0), 1.0)) * divisor
    wanted = tl.maximum(tl.math.div_rn(largest, MAX_E4M3), tl.math.div_rn(typical, STEPS))
    # Up to a power of two: what the mantissa holds carries into the exponent.
    scale = ((wanted.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(scale, LEAST), MOST)
    tl.store(out + head, tl.where(largest > 0, scale, DEFAULT))


@triton.jit(do_not_specialize=["num_k_parts", "num_parts"])
def scales_kernel(
    parts,
    k_out,
    v_out,
    heads,
    num_k_parts,
    num_parts,
    K_STEPS: tl.constexpr,
    V_STEPS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`scales.choose_global_scale` of what `sizes_kernel` found. The first H programs take K."""
    head = tl.program_id(0) % heads
    stride = (heads * num_parts).to(tl.int64)
    parts += head.to(tl.int64) * num_parts
    if tl.program_id(0) < heads:
        _scale(parts, head, 0, num_k_parts, stride, k_out, K_STEPS, WIDE)
    else:
        _scale(parts, head, num_k_parts, num_parts, stride, v_out, V_STEPS, WIDE)


def set_channel_means(out: Tensor, x: Tensor, first: Tensor) -> None:
    """As in `ops/statistics.py`."""
    batch, heads, tokens, d = x.shape
    num_parts = batch * triton.cdiv(tokens, CHUNK)
    parts = torch.empty((2, heads, num_parts, d), dtype=torch.float32, device=x.device)
    with nvfp4.on_device(x):
        if num_parts:
            sums_kernel[(heads * num_parts,)](
                x,
                x.stride(),
                first,
                parts,
                heads,
                num_parts,
                tokens,
                D=d,
                BLOCK_D=triton.next_power_of_2(d),
                CHUNK=CHUNK,
                TOKENS=TOKENS,
            )
        means_kernel[(heads * triton.cdiv(d, 32),)](parts, out, heads, num_parts, D=d, BLOCK_D=32, PARTS=PARTS)


def set_global_scales(first: Tensor, stored: Sequence[Stored], steps: Sequence[float]) -> None:
    """Chooses the global scale of each of `stored`, one or two of as many rows, heads and tokens, and writes them; a
    typical block's largest magnitude comes to at most `steps` of each."""
    k, v = stored[0], stored[-1]
    batch, heads, length, _ = k.x.shape
    num_k_parts, num_v_parts = (batch * triton.cdiv(length * (s.x.shape[3] // 16), BLOCKS) for s in (k, v))
    num_parts = num_k_parts + (num_v_parts if len(stored) > 1 else 0)
    parts = torch.empty((3, heads, num_parts), dtype=torch.float32, device=k.x.device)
    with nvfp4.on_device(k.x):
        if num_parts:
            sizes_kernel[(heads * num_parts,)](
                (k.x, k.bias, *k.x.stride()),
                (v.x, v.bias, *v.x.stride()),
                first,
                parts,
                heads,
                length,
                num_k_parts,
                num_parts,
                heads * num_k_parts,
                K_BLOCKS=k.x.shape[3] // 16,
                V_BLOCKS=v.x.shape[3] // 16,
                K_ROTATION=k.rotation,
                V_ROTATION=v.rotation,
                N=BLOCKS,
                enable_fp_fusion=False,
            )
        scales_kernel[(heads * len(stored),)](
            parts,
            k.global_scale,
            v.global_scale,
            heads,
            num_k_parts,
            num_parts,
            K_STEPS=steps[0],
            V_STEPS=steps[-1],
            WIDE=WIDE,
        )
