"""What Inductor makes of our ops: kernels, what each reads and writes, launches, allocations. CUDA code needs no GPU.

`EXPECTTEST_ACCEPT=1 pytest tests/test_golden_code.py` rewrites the expectations.
"""

from __future__ import annotations

import pytest
import torch
from compiled import Generated, generated
from expecttest import assert_expected_inline
from fake_cuda import cuda_code
from torch import Tensor

import torch_fp4kv as fp4

pytest.importorskip("triton")

BATCH, HEADS, TOKENS, DIM, RING = 16, 8, 4096, 128, 145
BF16, F32, I64, U8 = torch.bfloat16, torch.float32, torch.int64, torch.uint8
STORAGE = [((BATCH, HEADS, TOKENS, DIM // 16), I64), ((BATCH, HEADS, TOKENS, DIM // 16), U8)]
CACHE_ELEMENTS = BATCH * HEADS * TOKENS * DIM // 16


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def append_step(kw: Tensor, ks: Tensor, vw: Tensor, vs: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
    """A layer's decode step up to attention: K's RoPE and the cache write, exact ring too where `rest` has one."""
    cos, sin, slots, k_scale, v_scale, *ring = rest
    heads = [x.view(x.shape[0], x.shape[1], HEADS, DIM).transpose(1, 2) for x in (k, v)]
    exact = dict(zip(("k_exact", "v_exact", "exact_slots"), ring))
    fp4.append(kw, ks, vw, vs, rope(heads[0], cos, sin), heads[1], slots, k_scale, v_scale, **exact)


def step_arguments(new: int, ring: bool = False) -> list[tuple[tuple[int, ...], torch.dtype]]:
    projected = [((BATCH, new, HEADS * DIM), BF16)] * 2
    positions = [((BATCH, 1, new, DIM), BF16)] * 2
    scales = [((HEADS,), F32)] * 2
    exact = [((BATCH, HEADS, RING, DIM), BF16)] * 2 + [((BATCH, new), I64)] if ring else []
    return [*STORAGE, *STORAGE, *projected, *positions, ((BATCH, new), I64), *scales, *exact]


def check(code: Generated) -> str:
    """The summary, after asserting that nothing of the cache's size is copied or allocated."""
    assert max(code.allocations, default=0) < CACHE_ELEMENTS
    assert ".copy_(" not in code.calls and "clone" not in code.calls
    return code.summary


def test_decode_step_is_one_cuda_kernel() -> None:
    code = Generated(cuda_code(append_step, *step_arguments(1)))
    assert code.num_kernels == 1
    assert code.allocations == []
    assert_expected_inline(
        check(code),
        """\
persistent_reduction triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
  load 6 bf16, 2 fp32, 1 i64
  store 2 i64, 2 u8
  reduce 2 max2, 2 sum
launch triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
""",
    )


def test_decode_step_with_exact_ring_is_one_cuda_kernel() -> None:
    code = Generated(cuda_code(append_step, *step_arguments(1, ring=True)))
    assert code.num_kernels == 1
    assert code.allocations == []
    assert_expected_inline(
        check(code),
        """\
persistent_reduction triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
  load 6 bf16, 2 fp32, 2 i64
  store 2 bf16, 2 i64, 2 u8
  reduce 2 max2, 2 sum
launch triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
""",
    )


def test_prefill_of_static_length_is_one_cuda_kernel() -> None:
    code = Generated(cuda_code(append_step, *step_arguments(512)))
    assert code.num_kernels == 1
    assert_expected_inline(
        check(code),
        """\
persistent_reduction triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
  load 6 bf16, 2 fp32, 1 i64
  store 2 i64, 2 u8
  reduce 2 max2, 2 sum
launch triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
""",
    )


def test_prefill_of_dynamic_length_is_at_most_two_cuda_kernels() -> None:
    code = Generated(cuda_code(append_step, *step_arguments(512), dynamic_dims={4: 1, 5: 1, 6: 2, 7: 2, 8: 1}))
    assert code.num_kernels <= 2
    check(code)


def test_quantize_cuda() -> None:
    def function(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return fp4.quantize(torch.relu(x) * 2, scale)

    code = Generated(cuda_code(function, ((BATCH, HEADS, 64, DIM), BF16), ((HEADS,), F32)))
    assert_expected_inline(
        check(code),
        """\
persistent_reduction triton_per_fused_mul_quantize_relu_0
  load 1 bf16, 1 fp32
  store 1 i64, 1 u8
  reduce 1 max2, 1 sum
allocate int64 (16, 8, 64, 8)
allocate uint8 (16, 8, 64, 8)
launch triton_per_fused_mul_quantize_relu_0
""",
    )


def test_dequantize_cuda_fuses_with_its_consumer() -> None:
    def function(words: Tensor, scales: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return fp4.dequantize(words, scales, scale, dtype=BF16) * x

    code = Generated(cuda_code(function, *STORAGE, ((HEADS,), F32), ((DIM,), BF16)))
    assert_expected_inline(
        check(code),
        """\
pointwise triton_poi_fused_dequantize_mul_0
  load 1 bf16, 1 fp32, 1 i64, 1 u8
  store 1 bf16
  reduce nothing
allocate bfloat16 (16, 8, 4096, 128)
launch triton_poi_fused_dequantize_mul_0
""",
    )


def test_decode_step_cpp() -> None:
    storage = [torch.zeros(1, HEADS, 256, DIM // 16, dtype=dtype) for dtype in (I64, U8, I64, U8)]
    projected = [torch.randn(1, 1, HEADS * DIM) for _ in range(2)]
    positions = [torch.randn(1, 1, 1, DIM) for _ in range(2)]
    code = generated(append_step, *storage, *projected, *positions, torch.tensor([[3]]), *[torch.ones(HEADS)] * 2)
    assert max(code.allocations) <= HEADS * DIM
    assert_expected_inline(
        check(code),
        """\
cpp cpp_fused_add_append_cat_mul_neg_split_transpose_view_0
  read 6 float, 1 int64_t
  write 4 float, 4 int64_t, 2 uint8_t
allocate float32 (1, 8, 1, 128)
allocate float32 (1, 8, 1, 8)
allocate float32 (1, 8, 1, 8)
allocate int64 (1, 8, 1, 8)
allocate int64 (1, 8, 1, 8)
launch cpp_fused_add_append_cat_mul_neg_split_transpose_view_0
""",
    )


def test_dequantize_cpp_fuses_with_its_consumer() -> None:
    words, scales = fp4.quantize(torch.randn(4, DIM), 0.01)

    def function(words: Tensor, scales: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return fp4.dequantize(words, scales, scale) * x

    code = generated(function, words, scales, torch.tensor(0.01), torch.randn(DIM))
    assert_expected_inline(
        check(code),
        """\
cpp cpp_fused_dequantize_mul_0
  read 2 float, 1 int64_t, 1 uint8_t
  write 1 float
allocate float32 (4, 128)
launch cpp_fused_dequantize_mul_0
""",
    )
