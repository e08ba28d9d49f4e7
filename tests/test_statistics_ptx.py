"""The PTX of the kernels of first tokens on the CPU (see `ptx.py`): their tuples are compiled, not interpreted."""

from __future__ import annotations

import pytest
import torch
from test_statistics import by_kernels, scales, tokens

pytest.importorskip("triton")
import ptx

from torch_fp4kv.ops import statistics
from torch_fp4kv.ops.kernels import statistics as kernels
from torch_fp4kv.ops.kernels.nvfp4 import INTERPRETED
from torch_fp4kv.scales import set_global_scales

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")


@pytest.mark.parametrize("shape", [(2, 3, 40, 64), (1, 1, 30, 128), (3, 2, 17, 80)], ids=str)
def test_means_and_scales(shape: tuple[int, ...]) -> None:
    x, first = tokens(shape, torch.bfloat16)
    bias, rotation = torch.randn(shape[1], shape[3]), shape[3] & -shape[3]
    mean, want = torch.full(shape[1::2], float("nan")), torch.empty(shape[1::2])
    with ptx.launches():
        kernels.set_channel_means(mean, x, first)
        got = scales(x, first, by_kernels, "fp8", "nvfp4", bias=bias, rotation=rotation)
        alone = scales(x, first, by_kernels, "nvfp4")
        alone_with_bias = scales(x, first, by_kernels, "nvfp4", bias=bias)
    statistics.set_channel_means(want, x, first)
    torch.testing.assert_close(mean, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(
        torch.stack(got), torch.stack(scales(x, first, set_global_scales, "fp8", "nvfp4", bias=bias, rotation=rotation))
    )
    assert torch.equal(alone[0], scales(x, first, set_global_scales, "nvfp4")[0])
    assert torch.equal(alone_with_bias[0], scales(x, first, set_global_scales, "nvfp4", bias=bias)[0])
