"""Which tests run here: those marked `gpu` need a CUDA GPU, those marked `slow` need `--run-slow`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch._inductor.config
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Helpers of several test files: without this a failing assert in them says nothing of its values.
pytest.register_assert_rewrite("compiled", "decode_cases", "kernel_cases", "oracle")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--opcheck", action="store_true", help="opcheck each op on what eager tests call it with")


def pytest_configure() -> None:
    # The tensors here are small: a second thread costs more than it gives, much more on a busy machine.
    torch.set_num_threads(1)
    # A graph that comes from Inductor's cache is not lowered again: an earlier run would hide what a test looks at.
    torch._inductor.config.force_disable_caches = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="no CUDA GPU")
    if not config.getoption("--run-slow"):
        skips["slow"] = pytest.mark.skip(reason="takes minutes; --run-slow runs it")
    for item in items:
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


class OpCheckMode(TorchFunctionMode):
    """Hands a copy of what an op of ours is called with to `torch.library.opcheck`, first calls of a kind only.

    PyTorch's `generate_opcheck_tests` does this for `unittest` classes.
    """

    LIMIT = 1 << 24
    """Elements: opcheck copies its arguments many times, and some tests have tensors that nobody ever touches."""

    seen: ClassVar[set[str]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverloadPacket) and func._qualified_op_name.startswith("fp4kv::"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            kind = tree_map_only(torch.Tensor, lambda t: (t.dtype, t.shape, t.stride(), t.device.type), (args, kwargs))
            key = f"{func} {kind}"
            # opcheck computes a negative size for a tensor with two empty dimensions.
            fit = sum(t.numel() for t in tensors) <= self.LIMIT and all(list(t.shape).count(0) < 2 for t in tensors)
            if key not in self.seen and fit:
                self.seen.add(key)
                copies = tree_map_only(torch.Tensor, lambda t: t.clone(), (args, kwargs))
                result = func(*args, **kwargs)
                torch.library.opcheck(func.default, *copies)
                return result
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def opcheck_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--opcheck"):
        yield
        return
    with OpCheckMode():
        yield
