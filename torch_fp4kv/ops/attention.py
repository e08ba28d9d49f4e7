"""`fp4kv::attention`: attention of new queries over a cache held in NVFP4 (or FP8, block-FP4 or exact) storage.

Shapes: B batch, Hq query heads, H KV heads, L queries a row, D and Dv head sizes of K and V, P pages, T tokens a page,
E exact slots, M mask columns. All arguments are read, none is mutated. Storage is contiguous, exact copies are so in
the last dimension; all else may have any strides.

    q               [B, Hq, L, D]        float; Hq % H == 0, query head h reads KV head h // (Hq / H)
    k_data, v_data  [P, H, T, D/16]      int64 words for "nvfp4" and "block-fp4";
                    [P, H, T, D]         uint8 e4m3 bits for "fp8", float for "exact"
    k_scales, …     [P, H, T, D/16]      uint8, for the two 4-bit formats; else None
    k_global, …     [] or [H]            float32 decode scales (unused by "exact" and "block-fp4")
    lengths         [B] int32            tokens of each row, the new ones counted in

Where a token lies: position p of row b is at slot `p % T` of page b, or with `block_table` ([B, max_pages] int32) at
slot `p % T` of page `block_table[b, p // T]`. Without a table a page is a ring: positions under `end - T` are gone,
where `end` is `lengths`, or `lengths - n` where `k_new` is given: then storage and exact ring are those from before
the new tokens were appended (where nothing is overwritten, as in a cache longer than the row, both read the same).

Which tokens a query sees: query i of row b has position `lengths[b] - n + i`, where n is `q_lengths[b]` ([B] int32) or
L; queries i ≥ n are padding: output 0, log-sum-exp -inf. It sees positions p with `starts[b] <= p < lengths[b]`
(`starts` [B] int32, default 0), with `causal` p ≤ its own, with `window > 0` p > its own - window, and where `mask`
(broadcastable to [B, Hq, L, M], column = position; bool True = visible, or float added to the score) says so;
positions ≥ M are not seen. A query that sees nothing gives 0 and -inf.

Exact copies stand in for stored tokens: positions ≥ lengths - n come from `k_new`, `v_new` ([B, H, L, D] and
[B, H, L, Dv]) where given; the first `num_sink_tokens` ones (from `starts`) from slots 0, 1, … of `k_exact`, `v_exact`
([≥B, H, E, ·]); positions p ≥ `exact_from[b]` ([B] int32, at least `end - R`) from slot `num_sink_tokens + p % R` with
`R = E - num_sink_tokens - 1` (the last slot takes writes that nobody reads). All other positions come from storage.

Scores: `softcap(scale · q·k)` with `softcap(s) = c · tanh(s / c)` for c > 0 (Gemma 2), then the mask. Stored K may be
shifted, equalised, reordered and rotated: `k_bias`, `k_factors` ([H, D] float32), `k_order` ([H, D] int32) and
`k_rotation` are those of `append`. Stored keys then meet queries transformed as `format/transform.py` says, and their
product gets `q · k_bias` added before scaling, so that exact and stored keys stand in one softmax. `v_bias` ([H, Dv]
float32) is added to every stored V. `sink_logits` ([Hq]) adds `exp(sink)` to each denominator (GPT-OSS); the
log-sum-exp of a query (not padding) that sees nothing is then its sink.

`attention` returns `[B, Hq, L, Dv]`, contiguous, in `out_dtype` (default q's); `attention_with_lse` also the natural
log-sum-exp of the scores, sink included, float32 `[B, Hq, L]`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import backends, checks
from ._library import define
from .call import AttentionCall, head_dim_of

LARGEST_WINDOW = 1 << 30
"""A larger one hides as little, and would not fit into the int32 of positions."""

_ARGUMENTS = (
    "Tensor q, Tensor k_data, Tensor? k_scales, Tensor v_data, Tensor? v_scales, Tensor k_global, Tensor v_global, "
    "Tensor lengths, *, Tensor? q_lengths=None, Tensor? starts=None, Tensor? block_table=None, Tensor? k_new=None, "
    "Tensor? v_new=None, Tensor? k_exact=None, Tensor? v_exact=None, Tensor? exact_from=None, int num_sink_tokens=0, "
    "Tensor? k_bias=None, Tensor? k_factors=None, Tensor? k_order=None, int k_rotation=0, Tensor? v_bias=None, "
    "Tensor? mask=None, Tensor? sink_logits=None, bool causal=True, SymInt window=-1, float softcap=0., "
    'float? scale=None, str k_format="nvfp4", str v_format="nvfp4", str v_scale_layout="linear", '
    'ScalarType? out_dtype=None, str backend="auto"'
)


def attention(
    q: Tensor,
    k_data: Tensor,
    k_scales: Tensor | None,
    v_data: Tensor,
    v_scales: Tensor | None,
    k_global: float | Tensor,
    v_global: float | Tensor,
    lengths: Tensor,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of `q` over stored K and V; arguments, shapes and meaning as in this module's docstring.

    Returns:
        `[B, Hq, L, Dv]` in `out_dtype` or q's dtype; with `return_lse` also float32 `[B, Hq, L]`.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or device than the module's docstring says, or
            `backend` names one that cannot serve; the message says what was expected and what came.
    """
    k_global = checks.global_scale(k_global, q.device, "k_global")
    v_global = checks.global_scale(v_global, q.device, "v_global")
    _check(AttentionCall(q, k_data, k_scales, v_data, v_scales, k_global, v_global, lengths, **options))
    op = torch.ops.fp4kv.attention_with_lse if return_lse else torch.ops.fp4kv.attention
    return op(q, k_data, k_scales, v_data, v_scales, k_global, v_global, lengths, **options)


