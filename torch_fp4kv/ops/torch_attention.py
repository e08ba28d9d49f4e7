"""Attention over a quantised cache in PyTorch, tile by tile: the CPU backend, and the one that takes any call.

Scratch does not grow with the context: a tile of stored tokens is dequantised, met by the queries and folded into a
running softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). All arithmetic is float32.

Shapes: B batch, H KV heads, G query heads a KV head, L queries, t tokens of a tile, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .call import AttentionCall
from .dequantize import values
from .format import layout

TILE_ELEMENTS = 1 << 19
"""Elements of K dequantised at once, over batch and heads."""


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves every `AttentionCall`; see `attention.py` for what it computes."""
    queries = _Queries(call)
    softmax = _RunningSoftmax(queries)
    for tile in _stored_tiles(call, queries):
        softmax.add(*tile, stored=True)
    for tile in _exact_tiles(call, queries):
        softmax.add(*tile, stored=False)
    out, lse = softmax.finish(call.sink_logits)
    return out.to(call.result_dtype), lse if call.return_lse else None


class _Queries:
    """The queries with their positions, and what they may see."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        batch, _, num_queries, _ = call.q.shape
        device = call.q.device
        self.lengths = call.lengths.to(torch.int64)
        self.num_new = torch.full_like(self.lengths, num_queries) if call.q_lengths is None else call.q_lengths.long()
        self.starts = torch.zeros_like(self.lengths) if call.starts is None else call.starts.to(torch.int64)
        self.oldest = self.starts
        if call.block_table is None:
            self.oldest = torch.maximum(self.starts, self.lengths - call.page_size)
        index = torch.arange(num_queries, device=device)
        self.real = index < self.num_new[:, None]
        self.positions = self.lengths[:, None] - self.num_new[:, None] + index
        self.q = self._grouped(call.q)
        self.q_stored = self.q if call.q_stored is None else self._grouped(call.q_stored)
        self.stored_bias = None if call.stored_bias is None else self._grouped(call.stored_bias)
        self.sink_end = self.starts + call.num_sink_tokens if call.k_exact is not None else self.starts
        self.first_ring = self.lengths
        if call.k_exact is not None and call.exact_from is not None:
            self.first_ring = call.exact_from.to(torch.int64)
        self.first_new = self.lengths - self.num_new if call.k_new is not None else self.lengths
        assert self.positions.shape == (batch, num_queries)

    def _grouped(self, x: Tensor) -> Tensor:
        """`[B, Hq, L, ·]` to float32 `[B, H, G, L, ·]`."""
        return x.to(torch.float32).unflatten(1, (self.call.num_kv_heads, self.call.group))

    def sees(self, positions: Tensor) -> Tensor:
        """bool `[B, L, t]`: which of the token `positions` `[B or 1, t]` each query may look at, mask apart."""
        call, token, query = self.call, positions[:, None, :], self.positions[:, :, None]
        seen = (token >= self.starts[:, None, None]) & (token < self.lengths[:, None, None]) & self.real[:, :, None]
        if call.causal:
            seen = seen & (token <= query)
        if call.window > 0:
            seen = seen & (token > query - call.window)
        return seen

    def scores(self, k: Tensor, positions: Tensor, present: Tensor, stored: bool) -> Tensor:
        """float32 `[B, H, G, L, t]` scores of keys `[B, H, t, D]` at `positions`; -inf where not seen or not present."""
        call = self.call
        q = self.q_stored if stored else self.q
        batch, heads, group, num_queries, _ = q.shape
        scores = (q.flatten(2, 3) @ k.transpose(-1, -2)).view(batch, heads, group, num_queries, -1)
        if stored and self.stored_bias is not None:
            scores = scores + self.stored_bias.unsqueeze(-1)
        scores = scores * call.softmax_scale
        if call.softcap > 0:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        seen = (self.sees(positions) & present[:, None, :])[:, None, None]
        if call.mask is not None:
            mask = self._mask_at(call.mask, positions)
            if mask.dtype == torch.bool:
                seen = seen & mask
            else:
                scores = scores + mask
                seen = seen & (positions < call.mask.shape[-1])[:, None, None, None, :]
        return scores.masked_fill(~seen, float("-inf"))

    def _mask_at(self, mask: Tensor, positions: Tensor) -> Tensor:
        """`mask` at `positions`, `[B or 1, H or 1, G or 1, L or 1, t]`; a bool mask is False beyond its columns."""
        mask = mask[(None,) * (4 - mask.ndim)]
        index = positions.clamp(0, mask.shape[-1] - 1)[:, None, None, :]
        shape = (max(mask.shape[0], index.shape[0]), mask.shape[1], mask.shape[2])
        at = mask.expand(shape[0], -1, -1, -1).gather(-1, index.expand(*shape, -1))
        if mask.dtype == torch.bool:
            at = at & (positions < mask.shape[-1])[:, None, None, :]
        if at.shape[1] == 1:
            return at.unsqueeze(1)
        return at.unflatten(1, (self.call.num_kv_heads, self.call.group))


class _RunningSoftmax:
    def __init__(self, queries: _Queries) -> None:
        self.queries = queries
        shape = queries.q.shape[:-1]
        self.top = queries.q.new_full(shape, float("-inf"))
        self.total = queries.q.new_zeros(shape)
        self.weighted = queries.q.new_zeros((*shape, queries.call.v_head_dim))

    def add(self, k: Tensor, v: Tensor, positions: Tensor, present: Tensor, *, stored: bool) -> None:
        """Folds tokens in: `k` `[B, H, t, D]`, `v` `[B, H, t, Dv]`, `positions` `[B or 1, t]`, `present` `[B, t]`."""
        scores = self.queries.scores(k, positions, present, stored)
        top = torch.maximum(self.top, scores.amax(-1))
        base = torch.where(top == float("-inf"), 0.0, top)
        weights = torch.exp(scores - base.unsqueeze(-1))
        keep = torch.exp(self.top - base)
        if stored and self.queries.call.v_bias is not None:
            v = v + self.queries.call.v_bias[:, None, :]
        self.total = self.total * keep + weights.sum(-1)
        product = (weights.flatten(2, 3) @ v).view(self.weighted.shape)
        self.weighted = self.weighted * keep.unsqueeze(-1) + product
        self.top = top

    def finish(self, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(out [B, Hq, L, Dv], lse [B, Hq, L])`, float32."""
        top, total, weighted = self.top, self.total, self.weighted
        if sink_logits is not None:
            heads, group = top.shape[1:3]
            sink = sink_logits.to(torch.float32).view(heads, group, 1)
            sink = torch.where(self.queries.real[:, None, None, :], sink, float("-inf"))
            new_top = torch.maximum(top, sink)
            base = torch.where(new_top == float("-inf"), 0.0, new_top)
            keep = torch.exp(top - base)
            top, total, weighted = new_top, total * keep + torch.exp(sink - base), weighted * keep.unsqueeze(-1)
        out = torch.where((total > 0).unsqueeze(-1), weighted / total.unsqueeze(-1), 0.0)
        return out.flatten(1, 2), (top + torch.log(total)).flatten(1, 2)


