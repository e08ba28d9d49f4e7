"""What a cache learns from its first tokens: the mean of each channel, and the largest magnitude of each block.

Shapes: B rows, H heads, T tokens, D channels. Of row b the tokens from `first[b]` on count; non-finite values do not.
On a GPU a kernel reads tokens once and another puts its parts together; compiled code has PyTorch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import backends
from .format.constants import BLOCK
from .format.rotation import rotate


@dataclass(frozen=True, slots=True)
class Stored:
    """First tokens as they will be stored, and the scale to be chosen for them.

    Attributes:
        x: `[B, H, T, D]`.
        storage_format: "nvfp4", "fp8", "block-fp4" or "exact".
        global_scale: float32 `[H]`, contiguous; written.
        bias: float32 `[H, D]` or None, subtracted.
        rotation: if not 0, that is rotated in blocks of so many channels.
    """

    x: Tensor
    storage_format: str
    global_scale: Tensor
    bias: Tensor | None = None
    rotation: int = 0


def set_channel_means(out: Tensor, x: Tensor, first: Tensor) -> None:
    """Writes the means of `x` `[B, H, T, D]` over rows and tokens to `out`, float32 `[H, D]`, contiguous; 0 for a
    channel without any value."""
    if on_gpu(x):
        from .kernels import statistics

        statistics.set_channel_means(out, x, first)
        return
    counted = _counted(x, first) & x.isfinite()
    total = torch.where(counted, x.to(torch.float32), 0.0).sum((0, 2))
    out.copy_(total / counted.sum((0, 2)).clamp(min=1))


def block_amax(x: Tensor, first: Tensor, bias: Tensor | None = None, rotation: int = 0) -> Tensor:
    """float32 `[B, H, T, D / 16]`: the largest magnitude of each block of `x` `[B, H, T, D]` less `bias` `[H, D]`,
    rotated in blocks of `rotation` channels; 0 where nothing counts."""
    magnitude = x.to(torch.float32)
    if bias is not None:
        magnitude = magnitude - bias[:, None, :]
    if rotation:
        magnitude = rotate(magnitude, rotation)
    counted = _counted(x, first) & magnitude.isfinite()
    return torch.where(counted, magnitude.abs(), 0.0).unflatten(-1, (-1, BLOCK)).amax(-1)


def _counted(x: Tensor, first: Tensor) -> Tensor:
    return (torch.arange(x.shape[2], device=x.device) >= first[:, None])[:, None, :, None]


def on_gpu(x: Tensor) -> bool:
    """Whether `x` is memory that a kernel can read, and not traced."""
    return (
        type(x) is Tensor
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and backends.triton_missing(x.device) is None
    )
