"""Decode attention: error against float64 first, then time beside its peers in one run.

    python benchmarks/attention.py [results.csv] [case …]

Every time is one replay of a CUDA graph that holds the whole op, merges included, with the L2 cache flushed before it;
the row "nothing" is a graph of one empty kernel, which every such time contains. `in_graph_ms` is what the op adds to a
graph of several, as the graph of a model's decode step is; ratios are given for both. Bytes are those of K and V, read
once (at 4.5 bits an element for NVFP4). The best configuration of each Triton peer stands for it, and ours is compared
with the best of all BF16 and of all FP8 peers. `case` is part of a name, such as "exact window" or "D 64"; without one
all run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import peers
import torch
from timing import Table, copy_bandwidth, in_graph, quantiles
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from torch_fp4kv.bench.attention import cuda_graph_of, relative_error
from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.format import blocks
from torch_fp4kv.ops.kernels import decode

KV_HEADS = 8
Times = tuple[float, float, float]


@dataclass(frozen=True)
class Case:
    """One shape; `exact` recent tokens and 4 sinks have exact copies."""

    batch: int
    tokens: int
    group: int = 4
    d: int = 128
    exact: int = 0

    @property
    def name(self) -> str:
        extra = f", group {self.group}" * (self.group != 4) + f", D {self.d}" * (self.d != 128)
        return f"B {self.batch} × {self.tokens}{extra}" + ", exact window" * (self.exact > 0)


CASES = [
    Case(64, 8192),
    Case(16, 16384),
    Case(1, 131072),
    Case(1, 16384),
    *[Case(16, 16384, d=d) for d in (64, 256)],
    *[Case(16, 16384, group=group) for group in (1, 8, 16)],
    *[Case(batch, tokens, exact=128) for batch, tokens in ((64, 8192), (16, 16384), (1, 131072), (1, 8192))],
    *[
        Case(batch, tokens)
        for batch in (1, 4, 16, 64)
        for tokens in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
        if 8192 <= batch * tokens <= 1 << 20
    ],
]


def replayed(call: Callable[[], object]) -> Times:
    """`(p50, p20, p80)` in ms of one replay of `call`."""
    return quantiles(cuda_graph_of(call).replay, rep=30, warmup=8)


def inputs(case: Case) -> tuple[AttentionCall, Tensor, Tensor]:
    """The call, and its keys and values in BF16 `[B, H, tokens, D]`, as FP4 holds them."""
    torch.manual_seed(0)
    stored, plain = [], []
    g = torch.tensor(2.0**-6, device="cuda")
    shape = (case.batch, KV_HEADS, case.tokens, case.d // 16)
    for _ in range(2):
        words = torch.empty(shape, dtype=torch.int64, device="cuda")
        scales = torch.empty(shape, dtype=torch.uint8, device="cuda")
        values = torch.empty(*shape[:3], case.d, dtype=torch.bfloat16, device="cuda")
        for b in range(case.batch):
            x = torch.randn(*shape[1:3], case.d, device="cuda")
            words[b], scales[b] = blocks.encode(x, g)
            values[b] = blocks.decode(words[b], scales[b], g)
        stored += [words, scales]
        plain.append(values)
    q = torch.randn(case.batch, KV_HEADS * case.group, 1, case.d, device="cuda").bfloat16()
    lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device="cuda")
    call = AttentionCall(q, *stored, g, g, lengths)
    if case.exact:
        p = torch.arange(case.tokens - case.exact, case.tokens, device="cuda")
        slots = [torch.arange(4, device="cuda"), 4 + p % case.exact]
        source = [torch.arange(4, device="cuda"), p]
        exact = [
            torch.zeros(case.batch, KV_HEADS, 4 + case.exact + 1, case.d, device="cuda").bfloat16() for _ in range(2)
        ]
        for copies, values in zip(exact, plain):
            copies[:, :, torch.cat(slots)] = values[:, :, torch.cat(source)]
        call = replace(call, k_exact=exact[0], v_exact=exact[1], exact_from=lengths - case.exact, num_sink_tokens=4)
    return call, *plain


def error(call: AttentionCall, k: Tensor, v: Tensor) -> float:
    """Relative error of the first and the last row, float32 output, against float64."""
    out, _ = decode.run(replace(call, out_dtype=torch.float32))
    return relative_error(out, call.q, k, v)


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, fold: bool) -> Callable[[], Tensor]:
    """SDPA with the heads of a group as queries (`fold`), or as a group."""

    def call() -> Tensor:
        with sdpa_kernel(backend):
            if fold:
                queries = q.view(q.shape[0], KV_HEADS, -1, q.shape[-1])
                return torch.nn.functional.scaled_dot_product_attention(queries, k, v)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def bf16_peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, list[Callable[[], Tensor]]]:
    found = {
        "SDPA flash BF16": [sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, fold=True)],
        "SDPA cuDNN BF16": [sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, fold=False)],
        "Triton BF16": list(peers.calls(q, k, v)),
    }
    if importlib.util.find_spec("flash_attn_interface"):
        import flash_attn_interface

        turned = [x.transpose(1, 2) for x in (q, k, v)]
        found["FlashAttention-3 BF16"] = [lambda: flash_attn_interface.flash_attn_func(*turned)]
    return found


def best(calls: list[Callable[[], Tensor]]) -> tuple[Times, float] | None:
    """Times of the fastest, and what it adds to a graph; None if none runs here."""
    found = []
    for call in calls:
        try:
            found.append((replayed(call), call))
        except (RuntimeError, OutOfResources) as problem:
            print("left out:", str(problem).splitlines()[0])
    if not found:
        return None
    times, call = min(found, key=lambda pair: pair[0])
    return times, in_graph(call)


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    wanted = sys.argv[2:] or [""]
    table = Table("attention")
    bandwidth = copy_bandwidth()
    nothing = torch.zeros(1, device="cuda")
    table.add("nothing", "one small kernel", replayed(lambda: nothing.add_(1)), copy_bytes_per_s=bandwidth)
    for case in dict.fromkeys(case for case in CASES if any(text in case.name for text in wanted)):
        call, k, v = inputs(case)
        reason = decode.unsupported(call)
        assert reason is None, reason
        ours_error = error(call, k, v)
        assert ours_error <= 1e-3, (case, ours_error)
        elements = k.numel() + v.numel()
        ours = replayed(lambda call=call: decode.run(call))
        ours_in_graph = in_graph(lambda call=call: decode.run(call))
        fastest: dict[str, tuple[float, float]] = {}
        kinds = (("BF16", 2.0, bf16_peers(call.q, k, v)), ("FP8", 1.0, None))
        for kind, size, found in kinds:
            if found is None:
                narrow = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
                found = {"Triton FP8": list(peers.calls(call.q, *narrow))}
            for name, calls in found.items():
                measured = best(calls)
                if measured is None:
                    continue
                times, added = measured
                least = fastest.get(kind, (times[0], added))
                fastest[kind] = min(least[0], times[0]), min(least[1], added)
                moved = elements * size
                share = moved / times[0] * 1e3 / bandwidth
                table.add(case.name, name, times, in_graph_ms=added, bytes=moved, of_copy=share)
        moved = elements * 9 / 16
        table.add(
            case.name,
            "NVFP4",
            ours,
            in_graph_ms=ours_in_graph,
            bytes=moved,
            of_copy=moved / ours[0] * 1e3 / bandwidth,
            error=ours_error,
            over_bf16=fastest["BF16"][0] / ours[0],
            over_fp8=fastest["FP8"][0] / ours[0],
            in_graph_over_bf16=fastest["BF16"][1] / ours_in_graph,
            in_graph_over_fp8=fastest["FP8"][1] / ours_in_graph,
        )
        table.write(results)


if __name__ == "__main__":
    main()