def explain(
    q: Tensor,
    k_data: Tensor,
    k_scales: Tensor | None,
    v_data: Tensor,
    v_scales: Tensor | None,
    k_global: float | Tensor,
    v_global: float | Tensor,
    lengths: Tensor,
    *,
    backend: str = "auto",
    **options: Any,
) -> backends.Choice:
    """Which backend would serve `attention(…)` with these arguments, and why the others would not. Runs nothing."""
    k_global = checks.global_scale(k_global, q.device, "k_global")
    v_global = checks.global_scale(v_global, q.device, "v_global")
    call = AttentionCall(q, k_data, k_scales, v_data, v_scales, k_global, v_global, lengths, **options)
    _check(call)
    return backends.explain(call, backend)


def _check(call: AttentionCall) -> None:
    checks.floating(call.q, "q")
    if call.q.ndim != 4:
        raise ValueError(f"q must be [B, Hq, L, D], got shape {list(call.q.shape)}")
    batch, num_heads, num_queries, head_dim = call.q.shape
    checks.head_dim(head_dim, "q")
    checks.one_of(call.k_format, checks.FORMATS, "k_format")
    checks.one_of(call.v_format, checks.FORMATS, "v_format")
    checks.storage(call.k_data, call.k_scales, call.k_format, "k", call.q.device)
    checks.storage(call.v_data, call.v_scales, call.v_format, "v", call.q.device)
    if call.k_data.shape[:3] != call.v_data.shape[:3]:
        raise ValueError(
            f"k_data and v_data differ in pages, heads or tokens: {list(call.k_data.shape)}, {list(call.v_data.shape)}"
        )
    stored = head_dim_of(call.k_data, call.k_format)
    if stored != head_dim:
        raise ValueError(f"q has head size {head_dim}, k_data holds {stored} as {call.k_format!r}")
    checks.head_dim(call.v_head_dim, "v_data")
    checks.scale_layout(call.v_scale_layout, call.v_scales)
    if call.num_kv_heads == 0 or num_heads % call.num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {call.num_kv_heads} KV heads evenly")
    for scale, name in ((call.k_global, "k_global"), (call.v_global, "v_global")):
        checks.scale_shape(scale, ((call.num_kv_heads,),), name)
    _check_numbers(call)
    _check_rows(call, batch)
    _check_tokens(call)
    kv_heads = call.num_kv_heads
    checks.transform(call.transform, (kv_heads, head_dim), call.q.device)
    checks.bias(call.v_bias, ((kv_heads, call.v_head_dim),), call.q.device, "v_bias")
    if call.sink_logits is not None:
        _check_floats(call.sink_logits, (num_heads,), call.q.device, "sink_logits")
    if call.mask is not None:
        checks.same_device(call.mask, call.q.device, "mask")
        _check_mask(call.mask, (batch, num_heads, num_queries))


