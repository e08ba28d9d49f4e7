"""Append, quantise and dequantise on a GPU: the scalar program's bytes, sizes past 2^31, capture, other devices."""

from __future__ import annotations

from typing import Any

import calls
import kernel_cases as cases
import pytest
import torch

from torch_fp4kv.ops.format import blocks

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("global_scale", cases.GLOBAL_SCALES)
def test_hard_blocks_have_the_bytes_of_the_scalar_program(global_scale: float, dtype: torch.dtype) -> None:
    cases.check_hard_blocks("cuda", global_scale, dtype)


@pytest.mark.parametrize("head_dim", cases.HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_append_writes_the_bytes_of_the_op(dtype: torch.dtype, head_dim: int) -> None:
    cases.check_append("cuda", dtype, head_dim=head_dim)


@pytest.mark.parametrize("options", cases.APPENDS.values(), ids=cases.APPENDS.keys())
@pytest.mark.parametrize("few_blocks", [0, 16384], ids=["large tiles", "small tiles"])
def test_append_options(options: dict[str, Any], few_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_fp4kv.ops.kernels import append as kernel

    monkeypatch.setattr(kernel, "FEW_BLOCKS", few_blocks)
    cases.check_append("cuda", **options)


@pytest.mark.parametrize("rule", ["4over6", "mse"])
def test_searched_scales_have_the_error_of_the_reference(rule: str) -> None:
    cases.check_searched("cuda", rule)


@pytest.mark.parametrize("per", ["tensor", "head", "row"])
@pytest.mark.parametrize("view", cases.LAYOUTS)
def test_quantize_and_dequantize_have_the_bytes_of_the_ops(view: str, per: str) -> None:
    cases.check_quantize("cuda", torch.bfloat16, 80, view, per)


@pytest.mark.parametrize("global_scale", [2.0**-8, 0.1, 1 / 3])
def test_many_random_blocks_have_the_bytes_of_the_reference(global_scale: float) -> None:
    from torch_fp4kv.ops.kernels import quantize as kernel

    torch.manual_seed(0)
    g = torch.tensor(global_scale, device="cuda")
    for dtype in DTYPES.values():
        x = (torch.randn(200_000, 128, device="cuda") * global_scale * 50).to(dtype)
        words, scales = kernel.quantize(x, g)
        expected_words, expected_scales = blocks.encode(x, g)
        assert torch.equal(words, expected_words)
        assert torch.equal(scales, expected_scales)


def test_append_past_2_31_elements() -> None:
    from torch_fp4kv.ops.kernels import append as kernel

    # 2^24 + 64 slots of 8 heads and 16 words: the byte offsets, and the words counted in elements, pass 2^31.
    tokens, heads, head_dim = (1 << 24) + 64, 8, 256
    k = torch.randn(1, heads, 3, head_dim, device="cuda", dtype=torch.bfloat16)
    k_data = torch.full((1, heads, tokens, head_dim // 16), -1, dtype=torch.int64, device="cuda")
    k_scales = torch.full(k_data.shape, 0xFF, dtype=torch.uint8, device="cuda")
    assert k_data.numel() > 2**31
    v_data = torch.empty(1, heads, tokens, 1, dtype=torch.int64, device="cuda")
    v_scales = torch.empty(v_data.shape, dtype=torch.uint8, device="cuda")
    slots = torch.tensor([[tokens - 1, 0, tokens - 7]], device="cuda")
    g = torch.tensor(0.01, device="cuda")
    kernel.append(k_data, k_scales, v_data, v_scales, k, k[..., :16], slots, g, g)
    words, scales = blocks.encode(k, g)
    assert torch.equal(k_data[0][:, slots[0]], words[0])
    assert torch.equal(k_scales[0][:, slots[0]], scales[0])
    assert int((k_data != -1).sum()) == int((words != -1).sum())


def test_quantize_past_2_31_elements() -> None:
    from torch_fp4kv.ops.kernels import quantize as kernel

    x = torch.randn((1 << 24) + 5, 128, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    g = torch.tensor(0.01, device="cuda")
    words, scales = kernel.quantize(x, g)
    for part in (slice(0, 1000), slice(-1000, None)):
        expected_words, expected_scales = blocks.encode(x[part], g)
        assert torch.equal(words[part], expected_words)
        assert torch.equal(scales[part], expected_scales)
    out = kernel.dequantize(words[-1000:], scales[-1000:], g, None, torch.float32)
    assert torch.equal(out, blocks.decode(words[-1000:], scales[-1000:], g))


def test_append_in_a_captured_graph_follows_its_slots() -> None:
    from torch_fp4kv.ops.kernels import append as kernel

    k = torch.randn(4, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    storage = [s.cuda() for s in calls.empty_storage(4, 8, 32, 128) * 2]
    slots = torch.arange(4, device="cuda")[:, None] * 32
    g = torch.tensor(0.01, device="cuda")
    kernel.append(*storage, k, k.clone(), slots, g, g)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.append(*storage, k, k.clone(), slots, g, g)
    slots += 7
    k.normal_()
    graph.replay()
    words, scales = blocks.encode(k, g)
    assert torch.equal(storage[0][:, :, 7:8], words)
    assert torch.equal(storage[1][:, :, 7:8], scales)
    assert torch.all(storage[0][:, :, 8:] == -1)


def test_slots_outside_the_cache_write_nothing() -> None:
    from torch_fp4kv.ops.kernels import append as kernel

    storage = [s.cuda() for s in calls.empty_storage(2, 2, 16, 64) * 2]
    before = [s.clone() for s in storage]
    k = torch.randn(1, 2, 2, 64, device="cuda")
    g = torch.tensor(0.01, device="cuda")
    kernel.append(*storage, k, k.clone(), torch.tensor([[32, -33]], device="cuda"), g, g)
    for ours, old in zip(storage, before):
        assert torch.equal(ours, old)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    cases.check_append("cuda:1")
    cases.check_quantize("cuda:1", torch.bfloat16, 80, "transposed", "head")
