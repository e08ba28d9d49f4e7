"""What the append and prefill benchmarks share: quantiles of a call, the copy bandwidth, rows in a CSV."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

from torch_fp4kv.bench.attention import cuda_graph_of

RESULTS = Path(__file__).parent / "results"


@dataclass
class Table:
    """Rows of one benchmark; every row carries the hardware and the versions."""

    name: str
    rows: list[dict[str, object]] = field(default_factory=list)

    def add(self, case: str, implementation: str, milliseconds: tuple[float, float, float], **values: object) -> None:
        """Adds `(p50, p20, p80)` in ms and what was computed from it, and prints the row."""
        p50, p20, p80 = milliseconds
        row: dict[str, object] = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "case": case,
            "implementation": implementation,
            "p50_ms": f"{p50:.5f}",
            "p20_ms": f"{p20:.5f}",
            "p80_ms": f"{p80:.5f}",
            **{key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()},
        }
        self.rows.append(row)
        print(case, implementation, *(f"{key}={value}" for key, value in list(row.items())[5:]), flush=True)

    def write(self, path: Path | None = None) -> None:
        """Writes `results/<name>.csv`, or `path`."""
        path = path or RESULTS / f"{self.name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def quantiles(call: Callable[[], object], rep: int = 100, warmup: int = 25) -> tuple[float, float, float]:
    """`(p50, p20, p80)` of one call in ms over `rep` ms, with the L2 cache flushed before each."""
    p50, p20, p80 = do_bench(call, warmup=warmup, rep=rep, quantiles=[0.5, 0.2, 0.8])
    return p50, p20, p80


def captured(call: Callable[[], object], calls: int = 100) -> tuple[float, float, float]:
    """As `quantiles`, from replays of a graph of `calls` calls: GPU time with the gaps between kernels, no launches."""

    def many() -> None:
        for _ in range(calls):
            call()

    p50, p20, p80 = quantiles(cuda_graph_of(many).replay)
    return p50 / calls, p20 / calls, p80 / calls


CALLS = 8
"""In the graph that `in_graph` times."""


def in_graph(call: Callable[[], object]) -> float:
    """What one call adds to a CUDA graph, ms: of `CALLS`, each after a flush of the L2 cache, less the flushes alone.

    Where a graph of one call takes as long as its launch, this tells what the call takes in a model's graph.
    """

    def many() -> None:
        for _ in range(CALLS):
            flush()
            call()

    return (quantiles(cuda_graph_of(many).replay, rep=30, warmup=8)[0] - _flushes()) / CALLS


def flush() -> None:
    """Writes as much as pushes all else from the L2 cache."""
    torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")


@functools.cache
def _flushes() -> float:
    """ms of `CALLS` flushes in a graph."""

    def alone() -> None:
        for _ in range(CALLS):
            flush()

    return quantiles(cuda_graph_of(alone).replay)[0]


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes read and written a second by a device-to-device copy of `num_bytes`."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * num_bytes / (quantiles(lambda: target.copy_(source))[0] * 1e-3)
