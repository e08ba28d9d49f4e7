"""Workspaces of FlashInfer's kernels: one for each kernel, device and stream, zeroed once, kept.

A kernel leaves the counters in its workspace at zero, so one workspace serves all calls that follow each other on a
stream; two streams never share one. A call inside a CUDA graph's capture gets memory of that graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .support import capturing

BYTES = 128 << 20

_kept: dict[tuple[str, int, torch.device, int], Tensor] = {}


def workspace(name: str, device: torch.device, size: int = BYTES, counters: int = 0) -> Tensor:
    """uint8 `[size]` for kernel `name`: all zero when it is made; its first `counters` bytes are again before every
    replay where it belongs to a graph."""
    if capturing(device):
        captured = torch.empty(size, dtype=torch.uint8, device=device)
        captured[:counters].zero_()
        return captured
    key = (name, size, device, _stream(device))
    if key not in _kept:
        with torch.inference_mode(False):
            _kept[key] = torch.zeros(size, dtype=torch.uint8, device=device)
    return _kept[key]


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
