"""Rotations of K."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor:
    """Orthonormal float32 `[size, size]`: Sylvester's Hadamard matrix, block-diagonal in the largest power of two that
    divides `size`."""
    block = size & -size
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return torch.block_diag(*[matrix / math.sqrt(block)] * (size // block))
