"""`torch-fp4kv bench attention`: one decoded token's attention over a cache, beside PyTorch's over BF16.

`benchmarks/attention.py` in the repository times more peers; this is for the shapes of a model and the GPU at hand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..console import INTERRUPTED, heading, output_file, table
from ..ops import checks
from ..recipe import get_recipe
from .models import batches_of
from .results import cell, environment, write_csv

BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}


LARGEST_ERROR = 2**-7
"""Results in BF16 are rounded to 2^-9."""


@dataclass
class Row:
    """One implementation on one shape. Times in microseconds; on a GPU a replay of a CUDA graph, L2 flushed before it.

    `error` is relative, against float64 over what the cache holds, in the worse of the first and the last row.
    """

    batch: int
    context: int
    cache: str
    p50_us: float
    p20_us: float
    p80_us: float
    cache_bytes: int
    error: float
    speedup: float = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[4096], help="tokens, one run for each --batch")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--recipes", nargs="+", default=["nvfp4", "nvfp4-plain"])
    parser.add_argument("--csv", type=output_file, help="write the rows here too")


def run(args: argparse.Namespace) -> int:
    """Prints, for each shape, the fastest SDPA over BF16 and each recipe; 1 if an error is beyond rounding or a shape
    fails, which does not stop the others. Ctrl-C keeps the shapes that are done."""
    try:
        runs = batches_of(args.batch, args.context, "--context")
        for name in args.recipes:
            get_recipe(name).for_layer(0)
        if args.kv_heads < 1 or args.heads < 1 or args.heads % args.kv_heads:
            raise ValueError(f"{args.heads} query heads cannot share {args.kv_heads} KV heads evenly")
        checks.head_dim(args.head_dim, "--head-dim")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    status = 0
    try:
        for batch, context in runs:
            try:
                rows += measure(args, batch, context, device)
            except RuntimeError as error:
                print(f"{batch} x {context} tokens: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
                status = 1
    except KeyboardInterrupt:
        print("interrupted: the shapes that were measured follow", file=sys.stderr)
        status = INTERRUPTED
    if not rows:
        return status
    heading("Attention of one token a row (speed-up over the fastest SDPA)")
    table([[f.name for f in fields(Row)], *[[cell(value) for value in asdict(row).values()] for row in rows]])
    if args.csv is not None:
        shape = {"heads": str(args.heads), "kv_heads": str(args.kv_heads), "head_dim": str(args.head_dim)}
        write_csv(args.csv, [asdict(row) for row in rows], {**shape, **environment()})
    wrong = [row for row in rows if not row.error < LARGEST_ERROR]
    for row in wrong:
        print(
            f"{row.cache}, {row.batch} x {row.context}: an error of {row.error:.3g} is beyond rounding", file=sys.stderr
        )
    return status or int(bool(wrong))


@torch.no_grad()
def measure(args: argparse.Namespace, batch: int, context: int, device: torch.device) -> list[Row]:
    """Rows of one shape, the BF16 one first."""
    from .. import NVFP4KVCache

    torch.manual_seed(0)
    shape = (batch, args.kv_heads, context, args.head_dim)
    k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    q = torch.randn(batch, args.heads, 1, args.head_dim, device=device).bfloat16()
    times = {name: timed(call, device) for name, call in sdpa_calls(q, k, v).items()}
    if not times:
        raise RuntimeError("no SDPA runs on this shape")
    fastest = min(times, key=lambda name: times[name])
    got = sdpa_calls(q, k, v)[fastest]()
    rows = [Row(batch, context, f"BF16, {fastest}", *times[fastest], 4 * k.numel(), relative_error(got, q, k, v))]
    for name in args.recipes:
        cache = NVFP4KVCache(batch, context, args.kv_heads, args.head_dim, k.dtype, device=device, recipe=name)
        cache.update(None, k[:, :, :-1], v[:, :, :-1])
        update: Any = cache.update(None, k[:, :, -1:], v[:, :, -1:])[0].update
        error = relative_error(update.attend(q), q, update.keys(), update.values())
        ours = timed(lambda update=update: update.attend(q), device)  # type: ignore[misc]
        rows.append(Row(batch, context, name, *ours, cache.nbytes(), error, rows[0].p50_us / ours[0]))
    return rows


def sdpa_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The SDPA backends that run here, the heads of a group as its queries."""
    grouped = q.view(k.shape[0], k.shape[1], -1, k.shape[-1])

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(grouped, k, v).view(q.shape)

    found = {}
    for name, backend in BACKENDS.items():
        try:
            call(backend)
        except RuntimeError:
            continue
        found[name] = lambda backend=backend: call(backend)
    return found  # type: ignore[return-value]


def relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Of `out` against float64 attention of `q` over `k` and `v`; NaN if some of it is."""
    errors = []
    for b in {0, len(q) - 1}:
        queries = q[b].double().view(k.shape[1], -1, q.shape[-1])
        weights = (queries @ k[b].double().transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        expected = (weights @ v[b].double()).view(out[b].shape)
        errors.append((out[b] - expected).norm() / expected.norm())
    # Python's `max` would pass over a NaN.
    return float(torch.stack(errors).max())


def cuda_graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `call`, which has run once before on a stream of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float, float]:
    """`(p50, p20, p80)` of `call` in microseconds."""
    if device.type == "cuda":
        from triton.testing import do_bench

        p50, p20, p80 = do_bench(cuda_graph_of(call).replay, quantiles=[0.5, 0.2, 0.8])
        return 1e3 * p50, 1e3 * p20, 1e3 * p80
    call()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    fifths = statistics.quantiles(times, n=5)
    return statistics.median(times), fifths[0], fifths[-1]
