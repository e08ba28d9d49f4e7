"""The CUDA code of lowered ops, run: Inductor's kernels compiled to PTX, and the PTX interpreted on the CPU.

The bytes must be those of the eager op, fused multiply-adds and all that the compiler makes of them included.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from compiled import TRITON
from decode_step import append_step, step_arguments
from fake_cuda import cuda_code, driver
from ptx import Memory, Program
from test_lowering import DIM, FORMATS, HEADS, awkward, cache
from torch import Tensor
from torch.utils._pytree import tree_leaves

import torch_fp4kv as fp4

triton = pytest.importorskip("triton")

XBLOCK, NUM_WARPS = 8, 1


def run_cuda(function: Callable[..., Any], arguments: list[Tensor], results: list[Tensor], folder: Path) -> int:
    """Runs what Inductor generates for `function(*arguments)` on an H200; returns the number of launches.

    Args:
        arguments: no two of one shape and dtype, by which the code's arguments are told apart; written in place.
        results: receive what `function` returns.
    """
    code = cuda_code(function, *[(x.shape, x.dtype) for x in arguments])
    values: dict[str, Tensor] = {}
    for name, shape, dtype in re.findall(r"(arg\d+_1) = rand_strided\((\(.*?\)), .*?dtype=torch\.(\w+)\)", code):
        (values[name],) = [x for x in arguments if tuple(x.shape) == eval(shape) and str(x.dtype) == f"torch.{dtype}"]
    call = code[code.index("def call(") : code.index("runner = ")]
    returned = re.findall(r"buf\d+", call[call.rindex("return (") :])
    values |= dict(zip(returned, results))
    for new, old in reversed(re.findall(r"(buf\d+) = (buf\d+); del", call)):
        values[old] = values[new]
    programs = {name: _program(name, source, folder) for name, source in re.findall(TRITON, code, re.S | re.M)}
    launches = re.findall(r"(triton_\w+)\.run\((.*?), stream=", call)
    for name, given in launches:
        memory = Memory()
        memory.place(torch.empty(16 * 32 * NUM_WARPS, dtype=torch.uint8))
        numbers = [memory.place(values[a]) if a in values else int(a) for a in given.split(", ")]
        memory.load()
        elements = next(n for a, n in zip(given.split(", "), numbers) if a not in values)
        grid = (-(-elements // XBLOCK), 1, 1)
        for block in range(grid[0]):
            programs[name].run(memory, numbers, grid, (block, 0, 0), eager=True)
        memory.store()
    return len(launches)


def compile_kernel(name: str, source: str, folder: Path, capability: int = 90) -> Any:
    """The kernel `name` of a generated `source`, without Inductor's launcher around it, for sm_`capability`."""
    source = re.sub(r"triton_helpers\.set_driver_to_\w+\(\)|, eviction_policy='\w+'", "", source)
    (types,) = re.findall(r"'signature': \{(.*?)\}", source)
    signature = dict(re.findall(r"'(\w+)': '(\*?\w+)'", types))
    file = folder / f"{name}.py"
    file.write_text(re.sub(r"@triton_heuristics\.\w+\(.*?\n\)\n", "", source, flags=re.S))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with driver():
        return triton.compile(
            triton.compiler.ASTSource(getattr(module, name), signature, {"XBLOCK": XBLOCK}),
            target=triton.backends.compiler.GPUTarget("cuda", capability, 32),
            options={"num_warps": NUM_WARPS},
        )


def _program(name: str, source: str, folder: Path) -> Program:
    kernel = compile_kernel(name, source, folder)
    assert not re.search(r"(div|rcp)\.(full|approx)", kernel.asm["ptx"]), "the interpreter would round these right"
    # A thread's stack is 16 bytes of the tensor that is placed first.
    text = re.sub(r"\n.*%SPL?, .*", "", kernel.asm["ptx"], count=1)
    text = re.sub(r"cvta\.local\.u64.*", f"mul.wide.u32 %SP, %tid.x, 16; add.s64 %SP, %SP, {ptx.BASE};", text)
    text = re.sub(r"0d([0-9A-F]{16})", lambda number: str(int(number[1], 16)), text)
    return Program(text, 32 * NUM_WARPS, kernel.metadata.shared)


