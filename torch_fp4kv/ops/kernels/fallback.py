"""Attention in plain Triton for whatever the fast kernels do not take: every format, head size and argument.

Letters: B batch, Hq query heads, H KV heads, G = Hq / H, L queries a row, D and Dv head sizes, P pages, T tokens a
page, E exact slots, M query rows and N tokens of a tile. Row r of a KV head is query `r // G` of its head `r % G`.

Stored tokens are read in tiles that begin at multiples of N, then exact copies and new tokens. Few query rows are split
over tokens; splits begin at multiples of SPLIT_TOKENS and are merged in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..call import AttentionCall
from . import nvfp4
from .fallback_kernel import attention_kernel, merge_kernel
from .nvfp4 import FAST
from .query import stored_query

SPLIT_TOKENS = 256
FEW_ROWS = 128
"""Up to this many query rows a KV head (L · G), tokens are split to fill the GPU."""


class Tiles(NamedTuple):
    """Tokens of a tile (N), warps, and tiles in flight."""

    tokens: int
    warps: int
    stages: int


def unsupported(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None."""
    return None


def tiles(call: AttentionCall, block_d: int) -> Tiles:
    """For head sizes up to `block_d`; a tile divides SPLIT_TOKENS."""
    if _product_type(call.q, call.k_data, call.k_format) == "fp32" or block_d > 256:
        return Tiles(16 if block_d > 256 else 32, 4, 1)
    return Tiles(64 if block_d <= 128 else 32, 4, 3)


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves `call`."""
    return launch(call, *stored_query(call, torch.float32), pdl=_capability(call.q) >= (9, 0))


def launch(
    call: AttentionCall,
    q_stored: Tensor | None,
    stored_bias: Tensor | None,
    kernel: Callable[[Any], Any] = lambda kernel: kernel,
    pdl: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Serves `call` given what stored keys meet (None: `call.q`) and what is added to their scores.

    `kernel` gives what is launched for a kernel, such as what a tracer records; with `pdl` kernels are launched ahead
    of time, by programmatic dependent launch, and wait themselves for what came before.
    """
    # Only Triton itself, for NVIDIA, knows this option.
    ahead = {"launch_pdl": True} if pdl else {}
    call = call.dense()
    q, device = call.q, call.q.device
    batch, query_heads, queries, d = q.shape
    heads, group, dv = call.num_kv_heads, call.group, call.v_head_dim
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    if q.numel() == 0:
        return out, lse
    rows = queries * group
    block_d, block_dv = (max(64, triton.next_power_of_2(size)) for size in (d, dv))
    n, warps, stages = tiles(call, max(block_d, block_dv))
    # Four warps share the tokens of 16 rows; of 32, some decode the same ones.
    tile_rows = 16 if rows <= 32 or max(block_d, block_dv) > 256 else 32
    window = max(call.window, 0)
    # A row may end anywhere, and begin anywhere: one split more than its tokens fill.
    reach = call.capacity + call.ring_size + (queries if call.k_new is not None else 0)
    num_splits = 1
    if rows <= FEW_ROWS and reach > SPLIT_TOKENS:
        reach = min(reach, window + queries - 1) if window else reach
        num_splits = triton.cdiv(reach, SPLIT_TOKENS) + 1
    partial = num_splits > 1
    result, sums = out, lse
    if partial:
        result = torch.empty((num_splits, *out.shape), dtype=torch.float32, device=device)
        sums = torch.empty((num_splits, *out.shape[:3]), dtype=torch.float32, device=device)
    mask = call.mask
    if mask is not None:
        mask = mask.expand(*q.shape[:3], mask.shape[-1])
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    k_data, k_strides = _words(call.k_data, call.k_format)
    v_data, v_strides = _words(call.v_data, call.v_format)
    exact = call.k_exact is not None
    k_exact, v_exact, k_new, v_new = map(_near, (call.k_exact, call.v_exact, call.k_new, call.v_new))
    others = [x for x in (k_exact, v_exact, k_new, v_new) if x is not None]
    exact_types = {_product_type(q, x, "exact") for x in others}
    with nvfp4.on_device(q):
        # One axis: CUDA takes at most 65,535 programs along others.
        kernel(attention_kernel)[(triton.cdiv(rows, tile_rows) * batch * heads * num_splits,)](
            q,
            *q.stride(),
            q_stored,
            *_strides(q_stored, 4),
            stored_bias,
            *_strides(stored_bias, 3),
            k_data,
            *k_strides,
            call.k_scales,
            *_strides(call.k_scales, 2),
            v_data,
            *v_strides,
            call.v_scales,
            *_strides(call.v_scales, 2),
            call.k_global,
            call.k_global.ndim,
            call.v_global,
            call.v_global.ndim,
            call.v_bias,
            *_strides(call.v_bias, 1),
            call.block_table,
            *_strides(call.block_table, 1),
            k_new,
            *_strides(k_new, 4),
            v_new,
            *_strides(v_new, 4),
            k_exact,
            *_strides(k_exact, 4),
            v_exact,
            *_strides(v_exact, 4),
            call.exact_from,
            mask,
            *_strides(mask, 4),
            0 if mask is None else mask.shape[-1],
            call.lengths,
            call.q_lengths,
            call.starts,
            call.sink_logits,
            result,
            sums,
            batch,
            queries,
            call.page_size,
            window,
            call.softmax_scale,
            call.softcap,
            SPLIT_TOKENS,
            K_SCALES_2=0 if call.k_scales is None else call.k_scales.stride(2),
            V_SCALES_2=0 if call.v_scales is None else call.v_scales.stride(2),
            HEADS=heads,
            GROUP=group,
            D=d,
            DV=dv,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            K_FORMAT=call.k_format,
            V_FORMAT=call.v_format,
            K_TYPE=_product_type(q, k_data, call.k_format),
            V_TYPE=_product_type(q, v_data, call.v_format),
            EXACT_TYPE=exact_types.pop() if len(exact_types) == 1 else "fp32",
            FOUR_TOKEN=call.v_scale_layout == "4token",
            NUM_SINKS=call.num_sink_tokens if exact else 0,
            RING=call.ring_size if exact and call.exact_from is not None else 0,
            CAUSAL=call.causal and queries > 1,
            WINDOW=window > 0,
            SOFTCAP=call.softcap > 0,
            MASK=0 if mask is None else 1 if mask.dtype == torch.uint8 else 2,
            PARTIAL=partial,
            PDL=pdl,
            WHOLE=call.page_size % n == 0,
            PRECISION="tf32" if _multiplies_16_bits(q) else "ieee",
            E4M3=_capability(q) >= (8, 9),
            FAST=FAST,
            M=tile_rows,
            N=n,
            STAGES=stages,
            num_warps=warps,
            **ahead,
        )
        if partial:
            block_dv = min(block_dv, 32)
            kernel(merge_kernel)[(batch * query_heads * queries, triton.cdiv(dv, block_dv))](
                result,
                sums,
                call.sink_logits,
                call.q_lengths,
                out,
                lse,
                num_splits,
                batch * query_heads * queries,
                query_heads,
                queries,
                DV=dv,
                BLOCK_DV=block_dv,
                PDL=pdl,
                FAST=FAST,
                num_warps=4,
                **ahead,
            )
    return out, lse


