"""What a cache learns from its first tokens: PyTorch against plain sums, the kernels against PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from torch_fp4kv.ops import statistics

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
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
    mean, amax = statistics.channel_means(x, first), statistics.block_amax(x, first, bias)
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
    assert not statistics.channel_means(x, first + 100).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kernels_agree_with_pytorch(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    kernels = pytest.importorskip("torch_fp4kv.ops.kernels.statistics")
    x, first = tokens(shape, dtype, device)
    total, count = kernels.channel_sums(x, first)
    mean = total / count.clamp(min=1)
    torch.testing.assert_close(mean.cpu(), statistics.channel_means(x.cpu(), first.cpu()), rtol=1e-5, atol=1e-6)
    bias = torch.randn(shape[1], shape[3]).to(device)
    for options in ((None, 0), (bias, 0), (bias, shape[3] & -shape[3])):
        want = statistics.block_amax(x.cpu(), first.cpu(), bias.cpu() if options[0] is not None else None, options[1])
        assert torch.equal(kernels.block_amax(x, first, *options).cpu(), want)


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter already")
def test_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "failed" not in result.stdout


@pytest.mark.gpu
def test_a_gpu_allocates_a_sixteenth_of_its_input() -> None:
    x, first = tokens((4, 8, 4096, 128), torch.bfloat16, "cuda")
    want = statistics.block_amax(x.cpu(), first.cpu(), None, 128)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    statistics.channel_means(x, first)
    amax = statistics.block_amax(x, first, None, 128)
    assert torch.cuda.max_memory_allocated() - before <= x.numel() // 16 * 4 + (1 << 20)
    assert torch.equal(amax.cpu(), want)
