"""`NVFP4KVCache`: an `nn.Module` cache for models that are not from transformers.

Shapes: B rows, H KV heads, n new tokens, D and Dv head sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import Recipe, get_recipe
from .handle import KVHandle
from .positions import Positions
from .storage import LayerStorage


class NVFP4KVCache(nn.Module):
    """K and V of one layer, quantised; in place of the `KVCache` of gpt-fast, litgpt or torchtune.

    `update` returns handles that `F.scaled_dot_product_attention` reads, so the model's attention stays as it is, and
    a decode step compiles to one graph. Tokens are appended: `input_pos` must continue where the last call ended.

    Args:
        max_batch_size, max_seq_length: rows, and tokens a row can hold.
        n_heads: KV heads H.
        head_dim: head size of K, a multiple of 16.
        dtype: the model's.
        v_head_dim: head size of V; `head_dim` if None.
        recipe, **overrides: as for `NVFP4Cache`.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seq_length: int,
        n_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        v_head_dim: int | None = None,
        device: torch.device | str | None = None,
        recipe: str | Recipe = "nvfp4",
        **overrides: Any,
    ) -> None:
        super().__init__()
        recipe = get_recipe(recipe, **overrides)
        like = torch.empty((max_batch_size, n_heads, 0, head_dim), dtype=dtype, device=device)
        self.storage = LayerStorage(recipe, max_seq_length)
        self.storage.allocate(like, like.new_empty((max_batch_size, n_heads, 0, v_head_dim or head_dim)))
        ring = LayerStorage.ring_size(recipe)
        self.positions = Positions(max_batch_size, max_seq_length, ring, like.device)

    def update(self, input_pos: Tensor | None, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        """Stores `k` `[B, H, n, D]` and `v` `[B, H, n, Dv]` in place and returns handles for both.

        Args:
            input_pos: int `[n]`, positions of the tokens; on the CPU it is checked that they continue the row. A first
                position of 0 starts a new sequence there too. None appends.

        Raises:
            ValueError: the tokens don't fit, or don't continue the row; nothing was written.
            RuntimeError: a gradient would be recorded.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("a quantised KV cache is for inference; call the model under torch.no_grad()")
        if input_pos is not None and input_pos.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_positions(input_pos)
        self.positions.check_room(k.shape[2])
        self.positions.advance(k.shape[2])
        update = self.storage.write(k, v, self.positions)
        return KVHandle(update, k.shape[0], is_key=True), KVHandle(update, k.shape[0], is_key=False)

    def _check_positions(self, input_pos: Tensor) -> None:
        stored = int(self.positions.lengths.max())
        if input_pos.numel() and int(input_pos[0]) != stored:
            raise ValueError(
                f"input_pos starts at {int(input_pos[0])}, the cache holds {stored} tokens: tokens are appended in "
                "order; reset() starts a new sequence, crop(n) drops the last n tokens"
            )

    def crop(self, num_tokens: int) -> None:
        """Drops the last `num_tokens` tokens of every row."""
        self.positions.crop(num_tokens)

    def reset(self) -> None:
        """Empties the cache; buffers and their addresses stay."""
        self.storage.empty = True
        self.positions.reset()

    def _apply(self, fn: Any, recurse: bool = True) -> NVFP4KVCache:
        """`to` and its kin move the cache; its dtypes are part of the format and stay."""
        super()._apply(fn, recurse)
        device = fn(self.positions.lengths).device
        self.storage.to(device)
        self.positions.to(device)
        return self

    def nbytes(self) -> int:
        """Bytes of all state."""
        return self.storage.nbytes()

    def forward(self, input_pos: Tensor | None, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        """`update`, as litgpt calls it."""
        return self.update(input_pos, k, v)
