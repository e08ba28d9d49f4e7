"""The portable kernel's PTX on the CPU (see `ptx.py`): 16-bit products, which the interpreter cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import calls
import pytest
import torch
from decode_cases import compare

pytest.importorskip("triton")
import ptx
from test_fallback_interpret import sixteen_bits

from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.kernels import fallback
from torch_fp4kv.ops.kernels.nvfp4 import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")

FORMATS = {"fp8": ("fp8", "fp8"), "k8v4": ("fp8", "nvfp4"), "nvfp4": ("nvfp4", "nvfp4")}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact ring": {"ring": 24, "num_sink_tokens": 4},
    "rotated keys, pages of 16": {"k_rotation": 64, "page_size": 16},
    "splits": {"lengths": (300,), "capacity": 320, "window": 270},
}


def call(storage: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> AttentionCall:
    k_format, v_format = FORMATS[storage]
    options = {"lengths": (90, 33), "capacity": 128, **options}
    return calls.make(
        k_format=k_format, v_format=v_format, dtype=dtype, return_lse=True, out_dtype=torch.float32, **options
    )


def check(c: AttentionCall, capability: int = 90) -> None:
    with ptx.launches(capability), sixteen_bits(capability):
        out, lse = fallback.run(c)
    compare(c, out, lse)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("storage", FORMATS)
def test_options(storage: str, options: dict[str, Any]) -> None:
    check(call(storage, **options))


@pytest.mark.parametrize("storage", FORMATS)
def test_without_an_instruction_for_e4m3(storage: str) -> None:
    check(call(storage, torch.float16, ring=24), capability=80)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_queries_of_any_magnitude(magnitude: float) -> None:
    c = call("k8v4", ring=24)
    check(replace(c, q=(c.q.float() * magnitude).bfloat16(), scale=0.1 / magnitude))


@pytest.mark.parametrize("offset", [1, 4])
def test_storage_that_begins_anywhere(offset: int) -> None:
    c = call("fp8")
    parts = [torch.cat([x.new_zeros(offset), x.flatten()])[offset:].view(x.shape) for x in (c.k_data, c.v_data)]
    check(replace(c, k_data=parts[0], v_data=parts[1]))


def test_small_weights_count() -> None:
    """255 tokens with weights below float16's least number, 2^-28, and values of 448 beside one of E4M3's least."""
    c = call("fp8", lengths=(256,), capacity=256)
    k, v = torch.zeros_like(c.k_data), torch.full_like(c.v_data, 0x7E)
    k[:, :, 100], v[:, :, 100] = 0x38, 0x01
    q = torch.full_like(c.q, 28.0 / 64)
    one = torch.ones(())
    check(replace(c, q=q, k_data=k, v_data=v, k_global=one, v_global=one, scale=0.6931471805599453))
