"""One layer's quantised K and V: allocation, writing, reading, and every operation that moves its rows.

Shapes: B rows, H KV heads, Hq query heads, n new tokens, T tokens a row, D and Dv head sizes, E = S + R + 1 exact slots
(S sinks, a ring of R, one scratch slot).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import checks
from ..ops.append import append
from ..ops.attention import attention
from ..ops.dequantize import values
from ..ops.format.constants import BLOCK, E4M3_MAX, SCALE_MAX
from ..ops.format.rotation import largest_block
from ..ops.format.transform import KeyTransform
from ..ops.statistics import Stored, block_amax, set_channel_means
from ..recipe import LayerCalibration, Matrix, Recipe
from ..scales import scale_without_clipping, set_global_scales
from .buffers import Buffers, allocate
from .positions import RING_SLACK, Positions

MAX_DECODE_TOKENS = 16
"""Up to as many new tokens read their own K and V from the cache; more are a prefill and see each other exactly."""

MIN_BIAS_TOKENS = 8
"""Fewer first tokens (of the row with most) give no bias, and without one K is not rotated."""

ROW_TENSORS = ("k_data", "k_scales", "v_data", "v_scales", "k_exact", "v_exact")
_HEAD_TENSORS = ("k_global", "v_global", "k_bias", "v_bias", "k_factors", "k_order")


def whole_tiles(tokens: int) -> int:
    """Slots a row for `tokens` tokens: kernels are at their fastest where no tile (128 tokens at most) crosses the end
    of a row, or of a ring's lap."""
    return -(-tokens // 128) * 128


class LayerStorage(Buffers, nn.Module):
    """K and V of one layer in the formats of a recipe; why a module, see `NVFP4Layer`.

    Attributes:
        k_data, k_scales, v_data, v_scales: as `fp4kv::append` takes them, with one page of T tokens a row.
        k_global, v_global: float32 `[H]`, calibrated, or chosen from the first tokens and frozen until `reset`.
        k_bias, k_factors, k_order: as `fp4kv::append` and `fp4kv::attention` take them, or None.
        v_bias: float32 `[H, Dv]` or None.
        k_exact, v_exact: `[B, H, E, ·]` or None, in the model's dtype.
        empty: no token has been stored since the last reset.
        frozen: bias and scales stay, also for the first tokens after a reset.
        rotated: stored K is rotated (a prompt too short for a bias is not).
        v_scale_layout: order of V's block scales, as `fp4kv::append` takes it.
    """

    def __init__(self, recipe: Recipe, tokens: int, window: int = -1) -> None:
        super().__init__()
        self.recipe = recipe
        self.k_format, self.v_format = recipe.k_format, recipe.v_format
        self.scale_rule = recipe.scale_rule
        self.num_sink_tokens = recipe.num_sink_tokens
        self.tokens = tokens
        self.window = window
        self.empty = True
        self.frozen = False
        self.k_scales: Tensor | None = None
        self.v_scales: Tensor | None = None
        self.k_exact: Tensor | None = None
        self.v_exact: Tensor | None = None
        self.k_bias: Tensor | None = None
        self.v_bias: Tensor | None = None
        self.k_factors: Tensor | None = None
        self.k_order: Tensor | None = None
        self.rotated = False
        self.v_scale_layout = "linear"

    @staticmethod
    def ring_size(recipe: Recipe) -> int:
        """R of `recipe`."""
        return recipe.exact_window + RING_SLACK if recipe.exact_window else 0

    def allocate(self, k: Tensor, v: Tensor) -> None:
        """Allocates for K and V like `k` `[B, H, ·, D]` and `v` `[B, H, ·, Dv]` (shape, dtype and device are read).

        Raises:
            ValueError: a head size is not a multiple of 16, calibrated numbers are of another shape, or K is to be
                rotated where V is a view of it.
        """
        checks.head_dim(k.shape[-1], "K")
        checks.head_dim(v.shape[-1], "V")
        checks.floating(k, "K")
        recipe, device, heads = self.recipe, k.device, k.shape[1]
        self.like = torch.empty(0, dtype=torch.promote_types(k.dtype, v.dtype), device=device)
        self.head_dim, self.v_head_dim = k.shape[-1], v.shape[-1]
        self.k_data, self.k_scales = self._data(recipe.k_format, k)
        self.v_data, self.v_scales = self._data(recipe.v_format, v)
        # A scale that can be read before one is chosen.
        self.k_global = allocate((heads,), torch.float32, device).fill_(1)
        self.v_global = allocate((heads,), torch.float32, device).fill_(1)
        ring = self.ring_size(recipe)
        if ring or recipe.num_sink_tokens:
            slots = recipe.num_sink_tokens + ring + 1
            self.k_exact = allocate((k.shape[0], heads, slots, k.shape[-1]), self.dtype, device)
            self.v_exact = allocate((k.shape[0], heads, slots, v.shape[-1]), self.dtype, device)
        calibration = recipe.calibration[0] if recipe.calibration else LayerCalibration()
        if recipe.k_bias != "none":
            self.k_bias = allocate((heads, k.shape[-1]), torch.float32, device)
        if self.k_bias is not None and recipe.k_bias == "calibrated":
            self.k_bias.copy_(_calibrated(calibration.k_bias, (heads, k.shape[-1]), "k_bias"))
        if calibration.v_bias is not None:
            self.v_bias = allocate((heads, v.shape[-1]), torch.float32, device)
            self.v_bias.copy_(_calibrated(calibration.v_bias, (heads, v.shape[-1]), "v_bias"))
        if recipe.rotate_k or recipe.equalize_k:
            if not torch.compiler.is_compiling() and k.numel() and _overlap(k, v):
                raise ValueError(
                    "rotate_k and equalize_k do not apply where V is a view of K (MLA): give rotate_k=False, or a "
                    "recipe without them"
                )
            self.rotated = recipe.rotate_k
        if recipe.equalize_k:
            shape = (heads, k.shape[-1])
            self.k_factors = allocate(shape, torch.float32, device)
            self.k_factors.copy_(_calibrated(calibration.k_factors, shape, "k_factors"))
            if calibration.k_order is not None:
                self.k_order = allocate(shape, torch.int32, device)
                self.k_order.copy_(_calibrated(calibration.k_order, shape, "k_order"))
        for name in ("k_scale", "v_scale"):
            numbers = getattr(calibration, name)
            if numbers is not None and len(numbers) not in (1, heads):
                raise ValueError(f"calibrated {name} must be one number or one for each of {heads} KV heads")

    def allocate_pages(self, k: Tensor, v: Tensor, num_pages: int, v_scale_layout: str = "linear") -> None:
        """As `allocate`, with `num_pages` pages that rows share; exact copies stay by row."""
        self.allocate(k, v)
        checks.scale_layout(v_scale_layout, self.v_scales)
        self.v_scale_layout = v_scale_layout
        self.k_data, self.k_scales = self._data(self.recipe.k_format, k, num_pages)
        self.v_data, self.v_scales = self._data(self.recipe.v_format, v, num_pages)
        self.empty = False

    def rows(self, row: int, empty: bool) -> LayerStorage:
        """The same storage seen as one row of a pool; what is written is shared."""
        view = copy.copy(self)
        view.k_exact = None if self.k_exact is None else self.k_exact[row : row + 1]
        view.v_exact = None if self.v_exact is None else self.v_exact[row : row + 1]
        view.empty = empty
        view.frozen = True
        return view

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.like.dtype

    def k_rotation(self) -> int:
        """Channels that are rotated together, 0 where K is not; with an order, which makes blocks alike, a block's."""
        if not self.rotated:
            return 0
        return largest_block(self.head_dim) if self.k_order is None else BLOCK

    @property
    def transform(self) -> KeyTransform:
        """What stored K is of K."""
        return KeyTransform(self.k_bias, self.k_factors, self.k_order, self.k_rotation())

    def _data(self, storage_format: str, x: Tensor, pages: int | None = None) -> tuple[Tensor, Tensor | None]:
        batch, heads, _, dim = x.shape
        lead = (batch if pages is None else pages, heads, self.tokens)
        if storage_format == "exact":
            return allocate((*lead, dim), self.dtype, x.device), None
        if storage_format == "fp8":
            return allocate((*lead, dim), torch.uint8, x.device), None
        blocks = (*lead, dim // BLOCK)
        return allocate(blocks, torch.int64, x.device), allocate(blocks, torch.uint8, x.device)

    @property
    def batch_size(self) -> int:
        return self.k_data.shape[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that holds state, by name."""
        for name in ROW_TENSORS + _HEAD_TENSORS:
            tensor = getattr(self, name, None)
            if tensor is not None:
                yield name, tensor

    def nbytes(self) -> int:
        """Bytes of all state."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors())

    @property
    def description(self) -> str:
        """The formats of K and V, and the exact copies, for `repr`."""
        recipe = self.recipe
        formats = f"K {recipe.k_format}, V {recipe.v_format}"
        if not recipe.exact_window and not recipe.num_sink_tokens:
            return formats
        return f"{formats}, first {recipe.num_sink_tokens} and last {recipe.exact_window} exact"

    def check(self, k: Tensor, v: Tensor, rows: int) -> None:
        """Raises unless K and V like `k` and `v` `[rows, H, n, ·]` can be stored here."""
        checks.floating(k, "K")
        checks.floating(v, "V")
        expected = (self.k_data.shape[1], self.head_dim, self.v_head_dim)
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or (k.shape[1], k.shape[3], v.shape[3]) != expected:
            raise ValueError(
                f"this layer holds {expected[0]} KV heads of size {expected[1]} (K) and {expected[2]} (V); "
                f"got K {list(k.shape)} and V {list(v.shape)}"
            )
        if not k.device == v.device == self.k_data.device:
            raise ValueError(
                f"this layer is on {self.k_data.device}, K on {k.device} and V on {v.device}: move the cache with "
                "to(device), or an offloaded layer back with prefetch()"
            )
        if k.shape[0] != rows:
            raise ValueError(f"the cache holds {rows} rows, got {k.shape[0]}; reset() it first")

    def write(self, k: Tensor, v: Tensor, positions: Positions) -> Update:
        """Stores `k` `[B, H, n, D]` and `v` `[B, H, n, Dv]` as the last n tokens of `positions`, already advanced.

        Returns:
            What attention of these tokens' queries reads.
        """
        k, v = k.to(self.like.dtype), v.to(self.like.dtype)
        batch, _, num_new, _ = k.shape
        tokens = self.k_data.shape[2]
        # A sliding layer's ring has room for the windows of MAX_DECODE_TOKENS queries, not for those of more.
        exact = num_new > MAX_DECODE_TOKENS and (self.recipe.exact_prefill or self.window > 0)
        update = Update(
            self,
            positions,
            num_new,
            k_new=k if exact else None,
            v_new=v if exact else None,
            history=not self.empty,
            before=self._clone_rings(batch) if exact and not self.empty else None,
        )
        if self.empty and not self.frozen and num_new:
            self.calibrate(k, v, positions)
        slots, exact_slots = positions.slots(batch, num_new, tokens, self.num_sink_tokens)
        if num_new > tokens and positions.block_table is None:
            # Only a sliding layer gets here: what would be overwritten at once is not written.
            k, v, slots = k[:, :, -tokens:], v[:, :, -tokens:], slots[:, -tokens:]
            exact_slots = None if exact_slots is None else exact_slots[:, -tokens:]
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
            v_bias=self.v_bias,
            k_factors=self.k_factors,
            k_order=self.k_order,
            k_rotation=self.k_rotation(),
            k_exact=self.k_exact,
            v_exact=self.v_exact,
            exact_slots=None if self.k_exact is None else exact_slots,
            skip_negative=positions.block_table is not None,
            k_format=self.k_format,
            v_format=self.v_format,
            scale_rule=self.scale_rule,
            v_scale_layout=self.v_scale_layout,
        )
        if num_new and self.empty:
            self.empty = False
        return update

    def calibrate(self, k: Tensor, v: Tensor, positions: Positions) -> None:
        """Chooses bias and global scales from the first tokens, padding left out; calibrated ones stay."""
        batch, _, num_new, _ = k.shape
        first = positions.first_visible(batch, num_new)
        if self.k_bias is not None and self.recipe.k_bias == "prompt":
            # An `if`, since a comparison of a symbolic number is no bool: compiled code is one or the other.
            visible = num_new - positions.shared_padding
            if visible >= MIN_BIAS_TOKENS:
                # The first tokens are unlike the rest, and sinks are kept exact anyway.
                sinks = self.recipe.num_sink_tokens if visible >= MIN_BIAS_TOKENS + self.recipe.num_sink_tokens else 0
                set_channel_means(self.k_bias, k, positions.first_visible(batch, num_new, sinks))
                self.rotated = self.recipe.rotate_k
            else:
                self.k_bias.zero_()
                self.rotated = False
        calibration = self.recipe.calibration[0] if self.recipe.calibration else LayerCalibration()
        unknown = []
        for stored, known in (
            (self._stored_k(k), calibration.k_scale),
            (Stored(v, self.v_format, self.v_global, self.v_bias), calibration.v_scale),
        ):
            if known is None:
                unknown.append(stored)
                continue
            scale = stored.global_scale
            scale.copy_(torch.tensor(known).expand(scale.shape))
            if SCALE_MAX[self.v_scale_layout] < E4M3_MAX:
                # A given scale may leave no head-room, and block scales saturate earlier here.
                sizes = block_amax(stored.x, first, stored.bias, stored.rotation)
                scale.copy_(torch.maximum(scale, scale_without_clipping(sizes)))
        if unknown:
            set_global_scales(first, *unknown)

    def _stored_k(self, k: Tensor) -> Stored:
        if self.k_factors is None and self.k_order is None:
            return Stored(k, self.k_format, self.k_global, self.k_bias, self.k_rotation())
        return Stored(self.transform.key(k), self.k_format, self.k_global)

    def _clone_rings(self, batch: int) -> Before:
        """Copies of what the next prefill overwrites: exact slots, and a sliding layer's whole ring; both are small."""

        def clone(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:batch].clone()

        data = None
        if self.window > 0:
            data = self.k_data[:batch].clone(), clone(self.k_scales), self.v_data[:batch].clone(), clone(self.v_scales)
        return Before(clone(self.k_exact), clone(self.v_exact), data)

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
        self._replace(tokens=tokens, **grown)

    def select(self, rows: Tensor, batch: int) -> None:
        """Keeps rows `rows` (int64 `[B']`) of the first `batch`, in that order; in place where the number of rows
        stays."""
        selected = {}
        for name in ROW_TENSORS:
            old = getattr(self, name)
            if old is not None:
                selected[name] = old[:batch].index_select(0, rows.to(old.device))
        if len(rows) == self.batch_size:
            for name, new in selected.items():
                getattr(self, name).copy_(new)
            return
        self._replace(
            **{name: allocate(tuple(new.shape), new.dtype, new.device).copy_(new) for name, new in selected.items()}
        )

    def move_to(self, device: torch.device | str) -> None:
        """Moves all state."""
        self._replace(
            **{
                name: allocate(tuple(tensor.shape), tensor.dtype, torch.device(device)).copy_(tensor)
                for name, tensor in self.tensors()
            }
        )

    def _replace(self, **attributes: Any) -> None:
        """Sets all attributes in one step, so that an interrupt cannot leave buffers that do not go together."""
        vars(self).update(attributes)


def _overlap(k: Tensor, v: Tensor) -> bool:
    """Whether a token's V has elements in common with its K in memory."""
    first, other = k.data_ptr(), v.data_ptr()
    return (
        first != 0 and first < other + v.shape[-1] * v.element_size() and other < first + k.shape[-1] * k.element_size()
    )


def _calibrated(numbers: Matrix | tuple[tuple[int, ...], ...] | None, shape: tuple[int, int], name: str) -> Tensor:
    """float32 `shape` of calibrated `numbers`; ValueError where they have another shape."""
    tensor = torch.tensor(numbers, dtype=torch.float32)
    if tensor.shape != shape:
        raise ValueError(f"calibrated {name} must be {list(shape)} for this layer, got {list(tensor.shape)}")
    return tensor


@dataclass(frozen=True)
class Before:
    """State from before a prefill was written: exact slots, and `(k_data, k_scales, v_data, v_scales)` of a ring."""

    k_exact: Tensor | None
    v_exact: Tensor | None
    data: tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None


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

        Fewer queries than new tokens are those of the last ones: layers that share K and V may leave the others out.
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
                is_causal=mask is None and causal and q.shape[2] == self.num_new,
                scale=scale,
                enable_gqa=q.shape[1] != self.k_new.shape[1],
            )
        missing = 0 if self.k_new is None else self.num_new - q.shape[2]
        if missing:
            # The op takes a query for each new token.
            q = F.pad(q, (0, 0, missing, 0))
            mask = mask if mask is None or mask.shape[-2] == 1 else F.pad(mask, (0, 0, missing, 0))
        k_data, k_scales, v_data, v_scales = self._data()
        k_exact, v_exact, exact_from = storage.k_exact, storage.v_exact, positions.exact_from
        if self.before is not None:
            k_exact, v_exact, exact_from = self.before.k_exact, self.before.v_exact, positions.exact_before
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
            block_table=positions.block_table,
            k_new=self.k_new,
            v_new=self.v_new,
            k_exact=k_exact,
            v_exact=v_exact,
            exact_from=exact_from[:batch] if k_exact is not None and positions.ring else None,
            num_sink_tokens=0 if k_exact is None else storage.num_sink_tokens,
            k_bias=storage.k_bias,
            k_factors=storage.k_factors,
            k_order=storage.k_order,
            k_rotation=storage.k_rotation(),
            v_bias=storage.v_bias,
            mask=mask,
            sink_logits=sink_logits,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            k_format=storage.k_format,
            v_format=storage.v_format,
            v_scale_layout=storage.v_scale_layout,
        )
        return out[:, :, missing:].contiguous() if missing else out

    def _mask_of_new(self, mask: Tensor | None, causal: bool, q: Tensor) -> Tensor | None:
        queries, tokens = q.shape[2], self.num_new
        if mask is None and (queries == tokens or not causal):
            return None
        lower = torch.ones(queries, tokens, dtype=torch.bool, device=q.device).tril(tokens - queries)
        if mask is None:
            return lower
        mask = mask[..., :tokens]
        if causal:
            mask = mask & lower if mask.dtype == torch.bool else mask.masked_fill(~lower, float("-inf"))
        return mask if mask.dtype == torch.bool else mask.to(q.dtype)

    def keys(self) -> Tensor:
        """K in the model's dtype, `[B, H, num_tokens, D]` in order of position; 0 where nothing is stored."""
        storage = self.storage
        k_data, k_scales, _, _ = self._data()
        k = values(k_data, k_scales, storage.k_global, storage.recipe.k_format)
        k = storage.transform.original(k)
        return self._in_order(k, storage.k_exact if self.before is None else self.before.k_exact, self.k_new)

    def values(self) -> Tensor:
        """V in the model's dtype, `[B, H, num_tokens, Dv]`, as `keys`."""
        storage = self.storage
        _, _, v_data, v_scales = self._data()
        v = values(v_data, v_scales, storage.v_global, storage.recipe.v_format)
        if storage.v_bias is not None:
            v = v + storage.v_bias[:, None, :]
        return self._in_order(v, storage.v_exact if self.before is None else self.before.v_exact, self.v_new)

    def _data(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """`(k_data, k_scales, v_data, v_scales)` that the queries read: a ring as it was before the write."""
        if self.before is not None and self.before.data is not None:
            return self.before.data
        return self.storage.k_data, self.storage.k_scales, self.storage.v_data, self.storage.v_scales

    def _in_order(self, stored: Tensor, exact: Tensor | None, new: Tensor | None) -> Tensor:
        storage, positions = self.storage, self.positions
        if positions.block_table is not None:
            raise TypeError('a paged cache is not dequantised: use attn_implementation="sdpa" or "fp4kv"')
        rows = stored.shape[0] if new is None else new.shape[0]
        lengths = positions.lengths[:rows, None].to(torch.int64)
        end, exact_from = lengths, positions.exact_from
        if self.before is not None:
            end, exact_from = lengths - self.num_new, positions.exact_before
        # The largest of a block may come back a little larger: in float16 it would be infinite.
        limit = torch.finfo(storage.dtype).max
        stored, device, spare = stored.clamp(-limit, limit), stored.device, self.num_tokens
        out = stored.new_zeros((rows, stored.shape[1], spare + 1, stored.shape[3]))

        def newest(slots: int) -> Tensor:
            return end - 1 - (end - 1 - torch.arange(slots, device=device)) % slots

        def place(x: Tensor, position: Tensor, valid: Tensor) -> None:
            # A row that overflowed has positions beyond the last column.
            index = torch.where(valid, position, spare).clamp(max=spare)[:, None, :, None]
            out.scatter_(2, index.expand(-1, x.shape[1], -1, x.shape[3]), x[:rows].to(out.dtype))

        position = newest(storage.tokens)
        place(stored, position, position >= 0)
        sinks, ring = storage.recipe.num_sink_tokens, positions.ring
        starts = positions.starts[:rows, None]
        if exact is not None:
            position = starts + torch.arange(sinks, device=device)
            place(exact[:, :, :sinks], position, position < end)
        if exact is not None and ring:
            position = newest(ring)
            first = torch.maximum(exact_from[:rows, None], starts + sinks)
            place(exact[:, :, sinks : sinks + ring], position, position >= first)
        if new is not None:
            position = lengths - self.num_new + torch.arange(self.num_new, device=device)
            place(new, position, position >= 0)
        return out[:, :, :spare].to(storage.dtype)