def _check_numbers(call: AttentionCall) -> None:
    for number, name in ((call.softcap, "softcap"), (call.softmax_scale, "scale")):
        if not abs(number) < math.inf:  # Dynamo traces this for a symbolic float, and no `isfinite`
            raise ValueError(f"{name} must be finite, got {number}")
    if call.softcap < 0 or call.num_sink_tokens < 0:
        raise ValueError(
            f"softcap and num_sink_tokens must not be negative, got {call.softcap} and {call.num_sink_tokens}"
        )
    if call.out_dtype is not None and call.out_dtype not in checks.FLOATING:
        raise TypeError(f"out_dtype must be float32, float16 or bfloat16, got {call.out_dtype}")


def _check_rows(call: AttentionCall, batch: int) -> None:
    for rows, name in (
        (call.lengths, "lengths"),
        (call.q_lengths, "q_lengths"),
        (call.starts, "starts"),
        (call.exact_from, "exact_from"),
    ):
        if rows is not None:
            checks.has_dtype(rows, torch.int32, name)
            checks.shape(rows, (batch,), name)
            checks.same_device(rows, call.q.device, name)
    if call.block_table is None:
        if call.k_data.shape[0] < batch:
            raise ValueError(f"without block_table each row needs a page: {batch} rows, {call.k_data.shape[0]} pages")
    else:
        checks.has_dtype(call.block_table, torch.int32, "block_table")
        checks.same_device(call.block_table, call.q.device, "block_table")
        if call.block_table.ndim != 2 or call.block_table.shape[0] != batch:
            raise ValueError(f"block_table must be [{batch}, max_pages], got shape {list(call.block_table.shape)}")


def _check_tokens(call: AttentionCall) -> None:
    batch, _, num_queries, head_dim = call.q.shape
    kv_heads, v_head_dim, device = call.num_kv_heads, call.v_head_dim, call.q.device
    _check_pair(call.k_new, call.v_new, "k_new", "v_new")
    if call.k_new is not None and call.v_new is not None:
        _check_floats(call.k_new, (batch, kv_heads, num_queries, head_dim), device, "k_new")
        _check_floats(call.v_new, (batch, kv_heads, num_queries, v_head_dim), device, "v_new")
    _check_pair(call.k_exact, call.v_exact, "k_exact", "v_exact")
    if call.k_exact is not None and call.v_exact is not None:
        if call.k_exact.ndim != 4 or call.k_exact.shape[0] < batch or call.k_exact.shape[2] <= call.num_sink_tokens:
            raise ValueError(
                f"k_exact must be [≥{batch}, {kv_heads}, >{call.num_sink_tokens}, {head_dim}], "
                f"got shape {list(call.k_exact.shape)}"
            )
        rows, _, slots, _ = call.k_exact.shape
        _check_floats(call.k_exact, (rows, kv_heads, slots, head_dim), device, "k_exact")
        _check_floats(call.v_exact, (rows, kv_heads, slots, v_head_dim), device, "v_exact")
        checks.exact_copies(call.k_exact, "k_exact")
        checks.exact_copies(call.v_exact, "v_exact")


def _check_floats(tensor: Tensor, expected: tuple[int, ...], device: torch.device, name: str) -> None:
    checks.floating(tensor, name)
    checks.shape(tensor, expected, name)
    checks.same_device(tensor, device, name)


