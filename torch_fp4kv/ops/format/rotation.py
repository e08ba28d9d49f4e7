"""The rotation of a head's channels: Sylvester's Hadamard matrix over √R, in blocks of R channels, R a power of two.

Row i, column j of the matrix is -1 where i and j have an odd number of bits in common, else 1 (Sylvester 1867). It is
symmetric and orthonormal, so that rotating twice gives back the input.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest_block(size: int) -> int:
    """The largest R that divides head size `size`."""
    return size & -size


def rotate(x: Tensor, block: int) -> Tensor:
    """float32 `x` `[..., D]` rotated in blocks of `block` channels, which divides D.

    Sums and differences of channels 1, 2, 4, … apart, each rounded once, then a product with `block^-0.5`: kernels do
    the same, so equal input gives equal bytes.
    """
    x = x.to(torch.float32)
    apart = 1
    while apart < block:
        first, second = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        apart *= 2
    return x * block**-0.5
