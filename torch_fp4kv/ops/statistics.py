"""What a cache learns from its first tokens: the mean of each channel, and the largest magnitude of each block.

Shapes: B rows, H heads, T tokens, D channels. Of row b the tokens from `first[b]` on count; non-finite values do not.
On a GPU each is one kernel that reads `x` once and allocates a sixteenth of it; compiled code has PyTorch's operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends
from .format.constants import BLOCK
from .format.rotation import rotate


def channel_means(x: Tensor, first: Tensor) -> Tensor:
    """float32 `[H, D]` means of `x` `[B, H, T, D]` over rows and tokens; 0 for a channel without any value."""
    if _on_gpu(x):
        from .kernels import statistics

        total, count = statistics.channel_sums(x, first)
    else:
        counted = _counted(x, first) & x.isfinite()
        total = torch.where(counted, x.to(torch.float32), 0.0).sum((0, 2))
        count = counted.sum((0, 2))
    return total / count.clamp(min=1)


def block_amax(x: Tensor, first: Tensor, bias: Tensor | None = None, rotation: int = 0) -> Tensor:
    """float32 `[B, H, T, D / 16]`: the largest magnitude of each block of `x` `[B, H, T, D]` less `bias` `[H, D]`,
    rotated in blocks of `rotation` channels; 0 where nothing counts."""
    if _on_gpu(x):
        from .kernels import statistics

        return statistics.block_amax(x, first, bias, rotation)
    magnitude = x.to(torch.float32)
    if bias is not None:
        magnitude = magnitude - bias[:, None, :]
    if rotation:
        magnitude = rotate(magnitude, rotation)
    counted = _counted(x, first) & magnitude.isfinite()
    return torch.where(counted, magnitude.abs(), 0.0).unflatten(-1, (-1, BLOCK)).amax(-1)


def _counted(x: Tensor, first: Tensor) -> Tensor:
    return (torch.arange(x.shape[2], device=x.device) >= first[:, None])[:, None, :, None]


def _on_gpu(x: Tensor) -> bool:
    """Whether `x` is memory that a kernel can read, and not traced."""
    return (
        type(x) is Tensor
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and backends.triton_missing(x.device) is None
    )
