"""`fp4kv::flashinfer_quantize`: FlashInfer's quantiser on Blackwell, by CUDA or CuTe-DSL kernels. By name only.

Its bytes may differ from the reference's by one code or one step of a scale, in fast math more often than without; NaN
becomes +6 where ours is 0. With 4-over-6 the recipe is named in the call, so that an environment variable chooses
nothing.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .. import checks
from .._library import define
from ..format import layout
from ..format.constants import BLOCK
from . import support
from .append import four_over_six
from .paged import on

BACKENDS = ("flashinfer", "cuda", "cute-dsl")
"""What `backend=` of `quantize` names; "flashinfer" is "cute-dsl" where its package is installed, else "cuda"."""

_ran = False


def exact_math() -> None:
    """Makes FlashInfer's quantisers divide and round exactly, for the whole process, before they are first used.

    Sets the environment variable FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH, which FlashInfer reads; without it, or
    another's setting of it, they use fast math. Has no effect on this package's own kernels, which are exact.

    Raises:
        RuntimeError: a FlashInfer quantiser has run in this process already.
    """
    if _ran:
        raise RuntimeError("exact_math() comes before the first use of FlashInfer's quantiser in a process")
    os.environ[support.FAST_MATH_OFF] = "1"


def unsupported(x: Tensor, global_scale: Tensor, bias: Tensor | None, scale_rule: str, backend: str) -> str | None:
    """Why FlashInfer's `backend` cannot serve this `quantize`, on any GPU, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x must be 16-bit, got {x.dtype}"
    if bias is not None:
        return "subtracts no bias"
    if scale_rule not in ("amax", "4over6"):
        return f"has no scale rule {scale_rule!r}"
    if backend == "cute-dsl" and global_scale.numel() != 1:
        return "CuTe-DSL takes one global scale"
    if x.numel() == 0 or x.numel() >= 1 << 31:
        return f"takes from 1 to 2^31 - 1 elements, got {x.numel()}"
    return None


def resolve(backend: str, global_scale: Tensor) -> str:
    """ "cuda" or "cute-dsl" for an entry of `BACKENDS`."""
    if backend != "flashinfer":
        return backend
    return "cuda" if support.package_missing("cutlass") or global_scale.numel() != 1 else "cute-dsl"


def _body(x: Tensor, global_scale: Tensor, *, scale_rule: str = "amax", backend: str = "cuda") -> tuple[Tensor, Tensor]:
    checks.scale_values(global_scale, "global_scale")
    package = "cutlass" if backend == "cute-dsl" else ""
    reason = support.missing(support.QUANTIZE_CAPABILITIES, x.device, package)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot serve this quantize: {reason}")
    return run(x, global_scale, scale_rule, backend)


def run(x: Tensor, global_scale: Tensor, scale_rule: str, backend: str) -> tuple[Tensor, Tensor]:
    """Serves a call for which nothing is missing. FlashInfer's scale multiplies, so it gets `1 / global_scale`."""
    from flashinfer import fp4_quantize

    global _ran
    _ran = True
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    encode = 1.0 / global_scale
    if encode.ndim == 1 and x.ndim >= 3:
        encode = encode[:, None]
    encode = encode.expand(x.shape[:-1]).flatten() if encode.numel() > 1 else encode.view(1)
    with on(x.device):
        packed, scales = fp4_quantize(
            rows,
            encode.contiguous(),
            sf_vec_size=BLOCK,
            sf_use_ue8m0=False,
            is_sf_swizzled_layout=False,
            backend=backend,
            nvfp4_4over6=four_over_six(scale_rule),
        )
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return layout.from_packed(packed).view(shape), scales.view(torch.uint8).view(shape)


def _fake(x: Tensor, global_scale: Tensor, *, scale_rule: str = "amax", backend: str = "cuda") -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.uint8)


FLASHINFER_QUANTIZE = define(
    'flashinfer_quantize(Tensor x, Tensor global_scale, *, str scale_rule="amax", str backend="cuda") '
    "-> (Tensor words, Tensor scales)",
    body=_body,
    fake=_fake,
)
