"""FlashInfer's kernels that run on this GPU beside ours, over one cache in pages of 64 tokens, in one run.

    python benchmarks/flashinfer_peers.py [results.csv]

`error` is the distance from ours (2-norm, relative); `codes_differ` and `scales_differ` are shares of what two append
kernels wrote, `values_differ` of what two dequantisers gave. Every time is a replay of a CUDA graph, `in_graph_ms` what
a call adds to one. FlashInfer's FA2 plans on the host beforehand, which is in neither: rows "with its plan" are what a
call costs that has to. BF16 and FP8 peers read the values that FP4 holds. Decode's global scales are 1, which spares
FlashInfer a kernel for V's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import flashinfer
import torch
from attention import replayed
from prefill import history_and_chunk
from timing import Table, captured, in_graph, quantiles
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops import backends
from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.flashinfer import support

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
E4M3 = torch.float8_e4m3fn


def random_call(batch: int, length: int) -> AttentionCall:
    """One new token a row over `length` stored ones."""
    one = torch.ones((), device="cuda")
    stored = []
    for _ in range(2):
        stored += torch_fp4kv.quantize(torch.randn(batch, KV_HEADS, length, HEAD_DIM, device="cuda").bfloat16(), one)
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, device="cuda").bfloat16()
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return AttentionCall(q, *stored, one, one, lengths)


def paged(call: AttentionCall) -> AttentionCall:
    """`call` over the same storage in pages."""
    parts = {}
    for name in ("k_data", "k_scales", "v_data", "v_scales"):
        pages = getattr(call, name).unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
        parts[name] = pages.contiguous()
    table = torch.arange(parts["k_data"].shape[0], dtype=torch.int32, device="cuda").view(call.q.shape[0], -1)
    return replace(call, **parts, block_table=table)


def planned(call: AttentionCall, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None) -> Callable[[], Tensor]:
    """FlashInfer's FA2 over pages k and v `[P, H, T, ·]`; its decode wrapper for one new token, else its prefill."""
    batch, heads, queries, d = call.q.shape
    lengths = call.lengths.cpu()
    pages = torch.arange(batch + 1, dtype=torch.int32) * call.block_table.shape[1]
    plan = (pages, call.block_table.flatten(), (lengths - 1) % PAGE + 1, heads, call.num_kv_heads, d, PAGE)
    dtypes = {"q_data_type": call.q.dtype, "kv_data_type": k.dtype}
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    if queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")
        wrapper.plan(*plan, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        starts = torch.arange(batch + 1, dtype=torch.int32) * queries
        wrapper.plan(starts, *plan, causal=True, **dtypes)
    query = call.q.transpose(1, 2).flatten(0, 1).contiguous()
    out = torch.empty_like(query)
    factors = {"k_scale": float(call.k_global), "v_scale": float(call.v_global)} if scales else {}
    return lambda: wrapper.run(query, (k, v), out=out, kv_cache_sf=scales, **factors)


def distance(out: Tensor, want: Tensor) -> float:
    return float((out.float() - want.float()).norm() / want.float().norm())


def serve(name: str, call: AttentionCall) -> Callable[[], Tensor]:
    return lambda: backends.attention_module(name).run(call)[0]


def attention(table: Table, case: str, call: AttentionCall, ours: str, with_plan: str) -> None:
    """Rows of `ours`, FA2 over the same tokens in three formats, and the backend `with_plan` as it is called."""
    want = serve(ours, replace(call, k_new=None, v_new=None))()
    rows = want.transpose(1, 2).flatten(0, 1)
    base, base_in_graph = replayed(serve(ours, call)), in_graph(serve(ours, call))
    table.add(case, ours, base, in_graph_ms=base_in_graph)
    packed = [torch_fp4kv.to_packed(x) for x in (call.k_data, call.v_data)]
    scales = call.k_scales.view(E4M3), call.v_scales.view(E4M3)
    values = [
        torch_fp4kv.dequantize(data, bits, scale, dtype=torch.bfloat16)
        for data, bits, scale in (
            (call.k_data, call.k_scales, call.k_global),
            (call.v_data, call.v_scales, call.v_global),
        )
    ]
    for name, (k, v), sf in (
        ("NVFP4", packed, scales),
        ("BF16", values, None),
        ("FP8", [x.to(E4M3) for x in values], None),
    ):
        run = planned(call, k, v, sf)
        error = distance(run(), rows)
        assert error < 2.0**-6 or name == "FP8", (case, name, error)
        times, added = replayed(run), in_graph(run)
        ratios = {"speed_of_ours": times[0] / base[0], "in_graph_speed_of_ours": added / base_in_graph}
        table.add(case, f"FlashInfer FA2 {name}", times, in_graph_ms=added, error=error, **ratios)
    reason = support.attention_missing(with_plan, call.q.device) or support.attention_unsupported(with_plan, call)
    assert reason is None, reason
    error = distance(serve(with_plan, call)(), serve(ours, call)())
    assert error < 2 * support.KERNELS[with_plan].error, error
    launched = quantiles(serve(ours, call))
    table.add(case, f"{ours}, launched", launched)
    times = quantiles(serve(with_plan, call))
    table.add(case, f"{with_plan}, with its plan", times, error=error, speed_of_ours=times[0] / launched[0])


def append(table: Table, batch: int, tokens: int) -> None:
    """Rows of our append and FlashInfer's two, and how often what they wrote differs from ours."""
    k, v = (torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    a_row = -(-tokens // PAGE)
    pages = torch.randperm(batch * a_row, device="cuda").view(batch, a_row)
    position = torch.arange(tokens, device="cuda").expand(batch, -1)
    slots = pages.gather(1, position // PAGE) * PAGE + position % PAGE
    g = torch.tensor(0.01, device="cuda")
    rows = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
    row = torch.arange(batch, dtype=torch.int32, device="cuda").repeat_interleave(tokens)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * a_row
    last = torch.full((batch,), (tokens - 1) % PAGE + 1, dtype=torch.int32, device="cuda")
    paging = [row, position.flatten().to(torch.int32), pages.flatten().to(torch.int32), indptr, last]
    stored: dict[str, list[Tensor]] = {}

    def ours() -> None:
        torch_fp4kv.append(*stored["ours"], k, v, slots, g, g, backend="triton")

    def by_slot() -> None:
        data, bits = views(stored["FlashInfer, by slot"])
        flashinfer.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *rows, slots.flatten(), data, bits, g.view(1), g.view(1), kv_layout="HND"
        )

    def by_page() -> None:
        data, bits = views(stored["FlashInfer, by page"])
        row, position, indices, indptr, last = paging
        flashinfer.page.nvfp4_quantize_append_paged_kv_cache(
            *rows, row, position, data, bits, indices, indptr, last, 0.01, 0.01, kv_layout="HND"
        )

    for name, call in (("ours", ours), ("FlashInfer, by slot", by_slot), ("FlashInfer, by page", by_page)):
        stored[name] = [
            torch.zeros(batch * a_row, KV_HEADS, PAGE, HEAD_DIM // 16, dtype=t, device="cuda")
            for t in (torch.int64, torch.uint8) * 2
        ]
        call()
        values = {}
        if name != "ours":
            # A zero code keeps its sign in theirs.
            differ = [
                torch_fp4kv.to_packed(a) ^ torch_fp4kv.to_packed(b)
                for a, b in zip(stored[name][::2], stored["ours"][::2])
            ]
            halves = torch.stack([x & nibble for x in differ for nibble in (0x07, 0x70)])
            bits = torch.stack([a != b for a, b in zip(stored[name][1::2], stored["ours"][1::2])])
            written = batch * tokens / (batch * a_row * PAGE)
            values = {
                "codes_differ": float((halves > 0).float().mean()) / written,
                "scales_differ": float(bits.float().mean()) / written,
            }
        table.add(f"append B {batch} × {tokens}", name, captured(call), **values)


def views(storage: list[Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What FlashInfer takes for `[k_data, k_scales, v_data, v_scales]`."""
    data = torch_fp4kv.to_packed(storage[0]), torch_fp4kv.to_packed(storage[2])
    return data, (storage[1].view(E4M3), storage[3].view(E4M3))


def dequantize(table: Table, tokens: int) -> None:
    """Rows of our dequantise and FlashInfer's, and how often their values differ."""
    x = torch.randn(tokens * KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    g = torch.tensor([0.01], device="cuda")
    words, bits = torch_fp4kv.quantize(x, g[0])
    packed = torch_fp4kv.to_packed(words)
    case = f"dequantise {tokens} × {KV_HEADS}"

    def ours() -> Tensor:
        return torch_fp4kv.dequantize(words, bits, g[0], dtype=torch.bfloat16)

    def theirs() -> Tensor:
        return flashinfer.nvfp4_kv_dequantize(packed, bits, g, torch.bfloat16)

    table.add(case, "ours", captured(ours, 20))
    differ = float((ours() != theirs()).float().mean())
    table.add(case, "FlashInfer", captured(theirs, 20), values_differ=differ, error=distance(theirs(), ours()))


def main() -> None:
    torch.manual_seed(0)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    table = Table("flashinfer")
    for batch, tokens in ((64, 1), (1, 1), (1, 4096), (1, 32768)):
        append(table, batch, tokens)
    dequantize(table, 32768)
    for batch, length in ((64, 8192), (16, 16384), (1, 131072), (1, 8192)):
        call = paged(random_call(batch, length))
        attention(table, f"decode B {batch} × {length}", call, "triton-gluon", "flashinfer-fa2")
        table.write(path)
    for history, chunk in ((8192, 2048), (32768, 2048), (32768, 512)):
        prefill, _, _ = history_and_chunk(HEAD_DIM, history, chunk, exact=False)
        new = (
            torch_fp4kv.quantize(prefill.k_new, prefill.k_global),
            torch_fp4kv.quantize(prefill.v_new, prefill.v_global),
        )
        for (words, bits), (data, scales) in zip(
            new, ((prefill.k_data, prefill.k_scales), (prefill.v_data, prefill.v_scales))
        ):
            data[:, :, history:], scales[:, :, history:] = words, bits
        call = paged(prefill)
        attention(table, f"prefill {chunk} over {history}", call, "triton-prefill", "flashinfer-dequantize")
        table.write(path)


if __name__ == "__main__":
    main()
