"""A cache as one safetensors file: what is stored, to the bit, without pickling.

Tensors are named `layers.<i>.<name>` and `positions.<ring size>.<name>`; data and scales hold the tokens in use only.
The file's metadata has format, version, geometry, recipes and a SHA-256 over all tensor bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.call import head_dim_of

if TYPE_CHECKING:
    from .hf import NVFP4Cache

FORMAT = "torch_fp4kv.cache"
VERSION = 1

_TOKEN_TENSORS = ("k_data", "k_scales", "v_data", "v_scales")


def save(cache: NVFP4Cache, path: str | Path) -> None:
    """Writes `cache` to `path`; the file appears whole or not at all.

    Raises:
        ValueError: nothing has been stored yet.
    """
    from safetensors.torch import save_file

    if not all(layer.is_initialized for layer in cache.layers):
        raise ValueError("nothing to save: not every layer of the cache has stored tokens")
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        used = _tokens_used(layer)
        for name, tensor in layer.storage.tensors():
            part = tensor[:, :, :used] if name in _TOKEN_TENSORS else tensor
            tensors[f"layers.{i}.{name}"] = part.contiguous().cpu()
    for positions in cache.all_positions():
        for name, tensor in positions.tensors():
            tensors[f"positions.{positions.ring}.{name}"] = tensor.contiguous().cpu()
    layers = [
        {"dtype": str(layer.dtype).removeprefix("torch."), "rotated": layer.storage.rotated} for layer in cache.layers
    ]
    header = {"version": VERSION, **_geometry(cache), "layers": layers, "sha256": _digest(tensors)}
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata={"format": FORMAT, "header": json.dumps(header)})
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
    header = _header(path, metadata)
    if header["sha256"] != _digest(tensors):
        raise ValueError(f"{path} was altered: its tensors do not have the checksum it was saved with")
    for key, value in _geometry(cache).items():
        if header[key] != value:
            raise ValueError(f"{path} does not go with this cache: its {key} is {header[key]}, the cache's {value}")
    for i, layer in enumerate(cache.layers):
        own = {name.split(".", 2)[2]: t for name, t in tensors.items() if name.startswith(f"layers.{i}.")}
        _restore_layer(layer, own, header["layers"][i], torch.device(device or "cpu"))
    for positions in cache.all_positions():
        positions.restore({name: tensors[f"positions.{positions.ring}.{name}"] for name, _ in positions.tensors()})


def _header(path: str | Path, metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} holds no saved cache: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    header: dict[str, Any] = json.loads(metadata["header"])
    if header["version"] != VERSION:
        raise ValueError(f"{path} is of version {header['version']}; this package reads version {VERSION}")
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


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _restore_layer(layer: Any, saved: dict[str, Tensor], facts: dict[str, Any], device: torch.device) -> None:
    storage, recipe = layer.storage, layer.storage.recipe
    batch, heads, used, _ = saved["k_data"].shape
    if not layer.is_initialized or storage.batch_size != batch or storage.tokens < used:
        if layer.max_cache_len is None and not layer.is_sliding:
            storage.tokens = max(used, 1)
        sizes = [head_dim_of(saved["k_data"], recipe.k_format), head_dim_of(saved["v_data"], recipe.v_format)]
        dtype, device = getattr(torch, facts["dtype"]), layer.device if layer.is_initialized else device
        layer.lazy_initialization(*[torch.empty((batch, heads, 0, size), dtype=dtype, device=device) for size in sizes])
    storage.set_rotated(facts["rotated"])
    for name, tensor in storage.tensors():
        target = tensor[:, :, :used] if name in _TOKEN_TENSORS else tensor
        target.copy_(saved[name])
    storage.empty = False
    layer.batch_size = batch
