"""Which ops are lowered, for which devices and dtypes, and what became of each call that was compiled."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _compat
from ..ops import _library
from . import cache_key

LOWERED = {
    "quantize": ("quantize", "lower"),
    "dequantize": ("dequantize", "lower"),
    "append": ("append", "lower"),
    "attention": ("attention", "lower"),
    "attention_with_lse": ("attention", "lower_with_lse"),
}
"""For each op with a lowering the module of this package and the function, called as the op is; `unsupported` of the
same module says why a call must be left to the op."""

DEVICES = ("cpu", "cuda")
"""Device types whose generated code is tested to give the bytes of the eager ops."""


class OptOut(NamedTuple):
    """Calls of `op` on device type `device` with `dtype` (of what is quantised, or of the result); None means any."""

    op: str
    device: str | None
    dtype: torch.dtype | None

    def covers(self, op: str, device: str, dtype: torch.dtype) -> bool:
        return self.op == op and self.device in (None, device) and self.dtype in (None, dtype)


_opt_outs: set[OptOut] = set()
_counts: Counter[tuple[str, str]] = Counter()
_registered = False


def opt_out(op: str, *, device: str | None = None, dtype: torch.dtype | None = None) -> None:
    """Leaves `op` ("quantize", …) to its eager body in code compiled from now on, on `device` ("cuda", …) or all.

    Args:
        dtype: only where x or k (for "dequantize" the result) has this dtype.
    """
    if op not in LOWERED:
        raise ValueError(f"unknown op {op!r}; lowered are: {', '.join(LOWERED)}")
    _opt_outs.add(OptOut(op, device, dtype))
    cache_key.refresh(_opt_outs)


def opt_in(op: str, *, device: str | None = None, dtype: torch.dtype | None = None) -> None:
    """Takes back `opt_out` with the same arguments; without one it does nothing."""
    _opt_outs.discard(OptOut(op, device, dtype))
    cache_key.refresh(_opt_outs)


def record(subject: str, outcome: str) -> None:
    """Counts one compiled call for `report()`."""
    _counts[subject, outcome] += 1


def report() -> dict[str, dict[str, int]]:
    """For each op how many compiled calls were "lowered", and how many left to the op, by reason.

    Under "sdpa": how many `scaled_dot_product_attention` over dequantised tensors became attention over the cache
    ("rewritten"), and why others did not. Counts what this process compiled; code that came from Inductor's cache is
    not counted.
    """
    result: dict[str, dict[str, int]] = {subject: {} for subject in (*LOWERED, "sdpa")}
    for (subject, outcome), count in sorted(_counts.items()):
        result[subject][outcome] = count
    return result


def register() -> None:
    """Registers the lowerings with Inductor, importing it if need be; once, later calls do nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    for name, (module_name, function) in LOWERED.items():
        module = importlib.import_module(f".{module_name}", __package__)
        op = getattr(torch.ops.fp4kv, name).default
        lower = _lowering(name, op, module.unsupported, getattr(module, function))
        _compat.register_lowering(op, lower, as_in_eager=module_name == "attention")


def _register_if_loaded() -> None:
    if not _registered and _compat.inductor_is_loaded():
        register()


def _lowering(
    name: str, op: Any, unsupported: Callable[..., str | None], lower: Callable[..., Any]
) -> Callable[..., Any]:
    def lower_or_call(*args: Any, **kwargs: Any) -> Any:
        reason = _excluded(name, args, kwargs) or unsupported(*args, **kwargs)
        record(name, reason or "lowered")
        if reason is not None:
            return _compat.fallback(op)(*args, **kwargs)
        return lower(*args, **kwargs)

    return lower_or_call


def _excluded(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call is left to the op whatever its arguments are, or None."""
    source = args[4] if name == "append" else args[0]
    dtype = kwargs["dtype"] if name == "dequantize" else source.get_dtype()
    device = source.get_device().type
    if device not in DEVICES:
        return f"not lowered on {device}"
    for rule in _opt_outs:
        if rule.covers(name, device, dtype):
            return f"opted out (device {rule.device or 'any'}, dtype {rule.dtype or 'any'})"
    return None


cache_key.refresh(_opt_outs)
_library.before_fake.append(_register_if_loaded)
