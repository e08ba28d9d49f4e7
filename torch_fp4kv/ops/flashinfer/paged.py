"""A call as FlashInfer's paged kernels read it, and their output as ours. Shapes as in `attention.py`.

Our storage `[P, H, T, ·]` is FlashInfer's "HND" layout, so pages behind a block table are handed over as they are. A
static cache (one page of T tokens a row, no table) is seen as pages of up to 64 tokens: page j of row b begins where
row b's head 0 has token j · size, and the stride from head to head stays T rows. Both are views; nothing is copied.

FlashInfer takes one number for all heads where we have a global scale per KV head. K's is folded into the query and
V's into the output, so the kernel sees scales of 1 and computes in units of `code · block_scale`.

FlashInfer puts a row's L queries on its last L tokens, so no row may have fewer. One that has is handed over as having
L, the queries that have a token before the others: each then sees what it should, and no token that is not there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import AttentionCall

STATIC_PAGE_SIZES = (64, 32, 16)
SCRATCH_BYTES = 128 << 20
"""What FlashInfer recommends."""


@dataclass(frozen=True)
class Paged:
    """What FlashInfer reads.

    Attributes:
        data: K and V, uint8 `[P, H, T, D/2]`.
        scales: of both, float8_e4m3fn `[P, H, T, D/16]`.
        table: int32 `[B, max_pages]`, contiguous; every entry names a page that exists.
        lengths: int32 `[B]`, at least the number of new tokens. `unfold_output` puts 0 where there was nothing.
        page_size: T.
    """

    data: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    table: Tensor
    lengths: Tensor
    page_size: int

    @property
    def max_length(self) -> int:
        return self.table.shape[1] * self.page_size

    def table_for(self, length: int) -> Tensor:
        """The table, with columns for `length` tokens a row."""
        missing = -(-length // self.page_size) - self.table.shape[1]
        return torch.nn.functional.pad(self.table, (0, missing)) if missing > 0 else self.table


def paged(call: AttentionCall) -> Paged:
    """`call`'s storage, block table and lengths."""
    assert call.k_scales is not None
    assert call.v_scales is not None
    parts = [
        call.k_data.view(torch.uint8),
        call.v_data.view(torch.uint8),
        call.k_scales.view(torch.float8_e4m3fn),
        call.v_scales.view(torch.float8_e4m3fn),
    ]
    pages, heads, tokens = call.k_data.shape[:3]
    if call.block_table is None:
        batch = call.q.shape[0]
        size = next(size for size in STATIC_PAGE_SIZES if tokens % size == 0)
        a_row = tokens // size
        first = torch.arange(batch, dtype=torch.int32, device=call.q.device)[:, None] * (heads * a_row)
        table = first + torch.arange(a_row, dtype=torch.int32, device=call.q.device)
        parts = [_cut(part, size) for part in parts]
    else:
        size, table = tokens, call.block_table.clamp(0, pages - 1).contiguous()
    # A row that has gone round shows all its slots, in any order: one query without a window sees them alike. Tokens
    # that the call brings may be past what its table has room for.
    lengths = call.lengths.clamp(min=call.q.shape[2], max=call.capacity if call.k_new is None else None)
    k_data, v_data, k_scales, v_scales = parts
    return Paged((k_data, v_data), (k_scales, v_scales), table, lengths, size)


def _cut(x: Tensor, size: int) -> Tensor:
    """`[B, H, T, ·]` as overlapping pages `[(B-1) · H · n + n, H, size, ·]` with `n = T / size`; page b · H · n + j."""
    batch, heads, tokens, width = x.shape
    n = tokens // size
    shape = ((batch - 1) * heads * n + n, heads, size, width)
    return x.as_strided(shape, (size * width, tokens * width, width, 1))


def fold_query(call: AttentionCall) -> Tensor:
    """float32 `[B, L, Hq, D]`, contiguous: what meets stored keys, times K's global scale of each head."""
    q = to_front(call, call.transform.query(call.q).transpose(1, 2))
    return q.to(torch.float32).contiguous() * _per_query_head(call, call.k_global)


def to_front(call: AttentionCall, x: Tensor) -> Tensor:
    """`x` `[B, L, ·, ·]`, an entry a query: those that have a token moved before the others of their row."""
    return _turned(call, x, 1)


def _turned(call: AttentionCall, x: Tensor, direction: int) -> Tensor:
    rows, queries = x.shape[:2]
    if queries == 1:
        return x
    without_token = (queries - call.lengths).clamp(0, queries)
    index = (torch.arange(queries, device=x.device) + direction * without_token[:, None]) % queries
    return x[torch.arange(rows, device=x.device)[:, None], index]


def unfold_output(call: AttentionCall, out: Tensor) -> Tensor:
    """`[B, Hq, L, D]` in the result's dtype of a kernel's `out` `[B · L, Hq, D]`: times V's global scale of each head,
    plus its bias, and 0 for a query that sees no token."""
    batch, heads, queries, d = call.q.shape
    result = _turned(call, out.view(batch, queries, heads, d), -1)
    result = result.to(torch.float32) * _per_query_head(call, call.v_global)
    if call.v_bias is not None:
        result = result + call.v_bias.repeat_interleave(call.group, 0)
    result = torch.where(_sees_a_token(call)[:, :, None, None], result, 0.0)
    return result.transpose(1, 2).to(call.result_dtype).contiguous()


def unfold_lse(call: AttentionCall, lse: Tensor) -> Tensor:
    """float32 `[B, Hq, L]` of a kernel's natural `lse` `[B · L, Hq]`: plus what the bias of K adds to every score, and
    the sink's logit, or -inf, for a query that sees no token."""
    batch, heads, queries, _ = call.q.shape
    nothing = float("-inf") if call.sink_logits is None else call.sink_logits.to(torch.float32)[:, None]
    result = _turned(call, lse.view(batch, queries, heads), -1).transpose(1, 2)
    bias = call.transform.query_bias(call.q)
    if bias is not None:
        result = result + bias * call.softmax_scale
    return torch.where(_sees_a_token(call)[:, None], result, nothing).contiguous()


def _sees_a_token(call: AttentionCall) -> Tensor:
    """bool `[B, L]`."""
    queries = call.q.shape[2]
    return call.lengths[:, None] - queries + torch.arange(queries, device=call.q.device) >= 0


def _per_query_head(call: AttentionCall, scale: Tensor) -> Tensor:
    return scale.repeat_interleave(call.group).unsqueeze(-1) if scale.ndim else scale


def window_left(call: AttentionCall) -> int:
    """FlashInfer's window: how many tokens before its own a query sees; -1 for all."""
    return call.window - 1 if call.window > 0 else -1


def sinks(call: AttentionCall) -> Tensor | None:
    """float32 `[Hq]`, natural logits, contiguous."""
    return None if call.sink_logits is None else call.sink_logits.to(torch.float32).contiguous()


def scratch(device: torch.device, size: int = SCRATCH_BYTES, zeroed: int = 0) -> Tensor:
    """uint8 `[size]` for one launch, its first `zeroed` bytes 0: counters of blocks that work on one row.

    It goes back to PyTorch's allocator, which keeps it for this device and stream, or this CUDA graph, and has it ready
    for the next layer. Nothing of it outlives the call, as a graph's memory must not.
    """
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    buffer[:zeroed].zero_()
    return buffer


def on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes `device` the current one: some of FlashInfer looks at the current device rather than its tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
