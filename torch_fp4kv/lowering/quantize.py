"""`fp4kv::quantize` in Inductor IR: fuses with what produces x. Shapes and arguments as in `ops/quantize.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.virtualized import ops

from .. import _compat
from . import arithmetic as a
from . import blocks


def unsupported(x: Any, global_scale: Any, *, bias: Any = None, scale_rule: str = "amax") -> str | None:
    """Why these arguments are left to the op itself, or None."""
    return scale_rule_unsupported(scale_rule, x.get_device())


def lower(x: Any, global_scale: Any, *, bias: Any = None, scale_rule: str = "amax") -> tuple[Any, Any]:
    """`(words, scales)`."""
    device, ranges = x.get_device(), blocks.block_ranges(x)
    bias_at = None if bias is None else per_element(bias)
    element = blocks.elements(x, bias_at)
    encoded = blocks.encode_nvfp4(element, per_block(global_scale, len(ranges)), ranges, scale_rule, device)
    words = _compat.pointwise(encoded.words, ranges, torch.int64, device)
    scales = _compat.pointwise(lambda i: ops.to_dtype(encoded.scales(i), torch.uint8), ranges, torch.uint8, device)
    return words, scales


def scale_rule_unsupported(scale_rule: str, device: torch.device) -> str | None:
    if scale_rule == "mse" and device.type != "cpu":
        return "scale_rule 'mse' tries nine divisors, for which there is a kernel"
    return None


def per_block(global_scale: Any, ndim: int) -> Callable[..., Any]:
    """Loads `global_scale` (`[]`, `[H]` or per row) for block `i` of `ndim`-dimensional scales."""
    load, scale_ndim = global_scale.make_loader(), len(global_scale.get_size())
    if scale_ndim == 0:
        return lambda i: a.positive(load([]))
    if scale_ndim == 1 and ndim >= 3:
        return lambda i: a.positive(load([i[-3]]))
    return lambda i: a.positive(load(i[:-1]))


def per_element(bias: Any) -> Callable[..., Any]:
    """Loads `bias` (`[D]` or `[H, D]`) for element `d` of the row of block `i`."""
    load = bias.make_loader()
    if len(bias.get_size()) == 1:
        return lambda i, d: load([d])
    return lambda i, d: load([i[-3], d])
