"""Decode on a GPU against the float64 oracle: options, shapes, how work is spread, capture, sizes past 2^31."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import calls
import oracle
import pytest
import torch
from decode_cases import CASES, HEAD_SIZES, call, check_hidden_by_the_lowest_number, compare
from torch import Tensor

from torch_fp4kv.ops.call import AttentionCall

pytestmark = pytest.mark.gpu


def on_gpu(c: AttentionCall, device: str = "cuda") -> AttentionCall:
    fields = {name: getattr(c, name) for name in AttentionCall.__slots__}
    return replace(c, **{name: x.to(device) for name, x in fields.items() if isinstance(x, Tensor)})


def check(c: AttentionCall) -> None:
    from torch_fp4kv.ops.kernels import decode

    assert decode.unsupported(on_gpu(c)) is None
    out, lse = decode.run(on_gpu(c))
    compare(c, out.cpu(), None if lse is None else lse.cpu())


@pytest.mark.parametrize("name", CASES)
def test_options(name: str) -> None:
    check(call(dtype=torch.bfloat16, **CASES[name]))


@pytest.mark.parametrize(("d", "dv"), HEAD_SIZES)
@pytest.mark.parametrize("heads", [2, 8, 32])
def test_head_sizes(d: int, dv: int, heads: int) -> None:
    check(call(head_dim=d, v_head_dim=dv, heads=heads, lengths=(200, 70), num_queries=2))
    check(call(head_dim=d, v_head_dim=dv, heads=heads, lengths=(200, 70), page_size=32, capacity=256, ring=20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e3, 1e30])
def test_queries_of_any_magnitude(dtype: torch.dtype, magnitude: float) -> None:
    if dtype == torch.float16:
        magnitude = min(max(magnitude, 1e-3), 1e3)
    c = call(lengths=(200, 70), ring=20)
    check(replace(c, q=(c.q * magnitude).to(dtype), scale=0.1 / magnitude))


def test_strided_queries() -> None:
    c = call(num_queries=3, heads=8)
    q = torch.randn(2, 3, 8, 256)[..., ::2].transpose(1, 2)
    check(replace(c, q=q))
    check(calls.strided(calls.with_everything(2, head_dim=128, out_dtype=torch.float32)))


@pytest.mark.parametrize("options", [{}, {"ring": 24, "num_sink_tokens": 4}], ids=["stored", "with exact"])
def test_masks(options: dict[str, Any]) -> None:
    c = call(num_queries=3, lengths=(200, 70), **options)
    torch.manual_seed(1)
    for shape in [(2, 4, 3, 200), (2, 1, 1, 200), (1, 4, 1, 150), (1, 1, 3, 256)]:
        visible = torch.rand(shape) < 0.7
        check(replace(c, mask=visible))
        check(replace(c, mask=torch.randn(shape).masked_fill(~visible, -torch.inf), causal=False))
        check(replace(c, mask=torch.randn(shape, dtype=torch.bfloat16)))
    check(replace(c, mask=torch.zeros(2, 1, 1, 200, dtype=torch.bool)))


@pytest.mark.parametrize("name", ["decode", "fallback"])
def test_keys_all_hidden_by_the_lowest_number(name: str) -> None:
    kernel = pytest.importorskip(f"torch_fp4kv.ops.kernels.{name}", exc_type=ImportError)

    def run(c: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = kernel.run(on_gpu(c))
        return out.cpu(), lse.cpu()

    check_hidden_by_the_lowest_number(call(num_queries=3, ring=20), run)


@pytest.mark.parametrize("options", [{}, {"ring": 24, "num_sink_tokens": 4}], ids=["stored", "with exact"])
def test_sink_logits_and_shifted_keys(options: dict[str, Any]) -> None:
    c = call(lengths=(200, 0, 70), num_queries=2, **options)
    torch.manual_seed(1)
    check(replace(c, sink_logits=torch.randn(4) * 3))
    check(replace(c, **calls.equalized(2, 128)))
    k_global = torch.tensor([0.01, 0.05])
    check(replace(c, k_global=k_global, v_global=k_global.flip(0)))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets up to how many programs each tile or group has its own."""
    from torch_fp4kv.ops.kernels import decode

    found = decode.configuration

    def limit(programs: int) -> None:
        def limited(*args: int) -> Any:
            return replace(found(*args), programs=programs)

        monkeypatch.setattr(decode, "configuration", limited)
        decode.plan.cache_clear()

    yield limit
    decode.plan.cache_clear()


