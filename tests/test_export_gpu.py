"""A decode step packaged on a GPU runs in a process that cannot import this package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_export import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("ring", "storage_format", "dtype"),
    [(False, "nvfp4", torch.bfloat16), (True, "fp8", torch.bfloat16), (True, "nvfp4", torch.float32)],
    ids=["nvfp4", "fp8, exact ring", "nvfp4, exact ring, float32"],
)
def test_packaged_decode_step_runs_without_this_package(
    ring: bool, storage_format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-3
    check(tmp_path, ring, False, storage_format, dtype=dtype, device="cuda", tolerance=tolerance)