def _stored_tiles(call: AttentionCall, queries: _Queries) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Tiles of stored tokens that some row may see and has no exact copy of."""
    batch, page_size = call.q.shape[0], call.page_size
    first, end = _range(call, queries)
    tile = max(16, TILE_ELEMENTS // (batch * call.num_kv_heads * max(call.head_dim, call.v_head_dim)))
    if call.block_table is not None:
        first, tile = first // page_size * page_size, max(page_size, tile // page_size * page_size)
    start = first
    while start < end:
        stop = min(start + tile, end)
        if call.block_table is None:
            stop = min(stop, (start // page_size + 1) * page_size)
        positions = torch.arange(start, stop, device=call.q.device)[None]
        k = _stored(call, call.k_data, call.k_scales, call.k_global, call.k_format, "linear", start, stop)
        v = _stored(call, call.v_data, call.v_scales, call.v_global, call.v_format, call.v_scale_layout, start, stop)
        present = (positions >= torch.maximum(queries.oldest, queries.sink_end)[:, None]) & (
            positions < torch.minimum(queries.first_ring, queries.first_new)[:, None]
        )
        yield k, v, positions, present
        start = stop


def _range(call: AttentionCall, queries: _Queries) -> tuple[int, int]:
    """Positions that the tiles must cover. Off the CPU the lengths are not looked at: that would synchronise."""
    if call.q.device.type != "cpu":
        return 0, call.capacity
    if queries.lengths.numel() == 0:
        return 0, 0
    first = queries.oldest
    if call.window > 0:
        first = torch.maximum(first, queries.lengths - queries.num_new - call.window + 1)
    end = torch.minimum(queries.first_ring, queries.first_new)
    return max(0, int(first.min())), int(end.max())


def _stored(
    call: AttentionCall,
    data: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    storage_format: str,
    scale_layout: str,
    start: int,
    stop: int,
) -> Tensor:
    """float32 `[B, H, t, D]` of stored positions `start … stop - 1`, without bias."""
    batch, page_size = call.q.shape[0], call.page_size

    def tile(x: Tensor) -> Tensor:
        if call.block_table is None:
            return x[:batch, :, start % page_size : start % page_size + stop - start]
        pages = call.block_table[:, start // page_size : -(-stop // page_size)].long().clamp(0, x.shape[0] - 1)
        return x[pages].transpose(1, 2).flatten(2, 3)[:, :, : stop - start]

    if scales is not None:
        if scale_layout == "4token":
            scales = layout.v_scales_from_4token(scales)
        scales = tile(scales)
    return _finite(values(tile(data), scales, global_scale, storage_format), storage_format)


def _exact_tiles(call: AttentionCall, queries: _Queries) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Sinks, the ring of recent tokens, and the new tokens of this call, each where the call has them."""
    batch, device = call.q.shape[0], call.q.device
    first_new = queries.first_new[:, None]
    if call.k_exact is not None and call.v_exact is not None:
        sinks, ring = call.num_sink_tokens, call.ring_size
        if sinks:
            positions = queries.starts[:, None] + torch.arange(sinks, device=device)
            yield (*_exact(call.k_exact[:batch, :, :sinks], call.v_exact[:batch, :, :sinks]), positions, positions < first_new)
        if ring and call.exact_from is not None:
            # Slot s holds the newest position that is congruent to s.
            newest = queries.lengths[:, None] - 1
            positions = newest - (newest - torch.arange(ring, device=device)) % ring
            present = (positions >= queries.first_ring[:, None]) & (positions >= queries.sink_end[:, None])
            last = sinks + ring
            yield (
                *_exact(call.k_exact[:batch, :, sinks:last], call.v_exact[:batch, :, sinks:last]),
                positions,
                present & (positions < first_new),
            )
    if call.k_new is not None and call.v_new is not None:
        positions = queries.first_new[:, None] + torch.arange(call.k_new.shape[2], device=device)
        present = torch.ones_like(positions, dtype=torch.bool)
        yield (*_exact(call.k_new, call.v_new), positions, present)


def _exact(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _finite(k.to(torch.float32), "exact"), _finite(v.to(torch.float32), "exact")


def _finite(x: Tensor, storage_format: str) -> Tensor:
    """Slots that nobody wrote may hold NaN, which a weight of 0 would not remove."""
    return torch.nan_to_num(x, nan=0.0) if storage_format in ("exact", "fp8") else x
