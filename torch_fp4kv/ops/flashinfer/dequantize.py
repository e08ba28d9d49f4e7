"""A prefill over history by dequantising first: FlashInfer's paged dequantiser into a 16-bit workspace of one layer,
the new tokens beside it, and FA2 over both. By name, or `prefer`, only: it waits for the device, and its workspace
holds K and V of all rows in 16 bits, returned to PyTorch's allocator after each layer, so that the next one finds it.

The workspace holds `code · block_scale`, and the new tokens divided by the global scales, which the query and the
output carry (`paged.py`); both are exact where scales are powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import AttentionCall
from . import support
from .fa2 import attend
from .paged import on, paged, to_front

NAME = "flashinfer-dequantize"


def unsupported(call: AttentionCall) -> str | None:
    """Why this backend cannot serve `call`, or None."""
    return support.attention_unsupported(NAME, call)


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves a call for which `unsupported` is None."""
    from flashinfer import nvfp4_kv_dequantize_paged

    assert call.k_new is not None
    assert call.v_new is not None
    view, device = paged(call), call.q.device
    batch, _, queries, d = call.q.shape
    lengths = view.lengths.cpu()
    longest = int(lengths.max())
    k, v = torch.empty(2, batch, longest, call.num_kv_heads, d, dtype=call.q.dtype, device=device)
    history = view.lengths - queries
    one = torch.ones(1, device=device)
    with on(device):
        nvfp4_kv_dequantize_paged(
            view.data, view.scales, view.table_for(longest), history, one, one, k, v, kv_layout="HND"
        )
    row = torch.arange(batch, device=device)[:, None]
    position = history[:, None] + torch.arange(queries, device=device)
    for target, new, scale in ((k, call.k_new, call.k_global), (v, call.v_new, call.v_global)):
        per_head = scale[:, None, None] if scale.ndim else scale
        scaled = to_front(call, (new.to(torch.float32) / per_head).transpose(1, 2))
        target[row, position] = scaled.to(target.dtype)
    rows = torch.arange(batch + 1, dtype=torch.int32)
    pages = (rows, rows[:-1].to(device), lengths.to(torch.int32))
    return attend(call, pages, k.shape[1], "NHD", (k, v))
