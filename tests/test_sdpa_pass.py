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
from torch_fp4kv.lowering.sdpa_pass import SdpaPass
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


def compile_case(
    function: Callable[[Case], Any], case: Case, backend: Any = fp4.compile.backend
) -> tuple[Any, dict[str, int]]:
    """The compiled result, and what the pass reports for it."""
    torch._dynamo.reset()
    before = lowering.report()["sdpa"]
    with torch._inductor.config.patch(force_disable_caches=True):
        out = torch.compile(function, backend=backend, fullgraph=True)(case)
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


def written_out(c: Case, mask: Callable[[Tensor], Tensor] = lambda s: s) -> Tensor:
    return mask(c.q @ repeat_kv(c.k()).mT / math.sqrt(DIM)).softmax(-1) @ repeat_kv(c.v())


def some_see_nothing(c: Case) -> Tensor:
    visible = c.visible.clone()
    visible[:, :, 1] = False
    return visible


def _all_keywords(c: Case) -> Tensor:
    k = torch.reshape(input=c.k()[:, :, None].expand(-1, -1, GROUP, -1, -1), shape=(BATCH, HEADS, TOKENS, DIM))
    scores = torch.matmul(input=c.q, other=torch.transpose(input=k, dim0=-1, dim1=-2)) * 0.2
    weights = F.softmax(input=scores, dim=-1)
    return torch.matmul(input=weights, other=torch.clone(input=repeat_kv(c.v())))


def _query_written_before_its_use(c: Case) -> Tensor:
    k, v = c.k(), c.v()
    q = c.q.clone()
    q.mul_(3)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


# In these the compiler runs the graph that the pass leaves as it stands, which is quick.
ALSO_REWRITTEN: dict[str, tuple[Callable[[Case], Tensor], dict[str, Any]]] = {
    "all keyword, written out": (_all_keywords, {}),
    "transpose and matmul by keyword": (
        lambda c: torch.matmul((c.q @ repeat_kv(c.k()).permute(dims=(0, 1, 3, 2))).softmax(-1), other=repeat_kv(c.v())),
        {},
    ),
    "other matmuls by keyword": (lambda c: gqa(c) + torch.matmul(input=c.q, other=c.q.mT).sum(), {}),
    "multi-query written out": (lambda c: ((c.q * 0.2) @ c.k().mT).softmax(-1) @ c.v(), {"kv_heads": 1}),
    "K is V": (lambda c: (lambda k: sdpa(c, k, k, enable_gqa=True))(c.k()), {}),
    "negative scale": (lambda c: gqa(c, scale=-0.5), {}),
    "scale 0": (lambda c: gqa(c, scale=0.0), {}),
    "autocast": (lambda c: torch.autocast("cpu", torch.bfloat16)(gqa)(c), {}),
    "no_grad within": (lambda c: torch.no_grad()(gqa)(c), {}),
    "some see nothing, bool": (lambda c: gqa(c, attn_mask=some_see_nothing(c)), {"queries": 3}),
    "some see nothing, lowest": (
        lambda c: gqa(c, attn_mask=torch.where(some_see_nothing(c), 0.0, torch.finfo(torch.float32).min)),
        {"queries": 3},
    ),
    "some see nothing, masked_fill": (
        lambda c: written_out(c, lambda s: s.masked_fill(~some_see_nothing(c), torch.finfo(s.dtype).min)),
        {"queries": 3, "dtype": torch.bfloat16},
    ),
    "some see nothing, where": (
        lambda c: written_out(c, lambda s: torch.where(some_see_nothing(c), s, -1e4)),
        {"queries": 3},
    ),
    "q written before its use": (_query_written_before_its_use, {}),
}


def run_pass(function: Callable[[Case], Any], case: Case) -> tuple[Any, dict[str, int]]:
    """As `compile_case`, but what the pass leaves is run as it stands."""

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        SdpaPass()(module.graph)
        module.graph.lint()
        module.recompile()
        return module.forward

    return compile_case(function, case, backend)


