"""What is stored how: one frozen dataclass, a registry of names, rules for single layers, and JSON.

Shapes: H KV heads, D and Dv head sizes of K and V.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ops import checks

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]
Rule = tuple[int | str, tuple[tuple[str, Any], ...]]

LAYER_TYPES = ("full", "sliding", "chunked")
"""What a rule may name in place of a layer's index."""


@dataclass(frozen=True)
class LayerCalibration:
    """What measurement, or a checkpoint, says about one layer; None where it says nothing. Plain numbers, so that a
    recipe compares, hashes and saves.

    Attributes:
        k_bias, v_bias: `[H][D]` and `[H][Dv]`, subtracted before K and V are stored.
        k_factors: `[H][D]`, what stored K is multiplied by, after the bias (`equalize_k`).
        k_order: `[H][D]`, which channel stands where in stored K, so that its blocks of 16 have equal shares of energy
            (`equalize_k`); K is then rotated within each block.
        k_scale, v_scale: decode scales, one or `[H]`; without them a cache chooses from the first tokens.
    """

    k_bias: Matrix | None = None
    v_bias: Matrix | None = None
    k_factors: Matrix | None = None
    k_order: tuple[tuple[int, ...], ...] | None = None
    k_scale: Vector | None = None
    v_scale: Vector | None = None

    def __post_init__(self) -> None:
        for name in ("k_bias", "v_bias", "k_factors"):
            _freeze(self, name, 2)
        for name in ("k_scale", "v_scale"):
            _freeze(self, name, 1)
        if self.k_order is not None:
            object.__setattr__(self, "k_order", tuple(tuple(map(int, row)) for row in self.k_order))
            if any(sorted(row) != list(range(len(row))) for row in self.k_order or ()):
                raise ValueError("k_order must hold each channel of a head once")
        for name in ("k_bias", "v_bias", "k_factors", "k_scale", "v_scale"):
            for row in getattr(self, name) or ():
                for number in row if isinstance(row, tuple) else (row,):
                    if not math.isfinite(number) or (number <= 0 and not name.endswith("bias")):
                        what = "finite" if name.endswith("bias") else "positive and finite"
                        raise ValueError(f"{name} must be {what}, got {number}")


def _freeze(owner: Any, name: str, ndim: int) -> None:
    value = getattr(owner, name)
    if value is None:
        return
    if hasattr(value, "tolist"):
        value = value.tolist()
    if ndim == 1:
        value = tuple(map(float, value)) if isinstance(value, Iterable) else (float(value),)
    else:
        value = tuple(tuple(map(float, row)) for row in value)
        if len({len(row) for row in value}) > 1:
            raise ValueError(f"{name} must be [H][D], got rows of {sorted({len(row) for row in value})} numbers")
    object.__setattr__(owner, name, value)


