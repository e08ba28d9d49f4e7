"""More rows times KV heads than CUDA takes programs along the second axis of a grid (65,535), on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import calls
import pytest
import torch
from test_decode_gpu import on_gpu
from torch import Tensor

pytestmark = pytest.mark.gpu

KERNELS: dict[str, dict[str, Any]] = {
    "prefill": {"head_dim": 32, "num_queries": 2, "new": True, "dtype": torch.bfloat16},
    "fallback": {"num_queries": 2},
    "decode": {"num_queries": 2},
}
COPIES = 2050


def repeated(x: Tensor) -> Tensor:
    return x.repeat(COPIES, *[1] * (x.ndim - 1))


@pytest.mark.parametrize("name", KERNELS)
def test_attention(name: str) -> None:
    """Four rows of 8 KV heads, and each of their 2,050 copies."""
    kernel = pytest.importorskip(f"torch_fp4kv.ops.kernels.{name}", exc_type=ImportError)
    options = {"lengths": (16, 9, 3, 12), "heads": 16, "kv_heads": 8, "capacity": 64, **KERNELS[name]}
    if name == "prefill":
        # The workspace bounds the rows of a launch, less so with little storage.
        options["capacity"] = 16
    c = on_gpu(calls.make(return_lse=True, **options))
    assert kernel.unsupported(c) is None
    names = ("q", "k_data", "k_scales", "v_data", "v_scales", "lengths", "k_new", "v_new")
    many = replace(c, **{name: repeated(x) for name in names if (x := getattr(c, name)) is not None})
    for have, want in zip(kernel.run(many), kernel.run(c)):
        assert torch.equal(have, repeated(want))


def test_append_and_quantize() -> None:
    from torch_fp4kv.ops.kernels import append, quantize

    x = repeated(torch.randn(4, 8, 40, 64, device="cuda", dtype=torch.bfloat16)).view(-1, 1, 40, 64)
    g = torch.tensor(0.01, device="cuda")
    words, scales = quantize.quantize(x, g)
    storage = [s.cuda() for s in calls.empty_storage(x.shape[0], 1, 40, 64) * 2]
    slots = torch.arange(x.shape[0] * 40, device="cuda").view(-1, 40)
    append.append(*storage, x, x, slots, g, g)
    for have, want in zip(storage, (words, scales, words, scales)):
        assert torch.equal(have, want)
    first = quantize.quantize(x[:32], g)
    assert torch.equal(words.view(COPIES, *first[0].shape), first[0].expand(COPIES, -1, -1, -1, -1))


def test_statistics() -> None:
    from torch_fp4kv.ops.kernels import statistics
    from torch_fp4kv.ops.statistics import Stored

    few = torch.randn(4, 8, 40, 64, device="cuda")
    x, first = repeated(few), torch.zeros(4 * COPIES, dtype=torch.int32, device="cuda")
    mean, few_mean = (torch.empty(8, 64, device="cuda") for _ in range(2))
    statistics.set_channel_means(mean, x, first)
    statistics.set_channel_means(few_mean, few, first)
    torch.testing.assert_close(mean, few_mean, rtol=1e-4, atol=1e-6)
    scale, few_scale = (torch.empty(8, device="cuda") for _ in range(2))
    statistics.set_global_scales(first, [Stored(x, "nvfp4", scale, mean, 64)], [1.5])
    statistics.set_global_scales(first, [Stored(few, "nvfp4", few_scale, mean, 64)], [1.5])
    assert torch.equal(scale, few_scale)
