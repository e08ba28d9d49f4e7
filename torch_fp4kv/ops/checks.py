"""Input checks, each in one place: what was expected and what came, raised before anything is written."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .format import layout
from .format.blocks import SCALE_RULES
from .format.constants import BLOCK, GLOBAL_SCALE_MAX, GLOBAL_SCALE_MIN
from .format.transform import KeyTransform

FORMATS = ("nvfp4", "fp8", "block-fp4", "exact")
"""Storage formats: NVFP4; e4m3 under the global scale; FP4 blocks under a power of two; the model's own dtype."""

V_SCALE_LAYOUTS = ("linear", "4token")

FLOATING = (torch.float32, torch.float16, torch.bfloat16)


def head_dim(size: int, name: str) -> None:
    """Raises ValueError unless head size `size` of tensor `name` is a positive multiple of 16."""
    if size <= 0 or size % BLOCK:
        raise ValueError(
            f"{name}: head size {size} is not a multiple of {BLOCK}, the elements that share an NVFP4 scale"
        )


def count(value: object, name: str) -> None:
    """Raises TypeError unless `value` is an int (of any kind), ValueError unless it is positive."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value.__index__() <= 0:
        raise ValueError(f"{name} must be positive, got {value}")


def floating(tensor: Tensor, name: str) -> None:
    """Raises TypeError unless `tensor` is float32, float16 or bfloat16."""
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")


def has_dtype(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")


def same_device(tensor: Tensor, device: torch.device, name: str) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the data on {device}")


def one_of(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def scale_rule(rule: str) -> None:
    one_of(rule, tuple(SCALE_RULES), "scale_rule")


def scale_layout(name: str, scales: Tensor | None) -> None:
    """Raises ValueError unless `name` is a layout of V scales that `scales` `[..., T, S]` can have."""
    one_of(name, V_SCALE_LAYOUTS, "scale layout")
    if name == "4token" and scales is not None:
        layout.check_4token(scales)


def bias(tensor: Tensor | None, shapes: tuple[tuple[int, ...], ...], device: torch.device, name: str) -> None:
    """Raises unless `tensor` is None, or float32 of one of `shapes` on `device`."""
    if tensor is None:
        return
    has_dtype(tensor, torch.float32, name)
    same_device(tensor, device, name)
    if not _has_shape(tensor, shapes):
        expected = " or ".join(str(list(s)) for s in shapes)
        raise ValueError(f"{name} must have shape {expected}, got {list(tensor.shape)}")


def transform(given: KeyTransform, shape: tuple[int, int], device: torch.device) -> None:
    """Raises unless `given` is for K of `shape`, `(H, D)`, on `device`; the values are for `transform_values`."""
    bias(given.bias, (shape,), device, "k_bias")
    bias(given.factors, (shape,), device, "k_factors")
    if given.order is not None:
        has_dtype(given.order, torch.int32, "k_order")
        same_device(given.order, device, "k_order")
        if not _has_shape(given.order, (shape,)):
            raise ValueError(f"k_order must have shape {list(shape)}, got {list(given.order.shape)}")
    block, size = given.rotation, shape[1]
    if block and (block < 0 or block & (block - 1) or size % block):
        raise ValueError(f"k_rotation must be 0 or a power of two that divides the head size {size}, got {block}")


def transform_values(given: KeyTransform) -> None:
    """Raises ValueError where the host sees factors that are not positive and finite, or an order that is none."""
    factors, order = given.factors, given.order
    if factors is not None and factors.device.type == "cpu" and not bool(((factors > 0) & (factors < math.inf)).all()):
        raise ValueError("k_factors must be positive and finite")
    if order is not None and order.device.type == "cpu":
        each = torch.arange(order.shape[-1], dtype=order.dtype).expand_as(order)
        if not torch.equal(order.sort(-1).values, each):
            raise ValueError("k_order must hold each channel of a head once")


def shape(tensor: Tensor, expected: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {list(expected)}, got {list(tensor.shape)}")


def global_scale(scale: float | Tensor, device: torch.device, name: str) -> Tensor:
    """`scale` as a float32 tensor on `device`; a Python number becomes a 0-d tensor.

    Raises TypeError for another dtype (a bf16 scale reads as another number elsewhere) and ValueError for another
    device or a number outside [2^-100, 2^100]; the values of a tensor are for `scale_values`.
    """
    if not isinstance(scale, Tensor):
        _scale_value(float(scale), name)
        return torch.full((), float(scale), dtype=torch.float32, device=device)
    has_dtype(scale, torch.float32, name)
    same_device(scale, device, name)
    return scale


def scale_values(scale: Tensor, name: str) -> None:
    """Raises ValueError for a value outside [2^-100, 2^100], where the host sees it without a synchronisation.

    Called by the bodies of ops, which hold real tensors in eager and compiled programs alike.
    """
    if scale.device.type == "cpu" and scale.numel():
        for value in (scale.min().item(), scale.max().item()):
            _scale_value(value, name)


def scale_shape(scale: Tensor, shapes: tuple[tuple[int, ...], ...], name: str) -> None:
    """Raises ValueError unless the global scale is 0-d or of one of `shapes`."""
    if scale.ndim and not _has_shape(scale, shapes):
        expected = " or ".join(str(list(s)) for s in ((), *shapes))
        raise ValueError(f"{name} must have shape {expected} (one, or one per KV head or row), got {list(scale.shape)}")


def _scale_value(value: float, name: str) -> None:
    if not 0 < value < math.inf:  # Dynamo traces this for a symbolic float, and no `isfinite`
        raise ValueError(f"{name} must be positive and finite, got {value}")
    if not GLOBAL_SCALE_MIN <= value <= GLOBAL_SCALE_MAX:
        raise ValueError(f"{name} must lie in [2^-100, 2^100], got {value}")


def storage(data: Tensor, scales: Tensor | None, storage_format: str, name: str, device: torch.device) -> None:
    """Raises unless `data` and `scales` are contiguous `[P, H, T, ·]` tensors of `storage_format` on `device`."""
    if data.ndim != 4:
        raise ValueError(f"{name}_data must be [P, H, T, ·], got shape {list(data.shape)}")
    if storage_format == "exact":
        floating(data, f"{name}_data")
    else:
        has_dtype(data, torch.uint8 if storage_format == "fp8" else torch.int64, f"{name}_data")
    same_device(data, device, f"{name}_data")
    _contiguous(data, f"{name}_data")
    if storage_format in ("fp8", "exact"):
        if scales is not None:
            raise ValueError(f"{name}_scales must be None for format {storage_format!r}")
        return
    if scales is None:
        raise ValueError(f"{name}_scales is required for format {storage_format!r}")
    has_dtype(scales, torch.uint8, f"{name}_scales")
    shape(scales, tuple(data.shape), f"{name}_scales")
    same_device(scales, device, f"{name}_scales")
    _contiguous(scales, f"{name}_scales")


def exact_copies(tensor: Tensor, name: str) -> None:
    """Raises unless the channels of `tensor` `[B, H, E, D]` follow each other."""
    if tensor.stride(3) != 1:
        raise ValueError(f"{name} must be contiguous in the last dimension, got strides {tensor.stride()}")


def _contiguous(tensor: Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for shape {list(tensor.shape)}")


def _has_shape(tensor: Tensor, shapes: tuple[tuple[int, ...], ...]) -> bool:
    # Size by size: Dynamo's `in` over tuples takes two symbols of equal value for different.
    return any(tensor.ndim == len(s) and all(a == b for a, b in zip(tensor.shape, s, strict=True)) for s in shapes)
