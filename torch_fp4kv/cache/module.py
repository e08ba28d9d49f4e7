"""`NVFP4KVCache`: an `nn.Module` cache for models that are not from transformers.

Shapes: B rows, H KV heads, n new tokens, D and Dv head sizes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import checks
from ..recipe import Recipe, get_recipe
from .handle import KVHandle
from .positions import Positions
from .storage import LayerStorage, whole_tiles


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
        recipe, **overrides: as for `NVFP4Cache`; of a recipe with layers or calibration take `for_layer(index)`.

    Raises:
        ValueError: the recipe has rules for layers, or calibrated numbers of several or none that it needs.
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
        checks.count(max_batch_size, "max_batch_size")
        checks.count(max_seq_length, "max_seq_length")
        recipe = get_recipe(recipe, **overrides)
        if recipe.layers or len(recipe.calibration) > 1:
            raise ValueError("the recipe is for several layers, and this is one: pass recipe.for_layer(index)")
        recipe = recipe.for_layer(0)
        like = torch.empty((max_batch_size, n_heads, 0, head_dim), dtype=dtype, device=device)
        self.storage = LayerStorage(recipe, whole_tiles(max_seq_length))
        self.storage.allocate(like, like.new_empty((max_batch_size, n_heads, 0, v_head_dim or head_dim)))
        ring = LayerStorage.ring_size(recipe)
        self.positions = Positions(max_batch_size, max_seq_length, ring, like.device)
        self._rows = max_batch_size
        self._writing = False

    def update(self, input_pos: Tensor | None, k: Tensor, v: Tensor | None = None) -> tuple[Any, Any]:
        """Stores `k` `[B, H, n, D]` and `v` `[B, H, n, Dv]` in place and returns handles for both.

        `update(k, v)`, as torchtune calls it, is `update(None, k, v)`.

        Args:
            input_pos: int `[n]`, positions of the tokens, which continue the row; None appends. On a GPU and in
                compiled code nobody looks at them at once: `check` tells.

        Raises:
            ValueError: the tokens don't fit, don't continue the row, or are of other heads or rows; nothing was
                written.
            RuntimeError: a gradient would be recorded, or an earlier call ended halfway.
        """
        if v is None:
            assert input_pos is not None
            return self.update(None, input_pos, k)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("a quantised KV cache is for inference; call the model under torch.no_grad()")
        if self._writing:
            raise RuntimeError("an earlier call ended halfway: reset() the cache")
        rows, num_new = k.shape[0], k.shape[2]
        self.storage.check(k, v, min(rows, self.storage.batch_size) if self.storage.empty else self._rows)
        self._rows = rows
        self.positions.check_room(num_new)
        if input_pos is not None:
            self._check_positions(input_pos, num_new)
        self._writing = True
        self.positions.advance(num_new)
        update = self.storage.write(k, v, self.positions)
        self._writing = False
        return KVHandle(update, k.shape[0], is_key=True), KVHandle(update, k.shape[0], is_key=False)

    def _check_positions(self, input_pos: Tensor, num_new: int) -> None:
        if tuple(input_pos.shape) != (num_new,):
            raise ValueError(f"input_pos must be [{num_new}], as many positions as tokens, got {list(input_pos.shape)}")
        lengths = self.positions.lengths
        expected = lengths[:1] + torch.arange(num_new, device=lengths.device)
        wrong = (input_pos.to(lengths.device) != expected).any()
        if lengths.device.type != "cpu" or torch.compiler.is_compiling():
            self.positions.overflowed.logical_or_(wrong)
        elif bool(wrong):
            raise ValueError(
                f"input_pos must be {int(expected[0])} … {int(expected[-1])} in order, as the cache holds "
                f"{int(lengths[0])} tokens, got {int(input_pos[0])} … {int(input_pos[-1])}: tokens are appended; "
                "reset() starts a new sequence, crop(n) drops the last n tokens"
            )

    def check(self) -> None:
        """Raises RuntimeError if `input_pos` did not continue a row, or a row outgrew the cache, where only the device
        knew (synchronises)."""
        if bool(self.positions.overflowed.any()):
            raise RuntimeError(
                f"a row grew past max_seq_length={self.positions.capacity}, or input_pos did not continue where the "
                "row ended; what the cache holds since is wrong: reset() it before a new sequence"
            )

    def crop(self, num_tokens: int) -> None:
        """Drops the last `num_tokens` tokens of every row; ValueError if the number is negative, TypeError if it is no
        integer."""
        self.positions.crop(operator.index(num_tokens))

    def reset(self) -> None:
        """Empties the cache; buffers and their addresses stay."""
        self.storage.empty = True
        self.positions.reset()
        self._writing = False

    def _apply(self, fn: Any, recurse: bool = True) -> NVFP4KVCache:
        """`to` and its kin move the cache; its dtypes are part of the format and stay."""
        super()._apply(fn, recurse)
        device = fn(self.positions.lengths).device
        self.storage.move_to(device)
        self.positions.to(device)
        return self

    def nbytes(self) -> int:
        """Bytes of all state."""
        return self.storage.nbytes()

    def __repr__(self) -> str:
        rows, held = self._rows, int(self.positions.lengths.max())
        kept = self.storage.description
        size = f"{held} of {self.positions.capacity} tokens, {rows} rows, {self.nbytes() / 2**20:.2f} MiB"
        return f"NVFP4KVCache({kept}; {size})"

    def forward(self, input_pos: Tensor | None, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        """`update`, as litgpt calls it."""
        return self.update(input_pos, k, v)