def check(function: Callable[..., Any], arguments: list[Tensor], folder: Path, num_launches: int = 1) -> None:
    """Asserts that the CUDA code of `function` gives and mutates, in `num_launches`, the bytes of eager."""
    expected_arguments = [x.clone() for x in arguments]
    expected = [x for x in tree_leaves(function(*expected_arguments)) if x is not None]
    results = [torch.empty_like(x) for x in expected]
    assert run_cuda(function, arguments, results, folder) == num_launches
    for got, want in zip([*results, *arguments], [*expected, *expected_arguments], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def _popcount(b: Any, parts: list[str], kinds: list[str], operands: list[Any]) -> Any:
    return np.vectorize(int.bit_count, otypes=[np.uint32])(ptx._get(b, operands[0], "b32").astype(object))


def _divide(b: Any, parts: list[str], kinds: list[str], operands: list[Any]) -> Any:
    if kinds[-1] != "f64":
        return ptx._divide(b, parts, kinds, operands)
    with np.errstate(all="ignore"):
        return ptx._get(b, operands[0], "f64") / ptx._get(b, operands[1], "f64")


def _compare(b: Any, parts: list[str], kinds: list[str], operands: list[Any]) -> Any:
    if kinds[-1] != "bf16":
        return ptx._compare(b, parts, kinds, operands)
    x, y = ((ptx._get(b, operand, "b16").astype(np.uint32) << 16).view(np.float32) for operand in operands)
    return {"nan": np.isnan(x) | np.isnan(y), "lt": x < y}[parts[1]]


def _absolute(b: Any, parts: list[str], kinds: list[str], operands: list[Any]) -> Any:
    if parts[1] == "bf16x2":
        return ptx._get(b, operands[0], "b32") & 0x7FFF7FFF
    if parts[1] == "bf16":
        return ptx._get(b, operands[0], "b16") & 0x7FFF
    return ptx._unary(np.abs)(b, parts, kinds, operands)


def _add(b: Any, parts: list[str], kinds: list[str], operands: list[Any]) -> Any:
    if parts[1] != "s16x2":
        return ptx._arithmetic(np.add)(b, parts, kinds, operands)
    x, y = (ptx._get(b, operand, "b32").view(np.uint16) for operand in operands)
    return (x + y).view(np.uint32)


@pytest.fixture(autouse=True)
def _instructions_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for name, compute in (("popc", _popcount), ("div", _divide), ("setp", _compare), ("abs", _absolute), ("add", _add)):
        monkeypatch.setitem(ptx.COMPUTE, name, compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize(dtype: torch.dtype, tmp_path: Path) -> None:
    scale = 2.0 ** torch.randint(-12, 4, (HEADS,)) * (1 + torch.rand(HEADS))
    check(lambda x, g: fp4.quantize(x, g), [awkward(2, HEADS, 9, DIM, dtype=dtype), scale], tmp_path)


def test_quantize_with_a_constant_scale_and_a_bias(tmp_path: Path) -> None:
    def function(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return fp4.quantize(x, 0.017511107893000567, bias=bias)

    check(function, [awkward(2, HEADS, 9, DIM), torch.randn(HEADS, DIM)], tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_dequantize_with_a_bias(form: str, tmp_path: Path) -> None:
    data, scales, layout = FORMATS[form]()
    storage_format = "nvfp4" if form == "4token" else form

    def function(data: Tensor, scale: Tensor, bias: Tensor, scales: Tensor | None = None) -> Tensor:
        return fp4.dequantize(data, scales, scale, bias=bias, format=storage_format, scale_layout=layout)

    arguments = [data, torch.tensor([0.1, 0.7, 3.0]), torch.randn(HEADS, DIM)]
    check(function, arguments if scales is None else [*arguments, scales], tmp_path)


@pytest.mark.parametrize("storage_format", ["nvfp4", "fp8", "block-fp4"])
def test_append_with_an_exact_ring(storage_format: str, tmp_path: Path) -> None:
    """V comes with another rank than K, so that the arguments of the code can be told apart."""

    def function(*given: Tensor) -> None:
        k, v, slots, k_scale, v_scale, exact_slots, k_exact, v_exact, k_data, v_data, *scales = given
        fp4.append(
            k_data,
            scales[0] if scales else None,
            v_data.squeeze(0),
            scales[1].squeeze(0) if scales else None,
            k * 2,
            v.squeeze(0),
            slots,
            k_scale,
            v_scale.squeeze(),
            k_exact=k_exact,
            v_exact=v_exact.squeeze(0),
            exact_slots=exact_slots.squeeze(0),
            k_format=storage_format,
            v_format=storage_format,
        )

    k, v = awkward(2, HEADS, 3, DIM), awkward(1, 2, HEADS, 3, DIM)
    slots, exact_slots = torch.tensor([[0, 9, 31], [17, 16, 2]]), torch.tensor([[[4, 19, 0], [1, 2, 3]]])
    scales = [torch.tensor([0.1, 2.0**-8, 7.3]), torch.tensor([[0.37]])]
    exact = [torch.full((3, HEADS, 20, DIM), -1.0), torch.full((1, 3, HEADS, 20, DIM), -1.0)]
    (k_data, k_scales), (v_data, v_scales) = cache(storage_format, torch.float32), cache(storage_format, torch.float32)
    storage = [k_data, v_data[None]]
    if k_scales is not None and v_scales is not None:
        storage += [k_scales, v_scales[None]]
    check(function, [k, v, slots, *scales, exact_slots, *exact, *storage], tmp_path)


@pytest.mark.parametrize(("slot", "written"), [(10**6, 31), (-5, 0)], ids=["beyond", "negative"])
def test_slot_out_of_range_is_clamped(slot: int, written: int, tmp_path: Path) -> None:
    """Where the CPU's code raises: an assertion that fails on a GPU takes the process along."""

    def function(k: Tensor, slots: Tensor, k_data: Tensor, k_scales: Tensor) -> None:
        fp4.append(k_data, k_scales, k_data.clone(), k_scales.clone(), k, k, slots, 0.1, 0.1)

    k_data, k_scales = cache("nvfp4", torch.float32)
    assert k_scales is not None
    before = k_data.clone()
    run_cuda(function, [torch.randn(1, HEADS, 1, DIM), torch.tensor([[slot]]), k_data, k_scales], [], tmp_path)
    changed = (k_data != before).any(-1).nonzero()[:, [0, 2]].unique(dim=0)
    assert (changed[:, 0] * k_data.shape[2] + changed[:, 1]).tolist() == [written]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_decode_step_compiles_for_every_architecture(capability: int, tmp_path: Path) -> None:
    """e4m3 is integer arithmetic, since only some of them have the type."""
    code = cuda_code(append_step, *step_arguments(1, ring=True))
    ((name, source),) = re.findall(TRITON, code, re.S | re.M)
    kernel = compile_kernel(name, source, tmp_path, capability)
    assert kernel.asm["cubin"] and "e4m3" not in kernel.asm["ptx"]
