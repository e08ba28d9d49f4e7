"""`PagedNVFP4Cache`: a pool of pages that many sequences share, for continuous batching with transformers models.

Shapes: R rows (sequences at once), P pages of T tokens, n new tokens.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..ops import checks
from ..recipe import Recipe, get_recipe
from . import attention_interface
from .buffers import allocate
from .handle import KVHandle
from .hf import configured_kv_heads, layer_configs, layer_kinds
from .pages import Pages
from .positions import Positions
from .shard import Shard
from .storage import MIN_BIAS_TOKENS, LayerStorage


class PagedPositions(Positions):
    """Positions of rows that lie in pages.

    Attributes:
        active: int32 `[R]`, 1 for rows that take the next tokens.
    """

    block_table: Tensor

    def __init__(self, rows: int, max_pages: int, page_size: int, ring: int, device: torch.device) -> None:
        super().__init__(rows, max_pages * page_size, ring, device)
        self.page_size = page_size
        self.block_table = allocate((rows, max_pages), torch.int32, device)
        self.active = allocate((rows,), torch.int32, device)

    def advance(self, num_new: int) -> None:
        self._advance(self.active * num_new)

    def _compute_slots(self, *args: int) -> tuple[Tensor, Tensor | None]:
        slots, exact = super()._compute_slots(*args)
        return torch.where(self.active[:, None] > 0, slots, -1), exact

    def slots_at(self, rows: Tensor, position: Tensor, tokens: int) -> Tensor:
        """As `Positions.slots_at`, with the rows' pages."""
        page = (position // self.page_size).clamp(0, self.block_table.shape[1] - 1)
        return self.block_table[rows].gather(1, page).to(torch.int64) * self.page_size + position % self.page_size

    def row(self, row: int) -> PagedPositions:
        """The same positions seen as one row; changes are shared."""
        view = copy.copy(self)
        for name, tensor in self.tensors():
            if tensor.ndim:
                setattr(view, name, tensor[row : row + 1])
        view.active = torch.ones_like(view.active)
        view._computed = {}
        return view


class PagedNVFP4Cache:
    """Pages of quantised K and V, handed out to sequences as they grow.

    A sequence takes a row (`admit`), is prefilled alone (`model(ids, past_key_values=pool.row(r))`), decodes together
    with the others (`pool.step(rows)`, then `model(tokens, position_ids=…, past_key_values=pool.batch)`) and gives its
    pages back (`free`). `fork` makes a second sequence that shares the pages of the first. The batch always has all R
    rows, so a decode step is compiled and captured once; rows that take no part write nothing.

    Bias and scales are chosen from the first sequence and then stay, so that pages can be shared.

    Args:
        config: the model's config; layers with full attention only.
        num_pages, page_size: P and T; T a power of two, 16 or more.
        max_rows: R.
        max_cache_len: most tokens of one sequence.
        dtype, device: of the model.
        v_scale_layout: "4token" for pages that FlashInfer's kernels for compute capability 10.0 and 10.3 read
            (docs/backends.md); head sizes must be multiples of 64. "linear" for all others.
        recipe, tp_rank, tp_size, **overrides: as for `NVFP4Cache`.

    Raises:
        ValueError: a page size that is no power of two from 16, a number that is not positive, a layer with another
            kind of attention, or a head size that `v_scale_layout` does not go with.
    """

    def __init__(
        self,
        config: Any,
        num_pages: int,
        max_rows: int,
        max_cache_len: int,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        recipe: str | Recipe = "nvfp4",
        v_scale_layout: str = "linear",
        tp_rank: int = 0,
        tp_size: int = 1,
        **overrides: Any,
    ) -> None:
        if page_size < 16 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two, 16 or more, got {page_size}")
        for number, name in ((num_pages, "num_pages"), (max_rows, "max_rows"), (max_cache_len, "max_cache_len")):
            checks.count(number, name)
        config = config.get_text_config(decoder=True)
        if any(kind != "full" for kind, _ in layer_kinds(config)):
            raise ValueError("PagedNVFP4Cache keeps layers with full attention; use NVFP4Cache for sliding ones")
        configs = layer_configs(config)
        recipe = get_recipe(recipe, **overrides)
        recipe.check_layers(len(configs))
        self.page_size, self.max_rows = page_size, max_rows
        self.shard = Shard(tp_rank, tp_size)
        self.num_kv_heads = [int(configured_kv_heads(layer)) for layer in configs]
        self.layers = [LayerStorage(self.shard.of(recipe.for_layer(i)), page_size) for i in range(len(configs))]
        for layer, total, own in zip(self.layers, self.num_kv_heads, configs):
            dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
            like = torch.empty((max_rows, len(self.shard.heads(total)), 0, dim), dtype=dtype, device=device)
            layer.allocate_pages(like, like, num_pages, v_scale_layout)
        rings = {LayerStorage.ring_size(layer.recipe) for layer in self.layers}
        max_pages, device = -(-max_cache_len // page_size), self.layers[0].k_data.device
        self._positions = {ring: PagedPositions(max_rows, max_pages, page_size, ring, device) for ring in rings}
        self._pages = Pages(num_pages)
        # Without the token of the last `step`, which compiled code stores: it cannot count without being compiled anew.
        self._lengths: dict[int, int] = {}
        self._capacity = max_cache_len
        # Rows whose next token `step` made room for: `stepped` until the model's first layer stores it, `storing` from
        # then until the last one has.
        self._stepping: list[int] = []
        self._stepped = self._storing = False
        # Rows that a prefill, or another change, did not leave whole.
        self._unfinished: set[int] = set()
        # Of rows that came from another machine, the name they came under.
        self._transfers: dict[int, str] = {}
        attention_interface.register()
        self.batch = _PagedBatch(self, None)

    def __repr__(self) -> str:
        kept = " | ".join(dict.fromkeys(layer.description for layer in self.layers))
        pages = f"{self._pages.count} pages of {self.page_size} tokens, {self.free_pages} free"
        rows = f"{len(self.rows)} of {self.max_rows} rows in use"
        return f"PagedNVFP4Cache({len(self.layers)} layers, {kept}; {pages}, {rows}, {self.nbytes() / 2**20:.2f} MiB)"

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._pages.num_free

    @property
    def rows(self) -> list[int]:
        """Rows in use."""
        return sorted(self._pages.held)

    def length(self, row: int) -> int:
        """Tokens of sequence `row`, that of `step` counted in."""
        self._check_row(row)
        return self._lengths[row] + (row in self._stepping)

    def nbytes(self) -> int:
        """Bytes of all layers' state."""
        return sum(layer.nbytes() for layer in self.layers)

    def admit(self) -> int:
        """Takes a free row for a new sequence.

        Raises:
            RuntimeError: all rows are in use.
        """
        row = next((r for r in range(self.max_rows) if r not in self._pages.held), None)
        if row is None:
            raise RuntimeError(f"all {self.max_rows} rows are in use; free one first")
        for positions in self._positions.values():
            for name, tensor in positions.tensors():
                if tensor.ndim and name != "block_table":
                    tensor[row] = 0
        self._transfers.pop(row, None)
        self._unfinished.discard(row)
        self._lengths[row] = 0
        self._pages.held[row] = []
        return row

    def free(self, row: int) -> None:
        """Gives back the row and the pages that no other sequence shares."""
        self._check_row(row)
        self._unfinished.add(row)
        for positions in self._positions.values():
            positions.active[row] = 0
            positions.lengths[row] = 0
        if row in self._stepping:
            self._stepping.remove(row)
        self._transfers.pop(row, None)
        self._pages.release(row)

    def fork(self, row: int) -> int:
        """A new sequence with the tokens of `row`: pages are shared, and copied only where one of the two writes.

        Raises:
            RuntimeError: all rows are in use, a call of the model with `row` ended halfway, or `step` made room for its
                next token and the model was not called yet.
        """
        self.check_whole(row)
        new = self.admit()
        length = self._stored(row)
        with self.changing([new]):
            for positions in self._positions.values():
                for _, tensor in positions.tensors():
                    if tensor.ndim:
                        tensor[new] = tensor[row]
            for layer in self.layers:
                for exact in (layer.k_exact, layer.v_exact):
                    if exact is not None:
                        exact[new] = exact[row]
            self._lengths[new] = length
            # A page that `step` made room in, and holds no token yet, is not shared.
            self._pages.share(row, new, -(-length // self.page_size))
        return new

    def row(self, row: int) -> Cache:
        """A cache of batch size 1 for the next tokens of sequence `row`: its prompt, or a chunk of it.

        A call of the model with it raises RuntimeError where `fork` does.
        """
        self._check_row(row)
        return _PagedBatch(self, row)

    def step(self, rows: Sequence[int]) -> Tensor:
        """Makes room for one more token of each of `rows`, which the next call of the model with `batch` appends.

        A second call before the model's takes the place of the first.

        Returns:
            `position_ids` for that call, int64 `[R, 1]`.

        Raises:
            RuntimeError: not enough pages are free; nothing was changed.
            ValueError: a sequence would exceed `max_cache_len`, has no prompt yet or is named twice; nothing was
                changed.
        """
        for row in rows:
            self._check_row(row)
            if rows.count(row) > 1:
                raise ValueError(f"row {row} is named twice; a step takes one token of each row")
            if self._lengths[row] == 0:
                raise ValueError(f"row {row} has no prompt yet: prefill it with pool.row({row}) first")
        if self._storing:
            self._unfinished.update(self._stepping)
        lengths = {row: self._stored(row) for row in self._pages.held}
        # In one statement, so that an interrupt leaves no token that counts twice.
        self._lengths, self._stepping, self._stepped, self._storing = lengths, [], False, False
        self.reserve(dict.fromkeys(rows, 1))
        active = torch.zeros(self.max_rows, dtype=torch.int32)
        active[list(rows)] = 1
        for positions in self._positions.values():
            positions.active.copy_(active)
        positions = next(iter(self._positions.values()))
        ids = positions.lengths.to(torch.int64)[:, None]
        self._stepping = list(rows)
        self._stepped = True
        return ids

    def reserve(self, tokens: dict[int, int]) -> None:
        """Makes room for `tokens[row]` more tokens of each row; errors as in `step`."""
        wanted: dict[int, tuple[int, bool]] = {}
        for row, count in tokens.items():
            self.check_whole(row)
            length, pages = self._stored(row), self._pages.held[row]
            if length + count > self._capacity:
                raise ValueError(f"row {row}: {count} tokens after {length} exceed max_cache_len={self._capacity}")
            shared = bool(length % self.page_size) and self._pages.is_shared(row, length // self.page_size)
            wanted[row] = (max(0, -(-(length + count) // self.page_size) - len(pages)), shared)
        # Two rows that share one partial page need one copy fewer than this counts; the pool is never overdrawn.
        needed = sum(new + shared for new, shared in wanted.values())
        if needed > self.free_pages:
            raise RuntimeError(f"{needed} pages are needed and {self.free_pages} are free; free a sequence first")
        for row, (new, _) in wanted.items():
            self._own_last_page(row)
            self._pages.extend(row, new)
            table = torch.tensor(self._pages.held[row], dtype=torch.int32)
            for positions in self._positions.values():
                positions.block_table[row, : len(table)].copy_(table)

    def positions_of(self, index: int) -> PagedPositions:
        """The positions of layer `index`."""
        return self._positions[LayerStorage.ring_size(self.layers[index].recipe)]

    def check_whole(self, row: int) -> None:
        """Raises ValueError if `row` is not in use, and RuntimeError if its layers hold different tokens or `step` has
        made room for one that is yet to come."""
        self._check_row(row)
        if self._stepped and row in self._stepping:
            raise RuntimeError(f"step made room for a token of row {row}: call the model with the batch first")
        if row in self._unfinished or (self._storing and row in self._stepping):
            raise RuntimeError(f"a call of the model with row {row} ended halfway, and its layers differ: free it")

    @contextlib.contextmanager
    def changing(self, rows: Sequence[int]) -> Iterator[None]:
        """Marks `rows` as halfway unless the body comes to its end."""
        self._unfinished.update(rows)
        yield
        self._unfinished.difference_update(rows)

    def admit_transfer(self, transfer: str, rows: int, tokens: int) -> list[int]:
        """Takes `rows` free rows with room for `tokens` tokens each, which come from elsewhere under this name.

        Raises:
            ValueError: rows of this name are there already, or they exceed `max_cache_len`; nothing was changed.
            RuntimeError: not enough rows or pages are free; nothing was changed.
        """
        known = [row for row, name in self._transfers.items() if name == transfer]
        if known:
            raise ValueError(f"{transfer!r} came before and is in row {known[0]}; free it first")
        taken: list[int] = []
        try:
            taken += (self.admit() for _ in range(rows))
            self.reserve(dict.fromkeys(taken, tokens))
        except (RuntimeError, ValueError):
            for row in taken:
                self.free(row)
            raise
        self._unfinished.update(taken)
        for row in taken:
            self._transfers[row], self._lengths[row] = transfer, tokens
        return taken

    def _own_last_page(self, row: int) -> None:
        """Copies the partly filled last page of `row` if another sequence shares it."""
        length = self._stored(row)
        if length % self.page_size == 0:
            return
        index = length // self.page_size
        if self._pages.is_shared(row, index):
            self._pages.replace(row, index, self._copy_page)

    def _copy_page(self, old: int, new: int) -> None:
        for layer in self.layers:
            for data in (layer.k_data, layer.k_scales, layer.v_data, layer.v_scales):
                if data is not None:
                    data[new] = data[old]

    def _stored(self, row: int) -> int:
        """Tokens of `row` that the model's first layer has stored."""
        return self._lengths[row] + (row in self._stepping and not self._stepped)

    def _check_row(self, row: int) -> None:
        if row not in self._pages.held:
            raise ValueError(f"row {row} is not in use; rows in use: {self.rows}")


class _PagedBatch(Cache):
    """The pool as transformers sees it: all rows (`row` None) or one."""

    def __init__(self, pool: PagedNVFP4Cache, row: int | None) -> None:
        # One view for all layers: who advances it also drops the slots that it has computed.
        views = pool._positions if row is None else {ring: p.row(row) for ring, p in pool._positions.items()}
        rings = [LayerStorage.ring_size(storage.recipe) for storage in pool.layers]
        super().__init__(
            layers=[_PagedLayer(pool, i, row, views[ring], leads=ring not in rings[:i]) for i, ring in enumerate(rings)]
        )

    def needs_no_mask(self, attention_mask: Tensor | None, q_length: int) -> bool:
        """Whether attention sees all that it may without a mask: yes, unless one is given. Rows have no padding."""
        return attention_mask is None

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        attention_interface.note_cache(self)
        return super().get_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As `_PagedLayer.update`, for layer `layer_idx`."""
        attention_interface.note_cache(None)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _PagedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(
        self, pool: PagedNVFP4Cache, index: int, row: int | None, positions: PagedPositions, leads: bool
    ) -> None:
        super().__init__()
        self.pool, self.index, self.row = pool, index, row
        self.positions, self.leads = positions, leads
        self.is_compileable = row is None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a pool is allocated when it is made."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Stores the tokens in the rows' pages and returns handles for K and V."""
        pool, storage = self.pool, self.pool.layers[self.index]
        total = pool.num_kv_heads[self.index]
        key_states, value_states = pool.shard.own(key_states, total), pool.shard.own(value_states, total)
        num_new = key_states.shape[2]
        storage.check(key_states, value_states, pool.max_rows if self.row is None else 1)
        if self.row is not None:
            if self.index == 0:
                pool.reserve({self.row: num_new})
                pool._unfinished.add(self.row)
                pool._lengths[self.row] += num_new
            base, storage = storage, storage.rows(self.row, empty=pool._lengths[self.row] == num_new)
            if self.leads:
                self.positions.advance(num_new)
            if not base.frozen and num_new:
                if num_new < MIN_BIAS_TOKENS and base.recipe.k_bias == "prompt":
                    warnings.warn(
                        f"the pool's first prompt has {num_new} tokens, and fewer than {MIN_BIAS_TOKENS} give no bias: "
                        "K is neither shifted nor rotated, that of later prompts too; begin with a longer one, or "
                        "calibrate",
                        stacklevel=2,
                    )
                base.calibrate(key_states.to(base.dtype), value_states.to(base.dtype), self.positions)
                base.frozen = True
                storage = base.rows(self.row, empty=storage.empty)
        else:
            if self.index == 0:
                if num_new != 1 or not pool._stepped:
                    raise RuntimeError("the batch takes one token a row after each pool.step(rows); prompts go by row")
                # In this order, so that an interrupt leaves rows that say so.
                pool._storing = True
                pool._stepped = False
            if self.leads:
                self.positions.advance(num_new)
        update = storage.write(key_states, value_states, self.positions)
        if self.index == len(pool.layers) - 1:
            if self.row is None:
                pool._storing = False
            else:
                pool._unfinished.discard(self.row)
        batch = key_states.shape[0]
        return KVHandle(update, batch, is_key=True), KVHandle(update, batch, is_key=False)

    def reset(self, *args: Any) -> NoReturn:
        """Refuses: sequences of a pool come by `admit` and `fork`, go by `free`, and stay in their rows."""
        raise TypeError(
            "sequences of a pool come by admit and fork, go by free, and stay in their rows: it takes no reset, crop, "
            "reordering, selection or offloading; NVFP4Cache does"
        )

    crop = reorder_cache = batch_select_indices = batch_repeat_interleave = offload = reset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(columns, offset)` of a mask: a column for each position a sequence can have."""
        assert self.positions.capacity is not None
        return self.positions.capacity, 0

    def get_seq_length(self) -> Any:
        """Tokens of the one row, or of the longest."""
        return self.pool.length(self.row) if self.row is not None else self.positions.lengths.max()

    def get_max_length(self) -> int:
        """Most tokens of a sequence."""
        assert self.positions.capacity is not None
        return self.positions.capacity
