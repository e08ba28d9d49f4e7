"""What a cache learns from its first tokens: PyTorch against plain sums, the kernels against PyTorch."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_fp4kv.ops import statistics
from torch_fp4kv.scales import TYPICAL, set_global_scales

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param(
        "cuda:1",
        marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
    ),
]
SHAPES = {"128": (2, 3, 70, 128), "80": (3, 2, 9, 80), "long": (1, 1, 1100, 16), "none": (2, 2, 0, 64)}


def tokens(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """K `[B, H, T, D]` as a projection gives it (strides of `[B, T, H, D]`), with odd values, and `first`."""
    torch.manual_seed(0)
    batch, heads, length, dim = shape
    x = torch.randn(batch, length, heads, dim).transpose(1, 2)
    if length > 8:
        x[0, 0, 3, 5], x[0, 0, 7, 1], x[-1, -1, 8, 0] = float("nan"), float("inf"), -float("inf")
    return x.to(device, dtype), torch.arange(-1, batch - 1).to(device, torch.int32)


def test_means_and_largest_magnitudes_leave_out_what_does_not_count() -> None:
    x, first = tokens((3, 2, 20, 32))
    bias = torch.linspace(-1, 1, 64).view(2, 32)
    mean, amax = torch.empty(2, 32), statistics.block_amax(x, first, bias)
    statistics.set_channel_means(mean, x, first)
    assert mean.shape == (2, 32) and amax.shape == (3, 2, 20, 2)
    for head in range(2):
        for channel in (0, 1, 5):
            values = [v for b in range(3) for v in x[b, head, max(int(first[b]), 0) :, channel].tolist()]
            finite = [v for v in values if abs(v) < float("inf")]
            assert len(finite) < len(values) or head == 1 or channel == 0
            assert float(mean[head, channel]) == pytest.approx(sum(finite) / len(finite), abs=1e-6)
    assert not amax[2, :, 0].any() and bool(amax[2, :, 1].all())
    row = (x[0, 0, 3].double() - bias[0].double()).abs()
    assert float(amax[0, 0, 3, 0]) == pytest.approx(float(row[:16].nan_to_num(0).max()))
    statistics.set_channel_means(mean, x, first + 100)
    assert not mean.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_means_of_the_kernels(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("torch_fp4kv.ops.kernels.statistics")
    monkeypatch.setattr(kernels, "PARTS", 2)
    x, first = tokens(shape, dtype, device)
    got, want = torch.full(shape[1::2], float("nan"), device=device), torch.empty(shape[1::2])
    kernels.set_channel_means(got, x, first)
    statistics.set_channel_means(want, x.cpu(), first.cpu())
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)


def scales(x: Tensor, first: Tensor, function: Callable[..., None], *formats: str, **options: Any) -> list[Tensor]:
    """What `function` chooses for K and V of `formats`, both `x`, K with `options`."""
    out = [torch.full((x.shape[1],), float("nan"), device=x.device) for _ in formats]
    stored = [statistics.Stored(x, kind, scale) for kind, scale in zip(formats, out)]
    function(first, dataclasses.replace(stored[0], **options), *stored[1:])
    return [scale.cpu() for scale in out]


def by_kernels(first: Tensor, *stored: statistics.Stored) -> None:
    pytest.importorskip("torch_fp4kv.ops.kernels.statistics").set_global_scales(
        first, stored, [TYPICAL[one.storage_format] for one in stored]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_scales_of_the_kernels(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("torch_fp4kv.ops.kernels.statistics"), "WIDE", 2)
    x, first = tokens(shape, dtype, device)
    x = x * torch.tensor([0.01, 1.0, 300.0])[: shape[1], None, None].to(device, dtype)
    bias = torch.randn(shape[1], shape[3]).to(device)
    rotation = shape[3] & -shape[3]
    got = scales(x, first, by_kernels, "fp8", "nvfp4", bias=bias, rotation=rotation)
    want = scales(x.cpu(), first.cpu(), set_global_scales, "fp8", "nvfp4", bias=bias.cpu(), rotation=rotation)
    got += scales(x, first, by_kernels, "nvfp4")
    want += scales(x.cpu(), first.cpu(), set_global_scales, "nvfp4")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [0.0, 1e-38, 2.0**-9, 1.5, 448.0, 449.0, 3e38])
def test_scales_of_equal_magnitudes(value: float, device: str) -> None:
    """Where a typical block's is the largest, so that no rounding may reach the next power of two."""
    x, first = torch.full((1, 1, 150, 32), value, device=device), torch.tensor([3], device=device)
    x[0, 0, ::7] = 0
    want = scales(x.cpu(), first.cpu(), set_global_scales, "nvfp4", "fp8")
    assert scales(x, first, by_kernels, "nvfp4", "fp8") == want
    assert float(want[0]) == {0.0: 2.0**-8, 1e-38: 2.0**-100, 1.5: 1.0, 3e38: 2.0**100}.get(value, float(want[0]))
    assert value != 3e38 or float(want[1]) == 2.0**100


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter already")
def test_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "failed" not in result.stdout


@pytest.mark.gpu
def test_a_gpu_allocates_little() -> None:
    x, first = tokens((4, 8, 4096, 128), torch.bfloat16, "cuda")
    mean = torch.empty(8, 128, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    statistics.set_channel_means(mean, x, first)
    got = scales(x, first, set_global_scales, "nvfp4", "nvfp4", bias=mean, rotation=128)
    assert torch.cuda.max_memory_allocated() - before <= x.numel() // 16 + (1 << 20)
    want = scales(x.cpu(), first.cpu(), set_global_scales, "nvfp4", "nvfp4", bias=mean.cpu(), rotation=128)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
