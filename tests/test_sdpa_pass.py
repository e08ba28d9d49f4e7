"""The pre-grad pass: which attention over dequantised tensors becomes attention over the cache, and which must not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import generated
from torch import Tensor

import torch_fp4kv as fp4
from torch_fp4kv import lowering
from torch_fp4kv.ops import torch_attention

BATCH, KV_HEADS, GROUP, TOKENS, DIM = 2, 2, 4, 40, 32
HEADS = KV_HEADS * GROUP


class Case:
    """q, the stored K and V, and the dequantised ones as a user's function sees them."""

    def __init__(self, queries: int = 1, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.q = torch.randn(BATCH, HEADS, queries, DIM, dtype=dtype)
        shape = (BATCH, kv_heads, TOKENS, DIM)
        self.scale = torch.full((kv_heads,), 0.01)
        self.k_words, self.k_scales = fp4.quantize(torch.randn(shape), self.scale)
        self.v_words, self.v_scales = fp4.quantize(torch.randn(shape), self.scale)
        visible = torch.rand(BATCH, 1, queries, TOKENS) < 0.5
        visible[..., 0] = True
        self.visible = visible
        self.added = torch.where(visible, torch.randn_like(visible, dtype=dtype), float("-inf"))

    def k(self, **options: Any) -> Tensor:
        return fp4.dequantize(self.k_words, self.k_scales, self.scale, dtype=self.q.dtype, **options)

    def v(self, **options: Any) -> Tensor:
        return fp4.dequantize(self.v_words, self.v_scales, self.scale, dtype=self.q.dtype, **options)


def repeat_kv(x: Tensor, repeats: int = GROUP) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, repeats, tokens, dim).reshape(batch, heads * repeats, tokens, dim)


