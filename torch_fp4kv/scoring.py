"""What a cache does to a model's predictions: KL, perplexity and top-1 agreement on a text, by teacher forcing.

Shapes: B rows, L tokens a row, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEP = 16
"""Tokens a call: few enough to be no prefill, so each reads every K and V, its own included, from storage."""


@dataclass(frozen=True)
class Score:
    """A cache against full precision, means over all tokens.

    Attributes:
        kl: KL divergence from full precision's next-token distribution, nats a token.
        perplexity: of the text, with this cache.
        top1: share of tokens where both put the same next token first.
        num_tokens: tokens scored.
    """

    kl: float
    perplexity: float
    top1: float
    num_tokens: int


def documentation_text() -> str:
    """A fixed English text that every Python has: the topics of its `help()`."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def rows_of_text(tokenizer: Any, num_rows: int, num_tokens: int, spacing: int = 2048, skip: int = 2) -> Tensor:
    """int64 `[num_rows, num_tokens]`: row i starts at token `(skip + i) · spacing` of the documentation text."""
    tokens: Tensor = tokenizer(documentation_text(), return_tensors="pt", verbose=False).input_ids[0]
    spacing = max(spacing, num_tokens)
    needed = (skip + num_rows) * spacing
    if tokens.numel() < needed:
        raise ValueError(
            f"the text has {tokens.numel()} tokens; {num_rows} rows of {num_tokens}, {spacing} apart, need {needed}"
        )
    return torch.stack([tokens[(skip + i) * spacing :][:num_tokens] for i in range(num_rows)])


def cache_argument(call: Callable[..., Any]) -> str:
    """What `call`, a model's `forward`, calls its cache: "past_key_values" until transformers took up "cache"."""
    return "cache" if "cache" in inspect.signature(call).parameters else "past_key_values"


@torch.inference_mode()
def reference(model: Any, tokens: Tensor) -> Tensor:
    """Full precision's log-probabilities, float32 `[B, L, V]`, from one call without a cache, row by row."""
    rows = [torch.log_softmax(model(row[None], use_cache=False).logits.float(), -1) for row in tokens]
    return torch.cat(rows)


@torch.inference_mode()
def score(
    model: Any,
    tokens: Tensor,
    expected: Tensor,
    cache: Any,
    step: int = STEP,
    progress: Callable[[int], Any] = lambda num_tokens: None,
) -> Score:
    """Feeds `tokens` `[B, L]` through `cache`, `step` at a time, and compares with `expected` `[B, L, V]`.

    Args:
        cache: empty, for at least L tokens a row.
        step: up to 16, nothing but what a recipe keeps exact is exact; more, and the tokens of a call see each other
            exactly where the recipe says so.
        progress: called with the number of tokens after each call of the model.
    """
    argument = cache_argument(model.forward)
    num_rows, num_tokens = tokens.shape
    kl = nll = same = torch.zeros((), dtype=torch.float64)
    for start in range(0, num_tokens, step):
        logits = model(tokens[:, start : start + step], **{argument: cache}).logits
        got = torch.log_softmax(logits.float(), -1)
        want = expected[:, start : start + step]
        kl = kl + (want.exp() * (want - got)).sum(dtype=torch.float64).cpu()
        same = same + (want.argmax(-1) == got.argmax(-1)).sum().cpu()
        following = tokens[:, start + 1 : start + step + 1, None]
        nll = nll - got[:, : following.shape[1]].gather(-1, following).sum(dtype=torch.float64).cpu()
        progress(want.shape[0] * want.shape[1])
    total = num_rows * num_tokens
    return Score(
        kl=float(kl) / total,
        perplexity=math.exp(float(nll) / (total - num_rows)),
        top1=float(same) / total,
        num_tokens=total,
    )


def perplexity(expected: Tensor, tokens: Tensor) -> float:
    """Perplexity of `tokens` `[B, L]` under log-probabilities `[B, L, V]`."""
    return math.exp(-float(expected[:, :-1].gather(-1, tokens[:, 1:, None]).mean(dtype=torch.float64)))


def cache_bytes(cache: Any, num_rows: int) -> tuple[int, int]:
    """`(bytes a token, bytes a row)` of an `NVFP4Cache` that holds `num_rows` rows: what grows with the tokens a row
    can hold, and what does not (exact copies, scales and statistics of all rows, divided by the rows)."""
    stored = [
        tensor
        for layer in cache.layers
        for tensor in (layer.storage.k_data, layer.storage.k_scales, layer.storage.v_data, layer.storage.v_scales)
        if tensor is not None
    ]
    a_token = sum(t.nbytes // (t.shape[0] * t.shape[2]) for t in stored)
    return a_token, (cache.nbytes() - sum(t.nbytes for t in stored)) // num_rows
