"""`attn_implementation="fp4kv"`: attention and mask functions for transformers.

Beyond what `"sdpa"` does with a handle it takes soft-capping, attention sinks and left padding without a dense mask.
Ordinary K and V go to transformers' own sdpa.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .handle import KVHandle

if TYPE_CHECKING:
    from .hf import NVFP4Cache
    from .paged import _PagedBatch

NAME = "fp4kv"

_local = threading.local()


def register() -> None:
    """Makes `"fp4kv"` known to transformers; a second call changes nothing."""
    AttentionInterface.register(NAME, fp4kv_attention)
    AttentionMaskInterface.register(NAME, fp4kv_mask)


def note_cache(cache: NVFP4Cache | _PagedBatch | None) -> None:
    """Called while transformers sizes a mask for `cache`: the mask function, which runs next, is not given it.

    Called with None once the mask is made: other implementations' mask functions leave the cache noted.
    """
    _local.cache = cache


def fp4kv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; `query` is `[B, Hq, n, D]`, the result `[B, n, Hq, Dv]`."""
    if kwargs.get("output_attentions"):
        raise ValueError('output_attentions needs attn_implementation="eager", which computes the weights')
    if not isinstance(key, KVHandle):
        if softcap is not None or s_aux is not None:
            raise ValueError(
                f'attn_implementation="{NAME}" takes soft-capping and sinks only together with an NVFP4Cache; '
                'use "eager" for this model without one'
            )
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if dropout:
        raise ValueError(f"attention over a quantised cache is for inference: dropout must be 0, got {dropout}")
    if kwargs.get("position_bias") is not None:
        raise ValueError(f'attn_implementation="{NAME}" does not take position_bias; use "eager"')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = key.update.attend(
        query,
        mask=attention_mask,
        causal=bool(causal) and attention_mask is None,
        scale=scaling,
        softcap=softcap or 0.0,
        sink_logits=s_aux,
        window=-1 if sliding_window is None or attention_mask is not None else sliding_window,
    )
    return out.transpose(1, 2).contiguous(), None


def fp4kv_mask(
    *args: Any,
    q_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None where attention needs no dense mask: plain causal, padding only on the left and known to the cache."""
    cache = getattr(_local, "cache", None)
    _local.cache = None
    if cache is not None and mask_function is causal_mask_function and cache.needs_no_mask(attention_mask, q_length):
        return None
    kwargs["allow_is_causal_skip"] = kwargs.get("allow_is_causal_skip", True) and cache is None
    mask: Tensor | None = sdpa_mask(
        *args, q_length=q_length, mask_function=mask_function, attention_mask=attention_mask, **kwargs
    )
    return mask
