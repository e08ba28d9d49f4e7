"""The decode kernel's PTX on the CPU (see `ptx.py`), against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import calls
import numpy as np
import oracle
import pytest
import torch
from decode_cases import CASES, call, check_hidden_by_the_lowest_number, compare

from torch_fp4kv.ops.format import constants

pytest.importorskip("triton")
import ptx

from torch_fp4kv.ops.kernels import decode, decode_unpack
from torch_fp4kv.ops.kernels.nvfp4 import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")

QUICK = {
    "keys shifted far",
    "shifted and rotated keys, window",
    "transformed keys",
    "empty row",
    "group of 3, two queries",
    "group of 8",
    "padded queries",
    "left padding",
    "window over queries",
    "soft-cap",
    "ring",
    "pages of 16",
    "exact ring",
    "all exact, in pages",
    "sinks alone",
    "rotated keys",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_options(name: str) -> None:
    c = call(dtype=torch.bfloat16, **CASES[name])
    assert decode.unsupported(c) is None
    with ptx.launches() as kernels:
        out, lse = decode.run(c)
    assert kernels == ["decode_kernel", "merge_kernel"]
    compare(c, out, lse)


@pytest.mark.parametrize("name", ["group of 8", "transformed keys"])
def test_code_for_blackwell(name: str) -> None:
    c = call(dtype=torch.float16, **CASES[name])
    with ptx.launches(120):
        out, lse = decode.run(c)
    compare(c, out, lse)


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (80, 96), (256, 80), pytest.param(192, 256, marks=pytest.mark.slow)])
def test_head_sizes(d: int, dv: int) -> None:
    sizes = {"head_dim": d, "v_head_dim": dv, "lengths": (140, 70)}
    for c in (
        call(**sizes, **calls.equalized(2, d, d & -d)),
        call(**sizes, page_size=32, capacity=192, ring=20, heads=8),
    ):
        with ptx.launches():
            out, lse = decode.run(c)
        compare(c, out, lse)


@pytest.mark.parametrize("d", [64, 256], ids="D {}".format)
def test_tokens_of_v_in_pairs(d: int) -> None:
    c = call(head_dim=d, v_head_dim=d, heads=16, lengths=(70, 9))
    with ptx.launches():
        out, lse = decode.run(c)
    compare(c, out, lse)


@pytest.mark.parametrize("capability", [80, 90], ids="sm_{}".format)
@pytest.mark.parametrize("eager", [False, True], ids=["late copies", "early copies"])
def test_copies_are_awaited(capability: int, eager: bool) -> None:
    c = call(lengths=(500,), heads=2, ring=20)
    spread_over(0)
    with ptx.launches(capability, eager):
        out, lse = decode.run(c)
    compare(c, out, lse)


def test_masks_and_sinks() -> None:
    c = call(num_queries=3, lengths=(200, 70), ring=24, num_sink_tokens=4)
    torch.manual_seed(1)
    visible = torch.rand(1, 1, 3, 150) < 0.7
    added = torch.randn(2, 4, 1, 200, dtype=torch.bfloat16)
    for changed in (
        replace(c, mask=visible, sink_logits=torch.randn(4)),
        replace(c, mask=added, **calls.equalized(2, 128)),
    ):
        with ptx.launches():
            out, lse = decode.run(changed)
        compare(changed, out, lse)


def test_exact_from_without_copies_means_nothing() -> None:
    c = call(lengths=(90, 33), exact_from=torch.tensor([50, 0], dtype=torch.int32))
    with ptx.launches():
        out, lse = decode.run(c)
    compare(c, out, lse)


@pytest.mark.parametrize(("rows", "queries"), [(0, 1), (2, 0)], ids=["no row", "no query"])
def test_nothing_to_do(rows: int, queries: int) -> None:
    c = call()
    c = replace(c, q=c.q[:rows, :, :queries], lengths=c.lengths[:rows])
    assert decode.unsupported(c) is None
    out, lse = decode.run(c)
    assert lse is not None
    assert (out.shape, lse.shape) == ((rows, 4, queries, 128), (rows, 4, queries))


def test_keys_all_hidden_by_the_lowest_number() -> None:
    with ptx.launches():
        check_hidden_by_the_lowest_number(call(num_queries=3, ring=20), decode.run)


def test_strided_numbers_of_rows_and_heads() -> None:
    c = calls.strided(calls.with_everything(2, head_dim=128, out_dtype=torch.float32))
    with ptx.launches():
        out, lse = decode.run(c)
    compare(c, out, lse)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_queries_of_any_magnitude(magnitude: float) -> None:
    c = call(lengths=(70,), ring=20, heads=2)
    c = replace(c, q=c.q * magnitude, scale=0.1 / magnitude)
    with ptx.launches():
        out, lse = decode.run(c)
    compare(c, out, lse)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    found, plan = decode.configuration, decode.plan
    yield
    decode.configuration, decode.plan = found, plan  # type: ignore[misc]
    decode.plan.cache_clear()


def spread_over(programs: int) -> None:
    """Small spans, and up to how many programs each tile or group has its own."""
    found = decode.configuration

    def limited(*args: int) -> decode.Configuration:
        return replace(found(*args), group=2, stride=2, programs=programs)

    decode.configuration = limited  # type: ignore[assignment]
    decode.plan.cache_clear()


def merge_of(elements: int, warps: int) -> None:
    """A merge whose programs have `elements` of the output and `warps` warps."""
    found = decode.plan.__wrapped__
    changes = {"merge_elements": elements, "merge_warps": warps}
    decode.plan = lru_cache(lambda *args: replace(found(*args), **changes))  # type: ignore[assignment]


@pytest.mark.parametrize("heads", [4, pytest.param(32, marks=pytest.mark.slow)], ids="{} heads".format)
def test_results_do_not_depend_on_how_work_is_spread(heads: int) -> None:
    """With 32 heads tiles are not computed each on their own."""
    c = call(lengths=(1100, 700, 64), starts=(0, 520, 0), num_queries=2, capacity=1152, heads=heads)
    expected = oracle.attend(c)[0]
    results = []
    # A tile each; some rows with a group or two each; a set each. Others are 6 and tiles up to 18.
    for programs, merge in ((1 << 20, (32, 2)), (6 * 10, (64, 1)), (6 * 6, (32, 1)), (0, (128, 2))):
        found = decode.configuration
        spread_over(programs)
        merge_of(*merge)
        with ptx.launches():
            results.append(decode.run(c))
        decode.configuration = found  # type: ignore[misc]
    for out, lse in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    assert float((results[0][0] - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("has_e4m3", [False, True])
@pytest.mark.parametrize(("num_words", "scales"), [(1, 1), (2, 2), (4, 2), (2, 0), (4, 0)])
def test_unpacking_is_exact(has_e4m3: bool, num_words: int, scales: int) -> None:
    """Every code in every place under every scale gives `code · scale · 2^-14`, without rounding."""
    operands = 8 * num_words
    names = [f"%h{i}" for i in range(operands)] + [f"%w{i}" for i in range(num_words)] + ["%s", "%m1", "%m5", "%m9"]
    assembly = decode_unpack.unpack_asm(num_words, scales, has_e4m3)
    for i in reversed(range(len(names))):
        assembly = assembly.replace(f"${i}", names[i])
    program = ptx.Program(f".entry test(\n)\n{{\n{assembly}\nret;\n}}\n", 32, 0)
    values = np.array(constants.E2M1_VALUES + tuple(-x for x in constants.E2M1_VALUES), np.float32)
    generator = np.random.default_rng(0)
    for first in range(0, 0x7F, 2):
        block = ptx.Block(ptx.Memory(), 32, 0, (1,), (0,), False)
        words = generator.integers(0, 1 << 32, (num_words, 32), np.uint32)
        words[0, :16] = np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)
        second = min(first + 1, 0x7E)
        block.registers |= {f"%w{i}": words[i] for i in range(num_words)}
        block.registers["%s"] = np.full(32, first | (0 if scales == 1 else second << 8), np.uint16)
        for name, value in zip(("%m1", "%m5", "%m9"), decode_unpack.SHIFTS):
            block.registers[name] = np.full(32, value, np.uint32)
        for step in program.steps[:-1]:
            step(block)
        for j in range(num_words):
            for nibble in range(8):
                is_second = nibble >= 4 if scales == 0 else scales == 2 and j >= num_words // 2
                scale = ptx.e4m3(np.array([second if is_second else first], np.uint8))
                place = 8 * j + 2 * (nibble % 4) + nibble // 4
                found = block.registers[f"%h{place}"].view(np.float16).astype(np.float32)
                code = words[j] >> np.uint32(4 * nibble) & np.uint32(15)
                assert np.array_equal(found, values[code] * scale * np.float32(2.0**-14))
