"""`append` on a GPU: quantise new K and V, write them into the cache and its exact ring, in one launch.

Shapes: B batch, H KV heads, L new tokens a row, D head size (of K, or of V), S = D/16 blocks, P pages, T tokens a page,
E exact slots. A program holds N blocks of one head: TOKENS tokens of S blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..format.blocks import SCALE_RULES
from ..format.constants import SCALE_MAX
from . import nvfp4
from .nvfp4 import FAST

N = 256
NUM_WARPS = 4
FEW_BLOCKS = 16384
"""Up to as many blocks, a decode step's, are spread thin: SMALL_N a program of one warp, two threads a block."""
SMALL_N = 16


@triton.jit
def _rows(tile, batch, length, TOKENS: tl.constexpr, SHORT: tl.constexpr, token):
    """`(b, position, valid)` of `token`, int32 `[n]` within tile `tile`; b is a scalar unless SHORT."""
    if SHORT:
        # Rows shorter than a tile: tokens are numbered across the batch.
        row = tile * TOKENS + token
        b = row // length
        position = row - b * length
        valid = (token < TOKENS) & (b < batch)
    else:
        row_tiles = tl.cdiv(length, TOKENS)
        b = (tile.to(tl.uint32) // row_tiles.to(tl.uint32)).to(tl.int32)
        position = (tile - b * row_tiles) * TOKENS + token
        valid = (token < TOKENS) & (position < length)
    return b.to(tl.int64), position.to(tl.int64), valid


@triton.jit
def _append(
    tile,
    tensors,
    strides,
    places,
    batch,
    length,
    num_slots,
    page_size,
    num_exact,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATION: tl.constexpr,
    FORMAT: tl.constexpr,
    DIVISORS: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    FOUR_TOKEN: tl.constexpr,
    SKIP_NEGATIVE: tl.constexpr,
    SHORT: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """One tile of K, or of V: read once, written to the exact ring as it is and to the cache quantised."""
    x, data, scales, global_scale, exact, bias, factors, order = tensors
    x_0, x_1, x_2, x_3, global_0, exact_0, exact_1, exact_2 = strides
    slots, slots_0, slots_1, exact_slots, exact_slots_0, exact_slots_1 = places
    S: tl.constexpr = D // 16
    TOKENS: tl.constexpr = N // S
    head = (tile % HEADS).to(tl.int64)
    tile = tile // HEADS
    block = tl.arange(0, N)
    b, position, valid = _rows(tile, batch, length, TOKENS, SHORT, block // S)
    column = block % S * 16
    element = tl.arange(0, 8)[None, :]

    row = (x + head * x_1 + b * x_0 + position * x_2)[:, None]
    source = row + (column[:, None] + element).to(tl.int64) * x_3
    lo = tl.load(source, mask=valid[:, None], other=0.0)
    hi = tl.load(source + 8 * x_3, mask=valid[:, None], other=0.0)

    slot = tl.load(slots + b * slots_0 + position * slots_1, mask=valid, other=-1)
    if exact is not None:
        ring_slot = tl.load(exact_slots + b * exact_slots_0 + position * exact_slots_1, mask=valid, other=-1)
        # The last slot takes the writes that nobody reads: they are not made.
        kept = (valid & (ring_slot >= 0) & (ring_slot < num_exact - 1))[:, None]
        if SKIP_NEGATIVE:
            kept = kept & (slot >= 0)[:, None]
        copy = exact + head * exact_1 + b * exact_0 + ring_slot * exact_2 + column
        tl.store(copy[:, None] + element, lo, mask=kept)
        tl.store(copy[:, None] + element + 8, hi, mask=kept)

    if not SKIP_NEGATIVE:
        slot = tl.where(slot < 0, slot + num_slots, slot)
    valid = valid & (slot >= 0) & (slot < num_slots)
    slot = tl.where(valid, slot, 0)
    if num_slots.dtype == tl.int32:
        # A 64-bit division costs as much as quantising a block.
        page = slot.to(tl.uint32) // page_size.to(tl.uint32)
        offset = (slot.to(tl.uint32) - page * page_size.to(tl.uint32)).to(tl.int64)
    else:
        page = slot // page_size
        offset = slot - page * page_size
    page = page.to(tl.int64) * HEADS + head

    lo_channel = column[:, None] + element
    hi_channel = lo_channel + 8
    if order is not None:
        lo_channel = tl.load(order + head * D + lo_channel)
        hi_channel = tl.load(order + head * D + hi_channel)
        lo = tl.load(row + lo_channel.to(tl.int64) * x_3, mask=valid[:, None], other=0.0)
        hi = tl.load(row + hi_channel.to(tl.int64) * x_3, mask=valid[:, None], other=0.0)
    lo = lo.to(tl.float32)
    hi = hi.to(tl.float32)
    if bias is not None:
        lo -= tl.load(bias + head * D + lo_channel)
        hi -= tl.load(bias + head * D + hi_channel)
    if factors is not None:
        lo *= tl.load(factors + head * D + lo_channel)
        hi *= tl.load(factors + head * D + hi_channel)
    if ROTATION > 0:
        lo, hi = nvfp4.rotate(lo, hi, ROTATION, ROTATION**-0.5)

    if FORMAT == "nvfp4" or FORMAT == "block-fp4":
        if FORMAT == "nvfp4":
            word, bits = nvfp4.encode(lo, hi, tl.load(global_scale + head * global_0), DIVISORS, SCALE_MAX, FAST)
        else:
            word, bits = nvfp4.encode_block_fp4(lo, hi, FAST)
        s = column // 16
        tl.store(data + (page * page_size + offset) * (D // 16) + s, word, mask=valid)
        if FOUR_TOKEN:
            QUARTER: tl.constexpr = D // 64
            scale_offset = offset // 4 * 4 + s // QUARTER
            s = s % QUARTER * 4 + offset % 4
        else:
            scale_offset = offset
        tl.store(scales + (page * page_size + scale_offset) * (D // 16) + s, bits.to(tl.uint8), mask=valid)
    else:
        target = (data + (page * page_size + offset) * D + column)[:, None] + element
        if FORMAT == "fp8":
            g = tl.load(global_scale + head * global_0)
            stored_lo = nvfp4.e4m3_encode_signed(tl.math.div_rn(lo, g)).to(tl.uint8)
            stored_hi = nvfp4.e4m3_encode_signed(tl.math.div_rn(hi, g)).to(tl.uint8)
        else:
            stored_lo = nvfp4.round_to(lo, data.dtype.element_ty, FAST)
            stored_hi = nvfp4.round_to(hi, data.dtype.element_ty, FAST)
        tl.store(target, stored_lo, mask=valid[:, None])
        tl.store(target + 8, stored_hi, mask=valid[:, None])


@triton.jit(do_not_specialize=["num_slots", "page_size"])
def append_kernel(
    k,
    k_strides,
    v,
    v_strides,
    places,
    batch,
    length,
    num_slots,
    page_size,
    num_exact,
    num_k_tiles,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    K_ROTATION: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    DIVISORS: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    V_FOUR_TOKEN: tl.constexpr,
    SKIP_NEGATIVE: tl.constexpr,
    SHORT: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """The first `num_k_tiles` programs take K, the others V. Tuples are unpacked in `_append`."""
    tile = tl.program_id(0)
    sizes = (batch, length, num_slots, page_size, num_exact)
    if tile < num_k_tiles:
        _append(
            tile,
            k,
            k_strides,
            places,
            *sizes,
            HEADS,
            D,
            K_ROTATION,
            K_FORMAT,
            DIVISORS,
            SCALE_MAX,
            False,
            SKIP_NEGATIVE,
            SHORT,
            N,
            FAST,
        )
    else:
        _append(
            tile - num_k_tiles,
            v,
            v_strides,
            places,
            *sizes,
            HEADS,
            DV,
            0,
            V_FORMAT,
            DIVISORS,
            SCALE_MAX,
            V_FOUR_TOKEN,
            SKIP_NEGATIVE,
            SHORT,
            N,
            FAST,
        )


def append(
    k_data: Tensor,
    k_scales: Tensor | None,
    v_data: Tensor,
    v_scales: Tensor | None,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_global: Tensor,
    v_global: Tensor,
    *,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    k_factors: Tensor | None = None,
    k_order: Tensor | None = None,
    k_rotation: int = 0,
    k_exact: Tensor | None = None,
    v_exact: Tensor | None = None,
    exact_slots: Tensor | None = None,
    skip_negative: bool = False,
    k_format: str = "nvfp4",
    v_format: str = "nvfp4",
    scale_rule: str = "amax",
    v_scale_layout: str = "linear",
) -> None:
    """`fp4kv::append` as one launch; arguments as in `ops/append.py`, which has checked them.

    A slot outside the cache is skipped; without `skip_negative` a negative one counts from the end, as in `index_put_`.
    """
    assert k_data.is_contiguous() and v_data.is_contiguous()
    batch, heads, length, head_dim = k.shape
    v_head_dim = v.shape[3]
    if k.numel() == 0:
        return
    n, num_warps = N, NUM_WARPS
    few = (k.numel() + v.numel()) // 16 <= FEW_BLOCKS
    if few and max(head_dim, v_head_dim) <= 16 * SMALL_N:
        n, num_warps = SMALL_N, 1
    # Rows shorter than a tile share tiles. The grid has one axis: CUDA takes at most 65,535 programs along others.
    k_tokens, v_tokens = n * 16 // head_dim, n * 16 // v_head_dim
    short = length < min(k_tokens, v_tokens)
    tokens, rows = (batch * length, 1) if short else (length, batch)
    k_tiles = heads * rows * triton.cdiv(tokens, k_tokens)
    v_tiles = heads * rows * triton.cdiv(tokens, v_tokens)
    with nvfp4.on_device(k):
        append_kernel[(k_tiles + v_tiles,)](
            *_with_strides(k, k_data, k_scales, k_global, k_exact, k_bias, k_factors, k_order),
            *_with_strides(v, v_data, v_scales, v_global, v_exact, v_bias),
            (slots, *slots.stride(), exact_slots, *_strides(exact_slots, 2)),
            batch,
            length,
            k_data.shape[0] * k_data.shape[2],
            k_data.shape[2],
            0 if k_exact is None else k_exact.shape[2],
            k_tiles,
            HEADS=heads,
            D=head_dim,
            DV=v_head_dim,
            K_ROTATION=k_rotation,
            K_FORMAT=k_format,
            V_FORMAT=v_format,
            DIVISORS=SCALE_RULES[scale_rule],
            SCALE_MAX=SCALE_MAX[v_scale_layout],
            V_FOUR_TOKEN=v_scale_layout == "4token",
            SKIP_NEGATIVE=skip_negative,
            SHORT=short,
            N=n,
            FAST=FAST,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )


def _with_strides(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    exact: Tensor | None,
    bias: Tensor | None,
    factors: Tensor | None = None,
    order: Tensor | None = None,
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """What the kernel takes of K, or of V."""
    assert exact is None or exact.stride(3) == 1
    others = (nvfp4.contiguous(bias), nvfp4.contiguous(factors), nvfp4.contiguous(order))
    global_0 = global_scale.stride(0) if global_scale.ndim else 0
    return (x, data, scales, global_scale, exact, *others), (*x.stride(), global_0, *_strides(exact, 3))


def _strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]