def _strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]


def _near(x: Tensor | None) -> Tensor | None:
    """`x` `[B, H, T, D]`, or a copy where 32 bits do not hold the elements between its tokens: wider offsets take the
    kernel 32 registers a thread, so that an SM holds three programs in place of four."""
    return x if x is None or x.shape[2] * x.stride(2) < 1 << 31 else x.contiguous()


def _words(data: Tensor, storage_format: str) -> tuple[Tensor, list[int]]:
    """`data` and its first three strides in words of four elements ("exact" data: in elements)."""
    strides = data.stride()[:3]
    if storage_format == "exact":
        return data, list(strides)
    if storage_format != "fp8":
        return data, [4 * stride for stride in strides]
    if data.storage_offset() % 4:
        # Part of a larger buffer; the kernel reads whole words.
        data = data.clone()
    return data, [stride // 4 for stride in strides]


def _product_type(q: Tensor, x: Tensor, storage_format: str) -> str:
    """The type in which tokens of `x` are multiplied: exact, or float32."""
    if _multiplies_16_bits(q):
        if storage_format in ("nvfp4", "fp8"):
            return "fp16"
        if storage_format == "exact" and x.dtype == q.dtype:
            return "fp16" if q.dtype == torch.float16 else "bf16"
    return "fp32"


def _multiplies_16_bits(q: Tensor) -> bool:
    """Whether `q` has 16 bits, on a GPU that multiplies such numbers, subnormal ones too."""
    return q.dtype != torch.float32 and _capability(q) >= (8, 0)


def _capability(q: Tensor) -> tuple[int, int]:
    """Compute capability of the NVIDIA GPU that `q` is on; (0, 0) elsewhere."""
    if not q.is_cuda or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(q.device)
