"""Allocation of buffers that compiled graphs mutate."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor with a static address for CUDA graphs, usable in and out of inference mode.

    An inference tensor could not be written outside inference mode later, so it is made outside.
    """
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(tensor)
    return tensor


class Buffers:
    """What owns such tensors: a copy of it can be written in and out of inference mode too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        state: Any = self.__getstate__()
        with torch.inference_mode(False):
            vars(twin).update(copy.deepcopy(state, memo))
        return twin
