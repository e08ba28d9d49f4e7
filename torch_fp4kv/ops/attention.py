"""`fp4kv::attention`: attention of new queries over a cache held in NVFP4 (or FP8, block-FP4 or exact) storage.

Shapes: B batch, Hq query heads, H KV heads, L queries a row, D and Dv head sizes of K and V, P pages, T tokens a page,
E exact slots, M mask columns. All arguments are read, none is mutated.

    q               [B, Hq, L, D]        float; Hq % H == 0, query head h reads KV head h // (Hq / H)
    k_data, v_data  [P, H, T, D/16]      int64 words for "nvfp4" and "block-fp4";
                    [P, H, T, D]         uint8 e4m3 bits for "fp8", float for "exact"
    k_scales, …     [P, H, T, D/16]      uint8, for the two 4-bit formats; else None
    k_global, …     [] or [H]            float32 decode scales (unused by "exact" and "block-fp4")
    lengths         [B] int32            tokens of each row, the new ones counted in

Where a token lies: position p of row b is at slot `p % T` of page b, or with `block_table` ([B, max_pages] int32) at
slot `p % T` of page `block_table[b, p // T]`. Without a table a page is a ring: positions under `lengths - T` are gone.

Which tokens a query sees: query i of row b has position `lengths[b] - n + i`, where n is `q_lengths[b]` ([B] int32) or
L; queries i ≥ n are padding: output 0, log-sum-exp -inf. It sees positions p with `starts[b] <= p < lengths[b]`
(`starts` [B] int32, default 0), with `causal` p ≤ its own, with `window > 0` p > its own - window, and where `mask`
(broadcastable to [B, Hq, L, M], column = position; bool True = visible, or float added to the score) says so;
positions ≥ M are not seen. A query that sees nothing gives 0 and -inf.

Exact copies stand in for stored tokens: positions ≥ lengths - n come from `k_new`, `v_new` ([B, H, L, D], [B, H, L, Dv])
where given; the first `num_sink_tokens` visible ones (from `starts`) from slots 0, 1, … of `k_exact`, `v_exact`
([≥B, H, E, ·]); positions p ≥ `exact_from[b]` ([B] int32) from slot `num_sink_tokens + p % R` with
`R = E - num_sink_tokens - 1` (the last slot takes writes that nobody reads). All other positions come from storage.

Scores: `softcap(scale · q·k)` with `softcap(s) = c · tanh(s / c)` for c > 0 (Gemma 2), then the mask. Stored K may be
shifted and transformed: stored keys meet `q_stored` ([B, Hq, L, D], default q) and their product gets `stored_bias`
([B, Hq, L] float32, = q·μ) added before scaling, so exact and stored keys stand in one softmax. `v_bias` ([H, Dv]
float32) is added to every stored V. `sink_logits` ([Hq]) adds `exp(sink)` to each denominator (GPT-OSS).

`attention` returns `[B, Hq, L, Dv]`, contiguous, in `out_dtype` (default q's); `attention_with_lse` also the natural
log-sum-exp of the scores, sink included, float32 `[B, Hq, L]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backends, checks
from ._library import define
from .call import AttentionCall, head_dim_of

_ARGUMENTS = (
    "Tensor q, Tensor k_data, Tensor? k_scales, Tensor v_data, Tensor? v_scales, Tensor k_global, Tensor v_global, "
    "Tensor lengths, *, Tensor? q_lengths=None, Tensor? starts=None, Tensor? block_table=None, Tensor? k_new=None, "
    "Tensor? v_new=None, Tensor? k_exact=None, Tensor? v_exact=None, Tensor? exact_from=None, int num_sink_tokens=0, "
    "Tensor? q_stored=None, Tensor? stored_bias=None, Tensor? v_bias=None, Tensor? mask=None, "
    "Tensor? sink_logits=None, bool causal=True, SymInt window=-1, float softcap=0., float? scale=None, "
    'str k_format="nvfp4", str v_format="nvfp4", str v_scale_layout="linear", ScalarType? out_dtype=None, '
    'str backend="auto"'
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
    k_global: Tensor,
    v_global: Tensor,
    lengths: Tensor,
    *,
    backend: str = "auto",
    **options: Any,
) -> backends.Choice:
    """Which backend would serve `attention(…)` with these arguments, and why the others would not. Runs nothing."""
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
    checks.one_of(call.v_scale_layout, checks.V_SCALE_LAYOUTS, "v_scale_layout")
    checks.storage(call.k_data, call.k_scales, call.k_format, "k", call.q.device)
    checks.storage(call.v_data, call.v_scales, call.v_format, "v", call.q.device)
    if call.k_data.shape[:3] != call.v_data.shape[:3]:
        raise ValueError(
            "k_data and v_data differ in pages, heads or tokens: "
            f"{list(call.k_data.shape)}, {list(call.v_data.shape)}"
        )
    stored = head_dim_of(call.k_data, call.k_format)
    if stored != head_dim:
        raise ValueError(f"q has head size {head_dim}, k_data holds {stored} as {call.k_format!r}")
    if num_heads % call.num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {call.num_kv_heads} KV heads evenly")
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
        if call.block_table.ndim != 2 or call.block_table.shape[0] != batch:
            raise ValueError(f"block_table must be [{batch}, max_pages], got shape {list(call.block_table.shape)}")
    kv_heads, v_head_dim = call.num_kv_heads, call.v_head_dim
    _check_pair(call.k_new, call.v_new, "k_new", "v_new")
    if call.k_new is not None and call.v_new is not None:
        checks.shape(call.k_new, (batch, kv_heads, num_queries, head_dim), "k_new")
        checks.shape(call.v_new, (batch, kv_heads, num_queries, v_head_dim), "v_new")
    _check_pair(call.k_exact, call.v_exact, "k_exact", "v_exact")
    if call.k_exact is not None and call.v_exact is not None:
        slots = call.k_exact.shape[2]
        if call.k_exact.shape[0] < batch or slots < call.num_sink_tokens + 1:
            raise ValueError(
                f"k_exact must be [≥{batch}, {kv_heads}, >{call.num_sink_tokens}, {head_dim}], "
                f"got shape {list(call.k_exact.shape)}"
            )
        checks.shape(call.k_exact, (call.k_exact.shape[0], kv_heads, slots, head_dim), "k_exact")
        checks.shape(call.v_exact, (call.k_exact.shape[0], kv_heads, slots, v_head_dim), "v_exact")
    if call.q_stored is not None:
        checks.shape(call.q_stored, tuple(call.q.shape), "q_stored")
    if call.stored_bias is not None:
        checks.shape(call.stored_bias, (batch, num_heads, num_queries), "stored_bias")
    if call.v_bias is not None:
        checks.shape(call.v_bias, (kv_heads, v_head_dim), "v_bias")
    if call.sink_logits is not None:
        checks.shape(call.sink_logits, (num_heads,), "sink_logits")
    if call.mask is not None:
        _check_mask(call.mask, (batch, num_heads, num_queries))


def _check_pair(first: Tensor | None, second: Tensor | None, first_name: str, second_name: str) -> None:
    if (first is None) != (second is None):
        raise ValueError(f"{first_name} and {second_name} go together")


def _check_mask(mask: Tensor, expected: tuple[int, int, int]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask must be bool (True = visible) or floating point (added), got {mask.dtype}")
    lead = (1,) * (4 - mask.ndim) + tuple(mask.shape[:-1])
    if not 1 <= mask.ndim <= 4 or any(m not in (1, n) for m, n in zip(lead, expected, strict=True)):
        raise ValueError(f"mask must broadcast to {list(expected)} + [M], got shape {list(mask.shape)}")


def _body(*args: Any, **kwargs: Any) -> Tensor:
    return _run(AttentionCall(*args, **kwargs))[0]


def _body_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse = _run(AttentionCall(*args, return_lse=True, **kwargs))
    assert lse is not None
    return out, lse


def _run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    backend = backends.choose("attention", call.q.device, call.backend, call).name
    if backend == "triton-gluon":
        from .kernels import decode as kernel
    elif backend == "triton-prefill":
        from .kernels import prefill as kernel
    elif backend == "triton":
        from .kernels import fallback as kernel
    else:
        from . import torch_attention as kernel
    return kernel.run(call)


def _fake(*args: Any, **kwargs: Any) -> Tensor:
    return AttentionCall(*args, **kwargs).empty_out()


def _fake_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = AttentionCall(*args, **kwargs)
    return call.empty_out(), call.empty_lse()


ATTENTION = define(f"attention({_ARGUMENTS}) -> Tensor", body=_body, fake=_fake)
ATTENTION_WITH_LSE = define(
    f"attention_with_lse({_ARGUMENTS}) -> (Tensor out, Tensor lse)", body=_body_with_lse, fake=_fake_with_lse
)
