"""Scratch memory of attention on the CPU, as the kernel counts it: resident memory at its peak, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import sys, torch, torch_fp4kv

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024

torch.set_num_threads(1)
kind, context, queries = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
heads, group, dim = 8, 4, 128
pages, tokens = (context // 64, 64) if kind == "pages" else (1, context)
def storage():
    words = torch.randint(-2**63, 2**63 - 1, (pages, heads, tokens, dim // 16))
    return words, torch.full(words.shape, 0x38, dtype=torch.uint8)
options = {"v_scale_layout": "4token"} if kind == "4token" else {}
if kind == "pages":
    options["block_table"] = torch.randperm(pages).to(torch.int32)[None]
if kind == "mask":
    options["mask"] = torch.ones(1, 1, queries, context, dtype=torch.bool)
if kind == "new":
    options |= {name: torch.randn(1, heads, queries, dim) for name in ("k_new", "v_new")}
cache = *storage(), *storage()
q = torch.randn(1, heads * group, queries, dim)
def attend(length):
    lengths = torch.tensor([length], dtype=torch.int32)
    return torch_fp4kv.attention(q[:, :, :1] if kind != "new" else q, *cache, 0.01, 0.01, lengths, **options)
if kind not in ("new", "mask"):
    attend(16)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
lengths = torch.tensor([context], dtype=torch.int32)
out = torch_fp4kv.attention(q, *cache, 0.01, 0.01, lengths, **options)
print(status("VmHWM") - before)
"""


def scratch(kind: str, context: int, num_queries: int = 1) -> float:
    """MiB that the process grew by, at most, during one call (result included)."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory is read from Linux's /proc")
    # Every large block is its own mapping, so that memory freed earlier cannot hide what a call takes.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, kind, str(context), str(num_queries)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("kind", ["plain", "pages", "4token"])
def test_decode_step_over_32k_tokens_takes_less_than_64_mib(kind: str) -> None:
    assert scratch(kind, 32768) < 64


def test_scratch_does_not_grow_with_the_context() -> None:
    assert scratch("plain", 65536) < scratch("plain", 8192) + 4


@pytest.mark.parametrize("kind", ["new", "mask"])
def test_scratch_of_a_prefill_grows_with_its_result_only(kind: str) -> None:
    results = {n: n * 32 * 128 * 4 / 2**20 for n in (512, 1536)}
    short, long = (scratch(kind, n, n) - size for n, size in results.items())
    assert long < 160
    assert long < short + 16
