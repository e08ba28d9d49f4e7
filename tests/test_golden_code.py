"""What Inductor makes of our ops: kernels, what each reads and writes, launches, allocations. CUDA code needs no GPU.

`EXPECTTEST_ACCEPT=1 pytest tests/test_golden_code.py` rewrites the expectations.
"""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import Generated, generated
from decode_step import (
    BATCH,
    BF16,
    CACHE_ELEMENTS,
    DIM,
    F32,
    HEADS,
    I64,
    RING,
    STORAGE,
    TOKENS,
    U8,
    append_step,
    attention_arguments,
    attention_step,
    caches,
    rope,
    step_arguments,
)
from fake_cuda import cuda_code, driver
from torch import Tensor

import torch_fp4kv as fp4
from torch_fp4kv import _compat

pytest.importorskip("triton")
assert_expected_inline = pytest.importorskip("expecttest").assert_expected_inline


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


def test_layer_up_to_attention_is_two_cuda_kernels_and_the_call() -> None:
    def layer(kw: Tensor, ks: Tensor, vw: Tensor, vs: Tensor, q: Tensor, *rest: Tensor) -> Tensor:
        *step, lengths = rest
        _, _, cos, sin, _, k_scale, v_scale = step
        append_step(kw, ks, vw, vs, *step)
        q = rope(q.view(BATCH, 1, 4 * HEADS, DIM).transpose(1, 2), cos, sin)
        return fp4.attention(q, kw, ks, vw, vs, k_scale, v_scale, lengths).transpose(1, 2).flatten(2)

    step = step_arguments(1)
    query, lengths = ((BATCH, 1, 4 * HEADS * DIM), BF16), ((BATCH,), torch.int32)
    code = Generated(cuda_code(layer, *step[:4], query, *step[4:], lengths))
    assert code.num_kernels == 2
    assert_expected_inline(
        check(code),
        """\
persistent_reduction triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
  load 6 bf16, 2 fp32, 1 i64
  store 2 i64, 2 u8
  reduce 2 max2, 2 sum
pointwise triton_poi_fused_add_attention_cat_mul_neg_split_transpose_view_1
  load 5 bf16
  store 1 bf16
  reduce nothing
launch triton_per_fused_add_append_cat_mul_neg_split_transpose_view_0
allocate bfloat16 (16, 32, 1, 128)
launch triton_poi_fused_add_attention_cat_mul_neg_split_transpose_view_1
call torch.ops.fp4kv.attention.default
""",
    )


@pytest.mark.parametrize(
    ("options", "dtype", "ring"),
    [
        ({}, BF16, False),
        ({"k_rotation": 64, "softcap": 3.0}, BF16, False),
        *[
            ({"k_format": form, "v_format": form}, dtype, True)
            for form in ("nvfp4", "fp8", "block-fp4", "exact")
            for dtype in (F32, torch.float16, BF16)
        ],
    ],
    ids=str,
)
def test_a_packaged_program_holds_the_portable_kernel(
    options: dict[str, Any], dtype: torch.dtype, ring: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    form = options.get("k_format", "nvfp4")
    with_scales = form in ("nvfp4", "block-fp4")

    def attention(q: Tensor, data: Tensor, scales: Tensor, scale: Tensor, lengths: Tensor, *exact: Tensor) -> Tensor:
        block_scales = scales if with_scales else None
        copies = dict(zip(("k_exact", "v_exact", "exact_from"), exact))
        storage = (data, block_scales) * 2
        return fp4.attention(q, *storage, scale, scale, lengths, **options, **copies)

    monkeypatch.setattr(_compat, "compiles_ahead_of_time", lambda: True)
    elements = DIM // 16 if with_scales else DIM
    data = (BATCH, HEADS, TOKENS, elements), {"fp8": U8, "exact": dtype}.get(form, I64)
    per_row = ((BATCH,), torch.int32)
    exact = [((BATCH, HEADS, RING, DIM), dtype)] * 2 + [per_row] if ring else []
    text = cuda_code(attention, ((BATCH, 4 * HEADS, 1, DIM), dtype), data, STORAGE[1], ((HEADS,), F32), per_row, *exact)
    assert "torch.ops.fp4kv" not in Generated(text).calls
    for name in ("attention_kernel", "merge_kernel"):
        source = re.search(rf"triton\('{name}', \'\'\'(.*?)\'\'\', device_str", text, re.DOTALL)
        assert source is not None
        file = tmp_path / f"{name}.py"
        file.write_text(source[1])
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        with driver():
            # As Inductor compiles it: what is not in the source, such as a function of ours, would be missing, and
            # numbers have the types that Inductor gives them.
            spec.loader.exec_module(module)
            kernel = getattr(module, name)
            kernel.precompile(warm_cache_only=True)
        assert len(kernel.compile_results) == 1


LAUNCHES = {"append": 1, "attention": 2}
"""Kernels of an op that compiled code calls; see `test_kernels_offline.py` and `test_decode_ptx.py`."""


@pytest.mark.parametrize(("recipe", "expected"), [("nvfp4", 5), ("nvfp4-plain", 4), ("k8v4", 5), ("nvfp4-max", 5)])
def test_launches_a_layer_and_decode_step(recipe: str, expected: int) -> None:
    """From RoPE, that of the queries included, to the output of attention; one or two a step advance positions."""

    def launches(layers: int) -> int:
        code = Generated(cuda_code(attention_step, *attention_arguments(layers), state=partial(caches, recipe, layers)))
        assert max(code.allocations) < CACHE_ELEMENTS
        assert "extern_kernels" not in code.calls
        ops = re.findall(r"torch\.ops\.fp4kv\.(\w+)\.default\(", code.calls)
        return code.num_kernels + sum(LAUNCHES[op] for op in ops)

    two, three = launches(2), launches(3)
    assert three - two == expected
    assert two - 2 * expected <= 2


@pytest.mark.parametrize("skip_negative", [False, True], ids=["lowered", "opaque"])
def test_layers_of_one_buffer_are_not_copied(skip_negative: bool) -> None:
    def layers(q: Tensor, slots: Tensor, scale: Tensor, lengths: Tensor, *buffers: Tensor) -> Tensor:
        for layer in range(3):
            storage = [buffer.select(0, layer) for buffer in buffers]
            fp4.append(
                *storage, q[:, :HEADS], q[:, HEADS : 2 * HEADS], slots, scale, scale, skip_negative=skip_negative
            )
            q = fp4.attention(q, *storage, scale, scale, lengths)
        return q

    rows = ((BATCH, 4 * HEADS, 1, DIM), BF16), ((BATCH, 1), I64), ((HEADS,), F32), ((BATCH,), torch.int32)
    code = Generated(cuda_code(layers, *rows, *[((3, *shape), dtype) for shape, dtype in STORAGE * 2]))
    assert ("torch.ops.fp4kv.append.default(" in code.calls) == skip_negative
    check(code)


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
