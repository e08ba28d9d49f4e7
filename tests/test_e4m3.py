"""e4m3 by integer arithmetic against PyTorch's `float8_e4m3fn`, for all bytes and at every rounding boundary."""

from __future__ import annotations

import torch

from torch_fp4kv.ops.format import e4m3, reference

BYTES = torch.arange(256, dtype=torch.int32)
FLOAT8 = BYTES.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def _boundaries() -> torch.Tensor:
    """Every e4m3 number, every midpoint of two, and the float32 neighbours of each, up to 448."""
    values = FLOAT8[:0x7F]
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    below, above = points.nextafter(torch.tensor(0.0)), points.nextafter(torch.tensor(torch.inf))
    return torch.cat([points, below, above, torch.rand(10_000) * 448, torch.logspace(-40, 2.6, 10_000)])


def test_decode_of_every_finite_byte() -> None:
    assert torch.equal(e4m3.decode(BYTES[:0x7F]), FLOAT8[:0x7F])
    finite = FLOAT8.isfinite()
    assert torch.equal(e4m3.decode_signed(BYTES)[finite], FLOAT8[finite])
    assert [reference.e4m3_value(b) for b in range(0x7F)] == FLOAT8[:0x7F].tolist()


def test_bytes_of_uninitialised_memory_decode_to_numbers() -> None:
    assert e4m3.decode(BYTES).isfinite().all()
    assert e4m3.decode_signed(BYTES).isfinite().all()


def test_encode_inverts_decode() -> None:
    assert torch.equal(e4m3.encode(FLOAT8[:0x7F]), BYTES[:0x7F])
    finite = FLOAT8.isfinite() & (BYTES != 0x80)
    assert torch.equal(e4m3.encode_signed(FLOAT8)[finite], BYTES[finite])


def test_encode_rounds_as_float8_does() -> None:
    values = _boundaries()
    values = values[values <= 448.0]
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8).int()
    assert torch.equal(e4m3.encode(values), expected)
    assert torch.equal(e4m3.encode_signed(-values) & 0x7F, expected)


def test_scalar_reference_rounds_as_float8_does() -> None:
    values = _boundaries()[:762]
    values = values[values <= 448.0]
    assert [reference.e4m3_bits(v) for v in values.tolist()] == values.to(torch.float8_e4m3fn).view(
        torch.uint8
    ).tolist()


def test_saturation_and_nan() -> None:
    values = torch.tensor([448.0, 448.01, 449.0, 464.0, 480.0, 1e4, 3e38, torch.inf, torch.nan])
    assert e4m3.encode(values).tolist() == [0x7E] * 9
    assert [reference.e4m3_bits(v) for v in values.tolist()] == [0x7E] * 9
    assert e4m3.encode_signed(-values).tolist() == [0xFE] * 8 + [0]


def test_at_or_below_half_the_smallest_subnormal_is_zero() -> None:
    values = torch.tensor([0.0, 1e-45, 2.0**-11, 2.0**-10, 2.0**-10 * (1 + 2.0**-23), 2.0**-9])
    assert e4m3.encode(values).tolist() == [0, 0, 0, 0, 1, 1]
