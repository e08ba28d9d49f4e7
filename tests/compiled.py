"""Compiling a function and looking at the result: values against eager, and the code that Inductor wrote."""

from __future__ import annotations

import copy
import re
from collections import Counter
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
        """Launches, not definitions: one kernel may be launched twice."""
        return len(re.findall(LAUNCH, self.calls, re.MULTILINE))

    @property
    def summary(self) -> str:
        """Kernels with what they read, write and reduce, then launches, other calls and allocations in order.

        Leaves out what differs between machines: vector widths, thread counts, block sizes.
        """
        lines = [
            _triton_kernel(name, source) for name, source in re.findall(TRITON, self.text, re.DOTALL | re.MULTILINE)
        ]
        lines += [_cpp_kernel(name, arguments) for name, arguments in re.findall(CPP, self.text, re.MULTILINE)]
        for line in self.calls.splitlines()[1:]:
            launch = re.match(LAUNCH, line)
            extern = re.search(r"((?:torch\.ops|extern_kernels|aten)\.[\w.]+)\(|\w+(\.copy_)\(", line)
            buffer = re.search(r"= empty_strided_\w+\((\([\d, ]*\)), \([\d, ]*\), torch\.(\w+)", line)
            if launch:
                lines.append(f"launch {launch.group(1) or launch.group(2)}")
            elif extern:
                lines.append(f"call {extern.group(1) or extern.group(2)}")
            elif buffer:
                lines.append(f"allocate {buffer.group(2)} {buffer.group(1)}")
            elif line.startswith("runner = "):
                break
        return "\n".join(lines) + "\n"

    @property
    def allocations(self) -> list[int]:
        """Elements of each buffer that is allocated and is not an output."""
        returned = set(re.findall(r"buf\d+", self.calls[self.calls.rindex("return (") :].split("\n")[0]))
        for new, old in reversed(re.findall(r"(buf\d+) = (buf\d+); del", self.calls)):
            if new in returned:
                returned.add(old)
        found = re.findall(r"(buf\d+) = empty_strided_\w+\(\(([\d, ]*)\)", self.calls)
        return [_product(shape) for name, shape in found if name not in returned]


LAUNCH = r"\s+(triton_\w+)\.run\(|\s+(cpp_fused\w*)\("
TRITON = r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''"
CPP = r"^(cpp_\w+) = async_compile\.cpp_pybinding\(\[(.*?)\]"


def generated(function: Callable[..., Any], *arguments: Any, **options: Any) -> Generated:
    """The code of `function` compiled as one graph; runs it once."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(torch.compile(function, fullgraph=True, **options), *arguments)
    assert len(codes) == 1
    return Generated(codes[0])


def compare(function: Callable[..., Any], *arguments: Any, tolerance: float = 0.0) -> None:
    """Asserts that `function` compiled as one graph gives and mutates the bytes that it gives and mutates eagerly.

    Args:
        tolerance: absolute, for what it returns; what it mutates is compared to the bit.
    """
    torch._dynamo.reset()
    eager, compiled = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected, got = function(*eager), torch.compile(function, fullgraph=True)(*compiled)
    for want, have, atol in ((expected, got, tolerance), (eager, compiled, 0.0)):
        for w, h in zip(tree_leaves(want), tree_leaves(have), strict=True):
            if isinstance(w, Tensor):
                assert w.dtype == h.dtype and w.shape == h.shape
                torch.testing.assert_close(h, w, rtol=0, atol=atol, equal_nan=True)


def _triton_kernel(name: str, source: str) -> str:
    signature = dict(re.findall(r"'(\w+_ptr\d+)': '\*(\w+)'", source))
    loads = [signature[pointer] for pointer in re.findall(r"tl\.load\((\w+_ptr\d+)", source)]
    stores = [signature[pointer] for pointer in re.findall(r"tl\.store\((\w+_ptr\d+)", source)]
    kind = re.search(r"@triton_heuristics\.(\w+)\(", source)
    assert kind
    reductions = re.findall(r"= (?:triton_helpers\.|tl\.)(max2|min2|sum)\(", source)
    return f"{kind.group(1)} {name}\n  load {_tally(loads)}\n  store {_tally(stores)}\n  reduce {_tally(reductions)}"


def _cpp_kernel(name: str, arguments: str) -> str:
    pointers = [argument.strip().strip("'") for argument in arguments.split(",")]
    reads = [p.removeprefix("const ").rstrip("*") for p in pointers if p.startswith("const ") and p.endswith("*")]
    writes = [p.rstrip("*") for p in pointers if not p.startswith("const ") and p.endswith("*")]
    return f"cpp {name}\n  read {_tally(reads)}\n  write {_tally(writes)}"


def _tally(names: list[str]) -> str:
    counts = Counter(names)
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts)) or "nothing"


def _product(shape: str) -> int:
    size = 1
    for part in shape.split(","):
        size *= int(part) if part.strip() else 1
    return size
