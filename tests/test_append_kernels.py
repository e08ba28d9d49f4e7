"""The Triton kernels under Triton's interpreter: bytes of append and quantise, numbers of prefill, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import kernel_cases as cases
import pytest
import torch

pytest.importorskip("triton")
from torch_fp4kv.ops.kernels import append

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones take the interpreter long."""
    monkeypatch.setattr(append, "FEW_BLOCKS", 0)


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter already")
def test_under_the_interpreter() -> None:
    # Triton reads the variable when a kernel is defined, so the kernels need a process of their own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "failed" not in result.stdout


@interpreted
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("global_scale", cases.GLOBAL_SCALES)
def test_hard_blocks_have_the_bytes_of_the_scalar_program(global_scale: float, dtype: torch.dtype) -> None:
    cases.check_hard_blocks("cpu", global_scale, dtype)


@interpreted
@pytest.mark.parametrize("head_dim", cases.HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_append_writes_the_bytes_of_the_op(dtype: torch.dtype, head_dim: int) -> None:
    cases.check_append("cpu", dtype, head_dim=head_dim)


@interpreted
@pytest.mark.parametrize("options", cases.APPENDS.values(), ids=cases.APPENDS.keys())
def test_append_options(options: dict[str, Any]) -> None:
    cases.check_append("cpu", **options)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        "one token",
        "80 and 112",
        "skip negative",
        "exact ring",
        "fp8 and 4-token",
        "rotated",
        "equalised, reordered and rotated",
    ],
)
def test_append_of_few_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "FEW_BLOCKS", 16384)
    cases.check_append("cpu", **{**cases.APPENDS[case], "tokens": 1})


@interpreted
@pytest.mark.parametrize("rule", ["4over6", "mse"])
def test_searched_scales_have_the_error_of_the_reference(rule: str) -> None:
    cases.check_searched("cpu", rule)


@interpreted
@pytest.mark.parametrize("per", ["tensor", "head", "row"])
@pytest.mark.parametrize("view", cases.LAYOUTS)
def test_quantize_and_dequantize_have_the_bytes_of_the_ops(view: str, per: str) -> None:
    cases.check_quantize("cpu", torch.bfloat16, 80, view, per)


@interpreted
@pytest.mark.parametrize("storage_format", ["nvfp4", "block-fp4"])
def test_dequantize_reads_the_4_token_order(storage_format: str) -> None:
    from torch_fp4kv.ops.kernels import quantize as kernel

    torch.manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (2, 3, 8, 4))
    scales = torch.randint(0, 127, words.shape, dtype=torch.uint8)
    g = torch.tensor(0.1)
    out = kernel.dequantize(words, scales, g, None, torch.float32, storage_format, "4token")
    assert torch.equal(
        out, cases.torch_fp4kv.dequantize(words, scales, g, format=storage_format, scale_layout="4token")
    )


@interpreted
def test_dequantize_reads_fp8() -> None:
    from torch_fp4kv.ops.kernels import quantize as kernel

    data = torch.arange(256, dtype=torch.uint8).view(16, 16)
    g = torch.tensor(0.1)
    out = kernel.dequantize(data, None, g, None, torch.float32, "fp8")
    assert torch.equal(out, cases.torch_fp4kv.dequantize(data, None, g, format="fp8"))


@interpreted
@pytest.mark.parametrize("options", cases.PREFILLS.values(), ids=cases.PREFILLS.keys())
def test_prefill(options: dict[str, Any]) -> None:
    # The interpreter computes bf16 dot products wrongly, so that bf16 is left to the GPU tests.
    cases.check_prefill(cases.prefill_call(torch.float16, **options), "cpu", 1e-3)


@interpreted
def test_prefill_with_biases_and_sink_logits() -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {**cases.calls.equalized(), "v_bias": torch.randn(2, 64), "sink_logits": torch.randn(4)}
    for softcap in (0.0, 5.0):
        call = cases.prefill_call(
            torch.float16, ring=24, num_sink_tokens=4, new=True, softcap=softcap, q_lengths=(20, 3), **options
        )
        cases.check_prefill(call, "cpu", 1e-3)


@interpreted
def test_prefill_with_strided_numbers_of_rows_and_heads() -> None:
    call = cases.calls.with_everything(20, new=True, dtype=torch.float16)
    cases.check_prefill(cases.calls.strided(call), "cpu", 1e-3)


@interpreted
@pytest.mark.parametrize("few_rows", [0, 1024], ids=["slabs", "splits"])
@pytest.mark.parametrize("batch", [1, 2])
def test_prefill_merges_slabs_and_splits(few_rows: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_fp4kv.ops.kernels import prefill

    monkeypatch.setattr(prefill, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 65536)
    monkeypatch.setattr(prefill, "FEW_ROWS", few_rows)
    options: dict[str, Any] = {"sink_logits": torch.randn(4), "q_lengths": (20, 3)[:batch]}
    lengths = (300, 150)[:batch]
    cases.check_prefill(
        cases.prefill_call(torch.float16, lengths=lengths, capacity=512, new=True, ring=24, **options), "cpu", 1e-3
    )


@interpreted
def test_a_prefill_row_depends_neither_on_batch_nor_on_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from torch_fp4kv.ops.kernels import prefill

    monkeypatch.setattr(prefill, "SPLIT_TOKENS", 64)
    call = cases.prefill_call(torch.float16, lengths=(150, 90), capacity=256, new=True)
    out, lse = prefill.run(call)
    for b in range(2):
        alone = prefill._rows_of(call, slice(b, b + 1))
        assert torch.equal(prefill.run(alone)[0], out[b : b + 1])
    wide = {}
    for name in ("k_data", "k_scales", "v_data", "v_scales"):
        stored = getattr(call, name)
        wide[name] = torch.cat([stored, torch.full_like(stored, 0xFF if stored.dtype == torch.uint8 else -1)], 2)
    wide_out, wide_lse = prefill.run(replace(call, **wide))
    assert torch.equal(wide_out, out)
    assert torch.equal(wide_lse, lse)


@interpreted
def test_what_prefill_leaves_to_the_fallback_has_a_reason() -> None:
    from dataclasses import replace

    from torch_fp4kv.ops.kernels import prefill

    call = cases.prefill_call(torch.float16, new=True)
    assert prefill.unsupported(call) is None
    assert "mask" in prefill.unsupported(replace(call, mask=torch.ones(20, 90, dtype=torch.bool)))
    assert "float32" in prefill.unsupported(cases.prefill_call(torch.float32))
    assert "positive" in prefill.unsupported(replace(call, scale=-1.0))
    assert "dtype" in prefill.unsupported(replace(call, k_new=call.k_new.float(), v_new=call.v_new.float()))
