"""Our bytes and values beside those of other libraries, where their conventions meet ours.

ml-dtypes has the two number formats; torchao and compressed-tensors quantise to NVFP4 with a decode scale and its
reciprocal. They keep the sign of zero, which we do not, and torchao multiplies by a reciprocal where we compare with
`t · f`: elements within a rounding of a threshold may have the neighbouring code there.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_fp4kv import dequantize, quantize, to_packed
from torch_fp4kv.ops.format import blocks, e4m3
from torch_fp4kv.ops.format.constants import E2M1_THRESHOLDS
from torch_fp4kv.scales import to_decode_scale

pytestmark = pytest.mark.peers

GLOBAL = 2.0**-6


def need(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[peers]'")


def bfloat16_data(rows: int = 64, size: int = 256) -> Tensor:
    """Floats of different magnitudes a row, all bfloat16 numbers."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(0))
    return (x * torch.logspace(-2, 1, rows)[:, None]).bfloat16().float()


def codes_of(words: Tensor) -> Tensor:
    """uint8 codes, one an element."""
    packed = to_packed(words)
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)


def without_negative_zero(code: Tensor) -> Tensor:
    return torch.where(code == 8, 0, code)


def unpacked(packed: Tensor) -> Tensor:
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)


def test_e2m1_is_that_of_ml_dtypes():
    ml_dtypes = need("ml_dtypes")
    every = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(every, blocks.code_values(torch.arange(16)).numpy())
    t = torch.tensor([t for t, _ in E2M1_THRESHOLDS])
    near = [t, t.nextafter(torch.tensor(0.0)), t.nextafter(torch.tensor(9.0)), torch.rand(10_000) * 8]
    x = torch.cat([*near, *(-n for n in near)])
    x = torch.cat([x, x.new_zeros(-x.numel() % 16)]).view(-1, 16)
    ours = blocks.codes(x, torch.ones(x.shape[0]))
    theirs = torch.from_numpy(x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    assert torch.equal(ours.to(torch.uint8).flatten(), without_negative_zero(theirs).flatten())


def test_e4m3_is_that_of_ml_dtypes():
    ml_dtypes = need("ml_dtypes")
    every = np.arange(0x7F, dtype=np.uint8)
    values = torch.from_numpy(every.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert torch.equal(e4m3.decode(torch.from_numpy(every)), values)
    middle = (values[1:] + values[:-1]) / 2
    top = torch.tensor(448.0)
    x = torch.cat([values, middle, middle.nextafter(top), middle.nextafter(-top), torch.rand(10_000) * 448])
    theirs = torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert torch.equal(e4m3.encode(x).to(torch.uint8), theirs)


def test_bytes_are_those_of_ml_dtypes_arithmetic():
    ml_dtypes = need("ml_dtypes")
    x = bfloat16_data()
    words, scales = quantize(x, GLOBAL)
    split = x.double().numpy().reshape(*scales.shape, 16)
    their_scales = (np.abs(split).max(-1).astype(np.float32) * np.float32(1 / (6 * GLOBAL))).astype(
        ml_dtypes.float8_e4m3fn
    )
    assert np.array_equal(their_scales.view(np.uint8), scales.numpy())
    quotient = split / (their_scales.astype(np.float64) * GLOBAL)[..., None]
    codes = quotient.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape)
    assert torch.equal(codes_of(words), without_negative_zero(torch.from_numpy(codes)))


def test_bytes_are_those_of_torchao():
    need("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    x = bfloat16_data()
    words, scales = quantize(x, GLOBAL)
    their_scales, packed = nvfp4_quantize(x, per_tensor_scale=torch.tensor(GLOBAL))
    assert torch.equal(scales, their_scales.view(torch.uint8))
    bound = (e4m3.decode(scales) * GLOBAL).repeat_interleave(16, -1)
    thresholds = torch.tensor([t for t, _ in E2M1_THRESHOLDS])
    clear = ((x / bound).abs()[..., None] / thresholds - 1).abs().amin(-1) > 1e-6
    assert clear.float().mean() > 0.9
    assert torch.equal(codes_of(words)[clear], without_negative_zero(unpacked(packed))[clear])


def test_values_are_those_of_torchao():
    need("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = bfloat16_data()
    scale = per_tensor_amax_to_scale(x.abs().amax())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=False)
    codes = theirs.qdata.contiguous().view(torch.int64)
    got = dequantize(codes, theirs.scale.view(torch.uint8).view(codes.shape), scale, dtype=torch.float32)
    torch.testing.assert_close(got, theirs.dequantize(torch.float32), rtol=3e-7, atol=0)


def test_bytes_and_values_are_those_of_compressed_tensors():
    need("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize
    from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize

    x = bfloat16_data()
    words, scales = quantize(x, GLOBAL)
    # Its global scale is the reciprocal of ours; here a power of two, so that both divide by the same number.
    args = QuantizationArgs(num_bits=4, type="float", group_size=16, symmetric=True, strategy="tensor_group")
    encode_scale, block_scales = torch.tensor(1 / GLOBAL), scales.view(torch.float8_e4m3fn).float()
    values = their_quantize(x=x, scale=block_scales, zero_point=None, global_scale=encode_scale, args=args)
    packed = pack_fp4_to_uint8(values)
    assert torch.equal(codes_of(words), without_negative_zero(unpacked(packed)))
    ours = to_packed(words)
    code_values = unpack_fp4_from_uint8(ours, *x.shape, dtype=torch.float32)
    theirs = their_dequantize(x_q=code_values, scale=block_scales, args=args, global_scale=encode_scale)
    assert torch.equal(dequantize(words, scales, GLOBAL, dtype=torch.float32), theirs.float())


def test_global_scale_of_compressed_tensors_is_our_encode_convention():
    need("compressed_tensors")
    from compressed_tensors.quantization.utils import generate_gparam

    theirs = generate_gparam(torch.tensor([-3.0]), torch.tensor([1.5]))
    assert to_decode_scale(float(theirs), "encode") == pytest.approx(3.0 / 2688, rel=1e-6)
