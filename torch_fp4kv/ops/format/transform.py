"""What stored K is of K, and which query meets it: K may be shifted, equalised, reordered and rotated.

Stored K is `rotate(((k - bias) · factors)[order])`, and a query meets it as `rotate((q / factors)[order])`: their
product is `q · (k - bias)`, to which the score of stored K adds `q · bias`. No inner loop knows of any of it.

Shapes: H KV heads, Hq query heads, L tokens or queries a row, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import rotation


@dataclass(frozen=True, slots=True)
class KeyTransform:
    """Arguments `k_bias`, `k_factors`, `k_order` and `k_rotation` of `append` and `attention`.

    Attributes:
        bias: float32 `[H, D]`, subtracted.
        factors: float32 `[H, D]`, what channels are multiplied by.
        order: int32 `[H, D]`; channel `order[h, j]` is stored as the j-th.
        rotation: blocks of so many channels (those that stand together then) are rotated; 0 for none.
    """

    bias: Tensor | None = None
    factors: Tensor | None = None
    order: Tensor | None = None
    rotation: int = 0

    @property
    def moves_queries(self) -> bool:
        """Stored K meets other queries than exact K does."""
        return self.factors is not None or self.order is not None or self.rotation != 0

    def of_heads(self, heads: slice) -> KeyTransform:
        """The same for some KV heads."""
        bias, factors, order = (None if x is None else x[heads] for x in (self.bias, self.factors, self.order))
        return KeyTransform(bias, factors, order, self.rotation)

    def key(self, k: Tensor) -> Tensor:
        """What is stored of `k` `[B, H, L, D]`; float32, or `k` itself where nothing is done to it."""
        if self.bias is not None:
            k = k.to(torch.float32) - self.bias[:, None, :]
        if self.factors is not None:
            k = k.to(torch.float32) * self.factors[:, None, :]
        return self._ordered_and_rotated(k)

    def original(self, stored: Tensor) -> Tensor:
        """K of `stored` `[B, H, L, D]`, the inverse of `key`."""
        k = rotation.rotate(stored, self.rotation) if self.rotation else stored
        if self.order is not None:
            k = k.scatter(-1, self.order.long()[:, None, :].expand_as(k), k)
        if self.factors is not None:
            k = k / self.factors[:, None, :]
        return k if self.bias is None else k + self.bias[:, None, :]

    def query(self, q: Tensor) -> Tensor:
        """What meets stored K in place of `q` `[B, Hq, L, D]`; float32, or `q` itself where that is the same."""
        if self.factors is None and self.order is None:
            return rotation.rotate(q, self.rotation) if self.rotation else q
        heads = next(x.shape[0] for x in (self.factors, self.order) if x is not None)
        grouped = q.to(torch.float32).unflatten(1, (heads, -1))
        stored = grouped.flatten(2, 3)
        if self.factors is not None:
            stored = stored / self.factors[:, None, :]
        return self._ordered_and_rotated(stored).unflatten(2, grouped.shape[2:4]).flatten(1, 2)

    def query_bias(self, q: Tensor) -> Tensor | None:
        """float32 `[B, Hq, L]`, `q · bias`: what the shift took from scores; None without one."""
        if self.bias is None:
            return None
        grouped = q.to(torch.float32).unflatten(1, (self.bias.shape[0], -1))
        return (grouped * self.bias[:, None, None, :]).sum(-1).flatten(1, 2)

    def _ordered_and_rotated(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.to(torch.float32).gather(-1, self.order.long()[:, None, :].expand_as(x))
        return rotation.rotate(x, self.rotation) if self.rotation else x
