"""Exact copies beside FlashInfer: its kernel attends to the stored tokens that have none, the exact ones join that in
PyTorch by its log-sum-exp. For one new token a row."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..call import AttentionCall
from ..torch_attention import Queries, RunningSoftmax, exact_tiles


def page_size(call: AttentionCall) -> int:
    """Of the pages that `stored` makes: none holds both a sink and another token."""
    return math.gcd(call.page_size, call.num_sink_tokens)


def stored(call: AttentionCall) -> AttentionCall:
    """The stored tokens without exact copies, as a call of their own: rows that begin behind the sinks.

    Pages are cut where the sinks end, as overlapping views: sub-page j of page p begins at token j · size of head 0,
    and the stride from head to head stays the page's.
    """
    assert call.block_table is not None
    assert call.exact_from is not None
    assert call.k_scales is not None
    assert call.v_scales is not None
    size = page_size(call)
    pages = call.k_data.shape[0]
    a_page = call.page_size // size
    step = call.k_data.stride(0) // (size * call.k_data.shape[-1])
    table = call.block_table.clamp(0, pages - 1) * step
    table = table[:, :, None] + torch.arange(a_page, dtype=table.dtype, device=table.device)
    return replace(
        call,
        k_data=_cut(call.k_data, size),
        k_scales=_cut(call.k_scales, size),
        v_data=_cut(call.v_data, size),
        v_scales=_cut(call.v_scales, size),
        block_table=table.flatten(1)[:, call.num_sink_tokens // size :],
        lengths=(torch.minimum(call.lengths, call.exact_from) - call.num_sink_tokens).clamp(min=0),
        k_exact=None,
        v_exact=None,
        exact_from=None,
        num_sink_tokens=0,
        sink_logits=None,
        out_dtype=torch.float32,
        return_lse=True,
    )


def _cut(x: Tensor, size: int) -> Tensor:
    """Pages `[P, H, T, ·]` as `[·, H, size, ·]`: page p's first at `p · stride(0) / (size · width)`."""
    pages, heads, tokens, width = x.shape
    num = (pages - 1) * (x.stride(0) // (size * width)) + tokens // size
    return x.as_strided((num, heads, size, width), (size * width, x.stride(1), width, 1))


def join(call: AttentionCall, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Result of `call` from that of `stored(call)`."""
    assert lse is not None
    queries = Queries(call, 0, call.q.shape[2], (None, None))
    softmax = RunningSoftmax(queries)
    softmax.resume(out, lse)
    for tile in exact_tiles(queries):
        softmax.add(*tile, stored=False)
    out, lse = softmax.finish()
    return out.to(call.result_dtype), lse if call.return_lse else None
