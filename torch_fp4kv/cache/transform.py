"""What K is transformed by before it is stored, and the query that meets it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.format.constants import BLOCK
from ..ops.format.rotation import largest_block


def hadamard(size: int, block: int | None = None) -> Tensor:
    """Orthonormal float32 `[size, size]`: Sylvester's Hadamard matrix, block-diagonal in `block`, a power of two (the
    largest that divides `size` if None)."""
    block = block or largest_block(size)
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return torch.block_diag(*[matrix / math.sqrt(block)] * (size // block))


def k_and_q_transforms(factors: Tensor, rotate: bool, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(k_transform, q_transform)`, float32 `[H, D, D]`: channels multiplied by `factors` `[H, D]`, then rotated.

    With `order` (int64 `[H, D]`) channel `order[h, j]` comes to stand at j first, and the rotation stays within blocks.
    `(k @ k_transform) · (q @ q_transform) = k · q`, and `q_transform` transposed inverts `k_transform`.
    """
    dim = factors.shape[-1]
    rotation = hadamard(dim, None if order is None else BLOCK) if rotate else torch.eye(dim)
    if order is not None:
        rotation = torch.nn.functional.one_hot(order, dim).to(torch.float32).transpose(-1, -2) @ rotation
    return factors.unsqueeze(-1) * rotation, factors.reciprocal().unsqueeze(-1) * rotation
