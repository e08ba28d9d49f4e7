"""Calibration: K's bias and factors from texts, layers promoted until a KL budget holds, and a guard on golden prompts.

Shapes: H KV heads, G query heads a KV head, N tokens, D head size.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.format.constants import BLOCK
from ..recipe import LayerCalibration, Recipe, get_recipe
from .as_decoded import (
    PROMPT_TOKENS,
    attention_by,
    exact_tokens,
    full_precision,
    layer_recipes,
    log_probabilities,
)
from .fidelity import Tally, sensitivity

PROMOTIONS: tuple[dict[str, Any], ...] = (
    {"k_format": "fp8"},
    {"k_format": "fp8", "v_format": "fp8"},
    {"k_format": "exact", "v_format": "exact"},
)
"""What a layer is promoted to, one after the other: nearly all of the loss is in K."""

FALLBACKS = ("fp8-window", "bf16")
"""What `guarded` falls back to, the first that holds the budget."""

FACTOR_RANGE = 8.0
"""Factors are kept within this range of their head's mean, up and down."""

Texts = Sequence[str | Tensor]


def calibrate(
    model: Any,
    texts: Texts,
    budget_kl: float | None = None,
    *,
    recipe: str | Recipe = "nvfp4-max",
    tokenizer: Any = None,
    guard: Texts | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    progress: Callable[[str], Any] = lambda what: None,
) -> Recipe:
    """`recipe` with what it needs to know about `model`; `save` keeps it as JSON.

    With `budget_kl`, the layers that cost most when they alone are quantised are promoted (K to FP8, then V, then
    both exact) until the KL on `texts`, as decoded, is within the budget.

    Args:
        model: a Hugging Face decoder, in the precision it is used in.
        texts: strings (`tokenizer` is needed then) or int64 tensors `[N]`. Like what the model will read; a few
            thousand tokens.
        budget_kl: nats a token against the model's own cache; None promotes nothing.
        recipe: what to start from; one that needs no calibration is only promoted.
        guard: golden prompts, on which the result is checked once more; see `guarded`. Needs `budget_kl`.
        prompt_tokens: tokens of each text that bias and scales are taken from where the recipe says "prompt".
        progress: called with a line about each measurement.

    Raises:
        ValueError: no text, a text shorter than 2 tokens, none longer than what the recipe keeps exact (nothing would
            be measured), a budget that is not positive, or `guard` without one.
        TypeError: a text is a string and there is no tokenizer, or `texts` is one.
    """
    if budget_kl is not None and not budget_kl > 0:
        raise ValueError(f"budget_kl must be positive, got {budget_kl}")
    if guard is not None and budget_kl is None:
        raise ValueError("guard needs budget_kl: what the golden prompts are checked against")
    rows = tokenized(texts, tokenizer, model.device)
    result = get_recipe(recipe)
    if result.needs_calibration:
        progress("statistics of K and Q")
        result = with_statistics(model, rows, result)
    if budget_kl is not None:
        result = _promote(model, rows, result, budget_kl, prompt_tokens, progress)
    if guard is not None and budget_kl is not None:
        result = guarded(model, result, guard, budget_kl, tokenizer=tokenizer, prompt_tokens=prompt_tokens)
    return result


