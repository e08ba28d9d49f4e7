"""A cache as one safetensors file: what is stored, to the bit, without pickling.

Tensors are named `layers.<i>.<name>` and `positions.<ring size>.<name>`; data and scales hold the tokens in use only.
The file's metadata has format, version, a header (geometry, recipes) and a SHA-256 over the header and all tensors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.call import head_dim_of
from .contents import Contents, make_room
from .storage import ROW_TENSORS

if TYPE_CHECKING:
    from .hf import NVFP4Cache

FORMAT = "torch_fp4kv.cache"
VERSION = 4

_TOKEN_TENSORS = ("k_data", "k_scales", "v_data", "v_scales")


def save(cache: NVFP4Cache, path: str | Path) -> None:
    """Writes `cache` to `path`; the file appears whole or not at all.

    Raises:
        ValueError: nothing has been stored yet.
        RuntimeError: an earlier call ended halfway, so that layers differ.
    """
    from safetensors.torch import save_file

    # Layers that read another's K and V (Gemma 3n) store nothing.
    stored = [(i, layer) for i, layer in enumerate(cache.layers) if not layer.storage.empty]
    if not stored:
        raise ValueError("nothing to save: the cache has stored no tokens")
    for row in cache.rows:
        cache.check_whole(row)
    batch = stored[0][1].batch_size
    tensors: dict[str, Tensor] = {}
    for i, layer in stored:
        used = _tokens_used(layer)
        for name, tensor in layer.storage.tensors():
            part = tensor[:, :, :used] if name in _TOKEN_TENSORS else tensor
            part = part[:batch] if name in ROW_TENSORS else part
            tensors[f"layers.{i}.{name}"] = part.contiguous().cpu()
    for positions in cache.all_positions():
        for name, tensor in positions.tensors():
            part = tensor[:batch] if tensor.ndim else tensor
            tensors[f"positions.{positions.ring}.{name}"] = part.contiguous().cpu()
    layers = {
        str(i): {"dtype": str(layer.dtype).removeprefix("torch."), "rotated": layer.storage.rotated}
        for i, layer in stored
    }
    header = json.dumps({**_geometry(cache), "layers": layers})
    metadata = {"format": FORMAT, "version": str(VERSION), "header": header, "sha256": _digest(header, tensors)}
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(cache: NVFP4Cache, path: str | Path, device: torch.device | str | None = None) -> None:
    """Fills `cache` with what `save` wrote; everything is checked before anything is changed.

    Args:
        cache: of the same layers, recipe and capacity as the saved one.
        device: where the layers go that have no buffers yet; default the CPU.

    Raises:
        ValueError: the file is truncated, altered, foreign or of another version, or does not go with `cache`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    header = _header(path, metadata, tensors)
    for key, value in _geometry(cache).items():
        if header[key] != value:
            raise ValueError(f"{path} does not go with this cache: its {key} is {header[key]}, the cache's {value}")
    saved = [_Saved.of(cache, int(i), tensors, facts) for i, facts in header["layers"].items()]
    for one in saved:
        one.contents.check(str(path))
    make_room(cache, [one.contents for one in saved], device)
    with cache.changing():
        for one in saved:
            one.restore()
        for positions in cache.all_positions():
            positions.restore({name: tensors[f"positions.{positions.ring}.{name}"] for name, _ in positions.tensors()})


def _header(path: str | Path, metadata: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} holds no saved cache: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("version") != str(VERSION):
        raise ValueError(f"{path} is of version {metadata.get('version')}; this package reads version {VERSION}")
    text = metadata.get("header", "")
    if metadata.get("sha256") != _digest(text, tensors):
        raise ValueError(f"{path} was altered: header and tensors do not have the checksum they were saved with")
    header: dict[str, Any] = json.loads(text)
    return header


def _geometry(cache: NVFP4Cache) -> dict[str, Any]:
    """What a saved cache and the one that takes it must have in common."""
    return {
        "max_cache_len": cache.layers[0].max_cache_len,
        "windows": [layer.sliding_window for layer in cache.layers],
        "recipes": [json.loads(layer.storage.recipe.to_json()) for layer in cache.layers],
    }


def _tokens_used(layer: Any) -> int:
    if layer.is_sliding:
        return int(layer.storage.tokens)
    return min(int(layer.positions.lengths.max()), layer.storage.tokens)


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Saved:
    """A layer's saved tensors by name, and where they go."""

    contents: Contents
    tensors: dict[str, Tensor]
    rotated: bool

    @classmethod
    def of(cls, cache: NVFP4Cache, index: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> _Saved:
        prefix, layer = f"layers.{index}.", cache.layers[index]
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        recipe, (batch, heads, used, _) = layer.storage.recipe, own["k_data"].shape
        dims = head_dim_of(own["k_data"], recipe.k_format), head_dim_of(own["v_data"], recipe.v_format)
        contents = Contents(index, layer, batch, heads, *dims, used, getattr(torch, facts["dtype"]))
        return cls(contents, own, facts["rotated"])

    def restore(self) -> None:
        layer, used = self.contents.layer, self.contents.tokens
        layer.storage.rotated = self.rotated
        for name, tensor in layer.storage.tensors():
            target = tensor[:, :, :used] if name in _TOKEN_TENSORS else tensor
            target.copy_(self.tensors[name])
        layer.storage.empty = False
