"""KV scales and biases of a checkpoint: found by name, converted by a declared convention, counted.

Names differ by who wrote them: `….layers.N.self_attn.k_proj.k_scale` (ModelOpt, auto-round), `….attn.k_scale` (vLLM),
`….self_attn.kv_scale` (one for both), with and without `language_model.` before or behind `model.`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .recipe import LayerCalibration, Recipe
from .scales import to_decode_scale

_PLACED = re.compile(
    r"^(?:model\.|language_model\.|text_model\.|transformer\.|decoder\.)*(?:layers|h|blocks)\.(\d+)\."
    r"(?:self_attn|self_attention|attention|attn|mixer)\."
    r"(?:(?P<projection>[kv]|qkv|qkqkv)_proj\.|attn\.|mla_attn\.)*"
    r"(?P<what>k_scale|v_scale|kv_scale|k_bias|v_bias|output_scale)$"
)
_WANTED = re.compile(r"(?:^|\.)(?:k_scale|v_scale|kv_scale|k_bias|v_bias)$|\.[kv]_proj\.output_scale$")

ASSUMED = {
    "modelopt": "amax/448",
    "auto-round": "amax/2688",
    "auto-round, 8 bits": "amax/448",
    "compressed-tensors": "amax/6",
    "compressed-tensors, 8 bits": "amax/448",
}
"""What is assumed of a checkpoint by the tool that says it wrote it, where no convention is declared."""


@dataclass(frozen=True)
class CheckpointScales:
    """What a checkpoint says about its KV cache.

    Attributes:
        calibration: for each layer; a layer without scales has an empty one.
        convention: how its scales were read.
        num_loaded: layers that have scales for both K and V.
        unplaced: names that look like scales or biases of a KV cache and belong to no layer of this model.
    """

    calibration: tuple[LayerCalibration, ...]
    convention: str
    num_loaded: int
    unplaced: tuple[str, ...]

    def apply(self, recipe: Recipe) -> Recipe:
        """`recipe` with these scales, and with K's bias if every layer has one; calibrated factors stay."""
        known = recipe.calibration or (LayerCalibration(),) * len(self.calibration)
        if len(known) != len(self.calibration):
            raise ValueError(f"the recipe was calibrated for {len(known)} layers, these are {len(self.calibration)}")
        merged = tuple(
            dataclasses.replace(old, **{k: v for k, v in dataclasses.asdict(new).items() if v is not None})
            for old, new in zip(known, self.calibration)
        )
        has_bias = all(layer.k_bias is not None for layer in self.calibration)
        changes: dict[str, Any] = {"k_bias": "calibrated"} if has_bias else {}
        return dataclasses.replace(recipe, calibration=merged, **changes)


