"""A decode step packaged on a GPU runs in a process that cannot import this package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_export import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("storage_format", ["nvfp4", "fp8"])
@pytest.mark.parametrize("ring", [False, True], ids=["plain", "exact ring"])
def test_packaged_decode_step_runs_without_this_package(
    ring: bool, storage_format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-3
    check(tmp_path, ring, False, storage_format, dtype=dtype, device="cuda", tolerance=tolerance)
