"""What is stored how: one frozen dataclass and a registry of names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .ops import checks


@dataclass(frozen=True)
class Recipe:
    """How K and V of a layer are kept.

    Attributes:
        k_format, v_format: "nvfp4", "fp8" (e4m3 under a scale per head), "block-fp4" (one power of two per 16) or
            "exact" (the model's own dtype).
        scale_rule: what a block's largest magnitude is divided by: "amax", "4over6" or "mse" (see `quantize`).
        exact_window: R, the most recent tokens that are also kept exact; 0 for none.
        num_sink_tokens: S, the first tokens of each row that are also kept exact.
        k_bias: what is subtracted from K per (KV head, channel): "none", "prompt" (the mean over the first tokens a
            layer stores) or "calibrated".
        rotate_k: store K rotated by a Hadamard matrix, after the bias is subtracted.
        equalize_k: store K with its channels equalised by calibrated factors.
        exact_prefill: more than 16 new tokens attend to each other exactly, not to what is stored of them.
    """

    k_format: str = "nvfp4"
    v_format: str = "nvfp4"
    scale_rule: str = "amax"
    exact_window: int = 0
    num_sink_tokens: int = 0
    k_bias: str = "none"
    rotate_k: bool = False
    equalize_k: bool = False
    exact_prefill: bool = True

    def __post_init__(self) -> None:
        checks.one_of(self.k_format, checks.FORMATS, "k_format")
        checks.one_of(self.v_format, checks.FORMATS, "v_format")
        checks.scale_rule(self.scale_rule)
        checks.one_of(self.k_bias, ("none", "prompt", "calibrated"), "k_bias")
        for name in ("exact_window", "num_sink_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.rotate_k and self.k_bias == "none":
            raise ValueError("rotate_k needs a k_bias: rotating a K with a large mean makes it worse, not better")


_WINDOWED = Recipe(exact_window=64, num_sink_tokens=4)

_RECIPES: dict[str, Recipe] = {
    "nvfp4": dataclasses.replace(_WINDOWED, scale_rule="mse", k_bias="prompt", rotate_k=True),
    "nvfp4-plain": Recipe(),
    "nvfp4-4over6": Recipe(scale_rule="4over6"),
    "k8v4": dataclasses.replace(_WINDOWED, k_format="fp8", scale_rule="mse"),
    "fp8": Recipe(k_format="fp8", v_format="fp8"),
    "fp8-window": dataclasses.replace(_WINDOWED, k_format="fp8", v_format="fp8"),
    "block-fp4": Recipe(k_format="block-fp4", v_format="block-fp4"),
    "bf16": Recipe(k_format="exact", v_format="exact"),
}

_DTYPE_NAMES = ("fp4", "mxfp4", "e2m1", "float4_e2m1fn_x2", "int4", "e4m3", "float8_e4m3fn")


def register_recipe(name: str, recipe: Recipe) -> None:
    """Adds `recipe` under a new `name`; ValueError if the name is taken."""
    if name in _RECIPES:
        raise ValueError(f"recipe {name!r} exists already")
    _RECIPES[name] = recipe


def recipes() -> dict[str, Recipe]:
    """The known recipes by name."""
    return dict(_RECIPES)


def get_recipe(recipe: str | Recipe, **overrides: Any) -> Recipe:
    """A recipe by name or as given, with fields replaced by `overrides`.

    Raises:
        ValueError: the name is not known (the message lists those that are), or is that of a storage dtype.
        TypeError: an override is no field of `Recipe`.
    """
    if isinstance(recipe, str):
        if recipe in _DTYPE_NAMES:
            raise ValueError(
                f"{recipe!r} is a storage dtype, not a recipe: it does not say how scales are chosen. "
                f"Name a recipe: {', '.join(_RECIPES)}"
            )
        checks.one_of(recipe, tuple(_RECIPES), "recipe")
        recipe = _RECIPES[recipe]
    known = [f.name for f in dataclasses.fields(Recipe)]
    unknown = [name for name in overrides if name not in known]
    if unknown:
        raise TypeError(f"no field {unknown[0]!r} in Recipe; fields: {', '.join(known)}")
    return dataclasses.replace(recipe, **overrides) if overrides else recipe
