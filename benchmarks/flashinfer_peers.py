"""FlashInfer's NVFP4 kernels that run on this GPU beside ours: error against ours first, then time in one run.

    python benchmarks/flashinfer_peers.py [results.csv]

FA2 plans on the host at each call, and that is timed with it: it is what a call costs. Prefills that dequantise first
include that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from prefill import history_and_chunk
from timing import Table, quantiles
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops import backends
from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.flashinfer import support

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64


def paged(batch: int, length: int, call: AttentionCall | None = None) -> AttentionCall:
    """A bf16 decode call over `length` tokens a row, or `call` (batch 1), in pages of 64."""
    if call is None:
        g = torch.tensor(0.01, device="cuda")
        stored = []
        for _ in range(2):
            stored += torch_fp4kv.quantize(torch.randn(batch, KV_HEADS, length, HEAD_DIM, device="cuda").bfloat16(), g)
        q = torch.randn(batch, HEADS, 1, HEAD_DIM, device="cuda").bfloat16()
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        call = AttentionCall(q, *stored, g, g, lengths)
    parts = {}
    for name in ("k_data", "k_scales", "v_data", "v_scales"):
        x = getattr(call, name)
        pages = x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
        parts[name] = pages.contiguous()
    table = torch.arange(parts["k_data"].shape[0], dtype=torch.int32, device="cuda").view(batch, -1)
    fields = {name: getattr(call, name) for name in AttentionCall.__slots__}
    return AttentionCall(**{**fields, **parts, "block_table": table})


def serve(name: str, call: AttentionCall) -> Callable[[], Tensor]:
    return lambda: backends.attention_module(name).run(call)[0]


def compare(table: Table, case: str, call: AttentionCall, theirs: str, ours: str) -> None:
    """Adds a row each for backends `theirs` and `ours`; a line instead where `theirs` does not serve the call."""
    reason = support.attention_missing(theirs, call.q.device) or support.attention_unsupported(theirs, call)
    if reason is not None:
        print(f"{case}: not {theirs}: {reason}")
        return
    have, want = serve(theirs, call)(), serve(ours, call)()
    error = float((have.float() - want.float()).norm() / want.float().norm())
    assert error < 2 * support.KERNELS[theirs].error, error
    base = quantiles(serve(ours, call))
    table.add(case, ours, base)
    times = quantiles(serve(theirs, call))
    table.add(case, theirs, times, error=error, speed_of_ours=base[0] / times[0])


def main() -> None:
    table = Table("flashinfer")
    for batch, length in ((1, 8192), (1, 131072), (16, 16384), (64, 8192)):
        for name in ("flashinfer-fa2", "flashinfer-xqa"):
            compare(table, f"decode B {batch} × {length}", paged(batch, length), name, "triton-gluon")
    for history, chunk in ((8192, 2048), (32768, 2048), (32768, 512)):
        prefill, _, _ = history_and_chunk(HEAD_DIM, history, chunk, exact=False)
        call = paged(1, history + chunk, prefill)
        compare(table, f"prefill {chunk} over {history}", call, "flashinfer-dequantize", "triton-prefill")
    for batch, tokens in ((64, 1), (1, 4096)):
        k, v = (torch.randn(batch, tokens, KV_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
        pages = batch * -(-tokens // PAGE)
        storage = [
            torch.zeros(pages, KV_HEADS, PAGE, HEAD_DIM // 16, dtype=t, device="cuda")
            for t in (torch.int64, torch.uint8) * 2
        ]
        slots = torch.randperm(pages * PAGE, device="cuda")[: batch * tokens].view(batch, tokens)
        g = torch.tensor(0.01, device="cuda")
        for backend in ("triton", "flashinfer"):

            def append(backend: str = backend) -> None:
                torch_fp4kv.append(*storage, k.transpose(1, 2), v.transpose(1, 2), slots, g, g, backend=backend)  # noqa: B023

            table.add(f"append B {batch} × {tokens}", backend, quantiles(append))
    table.write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
