"""What K is transformed by before it is stored, and the query that meets it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_rotations: dict[tuple[int, int, bool, torch.device], Tensor] = {}


def hadamard(size: int) -> Tensor:
    """Orthonormal float32 `[size, size]`: Sylvester's Hadamard matrix, block-diagonal in the largest power of two that
    divides `size`."""
    block = size & -size
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return torch.block_diag(*[matrix / math.sqrt(block)] * (size // block))


def k_and_q_transforms(factors: Tensor, rotate: bool) -> tuple[Tensor, Tensor]:
    """`(k_transform, q_transform)`, float32 `[H, D, D]`: channels multiplied by `factors` `[H, D]`, then rotated.

    `(k @ k_transform) · (q @ q_transform) = k · q`, and `q_transform` transposed inverts `k_transform`.
    """
    dim = factors.shape[-1]
    rotation = hadamard(dim) if rotate else torch.eye(dim)
    return factors.unsqueeze(-1) * rotation, factors.reciprocal().unsqueeze(-1) * rotation


def shared_rotation(heads: int, dim: int, rotate: bool, device: torch.device) -> Tensor:
    """float32 `[H, D, D]`, a Hadamard matrix a head (the identity without `rotate`): one tensor for all layers and
    caches, which nobody writes."""
    key = (heads, dim, rotate, device)
    rotation = _rotations.get(key)
    if rotation is None:
        with torch.inference_mode(False):
            matrix = hadamard(dim) if rotate else torch.eye(dim)
            rotation = matrix.to(device).expand(heads, -1, -1).contiguous()
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(rotation)
            _rotations[key] = rotation
    return rotation
