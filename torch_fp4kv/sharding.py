"""DTensor rules of the ops: KV heads split over the ranks of a one-dimensional mesh, everything else on each rank.

The cache says how a call is split: data and scales are replicated or `Shard(1)`, per-head tensors go with them. `q`,
`k` and `v` are redistributed where they came otherwise. DTensor cannot redistribute what an op mutates, nor keyword
arguments, so those must come as they are needed.

Shapes: H KV heads, Hq query heads, M mask columns.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _compat
from .ops.append import APPEND
from .ops.attention import ATTENTION, ATTENTION_WITH_LSE
from .ops.dequantize import DEQUANTIZE
from .ops.quantize import QUANTIZE

# Which dimension of an argument is that of heads, where it is not 1.
_HEADS_FIRST = ("k_bias", "v_bias", "k_factors", "k_order", "sink_logits")
_WITHOUT_HEADS = ("slots", "exact_slots", "lengths", "q_lengths", "starts", "block_table", "exact_from")
_MUTATED = ("k_data", "k_scales", "v_data", "v_scales")

_registered = False


def register_sharding() -> None:
    """Tells DTensor how the ops split; call it once, before the first op on a DTensor. A second call does nothing.

    Raises:
        ImportError: this PyTorch has no `torch.distributed.tensor.experimental.register_sharding`.
    """
    global _registered
    if _registered:
        return
    for op in (QUANTIZE, DEQUANTIZE):
        _compat.register_sharding(op, _elementwise(op))
    for op in (APPEND, ATTENTION, ATTENTION_WITH_LSE):
        _compat.register_sharding(op, _over_heads(op))
    _registered = True


def _elementwise(op: Any) -> Any:
    """The rule of `quantize` and `dequantize`: split as the first argument is, its last dimension never."""
    names = _positional(op)

    def rule(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        given = dict(zip(names, args, strict=True))
        data = args[0]
        held = _placement(data, names[0])
        ndim, replicated = data.ndim, Replicate()
        dim = held.dim % ndim if isinstance(held, Shard) else None
        if dim == ndim - 1:
            # Blocks run along it.
            dim = None

        def split(name: str, tensor: Any) -> Any:
            if dim is None:
                return replicated
            if name in ("global_scale", "bias"):
                if name == "global_scale" and tuple(tensor.shape) == tuple(data.shape[:-1]):
                    return Shard(dim)
                per_head = tensor.ndim == (1 if name == "global_scale" else 2)
                return Shard(0) if per_head and dim == ndim - 3 else replicated
            return Shard(dim)

        outputs = [split(names[0], data)] * len(op._schema.returns)
        return [(outputs, _inputs(given, kwargs, split))]

    return rule


def _over_heads(op: Any) -> Any:
    """The rule of `append` and `attention`: split over heads where the cache is."""
    names = _positional(op)

    def rule(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        given = dict(zip(names, args, strict=True))
        for name, tensor in (*given.items(), *kwargs.items()):
            if isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a DTensor, as the others are, got a {type(tensor).__name__}")
        held = _placement(given["k_data"], "k_data")
        ranks, heads = given["k_data"].mesh.size(), given["k_data"].shape[1]
        if held not in (Replicate(), Shard(1)):
            raise ValueError(f"k_data must be replicated or Shard(1), over KV heads, got {held}")
        if held == Shard(1) and heads % ranks:
            raise ValueError(f"{heads} KV heads cannot be split evenly over {ranks} ranks; replicate the cache")

        def split(name: str, tensor: Any) -> Any:
            if held == Replicate() or name in _WITHOUT_HEADS:
                return Replicate()
            if name in ("k_global", "v_global"):
                return Shard(0) if tensor.ndim else Replicate()
            if name == "mask":
                dim = tensor.ndim - 3
                return Shard(dim) if dim >= 0 and tensor.shape[dim] > 1 else Replicate()
            return Shard(0) if name in _HEADS_FIRST else Shard(1)

        for name in _MUTATED:
            if given[name] is not None and _placement(given[name], name) != held:
                raise ValueError(f"{name} must be placed as k_data is, {held}, got {_placement(given[name], name)}")
        return [([held] * len(op._schema.returns), _inputs(given, kwargs, split))]

    return rule


def _positional(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments if not argument.kwarg_only]


def _inputs(given: dict[str, Any], kwargs: dict[str, Any], split: Any) -> list[Any]:
    """A placement for each argument, None for one that is no tensor.

    Raises:
        ValueError: a keyword argument is placed otherwise.
    """
    inputs = [None if tensor is None else split(name, tensor) for name, tensor in given.items()]
    for name, tensor in kwargs.items():
        if not hasattr(tensor, "placements"):
            continue
        wanted = split(name, tensor)
        if _placement(tensor, name) != wanted:
            raise ValueError(f"{name} must be placed as {wanted}, got {_placement(tensor, name)}")
        inputs.append(wanted)
    return inputs


def _placement(spec: Any, name: str) -> Any:
    if len(spec.placements) != 1:
        raise ValueError(f"{name} must be on a one-dimensional mesh, such as mesh['tp'], got {spec.mesh}")
    return spec.placements[0]