@dataclass(frozen=True)
class Recipe:
    """How K and V are kept: one recipe for all layers, and `layers` for those that are kept otherwise.

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
        exact_prefill: more than 16 new tokens attend to each other exactly, not to what is stored of them. In layers
            with a sliding window they always do.
        layers: what is different in some layers: `{selector: changes}`, where the selector is an index or a layer type
            ("full", "sliding", "chunked") and the changes are `{field: value}`, a recipe's name or a `Recipe`. A rule
            by index wins over one by type. (Kept as nested tuples.)
        calibration: a `LayerCalibration` for each layer; empty if nothing was calibrated.
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
    layers: Any = ()
    calibration: tuple[LayerCalibration, ...] = ()

    def __post_init__(self) -> None:
        checks.one_of(self.k_format, checks.FORMATS, "k_format")
        checks.one_of(self.v_format, checks.FORMATS, "v_format")
        checks.scale_rule(self.scale_rule)
        checks.one_of(self.k_bias, ("none", "prompt", "calibrated"), "k_bias")
        for name in ("exact_window", "num_sink_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a number of tokens, 0 or more, got {value!r}")
        for name in ("rotate_k", "equalize_k", "exact_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.rotate_k and self.k_bias == "none":
            raise ValueError("rotate_k needs a k_bias: rotating a K with a large mean makes it worse, not better")
        object.__setattr__(self, "calibration", tuple(self.calibration))
        if any(not isinstance(layer, LayerCalibration) for layer in self.calibration):
            raise TypeError("calibration must hold a LayerCalibration for each layer")
        object.__setattr__(self, "layers", _rules(self.layers))
        for selector, _ in self.layers:
            self._apply(selector)

    @property
    def needs_calibration(self) -> bool:
        """Some layer asks for calibrated numbers."""
        flat = [self, *(self._apply(selector) for selector, _ in self.layers)]
        return any(recipe.k_bias == "calibrated" or recipe.equalize_k for recipe in flat)

    def for_layer(self, index: int, kind: str = "full") -> Recipe:
        """The recipe of layer `index` of type `kind`: rules applied, `calibration` that of this layer alone.

        K and V that are "exact" are not shifted, equalised or rotated: rounded again, they would not be exact.

        Raises:
            ValueError: the layer needs calibrated numbers that are not there.
        """
        layer = self
        for selector in (kind, index):
            for rule, changes in self.layers:
                if rule == selector:
                    layer = dataclasses.replace(layer, layers=(), **dict(changes))
        own = self.calibration[index : index + 1]
        if layer.k_format == "exact":
            layer = dataclasses.replace(layer, k_bias="none", rotate_k=False, equalize_k=False)
        if layer.v_format == "exact":
            own = tuple(dataclasses.replace(numbers, v_bias=None) for numbers in own)
        layer = dataclasses.replace(layer, layers=(), calibration=own)
        found = own[0] if own else LayerCalibration()
        for field, number in (("k_bias", layer.k_bias == "calibrated"), ("k_factors", layer.equalize_k)):
            if number and getattr(found, field) is None:
                raise ValueError(
                    f"this recipe needs a calibrated {field} and layer {index} has none: "
                    "use torch_fp4kv.calibrate(model, texts), or a recipe that needs no calibration, such as 'nvfp4'"
                )
        return layer

    def check_layers(self, num_layers: int) -> None:
        """Raises ValueError if a rule names a layer, or the calibration has one, that a model of `num_layers` has
        not."""
        for selector, _ in self.layers:
            if isinstance(selector, int) and selector >= num_layers:
                raise ValueError(f"the recipe has a rule for layer {selector}, the model has {num_layers} layers")
        if self.calibration and len(self.calibration) != num_layers:
            raise ValueError(
                f"the recipe was calibrated for {len(self.calibration)} layers, the model has {num_layers}"
            )

    def _apply(self, selector: int | str) -> Recipe:
        changes = dict(self.layers)[selector]
        return dataclasses.replace(self, layers=(), **dict(changes))

    def to_json(self) -> str:
        """The recipe as JSON text, calibration included; fields that have their default are left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if self.layers:
            fields["layers"] = [{"layer": selector, **dict(changes)} for selector, changes in self.layers]
        if self.calibration:
            fields["calibration"] = [
                {name: value for name, value in dataclasses.asdict(layer).items() if value is not None}
                for layer in self.calibration
            ]
        return json.dumps({"torch_fp4kv_recipe": 1, **fields}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is not such a recipe, or is one of a newer version.
            TypeError: it has a field that is not known.
        """
        fields = json.loads(text)
        version = fields.pop("torch_fp4kv_recipe", None) if isinstance(fields, dict) else None
        if version != 1:
            raise ValueError(f"not a recipe of this version: 'torch_fp4kv_recipe' must be 1, got {version!r}")
        rules = [dict(rule) for rule in fields.pop("layers", [])]
        if any("layer" not in rule for rule in rules):
            raise ValueError("a rule in layers does not name its layer")
        layers = [(rule.pop("layer"), rule) for rule in rules]
        calibration = tuple(LayerCalibration(**layer) for layer in fields.pop("calibration", []))
        return get_recipe(cls(), **fields, layers=layers, calibration=calibration)

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads what `save` wrote; errors as in `from_json`."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _rules(layers: Any) -> tuple[Rule, ...]:
    """`layers` of a `Recipe`, checked, as nested tuples: types before indices, since the later rule wins."""
    pairs = layers.items() if isinstance(layers, Mapping) else layers
    rules: dict[int | str, tuple[tuple[str, Any], ...]] = {}
    for selector, changes in pairs:
        if isinstance(selector, str):
            checks.one_of(selector, LAYER_TYPES, "a layer type in layers")
        elif not isinstance(selector, int) or isinstance(selector, bool) or selector < 0:
            raise ValueError(f"a rule in layers is for an index from 0 or a layer type, got {selector!r}")
        if selector in rules:
            raise ValueError(f"layers has two rules for {selector!r}")
        if isinstance(changes, (str, Recipe)):
            other = get_recipe(changes)
            if other.layers or other.calibration:
                raise ValueError(
                    f"the recipe for layer {selector!r} has layers or calibration of its own, which a rule cannot "
                    "take: give calibration to the whole recipe"
                )
            changes = {name: getattr(other, name) for name in _LAYER_FIELDS}
        changes = dict(changes)
        for name in changes:
            if name not in _LAYER_FIELDS:
                raise TypeError(f"a rule in layers cannot set {name!r}; it can set {', '.join(_LAYER_FIELDS)}")
        rules[selector] = tuple(sorted(changes.items()))
    return tuple(sorted(rules.items(), key=lambda rule: (isinstance(rule[0], int), rule[0])))


_FIELDS = tuple(f.name for f in dataclasses.fields(Recipe))
_LAYER_FIELDS = tuple(name for name in _FIELDS if name not in ("layers", "calibration"))

_WINDOWED = Recipe(exact_window=64, num_sink_tokens=4)
# K in four bits needs a longer window; 0.30 of BF16's bytes at hand-over has room for this one.
_DEFAULT = dataclasses.replace(_WINDOWED, exact_window=88, scale_rule="mse", k_bias="prompt", rotate_k=True)

_RECIPES: dict[str, Recipe] = {
    "nvfp4": _DEFAULT,
    "nvfp4-max": dataclasses.replace(_DEFAULT, k_bias="calibrated", equalize_k=True),
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
    """Adds `recipe` under a new `name`.

    Raises:
        ValueError: the name is taken, or that of a storage dtype.
        TypeError: `recipe` is no `Recipe`.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe, got {type(recipe).__name__}")
    if name in _RECIPES or name in _DTYPE_NAMES:
        what = "exists already" if name in _RECIPES else "is the name of a storage dtype"
        raise ValueError(f"recipe {name!r} {what}; choose another name")
    _RECIPES[name] = recipe


def recipes() -> dict[str, Recipe]:
    """The known recipes by name."""
    return dict(_RECIPES)


def get_recipe(recipe: str | Recipe, **overrides: Any) -> Recipe:
    """A recipe by name or as given, with fields replaced by `overrides`.

    Raises:
        ValueError: the name is not known (the message lists those that are), or is that of a storage dtype.
        TypeError: `recipe` is neither, or an override is no field of `Recipe`.
    """
    if isinstance(recipe, str):
        if recipe in _DTYPE_NAMES:
            raise ValueError(
                f"{recipe!r} is a storage dtype, not a recipe: it does not say how scales are chosen. "
                f"Name a recipe: {', '.join(_RECIPES)}"
            )
        checks.one_of(recipe, tuple(_RECIPES), "recipe")
        recipe = _RECIPES[recipe]
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a name or a Recipe, got {type(recipe).__name__}")
    unknown = [name for name in overrides if name not in _FIELDS]
    if unknown:
        raise TypeError(f"no field {unknown[0]!r} in Recipe; fields: {', '.join(_FIELDS)}")
    return dataclasses.replace(recipe, **overrides) if overrides else recipe
