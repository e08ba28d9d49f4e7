"""`torch.library.opcheck`, all four utilities, for each op over contiguous, strided, size-1 and empty inputs."""

from __future__ import annotations

import pytest
import torch

from torch_fp4kv.testing import OP_CASES, OpCase


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_opcheck(case: OpCase) -> None:
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_opcheck_on_the_gpu(case: OpCase) -> None:
    case.check("cuda")


def test_every_op_has_cases():
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("fp4kv::") for name in names if name.startswith("fp4kv::")}
    # FlashInfer's own quantiser runs only where FlashInfer and one of its GPUs are.
    assert ours - {"flashinfer_quantize"} == {case.op for case in OP_CASES}
