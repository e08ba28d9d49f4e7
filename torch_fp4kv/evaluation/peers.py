"""Transformers' own quantised caches, decoded token by token beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .as_decoded import full_precision
from .fidelity import Fidelity, Progress, Tally, decoded, rows_at_once


@dataclass(frozen=True)
class Peer:
    """Arguments of `QuantizedCache`, and its bytes a token as a share of BF16 (at 8,192 tokens, residual included)."""

    arguments: dict[str, Any]
    share: float


def _grouped(bits: int, group: int, residual: int) -> float:
    """Values, and a scale and an offset of two bytes a group; the last `residual` tokens of 8,192 stay exact."""
    packed = (bits + 2 * 16 / group) / 16
    return packed + residual / 8192 * (1 - packed)


PEERS = {
    "transformers quanto int4": Peer({"backend": "quanto", "nbits": 4}, _grouped(4, 64, 128)),
    "transformers hqq int4": Peer({"backend": "hqq", "nbits": 4}, _grouped(4, 64, 128)),
    "transformers fp8": Peer({"backend": "fp8"}, 0.5),
}


def peer_fidelity(
    model: Any, tokens: Tensor, name: str, first: int, prompt_tokens: int, progress: Progress
) -> Fidelity:
    """As `fidelity.measure`, for a cache of transformers: the prompt in one call, then one token a call.

    Raises:
        ImportError, ValueError, RuntimeError: this cache does not run with this model or this transformers.
    """
    from transformers import QuantizedCache

    tally = Tally()
    for rows in tokens.to(model.device).split(max(rows_at_once(model, tokens.shape[1]), len(tokens))):
        cache = QuantizedCache(config=model.config, **PEERS[name].arguments)
        got = decoded(model, rows, cache, prompt_tokens, progress)
        for row, have in zip(rows, got):
            tally.add(full_precision(model, row[None]).cpu(), have[None], row[None].cpu(), first)
    return tally.fidelity()
