"""What `update` returns in place of K and V: shaped like the tensor, holding the quantised cache.

A plain Python object, not a Tensor subclass: it goes through `torch.compile` without wrapping, and through the few
operations that models apply to K and V on the way to attention. `F.scaled_dot_product_attention` accepts it by
`__torch_function__`; any other operation raises and says what to use.
"""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .storage import Update

_ADVICE = (
    'use attn_implementation="sdpa" or "fp4kv", which read the quantised cache, or NVFP4Cache(..., materialize=True), '
    "which hands out dequantised tensors"
)


class KVHandle:
    """K or V of one layer. Shapes: `[B, H · repeats, S, D]`, with S the columns of a mask (or fewer after slicing)."""

    def __init__(
        self, update: Update, batch: int, is_key: bool, repeats: int = 1, limit: int | None = None, inserted: int = 0
    ) -> None:
        self.update = update
        self.batch = batch
        self.is_key = is_key
        self.repeats = repeats
        self.limit = limit
        # Size of the axis that `x[:, :, None]` put in; 0 without it.
        self.inserted = inserted

    @property
    def shape(self) -> torch.Size:
        storage = self.update.storage
        tokens = self.update.num_tokens if self.limit is None else self.limit
        heads = storage.k_data.shape[1] * self.repeats
        dim = storage.head_dim if self.is_key else storage.v_head_dim
        if self.inserted:
            return torch.Size((self.batch, heads, self.inserted, tokens, dim))
        return torch.Size((self.batch, heads, tokens, dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.update.storage.like.dtype

    @property
    def device(self) -> torch.device:
        return self.update.storage.k_data.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: Any) -> KVHandle:
        parts = index if isinstance(index, tuple) else (index,)
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            fill = self.ndim - sum(p is not None and p is not Ellipsis for p in parts)
            parts = (*parts[:at], *[slice(None)] * fill, *parts[at + 1 :])
        whole = [part == slice(None) for part in parts]
        if not self.inserted and len(parts) >= 3 and all(whole[:2] + whole[3:]):
            if parts[2] is None:
                return self._with(inserted=1)
            if isinstance(parts[2], slice) and parts[2].start in (None, 0) and parts[2].step in (None, 1):
                stop = parts[2].stop
                if stop is None:
                    return self
                if stop >= 0:
                    return self._with(limit=min(stop, self.shape[2]))
        _refuse(f"indexing with {index}")

    def expand(self, *sizes: Any) -> KVHandle:
        sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        old = self.shape
        same = [n in (-1, o) for n, o in zip(sizes, old)]
        if len(sizes) == len(old) and all(same):
            return self
        if len(sizes) == 5 and self.inserted == 1 and all(same[:2] + same[3:]):
            return self._with(inserted=sizes[2])
        _refuse(f"expand{tuple(sizes)}")

    def reshape(self, *sizes: Any) -> KVHandle:
        sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        batch, heads, *_, tokens, dim = self.shape
        want = (batch, heads * max(self.inserted, 1), tokens, dim)
        if len(sizes) == 4 and all(n in (-1, w) for n, w in zip(sizes, want)):
            return self._with(repeats=self.repeats * max(self.inserted, 1), inserted=0)
        _refuse(f"reshape{tuple(sizes)} of shape {tuple(self.shape)}")

    view = reshape

    def unsqueeze(self, dim: int) -> KVHandle:
        if dim == 2 and not self.inserted:
            return self._with(inserted=1)
        _refuse(f"unsqueeze({dim})")

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> KVHandle:
        if (start_dim, end_dim) == (1, 2) and self.inserted:
            return self._with(repeats=self.repeats * self.inserted, inserted=0)
        _refuse(f"flatten({start_dim}, {end_dim}) of shape {tuple(self.shape)}")

    def repeat_interleave(self, repeats: int, dim: int | None = None) -> KVHandle:
        return _repeat_interleave(self, repeats, dim)

    def contiguous(self) -> KVHandle:
        return self

    def to(self, *args: Any, **kwargs: Any) -> KVHandle:
        wanted = [*args, *kwargs.values()]
        if all(w in (self.dtype, self.device, str(self.device)) or isinstance(w, bool) for w in wanted):
            return self
        _refuse(f"to({', '.join(map(str, wanted))}) from {self.dtype} on {self.device}")

    def transpose(self, first: int, second: int) -> Tensor:
        """Written-out attention asks for K with its last two axes swapped: the layer is dequantised for it."""
        if {first % self.ndim, second % self.ndim} == {2, 3} and not self.inserted:
            return self.materialize().transpose(2, 3)
        _refuse(f"transpose({first}, {second})")

    @property
    def mT(self) -> Tensor:
        return self.transpose(2, 3)

    def materialize(self) -> Tensor:
        """The dequantised tensor, exact where the cache holds exact copies."""
        if not torch.compiler.is_compiling():
            _warn_once()
        x = self.update.keys() if self.is_key else self.update.values()
        if self.limit is not None:
            x = x[:, :, : self.limit]
        return x[: self.batch].repeat_interleave(self.repeats, 1) if self.repeats > 1 else x[: self.batch]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"a K/V handle of a quantised cache has no {name!r}; {_ADVICE}")

    def _with(self, **changes: Any) -> KVHandle:
        fields = {"repeats": self.repeats, "limit": self.limit, "inserted": self.inserted, **changes}
        return KVHandle(self.update, self.batch, self.is_key, **fields)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **kwargs)
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            return _matmul(*args, **kwargs)
        if func is torch.repeat_interleave:
            return _repeat_interleave(*args, **kwargs)
        _refuse(getattr(func, "__name__", str(func)))


