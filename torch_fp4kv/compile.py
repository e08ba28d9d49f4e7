"""`enable()` and the backend "fp4kv": what `torch.compile` can do beyond the lowerings, which need neither.

    torch.compile(model, backend="fp4kv")           for one model
    torch_fp4kv.enable(); torch.compile(model)      for all that this process compiles, until disable()

Both add the pass that turns `scaled_dot_product_attention` over dequantised tensors into attention over the cache
(`lowering/sdpa_pass.py`), beside the passes that a user has set, and let K's and V's cache writes share a kernel at
batch 1. Importing this module imports no part of Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _compat
from .lowering import registry

_PASS = "pre_grad_custom_pass"
_FUSION_THRESHOLD = "score_fusion_memory_threshold"
_SLOT_BYTES = 8
"""What K's and V's write of one token share: its int64 slot. Inductor's threshold of 10 bytes would part them."""

_set: dict[str, tuple[Any, Any]] = {}
"""Inductor's settings that `enable()` changed: before and after. Empty when not enabled."""


def enable() -> None:
    """Adds lowerings and pass to everything that Inductor compiles from now on. Twice is once.

    Where a pass was set since, the next call adds ours to it. Of `torch.compile(options=...)` with a pre-grad pass of
    its own Inductor takes that alone; `backend="fp4kv"` runs both.
    """
    registry.register()
    config = _compat.inductor_config()
    for name, value in _patches(getattr(config, _PASS), getattr(config, _FUSION_THRESHOLD)).items():
        found = getattr(config, name)
        if name not in _set or found is not _set[name][1]:
            _set[name] = found, value
            setattr(config, name, value)


def disable() -> None:
    """Takes back what `enable()` set, unless it was set anew since. Lowerings stay (see `lowering.opt_out`)."""
    config = _compat.inductor_config()
    for name, (before, ours) in _set.items():
        if getattr(config, name) is ours:
            setattr(config, name, before)
    _set.clear()


def _patches(user_pass: Any, fusion_threshold: int) -> dict[str, Any]:
    from .lowering.sdpa_pass import SdpaPass

    return {
        _PASS: _compat.compose_passes(SdpaPass(), user_pass),
        _FUSION_THRESHOLD: min(fusion_threshold, _SLOT_BYTES),
    }


class Backend:
    """Inductor with our pass and settings beside the user's; takes the `mode` and `options` that Inductor takes."""

    __name__ = "fp4kv"

    def __call__(
        self,
        graph: torch.fx.GraphModule,
        inputs: list[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        registry.register()
        config = _compat.inductor_config()
        inductor = _compat.inductor_backend(mode, options)
        user = {name: inductor.config.get(name, getattr(config, name)) for name in (_PASS, _FUSION_THRESHOLD)}
        inductor.config.update(_patches(*user.values()))
        compiled: Callable[..., Any] = inductor(graph, inputs)
        return compiled

    def reset(self) -> None:
        """Called by `torch._dynamo.reset()`: forgets recorded CUDA graphs, as Inductor's own backend does."""
        _compat.inductor_backend("reduce-overhead", None).reset()


backend = Backend()
