"""The rotation of K: Hadamard's matrix in blocks, its own inverse; what else is done to K; and stored keys of both."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from calls import empty_storage, equalized, make, run

import torch_fp4kv
from torch_fp4kv.ops.format.rotation import largest_block, rotate
from torch_fp4kv.ops.format.transform import KeyTransform


@pytest.mark.parametrize(("size", "block"), [(16, 16), (64, 64), (80, 16), (96, 32), (128, 16), (256, 256), (64, 1)])
def test_rotate_is_the_product_with_hadamard_s_matrix(size: int, block: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, size)
    got = rotate(x, block)
    expected = (x.double().unflatten(-1, (-1, block)) @ oracle.hadamard(block)).flatten(-2)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate(got, block), x, rtol=0, atol=1e-5)


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


PARTS = [
    ("bias",),
    ("factors",),
    ("order",),
    ("rotation",),
    ("bias", "rotation"),
    ("factors", "order"),
    ("bias", "factors", "order", "rotation"),
]


@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_a_transform_leaves_scores_alone_and_has_an_inverse(dim: int, parts: tuple[str, ...]) -> None:
    transform = KeyTransform(**{name: equalized(3, dim)[f"k_{name}"] for name in parts})
    torch.manual_seed(0)
    k, q = torch.randn(2, 3, 5, dim).bfloat16(), torch.randn(2, 6, 4, dim).bfloat16()
    stored, bias = transform.key(k), transform.query_bias(q)
    product = transform.query(q).float() @ stored.float().repeat_interleave(2, 1).transpose(-1, -2)
    if bias is not None:
        product = product + bias.unsqueeze(-1)
    expected = q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2)
    torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(transform.original(stored).float(), k.float(), rtol=0, atol=1e-5)
    assert (transform.query(q) is not q) == transform.moves_queries == (parts != ("bias",))


def test_a_channel_is_stored_where_the_order_has_it() -> None:
    order = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32)
    k = torch.tensor([[[[10.0, 11.0, 12.0]], [[20.0, 21.0, 22.0]]]])
    assert KeyTransform(order=order).key(k).tolist() == [[[[12.0, 10.0, 11.0]], [[21.0, 22.0, 20.0]]]]
