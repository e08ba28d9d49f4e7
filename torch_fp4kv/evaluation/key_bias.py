"""Finds a K whose constant part no static bias removes: a large one before RoPE, which turns it into variation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .as_decoded import attention_by

LIMIT = 8.0
"""K's energy may grow so much from before RoPE to after it, each time without its mean; real models: 1 to 3."""


def rotated_bias(model: Any, rows: Sequence[Tensor]) -> dict[int, float]:
    """For each attention layer with a `k_proj` and no norm behind it, over `rows` (int64 `[1, N]` each): K's energy
    about its mean after RoPE, as a multiple of that before RoPE.

    Near 1 where K's mean is small or RoPE leaves it; large where a constant part of K is turned with the position. Then
    blocks hold mostly that constant, and its quantisation error hides what the tokens say.
    """
    before: dict[int, list[Tensor]] = {}
    after: dict[int, list[Tensor]] = {}

    def hook(index: int) -> Any:
        return lambda module, args, out: before.setdefault(index, []).append(out.detach().flatten(0, -2))

    def handler(index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if index in before:
            after.setdefault(index, []).append(k.transpose(1, 2).flatten(2).flatten(0, 1))

    hooks = [
        module.k_proj.register_forward_hook(hook(module.layer_idx))
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj") and not hasattr(module, "k_norm")
    ]
    try:
        with torch.inference_mode(), attention_by(model, handler):
            for row in rows:
                model(row, use_cache=False, logits_to_keep=1)
    finally:
        for handle in hooks:
            handle.remove()
    return {index: _variation(after[index]) / max(_variation(before[index]), 1e-30) for index in sorted(after)}


def _variation(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(list(parts)).double().var(0, correction=0).sum())


def warning(ratios: dict[int, float]) -> str | None:
    """What to tell a user whose model has such layers, or None."""
    large = {index: ratio for index, ratio in ratios.items() if ratio > LIMIT}
    if not large:
        return None
    worst = max(large, key=lambda index: large[index])
    named = ", ".join(str(index) for index in list(large)[:8]) + (", …" if len(large) > 8 else "")
    return (
        f"K of layer {named} has a large constant part that RoPE turns with the position (in layer {worst} K varies "
        f"{large[worst]:.0f} times more after RoPE than before): no static bias removes it, and it takes most of a "
        'block\'s range. Compare KL before using 4-bit K here; `layers={index: {"k_format": "exact"}}` keeps single '
        "layers exact"
    )
