"""Decode on SM100 and later 10.x by FlashInfer's experimental `prims_ts`: bfloat16 query and output. By name only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..call import AttentionCall
from . import exact, support
from .paged import fold_query, on, paged, scratch, sinks, unfold_lse, unfold_output, window_left

NAME = "flashinfer-prims-ts"


def unsupported(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None."""
    return support.attention_unsupported(NAME, call)


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves a call for which `unsupported` is None."""
    if call.k_exact is not None:
        return exact.join(call, *run(exact.stored(call)))
    from flashinfer.attention.prims_ts import batch_decode_with_paged_kv_cache, get_prims_ts_batch_decode_workspace_size

    view, device = paged(call), call.q.device
    batch, heads, queries, d = call.q.shape
    query = fold_query(call).to(call.q.dtype)
    # One query a row comes without the axis of queries.
    query = query.squeeze(1) if queries == 1 else query
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=device) if call.return_lse else None
    mask_type = "dense" if queries == 1 and call.window <= 0 else "causal"
    size = get_prims_ts_batch_decode_workspace_size(
        batch,
        heads,
        call.num_kv_heads,
        d,
        view.page_size,
        view.max_length,
        seq_len_q=queries,
        q_dtype=query.dtype,
        kv_dtype=torch.uint8,
        out_dtype=out.dtype,
        mask_type=mask_type,
        window_left=window_left(call),
        device=device,
        use_attention_sinks=call.sink_logits is not None,
    )
    with on(device):
        batch_decode_with_paged_kv_cache(
            query,
            view.data,
            view.table,
            view.lengths,
            kv_scale_factors=view.scales,
            seq_len_q=queries,
            mask_type=mask_type,
            window_left=window_left(call),
            kv_layout="HND",
            softmax_scale=call.softmax_scale,
            output_scale=1.0,
            out=out,
            lse=lse,
            attention_sinks=sinks(call),
            workspace_buffer=scratch(device, size, zeroed=size),
            max_kv_len=view.max_length,
            validate=False,
        )
    # Its log-sum-exp is of base 2.
    natural = None if lse is None else unfold_lse(call, lse * math.log(2))
    return unfold_output(call, out.view(batch * queries, heads, d)), natural
