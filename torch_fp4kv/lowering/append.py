"""`fp4kv::append` in Inductor IR: encodes K and V where they are produced and writes them into the cache in place.

Shapes and arguments as in `ops/append.py`: B batch, H KV heads, L new tokens a row, D head size, T tokens a page.
Everything is written in the iteration space of K's (V's) blocks, `[B, H, L, D/16]`, so that encoding and writing are
one kernel. Slots out of range raise on the CPU; on a GPU, where a failed assertion would end the process, they are
clamped into the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from .. import _compat
from ..ops.format.constants import SCALE_MAX
from ..ops.format.transform import KeyTransform
from . import arithmetic as a
from . import blocks
from .quantize import per_block, scale_rule_unsupported


def unsupported(
    k_data: Any,
    k_scales: Any,
    v_data: Any,
    v_scales: Any,
    k: Any,
    *_args: Any,
    k_factors: Any = None,
    k_order: Any = None,
    k_rotation: int = 0,
    skip_negative: bool = False,
    scale_rule: str = "amax",
    **_options: Any,
) -> str | None:
    """Why these arguments are left to the op itself, or None."""
    if skip_negative:
        return "skip_negative leaves tokens out, and a compiled write has no mask"
    device = k.get_device()
    moved = k_factors is not None or k_order is not None or k_rotation
    if moved and device.type != "cpu":
        return "K is transformed across its blocks, for which there is a kernel"
    if moved and not _compat.is_static(k):
        return "K is transformed and its shape is dynamic"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and a compiled write is a scatter"
    return scale_rule_unsupported(scale_rule, device)


def lower(
    k_data: Any,
    k_scales: Any,
    v_data: Any,
    v_scales: Any,
    k: Any,
    v: Any,
    slots: Any,
    k_global: Any,
    v_global: Any,
    *,
    k_bias: Any = None,
    v_bias: Any = None,
    k_factors: Any = None,
    k_order: Any = None,
    k_rotation: int = 0,
    k_exact: Any = None,
    v_exact: Any = None,
    exact_slots: Any = None,
    k_format: str = "nvfp4",
    v_format: str = "nvfp4",
    scale_rule: str = "amax",
    v_scale_layout: str = "linear",
    **_options: Any,
) -> None:
    """Writes `k` and `v` into the cache."""
    mutated = [x for x in (k_data, k_scales, v_data, v_scales, k_exact, v_exact) if x is not None]
    k, v, slots, exact_slots, k_global, v_global, k_bias, v_bias = (
        x if x is None else _compat.apart_from(x, mutated)
        for x in (k, v, slots, exact_slots, k_global, v_global, k_bias, v_bias)
    )
    scale_max = SCALE_MAX[v_scale_layout]
    stored_k, bias = k, k_bias
    if k_factors is not None or k_order is not None or k_rotation:
        stored_k, bias = _transformed(k, {"bias": k_bias, "factors": k_factors, "order": k_order}, k_rotation), None
    _store(k_data, k_scales, stored_k, slots, k_global, bias, k_format, scale_rule, scale_max, "linear")
    _store(v_data, v_scales, v, slots, v_global, v_bias, v_format, scale_rule, scale_max, v_scale_layout)
    if exact_slots is not None:
        _store_exact(k_exact, k, exact_slots)
        _store_exact(v_exact, v, exact_slots)


def _transformed(k: Any, fields: dict[str, Any], rotation: int) -> Any:
    """What is stored of K, as the op has it; `fields` are tensors of a `KeyTransform`, where given."""
    args, kwargs = _compat.current_fake_arguments()
    given = {name: value for name, value in fields.items() if value is not None}
    fakes = [args[4], *[kwargs[f"k_{name}"] for name in given]]

    def function(k: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        return (KeyTransform(**dict(zip(given, tensors)), rotation=rotation).key(k),)

    (result,) = _compat.inline(function, [k, *given.values()], fakes)
    return result


def _store(
    data: Any,
    scales: Any,
    x: Any,
    slots: Any,
    global_scale: Any,
    bias: Any,
    storage_format: str,
    scale_rule: str,
    scale_max: float,
    scale_layout: str,
) -> None:
    device, where = x.get_device(), _Slots(data, slots)
    load_global, load_bias = _per_head(global_scale), None if bias is None else bias.make_loader()
    if storage_format in ("fp8", "exact"):
        load = x.make_loader()

        def element(i: Any) -> Any:
            value = load(i)
            if load_bias is not None:
                value = ops.sub(ops.to_dtype(value, a.F32), load_bias([i[1], i[3]]))
            if storage_format == "exact":
                return ops.to_dtype(value, data.get_dtype())
            scaled = _compat.divide(ops.to_dtype(value, a.F32), load_global(i))
            return ops.to_dtype(a.e4m3_encode_signed(scaled), torch.uint8)

        _compat.scatter(data, element, x.get_size(), where.linear)
        return
    ranges = blocks.block_ranges(x)
    bias_at = None if load_bias is None else (lambda i, d: load_bias([i[1], d]))
    source = blocks.elements(x, bias_at)
    if storage_format == "nvfp4":
        encoded = blocks.encode_nvfp4(source, load_global, ranges, scale_rule, device, scale_max)
    else:
        encoded = blocks.encode_block_fp4(source, ranges, device)
    _compat.scatter(data, encoded.words, ranges, where.linear)
    scale_index = where.linear if scale_layout == "linear" else where.in_4token
    _compat.scatter(scales, lambda i: ops.to_dtype(encoded.scales(i), torch.uint8), ranges, scale_index)


def _store_exact(exact: Any, x: Any, exact_slots: Any) -> None:
    load, load_slot = x.make_loader(), exact_slots.make_loader()
    size = exact.get_size()[2]

    def index(i: Any) -> list[Any]:
        batch, head, token, d = i
        return [batch, head, _checked(load_slot([batch, token]), size, x.get_device()), d]

    _compat.scatter(exact, load, x.get_size(), index)


class _Slots:
    """Where in `[P, H, T, ·]` storage an index `[b, h, l, d]` of new tokens is written."""

    def __init__(self, data: Any, slots: Any) -> None:
        pages, _, self.page_size, self.groups = data.get_size()
        self.num_slots = pages * self.page_size
        self.load, self.device = slots.make_loader(), data.get_device()

    def _page_and_offset(self, i: Any) -> tuple[Any, Any]:
        slot = _checked(self.load([i[0], i[2]]), self.num_slots, self.device)
        return FloorDiv(slot, self.page_size), ModularIndexing(slot, 1, self.page_size)

    def linear(self, i: Any) -> list[Any]:
        page, offset = self._page_and_offset(i)
        return [page, i[1], offset, i[3]]

    def in_4token(self, i: Any) -> list[Any]:
        """See `ops.format.layout.v_scales_to_4token`."""
        page, offset = self._page_and_offset(i)
        quarter = FloorDiv(self.groups, 4)
        row = FloorDiv(offset, 4) * 4 + FloorDiv(i[3], quarter)
        return [page, i[1], row, ModularIndexing(i[3], 1, quarter) * 4 + ModularIndexing(offset, 1, 4)]


def _checked(slot: Any, size: Any, device: torch.device) -> Any:
    """`slot` as an index below `size`."""
    if device.type == "cpu":
        return ops.indirect_indexing(slot, size, check=True, wrap_neg=False)
    last = ops.index_expr(size - 1, a.I64)
    slot = ops.minimum(ops.maximum(slot, a.const(0, a.I64)), last)
    return ops.indirect_indexing(slot, size, check=False, wrap_neg=False)


def _per_head(global_scale: Any) -> Callable[..., Any]:
    """Loads `global_scale` (`[]` or `[H]`) at an index `[b, h, l, ·]`."""
    return per_block(global_scale, 4)
