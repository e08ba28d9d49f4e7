"""Byte layouts: the packed interchange form, and the 4-token order of V scales."""

from __future__ import annotations

import pytest
import torch

import torch_fp4kv
from torch_fp4kv.ops.format import layout


@pytest.mark.parametrize("shape", [(3,), (0, 4), (5, 1), (2, 3, 1000, 4), (63, 9)], ids=str)
def test_packed_form_is_the_same_bytes_and_back(shape: tuple[int, ...]) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, shape)
    packed = torch_fp4kv.to_packed(words)
    assert packed.shape == (*shape[:-1], 8 * shape[-1])
    assert packed.dtype == torch.uint8
    assert torch.equal(torch_fp4kv.from_packed(packed), words)
    for byte in range(8):
        assert torch.equal(packed[..., byte::8].long(), words >> 8 * byte & 255)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_from_packed_takes_bytes_at_any_offset_and_stride(offset: int) -> None:
    base = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    before = base.clone()
    packed = base[offset : offset + 32 * 24].view(32, 24)
    expected = packed.clone().view(torch.int64)
    assert torch.equal(torch_fp4kv.from_packed(packed), expected)
    assert torch.equal(torch_fp4kv.from_packed(packed[::3, 8:]), expected[::3, 1:])
    assert torch.equal(torch_fp4kv.from_packed(torch.stack([packed, packed], -1)[..., 1]), expected)
    assert torch.equal(base, before)


def test_packed_block_decodes_to_the_values_its_nibbles_say() -> None:
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    values = torch_fp4kv.dequantize(torch_fp4kv.from_packed(packed), torch.tensor([0x38], dtype=torch.uint8), 1.0)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize(("tokens", "groups"), [(4, 4), (16, 8), (64, 4), (12, 36), (0, 8)])
def test_4token_order_is_its_formula_and_a_bijection(tokens: int, groups: int) -> None:
    src = torch.randint(0, 256, (2, 3, tokens, groups), dtype=torch.uint8)
    dst = torch.zeros_like(src)
    for t in range(tokens):
        for s in range(groups):
            dst[..., t // 4 * 4 + s // (groups // 4), s % (groups // 4) * 4 + t % 4] = src[..., t, s]
    assert torch.equal(layout.v_scales_to_4token(src), dst)
    assert torch.equal(layout.v_scales_from_4token(dst), src)
    assert torch.equal(layout.v_scales_to_4token(layout.v_scales_from_4token(src)), src)
    index = torch.arange(tokens * groups).view(tokens, groups)
    assert layout.v_scales_to_4token(index).flatten().sort().values.tolist() == list(range(tokens * groups))


@pytest.mark.parametrize(("tokens", "groups"), [(6, 4), (8, 6), (1, 4)])
def test_4token_order_needs_whole_groups(tokens: int, groups: int) -> None:
    for convert in (layout.v_scales_to_4token, layout.v_scales_from_4token):
        with pytest.raises(ValueError, match=f"got {tokens} tokens with {groups} scales"):
            convert(torch.zeros(1, tokens, groups, dtype=torch.uint8))


def test_4token_scales_read_as_the_linear_ones_they_hold() -> None:
    x = torch.randn(2, 16, 64) * torch.arange(1, 65).repeat_interleave(16).view(16, 64)[:, :64]
    words, scales = torch_fp4kv.quantize(x, 0.1)
    expected = torch_fp4kv.dequantize(words, scales, 0.1)
    permuted = layout.v_scales_to_4token(scales)
    assert not torch.equal(permuted, scales)
    assert torch.equal(torch_fp4kv.dequantize(words, permuted, 0.1, scale_layout="4token"), expected)
