"""The decode kernel without a GPU: its layouts as index maths, its machine code for every NVIDIA family.

Ceilings are what the kernel had when it was written; a change that makes it worse fails here.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import offline
import pytest
import torch

from torch_fp4kv.ops.call import AttentionCall

pytest.importorskip("triton")
import triton

from torch_fp4kv.ops.kernels import decode
from torch_fp4kv.ops.kernels import decode_layouts as layouts
from torch_fp4kv.ops.kernels.nvfp4 import INTERPRETED

compiles = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
HEAD_SIZES = pytest.mark.parametrize("d", [64, 128, 256], ids="D {}".format)
N = 64


def places(layout: tuple[list[list[int]], list[list[int]], list[int]]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Coordinates by `(lane, register)`."""
    registers, lanes, shape = layout
    found = {}
    for lane in range(1 << len(lanes)):
        for register in range(1 << len(registers)):
            flips = [basis for i, basis in enumerate(lanes) if lane >> i & 1]
            flips += [basis for i, basis in enumerate(registers) if register >> i & 1]
            coordinates = [0] * len(shape)
            for basis in flips:
                coordinates = [x ^ y for x, y in zip(coordinates, basis)]
            assert all(x < size for x, size in zip(coordinates, shape))
            found[lane, register] = tuple(coordinates)
    return found


@HEAD_SIZES
@pytest.mark.parametrize(
    "name", ["k_word_map", "k_scale_map", "k_exact_map", "v_word_map", "v_scale_map", "v_exact_map"]
)
def test_a_map_covers_its_tensor_once(name: str, d: int) -> None:
    layout = getattr(layouts, name)(N, d)
    found = places(layout).values()
    assert len(found) == len(set(found)) == math.prod(layout[2])


@HEAD_SIZES
@pytest.mark.parametrize("c", [4, 8, 16])
def test_the_map_of_outputs_covers_them_once(c: int, d: int) -> None:
    found = places(layouts.out_map(c, d)).values()
    assert len(found) == len(set(found)) == c * d


def element_of_column(column: int, d: int) -> int:
    """As `in_order_of_lanes` has them: bit i of a column of K is this bit of the element's index."""
    bits = [2, 4, 5, 0, 1, 3] if d == 64 else [2, 5, 6, 0, 1, 3, 4, 7]
    return sum((column >> i & 1) << bit for i, bit in enumerate(bits))


