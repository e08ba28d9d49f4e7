"""Append, quantise and prefill compile for every NVIDIA family without spills and within its shared memory.

The ceilings are what the kernels had when they were written; a change that makes them worse fails here.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any
from unittest import mock

import offline
import pytest
import torch

from torch_fp4kv.ops.call import AttentionCall

pytest.importorskip("triton")
from torch_fp4kv.ops.kernels import append, decode, fallback, prefill, quantize, statistics
from torch_fp4kv.ops.kernels.nvfp4 import INTERPRETED
from torch_fp4kv.ops.statistics import Stored

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
capabilities = pytest.mark.parametrize("capability", offline.SHARED_MEMORY, ids="sm_{}".format)


def storage(heads: int, tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, heads, tokens, head_dim // 16)
    return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.uint8)


def append_kernel(capability: int, tokens: int, rule: str = "amax", **options: Any) -> offline.Compiled:
    k = torch.empty(1, tokens, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
    g = torch.ones(())
    with offline.launches(capability) as compiled:
        append.append(
            *storage(8, 64, 128),
            *storage(8, 64, 128),
            k,
            k.clone(),
            torch.empty(1, tokens, dtype=torch.int64),
            g,
            g,
            scale_rule=rule,
            **options,
        )
    (kernel,) = compiled
    return kernel


@capabilities
@pytest.mark.parametrize("tokens", [1, 4096])
def test_append(capability: int, tokens: int) -> None:
    kernel = append_kernel(capability, tokens)
    assert kernel.spills == 0
    assert kernel.shared == 0
    # Two threads share a block where a decode step has few.
    assert kernel.count("LDG.E.128" if tokens > 1 else "LDG.E.64") >= 4, "K and V are read 16 or 8 bytes at a time"
    assert kernel.count("BAR") == 0


def test_sizes_of_1_compile() -> None:
    # Triton makes a constant of an argument that is 1.
    x, g = torch.empty(1, 1, 1, 16), torch.ones(())
    with offline.launches(90) as compiled:
        append.append(*storage(1, 1, 16), *storage(1, 1, 16), x, x, torch.zeros(1, 1, dtype=torch.int64), g, g)
        words, scales = quantize.quantize(x, g)
        quantize.dequantize(words, scales, g)
    assert [kernel.spills for kernel in compiled] == [0, 0, 0]


def test_append_instructions_an_element() -> None:
    kernel = append_kernel(90, 4096)
    elements = 2 * append.N * 16 / (32 * append.NUM_WARPS)
    assert len(kernel.instructions) / elements <= 30


@pytest.mark.parametrize("rule", ["4over6", "mse"])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_append_with_searched_scales(capability: int, rule: str) -> None:
    kernel = append_kernel(capability, 4096, rule)
    assert kernel.spills == 0
    # A loop over divisors for K and one for V: 12 instructions an element each, beside the codes of the best.
    assert len(kernel.instructions) <= len(append_kernel(capability, 4096).instructions) + 2 * 13 * 32


@capabilities
def test_append_with_ring_bias_factors_and_order(capability: int) -> None:
    ring = torch.empty(1, 8, 65, 128, dtype=torch.bfloat16)
    kernel = append_kernel(
        capability,
        4096,
        k_exact=ring,
        v_exact=ring.clone(),
        exact_slots=torch.empty(1, 4096, dtype=torch.int64),
        k_bias=torch.empty(8, 128),
        v_bias=torch.empty(8, 128),
        k_factors=torch.empty(8, 128),
        k_order=torch.empty(8, 128, dtype=torch.int32),
        k_rotation=16,
    )
    assert kernel.spills == 0
    assert kernel.shared == 0


@capabilities
def test_append_rotates_in_registers(capability: int) -> None:
    plain, kernel = (append_kernel(capability, 4096, k_bias=torch.empty(8, 128), k_rotation=r) for r in (0, 128))
    assert kernel.spills == 0
    assert kernel.shared == 0
    assert kernel.count("BAR") == 0
    # Half of the kernel is K's: three of seven stages have their pairs in other lanes.
    elements = append.N * 16 / (32 * append.NUM_WARPS)
    assert kernel.count("SHFL") <= 3 * elements
    assert len(kernel.instructions) - len(plain.instructions) <= 16 * elements


@capabilities
@pytest.mark.parametrize("head_dim", [80, 128])
def test_quantize_and_dequantize(capability: int, head_dim: int) -> None:
    x, g = torch.empty(2, 8, 64, head_dim, dtype=torch.bfloat16), torch.ones(8)
    with offline.launches(capability) as compiled:
        words, scales = quantize.quantize(x, g)
        quantize.dequantize(words, scales, g, None, torch.bfloat16)
    assert [kernel.name for kernel in compiled] == ["quantize_kernel", "dequantize_kernel"]
    assert [kernel.spills for kernel in compiled] == [0, 0]


@capabilities
def test_statistics(capability: int) -> None:
    x, first = torch.empty(2, 64, 8, 128, dtype=torch.bfloat16).transpose(1, 2), torch.zeros(2, dtype=torch.int32)
    with offline.launches(capability) as compiled:
        statistics.set_channel_means(torch.empty(8, 128), x, first)
        stored = Stored(x, "nvfp4", torch.empty(8), torch.empty(8, 128), 128), Stored(x, "nvfp4", torch.empty(8))
        statistics.set_global_scales(first, stored, (1.5, 1.5))
    kernels = {kernel.name: kernel for kernel in compiled}
    assert list(kernels) == ["sums_kernel", "means_kernel", "sizes_kernel", "scales_kernel"]
    assert all(kernel.spills == 0 for kernel in compiled)
    for name in ("sums_kernel", "sizes_kernel"):
        assert kernels[name].count("LDG.E.128") >= 2, "read 16 bytes at a time"


def call(head_dim: int, num_queries: int, everything: bool) -> AttentionCall:
    def new(heads: int, tokens: int = num_queries) -> torch.Tensor:
        return torch.empty(1, heads, tokens, head_dim, dtype=torch.bfloat16)

    row = torch.zeros(1, dtype=torch.int32)
    options: dict[str, Any] = {}
    if everything:
        options = {
            "k_bias": torch.empty(8, head_dim),
            "k_factors": torch.empty(8, head_dim),
            "k_order": torch.empty(8, head_dim, dtype=torch.int32),
            "k_rotation": 16,
            "v_bias": torch.empty(8, head_dim),
            "k_exact": new(8, 69),
            "v_exact": new(8, 69),
            "num_sink_tokens": 4,
            "sink_logits": torch.empty(32),
            "window": 4096,
            "softcap": 30.0,
            "return_lse": True,
            **dict.fromkeys(("exact_from", "starts", "q_lengths"), row),
        }
    k_data, k_scales = storage(8, 16384, head_dim)
    v_data, v_scales = storage(8, 16384, head_dim)
    g = torch.ones(())
    return AttentionCall(new(32), k_data, k_scales, v_data, v_scales, g, g, row, k_new=new(8), v_new=new(8), **options)


# The ptxas that comes with Triton 3.6 spills where that of 3.7 does not.
PLAIN_SPILLS = {("3.6", 120): 12}

PREFILLS = [
    *[(capability, 128, 2048, False) for capability in offline.SHARED_MEMORY],
    *[(capability, 128, 2048, True) for capability in (80, 90, 120)],
    *[(capability, 256, 2048, False) for capability in (80, 90, 100, 120)],
    *[(90, 64, 2048, True), (80, 64, 17, False), (90, 128, 17, True), (120, 256, 17, False)],
]


@pytest.mark.parametrize(("capability", "head_dim", "num_queries", "everything"), PREFILLS)
def test_prefill(capability: int, head_dim: int, num_queries: int, everything: bool) -> None:
    with offline.launches(capability) as compiled:
        prefill.run(call(head_dim, num_queries, everything))
    kernels = {kernel.name: kernel for kernel in compiled}
    assert kernels["stage_kernel"].spills == 0
    assert not everything or kernels["query_kernel"].spills == 0
    attention = kernels["prefill_kernel"]
    assert attention.count("HMMA", "HGMMA", "UTC") > 0
    assert attention.shared <= offline.SHARED_MEMORY[capability]
    # With every option on, a few values of the prologue wait in local memory for the epilogue.
    assert attention.spills <= (20 if everything else PLAIN_SPILLS.get((version("triton")[:3], capability), 2))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"causal": False, "window": 100},
        {"k_new": None, "v_new": None, "window": 100},
        {"block_table": torch.zeros(1, 8, dtype=torch.int32), "v_scale_layout": "4token"},
        {"return_lse": True, "softcap": 30.0},
    ],
    ids=lambda options: ", ".join(options),
)
def test_prefill_options_compile(options: dict[str, Any]) -> None:
    # The interpreter is more lenient than the compiler, which wants one type from both sides of a branch.
    with offline.launches(90) as compiled:
        prefill.run(dataclasses.replace(call(128, 512, False), **options))
    assert all(kernel.spills <= 20 for kernel in compiled)


def test_only_the_first_axis_of_a_grid_grows_with_rows_and_heads() -> None:
    """CUDA takes at most 65,535 programs along the others."""
    rows, heads = 8_750, 8
    data, scales = (x.expand(rows, -1, -1, -1).contiguous() for x in storage(heads, 64, 64))
    stored = (data, scales, data, scales)
    k = torch.empty(rows, heads, 64, 64, dtype=torch.bfloat16)
    q, g = k[:, :, :1], torch.ones(())
    row = torch.zeros(rows, dtype=torch.int32)
    slots = torch.empty(rows * heads, 64, dtype=torch.int64)
    decode_step = AttentionCall(q, *stored, g, g, row, k_bias=torch.empty(heads, 64))
    one_gpu = mock.patch.multiple("torch.cuda", get_device_capability=lambda *_: (9, 0), device=mock.MagicMock())
    with offline.launches(90) as compiled, one_gpu:
        append.append(*stored, q, q, slots[:rows], g, g)
        one_head = tuple(x.view(rows * heads, 1, 64, -1) for x in stored)
        append.append(*one_head, k.view(-1, 1, 64, 64), k.view(-1, 1, 64, 64), slots, g, g)
        quantize.dequantize(*quantize.quantize(k, g), g)
        statistics.set_channel_means(torch.empty(heads, 64), k, row)
        statistics.set_global_scales(row, [Stored(k, "nvfp4", torch.empty(heads))], [1.5])
        # Little storage: the workspace bounds the rows of a launch.
        small = {name: getattr(decode_step, name)[:, :, :16] for name in ("k_data", "k_scales", "v_data", "v_scales")}
        prefill.run(dataclasses.replace(decode_step, k_new=q, v_new=q, **small))
        fallback.run(decode_step)
        decode.run(decode_step)
    names = [kernel.name for kernel in compiled]
    assert sorted({*names}) == [
        "append_kernel",
        "attention_kernel",
        "decode_kernel",
        "dequantize_kernel",
        "means_kernel",
        "merge_kernel",
        "prefill_kernel",
        "quantize_kernel",
        "query_kernel",
        "scales_kernel",
        "sizes_kernel",
        "stage_kernel",
        "sums_kernel",
    ]
    for kernel in compiled:
        assert max(kernel.grid[1:], default=1) <= 65_535, kernel.name
