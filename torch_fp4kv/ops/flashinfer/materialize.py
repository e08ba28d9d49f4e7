"""A prefill over history from an FP8 workspace: FlashInfer writes `code · block_scale` of a layer's pages as E4M3, new
tokens are rounded to E4M3 beside them, and FA2 reads both. For pages in the "4token" layout, whose block scales leave
those products in E4M3's range. By name, or `prefer`, only: it waits for the device.

Half the memory of `dequantize.py`, with E4M3's three bits of mantissa for its seven. The workspace returns to PyTorch's
allocator after each layer, so that the next one finds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import AttentionCall
from . import support
from .fa2 import attend
from .paged import on, paged, to_front

NAME = "flashinfer-materialize-fp8"


def unsupported(call: AttentionCall) -> str | None:
    """Why this backend cannot serve `call`, or None."""
    reason = support.attention_unsupported(NAME, call)
    if reason is None and any(not x[0].is_contiguous() for x in (call.k_data, call.v_data)):
        return "each page must be contiguous"
    return reason


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves a call for which `unsupported` is None."""
    from flashinfer.quantization.kernels import nvfp4_kv_materialize_fp8

    assert call.k_new is not None
    assert call.v_new is not None
    view, device = paged(call), call.q.device
    queries, size, lengths = call.q.shape[2], view.page_size, view.lengths.cpu()
    counts = (lengths + size - 1) // size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    num_pages, longest = int(indptr[-1]), int(lengths.max())
    with on(device):
        workspace, table = nvfp4_kv_materialize_fp8(
            *view.data,
            *(scales.view(torch.uint8) for scales in view.scales),
            view.table_for(longest),
            view.lengths,
            longest,
            kv_page_indptr=indptr.to(device),
            num_pages=num_pages,
        )
    position = view.lengths[:, None] - queries + torch.arange(queries, device=device)
    page = table.gather(1, position // size)
    for part, new, scale in ((0, call.k_new, call.k_global), (1, call.v_new, call.v_global)):
        per_head = scale[:, None, None] if scale.ndim else scale
        scaled = to_front(call, (new.to(torch.float32) / per_head).transpose(1, 2))
        rounded = scaled.clamp(-448.0, 448.0).to(workspace.dtype)
        # Bytes, since indexed assignment does not know E4M3.
        workspace.view(torch.uint8)[page, part, :, position % size] = rounded.view(torch.uint8)
    # FlashInfer's page 0 is a page of zeros; the rows' pages follow, one after the other.
    used = torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)
    pages = (indptr, used, lengths - (counts - 1) * size)
    return attend(call, pages, size, "HND", (workspace[:, 0], workspace[:, 1]))