def _matmul(input: Tensor | KVHandle, other: Tensor | KVHandle) -> Tensor:
    if isinstance(input, KVHandle) or not isinstance(other, KVHandle):
        _refuse("matmul from the left")
    return torch.matmul(input, other.materialize())


def _repeat_interleave(input: KVHandle, repeats: int | Tensor, dim: int | None = None) -> KVHandle:
    if isinstance(repeats, Tensor) or dim not in (1, -3) or input.inserted:
        _refuse(f"repeat_interleave of {repeats} along dim {dim}")
    return input._with(repeats=input.repeats * repeats)


def _scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with K and V in the cache.

    `is_causal` means that query i is the i-th of the new tokens, as models mean it; a single new token sees all.
    """
    if not (isinstance(key, KVHandle) and isinstance(value, KVHandle)) or key.update is not value.update:
        _refuse("scaled_dot_product_attention where K and V are not both from one layer of the cache")
    if not key.is_key or value.is_key:
        _refuse("scaled_dot_product_attention with V in place of K, or K in place of V,")
    if query.shape[0] != key.batch:
        _refuse(f"scaled_dot_product_attention of {query.shape[0]} rows of queries and {key.batch} of K")
    if dropout_p:
        raise ValueError(f"attention over a quantised cache is for inference: dropout_p must be 0, got {dropout_p}")
    update = key.update
    if key.inserted or value.inserted:
        _refuse("scaled_dot_product_attention of a 5-dimensional K or V")
    if key.shape[2] != value.shape[2]:
        _refuse("scaled_dot_product_attention of K and V sliced to different lengths")
    attn_mask = _mask_over(key, attn_mask)
    # One new token's query heads may be packed into the query axis: [B, H, G, D] for [B, H · G, 1, D].
    packed = update.num_new == 1 and query.shape[2] != 1
    if is_causal and not packed and query.shape[2] != update.num_new:
        _refuse(f"scaled_dot_product_attention with is_causal of {query.shape[2]} queries for {update.num_new} tokens")
    if not packed:
        return update.attend(query, mask=attn_mask, causal=is_causal, scale=scale)
    batch, heads, group, dim = query.shape
    if attn_mask is not None and attn_mask.ndim == 4:
        attn_mask = attn_mask.expand(-1, -1, group, -1) if attn_mask.shape[1] != 1 else attn_mask
        if attn_mask.shape[1] != 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[0], heads * group, 1, attn_mask.shape[-1])
    out = update.attend(query.reshape(batch, heads * group, 1, dim), mask=attn_mask, causal=False, scale=scale)
    return out.reshape(batch, heads, group, out.shape[-1])


def _mask_over(key: KVHandle, mask: Tensor | None) -> Tensor | None:
    """`mask` with a column for each token of `key`, and none where `key` was sliced to its first tokens.

    The cache would read all tokens without a mask, and take one column for that of the first token.
    """
    num_tokens, limit = key.update.num_tokens, key.shape[2]
    if mask is None:
        return None if limit == num_tokens else torch.arange(num_tokens, device=key.device)[None] < limit
    if mask.shape[-1] == 1:
        return mask.expand(*mask.shape[:-1], limit)
    return mask if mask.shape[-1] <= limit else mask[..., :limit]


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"{what} is not supported on K or V of a quantised cache; {_ADVICE}")


_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "written-out attention dequantises each layer's whole K and V at every step; "
            'attn_implementation="sdpa" or "fp4kv" reads the quantised cache instead',
            stacklevel=4,
        )
