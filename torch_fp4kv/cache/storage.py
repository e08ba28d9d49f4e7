"""One layer's quantised K and V: allocation, writing, reading, and every operation that moves its rows.

Shapes: B rows, H KV heads, Hq query heads, n new tokens, T tokens a row, D and Dv head sizes, E = S + R + 1 exact slots
(S sinks, a ring of R, one scratch slot).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import checks
from ..ops.append import append
from ..ops.attention import attention
from ..ops.dequantize import values
from ..ops.format.constants import BLOCK
from ..recipe import Recipe
from ..scales import choose_global_scale
from .buffers import allocate
from .positions import RING_SLACK, Positions
from .transform import hadamard

MAX_DECODE_TOKENS = 16
"""Up to as many new tokens read their own K and V from the cache; more are a prefill and see each other exactly."""

MIN_BIAS_TOKENS = 8
"""Fewer first tokens give no bias."""

_ROW_TENSORS = ("k_data", "k_scales", "v_data", "v_scales", "k_exact", "v_exact")
_HEAD_TENSORS = ("k_global", "v_global", "k_bias", "k_transform", "q_transform")


class LayerStorage:
    """K and V of one layer in the formats of a recipe.

    Attributes:
        k_data, k_scales, v_data, v_scales: as `fp4kv::append` takes them, with one page of T tokens a row.
        k_global, v_global: float32 `[H]`, chosen from the first tokens and frozen until `reset`.
        k_bias: float32 `[H, D]` or None; k_transform, q_transform: float32 `[H, D, D]` or None. Stored K is
            `(k - k_bias) @ k_transform`; it meets `q @ q_transform`, and `q · k_bias` is added to the score.
        k_exact, v_exact: `[B, H, E, ·]` or None, in the model's dtype.
        empty: no token has been stored since the last reset.
    """

    def __init__(self, recipe: Recipe, tokens: int, window: int = -1) -> None:
        self.recipe = recipe
        self.tokens = tokens
        self.window = window
        self.empty = True
        self.k_scales: Tensor | None = None
        self.v_scales: Tensor | None = None
        self.k_exact: Tensor | None = None
        self.v_exact: Tensor | None = None
        self.k_bias: Tensor | None = None
        self.k_transform: Tensor | None = None
        self.q_transform: Tensor | None = None

    @staticmethod
    def ring_size(recipe: Recipe) -> int:
        """R of `recipe`."""
        return recipe.exact_window + RING_SLACK if recipe.exact_window else 0

    def allocate(self, k: Tensor, v: Tensor) -> None:
        """Allocates for K and V like `k` `[B, H, ·, D]` and `v` `[B, H, ·, Dv]` (shape, dtype and device are read).

        Raises:
            ValueError: a head size is not a multiple of 16.
        """
        checks.head_dim(k.shape[-1], "K")
        checks.head_dim(v.shape[-1], "V")
        checks.floating(k, "K")
        recipe, device, heads = self.recipe, k.device, k.shape[1]
        self.dtype = torch.promote_types(k.dtype, v.dtype)
        self.k_data, self.k_scales = self._data(recipe.k_format, k)
        self.v_data, self.v_scales = self._data(recipe.v_format, v)
        self.k_global = allocate((heads,), torch.float32, device)
        self.v_global = allocate((heads,), torch.float32, device)
        ring = self.ring_size(recipe)
        if ring or recipe.num_sink_tokens:
            slots = recipe.num_sink_tokens + ring + 1
            self.k_exact = allocate((k.shape[0], heads, slots, k.shape[-1]), self.dtype, device)
            self.v_exact = allocate((k.shape[0], heads, slots, v.shape[-1]), self.dtype, device)
        if recipe.k_bias != "none":
            self.k_bias = allocate((heads, k.shape[-1]), torch.float32, device)
        if recipe.rotate_k:
            rotation = hadamard(k.shape[-1]).to(device).expand(heads, -1, -1)
            self.k_transform = allocate(tuple(rotation.shape), torch.float32, device).copy_(rotation)
            self.q_transform = allocate(tuple(rotation.shape), torch.float32, device).copy_(rotation)

    def _data(self, storage_format: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        batch, heads, _, dim = x.shape
        lead = (batch, heads, self.tokens)
        if storage_format == "exact":
            return allocate((*lead, dim), self.dtype, x.device), None
        if storage_format == "fp8":
            return allocate((*lead, dim), torch.uint8, x.device), None
        blocks = (*lead, dim // BLOCK)
        return allocate(blocks, torch.int64, x.device), allocate(blocks, torch.uint8, x.device)

    @property
    def batch_size(self) -> int:
        return self.k_data.shape[0]

    @property
    def head_dim(self) -> int:
        return self._dim(self.k_data, self.recipe.k_format)

    @property
    def v_head_dim(self) -> int:
        return self._dim(self.v_data, self.recipe.v_format)

    @staticmethod
    def _dim(data: Tensor, storage_format: str) -> int:
        return data.shape[-1] * (BLOCK if storage_format in ("nvfp4", "block-fp4") else 1)

    def stored_query(self, q: Tensor) -> Tensor | None:
        """What stored K meets in place of `q` `[B, Hq, n, D]`; None if it is q itself."""
        if self.q_transform is None:
            return None
        grouped = q.to(torch.float32).unflatten(1, (self.q_transform.shape[0], -1))
        with torch.autocast(q.device.type, enabled=False):
            return (grouped @ self.q_transform[:, None]).flatten(1, 2).to(q.dtype)

    def query_bias(self, q: Tensor) -> Tensor | None:
        """float32 `[B, Hq, n]`: `q · k_bias`, what the shift took from the score of stored K."""
        if self.k_bias is None:
            return None
        grouped = q.to(torch.float32).unflatten(1, (self.k_bias.shape[0], -1))
        return (grouped * self.k_bias[:, None, None, :]).sum(-1).flatten(1, 2)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that holds state, by name."""
        for name in _ROW_TENSORS + _HEAD_TENSORS:
            tensor = getattr(self, name, None)
            if tensor is not None:
                yield name, tensor

    def nbytes(self) -> int:
        """Bytes of all state."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors())

    def write(self, k: Tensor, v: Tensor, positions: Positions) -> Update:
        """Stores `k` `[B, H, n, D]` and `v` `[B, H, n, Dv]` as the last n tokens of `positions`, already advanced.

        Returns:
            What attention of these tokens' queries reads.
        """
        k, v = k.to(self.dtype), v.to(self.dtype)
        batch, _, num_new, _ = k.shape
        exact = self.recipe.exact_prefill and num_new > MAX_DECODE_TOKENS
        update = Update(
            self,
            positions,
            num_new,
            k_new=k if exact else None,
            v_new=v if exact else None,
            history=not self.empty,
            before=self._clone_rings(batch) if exact and not self.empty else None,
        )
        if self.empty:
            self._calibrate(k, v, positions)
        slots, exact_slots = positions.slots(batch, num_new, self.tokens, self.recipe.num_sink_tokens)
        if num_new > self.tokens:
            # Only a sliding layer gets here: what would be overwritten at once is not written.
            k, v, slots = k[:, :, -self.tokens :], v[:, :, -self.tokens :], slots[:, -self.tokens :]
            exact_slots = None if exact_slots is None else exact_slots[:, -self.tokens :]
        append(
            self.k_data,
            self.k_scales,
            self.v_data,
            self.v_scales,
            k,
            v,
            slots,
            self.k_global,
            self.v_global,
            k_bias=self.k_bias,
            k_transform=self.k_transform,
            k_exact=self.k_exact,
            v_exact=self.v_exact,
            exact_slots=None if self.k_exact is None else exact_slots,
            k_format=self.recipe.k_format,
            v_format=self.recipe.v_format,
            scale_rule=self.recipe.scale_rule,
        )
        self.empty = False
        return update

    def _calibrate(self, k: Tensor, v: Tensor, positions: Positions) -> None:
        """Chooses bias and global scales from the first tokens, padding left out."""
        batch, _, num_new, _ = k.shape
        index = torch.arange(num_new, device=k.device)
        real = positions.lengths[:batch, None] - num_new + index >= positions.starts[:batch, None]
        stored = k.to(torch.float32)
        if self.k_bias is not None and self.recipe.k_bias == "prompt":
            # The first token is unlike the rest: a mean over a handful says nothing, and no bias is safe.
            weights = real[:, None, :, None] if num_new >= MIN_BIAS_TOKENS else torch.zeros_like(real[:, None, :, None])
            count = weights.sum().clamp(min=1)
            finite = torch.where(weights & stored.isfinite(), stored, 0.0)
            self.k_bias.copy_(finite.sum((0, 2)) / count)
        if self.k_bias is not None:
            stored = stored - self.k_bias[:, None, :]
        if self.k_transform is not None:
            stored = stored @ self.k_transform
        self.k_global.copy_(choose_global_scale(stored, real))
        self.v_global.copy_(choose_global_scale(v, real))

    def _clone_rings(self, batch: int) -> Before:
        """Copies of what the next prefill overwrites: exact slots, and a sliding layer's whole ring; both are small."""

        def clone(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:batch].clone()

        ring = self.window > 0
        return Before(
            k_exact=clone(self.k_exact),
            v_exact=clone(self.v_exact),
            data=tuple(clone(t) for t in (self.k_data, self.k_scales, self.v_data, self.v_scales)) if ring else None,
        )

    def grow(self, tokens: int) -> None:
        """Makes room for `tokens` tokens a row; all is allocated before anything is given up."""
        grown = {}
        for name in ("k_data", "k_scales", "v_data", "v_scales"):
            old = getattr(self, name)
            if old is not None:
                batch, heads, _, dim = old.shape
                grown[name] = allocate((batch, heads, tokens, dim), old.dtype, old.device)
        for name, new in grown.items():
            new[:, :, : self.tokens].copy_(getattr(self, name))
        for name, new in grown.items():
            setattr(self, name, new)
        self.tokens = tokens

    def select(self, rows: Tensor) -> None:
        """Keeps rows `rows` (int64 `[B']`), in that order; in place where the number of rows stays."""
        selected = {}
        for name in _ROW_TENSORS:
            old = getattr(self, name)
            if old is not None:
                selected[name] = old.index_select(0, rows.to(old.device))
        for name, new in selected.items():
            old = getattr(self, name)
            if new.shape == old.shape:
                old.copy_(new)
            else:
                setattr(self, name, allocate(tuple(new.shape), new.dtype, new.device).copy_(new))

    def to(self, device: torch.device | str) -> None:
        """Moves all state."""
        for name, tensor in list(self.tensors()):
            setattr(self, name, tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Before:
    """State from before a prefill was written: exact slots, and `(k_data, k_scales, v_data, v_scales)` of a ring."""

    k_exact: Tensor | None
    v_exact: Tensor | None
    data: tuple[Tensor | None, ...] | None


@dataclass(frozen=True)
class Update:
    """The view of a layer that the queries of one `write` have.

    Attributes:
        num_new: tokens written, n.
        k_new, v_new: the exact new K and V, where they are a prefill.
        history: tokens had been stored before.
        before: state that the write replaced, where it is still needed.
    """

    storage: LayerStorage
    positions: Positions
    num_new: int
    k_new: Tensor | None
    v_new: Tensor | None
    history: bool
    before: Before | None

    @property
    def num_tokens(self) -> int:
        """Columns of a mask over this layer: a row's capacity, or its length where the cache grows."""
        return self.positions.host_length if self.positions.capacity is None else self.positions.capacity

    def attend(
        self,
        q: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = True,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
        window: int = -1,
    ) -> Tensor:
        """Attention of `q` `[B, Hq, n, D]` over all tokens stored so far; `[B, Hq, n, Dv]`, contiguous.

        `mask` has a column for each position (see `num_tokens`); with a mask, `causal` adds to it.
        """
        storage, positions = self.storage, self.positions
        batch = q.shape[0]
        window = storage.window if storage.window > 0 else window
        plain = softcap == 0.0 and sink_logits is None and not (0 < window < self.num_new) and not positions.padded
        if self.k_new is not None and self.v_new is not None and not self.history and plain:
            return F.scaled_dot_product_attention(
                q,
                self.k_new.to(q.dtype),
                self.v_new.to(q.dtype),
                attn_mask=self._mask_of_new(mask, causal, q),
                is_causal=mask is None and causal,
                scale=scale,
                enable_gqa=q.shape[1] != self.k_new.shape[1],
            )
        k_data, k_scales, v_data, v_scales = storage.k_data, storage.k_scales, storage.v_data, storage.v_scales
        k_exact, v_exact, exact_from = storage.k_exact, storage.v_exact, positions.exact_from
        if self.before is not None:
            k_exact, v_exact, exact_from = self.before.k_exact, self.before.v_exact, positions.exact_before
            if self.before.data is not None:
                k_data, k_scales, v_data, v_scales = self.before.data  # type: ignore[assignment]
        elif self.k_new is not None:
            k_exact = v_exact = None
        out: Tensor = attention(
            q,
            k_data,
            k_scales,
            v_data,
            v_scales,
            storage.k_global,
            storage.v_global,
            positions.lengths[:batch],
            starts=positions.starts[:batch] if positions.padded else None,
            k_new=self.k_new,
            v_new=self.v_new,
            k_exact=k_exact,
            v_exact=v_exact,
            exact_from=None if k_exact is None else exact_from[:batch],
            num_sink_tokens=0 if k_exact is None else storage.recipe.num_sink_tokens,
            q_stored=storage.stored_query(q),
            stored_bias=storage.query_bias(q),
            mask=mask,
            sink_logits=sink_logits,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            k_format=storage.recipe.k_format,
            v_format=storage.recipe.v_format,
        )
        return out

    def _mask_of_new(self, mask: Tensor | None, causal: bool, q: Tensor) -> Tensor | None:
        if mask is None:
            return None
        mask = mask[..., : self.num_new]
        if causal:
            lower = torch.ones(self.num_new, self.num_new, dtype=torch.bool, device=q.device).tril()
            mask = mask & lower if mask.dtype == torch.bool else mask.masked_fill(~lower, float("-inf"))
        return mask if mask.dtype == torch.bool else mask.to(q.dtype)

    def keys(self) -> Tensor:
        """K in the model's dtype, `[B, H, num_tokens, D]` in order of position; 0 where nothing is stored."""
        storage = self.storage
        k = values(storage.k_data, storage.k_scales, storage.k_global, storage.recipe.k_format)
        if storage.q_transform is not None:
            k = k @ storage.q_transform.transpose(-1, -2)
        if storage.k_bias is not None:
            k = k + storage.k_bias[:, None, :]
        return self._in_order(k, storage.k_exact, self.k_new)

    def values(self) -> Tensor:
        """V in the model's dtype, `[B, H, num_tokens, Dv]`, as `keys`."""
        storage = self.storage
        v = values(storage.v_data, storage.v_scales, storage.v_global, storage.recipe.v_format)
        return self._in_order(v, storage.v_exact, self.v_new)

    def _in_order(self, stored: Tensor, exact: Tensor | None, new: Tensor | None) -> Tensor:
        storage, positions = self.storage, self.positions
        lengths = positions.lengths[:, None].to(torch.int64)
        device, batch, spare = stored.device, stored.shape[0], self.num_tokens
        out = stored.new_zeros((batch, stored.shape[1], spare + 1, stored.shape[3]))

        def newest(slots: int) -> Tensor:
            return lengths - 1 - (lengths - 1 - torch.arange(slots, device=device)) % slots

        def place(x: Tensor, position: Tensor, valid: Tensor) -> None:
            index = torch.where(valid & (position < lengths), position, spare)[:, None, :, None]
            out.scatter_(2, index.expand(-1, x.shape[1], -1, x.shape[3]), x.to(out.dtype))

        position = newest(storage.tokens)
        place(stored, position, position >= 0)
        sinks, ring = storage.recipe.num_sink_tokens, positions.ring
        if exact is not None:
            position = positions.starts[:, None] + torch.arange(sinks, device=device)
            place(exact[:, :, :sinks], position, position >= 0)
        if exact is not None and ring:
            position = newest(ring)
            first = torch.maximum(positions.exact_from, positions.starts + sinks)[:, None]
            place(exact[:, :, sinks : sinks + ring], position, position >= first)
        if new is not None:
            position = lengths - self.num_new + torch.arange(self.num_new, device=device)
            place(new, position[: new.shape[0]], position[: new.shape[0]] >= 0)
        batch = batch if new is None else new.shape[0]
        return out[:batch, :, :spare].to(storage.dtype)