@pytest.mark.parametrize("name", ALSO_REWRITTEN)
def test_also_rewritten(name: str) -> None:
    function, options = ALSO_REWRITTEN[name]
    case = Case(**options)
    out, report = run_pass(function, case)
    assert report == {"rewritten": 1}
    tolerance = 1e-5 if case.q.dtype == torch.float32 and name != "autocast" else 2e-2
    torch.testing.assert_close(out, function(case), rtol=tolerance, atol=tolerance)


def test_no_visible_key_gives_0_where_eager_gives_nan() -> None:
    """As `scaled_dot_product_attention` does with a mask."""
    case = Case(queries=3)
    out, report = run_pass(lambda c: written_out(c, lambda s: s.masked_fill(~some_see_nothing(c), -math.inf)), case)
    assert report == {"rewritten": 1}
    torch.testing.assert_close(out, gqa(case, attn_mask=some_see_nothing(case)), rtol=1e-5, atol=1e-5)


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


def _local_words_zeroed(c: Case) -> Tensor:
    words = c.k_words.clone()
    k = fp4.dequantize(words, c.k_scales, c.scale)
    words.zero_()
    return sdpa(c, k, c.v(), enable_gqa=True)


def _lists_zeroed(c: Case) -> Tensor:
    k, v = c.k(), c.v()
    torch._foreach_zero_([c.k_words, c.v_words])
    return sdpa(c, k, v, enable_gqa=True)


def _scale_multiplied(c: Case) -> Tensor:
    k, v = c.k(), c.v()
    c.scale.__imul__(3.0)
    return sdpa(c, k, v, enable_gqa=True)


def _query_zeroed(c: Case) -> Tensor:
    q = c.q.clone()
    scores = q @ repeat_kv(c.k()).mT
    q[:, :, :].zero_()
    return scores.softmax(-1) @ repeat_kv(c.v())


def _mask_zeroed(c: Case) -> Tensor:
    mask = c.added.clone()
    weights = (c.q @ repeat_kv(c.k()).mT + mask).softmax(-1)
    mask.zero_()
    return weights @ repeat_kv(c.v())


@torch.compiler.allow_in_graph
def clone(x: Tensor) -> Tensor:
    """Not torch's."""
    return x * 2


@torch.compiler.allow_in_graph
def _zeroes(x: Tensor) -> Tensor:
    return x.zero_().sum()


def _unknown_function_between(c: Case) -> Tensor:
    k, v = c.k(), c.v()
    _zeroes(c.k_words)
    return sdpa(c, k, v, enable_gqa=True)


def _heads_swapped(x: Tensor) -> Tensor:
    return x[:, [1, 0], None].expand(-1, -1, GROUP, -1, -1).reshape(BATCH, HEADS, TOKENS, DIM)


def _unevenly_repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(torch.tensor([1, HEADS - 1]), 1, output_size=HEADS)


def _out_given(c: Case) -> Tensor:
    out = torch.zeros(BATCH, HEADS, 1, DIM)
    torch.matmul((c.q @ repeat_kv(c.k()).mT).softmax(-1), repeat_kv(c.v()), out=out)
    return out


