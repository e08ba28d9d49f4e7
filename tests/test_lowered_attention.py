"""`fp4kv::attention` lowered for the CPU: a loop over tiles in generated code, the results of the eager op."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from calls import equalized, make, run
from compiled import generated
from test_attention import CALLS
from torch import Tensor

from torch_fp4kv import lowering
from torch_fp4kv.ops import torch_attention
from torch_fp4kv.ops.call import AttentionCall

COMPILED = {
    "decode": {"lengths": (63, 9), "num_queries": 1},
    "ring": CALLS["ring"],
    "pages, window": {"lengths": (150, 40), "page_size": 16, "capacity": 160, "window": 20, "num_queries": 2},
    "sinks, ring, new, padding": CALLS["sinks, ring, new, padding"],
    "4-token scales, pages": CALLS["4-token scales, pages"],
    "fp8 and exact, soft-cap": {"lengths": (40,), "k_format": "fp8", "v_format": "exact", "softcap": 3.0},
    "block-fp4, bfloat16": {
        "lengths": (40, 3),
        "k_format": "block-fp4",
        "v_format": "block-fp4",
        "dtype": torch.bfloat16,
    },
    "rotated keys": {"lengths": (63, 9), "k_rotation": 64},
    "shifted keys": {"lengths": (63, 9), "k_bias": equalized()["k_bias"]},
    "transformed keys": {"lengths": (63, 9), "num_queries": 2, "ring": 8, **equalized()},
    "mask and sink logits": {"lengths": (40, 9), "mask": torch.arange(40) % 3 > 0, "sink_logits": torch.ones(4)},
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens and blocks of few queries, so that small calls take the loops of large ones."""
    monkeypatch.setattr(torch_attention, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(torch_attention, "SCORE_ELEMENTS", 1 << 10)


def check(got: tuple[Tensor, Tensor], call: AttentionCall) -> None:
    tolerance = 1e-5 if call.q.dtype == torch.float32 else 1e-2
    for have, want in zip(got, run(call)):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_traced_form_gives_the_results_of_the_op(options: dict[str, Any]) -> None:
    from torch_fp4kv.lowering.attention import attend

    call = make(**options)
    with torch.no_grad():
        check(attend(call), call)


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED.keys())
def test_compiled(options: dict[str, Any]) -> None:
    call = make(**options)
    torch._dynamo.reset()
    before = lowering.report()["attention_with_lse"].get("lowered", 0)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(lambda q: run(call, q=q), fullgraph=True)
        check(compiled(call.q), call)
    assert lowering.report()["attention_with_lse"]["lowered"] == before + 1


def test_code_does_not_grow_with_the_capacity() -> None:
    """And no scratch does: the loop runs from the first to the last token that a query sees."""

    def code(capacity: int) -> Any:
        call = make(lengths=(37,), capacity=capacity)
        return generated(lambda q: run(call, q=q)[0], call.q)

    small, large = code(64), code(1024)
    assert "fp4kv" not in small.calls and "fp4kv" not in large.calls
    assert small.num_kernels == large.num_kernels
    assert max(large.allocations) < 1024


def test_appended_token_is_attended_to() -> None:
    import torch_fp4kv

    call = make(lengths=(40,), capacity=64)
    new = torch.randn(1, 2, 1, 64)

    def step(call: AttentionCall, new: Tensor) -> Tensor:
        storage = (call.k_data, call.k_scales, call.v_data, call.v_scales)
        for position in (40, 41):
            torch_fp4kv.append(*storage, new, new * 5, torch.tensor([[position]]), call.k_global, call.v_global)
            new = run(call, lengths=call.lengths + (position - 39))[0][:, :2]
        return new

    torch._dynamo.reset()
    eager, compiled = step(make(lengths=(40,), capacity=64), new), torch.compile(step, fullgraph=True)(call, new)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_two_layers_of_different_window_in_one_graph() -> None:
    call = make(lengths=(60,), capacity=64)

    def step(q: Tensor) -> Tensor:
        return run(call, q=run(call, q=q, window=5)[0], window=40)[0]

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(call.q), step(call.q), rtol=1e-5, atol=1e-5)


def test_dynamic_shapes_are_left_to_the_op() -> None:
    call = make(lengths=(63,), num_queries=63)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: run(call, q=q)[0], fullgraph=True, dynamic=True)
    for num_queries in (63, 17):
        q = call.q[:, :, :num_queries].contiguous()
        torch.testing.assert_close(compiled(q), run(call, q=q)[0], rtol=1e-5, atol=1e-5)
    assert lowering.report()["attention_with_lse"]["shapes are dynamic"] >= 1


@pytest.mark.slow
def test_compiled_step_is_three_times_faster_than_the_eager_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Append and attention at 8192 tokens, by processor time; 4 to 4.5 when this was written."""
    import torch_fp4kv

    monkeypatch.undo()
    tokens, heads, dim = 8192, 8, 128
    storage = [x for _ in range(2) for x in torch_fp4kv.quantize(torch.randn(1, heads, tokens, dim), 0.01)]
    q, new = torch.randn(1, 4 * heads, 1, dim), torch.randn(1, heads, 1, dim)
    lengths, slots = torch.tensor([tokens], dtype=torch.int32), torch.tensor([[tokens - 1]])
    scale = torch.full((heads,), 0.01)

    def step(q: Tensor, new: Tensor) -> Tensor:
        torch_fp4kv.append(*storage, new, new, slots, scale, scale)
        return torch_fp4kv.attention(q, *storage, scale, scale, lengths)

    def best(function: Any) -> float:
        times = []
        for _ in range(10):
            start = time.process_time()
            function(q, new)
            times.append(time.process_time() - start)
        return min(times)

    torch._dynamo.reset()
    with torch.no_grad():
        assert best(step) >= 3 * best(torch.compile(step, fullgraph=True))
