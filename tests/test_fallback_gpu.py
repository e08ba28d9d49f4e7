"""The portable kernel on a GPU against the float64 oracle, and that a row's result is its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import calls
import pytest
import torch
from decode_cases import CASES, compare
from kernel_cases import PREFILLS
from test_decode_gpu import on_gpu
from test_fallback_interpret import MORE
from test_fallback_ptx import FORMATS, call
from torch import Tensor

from torch_fp4kv.ops.call import AttentionCall

pytestmark = pytest.mark.gpu


def run(c: AttentionCall) -> tuple[Tensor, Tensor]:
    from torch_fp4kv.ops.kernels import fallback

    out, lse = fallback.run(on_gpu(c))
    assert lse is not None
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [*PREFILLS.values(), *MORE.values()], ids=[*PREFILLS, *MORE])
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    given = {"lengths": (90, 33), "capacity": 128, "num_queries": 20 if "new" in options else 1, **options}
    if "q_lengths" in given:
        given["num_queries"] = 20
    c = calls.make(return_lse=True, out_dtype=torch.float32, **{**given, "dtype": dtype})
    compare(c, *run(c))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("storage", FORMATS)
def test_calls_of_the_decode_kernel(storage: str, name: str) -> None:
    given = {"lengths": (90, 33), **CASES[name]}
    given.setdefault("capacity", -(-max(*given["lengths"], 1) // 64) * 64)
    c = call(storage, **given)
    compare(c, *run(c))


@pytest.mark.parametrize("storage", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e3, 1e30])
def test_queries_of_any_magnitude(storage: str, magnitude: float) -> None:
    c = call(storage, ring=24)
    c = replace(c, q=(c.q.float() * magnitude).bfloat16(), scale=0.1 / magnitude)
    compare(c, *run(c))


@pytest.mark.parametrize("storage", ["fp8", "k8v4"])
def test_a_row_does_not_depend_on_batch_capacity_or_pages(storage: str) -> None:
    row = {"heads": 8, "head_dim": 128, "seed": 1}
    alone = run(call(storage, lengths=(700,), capacity=704, **row))
    c = call(storage, lengths=(700,), capacity=704, **row)
    longer = replace(c, k_data=torch.cat([c.k_data] * 3, 2), v_data=torch.cat([c.v_data] * 3, 2))
    if c.v_scales is not None:
        longer = replace(longer, v_scales=torch.cat([c.v_scales] * 3, 2))
    names = ("q", "k_data", "v_data", "v_scales", "lengths")
    rows = {name: torch.cat([getattr(c, name)] * 5) for name in names if getattr(c, name) is not None}
    pages = {
        name: x.unflatten(2, (-1, 64)).transpose(1, 2).flatten(0, 1)
        for name in ("k_data", "v_data", "v_scales")
        if (x := getattr(c, name)) is not None
    }
    table = torch.arange(11, dtype=torch.int32)[None]
    for other in (longer, replace(c, **rows), replace(c, **pages, block_table=table)):
        for have, want in zip(run(other), alone):
            assert torch.equal(have[-1:], want)
