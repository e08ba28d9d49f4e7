"""Where each row of a cache stands: shared by its layers, advanced once a step, on the device.

Shapes: B rows, n new tokens, T tokens a row of a layer can hold, R exact ring slots, S sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .buffers import Buffers, allocate

T = TypeVar("T")

RING_SLACK = 16
"""Slots of an exact ring beyond the window, so that dropping up to as many tokens (speculative decoding) loses
nothing."""


class Positions(Buffers):
    """Lengths, first visible positions and the exact window's start of each row, int32 `[B]` with fixed addresses.

    Args:
        capacity: most tokens a row may hold; None where the cache grows.
        ring: slots of the exact ring: the window R and `RING_SLACK`, or 0.

    Attributes:
        lengths: tokens of each row.
        starts: first visible position of each row; all 0 unless `padded`.
        held_from: oldest position the exact ring holds.
        exact_from: oldest position read from the exact ring: the first of the last new tokens has R exact ones, itself
            counted in, whatever was dropped before. `exact_before` is the same for the ring from before `advance`.
        shared_padding: first positions that no row sees, known on the host.
        rows: rows in use, the first ones.
        host_length: the longest row, known on the host; kept only where the cache grows.
        block_table: int32 `[B, max_pages]` where rows lie in pages of a pool, else None.
        longest: what `lengths` has been at most; a crop leaves it.
        calls: how often the layer that advances them was called since the last reset; see `NVFP4Layer`.
        overflowed: bool `[B]`, sticky: which rows outgrew the capacity.
    """

    def __init__(self, batch: int, capacity: int | None, ring: int, device: torch.device) -> None:
        self.capacity = capacity
        self.ring = ring
        self.block_table: Tensor | None = None
        self.window = max(0, ring - RING_SLACK)
        self.lengths = allocate((batch,), torch.int32, device)
        self.starts = allocate((batch,), torch.int32, device)
        self.held_from = allocate((batch,), torch.int32, device)
        self.exact_from = allocate((batch,), torch.int32, device)
        self.exact_before = allocate((batch,), torch.int32, device)
        self.longest = allocate((batch,), torch.int32, device)
        self.rows = batch
        self.padded = False
        self.shared_padding = 0
        self.host_length = 0
        self.calls = 0
        self.overflowed = allocate((batch,), torch.bool, device)
        self._flag: tuple[Tensor, torch.cuda.Event] | None = None
        self._computed: dict[tuple[Any, ...], Any] = {}

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    def check_room(self, num_new: int) -> None:
        """Raises ValueError before anything is written if the host can see that `num_new` tokens don't fit.

        The lengths are looked at only on the CPU; on a GPU an overflow during decode sets `overflowed`, which
        `check` reports.

        Raises:
            RuntimeError: `torch.export` traces without `strict=True`. It would take the lengths for constants, advance
                them while it traces, and leave that out of the program.
        """
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "torch.export of a model that holds a cache needs strict=True: its lengths are no constants"
            )
        if self.capacity is None:
            return
        stored = 0
        if self.lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            stored = int(self.lengths.max())
        self._check_fits(num_new, stored)

    def _check_fits(self, num_new: int, stored: int) -> None:
        if self.capacity is not None and stored + num_new > self.capacity:
            held = f" after {stored} stored" if stored else ""
            raise ValueError(f"{num_new} tokens{held} exceed max_cache_len={self.capacity}; nothing was written")

    def check(self) -> None:
        """Raises RuntimeError if a row has grown past the capacity (synchronises)."""
        if bool(self.overflowed.any()):
            self._raise_overflow()

    def poll(self) -> None:
        """As `check`, from a copy of the flag that an earlier call started: never waits for the device."""
        if self.overflowed.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        if self._flag is None:
            self._flag = torch.zeros(self.batch_size, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        flag, copied = self._flag
        if copied.query():
            if bool(flag.any()):
                self._raise_overflow()
            flag.copy_(self.overflowed, non_blocking=True)
            copied.record()

    def _raise_overflow(self) -> NoReturn:
        raise RuntimeError(
            f"the cache overflowed: a row grew past max_cache_len={self.capacity}, and what it holds since is "
            "wrong; reset() it and use a larger max_cache_len"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flag": None, "_computed": {}}

    def advance(self, num_new: int) -> None:
        """Adds `num_new` tokens to every row."""
        self._advance(num_new)

    def _advance(self, step: int | Tensor) -> None:
        """`step`: new tokens of every row, or int32 `[B]` of each."""
        if self.ring:
            first = self.lengths + (1 - self.window)
            self.exact_before.copy_(torch.maximum(self.held_from, first))
            self.held_from.copy_(torch.maximum(self.held_from, self.lengths + (step - self.ring)))
            self.exact_from.copy_(torch.maximum(self.held_from, first))
        self.lengths.add_(step)
        self.longest.copy_(torch.maximum(self.longest, self.lengths))
        if self.capacity is None:
            assert isinstance(step, int)
            self.host_length += step
        else:
            self.overflowed.logical_or_(self.lengths > self.capacity)
        self._computed.clear()

    def slots(self, batch: int, num_new: int, tokens: int, num_sinks: int) -> tuple[Tensor, Tensor | None]:
        """`(slots, exact_slots)`, int64 `[batch, n]`, of the last `num_new` tokens, in a layer of `tokens` a row.

        `exact_slots` is None without an exact overlay; tokens that the overlay does not keep go to its scratch slot.
        """
        return self._shared(self._compute_slots, batch, num_new, tokens, num_sinks)

    def _compute_slots(self, batch: int, num_new: int, tokens: int, num_sinks: int) -> tuple[Tensor, Tensor | None]:
        lengths = self.lengths[:batch, None].to(torch.int64)
        position = lengths - num_new + torch.arange(num_new, device=lengths.device)
        rows = torch.arange(batch, device=lengths.device)
        slots = self.slots_at(rows, position, tokens)
        if not self.ring and not num_sinks:
            return slots, None
        scratch = num_sinks + self.ring
        exact = torch.full_like(position, scratch)
        if self.ring:
            exact = torch.where(position >= lengths - self.ring, num_sinks + position % self.ring, exact)
        if num_sinks:
            from_start = position - self.starts[:batch, None]
            exact = torch.where((from_start >= 0) & (from_start < num_sinks), from_start, exact)
        return slots, exact

    def first_visible(self, batch: int, num_new: int, skip: int = 0) -> Tensor:
        """int32 `[batch]`: index among the last `num_new` tokens of the first one that counts, after padding and `skip`
        tokens more; negative where earlier ones count already."""
        return self._shared(self._compute_first_visible, batch, num_new, skip)

    def _compute_first_visible(self, batch: int, num_new: int, skip: int) -> Tensor:
        return self.starts[:batch] - self.lengths[:batch] + (num_new + skip)

    def _shared(self, compute: Callable[..., T], *sizes: int) -> T:
        """`compute(*sizes)`, once for all layers of a step."""
        if torch.compiler.is_compiling():
            return compute(*sizes)
        key = (compute.__name__, *sizes)
        if key not in self._computed:
            self._computed[key] = compute(*sizes)
        found: T = self._computed[key]
        return found

    def slots_at(self, rows: Tensor, position: Tensor, tokens: int) -> Tensor:
        """int64 `[B, n]`: where the tokens at `position` `[B, n]` of `rows` (int64 `[B]`) lie, with one page of
        `tokens` a row."""
        # A row that overflowed a cache without a ring stays in its own page; `overflowed` tells.
        wraps = self.capacity is None or tokens < self.capacity
        return rows[:, None] * tokens + (position % tokens if wraps else position.clamp(max=tokens - 1))

    def can_crop(self, num_tokens: int, window: int, tokens: int) -> bool:
        """Whether a ring of `tokens` tokens holds what a window sees after `crop(num_tokens)` (synchronises)."""
        lost = self.longest - self.lengths + num_tokens
        return bool(((lost <= tokens - window) | (self.longest <= tokens)).all())

    def crop(self, num_tokens: int) -> None:
        """Drops the last `num_tokens` tokens of every row; ValueError if the number is negative."""
        if num_tokens < 0:
            raise ValueError(f"the number of tokens to drop must not be negative, got {num_tokens}")
        self.lengths.sub_(num_tokens).clamp_(min=0)
        self.host_length = max(0, self.host_length - num_tokens)
        torch.minimum(self.held_from, self.lengths, out=self.held_from)
        self._computed.clear()

    def reset(self) -> None:
        """Empties every row."""
        for tensor in (self.lengths, self.starts, self.held_from, self.longest, self.overflowed):
            tensor.zero_()
        self.padded = False
        self.shared_padding = 0
        self.host_length = 0
        self.calls = 0
        self._flag = None
        self._computed.clear()

    def set_starts(self, starts: Tensor) -> None:
        """Sets the first visible position of each row (int `[B']`, `B' ≤ B`), before anything is stored."""
        self.starts.zero_()
        self.starts[: starts.shape[0]].copy_(starts)
        padding = starts.tolist()
        self.padded = any(padding)
        self.shared_padding = min(padding, default=0)
        self._computed.clear()

    def mask_is_starts(self, mask: Tensor, num_new: int) -> bool:
        """Whether `mask` (`[B', n]`, 0 where hidden), of the tokens stored and `num_new` more, hides those before
        `starts` and no other (synchronises, once, as it is asked before each token).

        Raises:
            RuntimeError: a row has grown past the capacity.
            ValueError: one would.
        """
        batch, columns = mask.shape
        if self.padded:
            mask = mask.to(torch.bool) != (torch.arange(columns, device=mask.device) < self.starts[:batch, None])
        seen = torch.cat([mask.all(-1), self.lengths[:batch]]).tolist()
        longest = max(seen[batch:])
        if self.capacity is not None and longest > self.capacity:
            self._raise_overflow()
        self._check_fits(num_new, longest)
        return all(seen[:batch]) and longest + num_new <= columns

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor that holds state, by name."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Takes over saved `tensors` of the same names and shapes."""
        for name, tensor in self.tensors():
            tensor.copy_(tensors[name])
        self.padded = bool(self.starts.any())
        self.host_length = int(self.lengths.max()) if self.capacity is None else 0
        self._flag = None
        self._computed.clear()

    def place(self, rows: Tensor, lengths: Tensor, starts: Tensor, longest: Tensor, held_from: Tensor) -> None:
        """Says where `rows` (int64 `[B]`) stand after tokens came from elsewhere; int `[B]` each."""
        for name, values in (("lengths", lengths), ("starts", starts), ("longest", longest)):
            getattr(self, name)[rows] = values.to(self.lengths)
        for name in ("held_from", "exact_from", "exact_before"):
            getattr(self, name)[rows] = held_from.to(self.lengths)
        self.padded = self.padded or bool(starts.any())
        self.host_length = int(lengths.max()) if self.capacity is None else 0
        self._computed.clear()

    def to(self, device: torch.device) -> None:
        """Moves all state."""
        for name, tensor in self.tensors():
            setattr(self, name, allocate(tuple(tensor.shape), tensor.dtype, device).copy_(tensor))
        self._flag = None
        self._computed.clear()

    def select(self, rows: Tensor) -> None:
        """Keeps rows `rows` (int64 `[B']`) of those in use, in that order; in place where the number of rows stays."""
        names = ("lengths", "starts", "held_from", "exact_from", "exact_before", "longest", "overflowed")
        selected = {name: getattr(self, name)[: self.rows].index_select(0, rows) for name in names}
        if len(rows) == self.batch_size:
            for name, new in selected.items():
                getattr(self, name).copy_(new)
        else:
            # In one step, so that an interrupt cannot leave tensors of different numbers of rows.
            device = self.lengths.device
            vars(self).update({n: allocate((len(rows),), t.dtype, device).copy_(t) for n, t in selected.items()})
        self.rows = len(rows)
        self._flag = None
        self._computed.clear()