@pytest.mark.parametrize("heads", [8, 16])
def test_results_do_not_depend_on_how_work_is_spread(programs: Any, heads: int) -> None:
    from torch_fp4kv.ops.kernels import decode

    c = on_gpu(call(lengths=(20000, 8192, 700, 9000), starts=(0, 5, 64, 4100), heads=heads, num_queries=2))
    programs(1 << 20)
    out, lse = decode.run(c)
    # Enough for the groups of the longest row, for pairs of them, for sets.
    for per_row in (100, 48, 0):
        programs(4 * heads * per_row)
        found = decode.run(c)
        assert torch.equal(out, found[0])
        assert torch.equal(lse, found[1])
    expected = oracle.attend(c)[0]
    assert float((out - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("options", [{}, {"page_size": 16}, {"ring": 100, "num_sink_tokens": 4}], ids=str)
def test_rows_equal_their_own_runs(options: dict[str, Any]) -> None:
    """Batch, capacity and page size leave each bit of a row's result as it is."""
    from torch_fp4kv.ops.kernels import decode

    lengths = (5000, 1, 700, 64)
    options = {"lengths": lengths, "heads": 8, "num_queries": 2, "capacity": 5120, **options}
    c = on_gpu(call(**options))
    out, lse = decode.run(c)
    for b in range(len(lengths)):
        rows = {"q", "lengths", "exact_from", "k_exact", "v_exact"}
        if c.block_table is None:
            rows |= {"k_data", "k_scales", "v_data", "v_scales"}
        else:
            rows |= {"block_table"}
        fields = {name: getattr(c, name) for name in rows}
        alone = replace(c, **{name: x[b : b + 1] for name, x in fields.items() if x is not None})
        found = decode.run(alone)
        assert torch.equal(out[b : b + 1], found[0])
        assert torch.equal(lse[b : b + 1], found[1])


@pytest.mark.parametrize("heads", [2, 16], ids="{} heads".format)
@pytest.mark.parametrize("name", ["decode", "fallback"])
def test_batches_of_head_size_256(name: str, heads: int) -> None:
    """Each number of rows, in the choices that follow from it, gives a row the bits that 256 give it."""
    kernel = pytest.importorskip(f"torch_fp4kv.ops.kernels.{name}", exc_type=ImportError)
    lengths = [1 + 37 * b % 600 for b in range(256)]
    c = call(head_dim=256, heads=heads, lengths=lengths, capacity=640, dtype=torch.bfloat16)
    out, lse = kernel.run(on_gpu(c))
    compare(c, out.cpu(), lse.cpu())
    for batch in (1, 2, 7, 16, 33, 66, 132, 133):
        names = ("q", "k_data", "k_scales", "v_data", "v_scales", "lengths")
        found = kernel.run(on_gpu(replace(c, **{name: getattr(c, name)[:batch] for name in names})))
        assert torch.equal(out[:batch], found[0])
        assert torch.equal(lse[:batch], found[1])


@pytest.mark.parametrize("tokens", [8192, 65536])
@pytest.mark.parametrize("num_queries", [1, 8, 16])
@pytest.mark.parametrize("name", ["decode", "fallback"])
def test_few_queries_over_a_long_context(name: str, num_queries: int, tokens: int) -> None:
    kernel = pytest.importorskip(f"torch_fp4kv.ops.kernels.{name}", exc_type=ImportError)
    c = on_gpu(call(lengths=(tokens,), num_queries=num_queries, dtype=torch.bfloat16))
    compare(c, *kernel.run(c))


@pytest.mark.parametrize("share", [False, True], ids=["all the weight", "half of it"])
@pytest.mark.parametrize(("name", "num_queries"), [("decode", 1), ("fallback", 1), ("fallback", 160), ("prefill", 40)])
def test_needle_in_a_long_context_is_found(name: str, num_queries: int, share: bool) -> None:
    kernel = pytest.importorskip(f"torch_fp4kv.ops.kernels.{name}", exc_type=ImportError)
    c, expected = calls.needle(share, num_queries, torch.bfloat16)
    assert kernel.unsupported(on_gpu(c)) is None
    out, _ = kernel.run(on_gpu(c))
    assert float((out - expected).abs().max()) < 1e-2


def test_pages_and_capacity_do_not_matter() -> None:
    from torch_fp4kv.ops.kernels import decode

    options: dict[str, Any] = {"lengths": (3000, 700), "heads": 8}
    expected = decode.run(on_gpu(call(**options, capacity=3008)))
    for change in ({"capacity": 65536}, {"capacity": 4096, "page_size": 16}, {"capacity": 8192, "page_size": 1024}):
        found = decode.run(on_gpu(call(**options, **change)))
        assert torch.equal(expected[0], found[0])
        assert torch.equal(expected[1], found[1])


def test_a_captured_graph_is_right_at_other_lengths() -> None:
    from torch_fp4kv.ops.kernels import decode

    c = on_gpu(call(lengths=(9000, 9000), heads=8, ring=100, num_sink_tokens=4))
    assert c.exact_from is not None
    decode.run(c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode.run(c)
    for lengths in ((9000, 8999), (8990, 8950)):
        c.lengths.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = oracle.attend(c)
        assert float((out - expected).norm() / expected.norm()) < 1e-3
        assert float((lse - expected_lse).abs().max()) < 1e-3


def test_more_than_2_31_elements() -> None:
    """Rows, pages and queries beyond 2^31 elements from the first."""
    from torch_fp4kv.ops.kernels import decode

    heads, tokens, batch = 8, 1 << 18, 10
    words = torch.zeros(batch, heads, tokens, 8, dtype=torch.int64, device="cuda")
    scales = torch.full((batch, heads, tokens, 8), 0x38, dtype=torch.uint8, device="cuda")
    assert words.numel() * 16 > 2**31
    torch.manual_seed(0)
    some = torch.randint(-(2**63), 2**63 - 1, (heads, 300, 8), device="cuda")
    q = torch.randn(batch, 32, 1, 128, device="cuda")
    g, lengths = torch.ones((), device="cuda"), torch.full((batch,), 300, dtype=torch.int32, device="cuda")
    for b in (0, batch - 1):
        words[b, :, :300] = some
    q[-1] = q[0]
    c = AttentionCall(q, words, scales, words, scales, g, g, lengths, scale=0.02)
    out, _ = decode.run(c)
    assert torch.equal(out[0], out[-1])
    paged = replace(
        c,
        q=q[-1:],
        lengths=lengths[:1],
        block_table=torch.tensor([[batch - 1]], dtype=torch.int32, device="cuda"),
    )
    assert torch.equal(out[:1], decode.run(paged)[0])
    last = replace(c, q=q[-1:], lengths=lengths[:1] * 0 + tokens, starts=lengths[:1] * 0 + tokens - 300)
    words[0, :, -300:] = some
    last = replace(last, k_data=words[:1], v_data=words[:1], k_scales=scales[:1], v_scales=scales[:1])
    found = decode.run(last)[0]
    assert float((found - out[:1]).norm() / out[:1].norm()) < 1e-3


@pytest.mark.parametrize("name", ["decode", "fallback"])
def test_exact_copies_past_2_31_elements(name: str) -> None:
    kernel = pytest.importorskip(f"torch_fp4kv.ops.kernels.{name}", exc_type=ImportError)
    c = call(lengths=(20,), ring=4, heads=2, kv_heads=1, dtype=torch.bfloat16)

    def far_apart(x: Tensor) -> Tensor:
        return calls.far_apart(x, lambda size: torch.empty(size, dtype=x.dtype, device="cuda"))

    k_exact, v_exact = (far_apart(x) for x in (c.k_exact, c.v_exact) if x is not None)
    out, lse = kernel.run(replace(on_gpu(c), k_exact=k_exact, v_exact=v_exact))
    compare(c, out.cpu(), lse.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["decode", "fallback"])
def test_tensors_on_another_device_than_the_current_one(name: str) -> None:
    kernel = pytest.importorskip(f"torch_fp4kv.ops.kernels.{name}", exc_type=ImportError)
    assert torch.cuda.current_device() == 0
    c = call(lengths=(200, 70), **calls.equalized(2, 128))
    out, lse = kernel.run(on_gpu(c, "cuda:1"))
    compare(c, out.cpu(), lse.cpu())