def _check_pair(first: Tensor | None, second: Tensor | None, first_name: str, second_name: str) -> None:
    if (first is None) != (second is None):
        raise ValueError(f"{first_name} and {second_name} go together")


def _check_mask(mask: Tensor, expected: tuple[int, int, int]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask must be bool (True = visible) or floating point (added), got {mask.dtype}")
    lead = (1,) * (4 - mask.ndim) + tuple(mask.shape[:-1])
    if (
        not 1 <= mask.ndim <= 4
        or mask.shape[-1] == 0
        or any(m not in (1, n) for m, n in zip(lead, expected, strict=True))
    ):
        raise ValueError(f"mask must broadcast to {list(expected)} + [M], got shape {list(mask.shape)}")


def _check_values(call: AttentionCall) -> None:
    """Raises ValueError for scales, lengths, starts or pages that cannot be; on the CPU, where the host sees them."""
    checks.scale_values(call.k_global, "k_global")
    checks.scale_values(call.v_global, "v_global")
    checks.transform_values(call.transform)
    num_queries, page_size, pages = call.q.shape[2], call.page_size, call.k_data.shape[0]
    lengths = call.lengths.tolist()
    counts = [num_queries] * len(lengths) if call.q_lengths is None else call.q_lengths.tolist()
    starts = [0] * len(lengths) if call.starts is None else call.starts.tolist()
    recent = lengths if call.exact_from is None or call.k_exact is None else call.exact_from.tolist()
    for b, (length, count, start, exact_from) in enumerate(zip(lengths, counts, starts, recent, strict=True)):
        if length < 0 or start < 0 or not 0 <= count <= num_queries:
            raise ValueError(
                f"row {b}: lengths and starts must not be negative and q_lengths lie in [0, {num_queries}], "
                f"got {length}, {start} and {count}"
            )
        end = length if call.k_new is None else length - count
        if exact_from < end - call.ring_size:
            raise ValueError(
                f"row {b}: exact_from must be at least {end - call.ring_size}, the oldest of the {call.ring_size} "
                f"tokens that the exact slots hold, got {exact_from}"
            )
        if call.block_table is None:
            continue
        if end > call.capacity:
            raise ValueError(f"row {b}: length {end} exceeds the {call.capacity} tokens its block table has room for")
        first = start if call.k_exact is None else start + call.num_sink_tokens
        if call.window > 0:
            first = max(first, length - count - call.window + 1)
        last = min(end, exact_from)
        used = call.block_table[b, first // page_size : -(-last // page_size)].tolist() if first < last else []
        if any(not 0 <= page < pages for page in used):
            raise ValueError(f"row {b}: block_table must name pages in [0, {pages}), got {used}")


def _body(*args: Any, **kwargs: Any) -> Tensor:
    return _run(AttentionCall(*args, **kwargs))[0]


def _body_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse = _run(AttentionCall(*args, **{**kwargs, "return_lse": True}))
    assert lse is not None
    return out, lse


def _run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if call.q.device.type == "cpu":
        _check_values(call)
    if call.window > LARGEST_WINDOW:
        call = replace(call, window=LARGEST_WINDOW)
    name = backends.choose("attention", call.q.device, call.backend, call).name
    out: tuple[Tensor, Tensor | None] = backends.attention_module(name).run(call)
    return out


def _fake(*args: Any, **kwargs: Any) -> Tensor:
    return AttentionCall(*args, **kwargs).empty_out()


def _fake_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = AttentionCall(*args, **kwargs)
    return call.empty_out(), call.empty_lse()


ATTENTION = define(f"attention({_ARGUMENTS}) -> Tensor", body=_body, fake=_fake)
ATTENTION_WITH_LSE = define(
    f"attention_with_lse({_ARGUMENTS}) -> (Tensor out, Tensor lse)", body=_body_with_lse, fake=_fake_with_lse
)
