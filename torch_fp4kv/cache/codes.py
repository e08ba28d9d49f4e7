"""The stored form of tokens whose exact values and block scales are known.

Which block scale is best is decided by sums, which backends round differently. Under a given scale each step is a sum,
a product, a quotient or a comparison of two float32 numbers, rounded once, so all devices agree on the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.format import blocks, e4m3
from ..ops.format.transform import KeyTransform
from .storage import LayerStorage


def last_data(
    storage: LayerStorage, part: str, count: int, exact: Tensor, scales: Tensor | None, heads: slice
) -> Tensor:
    """What `append` stores of the last `count` tokens of K or V.

    Args:
        storage: whose formats, biases, global scales and transform of K apply.
        part: "k" or "v".
        exact: `[B, H, ≥ count, D]`, as they were appended.
        scales: uint8 `[B, H, ≥ count, D/16]`, the block scales that were chosen, in linear order; None for a format
            that has none.
        heads: which of the storage's heads these H are.

    Returns:
        `[B, H, count, ·]`, as in the storage's data.
    """
    storage_format = getattr(storage.recipe, f"{part}_format")
    global_scale = getattr(storage, f"{part}_global")[heads, None, None]
    transform = storage.transform if part == "k" else KeyTransform(storage.v_bias)
    x = transform.of_heads(heads).key(exact[:, :, exact.shape[2] - count :].to(torch.float32))
    if storage_format == "nvfp4":
        assert scales is not None
        scale = e4m3.decode(scales[:, :, scales.shape[2] - count :])
        return blocks.pack(blocks.codes(blocks.split(x), scale * global_scale))
    if storage_format == "block-fp4":
        return blocks.encode_block_fp4(x)[0]
    if storage_format == "fp8":
        return e4m3.encode_signed(x / global_scale).to(torch.uint8)
    return x.to(storage.dtype)
