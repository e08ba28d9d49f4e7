"""Decode and prefill over history by FlashInfer's FA2 kernels, compute capability 8.0 and later. By name only: it plans
on the host, which waits for the device at each call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from . import exact, support
from .paged import Paged, fold_query, on, paged, scratch, unfold_lse, unfold_output, window_left

NAME = "flashinfer-fa2"
WITHOUT_SPLIT_KV = ((12, 0), (12, 1))
"""Here FlashInfer saw NVFP4 with split KV give wrong numbers (its issue 4749)."""


def unsupported(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None."""
    return support.attention_unsupported(NAME, call)


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves a call for which `unsupported` is None."""
    if call.k_exact is not None:
        return exact.join(call, *run(exact.stored(call)))
    view = paged(call)
    split = support.capability(call.q.device) not in WITHOUT_SPLIT_KV
    return attend(call, _pages(view), view.page_size, "HND", view.data, view.scales, split_kv=split)


def attend(
    call: AttentionCall,
    pages: tuple[Tensor, Tensor, Tensor],
    page_size: int,
    kv_layout: str,
    data: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None = None,
    split_kv: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What `call` asks for, of its folded query over `data`: NVFP4 with `scales`, 16-bit or E4M3 without. `pages` is
    `(indptr, indices, last_page_length)` as FlashInfer has it."""
    device = call.q.device
    batch, heads, queries, d = call.q.shape
    query = fold_query(call).to(call.q.dtype).view(batch * queries, heads, d)
    with on(device):
        wrapper = _wrapper(device, _stream(device), kv_layout)
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32) * queries,
            *pages,
            heads,
            call.num_kv_heads,
            d,
            page_size,
            causal=queries > 1,
            sm_scale=call.softmax_scale,
            window_left=window_left(call),
            logits_soft_cap=call.softcap,
            q_data_type=query.dtype,
            kv_data_type=data[0].dtype,
            disable_split_kv=not split_kv,
        )
        out = wrapper.run(query, data, kv_cache_sf=scales, return_lse=call.return_lse, lse_base="ln")
    if not call.return_lse:
        return unfold_output(call, out), None
    return unfold_output(call, out[0]), unfold_lse(call, out[1])


def _pages(view: Paged) -> tuple[Tensor, Tensor, Tensor]:
    """`(indptr [B + 1], indices, last_page_length [B])`, int32: the pages of all rows, one after the other."""
    lengths = view.lengths.cpu()
    counts = (lengths + view.page_size - 1) // view.page_size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    used = torch.arange(view.table.shape[1]) < counts[:, None]
    return indptr, view.table[used.to(view.table.device)], (lengths - (counts - 1) * view.page_size).to(torch.int32)


@functools.lru_cache(maxsize=16)
def _wrapper(device: torch.device, stream: int, kv_layout: str) -> Any:
    """A wrapper, and the workspace that its plans point into, for one stream."""
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    with torch.inference_mode(False):
        return BatchPrefillWithPagedKVCacheWrapper(scratch(device), kv_layout, backend="fa2")


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
