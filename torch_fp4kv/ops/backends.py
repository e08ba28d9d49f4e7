"""Which backend serves a call here, and why: one table that dispatch, `explain` and `doctor` read.

A backend asked for by name that cannot serve is an error with the reason; only "auto" chooses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType

import torch

from .call import AppendCall, AttentionCall
from .flashinfer import support

_ATTENTION_MODULES = {
    "flashinfer-trtllm-gen": ".flashinfer.trtllm_gen",
    "flashinfer-xqa": ".flashinfer.xqa",
    "triton-gluon": ".kernels.decode",
    "triton-prefill": ".kernels.prefill",
    "triton": ".kernels.fallback",
    "torch": ".torch_attention",
    "flashinfer-prims-ts": ".flashinfer.prims_ts",
    "flashinfer-fa2": ".flashinfer.fa2",
    "flashinfer-dequantize": ".flashinfer.dequantize",
    "flashinfer-materialize-fp8": ".flashinfer.materialize",
}
"""In the order of preference. "torch" serves every call, so what follows it is used by name, or by `prefer`, only."""

_preferred: tuple[str, ...] = ()

_APPEND = ("flashinfer", "triton", "torch")
_OTHER = ("triton", "torch")

APPEND_CHOSEN = ((12, 0), (12, 1))
"""Where FlashInfer's append is chosen: elsewhere on its list it has no attention kernel that is."""

DECODE_ROWS = 32
"""Up to this many query rows a KV head the prefill kernel, which first decodes what is stored, is not chosen."""

OPS = ("quantize", "dequantize", "append", "attention")


@dataclass(frozen=True)
class Choice:
    """The backend that serves, and for each that was passed over the reason in one line."""

    name: str
    passed_over: dict[str, str] = field(default_factory=dict)


served: Counter[tuple[str, str]] = Counter()
"""How often each `(op, backend)` ran in this process, eager or inside a compiled graph as an opaque call."""


Call = AttentionCall | AppendCall


def choose(op: str, device: torch.device, backend: str = "auto", call: Call | None = None) -> Choice:
    """The backend for `op` on `device`.

    Raises:
        ValueError: `backend` names one that is unknown, or that cannot serve; the message has the reason.
    """
    choice = _choose(op, device, backend, call)
    if not torch.compiler.is_compiling():
        served[op, choice.name] += 1
    return choice


def prefer(*names: str) -> None:
    """Makes "auto" try these attention backends first, in this order, in the whole process; without names, none.

    A call that they cannot serve goes where it went before.

    Raises:
        ValueError: a name is unknown.
    """
    global _preferred
    for name in names:
        if name not in _ATTENTION_MODULES:
            raise ValueError(f"unknown backend {name!r} for attention; known: {', '.join(_ATTENTION_MODULES)}")
    _preferred = names


def explain(call: AttentionCall, backend: str = "auto") -> Choice:
    """As `choose` for this attention call, without counting it."""
    return _choose("attention", call.q.device, backend, call)


def explain_device(op: str, device: torch.device) -> Choice:
    """As `choose` for a call without special demands, without counting it."""
    return _choose(op, device, "auto", None)


def _choose(op: str, device: torch.device, backend: str, call: Call | None) -> Choice:
    names = (*_preferred, *_ATTENTION_MODULES) if op == "attention" else _APPEND if op == "append" else _OTHER
    if backend != "auto" and backend not in names:
        raise ValueError(f"unknown backend {backend!r} for {op}; known: auto, {', '.join(dict.fromkeys(names))}")
    passed_over: dict[str, str] = {}
    for name in names if backend == "auto" else (backend,):
        reason = _unusable(name, device, call)
        if reason is None and backend == "auto" and name not in _preferred:
            reason = _left_to_others(name, device, call)
        if reason is None:
            return Choice(name, passed_over)
        passed_over[name] = reason
    raise ValueError(f"backend {backend!r} cannot serve this {op}: {passed_over[backend]}")


def _unusable(name: str, device: torch.device, call: Call | None) -> str | None:
    """Why backend `name` cannot serve, or None."""
    if name == "torch":
        return None
    if name == "flashinfer":
        reason = support.missing(support.APPEND_CAPABILITIES, device)
        return support.append_unsupported(call) if reason is None and isinstance(call, AppendCall) else reason
    if name in support.KERNELS:
        reason = support.attention_missing(name, device)
    else:
        reason = triton_missing(device)
        if reason is None and name == "triton-gluon":
            reason = gluon_missing(device)
    if reason is not None or not isinstance(call, AttentionCall):
        return reason
    answer: str | None = attention_module(name).unsupported(call)
    return answer


def _left_to_others(name: str, device: torch.device, call: Call | None) -> str | None:
    """Why "auto" leaves to a later backend what `name` could serve, or None."""
    if name == "flashinfer":
        return support.missing(APPEND_CHOSEN, device)
    if name == "triton-prefill" and isinstance(call, AttentionCall) and call.q.shape[2] * call.group <= DECODE_ROWS:
        return f"up to {DECODE_ROWS} query rows a KV head, stored tokens are multiplied as they are read"
    return None


def attention_module(name: str) -> ModuleType:
    """The module of attention backend `name`: `run(call)` serves, `unsupported(call)` says why it cannot, or None."""
    return importlib.import_module(_ATTENTION_MODULES[name], __package__)


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, or None."""
    if device.type not in ("cuda", "xpu"):
        return f"Triton kernels run on GPUs, the tensors are on {device.type}"
    if not _installed("triton"):
        return "the package triton is not installed"
    return None


def gluon_missing(device: torch.device) -> str | None:
    """Why the Gluon kernels cannot run on `device`, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "Gluon kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"Gluon kernels need compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if not _installed("triton.experimental.gluon"):
        return "this triton has no Gluon (3.6 is the first that is supported)"
    return None


@functools.cache
def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
