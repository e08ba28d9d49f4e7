"""What a layer is about to take over from elsewhere, a file or another machine, and room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .hf import NVFP4Cache, NVFP4Layer


@dataclass(frozen=True)
class Contents:
    """Sizes of the K and V that `layer`, of this index, is about to take over: B rows of `tokens` tokens."""

    index: int
    layer: NVFP4Layer
    batch: int
    heads: int
    head_dim: int
    v_head_dim: int
    tokens: int
    dtype: torch.dtype

    def check(self, what: str) -> None:
        """Raises ValueError where the layer has buffers for other heads than those of `what`."""
        storage = self.layer.storage
        if not self.layer.is_initialized:
            return
        own = [storage.k_data.shape[1], storage.head_dim, storage.v_head_dim]
        if own != [self.heads, self.head_dim, self.v_head_dim]:
            raise ValueError(
                f"{what} does not go with this cache: KV heads and head sizes of layer {self.index} are "
                f"{[self.heads, self.head_dim, self.v_head_dim]}, the cache's {own}"
            )

    def fit(self) -> bool:
        """Whether the layer's buffers take them."""
        layer, storage = self.layer, self.layer.storage
        return (
            layer.is_initialized
            and (storage.batch_size, storage.dtype) == (self.batch, self.dtype)
            and (layer.is_sliding or storage.tokens >= self.tokens)
            and layer.positions is not None
            and layer.positions.batch_size == self.batch
        )

    def allocate(self, device: torch.device) -> None:
        """New buffers for them, on `device` unless the layer has one already."""
        layer = self.layer
        if layer.max_cache_len is None and not layer.is_sliding:
            layer.storage.tokens = max(self.tokens, 1)
        device = layer.device if layer.is_initialized else device
        like = [
            torch.empty((self.batch, self.heads, 0, dim), dtype=self.dtype, device=device)
            for dim in (self.head_dim, self.v_head_dim)
        ]
        layer.lazy_initialization(*like)


def make_room(cache: NVFP4Cache, contents: Sequence[Contents], device: torch.device | str | None) -> None:
    """Empties `cache`, and gives its layers new buffers unless all contents fit into those they have."""
    cache.reset()
    if not all(one.fit() for one in contents):
        cache.forget_positions()
        for one in contents:
            one.allocate(torch.device(device or "cpu"))
    for positions in cache.all_positions():
        positions.rows = max(one.batch for one in contents)
