"""One call of an op: its arguments by name, and what is derived from their shapes. See `attention.py`, `append.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .format.constants import BLOCK
from .format.transform import KeyTransform


@dataclass(frozen=True, slots=True)
class AppendCall:
    """The arguments of `fp4kv::append`."""

    k_data: Tensor
    k_scales: Tensor | None
    v_data: Tensor
    v_scales: Tensor | None
    k: Tensor
    v: Tensor
    slots: Tensor
    k_global: Tensor
    v_global: Tensor
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    k_factors: Tensor | None = None
    k_order: Tensor | None = None
    k_rotation: int = 0
    k_exact: Tensor | None = None
    v_exact: Tensor | None = None
    exact_slots: Tensor | None = None
    skip_negative: bool = False
    k_format: str = "nvfp4"
    v_format: str = "nvfp4"
    scale_rule: str = "amax"
    v_scale_layout: str = "linear"
    backend: str = "auto"

    @property
    def transform(self) -> KeyTransform:
        return KeyTransform(self.k_bias, self.k_factors, self.k_order, self.k_rotation)


_OF_ROWS_AND_HEADS = (
    "k_global",
    "v_global",
    "lengths",
    "q_lengths",
    "starts",
    "exact_from",
    "k_bias",
    "k_factors",
    "k_order",
    "v_bias",
    "sink_logits",
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of `fp4kv::attention`, plus `return_lse`; every backend's `run(call)` takes one.

    `run` returns `(out, lse)`, where `lse` may be None if `return_lse` is False.
    """

    q: Tensor
    k_data: Tensor
    k_scales: Tensor | None
    v_data: Tensor
    v_scales: Tensor | None
    k_global: Tensor
    v_global: Tensor
    lengths: Tensor
    q_lengths: Tensor | None = None
    starts: Tensor | None = None
    block_table: Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    k_exact: Tensor | None = None
    v_exact: Tensor | None = None
    exact_from: Tensor | None = None
    num_sink_tokens: int = 0
    k_bias: Tensor | None = None
    k_factors: Tensor | None = None
    k_order: Tensor | None = None
    k_rotation: int = 0
    v_bias: Tensor | None = None
    mask: Tensor | None = None
    sink_logits: Tensor | None = None
    causal: bool = True
    window: int = -1
    softcap: float = 0.0
    scale: float | None = None
    k_format: str = "nvfp4"
    v_format: str = "nvfp4"
    v_scale_layout: str = "linear"
    out_dtype: torch.dtype | None = None
    backend: str = "auto"
    return_lse: bool = False

    @property
    def num_kv_heads(self) -> int:
        return self.k_data.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @property
    def page_size(self) -> int:
        return self.k_data.shape[2]

    @property
    def capacity(self) -> int:
        """Most tokens a row can hold at once."""
        return self.page_size * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def v_head_dim(self) -> int:
        return head_dim_of(self.v_data, self.v_format)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def transform(self) -> KeyTransform:
        return KeyTransform(self.k_bias, self.k_factors, self.k_order, self.k_rotation)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.q.dtype

    @property
    def ring_size(self) -> int:
        """R: exact slots that hold recent tokens; 0 without an exact window."""
        return 0 if self.k_exact is None else self.k_exact.shape[2] - self.num_sink_tokens - 1

    def dense(self) -> AttentionCall:
        """The same call with contiguous numbers of rows and heads, and a contiguous row of `block_table`: kernels take
        no strides of these."""
        given = {name: getattr(self, name) for name in _OF_ROWS_AND_HEADS}
        strided = {name: x.contiguous() for name, x in given.items() if x is not None and not x.is_contiguous()}
        if self.block_table is not None and self.block_table.stride(1) != 1:
            strided["block_table"] = self.block_table.contiguous()
        return replace(self, **strided) if strided else self

    def empty_out(self) -> Tensor:
        batch, heads, queries, _ = self.q.shape
        return self.q.new_empty((batch, heads, queries, self.v_head_dim), dtype=self.result_dtype)

    def empty_lse(self) -> Tensor:
        return self.q.new_empty(self.q.shape[:3], dtype=torch.float32)


def head_dim_of(data: Tensor, storage_format: str) -> int:
    """Head size that `data` holds: 16 elements a word for the 4-bit formats, else one an element."""
    return data.shape[-1] * (BLOCK if storage_format in ("nvfp4", "block-fp4") else 1)
