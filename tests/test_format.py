"""The format of docs/format.md: PyTorch blocks byte-equal to the scalar reference, and both to numbers done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops.format import blocks, reference

GLOBAL_SCALES = [1e-6, 0.01, 0.1, 1 / 3, 1.0, 1e3]


def by_reference(x: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
    """`(words, scales)` of `x` `[..., D]`, one scalar block at a time."""
    g = reference.f32(global_scale)
    flat = x.to(torch.float32).reshape(-1, 16)
    done = [reference.quantize_block(block, g) for block in flat.tolist()]
    signed = [sum(code << 4 * i for i, code in enumerate(codes)) for codes, _ in done]
    words = torch.tensor([w - 2**64 if w >= 2**63 else w for w in signed], dtype=torch.int64)
    scales = torch.tensor([s for _, s in done], dtype=torch.uint8)
    shape = (*x.shape[:-1], x.shape[-1] // 16)
    return words.view(shape), scales.view(shape)


def check_bytes(x: Tensor, global_scale: float) -> None:
    before = x.clone()
    words, scales = torch_fp4kv.quantize(x, global_scale)
    expected = by_reference(x, global_scale)
    assert torch.equal(words, expected[0])
    assert torch.equal(scales, expected[1])
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))
    assert words.is_contiguous()
    assert scales.is_contiguous()
    assert not ((scales & 0x7F) == 0x7F).any(), "a NaN scale byte"
    assert not (scales & 0x80).any(), "a negative scale"
    decoded = torch_fp4kv.dequantize(words, scales, global_scale)
    g = reference.f32(global_scale)
    sample = decoded.reshape(-1, 16)[::97].tolist()
    for values, word, scale in zip(sample, words.flatten()[::97].tolist(), scales.flatten()[::97].tolist()):
        assert values == reference.dequantize_block([word >> 4 * i & 15 for i in range(16)], scale, g)


def codes_of(words: Tensor) -> list[int]:
    return [words.item() >> 4 * i & 15 for i in range(16)]


ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_each_bf16_value_alone_in_a_block() -> None:
    x = torch.zeros(65536, 16, dtype=torch.bfloat16)
    x[torch.arange(65536), torch.arange(65536) % 16] = ALL_BF16
    check_bytes(x, 0.1)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_all_bf16_values_in_one_position_under_a_fixed_block_scale(global_scale: float) -> None:
    x = torch.zeros(65536, 16)
    x[:, 3] = ALL_BF16
    x[:, 7] = 6.0 * 8.0 * global_scale
    limit = x[:, 7].clone()
    x = x[~(x[:, 3].abs() > limit)]
    words, scales = torch_fp4kv.quantize(x, global_scale)
    assert scales.unique().tolist() == [reference.e4m3_bits(8.0)]
    check_bytes(x[::3], global_scale)
    order = x[:, 3].nan_to_num(0.0).argsort()
    ranks = torch.tensor([-(code & 7) if code & 8 else code for code in (words[order, 0] >> 12 & 15).tolist()])
    assert ranks.unique().tolist() == list(range(-7, 8))
    assert (ranks.diff() >= 0).all(), "codes must grow with the value"


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_all_bf16_values_sixteen_a_block(global_scale: float) -> None:
    shuffled = ALL_BF16[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
    check_bytes(shuffled.view(-1, 16), global_scale)
    finite = ALL_BF16[ALL_BF16.isfinite()]
    near = finite[finite.abs().to(torch.float32).argsort()]
    check_bytes(near[: near.numel() // 16 * 16].view(-1, 16), global_scale)


TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
TO_EVEN = [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("global_scale", [2.0**-8, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("scale", [2.0**-9, 2.0**-6, 0.8125, 1.0, 1.125, 448.0], ids="s={:g}".format)
def test_ties_go_to_the_even_code_and_neighbours_do_not(global_scale: float, scale: float) -> None:
    g = reference.f32(global_scale)
    bound = reference.f32(scale * g)
    limits = torch.tensor([reference.f32(t * bound) for t in TIES])
    x = torch.zeros(3, 16)
    x[:, :7] = torch.stack([limits.nextafter(torch.tensor(0.0)), limits, limits.nextafter(torch.tensor(torch.inf))])
    x[:, 7:14] = -x[:, :7]
    x[:, 15] = bound * 6
    words, scales = torch_fp4kv.quantize(x, global_scale)
    assert scales.flatten().tolist() == [reference.e4m3_bits(scale)] * 3
    below, at, above = ([word >> 4 * i & 15 for i in range(14)] for word in words.flatten().tolist())
    assert at[:7] == TO_EVEN
    assert below[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert above[:7] == [1, 2, 3, 4, 5, 6, 7]
    for codes in (below, at, above):
        assert codes[7:] == [code | 8 if code else 0 for code in codes[:7]]
    check_bytes(x, global_scale)


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 2.0**-126, 1e-30, 1e-10, 1e-3, 1.0, 1e5, 1e20, 3e38], ids="{:g}".format)
@pytest.mark.parametrize("global_scale", [1e-6, 0.1, 1 / 3, 1.0, 1e3], ids="g={:g}".format)
def test_magnitudes_from_subnormal_to_the_largest(amax: float, global_scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.empty(63, 16).uniform_(-1, 1, generator=generator) * amax
    x[:, 5] = amax
    check_bytes(x, global_scale)


@pytest.mark.parametrize("global_scale", [2.0**-100, 2.0**-99, 2.0**99, 2.0**100], ids=["-100", "-99", "99", "100"])
def test_global_scales_at_the_edge_of_their_range(global_scale: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(63, 16, generator=generator) * global_scale * torch.logspace(-5, 4, 63)[:, None]
    check_bytes(x, global_scale)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256, 512, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(head_dim)).to(dtype)
    check_bytes(x, 0.01)


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2),
    "last dimension strided": lambda x: x.transpose(2, 3),
    "every second token": lambda x: x[:, :, ::2],
    "every second element": lambda x: x[..., ::2],
    "column slice": lambda x: x[..., 16:48],
    "odd offset": lambda x: x.flatten()[1 : 1 + 32 * 16].view(2, 16, 16),
    "expanded heads": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "expanded elements": lambda x: x[..., :1].expand(-1, -1, -1, 32),
    "size one": lambda x: x[:1, :1, :1],
    "no batch": lambda x: x[:0],
    "no tokens": lambda x: x[:, :, :0],
    "one row": lambda x: x[0, 0, 0],
    "two dimensions": lambda x: x[0, 0],
}


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_views_give_the_bytes_of_their_contiguous_copy(view, dtype: torch.dtype) -> None:
    x = view(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3)).to(dtype))
    check_bytes(x, 0.01)
    words, scales = torch_fp4kv.quantize(x, 0.01)
    plain = torch_fp4kv.quantize(x.contiguous(), 0.01)
    assert torch.equal(words, plain[0])
    assert torch.equal(scales, plain[1])
    strided = [torch.stack([t, t], -1)[..., 0] for t in (words, scales)]
    assert torch.equal(torch_fp4kv.dequantize(*strided, 0.01), torch_fp4kv.dequantize(words, scales, 0.01))


def test_block_by_hand() -> None:
    values = [0.0, -0.0, 0.5, -0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0, 2.4, 2.6, -3.4, 100.0, 0.1]
    values = [v * 2.0 for v in values]
    values[14] = 12.0
    # amax 12, global 0.5: s = round(12 / 3) = 4, one code unit is 4 · 0.5 = 2.
    words, scales = torch_fp4kv.quantize(torch.tensor(values), 0.5)
    assert scales.item() == 0x48
    assert codes_of(words) == [0, 0, 1, 9, 2, 3, 4, 5, 6, 7, 15, 4, 5, 13, 7, 0]
    assert torch_fp4kv.to_packed(words).tolist() == [0x00, 0x91, 0x32, 0x54, 0x76, 0x4F, 0xD5, 0x07]
    decoded = torch_fp4kv.dequantize(words, scales, 0.5)
    assert decoded.tolist() == [0, 0, 1, -1, 2, 3, 4, 6, 8, 12, -12, 4, 6, -6, 12, 0]


def test_low_nibble_is_the_even_element() -> None:
    x = torch.zeros(32)
    x[0], x[17] = 6.0, -6.0
    words, scales = torch_fp4kv.quantize(x, 1.0)
    assert scales.tolist() == [0x38, 0x38]
    assert torch_fp4kv.to_packed(words).tolist() == [7] + [0] * 7 + [0xF0] + [0] * 7


@pytest.mark.parametrize(
    "block", [torch.zeros(16), torch.full((16,), 1e-30), torch.full((16,), -0.0), torch.full((16,), 2.0**-149)]
)
def test_block_whose_scale_underflows_is_zero_and_not_nan(block: Tensor) -> None:
    words, scales = torch_fp4kv.quantize(block, 1.0)
    assert words.item() == 0
    assert scales.item() == 0
    assert torch_fp4kv.dequantize(words, scales, 1.0).tolist() == [0.0] * 16


@pytest.mark.parametrize("global_scale", [1.0, 2.0**-8, 2.0**20])
def test_scale_at_half_the_smallest_subnormal_becomes_zero_and_above_does_not(global_scale: float) -> None:
    amax = torch.tensor(6.0 * global_scale * 2.0**-10)
    x = torch.stack([amax, amax * (1 + 2.0**-20)])[:, None].expand(2, 16)
    words, scales = torch_fp4kv.quantize(x, global_scale)
    assert scales.flatten().tolist() == [0, 1]
    assert words[0].item() == 0
    check_bytes(x, global_scale)


def test_nan_is_code_zero_and_takes_no_part_in_the_block_scale() -> None:
    x = torch.full((16,), 3.0)
    x[2], x[9] = torch.nan, -torch.nan
    words, scales = torch_fp4kv.quantize(x, 1.0)
    assert scales.item() == reference.e4m3_bits(0.5)
    assert codes_of(words) == [7, 7, 0, *[7] * 6, 0, *[7] * 6]
    words, scales = torch_fp4kv.quantize(torch.full((16,), torch.nan), 1.0)
    assert (words.item(), scales.item()) == (0, 0)


def test_infinity_saturates_scale_and_code() -> None:
    x = torch.zeros(16)
    x[0], x[1], x[2] = torch.inf, -torch.inf, 1.0
    words, scales = torch_fp4kv.quantize(x, 1.0)
    assert scales.item() == 0x7E
    assert codes_of(words)[:3] == [7, 15, 0]
    assert torch_fp4kv.dequantize(words, scales, 1.0)[:2].tolist() == [2688.0, -2688.0]


@pytest.mark.parametrize("value", [449.0, 480.0, 1e4, torch.inf, -torch.inf])
def test_saturation_is_448_and_never_a_nan_byte(value: float) -> None:
    words, scales = torch_fp4kv.quantize(torch.full((16,), 6.0 * value), 1.0)
    assert scales.item() == 0x7E
    assert torch_fp4kv.dequantize(words, scales, 1.0).tolist() == [math.copysign(2688.0, value)] * 16


def test_negative_values_that_round_to_zero_have_no_sign() -> None:
    x = torch.full((16,), -0.01)
    x[0] = -6.0
    words, _ = torch_fp4kv.quantize(x, 1.0)
    assert words.item() == 15


@pytest.mark.parametrize(("divisor", "largest"), [(448.0, 74.67), (2688.0, 448.0)], ids=["amax/448", "amax/2688"])
def test_calibrated_tensor_uses_the_block_scales_its_convention_says(divisor: float, largest: float) -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(4))
    _, scales = torch_fp4kv.quantize(x, x.abs().max() / divisor)
    top = reference.e4m3_value(int(scales.max()))
    assert top == reference.e4m3_value(reference.e4m3_bits(largest))


def relative_rmse(x: Tensor, global_scale: float | Tensor) -> float:
    decoded = torch_fp4kv.dequantize(*torch_fp4kv.quantize(x, global_scale), global_scale)
    return float((decoded - x).norm() / x.norm())


def test_amax_over_448_has_six_times_head_room_and_amax_over_2688_none() -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(8))
    amax = float(x.abs().max())
    fine = relative_rmse(x, amax / 448)
    assert relative_rmse(x, amax / 448 / 6) < 1.05 * fine
    assert relative_rmse(x, amax / 2688) < 1.05 * fine
    assert relative_rmse(x, amax / 2688 / 4) > 2.5 * fine


def test_amax_over_448_keeps_code_times_scale_within_e4m3() -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(9))
    words, scales = torch_fp4kv.quantize(x, float(x.abs().max()) / 448)
    assert torch_fp4kv.dequantize(words, scales, 1.0).abs().max() <= 448.0


def test_global_scale_one_suits_a_deviation_of_a_tenth_and_stores_zeros_at_a_thousandth() -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(10))
    fine = relative_rmse(x, 1.0)
    assert relative_rmse(x * 0.1, 1.0) < 1.1 * fine
    assert relative_rmse(x * 0.01, 1.0) > 1.3 * fine
    words, _ = torch_fp4kv.quantize(x * 0.001, 1.0)
    assert not words.any()


def test_prefill_scale_leaves_room_for_tokens_a_hundred_times_larger() -> None:
    x = torch.randn(63, 128, generator=torch.Generator().manual_seed(11))
    global_scale = float(x.abs().max()) / 448 * 16
    assert relative_rmse(x, global_scale) < 0.11
    assert relative_rmse(x * 90, global_scale) < 0.11


def test_72_bytes_a_token_and_head_of_128() -> None:
    words, scales = torch_fp4kv.quantize(torch.randn(2, 1000, 128), 0.01)
    assert words.nbytes + scales.nbytes == 2 * 1000 * 72


def test_global_scale_per_head_and_per_row_equals_one_at_a_time() -> None:
    x = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(5))
    heads = torch.tensor([0.01, 0.1, 1 / 3])
    words, scales = torch_fp4kv.quantize(x, heads)
    for h, g in enumerate(heads.tolist()):
        assert torch.equal(words[:, h], by_reference(x[:, h], g)[0])
        assert torch.equal(scales[:, h], by_reference(x[:, h], g)[1])
    rows = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(6)) + 0.01
    words, scales = torch_fp4kv.quantize(x, rows)
    decoded = torch_fp4kv.dequantize(words, scales, rows)
    for index in [(0, 0, 0), (1, 2, 4), (0, 1, 3)]:
        g = rows[index].item()
        assert torch.equal(words[index], by_reference(x[index], g)[0])
        assert torch.equal(decoded[index], torch_fp4kv.dequantize(words[index], scales[index], g))


def test_block_fp4_scale_is_the_power_of_two_at_or_above_a_sixth_of_amax() -> None:
    amax = torch.tensor([6.0, 6.0001, 3.0, 12.0, 1e-3, 0.0, 1e38, torch.inf])
    x = amax[:, None] * torch.linspace(-1, 1, 16)
    x[:, 0], x[:, 1:] = amax, x[:, 1:].nan_to_num(0.0)
    words, scales = blocks.encode_block_fp4(x)
    expected = [127, 128, 126, 128, 127 - 12, 127 - 122]
    assert scales.flatten()[:6].tolist() == expected
    assert (words[5].item(), int(scales.max())) == (0, 127 + 118)
    decoded = blocks.decode_block_fp4(words, scales)
    assert decoded[0, 0] == 6.0
    assert decoded.isfinite().all()
    step = torch.exp2(scales.float() - 127)
    assert ((decoded - x).abs() <= step)[:6].all()
