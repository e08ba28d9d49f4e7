"""What of this package compiled code depends on, in PyTorch's compile cache key.

Inductor's caches hash the graph, not the lowerings of custom ops: a changed lowering was seen to return the old result.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

_NAME = "torch_fp4kv"


def refresh(dispatch: Iterable[object]) -> None:
    """Puts the digest of the sources and of the `dispatch` settings into `torch.compiler.config.cache_key_tag`.

    What others put there stays.
    """
    settings = hashlib.sha256(repr(sorted(map(repr, dispatch))).encode()).hexdigest()[:16]
    parts = torch.compiler.config.cache_key_tag.split(";")
    others = [part for part in parts if part and not part.startswith(f"{_NAME}=")]
    torch.compiler.config.cache_key_tag = ";".join([*others, f"{_NAME}={source_digest()}-{settings}"])


@functools.cache
def source_digest() -> str:
    """Digest of every source that lowerings, passes and fakes are made of, and of the one that names the version."""
    root = Path(__file__).parent.parent
    files = [root / "__init__.py", root / "_compat.py", *root.glob("lowering/*.py"), *root.glob("ops/**/*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]
