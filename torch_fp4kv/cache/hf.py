"""`NVFP4Cache`: the Hugging Face cache that keeps K and V quantised. Needs transformers 5.17 or later."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..ops import checks
from ..ops.format.constants import BLOCK, E4M3_MAX_BITS
from ..recipe import LayerCalibration, Recipe, get_recipe
from . import attention_interface, serialize
from .handle import KVHandle
from .positions import RING_SLACK, Positions
from .shard import Shard
from .storage import LayerStorage, Update, whole_tiles

attention_interface.register()

SMALLEST_NORMAL_BITS = 8
"""e4m3 bits of 2^-6; below, a block scale has fewer than four significant bits."""

_DAMAGED = "an operation on the cache ended halfway, and rows or layers differ: reset() the cache"

_GROWTH = 256
"""Tokens by which a growing cache is enlarged at least; it also grows by half, so copies stay amortised."""


class NVFP4Layer(CacheLayerMixin, nn.Module):
    """One layer's part of an `NVFP4Cache`.

    A module for the sake of compiled code: Dynamo looks at one tag to see that nothing in it was replaced, where it
    would look at each attribute of other objects before each token. So compiled code, which runs the cache's `update`,
    does not write here, and reads nothing but tensors, strings, bools and numbers that a model has but one of.

    Args:
        cache: the cache it belongs to, which stores tokens and holds the positions.
        index: its place in the cache.
        recipe: how K and V are kept.
        max_cache_len: most tokens a row can hold; None for a layer that grows.
        sliding_window: tokens that a query of this layer sees, itself included; -1 for all.
        kv_heads: as `configured_kv_heads` says.
    """

    is_croppable = True

    def __init__(
        self,
        cache: NVFP4Cache,
        index: int,
        recipe: Recipe,
        max_cache_len: int | None,
        sliding_window: int = -1,
        kv_heads: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.is_initialized = False
        self.cache = cache
        self.index = index
        self.kv_heads = kv_heads
        self.max_cache_len = max_cache_len
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window > 0
        self.is_compileable = max_cache_len is not None
        self.grows = max_cache_len is None and not self.is_sliding
        tokens = max_cache_len or 0
        if self.is_sliding:
            tokens = min(tokens or sliding_window + RING_SLACK, sliding_window + RING_SLACK)
        self.storage = LayerStorage(recipe, whole_tiles(tokens), sliding_window)
        # Which of the cache's positions are the layer's; None until it has buffers.
        self.group: int | None = None
        self._view: Update | None = None
        self.leads = False
        # Updates since the last reset, to be as many in each layer.
        self.calls = 0

    @property
    def positions(self) -> Positions | None:
        """Where the rows stand, shared with other layers; None until the layer has buffers."""
        return self.cache.layer_positions(self.index)

    @property
    def batch_size(self) -> int:
        """Rows in use."""
        return 0 if self.positions is None else self.positions.rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for the batch, heads, dtype and device of `key_states` and `value_states` `[B, H, n, ·]`."""
        # Until all is there: an allocation that fails leaves buffers that do not go together.
        self.is_initialized = False
        if self.storage.tokens == 0:
            self.storage.tokens = _round_up(key_states.shape[2])
        self.storage.allocate(key_states, value_states)
        self.cache.set_positions(self, key_states.shape[0], key_states.device)
        self.device = key_states.device
        self.dtype = self.storage.dtype
        self.num_heads = key_states.shape[1]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As `NVFP4Cache.update`."""
        stored: tuple[Any, Any] = self.cache.update(key_states, value_states, self.index)
        return stored

    def make_room(self, k: Tensor, v: Tensor) -> None:
        """Allocates, unless the buffers do for first tokens `k` and `v` `[B, H, n, ·]`."""
        if not self.is_initialized or self._outgrown(k, v):
            self.lazy_initialization(k, v)

    @property
    def keys(self) -> Any:
        """K of all that is stored, as `update` returns it: what cross-attention reads after its first call. None while
        the layer is empty."""
        whole = self._whole()
        if whole is None or not self.cache.materialize:
            return whole and KVHandle(whole, self.batch_size, is_key=True)
        return whole.keys()[: self.batch_size]

    @property
    def values(self) -> Any:
        """V, as `keys`."""
        whole = self._whole()
        if whole is None or not self.cache.materialize:
            return whole and KVHandle(whole, self.batch_size, is_key=False)
        return whole.values()[: self.batch_size]

    def _whole(self) -> Update | None:
        """The view of queries that are not among the tokens stored; the same one for K and V."""
        if self.storage.empty or self.positions is None:
            return None
        if self._view is None or self._view.positions is not self.positions:
            self._view = Update(self.storage, self.positions, 0, None, None, history=True, before=None)
        return self._view

    def _outgrown(self, k: Tensor, v: Tensor) -> bool:
        """The buffers don't do for K and V like `k` and `v`: more rows, another device, a dtype of more values."""
        dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), self.storage.dtype)
        assert self.positions is not None
        rows = min(self.storage.batch_size, self.positions.batch_size)
        devices = {self.device, self.storage.k_data.device, self.positions.lengths.device}
        # Positions of its own has a layer that others left behind when a call ended halfway.
        alone = all(self.positions is not known for known in self.cache.all_positions())
        return alone or k.shape[0] > rows or {k.device} != devices or dtype != self.storage.dtype

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `NVFP4Cache.get_mask_sizes`."""
        return self.cache.get_mask_sizes(query_length, self.index)

    def get_seq_length(self) -> Any:
        """As `NVFP4Cache.get_seq_length`."""
        return self.cache.get_seq_length(self.index)

    def get_max_length(self) -> int:
        """Most tokens a row can hold; -1 where the cache grows."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `|tokens_to_remove|` tokens, given as a negative number as transformers does."""
        if self.positions is not None and self.leads:
            self.positions.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Empties the layer; buffers and their addresses stay."""
        self.storage.empty = True
        self.calls = 0
        if self.positions is not None and self.leads:
            self.positions.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Not by itself: rows are the cache's, which has it for all layers."""
        self.cache.reorder_cache(beam_idx)

    def offload(self) -> None:
        """Moves what is stored to the CPU."""
        if self.is_initialized:
            self.storage.move_to("cpu")

    def prefetch(self) -> None:
        """Moves what is stored back to the layer's device."""
        if self.is_initialized and self.storage.k_data.device != self.device:
            self.storage.move_to(self.device)


