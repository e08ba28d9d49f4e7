"""Lowered ops: the bytes of the eager op, in the code of their neighbours."""

from __future__ import annotations

import pytest
import torch
from calls import equalized
from compiled import compare, generated
from torch import Tensor

import torch_fp4kv as fp4
from torch_fp4kv import lowering

HEADS, DIM = 3, 64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def awkward(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks over twelve orders of magnitude, with zero blocks, NaN, infinities, ties and subnormals."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, (*shape[:-1], 1)).float())
    flat = x.view(-1, 16)
    flat[0] = 0.0
    flat[1, 3] = float("nan")
    flat[2, 5], flat[2, 6] = float("inf"), float("-inf")
    flat[3] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    flat[4] *= 2.0**-120
    flat[5] = float("nan")
    return x.to(dtype)


SCALES = {
    "number": lambda: torch.tensor(1 / 3),
    "per head": lambda: torch.tensor([0.1, 2.0**-8, 7.3]),
    "per row": lambda: torch.rand(2, HEADS, 5) + 0.01,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_quantize_bytes(dtype: torch.dtype, scale: str) -> None:
    x = awkward(2, HEADS, 5, DIM, dtype=dtype)
    compare(lambda x, g: fp4.quantize(x, g), x, SCALES[scale]())


@pytest.mark.parametrize("bias", [(DIM,), (HEADS, DIM)], ids=["D", "H D"])
def test_quantize_bias_bytes(bias: tuple[int, ...]) -> None:
    compare(lambda x, g, b: fp4.quantize(x, g, bias=b), awkward(2, HEADS, 5, DIM), torch.tensor(0.1), torch.randn(bias))


def test_quantize_bytes_with_a_constant_scale() -> None:
    """Folded in float64, 6 · this scale rounds to another float32 than step by step."""
    compare(lambda x: fp4.quantize(x, 0.017511107893000567), awkward(2, HEADS, 50, DIM))


def test_quantize_strided_input_bytes() -> None:
    x = awkward(2, 5, HEADS, 2 * DIM)[..., DIM // 2 : DIM // 2 + DIM].transpose(1, 2)
    compare(lambda x, g: fp4.quantize(x, g), x, torch.tensor(0.02))


@pytest.mark.parametrize("rule", ["4over6", "mse"])
def test_searched_scale_rules_have_the_error_of_the_reference(rule: str) -> None:
    x = torch.randn(64, DIM)
    scale = torch.tensor(0.01)

    def error(words: Tensor, scales: Tensor) -> Tensor:
        return (fp4.dequantize(words, scales, scale) - x).square().sum()

    eager = error(*fp4.quantize(x, scale, scale_rule=rule))
    lowered = error(*torch.compile(lambda x: fp4.quantize(x, scale, scale_rule=rule), fullgraph=True)(x))
    torch.testing.assert_close(lowered, eager, rtol=1e-5, atol=0.0)


def test_quantize_fuses_with_its_producer() -> None:
    code = generated(lambda x, g: fp4.quantize(torch.relu(x * 2 + 1), g), torch.randn(8, DIM), torch.tensor(0.1))
    assert "fp4kv" not in code.calls
    assert max(code.allocations) <= 8 * DIM // 16  # amax, one number a block


FORMATS = {
    "nvfp4": lambda: (*fp4.quantize(awkward(2, HEADS, 8, DIM), 0.05), "linear"),
    "4token": lambda: (*fp4.quantize(awkward(2, HEADS, 8, DIM), 0.05), "4token"),
    "block-fp4": lambda: (
        torch.randint(-(2**63), 2**63 - 1, (2, HEADS, 8, DIM // 16)),
        torch.randint(0, 255, (2, HEADS, 8, DIM // 16), dtype=torch.uint8),
        "linear",
    ),
    "fp8": lambda: (torch.randint(0, 256, (2, HEADS, 8, DIM), dtype=torch.uint8), None, "linear"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("form", FORMATS)
def test_dequantize_values(form: str, biased: bool, dtype: torch.dtype) -> None:
    data, scales, layout = FORMATS[form]()
    bias = torch.randn(HEADS, DIM) if biased else None
    storage_format = "nvfp4" if form == "4token" else form

    def function(data: Tensor, scales: Tensor | None, scale: Tensor, bias: Tensor | None) -> Tensor:
        return fp4.dequantize(data, scales, scale, bias=bias, dtype=dtype, format=storage_format, scale_layout=layout)

    compare(function, data, scales, torch.tensor([0.1, 0.7, 3.0]), bias)


def test_dequantize_fuses_with_its_consumer() -> None:
    words, scales = fp4.quantize(torch.randn(8, DIM), 0.01)
    code = generated(lambda w, s, q: torch.relu(fp4.dequantize(w, s, 0.01) * q + 1), words, scales, torch.randn(8, DIM))
    assert "fp4kv" not in code.calls
    assert code.num_kernels == 1


PAGES, PAGE, RING, NEW = 4, 8, 20, 3


def cache(storage_format: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Storage filled with 0xFF bytes, so that a write too many shows."""
    if storage_format == "fp8":
        return torch.full((PAGES, HEADS, PAGE, DIM), 0xFF, dtype=torch.uint8), None
    if storage_format == "exact":
        return torch.full((PAGES, HEADS, PAGE, DIM), -1.0, dtype=dtype), None
    shape = (PAGES, HEADS, PAGE, DIM // 16)
    return torch.full(shape, -1, dtype=torch.int64), torch.full(shape, 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k_bias": True, "v_bias": True},
        {"ring": True},
        {"v_scale_layout": "4token"},
        {"k_format": "fp8", "v_format": "nvfp4"},
        {"k_format": "block-fp4", "v_format": "exact", "k_bias": True, "v_bias": True},
        {"k_rotation": DIM, "k_bias": True, "scale_rule": "mse", "ring": True},
        {"k_rotation": 16, "k_format": "fp8"},
        {"equalized": True, "ring": True},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_append_bytes(options: dict[str, object], dtype: torch.dtype) -> None:
    options = dict(options)
    k_format, v_format = str(options.get("k_format", "nvfp4")), str(options.get("v_format", "nvfp4"))
    ring = options.pop("ring", False)
    for name in ("k_bias", "v_bias"):
        if name in options:
            options[name] = torch.randn(HEADS, DIM)
    k, v = awkward(2, HEADS, NEW, DIM, dtype=dtype), awkward(2, HEADS, NEW, DIM, dtype=dtype)
    if options.pop("equalized", False):
        options.update(equalized(HEADS, DIM))
    slots = torch.tensor([[0, 9, 31], [17, 16, 2]])
    exact = {}
    if ring:
        exact = {
            "k_exact": torch.full((3, HEADS, RING, DIM), -1.0, dtype=dtype),
            "v_exact": torch.full((3, HEADS, RING, DIM), -1.0, dtype=dtype),
            "exact_slots": torch.tensor([[4, 19, 0], [1, 2, 3]]),
        }
    storage = (*cache(k_format, dtype), *cache(v_format, dtype))
    scale = torch.tensor([0.1, 2.0**-8, 7.3])

    def function(storage: tuple[Tensor, ...], k: Tensor, v: Tensor, exact: dict[str, Tensor]) -> None:
        fp4.append(*storage, k, v, slots, scale, 0.25, **exact, **options)

    before = lowering.report()["append"].get("lowered", 0)
    compare(function, storage, k, v, exact)
    assert lowering.report()["append"]["lowered"] == before + 1


def test_append_allocates_nothing_and_copies_nothing() -> None:
    storage = (*cache("nvfp4", torch.float32), *cache("nvfp4", torch.float32))

    def function(storage: tuple[Tensor, ...], k: Tensor, v: Tensor, slots: Tensor) -> None:
        fp4.append(*storage, torch.relu(k), v * 2, slots, 0.1, 0.1)

    k = torch.randn(2, HEADS, NEW, DIM)
    code = generated(function, storage, k, k, torch.arange(6).view(2, 3))
    assert "fp4kv" not in code.calls
    assert max(code.allocations, default=0) < storage[0].numel()
    assert "copy_" not in code.text and "clone" not in code.text


def test_append_reads_what_it_has_written() -> None:
    """The attention of the same step sees the new token, whatever Inductor reorders."""
    words, scales = cache("nvfp4", torch.float32)
    assert scales is not None
    x = torch.randn(PAGES, HEADS, 1, DIM)
    slots = torch.arange(PAGES)[:, None] * PAGE

    def function(words: Tensor, scales: Tensor, x: Tensor) -> Tensor:
        before = words[:, :, 0].clone()
        fp4.append(words, scales, words.clone(), scales.clone(), x, x, slots, 0.01, 0.01)
        return torch.stack([before, words[:, :, 0]])

    compare(function, words, scales, x)


def test_append_of_what_it_overwrites() -> None:
    """Tokens moved within their cache, a scale and slots read from it: all as they were before."""

    def move(k: Tensor, v: Tensor, v_scales: Tensor, k_exact: Tensor, v_exact: Tensor, slots: Tensor) -> None:
        old_k = fp4.dequantize(k, None, 0.01, format="fp8")[:1, :, :4]
        old_v = fp4.dequantize(v, v_scales, 0.01)[:1, :, :4]
        v_global = v_scales[0, 0, 0, 1].float() * 0.001
        exact = {"k_exact": k_exact, "v_exact": v_exact, "exact_slots": slots, "k_format": "fp8"}
        fp4.append(k, None, v, v_scales, old_k, old_v, slots + k[0, 0, 0, 0].long() % 2, 0.01, v_global, **exact)
        fp4.append(k, None, v, v_scales, k_exact[:, :, :4] * 2, v_exact[:, :, :4] * 2, slots + 9, 0.01, 0.01, **exact)

    k, (v, v_scales) = torch.randint(1, 127, (PAGES, HEADS, PAGE, DIM), dtype=torch.uint8), cache("nvfp4", torch.float)
    k[0, 0, 0, 0] = 77
    assert v_scales is not None
    v_scales[0, 0, :2] = 60
    compare(move, k, v, v_scales, *torch.randn(2, 1, HEADS, 6, DIM), torch.tensor([[1, 2, 3, 4]]))


def test_append_out_of_range_raises_on_the_cpu() -> None:
    storage = (*cache("nvfp4", torch.float32), *cache("nvfp4", torch.float32))
    k = torch.randn(1, HEADS, 1, DIM)
    function = torch.compile(lambda storage, k, slots: fp4.append(*storage, k, k, slots, 0.1, 0.1), fullgraph=True)
    function(storage, k, torch.tensor([[PAGES * PAGE - 1]]))
    for slot in (PAGES * PAGE, -1):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            function(storage, k, torch.tensor([[slot]]))


@pytest.mark.parametrize("op", ["quantize", "append"])
def test_one_graph_serves_two_lengths(op: str) -> None:
    storage = (*cache("nvfp4", torch.float32), *cache("nvfp4", torch.float32))
    graphs, scale = [], torch.tensor(0.1)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs)

    def function(x: Tensor, slots: Tensor) -> Tensor:
        if op == "quantize":
            return fp4.quantize(x, scale)[0]
        fp4.append(*storage, x, x, slots, scale, scale)
        return storage[0] + 0

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for length in (5, 7):
        x = torch.randn(1, HEADS, length, DIM)
        slots = torch.arange(length)[None]
        eager = function(x, slots)
        torch.testing.assert_close(compiled(x, slots), eager, rtol=0, atol=0)
    assert len(graphs) == 1


def test_append_left_to_the_op_says_why() -> None:
    storage = (*cache("nvfp4", torch.float32), *cache("nvfp4", torch.float32))
    k = torch.randn(1, HEADS, 2, DIM)

    def function(storage: tuple[Tensor, ...], k: Tensor) -> None:
        fp4.append(*storage, k, k, torch.tensor([[3, 4]]), 0.1, 0.1, skip_negative=True)

    compare(function, storage, k)
    assert any("skip_negative" in outcome for outcome in lowering.report()["append"])


def test_opt_out_by_device_and_dtype() -> None:
    def compiled_calls(dtype: torch.dtype) -> str:
        return generated(lambda x: fp4.quantize(x, 0.1), torch.randn(2, DIM, dtype=dtype)).calls

    tag = torch.compiler.config.cache_key_tag
    lowering.opt_out("quantize", device="cpu", dtype=torch.float16)
    try:
        assert torch.compiler.config.cache_key_tag != tag
        assert "fp4kv.quantize" in compiled_calls(torch.float16)
        assert "fp4kv.quantize" not in compiled_calls(torch.float32)
        assert any("opted out (device cpu" in outcome for outcome in lowering.report()["quantize"])
    finally:
        lowering.opt_in("quantize", device="cpu", dtype=torch.float16)
    assert torch.compiler.config.cache_key_tag == tag
    assert "fp4kv.quantize" not in compiled_calls(torch.float16)


def test_opt_out_of_an_unknown_op_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown op 'attend'"):
        lowering.opt_out("attend")