def load_scales(
    source: str | Path | Mapping[str, Tensor],
    num_layers: int,
    *,
    num_kv_heads: int | None = None,
    convention: str | None = None,
) -> CheckpointScales:
    """Reads the KV scales and biases of a checkpoint of a model with `num_layers` attention layers.

    Args:
        source: a directory of `*.safetensors`, one such file, or tensors by name. Of a directory,
            `hf_quant_config.json` and `config.json` are read for the tool that wrote it.
        num_kv_heads: H; biases stored flat (`[H · D]`) need it.
        convention: what the scales mean, a key of `scales.CONVENTIONS`. If not given it is assumed from the tool, and
            a warning says what was assumed.

    Warns:
        UserWarning: a convention was assumed; layers without scales, or without a bias of K that others have; scales
            that could not be placed.

    Raises:
        ValueError: no KV scale or bias is found, a scale is not positive and finite, or has a shape that is none.
    """
    tool = None if isinstance(source, Mapping) else _tool(Path(source))
    found: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
    unplaced = []
    for name, tensor in _wanted_tensors(source):
        match = _PLACED.match(name)
        kinds = _kinds(match) if match else ()
        if match is None or not kinds or int(match[1]) >= num_layers:
            unplaced.append(name)
            continue
        for kind in kinds:
            found[int(match[1])][kind] = tensor
    if not any(found):
        listed = f"; not placed: {', '.join(unplaced[:4])}" if unplaced else ""
        raise ValueError(f"no KV scale or bias for any of {num_layers} layers in this checkpoint{listed}")
    has_scales = any(kind.endswith("scale") for layer in found for kind in layer)
    meaning = convention or ASSUMED.get(tool or "", "amax/448")
    if convention is None and has_scales:
        written = f"the checkpoint says {tool!r} wrote it" if tool else "the checkpoint does not say what wrote it"
        warnings.warn(
            f"KV scales are read as {meaning!r}: an assumption, since {written} and no convention was declared; "
            "pass convention= to declare it (see torch_fp4kv.scales.CONVENTIONS)",
            stacklevel=2,
        )
    calibration = tuple(_layer(index, layer, meaning, num_kv_heads) for index, layer in enumerate(found))
    missing = [i for i, layer in enumerate(calibration) if layer.k_scale is None or layer.v_scale is None]
    if has_scales and missing:
        warnings.warn(
            f"KV scales loaded for {num_layers - len(missing)} of {num_layers} layers; none for {_listed(missing)}, "
            "which choose their own from the first tokens",
            stacklevel=2,
        )
    no_bias = [i for i, layer in enumerate(calibration) if layer.k_bias is None]
    if 0 < len(no_bias) < num_layers:
        warnings.warn(
            f"biases of K loaded for {num_layers - len(no_bias)} of {num_layers} layers; none for {_listed(no_bias)}, "
            "so that K's bias is left to the recipe in all",
            stacklevel=2,
        )
    if unplaced:
        warnings.warn(
            f"{len(unplaced)} KV scales or biases belong to no layer of this model: {_listed(unplaced)}", stacklevel=2
        )
    return CheckpointScales(calibration, meaning, num_layers - len(missing), tuple(unplaced))


def _kinds(match: re.Match[str]) -> tuple[str, ...]:
    what, projection = match["what"], match["projection"]
    if what == "kv_scale":
        return ("k_scale", "v_scale")
    if what == "output_scale":
        return (f"{projection}_scale",) if projection in ("k", "v") else ()
    return (what,) if projection in (None, "qkv", "qkqkv", what[0]) else ()


def _layer(index: int, tensors: Mapping[str, Tensor], convention: str, num_kv_heads: int | None) -> LayerCalibration:
    fields: dict[str, Any] = {}
    for kind, tensor in tensors.items():
        if kind.endswith("scale"):
            try:
                fields[kind] = tuple(to_decode_scale(value, convention) for value in tensor.flatten().tolist())
            except ValueError as error:
                raise ValueError(f"{kind} of layer {index}: {error}") from None
        else:
            if tensor.ndim == 1 and num_kv_heads is None:
                raise ValueError(f"{kind} of layer {index} is {list(tensor.shape)}: pass num_kv_heads to split it")
            heads = tensor.unflatten(0, (num_kv_heads or -1, -1)) if tensor.ndim == 1 else tensor
            fields[kind] = heads.reshape(-1, heads.shape[-1]).tolist()
    return LayerCalibration(**fields)


def _wanted_tensors(source: str | Path | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(source, Mapping):
        yield from ((name, tensor) for name, tensor in source.items() if _WANTED.search(name))
        return
    from safetensors import safe_open

    path = Path(source)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {path}")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys() if _WANTED.search(name))  # noqa: SIM118


def _tool(path: Path) -> str | None:
    """The tool that wrote a checkpoint, and whether its KV scales are for 8 bits: by `hf_quant_config.json`'s producer,
    or `config.json`'s provider (auto-round in the form of compressed-tensors) or quantisation method."""
    folder = path if path.is_dir() else path.parent
    for name, key in (("hf_quant_config.json", None), ("config.json", "quantization_config")):
        if not (folder / name).is_file():
            continue
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        config = config if key is None else config.get(key) or {}
        producer = config.get("producer") or {}
        names = [producer.get("name"), config.get("provider"), config.get("quant_method")]
        names = [str(name).lower() for name in names if name]
        if names:
            tool = next((name for name in names if name in ASSUMED), names[0])
            eight = (config.get("kv_cache_scheme") or {}).get("num_bits") == 8 or any(
                config.get(name) in ("fp8", "float8_e4m3fn") for name in ("static_kv_dtype", "static_attention_dtype")
            )
            return f"{tool}, 8 bits" if eight and f"{tool}, 8 bits" in ASSUMED else tool
    return None


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