@HEAD_SIZES
def test_a_lane_finds_its_columns_of_k_in_its_own_words(d: int) -> None:
    """Operand A gives lane (g, c) of row g the columns 2c, 2c + 1, 2c + 8 and 2c + 9 of each 16."""
    words = places(layouts.k_word_map(N, d))
    own: dict[int, set[tuple[int, int]]] = {}
    for (lane, _), (token, word) in words.items():
        own.setdefault(lane, set()).add((token, word))
    assert sorted(element_of_column(column, d) for column in range(d)) == list(range(d))
    for lane in range(32):
        g, c = divmod(lane, 4)
        for column in range(d):
            if column % 8 // 2 == c:
                assert all((token, element_of_column(column, d) // 8) in own[lane] for token in range(g, N, 8))


@HEAD_SIZES
def test_exact_copies_lie_where_words_would(d: int) -> None:
    for tokens_a_row, words, exact in (
        (1, layouts.k_word_map(N, d), layouts.k_exact_map(N, d)),
        (2, layouts.v_word_map(N, d), layouts.v_exact_map(N, d)),
    ):
        packed, plain = set(), set()
        for (lane, _), (row, column) in places(words).items():
            token, word = row * tokens_a_row + column // (d // 8), column % (d // 8)
            packed |= {(lane, token, 8 * word + i) for i in range(8)}
        for (lane, _), (token, element) in places(exact).items():
            plain.add((lane, token, element))
        assert packed == plain


@HEAD_SIZES
@pytest.mark.parametrize("which", ["k", "v"])
def test_reads_of_shared_memory_meet_no_bank_twice(which: str, d: int) -> None:
    """Lanes that are served together (8 for 16 bytes each, 16 for 8, 32 for 4) read from different banks."""
    layout = layouts.k_word_map(N, d) if which == "k" else layouts.v_word_map(N, d)
    vec, per_phase, max_phase = layouts.k_swizzle(d) if which == "k" else layouts.v_swizzle(d)
    width = layouts.words_per_lane(d)[0 if which == "k" else 1]
    row_words = layout[2][1]
    found = places(layout)
    together = 32 // width
    for register in range(0, 1 << len(layout[0]), width):
        for first in range(0, 32, together):
            banks = []
            for lane in range(first, first + together):
                for word in range(width):
                    row, column = found[lane, register + word]
                    swizzled = (column // vec ^ row // per_phase % max_phase) * vec + column % vec
                    banks.append((row * row_words + swizzled) % 32)
            assert len(set(banks)) == 32


def call(d: int = 128, dv: int | None = None, group: int = 4, queries: int = 1, **options: Any) -> AttentionCall:
    dv, heads, tokens = dv or d, 8, 8192

    def storage(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages, slots = (tokens // 64, 64) if "block_table" in options else (1, tokens)
        shape = (pages, heads, slots, size // 16)
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.uint8)

    q = torch.empty(1, heads * group, queries, d, dtype=torch.bfloat16)
    g, lengths = torch.ones(()), torch.zeros(1, dtype=torch.int32)
    return AttentionCall(q, *storage(d), *storage(dv), g, g, lengths, return_lse=True, **options)


def without_what_is_skipped(loop: list[str]) -> list[str]:
    """The loop without what a branch skips forward, unless that starts copies: what happens between groups of tiles."""
    labels = {line.rstrip(":"): i for i, line in enumerate(loop) if line.startswith("LBB")}
    skipped: set[int] = set()
    for i, line in enumerate(loop):
        target = re.search(r"\bBRA (LBB\d+)", line)
        end = labels.get(target[1], i) if target else i
        if not any("LDGSTS" in x for x in loop[i:end]):
            skipped |= set(range(i + 1, end))
    return [line for i, line in enumerate(loop) if i not in skipped]


class Code:
    """Machine code of one kernel."""

    def __init__(self, kernel: offline.Compiled, sass: str) -> None:
        self.kernel, self.sass = kernel, sass
        lines = [line for line in sass.splitlines() if re.match(r"^\S+:\S+:|^LBB\d+:", line)]
        labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith("LBB")}
        loops = []
        for i, line in enumerate(lines):
            target = re.search(r"\bBRA (LBB\d+)", line)
            # Each kernel ends in a branch to itself.
            if target and labels.get(target[1], i) < i - 1:
                loops.append(lines[labels[target[1]] : i + 1])
        # The disassembly for Blackwell has no labels: all of the kernel stands for its loop then.
        self.has_loop = bool(loops)
        loop = max(loops, key=len, default=lines)
        self.loop = [x for x in loop if not x.startswith("LBB")]
        self.usual = [x for x in without_what_is_skipped(loop) if not x.startswith("LBB")]

    def in_loop(self, *mnemonics: str) -> int:
        return sum(bool(re.search(rf"\s(?:{'|'.join(mnemonics)})\b", line)) for line in self.loop)


def compiled(c: AttentionCall, capability: int) -> tuple[Code, Code]:
    """The decode and the merge kernel of `c`."""
    texts: list[str] = []
    read = offline._instructions

    def keep(sass: str) -> list[str]:
        texts.append(sass)
        return read(sass)

    assert decode.unsupported(c) is None
    this_gpu = mock.patch("torch.cuda.get_device_capability", lambda *_: divmod(capability, 10))
    no_guard = mock.patch("torch.cuda.device", mock.MagicMock())
    with offline.launches(capability) as kernels, mock.patch.object(offline, "_instructions", keep), this_gpu, no_guard:
        decode.run(c)
    first, second = (Code(kernel, text) for kernel, text in zip(kernels, texts))
    return first, second


ROW = torch.zeros(1, dtype=torch.int32)
SHAPES: dict[str, tuple[dict[str, Any], float, int]] = {
    "D 128": ({}, 2.85, 11),
    "D 64": ({"d": 64}, 3.45, 7),
    "D 256": ({"d": 256}, 2.6, 19),
    "group of 8": ({"group": 8}, 3.15, 20),
    "group of 16": ({"group": 16}, 3.35, 36),
    "paged": ({"block_table": torch.zeros(1, 128, dtype=torch.int32)}, 2.9, 11),
}
"""What is called, and the ceilings of instructions an element and of stores to shared memory in the main loop.

The branch between two groups, which stores the accumulators, counts for the stores alone. Raw words get to shared
memory by cp.async, not by stores; dequantised, they would take `elements / 8` more of these."""


@compiles
@pytest.mark.parametrize("capability", offline.SHARED_MEMORY, ids="sm_{}".format)
@pytest.mark.parametrize("name", SHAPES)
def test_machine_code(name: str, capability: int) -> None:
    if name not in ("D 128", "D 256") and capability not in (80, 90):
        pytest.skip("the same code but for scheduling")
    options, ceiling, stores = SHAPES[name]
    c = call(**options)
    kernel, merge = compiled(c, capability)
    d, columns = c.head_dim, c.group * c.q.shape[2]
    config = decode.configuration(columns, d, d, divmod(capability, 10))
    assert merge.kernel.spills == 0
    assert kernel.kernel.spills <= (2 if capability == 120 else 0)
    assert kernel.kernel.shared <= offline.SHARED_MEMORY[capability] // 4, "fewer than four programs fit an SM"
    elements = 2 * d * config.tokens / 32
    # Without e4m3 conversions scales take a few instructions more.
    assert len(kernel.usual) / elements <= ceiling * (1.12 if kernel.has_loop else 2)
    assert kernel.in_loop(r"HMMA\.16816\S*") >= elements / 8, "the loop holds the matrix products"
    if kernel.has_loop:
        assert kernel.in_loop("STS", r"STSM\S*") <= stores


@compiles
@pytest.mark.parametrize("capability", [80, 90, 120], ids="sm_{}".format)
@pytest.mark.parametrize("group", [4, 8], ids="group {}".format)
def test_kernels_are_launched_ahead_and_wait_before_they_read(group: int, capability: int) -> None:
    kernel, merge = (code.kernel for code in compiled(call(group=group), capability))
    if capability < 90:
        assert not any(k.ahead or k.count("PREEXIT", "ACQBULK") for k in (kernel, merge))
        return
    assert kernel.waits_first(triggers=True)
    # Lengths, which it reads before, are from before the kernel that it follows.
    assert merge.ahead and merge.count("ACQBULK") == 1
    before = merge.instructions[: merge.instructions.index("ACQBULK")]
    assert not [x for x in before if x.startswith(("LDGSTS", "STG"))]
    assert all("STRONG" in x for x in before if x.startswith("LDG")), "not from L1"


@compiles
@pytest.mark.parametrize("capability", [80, 90, 120], ids="sm_{}".format)
def test_every_option_compiles(capability: int) -> None:
    exact = {name: torch.empty(1, 8, 133, 128, dtype=torch.bfloat16) for name in ("k_exact", "v_exact")}
    rows = dict.fromkeys(("exact_from", "starts", "q_lengths"), ROW)
    c = call(
        queries=4,
        num_sink_tokens=4,
        k_bias=torch.empty(8, 128),
        k_factors=torch.empty(8, 128),
        k_order=torch.empty(8, 128, dtype=torch.int32),
        k_rotation=16,
        v_bias=torch.empty(8, 128),
        mask=torch.ones(1, 1, 1, 8192, dtype=torch.bool),
        sink_logits=torch.empty(32),
        window=4096,
        softcap=30.0,
        **exact,
        **rows,
    )
    kernel, merge = compiled(c, capability)
    assert merge.kernel.spills == 0
    assert kernel.kernel.spills <= 60


@compiles
def test_batches_share_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for another number of rows, over which the work is spread in another way."""
    names: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda fn, **_: names.append(fn.name))
    for rows in (5, 17, 150):
        names.clear()
        c = call(block_table=torch.zeros(rows, 128, dtype=torch.int32))
        compiled(replace(c, q=c.q.repeat(rows, 1, 1, 1), lengths=c.lengths.repeat(rows)), 90)
        assert names, "the merge of these is another"
        assert rows == 5 or not any("decode_kernel" in name for name in names)


@compiles
def test_the_default_recipe_leaves_the_main_loop_alone() -> None:
    exact = {name: torch.empty(1, 8, 133, 128, dtype=torch.bfloat16) for name in ("k_exact", "v_exact")}
    transform = {"k_bias": torch.empty(8, 128), "k_rotation": 128}
    kernel, _ = compiled(call(num_sink_tokens=4, exact_from=ROW, **exact, **transform), 90)
    plain, _ = compiled(call(), 90)
    assert kernel.kernel.spills == 0
    assert len(kernel.loop) <= len(plain.loop) * 1.02
    # Values that the loop does not change may wait in local memory.
    assert kernel.in_loop("LDL", "STL") <= 4


@compiles
@pytest.mark.parametrize(("options", "instructions"), [({}, 560), ({"d": 64}, 270), ({"group": 8}, 560)], ids=str)
def test_a_query_is_rotated_in_registers_before_the_main_loop(options: dict[str, Any], instructions: int) -> None:
    c = call(**options)
    (rotated, _), (plain, _) = (compiled(replace(c, k_rotation=r), 90) for r in (c.head_dim, 0))
    assert rotated.kernel.spills == 0
    assert rotated.kernel.shared == plain.kernel.shared
    assert len(rotated.loop) <= len(plain.loop) * 1.02
    assert len(rotated.kernel.instructions) - len(plain.kernel.instructions) <= instructions


@compiles
@pytest.mark.parametrize(
    ("options", "registers"), [({}, 128), ({"d": 64}, 128), ({"d": 256}, 168), ({"group": 8}, 128)]
)
def test_registers(options: dict[str, Any], registers: int) -> None:
    """At most 128 registers: 16 warps an SM; 168: 12 warps."""
    kernel, _ = compiled(call(**options), 90)
    assert kernel.kernel.registers <= registers


def ring_of(slots: int, c: AttentionCall) -> AttentionCall:
    names = ("k_data", "k_scales", "v_data", "v_scales")
    return replace(c, **{name: getattr(c, name)[:, :, :slots] for name in names})


def test_reasons() -> None:
    plain = call()
    assert decode.unsupported(plain) is None
    k_new = torch.empty(1, 8, 1, 128)
    for changed, word in (
        (replace(plain, k_format="fp8"), "nvfp4"),
        (replace(plain, k_new=k_new, v_new=k_new), "prefill"),
        (call(queries=17), "queries"),
        (call(group=64, queries=16), "columns"),
        (call(d=112), "head sizes"),
        (replace(plain, v_scale_layout="4token"), "linear"),
        (replace(plain, scale=-1.0), "positive"),
        (ring_of(80, call(d=64)), "64 tokens, or 128 or more"),
        (ring_of(16, call(d=128)), "32 tokens, or 64 or more"),
        (replace(plain, k_data=plain.k_data[:, :, ::2], k_scales=plain.k_scales[:, :, ::2]), "contiguous"),
    ):
        reason = decode.unsupported(changed)
        assert reason is not None
        assert word in reason
