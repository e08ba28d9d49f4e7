"""The rotation of K: Hadamard's matrix in blocks, its own inverse, and what it makes of stored keys."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from calls import empty_storage, make, run

import torch_fp4kv
from torch_fp4kv.cache.transform import hadamard
from torch_fp4kv.ops.format.rotation import largest_block, rotate


@pytest.mark.parametrize(("size", "block"), [(16, 16), (64, 64), (80, 16), (96, 32), (128, 16), (256, 256), (64, 1)])
def test_rotate_is_the_product_with_hadamard_s_matrix(size: int, block: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, size)
    got = rotate(x, block)
    expected = (x.double().unflatten(-1, (-1, block)) @ oracle.hadamard(block)).flatten(-2)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate(got, block), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(got, x @ hadamard(size, block), rtol=0, atol=1e-5)


def test_largest_block() -> None:
    assert [largest_block(size) for size in (16, 80, 96, 128, 192)] == [16, 16, 32, 128, 64]


@pytest.mark.parametrize("k_format", ["nvfp4", "fp8", "block-fp4", "exact"])
def test_append_stores_the_rotated_k_without_its_bias(k_format: str) -> None:
    torch.manual_seed(0)
    k, bias = torch.randn(1, 3, 4, 96), torch.randn(3, 96)
    slots, scale = torch.tensor([[3, 0, 2, 1]]), 0.1
    stored = [(*empty_storage(1, 3, 4, 96, k_format), *empty_storage(1, 3, 4, 96)) for _ in range(2)]
    torch_fp4kv.append(*stored[0], k, k, slots, scale, scale, k_bias=bias, k_rotation=32, k_format=k_format)
    rotated = rotate(k - bias[:, None], 32)
    torch_fp4kv.append(*stored[1], rotated, k, slots, scale, scale, k_format=k_format)
    for got, expected in zip(*stored):
        assert got is expected is None or torch.equal(got, expected)


def test_rotated_keys_give_the_result_of_plain_ones() -> None:
    options = {"lengths": (60, 21), "num_queries": 3, "num_sink_tokens": 2, "ring": 8, "new": True}
    exact = {"k_format": "exact", "v_format": "exact", **options}
    out, lse = run(make(k_rotation=32, **exact))
    plain, plain_lse = run(make(**exact))
    assert (out - plain).abs().max() <= 5e-6
    assert (lse - plain_lse).abs().max() <= 5e-6
    call = make(k_rotation=64, **options)
    oracle.check(call, *run(call))
    assert (run(replace(call, k_rotation=0))[0] - run(call)[0]).abs().max() > 0.1
