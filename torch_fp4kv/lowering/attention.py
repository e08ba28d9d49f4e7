"""`fp4kv::attention` in Inductor: on the CPU the running softmax of `ops/torch_attention.py`, compiled.

The loop over stored tiles is a `while_loop` from the first to the last token that some query sees, so that the code
does not grow with the capacity, the work goes with the length, and an exported program needs no Python. In a tile
dequantising is one vectorised kernel that feeds a matrix product.

On other devices the op is left to its kernels, but for a program that is packaged on CUDA (AOTInductor): that calls the
portable Triton kernel, which serves every call and is compiled into the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _compat
from ..ops import torch_attention
from ..ops.call import AttentionCall
from ..ops.torch_attention import Queries, RunningSoftmax, Tile

_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionCall))


def unsupported(q: Any, *args: Any, **kwargs: Any) -> str | None:
    """Why these arguments are left to the op itself, or None."""
    device = q.get_device().type
    if device != "cpu" and not _packaged(device):
        return f"kernels serve it on {device}"
    if not all(_compat.is_static(x) for x in (q, *args, *kwargs.values())):
        return "shapes are dynamic"
    if kwargs.get("backend", "auto") not in ("auto", "torch" if device == "cpu" else "triton"):
        return "a backend is asked for by name"
    return None


def _packaged(device: str) -> bool:
    """Whether what is compiled must run without this package, on CUDA."""
    return device == "cuda" and _compat.compiles_ahead_of_time()


def lower(*args: Any, **kwargs: Any) -> Any:
    """`[B, Hq, L, Dv]`."""
    return _lower(False, args, kwargs)[0]


def lower_with_lse(*args: Any, **kwargs: Any) -> Any:
    """`[B, Hq, L, Dv]` and `[B, Hq, L]`."""
    return _lower(True, args, kwargs)


def _lower(return_lse: bool, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    given = {**dict(zip(_FIELDS, args)), **kwargs}
    fake_args, fake_kwargs = _compat.current_fake_arguments()
    fakes = {**dict(zip(_FIELDS, fake_args)), **fake_kwargs}
    tensors = {name: value for name, value in given.items() if _compat.is_tensor(value)}
    constants = {name: value for name, value in given.items() if name not in tensors}

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        fields: dict[str, Any] = {**constants, **dict(zip(tensors, values))}
        call = AttentionCall(**fields, return_lse=return_lse)
        out, lse = attend(call) if call.q.device.type == "cpu" else _portable(call)
        return (out, lse) if return_lse and lse is not None else (out,)

    return tuple(_compat.inline(function, list(tensors.values()), [fakes[name] for name in tensors]))


def _portable(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    from ..ops.kernels import fallback

    stored = torch_attention.stored_query(call, 0, call.q.shape[2])
    return fallback.launch(call, *stored, torch.library.wrap_triton)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """`(out, lse)` in operations that a compiler traces: no value is looked at and nothing is written in place."""
    batch, heads, num_queries, _ = call.q.shape
    if call.empty_lse().numel() == 0:
        return call.empty_out(), call.empty_lse()
    block = max(1, torch_attention.SCORE_ELEMENTS // (batch * heads * torch_attention.tile_size(call)))
    blocks = [_attend(call, first, min(first + block, num_queries)) for first in range(0, num_queries, block)]
    outs, lses = zip(*blocks)
    return torch.cat(outs, 2).to(call.result_dtype), torch.cat(lses, 2)


def _attend(call: AttentionCall, first: int, last: int) -> tuple[Tensor, Tensor]:
    """As `attend`, for queries `first … last - 1`."""
    tile = torch_attention.tile_size(call)
    stored = torch_attention.stored_query(call, first, last)  # once, and not in every turn of the loop
    queries = Queries(call, first, last, stored)
    softmax = RunningSoftmax(queries)
    start, end = torch_attention.slot_range(queries)
    if call.capacity <= tile:
        softmax.add(*_stored_tile(queries, torch.zeros_like(start), call.capacity), stored=True)
    else:
        names = [name for name in _FIELDS if isinstance(getattr(call, name), Tensor)]

        def more(start: Tensor, top: Tensor, total: Tensor, weighted: Tensor, end: Tensor, *_: Tensor) -> Tensor:
            return start < end

        def step(
            start: Tensor, top: Tensor, total: Tensor, weighted: Tensor, end: Tensor, *values: Tensor
        ) -> tuple[Tensor, ...]:
            fields: dict[str, Any] = dict(zip(names, values))
            inner_call = dataclasses.replace(call, **fields)
            rest = iter(values[len(names) :])
            q_stored, stored_bias = (None if x is None else next(rest) for x in stored)
            inner = Queries(inner_call, first, last, (q_stored, stored_bias))
            part = RunningSoftmax(inner)
            part.top, part.total, part.weighted = top, total, weighted
            part.add(*_stored_tile(inner, start, tile), stored=True)
            return start + tile, part.top, part.total, part.weighted

        # At least one turn: after none, code of AOTInductor (seen in 2.13) reads initial values whose memory it reused.
        end = torch.maximum(end, start + 1)
        carried = (start, softmax.top, softmax.total, softmax.weighted)
        others = (end, *[getattr(call, name) for name in names], *[x for x in stored if x is not None])
        _, softmax.top, softmax.total, softmax.weighted = _compat.while_loop(more, step, carried, others)
    for piece in torch_attention.exact_tiles(queries):
        softmax.add(*piece, stored=False)
    return softmax.finish()


def _stored_tile(queries: Queries, start: Tensor, size: int) -> Tile:
    """Slots (with a block table positions) `start … start + size - 1` as `torch_attention` has them."""
    call = queries.call
    slots = start + torch.arange(size)
    positions, inside = slots[None], slots < call.capacity
    slots = slots.clamp(max=call.capacity - 1)
    if call.block_table is None:
        newest = queries.first_new[:, None] - 1
        positions = newest - (newest - positions) % call.page_size
    gather = _gatherer(call, slots)
    k = _dequantize(gather, call.k_data, call.k_scales, call.k_global, call.k_format, "linear")
    v = _dequantize(gather, call.v_data, call.v_scales, call.v_global, call.v_format, call.v_scale_layout)
    last = torch.minimum(queries.first_ring, queries.first_new)[:, None]
    return k, v, positions, (positions >= queries.sink_end[:, None]) & (positions < last) & inside


def _gatherer(call: AttentionCall, slots: Tensor) -> Callable[[Tensor], Tensor]:
    """Takes `slots` `[t]` of each row out of storage `[P, H, T, ·]`: `[B, H, t, ·]`."""
    if call.block_table is None:
        batch = call.q.shape[0]
        return lambda x: x[:batch].index_select(2, slots)
    pages = call.block_table.index_select(1, slots // call.page_size).long().clamp(0, call.k_data.shape[0] - 1)
    offsets = slots % call.page_size
    return lambda x: x[pages, :, offsets].transpose(1, 2)


def _dequantize(
    gather: Callable[[Tensor], Tensor],
    data: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    storage_format: str,
    scale_layout: str,
) -> Tensor:
    """float32 `[B, H, t, D]`, by the op that has a lowering of its own."""
    if storage_format == "exact":
        return gather(data).to(torch.float32)
    out: Tensor = torch.ops.fp4kv.dequantize(
        gather(data),
        None if scales is None else gather(scales),
        global_scale,
        dtype=torch.float32,
        format=storage_format,
        scale_layout=scale_layout,
    )
    return out
