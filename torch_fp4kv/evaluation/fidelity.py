"""How near a quantised cache stays to the model's own: KL, perplexity, top-1 agreement, greedy text, bytes.

Shapes: B rows, N tokens a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.storage import LayerStorage, whole_tiles
from ..recipe import Recipe
from .as_decoded import PROMPT_TOKENS, full_precision, layer_recipes, log_probabilities
from .scoring import cache_argument

LOGITS_BYTES = 2 << 30
"""Bound on one set of log-probabilities: it bounds the rows scored at once on a GPU."""

Progress = Callable[[], Any]


@dataclass(frozen=True)
class Fidelity:
    """A cache against the model's own in full precision, over all tokens scored.

    Attributes:
        kl: mean KL divergence from full precision's next-token distribution, nats a token.
        perplexity, full_perplexity: of the text, with this cache and in full precision.
        top1: share of tokens where both put the same next token first.
        num_tokens: tokens scored.
    """

    kl: float
    perplexity: float
    full_perplexity: float
    top1: float
    num_tokens: int

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 is one percent worse."""
        return self.perplexity / self.full_perplexity - 1


class Tally:
    """Sums that a `Fidelity` is made of."""

    def __init__(self) -> None:
        self.kl = self.nll = self.full_nll = self.same = 0.0
        self.num_tokens = self.num_scored = 0

    def add(self, expected: Tensor, got: Tensor, tokens: Tensor, first: int = 0) -> None:
        """Counts log-probabilities `[B, N, V]` that follow `tokens` `[B, N]`, from position `first` on."""
        for want, have, ids in zip(expected[:, first:], got[:, first:], tokens[:, first:]):
            self.kl += float((want.exp() * (want - have)).sum(dtype=torch.float64))
            self.same += float((want.argmax(-1) == have.argmax(-1)).sum())
            self.nll -= float(have[:-1].gather(1, ids[1:, None]).sum(dtype=torch.float64))
            self.full_nll -= float(want[:-1].gather(1, ids[1:, None]).sum(dtype=torch.float64))
            self.num_tokens += ids.numel()
            self.num_scored += ids.numel() - 1

    def fidelity(self) -> Fidelity:
        if not self.num_scored:
            raise ValueError("no tokens were scored")
        return Fidelity(
            kl=self.kl / self.num_tokens,
            perplexity=math.exp(self.nll / self.num_scored),
            full_perplexity=math.exp(self.full_nll / self.num_scored),
            top1=self.same / self.num_tokens,
            num_tokens=self.num_tokens,
        )


def rows_at_once(model: Any, num_tokens: int) -> int:
    """Rows of `num_tokens` to score in one call: one on the CPU, else as many as `LOGITS_BYTES` hold."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return 1 if model.device.type == "cpu" else max(1, LOGITS_BYTES // (num_tokens * vocabulary * 4))


def measure(
    model: Any,
    tokens: Tensor,
    recipes: Mapping[str, Sequence[Recipe | None]],
    *,
    first: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    progress: Progress = lambda: None,
) -> dict[str, Fidelity]:
    """Each recipe against full precision on `tokens` `[B, N]`, as decoded, from position `first` on.

    Args:
        recipes: by name, the recipe of each layer (see `layer_recipes`).
        prompt_tokens: tokens that bias and global scales are taken from.
        progress: called after every pass of the model over some rows: one for full precision and one a recipe.
    """
    tallies = {name: Tally() for name in recipes}
    for rows in tokens.to(model.device).split(rows_at_once(model, tokens.shape[1])):
        expected = full_precision(model, rows)
        progress()
        for name, layers in recipes.items():
            tallies[name].add(expected, log_probabilities(model, rows, layers, prompt_tokens), rows, first)
            progress()
    return {name: tally.fidelity() for name, tally in tallies.items()}


def sensitivity(
    model: Any,
    tokens: Tensor,
    layers: Sequence[Recipe | None],
    prompt_tokens: int = PROMPT_TOKENS,
    progress: Progress = lambda: None,
) -> list[float]:
    """KL with one layer alone quantised, for each layer."""
    alone = {
        str(index): [recipe if other == index else None for other in range(len(layers))]
        for index, recipe in enumerate(layers)
    }
    scores = measure(model, tokens, alone, prompt_tokens=prompt_tokens, progress=progress)
    return [scores[name].kl for name in alone]


def decoded(
    model: Any, tokens: Tensor, cache: Any, prompt_tokens: int, progress: Progress = lambda: None, step: int = 1
) -> Tensor:
    """float32 `[B, N, V]` log-probabilities, on the CPU, of `tokens` `[B, N]` decoded `step` at a time through `cache`
    after a prompt of `prompt_tokens` that was one call."""
    argument = {cache_argument(model.forward): cache}
    ends = [*range(prompt_tokens, tokens.shape[1], step), tokens.shape[1]]
    parts = []
    with torch.inference_mode():
        for start, end in zip([0, *ends], ends):
            parts.append(torch.log_softmax(model(tokens[:, start:end], **argument).logits.float(), -1).cpu())
            progress()
    return torch.cat(parts, 1)


def greedy_agreement(model: Any, prompts: Tensor, num_new: int, make_cache: Callable[[], Any]) -> list[int]:
    """For each of `prompts` `[B, N]`, how many of `num_new` greedy tokens come before the first that differs from what
    the model's own cache gives."""
    settings = {"do_sample": False, "max_new_tokens": num_new, "min_new_tokens": num_new, "pad_token_id": 0}
    prompts = prompts.to(model.device)
    with torch.inference_mode():
        mask = torch.ones_like(prompts)
        own = model.generate(prompts, attention_mask=mask, **settings)
        ours = model.generate(prompts, attention_mask=mask, **{cache_argument(model.forward): make_cache()}, **settings)
    same = (own == ours)[:, prompts.shape[1] :].int()
    return [int(n) for n in same.cumprod(-1).sum(-1)]


def bytes_per_token(model: Any, recipe: Recipe, context: int = 8192) -> tuple[float, float]:
    """`(bytes, share of BF16)` that one row's token takes at `context` tokens, exact copies, scales and statistics
    included; a sliding layer counts what it holds: its ring here, its window in BF16. Nothing is allocated."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    like = torch.empty((1, heads, 0, dim), dtype=torch.bfloat16, device="meta")
    from ..cache.hf import layer_kinds
    from ..cache.positions import RING_SLACK

    total = plain = 0
    for index, (kind, window) in enumerate(layer_kinds(config)):
        tokens = context if window < 0 else min(context, window + RING_SLACK)
        storage = LayerStorage(recipe.for_layer(index, kind), whole_tiles(tokens), window)
        storage.allocate(like, like)
        total += storage.nbytes()
        plain += (context if window < 0 else min(context, window)) * heads * dim * 2 * 2
    return total / context, total / plain


__all__ = [
    "Fidelity",
    "Tally",
    "bytes_per_token",
    "decoded",
    "greedy_agreement",
    "layer_recipes",
    "measure",
    "sensitivity",
]
