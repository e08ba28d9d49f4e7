"""Importing the package: torch alone is needed, it is quick, and the links at the root are no second way in."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("triton", "transformers", "flashinfer", "torch._dynamo", "torch._inductor")
ROOT = Path(__file__).parent.parent

BLOCK = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if any(name == heavy or name.startswith(heavy + ".") for heavy in {HEAVY!r}):
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
"""

USE = """
import torch, torch_fp4kv
x = torch.randn(1, 2, 3, 32)
words, scales = torch_fp4kv.quantize(x, 0.01)
assert (torch_fp4kv.dequantize(words, scales, 0.01) - x).abs().max() < 1
cache = [words.clone(), scales.clone(), words.clone(), scales.clone()]
torch_fp4kv.append(*cache, x, x, torch.tensor([[2, 1, 0]]), 0.01, 0.01)
out = torch_fp4kv.attention(x, *cache, 0.01, 0.01, torch.tensor([3], dtype=torch.int32))
assert out.isfinite().all() and out.shape == x.shape
"""


def python(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("then", ["", USE], ids=["import", "first use"])
def test_loads_none_of_the_heavy_packages(then: str) -> None:
    code = f"import sys, torch\nbefore = set(sys.modules)\nimport torch_fp4kv\n{then}\n"
    code += f"print([m for m in sys.modules if m not in before and m.startswith({HEAVY!r})])"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_works_where_the_heavy_packages_are_missing() -> None:
    # `import torch` itself loads some of them where they are installed, so that they are blocked after it.
    code = f"import torch\n{BLOCK}\nfor name in list(sys.modules):\n    if name.startswith({HEAVY!r}):\n"
    code += f"        del sys.modules[name]\nsys.meta_path.insert(0, Blocked())\n{USE}"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_adds_less_than_a_fifth_of_a_second() -> None:
    code = "import torch, time\nstart = time.process_time()\nimport torch_fp4kv\nprint(time.process_time() - start)"
    seconds = statistics.median(float(python(code).stdout) for _ in range(5))
    assert seconds < 0.2


@pytest.mark.skipif(not (ROOT / "ops").exists(), reason="not run from a checkout")
@pytest.mark.parametrize("name", ["ops", "ops.quantize", "ops.attention"])
def test_link_at_the_root_is_not_imported(name: str) -> None:
    done = python(f"import {name}", cwd=ROOT)
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert "import `torch_fp4kv.ops`" in done.stderr