class NVFP4Cache(Cache):
    """A KV cache in NVFP4 for any Hugging Face decoder: `model.generate(**inputs, past_key_values=NVFP4Cache(config))`.

    Args:
        config: the model's config.
        max_cache_len: most tokens a row can hold. Given, the cache is static: made for `torch.compile` and CUDA graphs
            (`generate` compiles decoding on a GPU by itself). Without it the cache grows, for eager use.
        recipe: name of a recipe or a `Recipe`; see `torch_fp4kv.recipes()` and docs/recipes.md.
        materialize: `update` returns dequantised tensors, for models that do more with K and V than attend.
        tp_rank, tp_size: this rank and the number of ranks of a tensor-parallel model, each with a cache of its own
            heads. Needed where numbers were calibrated for all heads, where there are fewer KV heads than ranks, and by
            `export_blocks` and `import_blocks`.
        **overrides: fields of `Recipe` to replace, such as `exact_window=128` or `layers={"sliding": "bf16"}`.

    Raises:
        ValueError: unknown recipe, one that needs a calibration it has not or has one for another number of layers,
            `max_cache_len` not positive, `tp_rank` not below `tp_size`, or a layer type that cannot be kept this way.
        TypeError: `config` or `max_cache_len` is of another type.
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int | None = None,
        recipe: str | Recipe = "nvfp4",
        materialize: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        **overrides: Any,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config must be a model's config (model.config), got {type(config).__name__}")
        if max_cache_len is not None:
            checks.count(max_cache_len, "max_cache_len")
            max_cache_len = int(max_cache_len)
        self.recipe = get_recipe(recipe, **overrides)
        self.materialize = materialize
        self._starts: Tensor | None = None
        # Padding that was found in a call's mask, not said by `set_padding`, is that call's alone: the next one forgets
        # it if this one tried to store its first tokens and did not.
        self._padding_noted = self._padding_tried = False
        self._positions: dict[tuple[torch.device, int], Positions] = {}
        self._capacity = max_cache_len
        # Whether all calls since the last reset are in `calls`: compiled code does not count.
        self._counted = True
        # The last mask was compared with lengths, and none exceeded the capacity.
        self._lengths_seen = False
        self._saturation_reported = False
        self.damaged = False
        self.shard = Shard(tp_rank, tp_size)
        config = config.get_text_config(decoder=True)
        kinds, configs = layer_kinds(config), layer_configs(config)
        # The last layers of some models read K and V of earlier ones and store none.
        self._num_storing = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
        self.recipe.check_layers(len(kinds))
        layers = [
            NVFP4Layer(
                self,
                index,
                self.shard.of(self.recipe.for_layer(index, kind)),
                max_cache_len,
                window,
                configured_kv_heads(configs[index]),
            )
            for index, (kind, window) in enumerate(kinds)
        ]
        # What layers share, at the place that a layer calls its `group`: compiled code would compare one and the same
        # object in each layer with that of the first.
        self._groups: list[Positions | None] = [None] * len(layers)
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        kept = " | ".join(dict.fromkeys(layer.storage.description for layer in self.layers))
        capacity = self.layers[0].max_cache_len
        room = "growing" if capacity is None else f"max_cache_len={capacity}"
        held = f"{len(self.rows)} rows of {int(self.get_seq_length())} tokens" if self.rows else "empty"
        held = "damaged, reset() it" if self.damaged else held
        return f"NVFP4Cache({len(self.layers)} layers, {kept}; {room}, {held}, {self.nbytes() / 2**20:.2f} MiB)"

    def set_positions(self, layer: NVFP4Layer, batch: int, device: torch.device) -> None:
        """Gives `layer` the positions that layers on `device` with such a ring share, for `batch` rows or more; the
        layer that asks first leads, that is advances them."""
        ring = LayerStorage.ring_size(layer.storage.recipe)
        known = self._positions.get((device, ring))
        if known is not None and known.batch_size >= batch:
            layer.leads = layer.leads and known is layer.positions
            self._join(layer, known)
            return
        positions = Positions(batch, layer.max_cache_len, ring, device)
        self._apply_padding(positions)
        layer.leads = True
        self._join(layer, positions)
        self._positions[device, ring] = positions

    def _join(self, layer: NVFP4Layer, positions: Positions) -> None:
        """Makes `positions` those of `layer`."""
        taken = {other.group for other in self.layers if other is not layer}
        same = [i for i, known in enumerate(self._groups) if known is positions]
        layer.group = same[0] if same else min(set(range(len(self.layers))) - taken)
        self._groups[layer.group] = positions

    def layer_positions(self, index: int) -> Positions | None:
        """Where the rows of layer `index` stand; None until it has buffers."""
        group = self.layers[index].group
        return None if group is None else self._groups[group]

    def all_positions(self) -> list[Positions]:
        """Each distinct set of positions: one for every device and ring size."""
        return list(self._positions.values())

    def forget_positions(self) -> None:
        """The layers initialised next get positions of their own batch size."""
        self._positions.clear()

    @property
    def rows(self) -> list[int]:
        """Rows that hold tokens."""
        stored = [layer.batch_size for layer in self.layers if not layer.storage.empty]
        return list(range(stored[0])) if stored else []

    def check_whole(self, row: int) -> None:
        """Raises ValueError if `row` holds no tokens, and RuntimeError if its layers hold different ones."""
        if row not in self.rows:
            raise ValueError(f"row {row} is not in use; rows in use: {self.rows}")
        storing = self.layers[: self._num_storing]
        if self.damaged:
            raise RuntimeError(_DAMAGED)
        uneven = self._counted and len({layer.calls for layer in storing}) > 1
        if uneven or any(layer.storage.empty for layer in storing):
            raise RuntimeError("a call of the model ended halfway, and layers hold different tokens: reset() the cache")

    def save(self, path: str | Path) -> None:
        """Writes what is stored to one safetensors file, to the bit; see `load`.

        Raises:
            ValueError: nothing has been stored yet.
            RuntimeError: an earlier call ended halfway, so that layers differ.
        """
        serialize.save(self, path)

    def load(self, path: str | Path, device: torch.device | str | None = None) -> None:
        """Takes over what `save` wrote, in a cache of the same layers, recipe and capacity.

        Args:
            device: where the layers go that have no buffers yet; default the CPU.

        Raises:
            ValueError: the file is truncated, altered, foreign or of another version, or does not go with this cache.
                Nothing was changed.
        """
        serialize.load(self, path, device)

    def set_padding(self, attention_mask: Tensor) -> None:
        """Tells the cache which tokens of the prompt are left padding, before the first `update`.

        Args:
            attention_mask: `[B, n]`, 0 for padding on the left of each row. Padding is then left out of statistics,
                and each row keeps *its* first tokens exact.

        Raises:
            ValueError: a row has padding elsewhere than on the left, the mask is not two-dimensional, or tokens are
                stored already. If the first tokens are of another number of rows, `update` raises it.
        """
        if attention_mask.ndim != 2:
            raise ValueError(f"set_padding takes a mask [B, n], got shape {list(attention_mask.shape)}")
        if not self.is_empty:
            raise ValueError("set_padding comes before the first tokens: the cache holds some; reset() it first")
        visible = attention_mask.to(torch.bool)
        starts = (~visible).sum(-1)
        index = torch.arange(visible.shape[-1], device=visible.device)
        if bool((visible != (index >= starts[:, None])).any()):
            raise ValueError("set_padding takes padding on the left only; a row of the mask has a 0 after a 1")
        self._starts = starts
        self._padding_noted = self._padding_tried = False
        for positions in self._positions.values():
            self._apply_padding(positions)

    def check_padding(self, rows: int) -> None:
        """Raises ValueError if `set_padding` was given a mask of another number of rows."""
        if self._starts is not None and self._starts.shape[0] != rows:
            raise ValueError(
                f"set_padding was given {self._starts.shape[0]} rows, the first tokens have {rows}; with beams or "
                "several sequences a prompt, repeat the mask's rows as generate does"
            )

    def _apply_padding(self, positions: Positions) -> None:
        if self._starts is not None and self._starts.shape[0] <= positions.batch_size:
            positions.set_starts(self._starts)

    def needs_no_mask(self, attention_mask: Tensor | None, q_length: int) -> bool:
        """Whether attention of the next `q_length` tokens sees all that it may without `attention_mask` `[B, n]`.

        True without a mask, and for one that hides the padding on the left of the prompt and nothing else; that of an
        empty cache is noted. A mask is read on the host, so compiled code keeps its mask.
        """
        if not torch.compiler.is_compiling() and self._padding_tried and self.is_empty:
            self._starts = None
            self._padding_noted = self._padding_tried = False
            for positions in self._positions.values():
                positions.set_starts(torch.zeros_like(positions.starts))
        if attention_mask is None:
            return True
        if torch.compiler.is_compiling():
            return False
        if not self.is_empty:
            positions = self.all_positions()[0]
            needless = positions.mask_is_starts(attention_mask.to(positions.starts.device), q_length)
            self._lengths_seen = True
            return needless
        if attention_mask.shape[-1] != q_length:
            return False
        try:
            self.set_padding(attention_mask)
        except ValueError:
            return False
        self._padding_noted = True
        return True

    @property
    def is_empty(self) -> bool:
        """No token has been stored since the last reset."""
        return all(layer.storage.empty for layer in self.layers)

    def reset(self) -> None:
        """Empties the cache; buffers and their addresses stay, scales are chosen anew."""
        super().reset()
        self._starts = None
        self._padding_noted = self._padding_tried = False
        self._counted = True
        self.damaged = False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Quantises and stores `key_states` `[B, H, n, D]` and `value_states` `[B, H, n, Dv]` in layer `layer_idx`, in
        place.

        Returns:
            Handles for K and V that attention reads, or tensors where the cache was made with `materialize=True`.

        Raises:
            ValueError: the tokens don't fit, or shapes don't go with what is stored; nothing was written.
            RuntimeError: a gradient would be recorded, or an earlier call ended halfway.
        """
        attention_interface.note_cache(None)
        if not torch.compiler.is_compiling():
            self._padding_tried = self._padding_noted
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "a quantised KV cache is for inference, and K or V requires a gradient: "
                "call the model under torch.no_grad() or torch.inference_mode()"
            )
        layer = self.layers[layer_idx]
        key_states = self.shard.own(key_states, layer.kv_heads)
        value_states = self.shard.own(value_states, layer.kv_heads)
        storage, batch, num_new = layer.storage, key_states.shape[0], key_states.shape[2]
        if storage.empty:
            self.check_padding(batch)
            layer.make_room(key_states, value_states)
        positions = self._groups[layer.group]
        assert positions is not None
        storage.check(key_states, value_states, batch if storage.empty else positions.rows)
        if layer.leads:
            positions.check_room(num_new)
        self._check_turn(layer, positions)
        if layer.grows:
            length = positions.host_length + (num_new if layer.leads else 0)
            if length > storage.tokens:
                storage.grow(_round_up(max(length, storage.tokens * 3 // 2)))
        if layer.leads:
            # Counted first: whatever ends this call from here on, the next one sees that it did.
            if not torch.compiler.is_compiling():
                positions.calls += 1
            positions.rows = batch
            positions.advance(num_new)
        update = storage.write(key_states, value_states, positions)
        if not torch.compiler.is_compiling():
            layer.calls += 1
        if self.materialize:
            return update.keys()[:batch], update.values()[:batch]
        return KVHandle(update, batch, is_key=True), KVHandle(update, batch, is_key=False)

    def _check_turn(self, layer: NVFP4Layer, positions: Positions) -> None:
        """Raises RuntimeError unless each layer before `layer` stored these tokens, and this one all earlier ones."""
        if self.damaged:
            raise RuntimeError(_DAMAGED)
        if torch.compiler.is_compiling():
            self._counted = False
        if not self._counted:
            return
        before = positions.calls - (not layer.leads)
        if layer.calls != before:
            raise RuntimeError(
                f"this layer stored tokens {layer.calls} times before, the first layer {before} times: a "
                "call of the model ended halfway (reset() the cache), or the model stores twice a layer (an "
                "encoder-decoder takes EncoderDecoderCache(NVFP4Cache(config), NVFP4Cache(config)))"
            )

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """`(columns, offset)` of a mask: a column for each position, from 0."""
        if not self.materialize:
            attention_interface.note_cache(self)
        if not torch.compiler.is_compiling():
            for positions in () if self._lengths_seen else self._positions.values():
                positions.poll()
            self._lengths_seen = False
        if self._capacity is not None:
            return self._capacity, 0
        known = self.layer_positions(layer_idx)
        return (0 if known is None else known.host_length) + query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens stored: an int where the cache grows, else an int32 `[]` tensor (compiled code needs one), which goes
        on to follow the cache: keep an `int` of it."""
        positions = self.layer_positions(layer_idx)
        if positions is None:
            return 0
        return positions.host_length if self._capacity is None else positions.lengths[0]

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `|tokens_to_remove|` tokens of every row, given as a negative number as transformers does.

        Raises:
            TypeError: it is no integer.
            ValueError: the number is positive.
            RuntimeError: a sliding layer has overwritten tokens that would be seen again: its ring holds its window
                and 16 tokens, rounded up to a multiple of 128. Nothing was dropped.
        """
        tokens_to_remove = operator.index(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to drop, got {tokens_to_remove}")
        for index, layer in enumerate(self.layers):
            if not layer.is_sliding or layer.positions is None:
                continue
            window, tokens = layer.sliding_window, layer.storage.tokens
            if not layer.positions.can_crop(-tokens_to_remove, window, tokens):
                raise RuntimeError(
                    f"layer {index} keeps its last {tokens} tokens and sees {window}, so at most {tokens - window} "
                    f"can be dropped, got {-tokens_to_remove}; nothing was dropped"
                )
        with self.changing():
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes the old row `beam_idx[i]`; errors as in `batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keeps rows `indices` (integers, or a bool for each row), in that order.

        Raises:
            IndexError: a row is not there. (Indices on a GPU are not looked at; there it is a device-side assert.)
            TypeError: `indices` are no integers.
        """
        self._select(self._row_indices(indices))

    def _row_indices(self, indices: Tensor | Sequence[int]) -> Tensor:
        indices = torch.as_tensor(indices)
        rows = next((layer.batch_size for layer in self.layers if layer.is_initialized), 0)
        if indices.dtype == torch.bool and len(indices) == rows:
            indices = indices.nonzero().squeeze(-1)
        if indices.dtype not in (torch.int32, torch.int64) or indices.ndim != 1:
            raise TypeError(f"rows must be a vector of integers, or a bool for each of {rows} rows, got {indices}")
        on_host = indices.device.type == "cpu" and not torch.compiler.is_compiling()
        if rows and on_host and not bool(((indices >= 0) & (indices < rows)).all()):
            raise IndexError(f"rows must lie in [0, {rows}), got {indices.tolist()}; nothing was changed")
        return indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows, next to each other; ValueError unless that is a positive number."""
        checks.count(repeats, "repeats")
        rows = next((layer.batch_size for layer in self.layers if layer.is_initialized), 0)
        self._select(torch.arange(rows).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        """Keeps rows `rows` (int `[B]`), in that order."""
        with self.changing():
            for layer in self.layers:
                if layer.positions is not None:
                    layer.storage.select(rows.to(layer.device), layer.batch_size)
            for layer in self.layers:
                if layer.leads:
                    layer.positions.select(rows.to(layer.device))

    def to(self, device: torch.device | str) -> NVFP4Cache:
        """Moves all layers to one device; compiled code that has seen the buffers is compiled again."""
        device = torch.device(device)
        shared: dict[tuple[torch.device, int], Positions] = {}
        with self.changing():
            for layer in self.layers:
                if layer.positions is None:
                    continue
                layer.storage.move_to(device)
                layer.device = device
                key = (device, layer.positions.ring)
                layer.leads = key not in shared
                if layer.leads:
                    layer.positions.to(device)
                self._join(layer, shared.setdefault(key, layer.positions))
            self._positions = shared
        return self

    @contextlib.contextmanager
    def changing(self, rows: Sequence[int] = ()) -> Iterator[None]:
        """Marks the cache, whichever `rows` change, as damaged unless the body comes to its end."""
        was = self.damaged
        self.damaged = True
        yield
        self.damaged = was

    def nbytes(self) -> int:
        """Bytes of all layers' state, exact copies included."""
        return sum(layer.storage.nbytes() for layer in self.layers if layer.is_initialized)

    def check(self) -> None:
        """Looks for what only the device knows (synchronises): raises if a row outgrew the capacity, and warns once if
        tokens were so large that their scales saturated, or so small under a given scale that they underflowed.

        Raises:
            RuntimeError: a row grew past `max_cache_len`.
        """
        for positions in self._positions.values():
            positions.check()
        if self._saturation_reported:
            return
        small = [
            index
            for index, layer in enumerate(self.layers)
            if layer.is_initialized and _underflows(layer.storage, layer.positions.lengths)
        ]
        if small:
            self._saturation_reported = True
            warnings.warn(
                f"the given scale is too large for K or V of layer {', '.join(map(str, small))}: most block scales are "
                "subnormal or zero, and values are lost; is its convention another? See torch_fp4kv.scales.CONVENTIONS",
                stacklevel=2,
            )
        saturated = sum(
            _saturated_blocks(layer.storage, layer.positions.lengths) for layer in self.layers if layer.is_initialized
        )
        if saturated:
            self._saturation_reported = True
            warnings.warn(
                f"{saturated} blocks of K or V exceeded the range of their scale and were clipped",
                stacklevel=2,
            )


def _saturated_blocks(storage: LayerStorage, lengths: Tensor) -> int:
    """Blocks at the end of their scale's range; of "fp8", which has no block scales, those with such an element."""
    count = 0
    recipe = storage.recipe
    written = (torch.arange(storage.tokens, device=lengths.device) < lengths[:, None])[:, None, :, None]
    for data, scales, kind in (
        (storage.k_data, storage.k_scales, recipe.k_format),
        (storage.v_data, storage.v_scales, recipe.v_format),
    ):
        if scales is not None and kind == "nvfp4":
            count += int(((scales == E4M3_MAX_BITS) & written).sum())
        elif kind == "fp8":
            saturated = (data & 0x7F == E4M3_MAX_BITS).unflatten(-1, (-1, BLOCK)).any(-1)
            count += int((saturated & written).sum())
    return count


def _underflows(storage: LayerStorage, lengths: Tensor) -> bool:
    """More than half of the blocks of K or V have a subnormal scale or none, under a scale that was given."""
    known = storage.recipe.calibration[0] if storage.recipe.calibration else LayerCalibration()
    written = (torch.arange(storage.tokens, device=lengths.device) < lengths[:, None])[:, None, :, None]
    for scale, scales, kind in (
        (known.k_scale, storage.k_scales, storage.recipe.k_format),
        (known.v_scale, storage.v_scales, storage.recipe.v_format),
    ):
        if scale is not None and scales is not None and kind == "nvfp4":
            small = (scales < SMALLEST_NORMAL_BITS) & written
            if 2 * int(small.sum()) > int(written.expand_as(scales).sum()):
                return True
    return False


def layer_kinds(config: Any) -> list[tuple[str, int]]:
    """For each layer of the text model `config`: "full", "sliding" or "chunked", and its sliding window (-1: none).

    Raises:
        ValueError: a layer is of another type.
    """
    windows = [getattr(layer, "sliding_window", None) for layer in layer_configs(config)]
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    kinds = []
    for index, (kind, window) in enumerate(zip(types, windows, strict=True)):
        if kind == "sliding_attention":
            if window is None:
                raise ValueError(f"layer {index} is {kind!r} and the config has no sliding_window")
            kinds.append(("sliding", int(window)))
        elif kind in ("full_attention", "chunked_attention"):
            kinds.append((kind.removesuffix("_attention"), -1))
        else:
            raise ValueError(f"layer {index} is {kind!r}: NVFP4Cache keeps full, sliding and chunked attention layers")
    return kinds


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer of the text model `config`: those of some models differ in window, heads or sizes."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * len(getattr(config, "layer_types", None) or range(config.num_hidden_layers))


def configured_kv_heads(config: Any) -> Any:
    """KV heads of a layer, by its config, before any tensor parallelism; None if it says nothing."""
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)


def _round_up(tokens: int) -> int:
    return -(-tokens // _GROWTH) * _GROWTH
