"""Calls for FlashInfer's kernels, which the emulators on the CPU and the kernels on a GPU both serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import calls
import oracle
import pytest
import torch
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.flashinfer import support
from torch_fp4kv.ops.format import layout

BOUNDS = {name: kernel.error for name, kernel in support.KERNELS.items()}
"""Relative error (2-norm): each bfloat16 rounding is at most 2^-9, each E4M3 rounding at most 2^-4 and at random."""
LAYOUT = {name: support.KERNELS[name].v_scale_layout for name in BOUNDS}


def make(
    v_scale_layout: str = "linear",
    *,
    lengths: tuple[int, ...] = (37, 96, 5),
    queries: int = 1,
    heads: int = 4,
    head_dim: int = 128,
    page_size: int | None = 16,
    capacity: int = 96,
    headroom: float = 1.0,
    new: bool = False,
    **options: Any,
) -> AttentionCall:
    """A bfloat16 call over NVFP4 storage: each block of each token has a scale of its own, no scale is a power of two,
    K and V and each KV head have different global scales. What is past the end of a row in its block table names no
    page. `headroom` 1 is amax/448, 1/6 is amax/2688."""
    torch.manual_seed(len(lengths) * queries + head_dim)
    batch, kv_heads, groups = len(lengths), 2, head_dim // 16
    per_row = capacity // (page_size or capacity)
    pages, size = (batch, capacity) if page_size is None else (batch * per_row + 2, page_size)
    table = None if page_size is None else torch.randperm(pages)[: batch * per_row].view(batch, per_row).int()
    stored, scales = {}, {}
    for name, factor in (("k", 1.0), ("v", 0.013)):
        spread = torch.exp(torch.rand(batch, kv_heads, capacity, groups) * 3).repeat_interleave(16, -1)
        per_head = torch.tensor([1.0, 0.37])[:, None, None]
        stored[name] = (torch.randn(batch, kv_heads, capacity, head_dim) * spread * per_head * factor).bfloat16()
        scales[name] = stored[name].float().abs().amax((0, 2, 3)) * (1.03 * headroom / 448)
    empty = [torch.zeros(pages, kv_heads, size, groups, dtype=t) for t in (torch.int64, torch.uint8) * 2]
    position = torch.arange(capacity).expand(batch, -1)
    page = torch.arange(batch)[:, None].expand(-1, capacity)
    if table is not None:
        page = table.long().gather(1, position // size)
    rule = {} if headroom == 1 else {"v_scale_layout": "linear"}
    torch_fp4kv.append(
        *empty,
        stored["k"],
        stored["v"],
        page * size + position % size,
        scales["k"],
        scales["v"],
        **{"v_scale_layout": v_scale_layout, **rule},
    )
    if rule and v_scale_layout == "4token":
        empty[3] = layout.v_scales_to_4token(empty[3])
    if new:
        # The prefill's own tokens, exact: what is stored of them is not looked at.
        own = torch.tensor(lengths)[:, None] - queries + torch.arange(queries)
        for name in "kv":
            index = own.clamp(min=0)[:, None, :, None].expand(-1, kv_heads, -1, head_dim)
            options[f"{name}_new"] = stored[name].gather(2, index)
    if table is not None:
        for b, length in enumerate(lengths):
            table[b, -(-length // size) :] = torch.tensor(2**31 - 1 if b % 2 else -7)
    q = (torch.randn(batch, heads, queries, head_dim) / 4).bfloat16()
    return AttentionCall(
        q,
        *empty,
        scales["k"],
        scales["v"],
        torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        v_scale_layout=v_scale_layout,
        **options,
    )


def error(out: Tensor, call: AttentionCall) -> float:
    """Relative distance (2-norm) of `out` from float64 attention over what is stored."""
    expected, _ = oracle.attend(call)
    return float((out.double() - expected).norm() / expected.norm())


def in_e4m3(call: AttentionCall) -> AttentionCall:
    """`call` with query, K and V rounded to E4M3 as they are before trtllm-gen multiplies them: the query that meets
    stored keys by a power of two, K and V in units of `code · block_scale`. K's bias is left out, the same in all
    scores of a query."""
    assert call.k_scales is not None
    assert call.v_scales is not None
    v_scales = layout.v_scales_from_4token(call.v_scales)
    values = {}
    for name, data, scales, scale in (
        ("k_data", call.k_data, call.k_scales, call.k_global),
        ("v_data", call.v_data, v_scales, call.v_global),
    ):
        units = torch_fp4kv.dequantize(data, scales, 1.0)
        values[name] = units.to(torch.float8_e4m3fn).float() * scale[:, None, None]
    per_head = call.k_global.repeat_interleave(call.group)[:, None, None]
    q = call.transform.query(call.q).float() * per_head
    step = 2.0 ** torch.ceil(torch.log2(q.abs().max() / 448))
    q = (q / step).to(torch.float8_e4m3fn).float() * step / per_head
    plain: dict[str, Any] = {"k_format": "exact", "v_format": "exact", "k_scales": None, "v_scales": None}
    plain |= {"k_bias": None, "k_factors": None, "k_order": None, "k_rotation": 0, "v_scale_layout": "linear"}
    return replace(call, q=q, **values, **plain)


V_BIAS = torch.linspace(-0.2, 0.3, 256).view(2, 128)
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.9])

CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "pages of 64": {"page_size": 64, "capacity": 128},
    "head size 256": {"head_dim": 256},
    "row without tokens": {"lengths": (0, 20, 96)},
    "window": {"window": 9},
    "sinks": {"sink_logits": SINKS},
    "scale": {"scale": 0.05},
    "bias of V": {"v_bias": V_BIAS},
    "float32 result": {"out_dtype": torch.float32},
    "transformed and shifted K": calls.equalized(2, 128),
}
PAGED_MULTI = {
    "three queries": {"queries": 3, "lengths": (37, 96, 3)},
    "three queries, window": {"queries": 3, "window": 5},
    "three queries, transformed K, float32": {
        "queries": 3,
        "out_dtype": torch.float32,
        **CASES["transformed and shifted K"],
    },
    "rows of fewer tokens than queries": {"queries": 5, "lengths": (37, 2, 0, 4)},
}
STATIC = {
    "static cache": {"page_size": None},
    "static cache of 48": {"page_size": None, "capacity": 48, "lengths": (48, 17, 33)},
    "ring that has gone round": {"page_size": None, "lengths": (96, 20, 96)},
}


PREFILLS = {
    "prefill": {"queries": 20, "lengths": (37, 96, 20), "new": True},
    "prefill, window": {"queries": 20, "lengths": (37, 96, 20), "new": True, "window": 9},
    "prefill, soft-cap": {"queries": 5, "lengths": (37, 0, 20), "new": True, "softcap": 1.5},
    "prefill, rows of fewer tokens than queries": {"queries": 20, "lengths": (37, 7, 0, 19), "new": True},
    "prefill, float32": {"queries": 20, "lengths": (37, 96, 20), "new": True, "out_dtype": torch.float32},
}


EXACT: dict[str, dict[str, Any]] = {
    "no sinks": {"num_sink_tokens": 0},
    "sinks": {"num_sink_tokens": 4},
    "sinks in one page": {"num_sink_tokens": 16},
    "odd sinks, pages of 64": {"num_sink_tokens": 3, "page_size": 64, "capacity": 128, "lengths": (37, 128, 70)},
    "rows of sinks alone": {"num_sink_tokens": 4, "lengths": (3, 96, 0)},
    "transformed and shifted K and V": {"num_sink_tokens": 16, "v_bias": V_BIAS, **CASES["transformed and shifted K"]},
    "soft-cap": {"num_sink_tokens": 4, "softcap": 1.5},
    "sink logits": {"num_sink_tokens": 16, "sink_logits": SINKS, "lengths": (37, 96, 0)},
}


def make_exact(v_scale_layout: str, *, num_sink_tokens: int, recent: int = 11, **options: Any) -> AttentionCall:
    """A call of `make` with `num_sink_tokens` sinks and `recent` tokens in exact copies, which differ from what is
    stored as much as two tokens do, and of which a kernel reads none from storage."""
    call = make(v_scale_layout, num_sink_tokens=num_sink_tokens, **options)
    batch, kv_heads = call.q.shape[0], call.num_kv_heads
    shape = (batch, kv_heads, num_sink_tokens + recent + 1, call.head_dim)
    per_head = call.v_global[:, None, None] / call.v_global.max()
    return replace(
        call,
        k_exact=torch.randn(shape).bfloat16(),
        v_exact=(torch.randn(shape) * 0.05 * per_head).bfloat16(),
        exact_from=(call.lengths - recent).clamp(min=0),
    )


def exact_combinations() -> Iterator[Any]:
    for name in support.JOINS_EXACT:
        for case, options in EXACT.items():
            whole_pages = options["num_sink_tokens"] % options.get("page_size", 16) == 0
            if whole_pages or not support.KERNELS[name].needs_table:
                yield pytest.param(name, options, id=f"{name.removeprefix('flashinfer-')}-{case}")


def combinations() -> Iterator[Any]:
    for name in BOUNDS:
        if support.KERNELS[name].new_tokens:
            for case, options in PREFILLS.items():
                yield pytest.param(name, options, id=f"{name.removeprefix('flashinfer-')}-{case}")
            continue
        cases = dict(CASES)
        if not support.KERNELS[name].needs_table:
            cases.update(STATIC)
        if support.KERNELS[name].max_queries > 1:
            cases.update(PAGED_MULTI)
        if not support.KERNELS[name].sinks:
            del cases["sinks"]
        if name == "flashinfer-trtllm-gen":
            # The factors stretch queries, and the bound is for scores of a few units.
            cases = {case: {**x, "scale": 0.07} if "k_factors" in x else x for case, x in cases.items()}
        if support.KERNELS[name].softcap:
            cases["soft-cap"] = {"softcap": 1.5}
            cases["soft-cap, bias of V"] = {"softcap": 1.5, "v_bias": V_BIAS}
        for case, options in cases.items():
            yield pytest.param(name, options, id=f"{name.removeprefix('flashinfer-')}-{case}")
