"""`fp4kv::dequantize` in Inductor IR: elementwise, fuses with what reads it. Arguments as in `ops/dequantize.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from .. import _compat
from ..ops.format.constants import BLOCK
from . import arithmetic as a
from .quantize import per_block, per_element


def unsupported(words: Any, scales: Any, global_scale: Any, **_options: Any) -> str | None:
    """Why these arguments are left to the op itself, or None."""
    return None


def lower(
    words: Any,
    scales: Any,
    global_scale: Any,
    *,
    bias: Any = None,
    dtype: torch.dtype,
    format: str = "nvfp4",
    scale_layout: str = "linear",
) -> Any:
    """`[..., D]` in `dtype`."""
    *lead, last = words.get_size()
    last = _compat.static_int(last)
    load_data, load_global = words.make_loader(), per_block(global_scale, len(lead) + 1)
    load_scale = None if scales is None else _scale_loader(scales, scale_layout)
    load_bias = None if bias is None else per_element(bias)

    def fp8(i: Any) -> Any:
        bits = ops.to_dtype(load_data(i), a.I32)
        magnitude = a.e4m3_decode(ops.bitwise_and(bits, a.const(0x7F, a.I32)))
        return a.with_sign(ops.mul(magnitude, load_global(i)), bits, 0x80)

    def fp4(i: Any) -> Any:
        assert load_scale is not None
        block = [*i[:-1], FloorDiv(i[-1], BLOCK)]
        code = a.nibble(load_data(block), ModularIndexing(i[-1], 1, BLOCK))
        bits = ops.to_dtype(load_scale(block), a.I32)
        bound = a.power_of_two(bits) if format == "block-fp4" else ops.mul(a.e4m3_decode(bits), load_global(block))
        return a.with_sign(ops.mul(a.e2m1_magnitude(code), bound), code, 8)

    def inner(i: Any) -> Any:
        value = fp8(i) if format == "fp8" else fp4(i)
        if load_bias is not None:
            value = ops.add(value, load_bias(i, i[-1]))
        return ops.to_dtype(value, dtype)

    size = last if format == "fp8" else last * BLOCK
    return _compat.pointwise(inner, [*lead, size], dtype, words.get_device())


def _scale_loader(scales: Any, scale_layout: str) -> Any:
    load = scales.make_loader()
    if scale_layout == "linear":
        return load
    groups = _compat.static_int(scales.get_size()[-1]) // 4

    def in_4token(i: Any) -> Any:
        """See `ops.format.layout.v_scales_to_4token`."""
        *head, t, s = i
        row = FloorDiv(t, 4) * 4 + FloorDiv(s, groups)
        return load([*head, row, ModularIndexing(s, 1, groups) * 4 + ModularIndexing(t, 1, 4)])

    return in_4token
