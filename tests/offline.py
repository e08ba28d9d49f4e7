"""Compiles what a launcher would launch, for a GPU that is not there, and reads the machine code."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory a block may have, by compute capability (CUDA programming guide, technical specifications)."""


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: its name, the grid of the launch and whether that is ahead of time (programmatic dependent
    launch), shared memory in bytes, its instructions in order, and its code."""

    name: str
    grid: tuple[int, ...]
    ahead: bool
    shared: int
    instructions: list[str]
    cubin: bytes

    def count(self, *mnemonics: str) -> int:
        """How many instructions begin with one of `mnemonics`."""
        return sum(instruction.startswith(mnemonics) for instruction in self.instructions)

    def waits_first(self, *, triggers: bool) -> bool:
        """Whether the launch is ahead of time and the kernel waits for what came before, first, then, if it `triggers`,
        lets the next one start (which may read what came before without a wait of its own)."""
        order = [x for x in self.instructions if x.startswith(("ACQBULK", "PREEXIT", "LDG", "STG", "ATOM", "RED"))]
        return self.ahead and order[0] == "ACQBULK" and (order[1] == "PREEXIT") == triggers == self.count("PREEXIT")

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        import triton

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
        assert found, usage
        return int(found[1])

    @property
    def spills(self) -> int:
        """Loads from and stores to local memory."""
        return self.count("LDL", "STL")


@contextlib.contextmanager
def launches(capability: int) -> Iterator[list[Compiled]]:
    """Within it, Triton launches compile for sm_`capability` and are recorded instead of run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime.jit import JITFunction

    class Driver(DriverBase):
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, _device: int) -> int:
            return 0

        def get_active_torch_device(self) -> None:
            return None

        def get_benchmarker(self) -> None:
            return None

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        instructions = _instructions(kernel.asm["sass"])
        launch = (tuple(grid), kernel.metadata.launch_pdl)
        compiled.append(Compiled(self.fn.__name__, *launch, kernel.metadata.shared, instructions, kernel.asm["cubin"]))
        return kernel

    saved = triton.runtime.driver._active
    triton.runtime.driver._active = Driver()
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield compiled
    finally:
        triton.runtime.driver._active = saved


def _instructions(sass: str) -> list[str]:
    """Mnemonics of Triton's disassembly: `control codes <tab> [@predicate] MNEMONIC operands`."""
    found = re.findall(r"^\S+\t\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass, re.MULTILINE)
    assert found, "no instruction recognised: has the form of the disassembly changed?"
    return found
