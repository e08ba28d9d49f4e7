"""Prefill on a GPU against the float64 oracle: options, batches, capture, devices, sizes past 2^31."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_cases as cases
import oracle
import pytest
import torch

from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.format import blocks

prefill = pytest.importorskip("torch_fp4kv.ops.kernels.prefill", exc_type=ImportError)

pytestmark = pytest.mark.gpu

# Weights are rounded to the values' 16 bits, f16 for stored values whatever the queries' dtype: 2^-11 relative.
DTYPES = {"fp16": (torch.float16, 1e-3), "bf16": (torch.bfloat16, 4e-3)}
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.values(), ids=DTYPES.keys())


@dtypes
@pytest.mark.parametrize("options", cases.PREFILLS.values(), ids=cases.PREFILLS.keys())
def test_options(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    cases.check_prefill(cases.prefill_call(dtype, **options), "cuda", tolerance)


def test_block_fp4() -> None:
    call = cases.prefill_call(torch.bfloat16, k_format="block-fp4", v_format="block-fp4", new=True)
    cases.check_prefill(call, "cuda", 4e-3)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("num_queries", [17, 100])
def test_head_sizes(num_queries: int, head_dim: int) -> None:
    call = cases.prefill_call(
        torch.bfloat16, lengths=(700, 333), num_queries=num_queries, capacity=1000, head_dim=head_dim, new=True, heads=8
    )
    cases.check_prefill(call, "cuda", 4e-3)


@dtypes
@pytest.mark.parametrize("few_rows", [0, 1024], ids=["slabs", "splits"])
def test_slabs_and_splits(few_rows: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SPLIT_TOKENS", 256)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 1 << 18)
    monkeypatch.setattr(prefill, "FEW_ROWS", few_rows)
    options: dict[str, Any] = {
        "sink_logits": torch.randn(4),
        "q_lengths": (40, 3),
        **cases.calls.equalized(),
        "v_bias": torch.randn(2, 64),
    }
    call = cases.prefill_call(
        dtype, lengths=(1500, 777), num_queries=40, capacity=2048, new=True, ring=24, num_sink_tokens=4, **options
    )
    cases.check_prefill(call, "cuda", tolerance)


def gpu_call(batch: int, capacity: int, length: int, num_queries: int = 300, **options: Any) -> AttentionCall:
    """bf16, 2 KV heads, group 4, head size 128; storage beyond `length` is poison."""
    torch.manual_seed(0)
    g = torch.tensor(0.01, device="cuda")
    stored = []
    for _ in range(2):
        words = torch.full((batch, 2, capacity, 8), -1, dtype=torch.int64, device="cuda")
        scales = torch.full(words.shape, 0xFF, dtype=torch.uint8, device="cuda")
        x = torch.randn(batch, 2, length, 128, device="cuda")
        words[:, :, :length], scales[:, :, :length] = blocks.encode(x, g)
        stored += [words, scales]

    def new(heads: int) -> torch.Tensor:
        return torch.randn(batch, heads, num_queries, 128, device="cuda", dtype=torch.bfloat16)

    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return AttentionCall(
        new(8), *stored, g, g, lengths, k_new=new(2), v_new=new(2), out_dtype=torch.float32, return_lse=True, **options
    )


def test_a_row_depends_neither_on_batch_nor_on_capacity() -> None:
    for num_queries in (20, 300):
        call = gpu_call(3, 9000, 8500, num_queries)
        out, lse = prefill.run(call)
        assert lse is not None
        for b in range(3):
            assert torch.equal(prefill.run(prefill._rows_of(call, slice(b, b + 1)))[0], out[b : b + 1])
        wide = {
            name: torch.cat([getattr(call, name), torch.full_like(getattr(call, name), 127)], 2)
            for name in ("k_data", "k_scales", "v_data", "v_scales")
        }
        wide_out, wide_lse = prefill.run(replace(call, **wide))
        assert torch.equal(wide_out, out)
        assert torch.equal(wide_lse, lse)


def test_a_captured_graph_follows_the_lengths() -> None:
    call = gpu_call(2, 3000, 2500)
    call.lengths.fill_(2000)
    prefill.run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = prefill.run(call)
    call.lengths.copy_(torch.tensor([2500, 1234]))
    graph.replay()
    expected, expected_lse = oracle.attend(call)
    assert float((out - expected).norm() / expected.norm()) < 4e-3
    assert float((lse - expected_lse).abs().max()) < 1e-4


def test_long_history() -> None:
    call = gpu_call(1, 40_000, 34_816, 2048)
    out, _ = prefill.run(call)
    # The last 64 queries in float64, over the dequantised history and the exact new tokens.
    history = 34_816 - 2048
    k, v = (
        torch.cat([blocks.decode(words[:, :, :history], scales[:, :, :history], call.k_global), new.float()], 2)
        for words, scales, new in (
            (call.k_data, call.k_scales, call.k_new),
            (call.v_data, call.v_scales, call.v_new),
        )
    )
    q = call.q[:, :, -64:].double()
    scores = q @ k.double().repeat_interleave(4, 1).transpose(2, 3) * 128**-0.5
    visible = torch.arange(34_816, device="cuda") <= torch.arange(34_752, 34_816, device="cuda")[:, None]
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v.double().repeat_interleave(4, 1)
    assert float((out[:, :, -64:] - expected).norm() / expected.norm()) < 4e-3


def test_storage_past_2_31_elements() -> None:
    pages, page_size = (1 << 20) + 8, 256
    g = torch.tensor(0.01, device="cuda")
    stored = []
    table = torch.tensor([[pages - 1, 3, pages - 2, 0]], dtype=torch.int32, device="cuda")
    for _ in range(2):
        words = torch.full((pages, 1, page_size, 8), -1, dtype=torch.int64, device="cuda")
        scales = torch.full(words.shape, 0xFF, dtype=torch.uint8, device="cuda")
        x = torch.randn(4, 1, page_size, 128, device="cuda")
        words[table[0].long()], scales[table[0].long()] = blocks.encode(x, g)
        stored += [words, scales]
    assert stored[0].numel() > 2**31
    q = torch.randn(1, 4, 20, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([1000], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"out_dtype": torch.float32, "return_lse": True}
    out, lse = prefill.run(AttentionCall(q, *stored, g, g, lengths, block_table=table, **options))
    small = [s[table[0].long()] for s in stored]
    local = torch.arange(4, dtype=torch.int32, device="cuda")[None]
    expected, expected_lse = prefill.run(AttentionCall(q, *small, g, g, lengths, block_table=local, **options))
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    cases.check_prefill(cases.prefill_call(torch.bfloat16, new=True), "cuda:1", 4e-3)
