"""Byte layouts: words and the packed interchange form, and the 4-token order of V scales that SM100 kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import BLOCK


def to_packed(words: Tensor) -> Tensor:
    """int64 words `[..., D/16]` to packed uint8 `[..., D/2]`: a view, low nibble = even element."""
    if words.dtype != torch.int64:
        raise TypeError(f"words must be int64, got {words.dtype}")
    if words.ndim == 0 or (words.shape[-1] > 1 and words.stride(-1) != 1):
        raise ValueError(f"words must be contiguous in the last dimension, got strides {words.stride()}")
    return words.view(torch.uint8)


def from_packed(packed: Tensor) -> Tensor:
    """Packed uint8 `[..., D/2]` to int64 words `[..., D/16]`; copies where the bytes are not aligned for a view."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed must be uint8, got {packed.dtype}")
    if packed.ndim == 0 or packed.shape[-1] % (BLOCK // 2):
        raise ValueError(f"packed must hold whole blocks of 8 bytes in its last dimension, got {list(packed.shape)}")
    viewable = packed.is_contiguous() and packed.storage_offset() % 8 == 0 and packed.data_ptr() % 8 == 0
    return (packed if viewable else packed.clone(memory_format=torch.contiguous_format)).view(torch.int64)


def v_scales_to_4token(scales: Tensor) -> Tensor:
    """Linear V scales `[..., T, S]` to the order trtllm-gen reads: within each 4 tokens,
    `dst[(t//4)*4 + s//(S//4), (s % (S//4))*4 + t % 4] = src[t, s]`. Needs `T % 4 == 0` and `S % 4 == 0`."""
    tokens, groups = check_4token(scales)
    tiles = scales.reshape(*scales.shape[:-2], tokens // 4, 4, 4, groups // 4)
    return tiles.movedim(-3, -1).reshape(scales.shape)


def v_scales_from_4token(scales: Tensor) -> Tensor:
    """The inverse of `v_scales_to_4token`."""
    tokens, groups = check_4token(scales)
    tiles = scales.reshape(*scales.shape[:-2], tokens // 4, 4, groups // 4, 4)
    return tiles.movedim(-1, -3).reshape(scales.shape)


def check_4token(scales: Tensor) -> tuple[int, int]:
    """T and S of V scales `[..., T, S]`; raises ValueError where they have no 4-token order."""
    tokens, groups = scales.shape[-2:] if scales.ndim > 1 else (1, scales.shape[-1])
    if tokens % 4 or groups % 4:
        raise ValueError(
            f"the 4-token V scale layout needs tokens % 4 == 0 and scales a token % 4 == 0 (D % 64 == 0), "
            f"got {tokens} tokens with {groups} scales"
        )
    return tokens, groups
