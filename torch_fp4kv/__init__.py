"""FP4 KV cache for any PyTorch model: NVFP4 ops, Inductor lowerings and caches for `torch.compile`."""

import importlib
from typing import Any

from . import compile, lowering
from .cache.module import NVFP4KVCache
from .checkpoint import CheckpointScales, load_scales
from .compile import disable, enable
from .ops import append, attention, dequantize, exact_math, explain, from_packed, prefer, quantize, to_packed
from .recipe import LayerCalibration, Recipe, get_recipe, recipes, register_recipe

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "CheckpointScales",
    "LayerCalibration",
    "NVFP4Cache",
    "NVFP4KVCache",
    "PagedNVFP4Cache",
    "Recipe",
    "append",
    "as_static_cache",
    "attention",
    "calibrate",
    "compile",
    "dequantize",
    "disable",
    "enable",
    "exact_math",
    "explain",
    "export_blocks",
    "from_packed",
    "get_recipe",
    "guarded",
    "import_blocks",
    "load_scales",
    "lowering",
    "prefer",
    "quantize",
    "recipes",
    "register_attention",
    "register_recipe",
    "register_sharding",
    "to_packed",
    "warmup",
]


def register_attention() -> None:
    """Makes `attn_implementation="fp4kv"` known to transformers; importing `NVFP4Cache` does so too."""
    from .cache.attention_interface import register

    register()


def register_sharding() -> None:
    """Tells DTensor how the ops split over the ranks of a mesh; call it before the first op on a DTensor."""
    from .sharding import register_sharding

    register_sharding()


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, so what works on its models is imported when asked for.
    modules = {
        "NVFP4Cache": "cache.hf",
        "PagedNVFP4Cache": "cache.paged",
        "Blocks": "cache.blocks",
        "as_static_cache": "cache.static",
        "calibrate": "evaluation.calibration",
        "export_blocks": "cache.handover",
        "import_blocks": "cache.handover",
        "guarded": "evaluation.calibration",
        "warmup": "startup",
    }
    if name in modules:
        try:
            return getattr(importlib.import_module(f".{modules[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ImportError(f"{name} needs transformers: pip install 'torch-fp4kv[hf]'") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