def sdpa(c: Case, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(c.q, k, v, **options)


def gqa(c: Case, **options: Any) -> Tensor:
    return sdpa(c, c.k(), c.v(), enable_gqa=True, **options)


def eager(c: Case, mask: Callable[[Tensor], Tensor] = lambda s: s, training: bool = False) -> Tensor:
    """Attention as transformers' `eager_attention_forward` writes it out."""
    k, v = repeat_kv(c.k()), repeat_kv(c.v())
    scores = torch.matmul(c.q, k.transpose(2, 3)) * DIM**-0.5
    weights = F.softmax(mask(scores), dim=-1, dtype=torch.float32).to(c.q.dtype)
    weights = F.dropout(weights, p=0.25, training=training)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


REWRITTEN: dict[str, tuple[Callable[[Case], Tensor], dict[str, Any]]] = {
    "gqa": (gqa, {}),
    "gqa bool mask": (lambda c: gqa(c, attn_mask=c.visible), {}),
    "gqa float mask": (lambda c: gqa(c, attn_mask=c.added), {"queries": 3}),
    "two-dimensional mask": (lambda c: gqa(c, attn_mask=c.visible[0, 0]), {"queries": 3}),
    "scale": (lambda c: gqa(c, scale=0.3), {}),
    "is_causal is top-left": (lambda c: gqa(c, is_causal=True), {"queries": 5}),
    "is_causal, one query": (lambda c: gqa(c, is_causal=True), {}),
    "is_causal, square": (lambda c: gqa(c, is_causal=True), {"queries": TOKENS}),
    "dropout 0": (lambda c: gqa(c, dropout_p=0.0), {}),
    "positional mask": (lambda c: F.scaled_dot_product_attention(c.q, c.k(), c.v(), c.visible, enable_gqa=True), {}),
    "all keyword": (
        lambda c: F.scaled_dot_product_attention(query=c.q, key=c.k(), value=c.v(), enable_gqa=True),
        {},
    ),
    "repeat_kv": (lambda c: sdpa(c, repeat_kv(c.k()), repeat_kv(c.v()), attn_mask=c.visible), {}),
    "repeat_interleave": (
        lambda c: sdpa(c, torch.repeat_interleave(c.k(), GROUP, dim=1), c.v().repeat_interleave(GROUP, 1)),
        {},
    ),
    "multi-query by expand": (
        lambda c: sdpa(c, c.k().expand(-1, HEADS, -1, -1), c.v().expand(-1, HEADS, -1, -1)),
        {"kv_heads": 1},
    ),
    "no repetition": (lambda c: sdpa(c, c.k(), c.v()), {"kv_heads": HEADS}),
    "first tokens": (
        lambda c: sdpa(c, c.k()[:, :, :17], c.v()[..., :17, :], attn_mask=c.visible[..., :17], enable_gqa=True),
        {"queries": 3},
    ),
    "cast": (
        lambda c: sdpa(c, fp4.dequantize(c.k_words, c.k_scales, c.scale).to(c.q.dtype), c.v(), enable_gqa=True),
        {"dtype": torch.bfloat16},
    ),
    "bfloat16": (gqa, {"dtype": torch.bfloat16}),
    "view of the result": (lambda c: gqa(c).transpose(1, 2).reshape(BATCH, -1, HEADS * DIM) * 2, {"queries": 3}),
    "eager": (eager, {"queries": 3}),
    "eager bfloat16": (eager, {"dtype": torch.bfloat16}),
    "eager added mask": (lambda c: eager(c, lambda s: s + c.added), {"queries": 3}),
    "eager masked_fill": (lambda c: eager(c, lambda s: s.masked_fill(~c.visible, -math.inf)), {"queries": 3}),
    "eager where": (lambda c: eager(c, lambda s: torch.where(c.visible, s, -1e9)), {"queries": 3}),
    "eager divided": (
        lambda c: (c.q @ repeat_kv(c.k()).mT / math.sqrt(DIM)).softmax(-1) @ repeat_kv(c.v()),
        {"queries": 3},
    ),
    "eager scaled query": (
        lambda c: ((c.q * DIM**-0.5) @ repeat_kv(c.k()).transpose(-1, -2)).softmax(dim=-1) @ repeat_kv(c.v()),
        {},
    ),
}


def compile_case(function: Callable[[Case], Any], case: Case) -> tuple[Any, dict[str, int]]:
    """The compiled result, and what the pass reports for it."""
    torch._dynamo.reset()
    before = lowering.report()["sdpa"]
    with torch._inductor.config.patch(force_disable_caches=True):
        out = torch.compile(function, backend=fp4.compile.backend, fullgraph=True)(case)
    after = lowering.report()["sdpa"]
    return out, {
        outcome: count - before.get(outcome, 0) for outcome, count in after.items() if count != before.get(outcome, 0)
    }


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str) -> None:
    function, options = REWRITTEN[name]
    case = Case(**options)
    out, report = compile_case(function, case)
    assert report == {"rewritten": 1}
    expected = function(case)
    assert out.dtype == expected.dtype
    tolerance = 1e-5 if case.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def _append_between(c: Case) -> Tensor:
    k, v = c.k(), c.v()
    fp4.append(
        c.k_words, c.k_scales, c.v_words, c.v_scales, k[:, :, :1], v[:, :, :1] * 2, torch.tensor([[5], [45]]), 0.1, 0.1
    )
    return sdpa(c, k, v, enable_gqa=True)


def _zero_between(c: Case) -> Tensor:
    k, v = c.k(), c.v()
    c.v_scales.zero_()
    return sdpa(c, k, v, enable_gqa=True)


def _read_twice(c: Case) -> Tensor:
    k = c.k()
    return sdpa(c, k, c.v(), enable_gqa=True) + k.sum()


def _weights_returned(c: Case) -> tuple[Tensor, Tensor]:
    weights = (c.q @ repeat_kv(c.k()).mT / math.sqrt(DIM)).softmax(-1)
    return weights @ repeat_kv(c.v()), weights


def _two_masks(c: Case) -> Tensor:
    return eager(c, lambda s: (s + c.added).masked_fill(~c.visible, -math.inf))


