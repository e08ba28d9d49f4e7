"""The fallback attention kernel under Triton's interpreter, against the float64 oracle; and that it compiles."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import calls
import offline
import oracle
import pytest
import torch
from decode_cases import CASES, check_hidden_by_the_lowest_number, compare
from kernel_cases import PREFILLS

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")
BIAS = torch.linspace(-0.5, 0.5, 64).repeat(2, 1)

MORE: dict[str, dict[str, Any]] = {
    "FP8 keys alone": {"k_format": "fp8"},
    "block-FP4": {"k_format": "block-fp4", "v_format": "block-fp4", "ring": 20},
    "exact keys, FP8 values": {"k_format": "exact", "v_format": "fp8", "dtype": torch.float16},
    "512": {"head_dim": 512, "dtype": torch.bfloat16},
    "576 and 512": {"head_dim": 576, "v_head_dim": 512, "heads": 8},
    "transformed keys of 576": {"head_dim": 576, "v_head_dim": 512, **calls.equalized(2, 576, 64)},
    "112 and 48": {"head_dim": 112, "v_head_dim": 48},
    "splits": {"lengths": (2500, 2048), "capacity": 2560, "ring": 30, "num_sink_tokens": 3},
    "splits of a ring": {"lengths": (5000, 70), "capacity": 2496, "num_sink_tokens": 3},
    "splits of a window": {"lengths": (4200, 70), "capacity": 4224, "window": 2500, "starts": (4, 0)},
    "splits of padded queries": {
        "lengths": (600, 40),
        "capacity": 640,
        "q_lengths": (3, 0),
        "sink_logits": torch.ones(4),
    },
    "bias of V": {"v_bias": BIAS, "ring": 24},
    "no row": {"lengths": (0, 0)},
}


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter already")
def test_under_the_interpreter() -> None:
    # Triton reads the variable when a kernel is defined, so the kernels need a process of their own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "failed" not in result.stdout


def check(c: Any) -> None:
    from torch_fp4kv.ops.kernels import fallback

    assert fallback.unsupported(c) is None
    out, lse = fallback.run(c)
    oracle.check(c, out, lse)


@interpreted
@pytest.mark.parametrize("options", [*PREFILLS.values(), *MORE.values()], ids=[*PREFILLS, *MORE])
def test_options(options: dict[str, Any]) -> None:
    given = {"lengths": (90, 33), "capacity": 128, "num_queries": 20 if "new" in options else 1, **options}
    if "q_lengths" in given:
        given["num_queries"] = 20
    check(calls.make(return_lse=True, out_dtype=torch.float32, **given))


@interpreted
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("512 columns", "sixteen queries", "group of 32")])
def test_calls_of_the_decode_kernel(name: str) -> None:
    given = {"lengths": (90, 33), "dtype": torch.bfloat16, **CASES[name]}
    given.setdefault("capacity", -(-max(*given["lengths"], 1) // 64) * 64)
    check(calls.make(return_lse=True, out_dtype=torch.float32, **given))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_have_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    check(calls.make(lengths=(90, 33), capacity=128, dtype=dtype, return_lse=True))


@interpreted
@pytest.mark.parametrize("options", [{}, {"ring": 24, "num_sink_tokens": 4}, {"new": True}], ids=str)
def test_masks_sinks_and_shifted_keys(options: dict[str, Any]) -> None:
    c = calls.make(lengths=(200, 70), capacity=256, num_queries=3, return_lse=True, **options)
    torch.manual_seed(1)
    for shape in [(2, 4, 3, 200), (2, 1, 1, 200), (1, 4, 1, 150), (1, 1, 3, 256)]:
        visible = torch.rand(shape) < 0.7
        check(replace(c, mask=visible))
        check(replace(c, mask=torch.randn(shape).masked_fill(~visible, -torch.inf), causal=False))
    check(replace(c, sink_logits=torch.randn(4) * 3))
    check(replace(c, **calls.equalized()))
    check(replace(c, k_global=torch.tensor([0.01, 0.05]), v_global=torch.tensor([0.05, 0.01])))


@interpreted
def test_keys_all_hidden_by_the_lowest_number() -> None:
    from torch_fp4kv.ops.kernels import fallback

    c = calls.make(lengths=(90, 33), capacity=128, num_queries=3, ring=20, return_lse=True, out_dtype=torch.float32)
    check_hidden_by_the_lowest_number(c, fallback.run)


@interpreted
def test_strided_numbers_of_rows_and_heads() -> None:
    check(calls.strided(calls.with_everything(2)))
    check(calls.strided(calls.with_everything(20, new=True)))


@interpreted
@pytest.mark.parametrize(
    ("options", "names"),
    [({"ring": 4}, ("k_exact", "v_exact")), ({"num_queries": 4, "new": True}, ("k_new", "v_new"))],
    ids=["exact copies", "new tokens"],
)
def test_tokens_past_2_31_elements(options: dict[str, Any], names: tuple[str, str], tmp_path: Path) -> None:
    c = calls.make(lengths=(20,), heads=1, kv_heads=1, head_dim=16, dtype=torch.float16, **options)

    def sparse_file(name: str) -> Callable[[int], torch.Tensor]:
        return lambda size: torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.float16)

    check(replace(c, **{name: calls.far_apart(getattr(c, name), sparse_file(name)) for name in names}))


@contextlib.contextmanager
def sixteen_bits(capability: int) -> Iterator[None]:
    """Within it the kernel is compiled as for queries on a GPU of this capability."""
    from torch_fp4kv.ops.kernels import fallback

    with mock.patch.object(fallback, "_capability", lambda _: divmod(capability, 10)):
        yield


@interpreted
@pytest.mark.parametrize("options", [{"k_rotation": 64}, {"ring": 24}, {"head_dim": 80, "page_size": 32}], ids=str)
@pytest.mark.parametrize("formats", [("fp8", "nvfp4"), ("nvfp4", "fp8"), ("exact", "exact")], ids=str)
def test_products_of_16_bits(formats: tuple[str, str], options: dict[str, Any]) -> None:
    from torch_fp4kv.ops.kernels import fallback

    if formats[0] == "exact":
        options = {name: value for name, value in options.items() if name != "k_rotation"}
    given = {"lengths": (90, 33), "capacity": 128, "dtype": torch.float16, **options}
    c = calls.make(k_format=formats[0], v_format=formats[1], return_lse=True, out_dtype=torch.float32, **given)
    with sixteen_bits(80):
        compare(c, *fallback.run(c))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("capability", [80, 90, 120], ids="sm_{}".format)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 512, "dtype": torch.bfloat16},
        {"k_format": "fp8", "v_format": "exact", "ring": 20, "page_size": 16, "softcap": 3.0, "window": 9},
        {"num_queries": 20, "new": True, "dtype": torch.bfloat16, "head_dim": 128},
        {"k_format": "fp8", "ring": 20, "dtype": torch.bfloat16, "head_dim": 128},
        {"head_dim": 256, "dtype": torch.bfloat16, "k_rotation": 64},
        {**calls.equalized(), "page_size": 16, "starts": (7, 3), "v_bias": BIAS},
    ],
    ids=["decode", "D 512", "everything", "prefill", "k8v4", "D 256", "shifted keys in pages"],
)
def test_compiles(options: dict[str, Any], capability: int) -> None:
    from torch_fp4kv.ops.kernels import fallback

    c = calls.make(lengths=(90, 33), capacity=128, return_lse=True, **options)
    with offline.launches(capability) as kernels, sixteen_bits(capability):
        fallback.run(c)
    kernel = next(kernel for kernel in kernels if kernel.name == "attention_kernel")
    assert kernel.spills <= 16
    assert kernel.shared <= offline.SHARED_MEMORY[capability]


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize(("v_format", "most"), [("fp8", 1450), ("nvfp4", 1700)])
def test_instructions(v_format: str, most: int) -> None:
    """An issue slot a clock and scheduler is about what HBM leaves for each tile of 64 tokens (790 of fp8)."""
    from torch_fp4kv.ops.kernels import fallback

    c = calls.make(capacity=512, head_dim=128, dtype=torch.bfloat16, k_format="fp8", v_format=v_format)
    with offline.launches(90) as kernels, sixteen_bits(90):
        fallback.run(c)
    assert len(kernels[0].instructions) <= most
    assert kernels[0].count("LDS.U8") <= 20, "stored bytes are read in words"


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("v_format", ["fp8", "nvfp4"])
def test_registers(v_format: str) -> None:
    """At most 128, with exact copies too: four programs an SM. Three were seen to take a tenth more time."""
    from torch_fp4kv.ops.kernels import fallback

    formats = {"k_format": "fp8", "v_format": v_format}
    c = calls.make(lengths=(90, 33), capacity=512, ring=20, head_dim=128, dtype=torch.bfloat16, **formats)
    with offline.launches(90) as kernels, sixteen_bits(90):
        fallback.run(c)
    assert kernels[0].registers <= 128


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("capability", [80, 90, 120], ids="sm_{}".format)
def test_kernels_are_launched_ahead_and_wait_before_they_read(capability: int) -> None:
    from torch_fp4kv.ops.kernels import fallback

    c = calls.make(lengths=(300, 33), capacity=512, k_format="fp8", dtype=torch.bfloat16, return_lse=True)
    with offline.launches(capability) as kernels, sixteen_bits(capability):
        fallback.run(c)
    attention, merge = kernels
    if capability >= 90:
        assert attention.waits_first(triggers=True) and merge.waits_first(triggers=False)
    else:
        assert not any(k.ahead or k.count("PREEXIT", "ACQBULK") for k in kernels)
