"""Lowered ops on a GPU: the bytes of the CPU reference, and the launches that the code promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decode_step import append_step, rope
from test_lowering import FORMATS, awkward, cache
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import torch_fp4kv as fp4
from torch_fp4kv import lowering

pytestmark = pytest.mark.gpu

HEADS, DIM, PAGE, RING = 3, 64, 8, 20


def on_gpu(tree: Any) -> Any:
    return tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, tree)


def launches(function: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a call launches."""
    function()
    torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        function()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.profiler.DeviceType.CUDA]


def compare(function: Callable[..., Any], *arguments: Any) -> None:
    """Asserts that `function` compiled on the GPU gives and mutates what it gives and mutates eagerly on the CPU."""
    torch._dynamo.reset()
    left = sum(n for op in lowering.report().values() for outcome, n in op.items() if outcome != "lowered")
    on_device = on_gpu(arguments)
    got = torch.compile(function, fullgraph=True)(*on_device)
    expected = function(*arguments)
    for have, want in zip(tree_leaves((got, on_device)), tree_leaves((expected, arguments)), strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(have.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert left == sum(n for op in lowering.report().values() for outcome, n in op.items() if outcome != "lowered")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantize_bytes(dtype: torch.dtype) -> None:
    scale = 2.0 ** torch.randint(-12, 4, (50,)) * (1 + torch.rand(50))
    compare(lambda x, g: fp4.quantize(x, g), awkward(2, 50, 99, 128, dtype=dtype), scale)


def test_quantize_constant_scale_and_bias_bytes() -> None:
    def function(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return fp4.quantize(x, 0.017511107893000567, bias=bias)

    compare(function, awkward(2, HEADS, 50, DIM), torch.randn(HEADS, DIM))


@pytest.mark.parametrize("form", FORMATS)
def test_dequantize_values(form: str) -> None:
    data, scales, layout = FORMATS[form]()
    storage_format = "nvfp4" if form == "4token" else form

    def function(data: Tensor, scales: Tensor | None, scale: Tensor, bias: Tensor) -> Tensor:
        return fp4.dequantize(data, scales, scale, bias=bias, format=storage_format, scale_layout=layout)

    compare(function, data, scales, torch.tensor([0.1, 0.7, 3.0]), torch.randn(HEADS, DIM))


@pytest.mark.parametrize(
    "options",
    [
        {"ring": True},
        {"v_scale_layout": "4token", "k_bias": True, "v_bias": True},
        {"k_format": "fp8", "v_format": "block-fp4"},
    ],
    ids=lambda o: ",".join(o),
)
def test_append_bytes(options: dict[str, Any]) -> None:
    options = dict(options)
    dtype = torch.bfloat16
    exact = {}
    if options.pop("ring", False):
        exact = {name: torch.full((3, HEADS, RING, DIM), -1.0, dtype=dtype) for name in ("k_exact", "v_exact")}
        exact["exact_slots"] = torch.tensor([[4, 19, 0], [1, 2, 3]])
    exact |= {name: torch.randn(HEADS, DIM) for name in ("k_bias", "v_bias") if options.pop(name, False)}
    formats = options.get("k_format", "nvfp4"), options.get("v_format", "nvfp4")
    storage = tuple(t for storage_format in formats for t in cache(storage_format, dtype))
    k, v = awkward(2, HEADS, 3, DIM, dtype=dtype), awkward(2, HEADS, 3, DIM, dtype=dtype)

    def function(storage: Any, k: Tensor, v: Tensor, slots: Tensor, scale: Tensor, exact: Any) -> None:
        fp4.append(*storage, k, v, slots, scale, scale, **exact, **options)

    slots = torch.tensor([[0, 9, 31], [17, 16, 2]])
    compare(function, storage, k, v, slots, torch.tensor([0.1, 2.0**-8, 7.3]), exact)


def step(batch: int, new: int, tokens: int = 256) -> list[Tensor]:
    heads, dim = 8, 128
    storage = [torch.zeros(batch, heads, tokens, dim // 16, dtype=dtype) for dtype in (torch.int64, torch.uint8)] * 2
    slots = torch.arange(batch)[:, None] * tokens + torch.arange(new)
    projected = [torch.randn(batch, new, heads * dim, dtype=torch.bfloat16) for _ in range(2)]
    angles = torch.randn(batch, 1, new, dim, dtype=torch.bfloat16)
    scale = torch.full((heads,), 2.0**-8)
    return on_gpu([*[t.clone() for t in storage], *projected, angles.cos(), angles.sin(), slots, scale, scale])


@pytest.mark.parametrize(("batch", "backend"), [(16, "inductor"), (1, fp4.compile.backend)], ids=["16 rows", "1 row"])
def test_rope_and_append_of_a_decode_step_are_one_launch(batch: int, backend: Any) -> None:
    torch._dynamo.reset()
    arguments = step(batch, 1)
    compiled = torch.compile(append_step, fullgraph=True, backend=backend)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        names = launches(lambda: compiled(*arguments))
    assert len(names) == 1 and names[0].startswith("triton_per_fused"), names
    expected = step(batch, 1)
    expected[4:] = arguments[4:]
    heads = [x.view(batch, 1, 8, 128).transpose(1, 2) for x in expected[4:6]]
    fp4.append(*expected[:4], rope(heads[0], *expected[6:8]), heads[1], *expected[8:])
    for have, want in zip(arguments[:4], expected[:4]):
        assert torch.equal(have, want)


@pytest.mark.parametrize(("recipe", "count"), [("nvfp4", 5), ("nvfp4-max", 5), ("nvfp4-plain", 4)])
def test_launches_of_a_layer_after_that_of_its_positions(recipe: str, count: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    order = torch.stack([torch.randperm(128) for _ in range(8)])
    known = fp4.LayerCalibration(k_bias=torch.randn(8, 128), k_factors=torch.rand(8, 128) + 0.5, k_order=order)
    chosen = fp4.get_recipe(recipe, calibration=[known] if recipe == "nvfp4-max" else [])
    layer = fp4.NVFP4KVCache(2, 256, 8, 128, torch.bfloat16, device="cuda", recipe=chosen)

    def step(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        keys, values = layer.update(None, rope(k, cos, sin), v)
        return F.scaled_dot_product_attention(rope(q, cos, sin), keys, values, enable_gqa=True)

    def arguments(tokens: int) -> list[Tensor]:
        shapes = ((2, 32, tokens, 128), (2, 8, tokens, 128), (2, 8, tokens, 128), (tokens, 128), (tokens, 128))
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    # Casts as in eager, and then every bit. A K that is quantised before it is rounded to bfloat16 gets other codes
    # here and there: on random tensors up to 3 % of the output, where a head sees little but the new token.
    with torch.no_grad(), torch._inductor.config.patch(emulate_precision_casts=True):
        step(*arguments(120))
        new = arguments(1)
        expected = step(*new)
        layer.crop(1)
        compiled = torch.compile(step, fullgraph=True, backend=fp4.compile.backend)
        got = compiled(*new)
        names = launches(lambda: compiled(*new))
    print(*names, sep="\n")
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for kernel in ("decode_kernel", "merge_kernel"):
        assert sum(name.startswith(kernel) for name in names) == 1, names
    assert sum("append" in name for name in names) == 1, names
    assert len(names) == 1 + count, names


def test_slot_out_of_range_is_clamped_and_the_device_lives_on() -> None:
    torch._dynamo.reset()
    arguments = step(1, 1)
    arguments[8] = arguments[8] + 10**6
    torch.compile(append_step, fullgraph=True)(*arguments)
    torch.cuda.synchronize()
    assert arguments[0][:, :, -1].any() and not arguments[0][:, :, :-1].any()


def test_decode_under_cuda_graphs_writes_in_place() -> None:
    torch._dynamo.reset()
    arguments = step(2, 1)
    compiled = torch.compile(append_step, fullgraph=True, mode="reduce-overhead")
    for tensor in arguments[:4]:
        torch._dynamo.mark_static_address(tensor)
    for offset in range(5):
        arguments[8] = torch.tensor([[offset], [256 + offset]], device="cuda")
        compiled(*arguments)
    torch.cuda.synchronize()
    assert arguments[0][:, :, :5].any(-1).all() and not arguments[0][:, :, 5:].any()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
