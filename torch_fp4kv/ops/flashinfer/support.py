"""Which FlashInfer kernel takes which call on which GPU, and the reason where it does not.

The limits are FlashInfer 0.7.4's, as its sources have them; a call outside them is refused here, because some are not
checked there and give wrong numbers instead of an error.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ..call import AppendCall, AttentionCall

MINIMUM = (0, 7, 4)
ANY = 1 << 30
FAST_MATH_OFF = "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH"
FAST_MATH_OFF_CUDA = "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH"
"""An older name, which FlashInfer's CUDA kernels read too."""

_SM8X_SM90 = ((8, 0), (8, 6), (8, 9), (9, 0))
_FA2 = (*_SM8X_SM90, (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
_BF16 = (torch.bfloat16,)


@dataclass(frozen=True)
class Kernel:
    """One FlashInfer kernel for attention over NVFP4 K and V.

    Attributes:
        capabilities: GPUs it runs on.
        head_sizes: of K and V, which must be alike.
        page_sizes: tokens a page; empty for any.
        v_scale_layout: the order in which it reads V's block scales; K's are linear everywhere.
        dtypes: of the query. 16-bit kernels get bfloat16 alone: the global scale of K is folded into the query, and
            float16 has no range for it.
        max_queries: new tokens a row.
        max_group: query heads a KV head.
        needs_table: takes pages behind a block table only (its TMA descriptors want strides in increasing order,
            which a row of a static cache cut into pages has not).
        new_tokens: is for calls that bring K and V of their own tokens, which the others do not take.
        sinks, softcap, lse, capture: takes sink logits, has a soft-cap, gives a log-sum-exp, can be captured in a CUDA
            graph.
        package: what it needs besides FlashInfer, or "".
        error: relative error (2-norm) of the output that its roundings explain: of 16-bit query, weights and output,
            or of all of them and K and V in E4M3.
    """

    capabilities: tuple[tuple[int, int], ...]
    head_sizes: tuple[int, ...]
    page_sizes: tuple[int, ...]
    v_scale_layout: str = "linear"
    dtypes: tuple[torch.dtype, ...] = _BF16
    max_queries: int = 1
    max_group: int = ANY
    needs_table: bool = False
    new_tokens: bool = False
    sinks: bool = True
    softcap: bool = False
    lse: bool = False
    capture: bool = True
    package: str = ""
    error: float = 2.0**-7


KERNELS = {
    "flashinfer-trtllm-gen": Kernel(
        capabilities=((10, 0), (10, 3)),
        head_sizes=(64, 128, 256),
        page_sizes=(16, 32, 64),
        v_scale_layout="4token",
        dtypes=(torch.bfloat16, torch.float16),
        max_queries=16,
        # A block takes 16 query heads, in a larger group those of two KV heads where 16 does not divide it.
        max_group=16,
        needs_table=True,
        error=2.0**-4,
    ),
    "flashinfer-prims-ts": Kernel(
        capabilities=((10, 0), (10, 3), (10, 7)),
        head_sizes=(64, 128, 256),
        page_sizes=(4, 8, 16, 32, 64, 128),
        v_scale_layout="4token",
        max_queries=16,
        max_group=128,
        needs_table=True,
        lse=True,
        package="cutlass",
    ),
    "flashinfer-xqa": Kernel(
        capabilities=((12, 0), (12, 1)),
        # It loads a token's block scales four at a time: of other head sizes, which it takes too, some stay 0.
        head_sizes=(64, 128, 192, 256),
        page_sizes=(16, 32, 64, 128),
        max_group=16,
    ),
    "flashinfer-fa2": Kernel(
        capabilities=_FA2,
        head_sizes=(128, 256),
        page_sizes=(),
        max_queries=ANY,
        sinks=False,
        softcap=True,
        lse=True,
        capture=False,
    ),
    "flashinfer-dequantize": Kernel(
        capabilities=_FA2,
        head_sizes=(64, 128, 256),
        page_sizes=(),
        max_queries=ANY,
        needs_table=True,
        new_tokens=True,
        sinks=False,
        softcap=True,
        lse=True,
        capture=False,
    ),
    "flashinfer-materialize-fp8": Kernel(
        capabilities=((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
        head_sizes=(64, 128, 256),
        page_sizes=(),
        v_scale_layout="4token",
        max_queries=ANY,
        needs_table=True,
        new_tokens=True,
        sinks=False,
        softcap=True,
        lse=True,
        capture=False,
        package="cutlass",
        error=2.0**-4,
    ),
}
"""By the name that `backend=` takes."""

JOINS_EXACT = tuple(name for name, kernel in KERNELS.items() if kernel.lse and not kernel.new_tokens)
"""Those whose log-sum-exp joins tokens with exact copies to what they read (`exact.py`)."""

APPEND_CAPABILITIES = _FA2
APPEND_HEAD_SIZES = (64, 128, 256, 512)
QUANTIZE_CAPABILITIES = ((10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1))


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def missing(capabilities: tuple[tuple[int, int], ...], device: torch.device, package: str = "") -> str | None:
    """Why a FlashInfer kernel for `capabilities` that also needs `package` cannot run on `device`, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "FlashInfer is for NVIDIA GPUs"
    have = capability(device)
    if have not in capabilities:
        wanted = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        return f"for compute capability {wanted}; this GPU has {have[0]}.{have[1]}"
    return not_installed() or (package_missing(package) if package else None)


def not_installed() -> str | None:
    """Why FlashInfer cannot be used in this process, whatever the GPU, or None."""
    installed = version()
    if installed is None:
        return "flashinfer-python is not installed: pip install 'torch-fp4kv[flashinfer]'"
    if _numbers(installed) < MINIMUM:
        return f"flashinfer-python {installed} is installed, {'.'.join(map(str, MINIMUM))} is the first that is used"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not _can_compile():
        return "FlashInfer compiles its kernels on first use, and neither nvcc nor flashinfer-jit-cache is installed"
    return None


@functools.cache
def version() -> str | None:
    """Installed version of flashinfer-python, or None."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


@functools.cache
def package_missing(package: str) -> str | None:
    """Why `package`, part of nvidia-cutlass-dsl, cannot be imported, or None."""
    found = importlib.util.find_spec(package) is not None
    return None if found else f"the package {package} (nvidia-cutlass-dsl) is not installed"


@functools.cache
def _can_compile() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()
    return nvcc or importlib.util.find_spec("flashinfer_jit_cache") is not None


def attention_missing(name: str, device: torch.device) -> str | None:
    """Why kernel `name` can serve no call on `device`, or None."""
    return missing(KERNELS[name].capabilities, device, KERNELS[name].package)


def attention_unsupported(name: str, call: AttentionCall) -> str | None:
    """Why kernel `name` cannot serve `call`, on any GPU, or None."""
    kernel = KERNELS[name]
    return _form_unsupported(kernel, call) or _layout_unsupported(kernel, call) or _options_unsupported(kernel, call)


def _form_unsupported(kernel: Kernel, call: AttentionCall) -> str | None:
    if call.q.numel() == 0:
        return "there is no query"
    if (call.k_format, call.v_format) != ("nvfp4", "nvfp4"):
        return f"K and V must be nvfp4, got {call.k_format} and {call.v_format}"
    if call.k_new is not None and not kernel.new_tokens:
        return "reads the call's own tokens from storage only"
    if kernel.new_tokens and call.k_new is None:
        return "is for prefills that bring their own tokens"
    reason = _exact_unsupported(kernel, call)
    if reason is not None:
        return reason
    if kernel.new_tokens and (call.transform.moves_queries or call.k_bias is not None or call.v_bias is not None):
        return "new keys and stored ones must meet the same query, without a bias"
    for tensor, name in ((call.mask, "mask"), (call.starts, "starts"), (call.q_lengths, "q_lengths")):
        if tensor is not None:
            return f"takes no {name}"
    if call.return_lse and not kernel.lse:
        return "gives no log-sum-exp"
    if call.softmax_scale <= 0:
        return f"the softmax scale must be positive, got {call.softmax_scale}"
    # Beside exact copies the sink joins them, and the bias the kernel's log-sum-exp.
    sink_in_kernel = call.sink_logits is not None and call.k_exact is None
    if call.k_bias is not None and (sink_in_kernel or call.softcap > 0):
        return "with a bias of K, a constant in every score must not matter, as it does under a sink or a soft-cap"
    if call.v_bias is not None and sink_in_kernel:
        return "with a bias of V, weights must sum to 1, as they do not under a sink"
    return None


def _exact_unsupported(kernel: Kernel, call: AttentionCall) -> str | None:
    """Why the tokens with exact copies cannot join the others (`exact.py`), or None."""
    if call.k_exact is None:
        return None
    if not kernel.lse:
        return "has no log-sum-exp by which tokens with exact copies could join the others"
    if kernel.new_tokens:
        return "cannot leave out stored tokens that exact ones stand in for"
    if call.q.shape[2] > 1 or call.window > 0 or call.exact_from is None or call.block_table is None:
        return "takes exact copies for one new token a row without a window, behind a block table"
    if kernel.needs_table and call.num_sink_tokens % call.page_size:
        return f"the {call.num_sink_tokens} sinks must fill whole pages of {call.page_size}, which it cannot cut"
    if len({x.stride() for x in (call.k_data, call.k_scales, call.v_data, call.v_scales) if x is not None}) > 1:
        return "data and scales must have the same strides, for one table of what is left of their pages"
    return None


def _layout_unsupported(kernel: Kernel, call: AttentionCall) -> str | None:
    d, dv = call.head_dim, call.v_head_dim
    if d != dv or d not in kernel.head_sizes:
        return f"K and V must have one head size among {kernel.head_sizes}, got {d} and {dv}"
    if call.v_scale_layout != kernel.v_scale_layout:
        return f"reads V's scales as {kernel.v_scale_layout!r}, this cache has them as {call.v_scale_layout!r}"
    if call.k_data.stride() != call.v_data.stride():
        return "K and V must have the same strides: FlashInfer addresses V with those of K"
    if call.block_table is None:
        if kernel.needs_table:
            return "takes pages behind a block table only (a paged cache)"
        if call.q.shape[2] > 1 or 0 < call.window < call.page_size:
            return "without a block table a row may be a ring, which only one query without a window sees right"
        if call.page_size % 16:
            return f"the cache must hold a multiple of 16 tokens, got {call.page_size}"
    elif kernel.page_sizes and call.page_size not in kernel.page_sizes:
        return f"the page size must be among {kernel.page_sizes}, got {call.page_size}"
    for data in (call.k_data, call.v_data, call.k_scales, call.v_scales):
        if data is not None and data.data_ptr() % 16:
            return "storage must be aligned to 16 bytes"
    return None


def _options_unsupported(kernel: Kernel, call: AttentionCall) -> str | None:
    queries = call.q.shape[2]
    if call.q.dtype not in kernel.dtypes:
        return f"the query must be {' or '.join(map(str, kernel.dtypes))}, got {call.q.dtype}"
    if queries > kernel.max_queries:
        return f"at most {kernel.max_queries} new tokens a row, got {queries}"
    if call.group > kernel.max_group:
        return f"at most {kernel.max_group} query heads a KV head, got {call.group}"
    if queries > 1 and not call.causal:
        return "several new tokens are causal among themselves"
    if call.sink_logits is not None and not kernel.sinks and call.k_exact is None:
        return "ignores sink logits without an error"
    if call.softcap > 0 and not kernel.softcap:
        return "has no soft-cap"
    if not kernel.capture and capturing(call.q.device):
        return "plans on the host, which a CUDA graph cannot capture"
    return None


def append_unsupported(call: AppendCall) -> str | None:
    """Why FlashInfer's append cannot serve `call`, on any GPU, or None."""
    if (call.k_format, call.v_format) != ("nvfp4", "nvfp4"):
        return f"K and V must be nvfp4, got {call.k_format} and {call.v_format}"
    if call.v_scale_layout != "linear":
        return "writes V's scales in linear order only"
    if call.k_bias is not None or call.v_bias is not None or call.transform.moves_queries:
        return "subtracts no bias and transforms nothing"
    if call.exact_slots is not None:
        return "keeps no exact copies"
    if call.k_global.numel() != 1 or call.v_global.numel() != 1:
        return "takes one global scale for all heads"
    if call.scale_rule not in ("amax", "4over6"):
        return f"has no scale rule {call.scale_rule!r}"
    if call.k.dtype not in (torch.bfloat16, torch.float16):
        return f"K and V must be 16-bit, got {call.k.dtype}"
    d, dv = call.k.shape[3], call.v.shape[3]
    if d != dv or d not in APPEND_HEAD_SIZES:
        return f"K and V must have one head size among {APPEND_HEAD_SIZES}, got {d} and {dv}"
    return None


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
