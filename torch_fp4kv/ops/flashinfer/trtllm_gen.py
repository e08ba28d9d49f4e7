"""Decode on SM100 and SM103 by trtllm-gen: query, output and the values it multiplies are E4M3.

It turns `code · block_scale` into E4M3 before either product, so block scales must not exceed 72 (6 · 72 < 448): a
cache in "4token" layout is written so, K's scales too. Output in units of `code · block_scale` is at most 448 and
needs no scale of its own. The counters of blocks that share a row are FlashInfer's: it zeroes new ones at each call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..call import AttentionCall
from . import support
from .paged import fold_query, on, paged, scratch, sinks, unfold_output, window_left

NAME = "flashinfer-trtllm-gen"


def unsupported(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None."""
    return support.attention_unsupported(NAME, call)


def run(call: AttentionCall) -> tuple[Tensor, None]:
    """Serves a call for which `unsupported` is None."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    view, device = paged(call), call.q.device
    batch, heads, queries, d = call.q.shape
    query, scale = _to_e4m3(torch.where((call.lengths > 0)[:, None, None, None], fold_query(call), 0.0))
    query = query.view(batch * queries, heads, d)
    out = torch.empty_like(query)
    with on(device):
        trtllm_batch_decode_with_kv_cache(
            query=query,
            kv_cache=view.data,
            workspace_buffer=scratch(device),
            block_tables=view.table,
            seq_lens=view.lengths,
            max_seq_len=view.max_length,
            bmm1_scale_log2=scale * (call.softmax_scale * math.log2(math.e)),
            bmm2_scale=1.0,
            window_left=window_left(call),
            out=out,
            sinks=sinks(call),
            kv_layout="HND",
            backend="trtllm-gen",
            q_len_per_req=queries,
            kv_cache_sf=view.scales,
        )
    return unfold_output(call, out), None


def _to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in float8_e4m3fn and the power of two (float32 `[1]`) that it was divided by: amax/448 or just above, found
    on the device. A power of two rounds the elements of a row alike whatever the other rows hold; infinity, which a
    conversion may saturate, becomes NaN, and that counts for nothing in amax."""
    x = x.nan_to_num(math.nan, math.nan, math.nan)
    _, exponent = torch.frexp(x.nan_to_num(0.0).abs().amax() / 448.0)
    scale = torch.ldexp(x.new_ones(1), exponent)
    return (x / scale).to(torch.float8_e4m3fn), scale
