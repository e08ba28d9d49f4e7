"""Compiled code from Inductor's cache belongs to the lowerings that are installed now."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import torch_fp4kv
from torch_fp4kv.lowering import cache_key

PROGRAM = """
import torch, torch_fp4kv
from torch._dynamo.utils import counters
words, scales = torch.full((1, 1), 0x1111111111111111), torch.full((1, 1), 0x38, dtype=torch.uint8)
out = torch.compile(lambda w, s, g: torch_fp4kv.dequantize(w, s, g))(words, scales, torch.tensor(1.0))
print(out[0, 0].item(), counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def run(package_parent: Path, cache: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(package_parent), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, cwd=package_parent
    )
    return result.stdout.split()


def test_two_versions_of_a_lowering_share_a_cache_and_give_two_results(tmp_path: Path) -> None:
    source = Path(torch_fp4kv.__file__).parent
    for version in ("first", "second"):
        shutil.copytree(source, tmp_path / version / "torch_fp4kv", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "second" / "torch_fp4kv" / "lowering" / "arithmetic.py"
    text = changed.read_text()
    assert text.count("const(0.5)") == 1
    changed.write_text(text.replace("const(0.5)", "const(0.25)"))

    first, second, again = (run(tmp_path / version, tmp_path / "cache") for version in ("first", "second", "first"))
    assert first == ["0.5", "0", "0"]
    assert second == ["0.25", "0", "0"]
    assert again[0] == "0.5" and again[1:] != ["0", "0"], "the third process was to find the first one's code"


def test_the_key_changes_with_every_source_of_ops_and_lowerings(tmp_path: Path) -> None:
    """An op's schema too: Inductor's own key does not know what an op mutates."""
    package = shutil.copytree(
        Path(torch_fp4kv.__file__).parent, tmp_path / "torch_fp4kv", ignore=shutil.ignore_patterns("__pycache__")
    )
    spec = importlib.util.spec_from_file_location("copied_cache_key", package / "lowering" / "cache_key.py")
    assert spec is not None and spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    sources = [package / "__init__.py", package / "_compat.py"]
    sources += [*package.glob("ops/**/*.py"), *package.glob("lowering/**/*.py")]
    digests = {copied.source_digest()}
    for source in sources:
        source.write_text(source.read_text() + "\n")
        copied.source_digest.cache_clear()
        digests.add(copied.source_digest())
    assert len(digests) == 1 + len(sources)


def test_tag_keeps_what_others_put_there() -> None:
    before = torch.compiler.config.cache_key_tag
    try:
        torch.compiler.config.cache_key_tag = "theirs=1"
        cache_key.refresh(())
        tag = torch.compiler.config.cache_key_tag
        cache_key.refresh(())
        assert torch.compiler.config.cache_key_tag == tag
        assert tag.startswith("theirs=1;torch_fp4kv=")
    finally:
        torch.compiler.config.cache_key_tag = before


def test_import_loads_no_compiler_and_registering_is_quick() -> None:
    program = """
import sys, time, torch
before = set(sys.modules)
import torch_fp4kv
new = set(sys.modules) - before
assert not [m for m in new if m.startswith(("torch._inductor", "torch._dynamo", "triton"))], new
assert "torch_fp4kv=" in torch.compiler.config.cache_key_tag
import torch._inductor.lowering
start = time.perf_counter()
torch_fp4kv.lowering.register()
print(time.perf_counter() - start)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 0.05
