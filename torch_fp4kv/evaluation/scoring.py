"""What the commands that score a cache share: the text, the model's name for its cache, and a cache's bytes."""

from __future__ import annotations

import inspect
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def documentation_text() -> str:
    """A fixed English text that every Python has: the topics of its `help()`."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def rows_of_text(tokenizer: Any, num_rows: int, num_tokens: int, spacing: int = 2048, skip: int = 2) -> Tensor:
    """int64 `[num_rows, num_tokens]`: row i starts at token `(skip + i) · spacing` of the documentation text."""
    tokens: Tensor = tokenizer(documentation_text(), return_tensors="pt", verbose=False).input_ids[0]
    spacing = max(spacing, num_tokens)
    needed = (skip + num_rows) * spacing
    if tokens.numel() < needed:
        raise ValueError(
            f"the text has {tokens.numel()} tokens; {num_rows} rows of {num_tokens}, {spacing} apart, need {needed}"
        )
    return torch.stack([tokens[(skip + i) * spacing :][:num_tokens] for i in range(num_rows)])


def model_source(path: str | Path) -> tuple[Path, dict[str, str]]:
    """What `from_pretrained` takes for `path`, a model's directory or a GGUF file: the directory, and options.

    Raises:
        ValueError: there is nothing at `path`.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no model at {path}")
    return (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})


def model_name(path: str | Path) -> str:
    """What tables call the model at `path`; a version such as 1.7B stays whole."""
    return Path(path).name.removesuffix(".gguf")


def cache_argument(call: Callable[..., Any]) -> str:
    """What `call`, a model's `forward`, calls its cache: "past_key_values" until transformers took up "cache"."""
    return "cache" if "cache" in inspect.signature(call).parameters else "past_key_values"


def cache_bytes(cache: Any, num_rows: int) -> tuple[int, int]:
    """`(bytes a token, bytes a row)` of an `NVFP4Cache` that holds `num_rows` rows: what grows with the tokens a row
    can hold, and what does not (exact copies, scales and statistics of all rows, divided by the rows)."""
    stored = [
        tensor
        for layer in cache.layers
        for tensor in (layer.storage.k_data, layer.storage.k_scales, layer.storage.v_data, layer.storage.v_scales)
        if tensor is not None
    ]
    a_token = sum(t.nbytes // (t.shape[0] * t.shape[2]) for t in stored)
    return a_token, (cache.nbytes() - sum(t.nbytes for t in stored)) // num_rows
