"""What the decode and the merge kernel share: how partial results are folded, and what a row's range is.

Letters are those of `decode.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-(2.0**127))
"""Lower numbers of a mask count as this one, which stays finite in units of log2(e): they hide less than -inf does."""
CODE_SCALE = gl.constexpr(16384.0)
"""Unpacked K and V lack this factor."""
GROUPS = gl.constexpr(4)
"""Groups of a set."""
EXACT_SLOTS = gl.constexpr(16)
"""Exact tokens of a program."""


@gluon.jit
def fold(old, old_weight, new, new_weight):
    """`old · old_weight + new · new_weight`; the order of the roundings is fixed, so that all kernels agree."""
    return gl.fma(new, gl.broadcast(new_weight, new)[0], old * old_weight)


@gluon.jit
def finite(top):
    """A maximum to subtract: 0 where nothing has been seen."""
    return gl.where(top == -float("inf"), 0.0, top)


@gluon.jit
def power_of_two(x):
    """2^x of integers (float32) that are not positive: 0 below -126, and for NaN, which -inf of both tops makes."""
    # The sum has x + 127 in its lowest bits.
    bits = (gl.maximum(x, -127.0) + (1.5 * 2.0**23 + 127.0)).to(gl.int32, bitcast=True) << 23
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def fold_weights(old_top, new_top):
    """`(top, old_weight, new_weight)` that put two partial results under one maximum, which is an integer.

    Weights are powers of two. So a product with them is not rounded, and what a sum gives does not depend on when its
    terms were put under a common maximum.
    """
    top = gl.maximum(old_top, new_top)
    return top, power_of_two(old_top - top), power_of_two(new_top - top)


@gluon.jit
def first_of_group(i, first_tile, STRIDE: gl.constexpr):
    """First tile of i, i + STRIDE, … that is not before `first_tile`."""
    return i + gl.maximum(first_tile - i + STRIDE - 1, 0) // STRIDE * STRIDE


@gluon.jit
def spans_of_program(first_span, end_span, limit, MOST: gl.constexpr):
    """How many groups, 1, 2 or 4 and at most MOST, a program takes: the fewest that need at most `limit` programs."""
    spans = 1
    if end_span - first_span > limit:
        spans = 2
        if MOST > 2 and (end_span - first_span + 1) // 2 > limit:
            spans = MOST
    return spans


@gluon.jit
def row_range(
    b,
    lengths,
    q_lengths,
    starts,
    exact_from,
    queries,
    page_size,
    num_sink_tokens,
    window,
    PAGING: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    EARLY: gl.constexpr = False,
):
    """`(length, n, start, begin, end, inner_begin, inner_end)` of row `b`, which has n queries.

    Some query sees stored positions in [begin, end), every one those in [inner_begin, inner_end), the mask aside.
    With EARLY, of a kernel that has not waited yet, they are not read from L1, which may hold what another one saw.
    """
    CACHE: gl.constexpr = ".cg" if EARLY else ""
    length = gl.load(lengths + b, cache_modifier=CACHE)
    n = queries
    if q_lengths is not None:
        n = gl.load(q_lengths + b, cache_modifier=CACHE)
    start = 0
    if starts is not None:
        start = gl.load(starts + b, cache_modifier=CACHE)
    begin = gl.maximum(start + num_sink_tokens, 0)
    end = length
    if exact_from is not None:
        end = gl.minimum(end, gl.load(exact_from + b, cache_modifier=CACHE))
    if PAGING == 0 or PAGING == 3:
        begin = gl.maximum(begin, length - page_size)
    inner_begin = begin
    inner_end = end
    if WINDOW:
        inner_begin = gl.maximum(begin, length - window)
        begin = gl.maximum(begin, length - n - window + 1)
    if CAUSAL:
        inner_end = gl.minimum(end, length - n + 1)
    # An empty range may lie within a tile, whose pages are not the row's.
    empty = begin >= end
    begin = gl.where(empty, 0, begin)
    end = gl.where(empty, 0, end)
    return length, n, start, begin, end, inner_begin, inner_end
