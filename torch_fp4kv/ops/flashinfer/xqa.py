"""Decode on SM120 and SM121 by XQA: 16-bit query and output, V's scales linear."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import AttentionCall
from . import support
from .paged import fold_query, on, paged, scratch, sinks, unfold_output, window_left

NAME = "flashinfer-xqa"


def unsupported(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None."""
    return support.attention_unsupported(NAME, call)


def run(call: AttentionCall) -> tuple[Tensor, None]:
    """Serves a call for which `unsupported` is None."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    view, device = paged(call), call.q.device
    query = fold_query(call).squeeze(1).to(call.q.dtype)
    out = torch.empty_like(query)
    # FlashInfer takes the front of the workspace for semaphores: one uint32 for each row and KV head.
    semaphores = call.q.shape[0] * call.num_kv_heads * 4
    with on(device):
        xqa_batch_decode_with_kv_cache(
            query=query,
            kv_cache=view.data,
            workspace_buffer=scratch(device, zeroed=semaphores),
            block_tables=view.table,
            seq_lens=view.lengths,
            max_seq_len=view.max_length,
            bmm1_scale=call.softmax_scale,
            bmm2_scale=1.0,
            window_left=window_left(call),
            out=out,
            sinks=sinks(call),
            kv_layout="HND",
            kv_cache_sf=view.scales,
        )
    return unfold_output(call, out), None
