"""Attention over a quantised cache in PyTorch, tile by tile: the CPU backend, and the one that takes any call.

Scratch grows neither with the context nor with the number of queries: a block of queries meets one tile of tokens at a
time, dequantised where it comes from storage, and folds it into a running softmax (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018). All arithmetic is float32.

Shapes: B batch, H KV heads, G query heads a KV head, L queries of a block, t tokens of a tile, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .call import AttentionCall
from .dequantize import values

TILE_ELEMENTS = 1 << 19
"""Elements of K dequantised at once, over batch and heads."""

SCORE_ELEMENTS = 1 << 21
"""Scores held at once: bounds the queries of a block."""

Tile = tuple[Tensor, Tensor, Tensor, Tensor]
"""`k` `[B, H, t, D]`, `v` `[B, H, t, Dv]`, `positions` `[B or 1, t]`, `present` (bool) `[B, t]`."""


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves every `AttentionCall`; see `attention.py` for what it computes."""
    batch, heads, num_queries, _ = call.q.shape
    out, lse = call.empty_out(), call.empty_lse()
    if lse.numel():
        block = max(1, SCORE_ELEMENTS // (batch * heads * tile_size(call)))
        for first in range(0, num_queries, block):
            last = min(first + block, num_queries)
            queries = Queries(call, first, last, stored_query(call, first, last))
            out[:, :, first:last], lse[:, :, first:last] = _attend(queries)
    return out, lse if call.return_lse else None


def _attend(queries: Queries) -> tuple[Tensor, Tensor]:
    softmax = RunningSoftmax(queries)
    for tile in _stored_tiles(queries):
        softmax.add(*tile, stored=True)
    for tile in exact_tiles(queries):
        softmax.add(*tile, stored=False)
    return softmax.finish()


def tile_size(call: AttentionCall) -> int:
    size = max(16, TILE_ELEMENTS // (call.q.shape[0] * call.num_kv_heads * max(call.head_dim, call.v_head_dim)))
    if call.block_table is not None:
        return max(call.page_size, size // call.page_size * call.page_size)
    return size // 4 * 4


StoredQuery = tuple[Tensor | None, Tensor | None]
"""What stored keys meet, `[B, Hq, L, D]`, None where that is q; what their product gets added, float32 `[B, Hq, L]`."""


def stored_query(call: AttentionCall, first: int, last: int) -> StoredQuery:
    """That of queries `first … last - 1`."""
    q, transform = call.q[:, :, first:last], call.transform
    return transform.query(q) if transform.moves_queries else None, transform.query_bias(q)


class Queries:
    """Queries `first … last - 1` of a call with their positions, and what they may see."""

    def __init__(self, call: AttentionCall, first: int, last: int, stored: StoredQuery) -> None:
        self.call, self.first, self.last = call, first, last
        self.lengths = call.lengths.to(torch.int64)
        num_new = torch.full_like(self.lengths, call.q.shape[2]) if call.q_lengths is None else call.q_lengths.long()
        self.starts = torch.zeros_like(self.lengths) if call.starts is None else call.starts.long().clamp(min=0)
        index = torch.arange(first, last, device=call.q.device)
        self.real = index < num_new[:, None]
        self.positions = self.lengths[:, None] - num_new[:, None] + index
        self.q = self._grouped(call.q[:, :, first:last])
        q_stored, stored_bias = stored
        self.q_stored = self.q if q_stored is None else self._grouped(q_stored)
        self.stored_bias = None if stored_bias is None else self._grouped(stored_bias)
        self.mask = None if call.mask is None else self._own_rows(call.mask)
        self.sink_end = self.starts + call.num_sink_tokens if call.k_exact is not None else self.starts
        self.first_ring = self.lengths
        if call.k_exact is not None and call.exact_from is not None:
            self.first_ring = call.exact_from.to(torch.int64)
        self.first_new = self.lengths - num_new if call.k_new is not None else self.lengths

    def _grouped(self, x: Tensor) -> Tensor:
        """`[B, Hq, L, ·]` to float32 `[B, H, G, L, ·]`."""
        return x.to(torch.float32).unflatten(1, (self.call.num_kv_heads, self.call.group))

    def _own_rows(self, mask: Tensor) -> Tensor:
        """`mask` with four dimensions, and only the rows of these queries where it has rows."""
        mask = mask[(None,) * (4 - mask.ndim)]
        return mask if mask.shape[2] == 1 else mask[:, :, self.first : self.last]

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
        """float32 `[B, H, G, L, t]` scores of keys `[B, H, t, D]`; -inf where not seen or not present."""
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
        if self.mask is not None:
            mask = self._mask_at(self.mask, positions)
            if mask.dtype == torch.bool:
                seen = seen & mask
            else:
                scores = scores + mask
            seen = seen & (positions < self.mask.shape[-1])[:, None, None, None, :]
        return scores.masked_fill(~seen, float("-inf"))

    def _mask_at(self, mask: Tensor, positions: Tensor) -> Tensor:
        """`mask` at `positions`, `[B or 1, H or 1, G or 1, L or 1, t]`; beyond its columns the last one is repeated."""
        index = positions.clamp(0, mask.shape[-1] - 1)[:, None, None, :]
        shape = (max(mask.shape[0], index.shape[0]), mask.shape[1], mask.shape[2])
        at = mask.expand(shape[0], -1, -1, -1).gather(-1, index.expand(*shape, -1))
        if at.shape[1] == 1:
            return at.unsqueeze(1)
        return at.unflatten(1, (self.call.num_kv_heads, self.call.group))


class RunningSoftmax:
    def __init__(self, queries: Queries) -> None:
        self.queries = queries
        shape = queries.q.shape[:-1]
        self.top = queries.q.new_full(shape, float("-inf"))
        self.total = queries.q.new_zeros(shape)
        self.weighted = queries.q.new_zeros((*shape, queries.call.v_head_dim))

    def resume(self, out: Tensor, lse: Tensor) -> None:
        """Begins with what another kernel made of some tokens: `out` `[B, Hq, L, Dv]`, `lse` `[B, Hq, L]`, float32."""
        self.top = lse.view(self.top.shape)
        self.total = (self.top > float("-inf")).to(self.top.dtype)
        self.weighted = out.view(self.weighted.shape) * self.total.unsqueeze(-1)

    def add(self, k: Tensor, v: Tensor, positions: Tensor, present: Tensor, *, stored: bool) -> None:
        """Folds the tokens of a `Tile` in."""
        scores = self.queries.scores(k, positions, present, stored)
        top = torch.maximum(self.top, scores.amax(-1))
        base = torch.where(top == float("-inf"), 0.0, top)
        weights = torch.exp(scores - base.unsqueeze(-1))
        keep = torch.exp(self.top - base)
        if stored and self.queries.call.v_bias is not None:
            v = v + self.queries.call.v_bias[:, None, :]
        # What nobody sees may hold inf or NaN (memory never written, padding), which a weight of 0 would not remove.
        used = ((weights != 0) & (scores != float("-inf"))).flatten(2, 3).any(2)
        v = v.masked_fill(~used.unsqueeze(-1), 0.0)
        self.total = self.total * keep + weights.sum(-1)
        product = (weights.flatten(2, 3) @ v).view(self.weighted.shape)
        self.weighted = self.weighted * keep.unsqueeze(-1) + product
        self.top = top

    def finish(self) -> tuple[Tensor, Tensor]:
        """`(out [B, Hq, L, Dv], lse [B, Hq, L])`, float32."""
        top, total, weighted = self.top, self.total, self.weighted
        sink_logits = self.queries.call.sink_logits
        if sink_logits is not None:
            heads, group = top.shape[1:3]
            sink = sink_logits.to(torch.float32).view(heads, group, 1)
            sink = torch.where(self.queries.real[:, None, None, :], sink, float("-inf"))
            new_top = torch.maximum(top, sink)
            base = torch.where(new_top == float("-inf"), 0.0, new_top)
            keep = torch.exp(top - base)
            top, total, weighted = new_top, total * keep + torch.exp(sink - base), weighted * keep.unsqueeze(-1)
        out = torch.where((total == 0).unsqueeze(-1), 0.0, weighted / total.unsqueeze(-1))
        return out.flatten(1, 2), (top + torch.log(total)).flatten(1, 2)


def _stored_tiles(queries: Queries) -> Iterator[Tile]:
    """Tiles of stored tokens that some row may see and has no exact copy of."""
    call = queries.call
    tile = tile_size(call)
    start, end = _range(queries)
    newest = queries.first_new[:, None] - 1
    while start < end:
        stop = min(start + tile, -(-end // 4) * 4, call.capacity)
        positions = torch.arange(start, stop, device=call.q.device)[None]
        if call.block_table is None:
            # Slot s holds the newest position that is congruent to s.
            positions = newest - (newest - positions) % call.page_size
        k = _stored(call, call.k_data, call.k_scales, call.k_global, call.k_format, "linear", start, stop)
        v = _stored(call, call.v_data, call.v_scales, call.v_global, call.v_format, call.v_scale_layout, start, stop)
        present = (positions >= queries.sink_end[:, None]) & (
            positions < torch.minimum(queries.first_ring, queries.first_new)[:, None]
        )
        yield k, v, positions, present
        start = stop


def _range(queries: Queries) -> tuple[int, int]:
    """As `slot_range`, on the host. Off the CPU the lengths are not looked at: that would synchronise."""
    if queries.call.q.device.type != "cpu":
        return 0, queries.call.capacity
    start, end = slot_range(queries)
    return int(start), int(end)


def slot_range(queries: Queries) -> tuple[Tensor, Tensor]:
    """`[start, end)`, 0-d int64: slots of a page, or positions with a block table, that the stored tiles must cover."""
    call = queries.call
    first, end = queries.sink_end, torch.minimum(queries.first_ring, queries.first_new)
    if call.window > 0:
        first = torch.maximum(first, queries.positions[:, 0] - call.window + 1)
    if call.causal:
        end = torch.minimum(end, queries.positions[:, -1] + 1)
    start, end = first.min().clamp(min=0), end.max().clamp(max=call.capacity)
    if call.block_table is None:
        # A page that has gone round holds recent tokens anywhere.
        wrapped = queries.first_new.max() > call.page_size
        start, end = torch.where(wrapped, 0, start), torch.where(wrapped, call.capacity, end)
    # V's scales may be permuted within 4 tokens (`v_scale_layout`), so that tiles hold whole groups of 4.
    unit = 4 if call.block_table is None else call.page_size
    return start // unit * unit, end


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
    """float32 `[B, H, t, D]` of slots or positions `start … stop - 1`, without bias."""
    batch, page_size = call.q.shape[0], call.page_size

    def tile(x: Tensor) -> Tensor:
        if call.block_table is None:
            return x[:batch, :, start:stop]
        pages = call.block_table[:, start // page_size : -(-stop // page_size)].long().clamp(0, x.shape[0] - 1)
        return x[pages].transpose(1, 2).flatten(2, 3)[:, :, : stop - start]

    return values(tile(data), None if scales is None else tile(scales), global_scale, storage_format, scale_layout)


def exact_tiles(queries: Queries) -> Iterator[Tile]:
    """Sinks, the ring of recent tokens, and the new tokens of this call, each where the call has them."""
    call = queries.call
    first_new = queries.first_new[:, None]
    if call.k_exact is not None and call.v_exact is not None:
        batch, sinks, last = call.q.shape[0], call.num_sink_tokens, call.num_sink_tokens + call.ring_size
        k, v = call.k_exact[:batch], call.v_exact[:batch]
        for start, stop in _pieces(0, sinks, call):
            positions = queries.starts[:, None] + torch.arange(start, stop, device=k.device)
            yield _exact(k, v, start, stop, positions, positions < first_new)
        for start, stop in _pieces(sinks, last if call.exact_from is not None else sinks, call):
            newest = first_new - 1
            positions = newest - (newest - torch.arange(start - sinks, stop - sinks, device=k.device)) % call.ring_size
            present = positions >= torch.maximum(queries.first_ring, queries.sink_end)[:, None]
            yield _exact(k, v, start, stop, positions, present)
    if call.k_new is not None and call.v_new is not None:
        # New token j stands where query j stands.
        first = max(0, queries.first - call.window + 1) if call.window > 0 else 0
        last = queries.last if call.causal else call.k_new.shape[2]
        for start, stop in _pieces(first, last, call):
            positions = first_new + torch.arange(start, stop, device=call.k_new.device)
            yield _exact(call.k_new, call.v_new, start, stop, positions, torch.ones_like(positions, dtype=torch.bool))


def _pieces(start: int, end: int, call: AttentionCall) -> Iterator[tuple[int, int]]:
    size = tile_size(call)
    for first in range(start, end, size):
        yield first, min(first + size, end)


def _exact(k: Tensor, v: Tensor, start: int, stop: int, positions: Tensor, present: Tensor) -> Tile:
    return k[:, :, start:stop].to(torch.float32), v[:, :, start:stop].to(torch.float32), positions, present
