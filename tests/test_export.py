"""A decode step exported ahead of time runs in a process that cannot import this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import empty_storage, equalized
from torch import Tensor, nn

import torch_fp4kv as fp4

HEADS, KV_HEADS, DIM, RING = 4, 2, 64, 21
TOKENS = 8192
"""Two tiles of the loop over stored tokens."""

RUNNER = """
import sys, torch
sys.modules["torch_fp4kv"] = None
assert not hasattr(torch.ops.fp4kv, "append")
step = torch._inductor.aoti_load_package(sys.argv[1])
tolerance = float(sys.argv[3])
for q, k, v, position, expected in torch.load(sys.argv[2]):
    torch.testing.assert_close(step(q, k, v, position), expected, rtol=tolerance, atol=tolerance)
print("equal")
"""


class DecodeStep(nn.Module):
    """RoPE-like rotation of k, append, attention, over buffers of its own; with an exact ring and a transformed K, or
    without."""

    def __init__(
        self, ring: bool, transformed: bool, storage_format: str = "nvfp4", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.ring = ring
        self.transform = equalized(KV_HEADS, DIM) if transformed else {}
        for name, value in self.transform.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
        self.formats = {"k_format": storage_format, "v_format": storage_format}
        for name in ("k", "v"):
            data, scales = empty_storage(1, KV_HEADS, TOKENS, DIM, storage_format)
            self.register_buffer(f"{name}_data", data.zero_())
            self.register_buffer(f"{name}_scales", None if scales is None else scales.zero_())
            self.register_buffer(f"{name}_exact", torch.zeros(1, KV_HEADS, RING, DIM, dtype=dtype))
        self.register_buffer("scale", torch.full((KV_HEADS,), 2.0**-8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        k = torch.cat([-k[..., DIM // 2 :], k[..., : DIM // 2]], -1) * 0.5 + k
        storage = (self.k_data, self.k_scales, self.v_data, self.v_scales)
        length = (position + 1).to(torch.int32)[None]
        options = {name: getattr(self, name, value) for name, value in self.transform.items()} | self.formats
        window, slots = {}, {}
        if self.ring:
            window = {"k_exact": self.k_exact, "v_exact": self.v_exact}
            slots = {"exact_slots": (position % (RING - 1))[None, None]}
        fp4.append(*storage, k, v, position[None, None], self.scale, self.scale, **options, **window, **slots)
        if self.ring:
            window["exact_from"] = (length - (RING - 1)).clamp(min=0)
        return fp4.attention(q, *storage, self.scale, self.scale, length, **options, **window)


def inputs(position: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    torch.manual_seed(position)
    shapes = ((1, HEADS, 1, DIM), (1, KV_HEADS, 1, DIM), (1, KV_HEADS, 1, DIM))
    return (*[torch.randn(shape).to(device, dtype) for shape in shapes], torch.tensor(position, device=device))


def check(
    tmp_path: Path, *options: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", tolerance: float = 1e-5
) -> None:
    """A package of `DecodeStep(*options)` gives in a process of its own what the eager module gives here."""
    with torch.no_grad():
        exported = torch.export.export(DecodeStep(*options, dtype=dtype).to(device), inputs(0, dtype, device))
        # K is rounded to its dtype before it is quantised, as in eager.
        package = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(tmp_path / "step.pt2"),
            inductor_configs={"emulate_precision_casts": True},
        )
        eager = DecodeStep(*options, dtype=dtype).to(device)
        positions = (*range(40), 4095, 4096, 8191)
        steps = [(*inputs(p, dtype, device), eager(*inputs(p, dtype, device))) for p in positions]
    torch.save(steps, tmp_path / "steps.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", RUNNER, package, str(tmp_path / "steps.pt"), str(tolerance)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "equal"), result.stderr[-2000:]


@pytest.mark.parametrize("ring", [False, True], ids=["plain", "exact ring, transformed K"])
def test_packaged_decode_step_runs_without_this_package(ring: bool, tmp_path: Path) -> None:
    check(tmp_path, ring, ring)
