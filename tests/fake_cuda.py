"""Inductor's CUDA code on a machine without a GPU: a driver that answers for an H200, and tensors that hold nothing."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
    L2_cache_size=50 << 20,
)


class _Generated(Exception):
    """Raised with the generated module in place of loading it."""


def cuda_code(
    function: Callable[..., Any],
    *arguments: tuple[Sequence[int], torch.dtype],
    dynamic_dims: dict[int, int] | None = None,
    state: Callable[[], Any] | None = None,
    **options: Any,
) -> str:
    """The Python module, Triton kernels included, that `torch.compile(function)` generates for an H200.

    Args:
        arguments: `(shape, dtype)` of each tensor argument of `function`, contiguous.
        state: makes what `function` takes before its tensors, a cache for one.
        dynamic_dims: for each argument (by position) that has one its dynamic dimension.
        options: for `torch.compile`.
    """
    from torch._subclasses import FakeTensorMode

    torch._dynamo.reset()
    with driver(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(tuple(shape), dtype=dtype, device="cuda") for shape, dtype in arguments]
        for position, dim in (dynamic_dims or {}).items():
            torch._dynamo.mark_dynamic(tensors[position], dim)
        before = () if state is None else (state(),)
        try:
            torch.compile(function, fullgraph=True, **options)(*before, *tensors)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, _Generated):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            return str(cause.args[0])
    raise AssertionError("nothing was generated")


@contextlib.contextmanager
def driver() -> Iterator[None]:
    """Within it PyTorch and Triton take this machine for one with an H200."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import hints, triton_helpers
    from torch._subclasses import FakeTensor, fake_tensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> None:
            return None

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    def stop(code: str, *_args: Any, **_kwargs: Any) -> None:
        raise _Generated(code)

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return torch.ops.aten.copy_.default(target, source, non_blocking)

    def getitem(x: torch.Tensor, index: Any) -> torch.Tensor:
        for dim, part in enumerate(index if isinstance(index, tuple) else (index,)):
            if part is None:
                x = torch.ops.aten.unsqueeze.default(x, dim)
            else:
                x = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
        return x

    properties = hints.DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )
    patches = [
        mock.patch.multiple(
            torch.cuda,
            get_device_properties=lambda *_a, **_k: PROPERTIES,
            get_device_capability=lambda *_a, **_k: (9, 0),
            get_device_name=lambda *_a, **_k: PROPERTIES.name,
            current_device=lambda: 0,
            is_available=lambda: True,
            device_count=lambda: 1,
            is_initialized=lambda: False,
            _lazy_init=lambda: None,
            is_current_stream_capturing=lambda: False,
            _exchange_device=lambda _index: 0,
            _maybe_exchange_device=lambda _index: 0,
            get_rng_state=lambda *_a, **_k: torch.empty(0, dtype=torch.uint8),
            set_rng_state=lambda *_a, **_k: None,
        ),
        mock.patch.object(torch.accelerator, "is_available", lambda: False),
        mock.patch.multiple(
            CudaInterface,
            is_available=staticmethod(lambda: True),
            current_device=staticmethod(lambda: 0),
            device_count=staticmethod(lambda: 1),
            get_compute_capability=staticmethod(lambda *_a: 90),
        ),
        mock.patch.multiple(
            CudaInterface.Worker,
            get_device_properties=staticmethod(lambda *_a: PROPERTIES),
            current_device=staticmethod(lambda: 0),
        ),
        # The methods' own bindings ask for a CUDA device guard, which a CPU build of torch does not have.
        mock.patch.multiple(FakeTensor, create=True, copy_=copy_, __getitem__=getitem),
        mock.patch.multiple(FunctionalTensor, create=True, copy_=copy_, __getitem__=getitem),
        mock.patch.object(fake_tensor, "init_gpu_context", lambda _device: None, create=True),
        # Its attention patterns are traced on real tensors.
        mock.patch.object(joint_graph, "lazy_init", lambda *_a, **_k: None),
        mock.patch.object(hints.DeviceProperties, "create", classmethod(lambda *_a: properties)),
        mock.patch.object(PyCodeCache, "write", staticmethod(stop)),
        # It would load the driver of a GPU.
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        config.patch(force_disable_caches=True, compile_threads=1, joint_graph_constant_folding=False),
    ]
    _forget_triton()
    saved = triton.runtime.driver._active
    triton.runtime.driver._active = Driver()
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
    finally:
        triton.runtime.driver._active = saved
        _forget_triton()


def _forget_triton() -> None:
    """Clears what PyTorch remembers of whether Triton has a device."""
    from torch.utils import _triton

    for function in vars(_triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
