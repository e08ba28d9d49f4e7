"""Quantising blocks of 16 in Inductor IR: a max-reduction, then a sum-reduction that packs a block into one word.

Both run over the same 16 elements, so Inductor fuses them, the scales, and whatever produces or stores them, into one
kernel. Shapes: x is `[..., D]`; an index `i` is that of a block, `[..., b]`, and r counts the elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._inductor.virtualized import ops

from .. import _compat
from ..ops.format.blocks import SCALE_RULES
from ..ops.format.constants import BLOCK, E4M3_MAX
from . import arithmetic as a

Index = Any
Loader = Callable[..., Any]


class Encoded(NamedTuple):
    """Loaders over blocks: `words(i)` int64 and `scales(i)` int32."""

    words: Loader
    scales: Loader


def elements(x: Any, bias: Loader | None = None) -> Loader:
    """`element(i, r)`: element r of block i of `x`, as float32, less `bias(i, d)`."""
    load = x.make_loader()

    def element(i: Index, r: Any) -> Any:
        d = i[-1] * BLOCK + r
        value = ops.to_dtype(load([*i[:-1], d]), a.F32)
        return value if bias is None else ops.sub(value, bias(i, d))

    return element


def block_ranges(x: Any) -> list[Any]:
    """Ranges of the blocks of `x`; specialises to its D."""
    *lead, size = x.get_size()
    return [*lead, _compat.static_int(size) // BLOCK]


def encode_nvfp4(
    element: Loader,
    global_scale: Loader,
    ranges: list[Any],
    scale_rule: str,
    device: torch.device,
    scale_max: float = E4M3_MAX,
) -> Encoded:
    """As `ops.format.blocks.encode`; `global_scale(i)` is the decode scale of block i."""
    amax = _amax(element, ranges, device)
    divisors = SCALE_RULES[scale_rule]

    def bits(i: Index, divisor: Any) -> Any:
        inverse = _compat.divide(a.const(1.0), ops.mul(global_scale(i), divisor))
        scale = ops.mul(amax(i), inverse)
        return a.e4m3_encode(scale if scale_max == E4M3_MAX else ops.minimum(scale, a.const(scale_max)))

    def bound(i: Index, scale: Any) -> Any:
        return ops.mul(a.e4m3_decode(scale), global_scale(i))

    def squared_error(i: Index, r: Any, scale: Any) -> Any:
        x, one = element(i, r), bound(i, scale)
        magnitude = ops.where(a.is_nan(x), a.const(0.0), ops.abs(x))
        inverse = ops.where(ops.gt(scale, a.const(0, a.I32)), _compat.divide(a.const(1.0), one), a.const(0.0))
        value = a.e2m1_nearest(ops.minimum(ops.mul(magnitude, inverse), a.const(6.0)))
        error = ops.sub(magnitude, ops.mul(value, one))
        return ops.mul(error, error)

    def unless_unreadable(i: Index, scale: Any, error: Any) -> Any:
        one = bound(i, scale)
        # No divisor leaves a largest code below 3 to a scale for which that matters.
        four = ops.where(ops.ge(amax(i), ops.mul(one, a.const(3.5))), a.const(4.0), a.const(3.0))
        largest = ops.where(ops.gt(amax(i), ops.mul(one, a.const(5.0))), a.const(6.0), four)
        readable = ops.le(ops.mul(largest, a.e4m3_decode(scale)), a.const(448.0))
        return ops.where(readable, error, a.const(math.inf))

    def best_scales(bits_at: Loader, error_at: Loader, cost_at: Loader) -> Loader:
        def best(i: Index) -> Any:
            best, error = bits_at(i, 0), error_at(i, 0)
            for j in range(1, len(divisors)):
                cost = cost_at(i, j)
                better = ops.lt(cost, error)
                best, error = ops.where(better, bits_at(i, j), best), ops.where(better, cost, error)
            return best

        return _realized(best, ranges, a.I32, device)

    def sum_over_block(inner: Callable[..., Any], ranges: list[Any]) -> Loader:
        loader: Loader = _compat.reduction("sum", inner, ranges, BLOCK, a.F32, device).make_loader()
        return loader

    if len(divisors) == 1:

        def scales(i: Index) -> Any:
            return bits(i, a.const(divisors[0]))

    elif len(divisors) == 2:
        # In the iteration space of the blocks, so that all is one kernel.
        errors = [
            sum_over_block(lambda i, r, d=d: squared_error(i, r[0], bits(i, a.const(d))), ranges) for d in divisors
        ]

        def bits_at(i: Index, j: int) -> Any:
            return bits(i, a.const(divisors[j]))

        scales = best_scales(
            bits_at, lambda i, j: errors[j](i), lambda i, j: unless_unreadable(i, bits_at(i, j), errors[j](i))
        )
    else:
        # Candidates are a dimension: nine copies of the code would take long to compile.
        space = [*ranges, len(divisors)]

        def divisor_at(j: Any) -> Any:
            chosen = a.const(divisors[0])
            for k, divisor in enumerate(divisors[1:], 1):
                chosen = ops.where(ops.eq(ops.index_expr(j, a.I32), a.const(k, a.I32)), a.const(divisor), chosen)
            return chosen

        table = _realized(lambda i: bits(i[:-1], divisor_at(i[-1])), space, a.I32, device)
        error = sum_over_block(lambda i, r: squared_error(i[:-1], r[0], table(i)), space)
        cost = _realized(lambda i: unless_unreadable(i[:-1], table(i), error(i)), space, a.F32, device)
        scales = best_scales(*[lambda i, j, load=x: load([*i, j]) for x in (table, error, cost)])
    return Encoded(_pack(element, lambda i: bound(i, scales(i)), ranges, device), scales)


def _realized(inner: Loader, ranges: list[Any], dtype: torch.dtype, device: torch.device) -> Loader:
    loader: Loader = _compat.pointwise(inner, ranges, dtype, device, realize=True).make_loader()
    return loader


def encode_block_fp4(element: Loader, ranges: list[Any], device: torch.device) -> Encoded:
    """As `ops.format.blocks.encode_block_fp4`."""
    amax = _amax(element, ranges, device)

    def scales(i: Index) -> Any:
        clamped = ops.minimum(ops.maximum(amax(i), a.const(2.0**-120)), a.const(2.0**120))
        return a.block_fp4_exponent(clamped)

    return Encoded(_pack(element, lambda i: a.power_of_two(scales(i)), ranges, device), scales)


def _amax(element: Loader, ranges: list[Any], device: torch.device) -> Loader:
    def inner(i: Index, r: tuple[Any]) -> Any:
        x = element(i, r[0])
        return ops.where(a.is_nan(x), a.const(0.0), ops.abs(x))

    loader: Loader = _compat.reduction("max", inner, ranges, BLOCK, a.F32, device).make_loader()
    return loader


def _pack(element: Loader, bound: Loader, ranges: list[Any], device: torch.device) -> Loader:
    def inner(i: Index, r: tuple[Any]) -> Any:
        code = ops.to_dtype(a.e2m1_encode(element(i, r[0]), bound(i)), a.I64)
        return ops.bitwise_left_shift(code, ops.index_expr(r[0] * 4, a.I64))

    loader: Loader = _compat.reduction("sum", inner, ranges, BLOCK, a.I64, device).make_loader()
    return loader
