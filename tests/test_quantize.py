"""`quantize` and `dequantize` as ops: bias, dtypes, formats, stale memory, eager against compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compiled import compare
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fp4kv
from torch_fp4kv.ops.format import blocks, e4m3

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` returns NaN, or the largest integer, while this is used."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@DTYPES
@pytest.mark.parametrize("per_head", [False, True], ids=["one bias", "bias per head"])
def test_bias_is_subtracted_in_float32_first_and_added_last(dtype: torch.dtype, per_head: bool) -> None:
    x, bias = normal(2, 3, 63, 48, dtype=dtype), normal(*([3] if per_head else []), 48, seed=1)
    shift = bias[:, None] if per_head else bias
    words, scales = torch_fp4kv.quantize(x, 0.01, bias=bias)
    expected = torch_fp4kv.quantize(x.float() - shift, 0.01)
    assert torch.equal(words, expected[0])
    assert torch.equal(scales, expected[1])
    decoded = torch_fp4kv.dequantize(words, scales, 0.01, bias=bias, dtype=dtype)
    assert torch.equal(decoded, (torch_fp4kv.dequantize(words, scales, 0.01) + shift).to(dtype))


@DTYPES
def test_result_is_the_float32_value_rounded_once(dtype: torch.dtype) -> None:
    words, scales = torch_fp4kv.quantize(normal(63, 112), 1 / 3)
    decoded = torch_fp4kv.dequantize(words, scales, 1 / 3, dtype=dtype)
    assert decoded.dtype == dtype
    assert decoded.is_contiguous()
    assert torch.equal(decoded, torch_fp4kv.dequantize(words, scales, 1 / 3).to(dtype))


def test_error_is_at_most_half_a_step_of_the_block() -> None:
    x = normal(1000, 128)
    words, scales = torch_fp4kv.quantize(x, 0.01)
    step = (e4m3.decode(scales) * 0.01).repeat_interleave(16, -1)
    error = (torch_fp4kv.dequantize(words, scales, 0.01) - x).abs()
    # Above 4 the grid is 2 wide; the block scale is rounded, so that 6 may clip by one part in 16.
    assert (error <= step * 1.001).all()
    assert (error[x.abs() < 2 * step] <= 0.2501 * step[x.abs() < 2 * step]).all()


@pytest.mark.parametrize("head_dim", [16, 80, 96, 112, 144])
def test_stale_memory_does_not_show(head_dim: int, poisoned_memory: None) -> None:
    x = normal(3, 7, head_dim)
    words, scales = torch_fp4kv.quantize(x, 0.01)
    decoded = torch_fp4kv.dequantize(words, scales, 0.01)
    torch.use_deterministic_algorithms(False)
    again = torch_fp4kv.quantize(x, 0.01)
    assert torch.equal(words, again[0])
    assert torch.equal(scales, again[1])
    assert torch.equal(decoded, torch_fp4kv.dequantize(*again, 0.01))


def test_results_share_no_memory_with_their_inputs() -> None:
    x = normal(2, 16)
    words, scales = torch_fp4kv.quantize(x, 0.01)
    decoded = torch_fp4kv.dequantize(words, scales, 0.01)
    pointers = {t.untyped_storage().data_ptr() for t in (x, words, scales, decoded)}
    assert len(pointers) == 4


@pytest.mark.parametrize("kind", ["number", "0-d", "per head", "per row"])
def test_ways_to_give_the_global_scale_are_one(kind: str) -> None:
    x = normal(2, 3, 5, 32)
    scale = {
        "number": 0.1,
        "0-d": torch.tensor(0.1),
        "per head": torch.full((3,), 0.1),
        "per row": torch.full((2, 3, 5), 0.1),
    }[kind]
    expected = torch_fp4kv.quantize(x, 0.1)
    got = torch_fp4kv.quantize(x, scale)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(torch_fp4kv.dequantize(*got, scale), torch_fp4kv.dequantize(*expected, 0.1))


def test_fp8_bytes_decode_under_the_global_scale() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    stored = stored[(stored & 0x7F) != 0x7F][:240].view(3, 5, 16)
    decoded = torch_fp4kv.dequantize(stored, None, 1 / 3, format="fp8")
    assert torch.equal(decoded, stored.view(torch.float8_e4m3fn).float() * torch.tensor(1 / 3))


def test_block_fp4_ignores_the_global_scale() -> None:
    words, scales = blocks.encode_block_fp4(normal(63, 48))
    one, other = (torch_fp4kv.dequantize(words, scales, g, format="block-fp4") for g in (1.0, 0.003))
    assert torch.equal(one, other)
    assert (one - normal(63, 48)).norm() < 0.15 * one.norm()


@pytest.mark.parametrize("shape", [(3, 0, 16), (0, 2, 5, 32), (1, 1, 1000, 64), (7, 144)], ids=str)
def test_fake_tensors_have_the_shapes_of_real_ones(shape: tuple[int, ...]) -> None:
    real = torch_fp4kv.quantize(torch.zeros(shape), 0.01)
    with FakeTensorMode():
        words, scales = torch_fp4kv.quantize(torch.empty(shape, dtype=torch.bfloat16), 0.01)
        decoded = torch_fp4kv.dequantize(words, scales, 0.01, dtype=torch.float16)
    for fake, tensor in zip((words, scales), real):
        assert (fake.shape, fake.dtype, fake.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert (decoded.shape, decoded.dtype) == (torch.Size(shape), torch.float16)


@DTYPES
def test_compiled_bytes_are_the_eager_ones(dtype: torch.dtype) -> None:
    def both(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        words, scales = torch_fp4kv.quantize(x, g)
        return words, scales, torch_fp4kv.dequantize(words, scales, g, dtype=dtype)

    x = normal(2, 3, 63, 80, dtype=dtype) * 3
    x[0, 0, 0, :20] = torch.nan
    x[0, 0, 1, :20] = torch.inf
    x[0, 0, 2] = 0
    compare(both, x, torch.tensor(1 / 3))


VIEWS = {"transposed": lambda x: x.transpose(1, 2), "sliced": lambda x: x[:, ::2], "empty": lambda x: x[:, :0]}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_compiled_views_and_empty_inputs(view) -> None:
    compare(lambda x, g: torch_fp4kv.quantize(view(x), g), normal(2, 6, 4, 32), torch.tensor(0.1))


def test_two_sizes_compile_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, g: torch_fp4kv.quantize(x, g), fullgraph=True, backend=counter, dynamic=True)
    for tokens in (5, 63, 1000):
        x = normal(2, tokens, 32)
        words, scales = function(x, torch.tensor(0.1))
        expected = torch_fp4kv.quantize(x, 0.1)
        assert torch.equal(words, expected[0])
        assert torch.equal(scales, expected[1])
    assert counter.frame_count == 1


def test_scales_that_are_numbers_compile() -> None:
    torch._dynamo.reset()
    function = torch.compile(torch_fp4kv.quantize, fullgraph=True)
    x = normal(2, 5, 32)
    for scale in (0.1, 0.02, 3.0):
        for got, expected in zip(function(x, scale), torch_fp4kv.quantize(x, scale)):
            assert torch.equal(got, expected)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(Exception, match="positive and finite"):
            function(x, scale)


@pytest.mark.parametrize("scale_shape", [(3,), (2, 3, 5)], ids=["per head", "per row"])
def test_sizes_that_are_symbols_match_those_of_scale_and_bias(scale_shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    function = torch.compile(
        lambda x, g, b: torch_fp4kv.quantize(x, g, bias=b), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    x, scale, bias = normal(2, 3, 5, 32), torch.rand(scale_shape) + 0.1, normal(3, 32)
    for got, expected in zip(function(x, scale, bias), torch_fp4kv.quantize(x, scale, bias=bias)):
        assert torch.equal(got, expected)


def test_gradients_are_refused_and_no_grad_is_not() -> None:
    x = normal(2, 16).requires_grad_()
    for arguments in ({"x": x}, {"x": x.detach(), "bias": torch.zeros(16, requires_grad=True)}):
        with pytest.raises(RuntimeError, match="for inference"):
            torch_fp4kv.quantize(global_scale=0.1, **arguments)
    with torch.no_grad():
        torch_fp4kv.quantize(x, 0.1)
    with torch.inference_mode():
        torch_fp4kv.quantize(x, 0.1)