def guarded(
    model: Any,
    recipe: str | Recipe,
    prompts: Texts,
    budget_kl: float,
    *,
    tokenizer: Any = None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Recipe:
    """`recipe` if its KL on the golden `prompts` is within `budget_kl`; else the first of `FALLBACKS` that is, with a
    warning that says what was measured. Arguments and errors as in `calibrate`."""
    rows = tokenized(prompts, tokenizer, model.device)
    wanted = get_recipe(recipe)
    _check_measures(model, rows, wanted)
    kl = mean_kl(model, rows, layer_recipes(model, wanted), prompt_tokens)
    if kl <= budget_kl:
        return wanted
    for name in FALLBACKS:
        fallback = get_recipe(name)
        fallback_kl = mean_kl(model, rows, layer_recipes(model, fallback), prompt_tokens)
        if fallback_kl <= budget_kl:
            break
    label = recipe if isinstance(recipe, str) else "the recipe"
    warnings.warn(
        f"{label} has a KL of {kl:.2g} nats a token on {len(rows)} golden prompts, over the budget of {budget_kl:.2g}; "
        f"falling back to {name!r}, which has {fallback_kl:.2g}",
        stacklevel=2,
    )
    return fallback


def tokenized(texts: Texts, tokenizer: Any, device: torch.device) -> list[Tensor]:
    """int64 `[1, N]` for each text; errors as in `calibrate`."""
    if isinstance(texts, str):
        raise TypeError("texts is one string: pass a list of them")
    rows = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise TypeError("texts are strings: pass tokenizer=, or int64 tensors of token ids")
            text = tokenizer(text, return_tensors="pt").input_ids
        if text.ndim != 1 and text.shape[:-1] != (1,):
            raise ValueError(f"a text must be tokens [N], got shape {list(text.shape)}")
        row = text.reshape(1, -1).to(device)
        if row.shape[1] < 2:
            raise ValueError(f"a text must have at least 2 tokens, got {row.shape[1]}")
        rows.append(row)
    if not rows:
        raise ValueError("there must be at least one text")
    return rows


def with_statistics(model: Any, rows: Sequence[Tensor], recipe: Recipe) -> Recipe:
    """`recipe` with the `statistics` of `rows`; scales and V's bias that it has stay."""
    found = statistics(model, rows, recipe.num_sink_tokens)
    known = recipe.calibration or (LayerCalibration(),) * len(found)
    merged = tuple(
        dataclasses.replace(old, k_bias=new.k_bias, k_factors=new.k_factors, k_order=new.k_order)
        for old, new in zip(known, found)
    )
    return dataclasses.replace(recipe, calibration=merged)


def _check_measures(model: Any, rows: Sequence[Tensor], recipe: Recipe) -> None:
    """Raises ValueError if no query of `rows` reads from storage in any layer."""
    exact = exact_tokens(model, recipe)
    longest = max(row.shape[1] for row in rows)
    if longest <= exact:
        raise ValueError(
            f"the longest text has {longest} tokens, and the recipe keeps {exact} exact: nothing would be measured"
        )


def statistics(model: Any, rows: Sequence[Tensor], num_sink_tokens: int = 0) -> tuple[LayerCalibration, ...]:
    """Per layer, over `rows` (int64 `[1, N]` each): K's mean a (head, channel), the factors that equalise channels, and
    their order.

    Stored with factors s and rotated, a channel's error is the same share of its block's energy `Σ s² var(k)`, and
    costs `E[q²] / s²` in the score: least for `s = (E[q²] / var(k))^¼`, and over blocks where their energies are alike.
    The first `num_sink_tokens` of each row, kept exact and unlike the rest, are left out of K's.
    """
    sums: dict[int, _Moments] = {}

    def handler(index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        sums.setdefault(index, _Moments()).add(q, k[:, :, num_sink_tokens:] if k.shape[2] > num_sink_tokens else k)

    with torch.inference_mode(), attention_by(model, handler):
        for row in rows:
            model(row, use_cache=False, logits_to_keep=1)
    return tuple(sums[index].calibration() for index in sorted(sums))


class _Moments:
    """Sums over tokens, float64: K `[H, D]`, its square, and the square of the queries that meet it."""

    def __init__(self) -> None:
        self.k = self.k_squared = self.q_squared = torch.zeros(())
        self.num_keys = self.num_queries = 0

    def add(self, q: Tensor, k: Tensor) -> None:
        grouped = q.unflatten(1, (k.shape[1], -1)).double()
        self.k = self.k.to(k.device) + k.double().sum((0, 2))
        self.k_squared = self.k_squared.to(k.device) + k.double().square().sum((0, 2))
        self.q_squared = self.q_squared.to(k.device) + grouped.square().sum((0, 2, 3))
        self.num_keys += k.shape[0] * k.shape[2]
        self.num_queries += q.shape[0] * q.shape[2] * grouped.shape[2]

    def calibration(self) -> LayerCalibration:
        mean = self.k / self.num_keys
        variance = self.k_squared / self.num_keys - mean.square()
        energy = self.q_squared / self.num_queries
        floor = 1e-6
        variance = variance.clamp(min=floor * variance.amax(-1, keepdim=True).clamp(min=1e-30))
        energy = energy.clamp(min=floor * energy.amax(-1, keepdim=True).clamp(min=1e-30))
        factors = (energy / variance) ** 0.25
        factors = (factors / factors.mean(-1, keepdim=True)).clamp(1 / FACTOR_RANGE, FACTOR_RANGE)
        order = [_balanced((factor.square() * var).tolist()) for factor, var in zip(factors, variance)]
        # Six digits: as exact as float32 statistics are, and half the JSON.
        return LayerCalibration(k_bias=_rounded(mean), k_factors=_rounded(factors), k_order=tuple(order))


def _balanced(energy: list[float]) -> tuple[int, ...]:
    """Channels in an order whose blocks have about equal `energy`: each goes, largest first, to the emptiest block."""
    blocks: list[list[int]] = [[] for _ in range(len(energy) // BLOCK)]
    for channel in sorted(range(len(energy)), key=lambda channel: -energy[channel]):
        open_blocks = [block for block in blocks if len(block) < BLOCK]
        min(open_blocks, key=lambda block: sum(energy[c] for c in block)).append(channel)
    return tuple(channel for block in blocks for channel in block)


def _rounded(x: Tensor) -> Any:
    return tuple(tuple(float(f"{number:.6g}") for number in row) for row in x.tolist())


def mean_kl(model: Any, rows: Sequence[Tensor], layers: Sequence[Recipe | None], prompt_tokens: int) -> float:
    """KL in nats a token, as decoded, over `rows` (int64 `[1, N]` each)."""
    tally = Tally()
    for row in rows:
        tally.add(full_precision(model, row), log_probabilities(model, row, layers, prompt_tokens), row)
    return tally.fidelity().kl


def _promote(
    model: Any,
    rows: Sequence[Tensor],
    recipe: Recipe,
    budget_kl: float,
    prompt_tokens: int,
    progress: Callable[[str], Any],
) -> Recipe:
    _check_measures(model, rows, recipe)

    def measured(candidate: Recipe, what: str) -> bool:
        kl = mean_kl(model, rows, layer_recipes(model, candidate), prompt_tokens)
        progress(f"KL {kl:.5f} with {what}")
        return kl <= budget_kl

    if measured(recipe, "no layer promoted"):
        return recipe
    layers = layer_recipes(model, recipe)
    per_row = [sensitivity(model, row, layers, prompt_tokens) for row in rows]
    cost = [sum(row[index] for row in per_row) / len(rows) for index in range(len(layers))]
    order = sorted(range(len(layers)), key=lambda index: -cost[index])
    progress("most sensitive layers: " + ", ".join(f"{index} (KL {cost[index]:.5f})" for index in order[:5]))
    before = recipe
    for promotion in PROMOTIONS:

        def promoted(count: int, base: Recipe = before, promotion: dict[str, Any] = promotion) -> Recipe:
            rules: dict[int | str, dict[str, Any]] = {selector: dict(changes) for selector, changes in base.layers}
            for index in order[:count]:
                more = {name: kind for name, kind in promotion.items() if _is_more(kind, getattr(layers[index], name))}
                if more:
                    rules[index] = {**rules.get(index, {}), **more}
            return dataclasses.replace(base, layers=rules)

        what = " and ".join(f"{name.partition('_')[0].upper()} {kind}" for name, kind in promotion.items())
        if not measured(promoted(len(order)), f"all {len(order)} layers at {what}"):
            before = promoted(len(order))
            continue
        enough, too_few = len(order), 0
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if measured(promoted(middle), f"{middle} layers at {what}"):
                enough = middle
            else:
                too_few = middle
        return promoted(enough)
    return before


def _is_more(storage_format: str, than: str) -> bool:
    """Whether `storage_format`, of a promotion, has more bits than `than`."""
    return storage_format != than and than != "exact"
