"""Compiling a function and looking at the result: values against eager, and the code that Inductor wrote."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Generated:
    """What Inductor generated for one graph, C++ or Triton."""

    text: str

    @property
    def calls(self) -> str:
        """The body of `call`, where kernels are launched and buffers allocated."""
        return self.text[self.text.index("def call(") :]

    @property
    def num_kernels(self) -> int:
        return len(re.findall(r"^\w+ = async_compile\.(?:triton|cpp_pybinding)\(", self.text, re.MULTILINE))

    @property
    def allocations(self) -> list[int]:
        """Elements of each buffer that is allocated and is not an output."""
        returned = set(re.findall(r"buf\d+", self.calls[self.calls.rindex("return (") :].split("\n")[0]))
        found = re.findall(r"(buf\d+) = empty_strided_\w+\(\(([\d, ]*)\)", self.calls)
        return [_product(shape) for name, shape in found if name not in returned]


def generated(function: Callable[..., Any], *arguments: Any, **options: Any) -> Generated:
    """The code of `function` compiled as one graph; runs it once."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(torch.compile(function, fullgraph=True, **options), *arguments)
    assert len(codes) == 1
    return Generated(codes[0])


def compare(function: Callable[..., Any], *arguments: Any) -> None:
    """Asserts that `function` compiled as one graph gives and mutates the bytes that it gives and mutates eagerly."""
    torch._dynamo.reset()
    eager, compiled = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected, got = function(*eager), torch.compile(function, fullgraph=True)(*compiled)
    for want, have in zip(tree_leaves((expected, eager)), tree_leaves((got, compiled)), strict=True):
        if isinstance(want, Tensor):
            assert want.dtype == have.dtype and want.shape == have.shape
            torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


def _product(shape: str) -> int:
    size = 1
    for part in shape.split(","):
        size *= int(part) if part.strip() else 1
    return size
