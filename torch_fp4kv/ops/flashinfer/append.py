"""Append by FlashInfer: block scales of K and V linear, one global scale each, standard or 4-over-6 scales.

It rounds with fast math, so that a code or a scale may differ from ours by one; and its zero codes keep their sign.
Where a row brings several tokens, K and V are copied to `[tokens, H, D]` first if the batch has several rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import AppendCall
from .paged import on


def append(call: AppendCall) -> None:
    """Serves a call for which `support.append_unsupported` is None; negative slots are skipped."""
    from flashinfer.page import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

    assert call.k_scales is not None
    assert call.v_scales is not None
    with on(call.k.device):
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            _rows(call.k),
            _rows(call.v),
            call.slots.flatten(),
            (call.k_data.view(torch.uint8), call.v_data.view(torch.uint8)),
            (call.k_scales.view(torch.float8_e4m3fn), call.v_scales.view(torch.float8_e4m3fn)),
            call.k_global.view(1),
            call.v_global.view(1),
            kv_layout="HND",
            nvfp4_4over6=four_over_six(call.scale_rule),
        )


def four_over_six(scale_rule: str) -> object:
    """FlashInfer's recipe for `scale_rule` "4over6", None for "amax": always named, or an environment variable would
    choose."""
    if scale_rule == "amax":
        return None
    from flashinfer import NVFP44Over6Config

    return NVFP44Over6Config(e4m3_max=448, err_mode="MSE", err_use_fast_math=False)


def _rows(x: Tensor) -> Tensor:
    """`[B, H, L, D]` as `[B · L, H, D]`, the last dimension contiguous."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
