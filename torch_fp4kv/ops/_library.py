"""The one `torch.library.Library` of the package, and how an op enters it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

if not __name__.startswith("torch_fp4kv."):
    raise ImportError(
        f"imported as {__name__!r}: `ops` at the root of the checkout is a link for readers; "
        "import `torch_fp4kv.ops`, since a second import would register every op twice"
    )

NAMESPACE = "fp4kv"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

before_fake: list[Callable[[], None]] = []
"""Run before each fake kernel. Tracing calls the fakes after `torch.compile` has loaded Inductor, so that this is where
lowerings can enter it without importing it."""


def define(schema: str, *, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines `fp4kv::<schema>` with one eager body for all devices and a fake kernel; returns the default overload.

    The body dispatches on device and call itself (see `backends.py`), so that eager, compiled and exported programs
    take one way. Where a gradient would be recorded the op raises instead: a quantised cache has none.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _inference_only(name, _full_precision(body)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _inference_only(name, _traced(fake)), lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _inference_only(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
            raise RuntimeError(
                f"fp4kv::{name} is for inference: an input requires a gradient and a quantised KV cache has none; "
                "call the model under torch.no_grad() or torch.inference_mode()"
            )
        return function(*args, **kwargs)

    return guarded


def _full_precision(body: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would turn the body's float32 products into half precision."""

    def exact(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):
            return body(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return body(*args, **kwargs)

    return exact


def _traced(fake: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        for hook in before_fake:
            hook()
        return fake(*args, **kwargs)

    return traced
