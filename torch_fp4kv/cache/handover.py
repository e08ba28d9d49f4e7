"""Hand-over of sequences between caches, on one machine or several: prefill here, decode there, bit for bit.

Shapes: B rows, H KV heads of the sender, n tokens, m exact tokens, S sinks, D and Dv head sizes, T tokens a page.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.format.layout import from_packed, to_packed, v_scales_from_4token, v_scales_to_4token
from ..recipe import Recipe
from .blocks import Blocks
from .codes import last_data
from .contents import Contents, make_room
from .hf import NVFP4Cache
from .paged import PagedNVFP4Cache, PagedPositions
from .positions import Positions
from .storage import LayerStorage

_PARTS = ("k", "v")
_HEAD_TENSORS = ("k_global", "v_global", "k_bias")


def export_blocks(
    cache: NVFP4Cache | PagedNVFP4Cache,
    transfer: str,
    rows: Sequence[int] | None = None,
    tokens: range | None = None,
    *,
    more: bool = False,
) -> Blocks:
    """Copies tokens of some rows, and with the last ones what else decoding goes on from, into one message.

    A long prompt can leave in several messages while it is still prefilled: each but the last with `more=True`.

    Args:
        cache: with the whole model's heads, or a rank's (`tp_rank`, `tp_size`).
        transfer: names the rows' hand-over, the same in all its messages and in those of other ranks, and no other's.
        rows: which rows, of equal length; default all.
        tokens: positions `range(first, stop)`; default all that are stored.
        more: other messages of this hand-over follow, with later tokens.

    Raises:
        ValueError: nothing is stored, a row is not there, rows differ in length, `tokens` is empty or beyond them, or
            the last message does not reach their end.
        RuntimeError: an earlier call of the model ended halfway, so that layers differ.
    """
    layers = list(_layers_of(cache))
    rows = cache.rows if rows is None else list(rows)
    if not rows or not layers:
        raise ValueError("nothing to hand over: the cache has stored no tokens")
    for row in rows:
        cache.check_whole(row)
    positions = layers[0].positions
    lengths = set(positions.lengths[rows].tolist())
    if len(lengths) > 1:
        raise ValueError(f"rows handed over together must be of equal length, got {sorted(lengths)} tokens")
    length = lengths.pop()
    tokens = range(length) if tokens is None else tokens
    if tokens.step != 1 or not 0 <= tokens.start < tokens.stop <= length:
        raise ValueError(f"tokens must be a range of positions within the {length} that are stored, got {tokens}")
    if not more and tokens.stop != length:
        raise ValueError(f"the last blocks must reach the row's end at {length}, not {tokens.stop}; or pass more=True")
    described, tensors = [], {}
    for layer in layers:
        facts, own = layer.read(rows, tokens, last=not more)
        described.append(facts)
        tensors.update({f"layers.{layer.index}.{name}": tensor for name, tensor in own.items()})
    header = {
        "transfer": transfer,
        "tokens": [tokens.start, tokens.stop],
        "more": more,
        "starts": positions.starts[rows].tolist(),
        "longest": positions.longest[rows].tolist(),
        "num_layers": len(cache.layers),
        "layers": described,
    }
    return Blocks.pack(header, tensors)


def import_blocks(
    cache: NVFP4Cache | PagedNVFP4Cache, blocks: Blocks | Iterable[Blocks], device: torch.device | str | None = None
) -> list[int]:
    """Takes over what `export_blocks` copied; everything is checked before anything is changed.

    Capacity, page size and number of ranks may be other ones. All messages of a hand-over are given at once, in any
    order; those of several ranks together, so that each head that this cache holds is in one rank's.

    Args:
        cache: an empty `NVFP4Cache`, whose rows they become, or a pool with room, of the same model and recipe. A pool
            that holds scales already takes rows with the same ones only: from one other pool, or with calibrated ones.
        blocks: what was received.
        device: where an `NVFP4Cache` goes that has no buffers yet; default that of the blocks.

    Returns:
        The rows of `cache` that hold them, in the order of the exported rows.

    Raises:
        ValueError: a message is missing, there twice, altered or of another hand-over, or they do not go with `cache`.
            Nothing was changed.
        RuntimeError: a pool has not enough rows or pages free. Nothing was changed.
    """
    ranks = _complete([_Message.of(one) for one in ([blocks] if isinstance(blocks, Blocks) else blocks)])
    last = ranks[0][-1]
    _check_goes_with(cache, ranks)
    if isinstance(cache, PagedNVFP4Cache):
        rows = cache.admit_transfer(last.transfer, last.num_rows, last.stop)
    else:
        contents = [_contents(cache, index, last) for index in last.layers]
        make_room(cache, contents, device or last.device)
        rows = list(range(last.num_rows))
    placed: list[Positions] = []
    with cache.changing(rows):
        for layer in _layers_of(cache, initialized=True):
            if layer.index not in last.layers:
                continue
            for message in (message for rank in ranks for message in rank):
                layer.write(rows, message)
            if not any(layer.positions is known for known in placed):
                placed.append(layer.positions)
                layer.place(rows, last)
    return rows


@dataclass(frozen=True)
class _Layer:
    """A layer of either kind of cache."""

    index: int
    storage: LayerStorage
    positions: Positions
    heads: range
    total: int

    def read(self, rows: list[int], tokens: range, last: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a header says of the layer, and its tensors of `tokens` in interchange form."""
        storage, positions = self.storage, self.positions
        index = torch.tensor(rows, device=positions.lengths.device)
        first = tokens.start
        if storage.window > 0:
            # What is seen again, also after a crop.
            seen_from = int(positions.longest[index].min()) - storage.tokens
            first = min(max(first, seen_from), tokens.stop)
        facts: dict[str, Any] = {
            "index": self.index,
            "window": storage.window,
            "recipe": _recipe_facts(storage.recipe),
            "calibration": _calibration_digests(storage.recipe, len(self.heads)),
            "heads": [self.heads.start, self.heads.stop, self.total],
            "sizes": [storage.head_dim, storage.v_head_dim],
            "dtype": str(storage.dtype).removeprefix("torch."),
            "rotated": storage.rotated,
            "v_scale_layout": storage.v_scale_layout,
            "first": first,
        }
        pages, offsets = self._slots(index, first, tokens.stop)
        exact, exact_from = {}, tokens.stop
        if last and storage.k_exact is not None:
            # The ring's slack, there for a crop, stays behind.
            held = positions.held_from[index].clamp(min=tokens.stop - positions.window)
            facts["held_from"] = held.tolist()
            slots = self._exact_slots(int(held.min()), tokens.stop, index.device)
            exact = {name: getattr(storage, f"{name}_exact")[index][:, :, slots] for name in _PARTS}
            in_ring = torch.maximum(held, positions.starts[index] + storage.recipe.num_sink_tokens)
            exact_from = min(max(first, int(in_ring.max())), tokens.stop)
        tensors = {}
        for name in _PARTS:
            data, scales = getattr(storage, f"{name}_data"), getattr(storage, f"{name}_scales")
            new, new_scales = data[pages, :, offsets].transpose(1, 2).contiguous(), None
            if scales is not None:
                if name == "v" and storage.v_scale_layout == "4token":
                    used, place = pages.unique(return_inverse=True)
                    new_scales = v_scales_from_4token(scales[used])[place, :, offsets]
                else:
                    new_scales = scales[pages, :, offsets]
                new_scales = new_scales.transpose(1, 2).contiguous()
            if exact:
                # What follows from the exact values is left out, unless another library wrote other bytes.
                rest = last_data(storage, name, tokens.stop - exact_from, exact[name], new_scales, slice(None))
                if torch.equal(rest, new[:, :, exact_from - first :]):
                    new = new[:, :, : exact_from - first]
            tensors[f"{name}_data"] = new if new_scales is None else to_packed(new)
            if new_scales is not None:
                is_e4m3 = getattr(storage.recipe, f"{name}_format") == "nvfp4"
                tensors[f"{name}_scales"] = new_scales.view(torch.float8_e4m3fn) if is_e4m3 else new_scales
        if last:
            tensors.update({name: x for name in _HEAD_TENSORS if (x := getattr(storage, name)) is not None})
            tensors.update({f"{name}_exact": x for name, x in exact.items()})
        return facts, tensors

    def write(self, rows: list[int], message: _Message) -> None:
        """Stores those of `message`'s heads that are held here."""
        storage, positions = self.storage, self.positions
        facts, tensors = message.layers[self.index], message.tensors_of(self.index)
        sent = range(*facts["heads"][:2])
        both = range(max(sent.start, self.heads.start), min(sent.stop, self.heads.stop))
        if not both:
            return
        source = slice(both.start - sent.start, both.stop - sent.start)
        target = slice(both.start - self.heads.start, both.stop - self.heads.start)
        index = torch.tensor(rows, device=positions.lengths.device)
        pages, offsets = self._slots(index, facts["first"], message.stop)
        storage.rotated = facts["rotated"]
        for name in _HEAD_TENSORS:
            if name in tensors:
                getattr(storage, name)[target] = tensors[name][source].to(index.device)
        for name in _PARTS:
            data, scales = getattr(storage, f"{name}_data"), getattr(storage, f"{name}_scales")
            new, new_scales = tensors[f"{name}_data"], None
            new = (new if scales is None else from_packed(new))[:, source].to(data.device)
            if scales is not None:
                new_scales = tensors[f"{name}_scales"].view(torch.uint8)[:, source].to(data.device)
                by_slot = new_scales.transpose(1, 2)
                if name == "v" and storage.v_scale_layout == "4token":
                    used, place = pages.unique(return_inverse=True)
                    linear = v_scales_from_4token(scales[used])
                    linear[place, target, offsets] = by_slot
                    scales[used] = v_scales_to_4token(linear)
                else:
                    scales[pages, target, offsets] = by_slot
            left_out = pages.shape[1] - new.shape[2]
            if left_out:
                exact = tensors[f"{name}_exact"][:, source].to(data.device)
                rest = last_data(storage, name, left_out, exact, new_scales, target)
                new = torch.cat([new, rest], 2)
            data[pages, target, offsets] = new.transpose(1, 2)
        if message.more:
            return
        if storage.k_exact is not None:
            slots = self._exact_slots(min(facts["held_from"]), message.stop, index.device)
            for name in _PARTS:
                exact = getattr(storage, f"{name}_exact")
                exact[index[:, None], target, slots] = (
                    tensors[f"{name}_exact"][:, source].transpose(1, 2).to(data.device)
                )
        storage.empty = False
        storage.frozen = storage.frozen or isinstance(positions, PagedPositions)

    def place(self, rows: list[int], last: _Message) -> None:
        """Says in the layer's positions where `rows` stand after the hand-over that ends with `last`."""
        held_from = last.layers[self.index].get("held_from", last.starts)
        columns = (rows, [last.stop] * len(rows), last.starts, last.longest, held_from)
        device = self.positions.lengths.device
        self.positions.place(*(torch.tensor(column, device=device) for column in columns))

    def _slots(self, rows: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Page and place in it, int64 `[B, n]`, of positions `first` … `stop` - 1 of `rows`."""
        position = torch.arange(first, stop, device=rows.device).expand(len(rows), -1)
        slots = self.positions.slots_at(rows, position, self.storage.tokens)
        return slots // self.storage.tokens, slots % self.storage.tokens

    def _exact_slots(self, first: int, stop: int, device: torch.device) -> Tensor:
        """int64 `[S + m]`: those of the sinks, then of positions `first` … `stop` - 1 in the ring."""
        sinks = self.storage.recipe.num_sink_tokens
        ring = torch.arange(first, stop if self.positions.ring else first, device=device)
        return torch.cat([torch.arange(sinks, device=device), sinks + ring % max(self.positions.ring, 1)])


@dataclass(frozen=True)
class _Message:
    """Blocks that have the checksums they left with."""

    header: dict[str, Any]
    layers: dict[int, dict[str, Any]]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, blocks: Blocks) -> _Message:
        tensors = blocks.tensors()
        return cls(blocks.header, {facts["index"]: facts for facts in blocks.header["layers"]}, tensors)

    @property
    def transfer(self) -> str:
        return str(self.header["transfer"])

    @property
    def start(self) -> int:
        return int(self.header["tokens"][0])

    @property
    def stop(self) -> int:
        return int(self.header["tokens"][1])

    @property
    def more(self) -> bool:
        return bool(self.header["more"])

    @property
    def starts(self) -> list[int]:
        return list(self.header["starts"])

    @property
    def longest(self) -> list[int]:
        return list(self.header["longest"])

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def heads(self) -> tuple[Any, ...]:
        """Which heads of each layer it holds: the same in all messages of a rank."""
        return tuple(tuple(facts["heads"]) for facts in self.layers.values())

    @property
    def common(self) -> list[Any]:
        """What all messages of a hand-over have in common."""
        keys = ("index", "window", "recipe", "sizes", "dtype", "rotated")
        layers = [[*(facts[key] for key in keys), facts["heads"][2]] for facts in self.layers.values()]
        return [self.starts, self.header["num_layers"], layers]

    def tensors_of(self, index: int) -> dict[str, Tensor]:
        prefix = f"layers.{index}."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


def _layers_of(cache: NVFP4Cache | PagedNVFP4Cache, initialized: bool = False) -> Iterator[_Layer]:
    """The layers that hold tokens, or with `initialized` those that have buffers."""
    if isinstance(cache, PagedNVFP4Cache):
        for index, (storage, total) in enumerate(zip(cache.layers, cache.num_kv_heads)):
            yield _Layer(index, storage, cache.positions_of(index), cache.shard.heads(total), total)
        return
    for index, layer in enumerate(cache.layers):
        if layer.is_initialized and (initialized or not layer.storage.empty):
            total = cache.shard.total(layer.num_heads, layer.kv_heads)
            positions = layer.positions
            assert positions is not None
            yield _Layer(index, layer.storage, positions, cache.shard.heads(total), total)


def _complete(messages: list[_Message]) -> list[list[_Message]]:
    """The messages of one hand-over, a list for each sending rank in order of tokens.

    Raises:
        ValueError: they are not all the messages of one hand-over, each once.
    """
    if not messages:
        raise ValueError("no blocks were given")
    name = messages[0].transfer
    ranks: dict[tuple[Any, ...], list[_Message]] = {}
    for message in messages:
        if message.transfer != name:
            raise ValueError(f"blocks of {message.transfer!r} are among those of {name!r}")
        if message.common != messages[0].common:
            raise ValueError(f"blocks of {name!r} are from caches that differ in rows, layers or recipe")
        ranks.setdefault(message.heads, []).append(message)
    for rank in ranks.values():
        rank.sort(key=lambda message: message.start)
        expected = 0
        for message in rank:
            if message.start < expected:
                raise ValueError(f"blocks of {name!r} came twice: tokens {message.start} to {expected - 1}")
            if message.start > expected:
                raise ValueError(f"blocks of {name!r} are missing: tokens {expected} to {message.start - 1}")
            expected = message.stop
        if rank[-1].more:
            raise ValueError(f"the last blocks of {name!r} are missing: tokens from {expected}")
        if not all(message.more for message in rank[:-1]):
            raise ValueError(f"blocks of {name!r} follow those that were its last")
    lengths = {rank[-1].stop for rank in ranks.values()}
    if len(lengths) > 1:
        raise ValueError(f"ranks handed over {name!r} with different numbers of tokens: {sorted(lengths)}")
    return list(ranks.values())


def _check_goes_with(cache: NVFP4Cache | PagedNVFP4Cache, ranks: list[list[_Message]]) -> None:
    """Raises ValueError unless `cache` can take the hand-over as it is."""
    last = ranks[0][-1]
    what = f"{last.transfer!r} does not go with this cache"
    if last.header["num_layers"] != len(cache.layers):
        raise ValueError(f"{what}: it has {last.header['num_layers']} layers, the cache {len(cache.layers)}")
    if isinstance(cache, NVFP4Cache):
        if not cache.is_empty:
            raise ValueError("the cache holds tokens already: reset() it before it takes others")
        capacity = cache.layers[0].max_cache_len
        if capacity is not None and last.stop > capacity:
            raise ValueError(f"{what}: {last.stop} tokens exceed max_cache_len={capacity}")
    for index, facts in last.layers.items():
        layer = cache.layers[index]
        storage = layer if isinstance(layer, LayerStorage) else layer.storage
        total = facts["heads"][2]
        wanted = cache.shard.heads(total)
        own = {"window": storage.window, "recipe": _recipe_facts(storage.recipe)}
        if isinstance(cache, PagedNVFP4Cache):
            dtype = str(storage.dtype).removeprefix("torch.")
            own |= {"sizes": [storage.head_dim, storage.v_head_dim], "dtype": dtype}
            if total != cache.num_kv_heads[index]:
                raise ValueError(f"{what}: layer {index} has {total} KV heads, the cache's {cache.num_kv_heads[index]}")
        else:
            _contents(cache, index, last).check(repr(last.transfer))
        if storage.v_scale_layout == "4token" != facts["v_scale_layout"]:
            raise ValueError(f"{what}: its block scales may be larger than the 4-token layout's readers can take")
        for key, value in own.items():
            if facts[key] != value:
                raise ValueError(f"{what}: {key} of layer {index} is {facts[key]}, the cache's {value}")
        digests = dict(zip(wanted, _calibration_digests(storage.recipe, len(wanted))))
        for head in wanted:
            holders = [rank[-1] for rank in ranks if head in range(*rank[-1].layers[index]["heads"][:2])]
            if len(holders) != 1:
                problem = "came from two ranks" if holders else "is missing"
                raise ValueError(f"KV head {head} of layer {index} of {last.transfer!r} {problem}")
            _check_head(what, index, head, holders[0], storage, head - wanted.start, digests.get(head))


def _check_head(
    what: str, index: int, head: int, message: _Message, storage: LayerStorage, place: int, digest: str | None
) -> None:
    """Raises ValueError unless `message`'s `head` has the calibrated numbers of head `place` of `storage`, and the
    chosen ones where those of a pool are fixed."""
    facts = message.layers[index]
    at = head - facts["heads"][0]
    sent = facts["calibration"][at] if facts["calibration"] else None
    if sent != digest:
        raise ValueError(f"{what}: layer {index} was calibrated with other numbers")
    if not storage.frozen:
        return
    tensors = message.tensors_of(index)
    for name in _HEAD_TENSORS:
        own = getattr(storage, name)
        if own is not None and not torch.equal(tensors[name][at].to(own.device), own[place]):
            raise ValueError(
                f"{what}: its {name} in layer {index} is another; a pool that holds sequences takes those of the pool "
                "that its first came from, or calibrated ones"
            )
    if facts["rotated"] != storage.rotated:
        raise ValueError(f"{what}: K of layer {index} is rotated in one of them only")


def _contents(cache: NVFP4Cache, index: int, last: _Message) -> Contents:
    facts = last.layers[index]
    heads = len(cache.shard.heads(facts["heads"][2]))
    dtype = getattr(torch, facts["dtype"])
    head_dim, v_head_dim = facts["sizes"]
    return Contents(index, cache.layers[index], last.num_rows, heads, head_dim, v_head_dim, last.stop, dtype)


def _recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """The recipe of a layer without its calibrated numbers, of which each rank has others."""
    facts: dict[str, Any] = json.loads(dataclasses.replace(recipe, calibration=()).to_json())
    return facts


def _calibration_digests(recipe: Recipe, heads: int) -> list[str]:
    """What tells the calibrated numbers of each head from others; empty without any."""
    if not recipe.calibration:
        return []
    fields = dataclasses.asdict(recipe.calibration[0])

    def digest(head: int) -> str:
        own = {name: x if x is None else x[head if len(x) > 1 else 0] for name, x in fields.items()}
        return hashlib.sha256(json.dumps(own).encode()).hexdigest()[:16]

    return [digest(head) for head in range(heads)]