ALSO_LEFT: dict[str, tuple[Callable[[Case], Any], dict[str, Any], str]] = {
    "storage made in the graph and written": (_local_words_zeroed, {}, "an in-place write"),
    "written in lists": (_lists_zeroed, {}, "an in-place write"),
    "written by a special method": (_scale_multiplied, {}, "an in-place write"),
    "q written after the scores": (_query_zeroed, {}, "an in-place write"),
    "mask written after the scores": (_mask_zeroed, {}, "an in-place write"),
    "written by who knows whom": (_unknown_function_between, {}, "a function that is not PyTorch's"),
    "function named like torch's": (lambda c: sdpa(c, clone(c.k()), c.v(), enable_gqa=True), {}, "'clone'"),
    "heads swapped": (lambda c: sdpa(c, _heads_swapped(c.k()), _heads_swapped(c.v())), {}, "'reshape'"),
    "repeated unevenly": (
        lambda c: sdpa(c, _unevenly_repeated(c.k()), _unevenly_repeated(c.v())),
        {},
        "'repeat_interleave'",
    ),
    "K as int8": (lambda c: sdpa(c, c.k().to(torch.int8).float(), c.v(), enable_gqa=True), {}, "'float'"),
    "K as float8": (
        lambda c: sdpa(c, c.k().to(torch.float8_e5m2).float(), c.v(), enable_gqa=True),
        {},
        "'float'",
    ),
    "scores as integers": (lambda c: written_out(c, lambda s: s.to(torch.int32).float()), {}, ""),
    "weights as float8": (
        lambda c: (c.q @ repeat_kv(c.k()).mT).softmax(-1).to(torch.float8_e4m3fn).float() @ repeat_kv(c.v()),
        {},
        "",
    ),
    "bool mask added": (lambda c: written_out(c, lambda s: s + c.visible), {}, "a bool mask is added"),
    "hidden by NaN": (lambda c: written_out(c, lambda s: s.masked_fill(~c.visible, math.nan)), {}, "large negative"),
    "divided by 0": (lambda c: written_out(c, lambda s: s / 0.0), {}, "other than a constant"),
    "infinite scale": (lambda c: gqa(c, scale=math.inf), {}, "not finite"),
    "mask of more queries": (
        lambda c: written_out(c, lambda s: s + torch.arange(4.0)[:, None] * torch.arange(float(TOKENS))),
        {},
        "broadcast",
    ),
    "one query head": (lambda c: (c.q[:, :1] @ c.k().mT).softmax(-1) @ c.v(), {}, "broadcast"),
    "scales strided": (
        lambda c: sdpa(c, fp4.dequantize(c.k_words, c.k_scales.mT.contiguous().mT, c.scale), c.v(), enable_gqa=True),
        {},
        "not contiguous",
    ),
    "out given": (_out_given, {}, ""),
}


@pytest.mark.parametrize("name", ALSO_LEFT)
def test_also_left_as_it_is(name: str) -> None:
    function, options, reason = ALSO_LEFT[name]
    case = Case(**options)
    expected = function(copy.deepcopy(case))
    out, report = run_pass(function, case)
    assert "rewritten" not in report and reason in "".join(report), report
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_an_op_of_the_same_name_is_not_torchs() -> None:
    with torch.library._scoped_library("fp4kv_test", "FRAGMENT") as library:
        library.define("softmax(Tensor x, int dim) -> Tensor")
        library.impl("softmax", lambda x, dim: x.relu(), "CompositeExplicitAutograd")
        torch.library.register_fake("fp4kv_test::softmax", lambda x, dim: torch.empty_like(x), lib=library)

        def function(c: Case) -> Tensor:
            return torch.ops.fp4kv_test.softmax(c.q @ repeat_kv(c.k()).mT, -1) @ repeat_kv(c.v())

        case = Case()
        out, report = run_pass(function, case)
        assert report == {}
        torch.testing.assert_close(out, function(case), rtol=1e-5, atol=1e-5)


def test_gradients_are_left_alone() -> None:
    case = Case()
    case.q.requires_grad_()
    out, report = compile_case(gqa, case)
    assert list(report) == ["gradients are recorded"]
    out.sum().backward()
    assert case.q.grad is not None


def test_a_mask_that_gets_gradients_is_left_alone() -> None:
    case = Case(queries=3)
    case.added = torch.zeros_like(case.added).requires_grad_()
    out, report = run_pass(lambda c: gqa(c, attn_mask=c.added), case)
    assert list(report) == ["gradients are recorded"]
    out.square().sum().backward()
    assert case.added.grad is not None and bool(case.added.grad.any())


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
