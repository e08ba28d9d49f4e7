"""A text's predictions as if it had been decoded token by token through a quantised cache, in one pass of the model.

Every K and V goes through a real `LayerStorage`: bias and global scales come from the first `prompt_tokens`, all tokens
are quantised, and the query at position i reads from storage what would have left its exact window by then: every
position but the last R (its own counted in) and the first S. So it is the cache a decoding user has, without a prompt
whose tokens saw each other exactly. Attention is written out, a block of queries at a time.

Shapes: B rows, Hq query heads, H KV heads, G = Hq / H, N tokens, D and Dv head sizes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.positions import Positions
from ..cache.storage import LayerStorage
from ..ops.dequantize import values
from ..recipe import LayerCalibration, Recipe

NAME = "fp4kv_as_decoded"

PROMPT_TOKENS = 64
"""Tokens that bias and global scales are taken from where nothing else is said."""

QUERIES = 256
"""Queries of a block."""

Handler = Callable[[int, Tensor, Tensor, Tensor], "StoredText | None"]
"""Called with a layer's index, q `[B, Hq, N, D]`, k `[B, H, N, D]`, v `[B, H, N, Dv]`; None means exact attention."""

_local = threading.local()


class StoredText:
    """K and V `[B, H, N, ·]` of a layer, stored as `recipe` (of that layer) says.

    Rows are folded into heads, so that each has statistics of its own, as separate caches have.
    """

    def __init__(self, recipe: Recipe, k: Tensor, v: Tensor, prompt_tokens: int) -> None:
        rows, heads, num_tokens, _ = k.shape
        self.recipe = _tiled(recipe, rows)
        folded_k, folded_v = k.flatten(0, 1)[None], v.flatten(0, 1)[None]
        self.storage = LayerStorage(self.recipe, num_tokens)
        self.storage.allocate(folded_k, folded_v)
        positions = Positions(1, num_tokens, LayerStorage.ring_size(recipe), k.device)
        for part in (slice(0, prompt_tokens), slice(prompt_tokens, num_tokens)):
            new_k, new_v = folded_k[:, :, part], folded_v[:, :, part]
            if new_k.shape[2]:
                positions.advance(new_k.shape[2])
                self.storage.write(new_k, new_v, positions)
        stored = self.storage
        self.k = values(stored.k_data, stored.k_scales, stored.k_global, recipe.k_format)[0].unflatten(0, (rows, heads))
        v_values = values(stored.v_data, stored.v_scales, stored.v_global, recipe.v_format)[0]
        if stored.v_bias is not None:
            v_values = v_values + stored.v_bias[:, None, :]
        self.v = v_values.unflatten(0, (rows, heads))

    def query(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """`(q_stored [B, Hq, N, D], stored_bias [B, Hq, N] or None)`: what stored K meets in place of `q`."""
        folded, shape, transform = q.flatten(0, 1)[None], q.shape[:2], self.storage.transform
        q_stored, bias = transform.query(folded), transform.query_bias(folded)
        return q_stored[0].unflatten(0, shape), None if bias is None else bias[0].unflatten(0, shape)

    def exact_parts(self, query: Tensor, key: Tensor) -> list[tuple[slice, Tensor]]:
        """Where queries at consecutive positions `query` `[n]` read exact copies: columns of `key` (0, 1, … `[N]`) and
        bool `[n, columns]`; no column is in two. All else comes from storage."""
        first, last = int(query[0]), int(query[-1]) + 1
        sinks = min(self.recipe.num_sink_tokens, last)
        parts = [(slice(0, sinks), torch.ones(len(query), sinks, dtype=torch.bool, device=query.device))]
        window = slice(max(sinks, first - self.recipe.exact_window + 1), last)
        if self.recipe.exact_window and window.start < window.stop:
            parts.append((window, query[:, None] - key[window] < self.recipe.exact_window))
        return [part for part in parts if part[1].numel()]


def _tiled(recipe: Recipe, rows: int) -> Recipe:
    def tile(name: str, value: Any) -> Any:
        return value if value is None or (name.endswith("scale") and len(value) == 1) else value * rows

    calibration = [
        LayerCalibration(**{f.name: tile(f.name, getattr(layer, f.name)) for f in dataclasses.fields(layer)})
        for layer in recipe.calibration
    ]
    return dataclasses.replace(recipe, calibration=tuple(calibration))


@contextmanager
def attention_by(model: Any, handler: Handler) -> Iterator[None]:
    """Within it, every attention layer of `model` asks `handler` how its K and V are kept. Plain calls only: no cache,
    no padding."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _local.handler = handler
    try:
        yield
    finally:
        _local.handler = None
        model.set_attn_implementation(before)


def log_probabilities(
    model: Any, tokens: Tensor, recipes: Sequence[Recipe | None], prompt_tokens: int = PROMPT_TOKENS
) -> Tensor:
    """float32 `[B, N, V]` log-probabilities of what follows each of `tokens` `[B, N]`, as decoded.

    Args:
        recipes: that of each layer (see `layer_recipes`); None for a layer that stays exact.
        prompt_tokens: tokens that bias and global scales are taken from.
    """

    def handler(index: int, q: Tensor, k: Tensor, v: Tensor) -> StoredText | None:
        recipe = recipes[index]
        return None if recipe is None else StoredText(recipe, k, v, prompt_tokens)

    with torch.inference_mode(), attention_by(model, handler):
        return _log_softmax(model(tokens, use_cache=False).logits)


def full_precision(model: Any, tokens: Tensor) -> Tensor:
    """float32 `[B, N, V]` log-probabilities of the model as it is, from one call without a cache."""
    with torch.inference_mode():
        return _log_softmax(model(tokens, use_cache=False).logits)


def layer_recipes(model: Any, recipe: Recipe) -> list[Recipe | None]:
    """The recipe of each of the model's layers; ValueError where `recipe` does not go with the model."""
    from ..cache.hf import layer_kinds

    kinds = layer_kinds(model.config.get_text_config(decoder=True))
    recipe.check_layers(len(kinds))
    return [recipe.for_layer(index, kind) for index, (kind, _) in enumerate(kinds)]


def exact_tokens(model: Any, recipe: Recipe) -> int:
    """Tokens of a row that the layers which quantise read exactly: where `recipe` differs by layer, the least; 0 if no
    layer quantises. A query that sees no more reads nothing quantised."""
    quantised = [
        layer for layer in layer_recipes(model, recipe) if layer and {layer.k_format, layer.v_format} != {"exact"}
    ]
    return min((layer.exact_window + layer.num_sink_tokens for layer in quantised), default=0)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.cat([torch.log_softmax(row.float(), -1)[None] for row in logits])


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise ValueError(
            f"{type(module).__name__} was given no boolean mask: as-decoded scoring needs plain causal text"
        )
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(f"{type(module).__name__} has no layer_idx: layers cannot be told apart")
    stored: StoredText | None = _local.handler(index, query, key, value)
    q_stored, bias = (None, None) if stored is None else stored.query(query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [
        _attend(
            _Row(
                query[b],
                key[b],
                value[b],
                attention_mask[min(b, attention_mask.shape[0] - 1)],
                None if q_stored is None else q_stored[b],
                None if bias is None else bias[b],
                None if stored is None else stored.k[b],
                None if stored is None else stored.v[b],
            ),
            stored,
            scale,
            softcap or 0.0,
            s_aux,
        )
        for b in range(query.shape[0])
    ]
    return torch.stack(rows).transpose(1, 2).to(query.dtype).contiguous(), None


@dataclass(frozen=True)
class _Row:
    """One row: q `[Hq, N, D]`, k `[H, N, D]`, v `[H, N, Dv]`, mask `[1 or Hq, N, N]`, and the same from storage."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor
    q_stored: Tensor | None
    bias: Tensor | None
    k_stored: Tensor | None
    v_stored: Tensor | None


def _attend(row: _Row, stored: StoredText | None, scale: float, softcap: float, sink_logits: Tensor | None) -> Tensor:
    """float32 `[Hq, N, Dv]`, block of queries by block of queries; keys after a block are not looked at."""
    heads, num_tokens = row.k.shape[0], row.q.shape[1]
    position = torch.arange(num_tokens, device=row.q.device)

    def grouped(x: Tensor) -> Tensor:
        return x.to(torch.float32).unflatten(0, (heads, -1))

    q, k, v = grouped(row.q) * scale, row.k.to(torch.float32)[:, None], row.v.to(torch.float32)[:, None]
    q_stored = bias = k_stored = v_stored = None
    if row.q_stored is not None and row.k_stored is not None and row.v_stored is not None:
        q_stored, k_stored, v_stored = grouped(row.q_stored) * scale, row.k_stored[:, None], row.v_stored[:, None]
    if row.bias is not None:
        bias = grouped(row.bias)[..., None] * scale
    out = []
    for first in range(0, num_tokens, QUERIES):
        last = min(first + QUERIES, num_tokens)
        rows, columns = slice(first, last), slice(0, last)
        near: list[tuple[slice, Tensor]] = []
        if stored is None or q_stored is None or k_stored is None:
            scores = q[:, :, rows] @ k[:, :, columns].transpose(-1, -2)
        else:
            scores = q_stored[:, :, rows] @ k_stored[:, :, columns].transpose(-1, -2)
            scores = scores if bias is None else scores.add_(bias[:, :, rows])
            near = stored.exact_parts(position[rows], position)
            for part, exact in near:
                own = q[:, :, rows] @ k[:, :, part].transpose(-1, -2)
                scores[..., part] = torch.where(exact, own, scores[..., part])
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill_(~row.mask[:, None, rows, columns], float("-inf"))
        weights = _softmax(scores, sink_logits)
        if v_stored is None:
            out.append(weights @ v[:, :, columns])
            continue
        total = torch.zeros((), device=v.device)
        for part, exact in near:
            own = weights[..., part]
            total = total + (own * exact) @ v[:, :, part]
            own.masked_fill_(exact, 0.0)
        out.append(weights @ v_stored[:, :, columns] + total)
    return torch.cat(out, 2).flatten(0, 1)


def _softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Weights of `scores` `[H, G, n, N]`; `sink_logits` `[Hq]` take a share of each."""
    if sink_logits is None:
        return torch.softmax(scores, -1)
    sink = sink_logits.to(torch.float32).view(scores.shape[0], scores.shape[1], 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