LEFT: dict[str, tuple[Callable[[Case], Any], dict[str, Any], str]] = {
    "dropout": (lambda c: gqa(c, dropout_p=0.5), {}, "dropout is on"),
    "eager dropout": (lambda c: eager(c, training=True), {}, "dropout is on"),
    "K read twice": (_read_twice, {}, "something else reads"),
    "weights returned": (_weights_returned, {}, "something else reads"),
    "append between": (_append_between, {}, "something else reads"),
    "write between": (_zero_between, {}, "an in-place write"),
    "V not dequantised": (lambda c: sdpa(c, c.k(), c.v_plain, enable_gqa=True), {}, "only one of K and V"),
    "K rotated": (lambda c: sdpa(c, c.k() + 1, c.v(), enable_gqa=True), {}, "goes through 'add'"),
    "tiled heads": (lambda c: sdpa(c, c.k().repeat(1, GROUP, 1, 1), repeat_kv(c.v())), {}, "goes through 'repeat'"),
    "last tokens": (lambda c: sdpa(c, c.k()[:, :, 4:], c.v()[:, :, 4:], enable_gqa=True), {}, "goes through 'getitem'"),
    "is_causal, more queries than keys": (
        lambda c: sdpa(c, c.k()[:, :, :3], c.v()[:, :, :3], is_causal=True, enable_gqa=True),
        {"queries": 5},
        "more queries than keys",
    ),
    "mask of one column": (lambda c: gqa(c, attn_mask=c.visible[..., :1]), {}, "one column for each key"),
    "bias": (lambda c: sdpa(c, c.k(bias=torch.ones(DIM)), c.v(), enable_gqa=True), {}, "adds a bias"),
    "scale per row": (
        lambda c: sdpa(c, fp4.dequantize(c.k_words, c.k_scales, c.row_scale), c.v(), enable_gqa=True),
        {},
        "per row",
    ),
    "two masks": (_two_masks, {}, "two masks"),
    "scaled by a tensor": (lambda c: eager(c, lambda s: s * c.row_scale.mean()), {}, "other than a constant"),
    "scaled after the mask": (lambda c: eager(c, lambda s: (s + c.added) * 2), {}, "before the mask"),
    "hidden by a small number": (lambda c: eager(c, lambda s: torch.where(c.visible, s, -1.0)), {}, "large negative"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name: str) -> None:
    function, options, reason = LEFT[name]
    case = Case(**options)
    case.row_scale = torch.full((BATCH, KV_HEADS, TOKENS), 0.01)
    case.v_plain = torch.randn(BATCH, KV_HEADS, TOKENS, DIM)
    eager_case = copy.deepcopy(case)
    torch.manual_seed(1)
    out, report = compile_case(function, case)
    assert "rewritten" not in report and any(reason in outcome for outcome in report), report
    if "dropout" not in name:
        torch.testing.assert_close(out, function(eager_case), rtol=1e-5, atol=1e-5)


def test_gradients_are_left_alone() -> None:
    case = Case()
    case.q.requires_grad_()
    out, report = compile_case(gqa, case)
    assert list(report) == ["gradients are recorded"]
    out.sum().backward()
    assert case.q.grad is not None


def test_other_attention_is_not_touched() -> None:
    case = Case()
    case.plain = torch.randn(BATCH, HEADS, TOKENS, DIM)
    out, report = compile_case(lambda c: sdpa(c, c.plain, c.plain) + c.k().sum(), case)
    assert report == {}
    torch.testing.assert_close(out, sdpa(case, case.plain, case.plain) + case.k().sum())


def test_a_write_to_something_else_between_does_not_matter() -> None:
    def function(c: Case) -> Tensor:
        k, v = c.k(), c.v()
        q = c.q * 2
        q.mul_(0.5)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    out, report = compile_case(function, Case())
    assert report == {"rewritten": 1}
    torch.testing.assert_close(out, function(Case()), rtol=1e-5, atol=1e-5)


def test_two_layers_with_appends_and_a_dynamic_length() -> None:
    """A write before the first dequantise and between layers is fine; the sliced length is one graph for all."""

    def function(c: Case, tokens: Tensor) -> Tensor:
        x = c.q
        for _ in range(2):
            new = x[:, :KV_HEADS]
            slots = torch.tensor([[7], [TOKENS + 7]])
            fp4.append(c.k_words, c.k_scales, c.v_words, c.v_scales, new, new, slots, c.scale, c.scale)
            length = tokens.shape[0]
            x = F.scaled_dot_product_attention(x, c.k()[:, :, :length], c.v()[:, :, :length], enable_gqa=True)
        return x

    torch._dynamo.reset()
    before = lowering.report()["sdpa"].get("rewritten", 0)
    compiled = torch.compile(function, backend=fp4.compile.backend, fullgraph=True, dynamic=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        for length in (20, 33):
            got = compiled(Case(), torch.zeros(length))
            torch.testing.assert_close(got, function(Case(), torch.zeros(length)), rtol=1e-5, atol=1e-5)
    assert lowering.report()["sdpa"]["rewritten"] == before + 2


def test_nothing_dense_is_left_in_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "TILE_ELEMENTS", 1)
    code = generated(gqa, Case(), backend=fp4.compile.backend)
    assert "dequantize" not in code.calls
    assert max(code.allocations) < BATCH * KV_HEADS * TOKENS * DIM
