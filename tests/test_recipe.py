"""Recipes: names, overrides, rules for layers, JSON; and what layers do with them."""

import dataclasses

import pytest
import torch
from hf_models import llama, prompt

from torch_fp4kv import NVFP4Cache, Recipe, get_recipe, recipes, register_recipe
from torch_fp4kv.cache.positions import Positions
from torch_fp4kv.cache.storage import LayerStorage
from torch_fp4kv.ops.format.rotation import largest_block
from torch_fp4kv.recipe import LayerCalibration

HEADS, DIM = 2, 64


def calibration(heads=HEADS, dim=DIM):
    torch.manual_seed(3)
    return LayerCalibration(
        k_bias=torch.randn(heads, dim).tolist(),
        k_factors=(torch.rand(heads, dim) + 0.5).tolist(),
        k_order=[torch.randperm(dim).tolist() for _ in range(heads)],
    )


def test_known_names():
    names = ["nvfp4", "nvfp4-max", "nvfp4-plain", "nvfp4-4over6", "k8v4", "fp8", "fp8-window", "block-fp4", "bf16"]
    assert list(recipes()) == names
    assert get_recipe("nvfp4", exact_window=128).exact_window == 128
    assert get_recipe(get_recipe("fp8"), num_sink_tokens=1).num_sink_tokens == 1


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nvfp5", ValueError, "nvfp4-max"),
        ("fp4", ValueError, "storage dtype, not a recipe"),
        (4, TypeError, "a name or a Recipe"),
    ],
)
def test_names_that_are_none(name, error, message):
    with pytest.raises(error, match=message):
        get_recipe(name)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window": 3}, TypeError, "exact_window"),
        ({"k_format": "int4"}, ValueError, "nvfp4"),
        ({"scale_rule": "max"}, ValueError, "4over6"),
        ({"exact_window": -1}, ValueError, "0 or more"),
        ({"exact_window": 1.5}, ValueError, "number of tokens"),
        ({"k_bias": "none", "rotate_k": True}, ValueError, "rotate_k needs a k_bias"),
        ({"layers": {"global": "bf16"}}, ValueError, "sliding"),
        ({"layers": {-1: "bf16"}}, ValueError, "index from 0"),
        ({"layers": {0: {"layers": ()}}}, TypeError, "cannot set 'layers'"),
        ({"layers": {0: {"v_format": "int8"}}}, ValueError, "v_format"),
        ({"layers": [(0, "bf16"), (0, "fp8")]}, ValueError, "two rules for 0"),
        ({"layers": {0: Recipe(calibration=[LayerCalibration(k_scale=1.0)])}}, ValueError, "calibration of its own"),
        ({"rotate_k": "no"}, ValueError, "rotate_k must be True or False"),
        ({"calibration": [{"k_scale": [1.0]}]}, TypeError, "a LayerCalibration for each layer"),
    ],
)
def test_changes_that_are_wrong(changes, error, message):
    with pytest.raises(error, match=message):
        get_recipe("nvfp4", **changes)


def test_registering(monkeypatch):
    monkeypatch.setattr("torch_fp4kv.recipe._RECIPES", dict(recipes()))
    register_recipe("mine", get_recipe("k8v4", exact_window=16))
    assert get_recipe("mine").exact_window == 16
    for name in ("mine", "fp4"):
        with pytest.raises(ValueError, match="choose another name"):
            register_recipe(name, Recipe())
    with pytest.raises(TypeError, match="must be a Recipe"):
        register_recipe("other", "nvfp4")


def test_a_rule_by_index_wins_over_one_by_type():
    recipe = get_recipe("nvfp4", layers={2: {"k_format": "fp8"}, "sliding": "bf16", 5: Recipe()})
    assert recipe.for_layer(0) == dataclasses.replace(recipe, layers=())
    assert recipe.for_layer(1, "sliding") == get_recipe("bf16")
    assert recipe.for_layer(2, "sliding") == get_recipe("bf16", k_format="fp8")
    assert recipe.for_layer(2, "full").scale_rule == "mse"
    assert recipe.for_layer(5) == get_recipe("nvfp4-plain")


def test_json_keeps_everything(tmp_path):
    recipe = get_recipe(
        "nvfp4-max", layers={"sliding": {"exact_window": 0}, 1: "fp8"}, calibration=[calibration(), calibration()]
    )
    recipe.save(tmp_path / "recipe.json")
    loaded = Recipe.load(tmp_path / "recipe.json")
    assert loaded == recipe and hash(loaded) == hash(recipe)
    assert loaded.for_layer(0).calibration == (calibration(),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a recipe"),
        ("[]", "not a recipe"),
        ('{"torch_fp4kv_recipe": 2}', "not a recipe"),
        ("nothing", "Expecting"),
        ('{"torch_fp4kv_recipe": 1, "layers": [{"layer": 0}, {"layer": 0}]}', "two rules for 0"),
        ('{"torch_fp4kv_recipe": 1, "layers": [{"k_format": "fp8"}]}', "does not name its layer"),
    ],
)
def test_json_that_is_no_recipe(text, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_json(text)


def test_json_with_an_unknown_field():
    with pytest.raises(TypeError, match="no field 'colour'"):
        Recipe.from_json('{"torch_fp4kv_recipe": 1, "colour": "red"}')


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k_factors": [[1.0, 0.0]]}, "k_factors must be positive"),
        ({"k_scale": [float("inf")]}, "k_scale must be positive"),
        ({"k_bias": [[1.0], [1.0, 2.0]]}, "rows of"),
        ({"k_bias": [[1.0, float("nan")]]}, "k_bias must be finite, got nan"),
        ({"v_bias": [[-float("inf")]]}, "v_bias must be finite, got -inf"),
        ({"k_order": [[0, 1, 1]]}, "each channel of a head once"),
    ],
)
def test_calibrations_that_are_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        LayerCalibration(**fields)


def test_a_cache_wants_the_calibration_its_recipe_needs():
    model = llama()
    with pytest.raises(ValueError, match=r"layer 0 has none: use torch_fp4kv.calibrate"):
        NVFP4Cache(model.config, recipe="nvfp4-max")
    with pytest.raises(ValueError, match="calibrated for 1 layers, the model has 2"):
        NVFP4Cache(model.config, recipe="nvfp4-max", calibration=[calibration()])
    with pytest.raises(ValueError, match="rule for layer 7"):
        NVFP4Cache(model.config, recipe="nvfp4", layers={7: "bf16"})
    cache = NVFP4Cache(model.config, recipe="nvfp4-max", calibration=[calibration(4), calibration(4)])
    with pytest.raises(ValueError, match=r"k_bias must be \[2, 64\] for this layer, got \[4, 64\]"):
        model.generate(prompt(), past_key_values=cache, max_new_tokens=1)


def test_a_mixed_cache_keeps_each_layer_its_own_way():
    model = llama()
    cache = NVFP4Cache(model.config, 64, "nvfp4", layers={1: {"k_format": "exact", "exact_window": 8}})
    model.generate(prompt(), past_key_values=cache, max_new_tokens=4, pad_token_id=0)
    first, second = (layer.storage for layer in cache.layers)
    assert first.k_data.dtype == torch.int64 and second.k_data.dtype == torch.float32
    assert first.k_exact.shape[2] == 4 + 88 + 16 + 1 and second.k_exact.shape[2] == 4 + 8 + 16 + 1
    assert cache.layers[0].positions is not cache.layers[1].positions


def stored(recipe, k, v):
    storage = LayerStorage(recipe, k.shape[2])
    storage.allocate(k, v)
    positions = Positions(1, k.shape[2], LayerStorage.ring_size(recipe), k.device)
    positions.advance(k.shape[2])
    return storage, storage.write(k, v, positions)


def test_calibrated_numbers_reach_storage():
    torch.manual_seed(0)
    k, v = torch.randn(1, HEADS, 40, DIM), torch.randn(1, HEADS, 40, DIM)
    known = dataclasses.replace(calibration(), k_scale=[2.0**-6], v_scale=[2.0**-5, 2.0**-7], v_bias=[[1.0] * DIM] * 2)
    recipe = get_recipe("nvfp4-max", calibration=[known], exact_window=0, num_sink_tokens=0)
    storage, update = stored(recipe, k, v)
    torch.testing.assert_close(storage.k_bias, torch.tensor(known.k_bias))
    assert storage.k_global.tolist() == [2.0**-6] * 2 and storage.v_global.tolist() == [2.0**-5, 2.0**-7]
    _, plain_update = stored(get_recipe("bf16"), k, v)
    for got, exact in ((update.keys(), plain_update.keys()), (update.values(), plain_update.values())):
        assert float((got - exact).norm() / exact.norm()) < 0.13


def test_a_layer_kept_exact_is_exact():
    """Shifted or rotated, and rounded to the model's dtype again, it was not."""
    torch.manual_seed(0)
    k, v = (torch.randn(1, HEADS, 40, DIM) * 9 + 5).bfloat16(), torch.randn(1, HEADS, 40, DIM).bfloat16()
    known = dataclasses.replace(calibration(), v_bias=[[0.3] * DIM] * HEADS)
    rule = {0: {"k_format": "exact", "v_format": "exact", "exact_window": 0, "num_sink_tokens": 0}}
    storage, _ = stored(get_recipe("nvfp4-max", layers=rule, calibration=[known]).for_layer(0), k, v)
    assert torch.equal(storage.k_data, k) and torch.equal(storage.v_data, v)
    assert get_recipe("nvfp4-max", layers=rule).for_layer(0).calibration == ()


def test_a_short_prompt_is_neither_shifted_nor_rotated():
    torch.manual_seed(0)
    k = torch.randn(1, HEADS, 40, DIM) + 5
    for tokens, moved in ((3, False), (40, True)):
        storage, _ = stored(get_recipe("nvfp4"), k[:, :, :tokens], k[:, :, :tokens].clone())
        assert bool((storage.k_bias != 0).all()) == moved
        assert storage.k_rotation() == (largest_block(DIM) if moved else 0)


@pytest.mark.parametrize(("padding", "enough"), [([61, 61], False), ([56, 60], True), ([40, 63], True)])
def test_padding_does_not_make_a_prompt_long_enough(padding, enough):
    """Prompts padded to a multiple: the longest row's own tokens count, less the sinks where enough remain."""
    torch.manual_seed(0)
    k = torch.randn(2, HEADS, 64, DIM) + 5
    storage = LayerStorage(get_recipe("nvfp4"), 64)
    storage.allocate(k, k.clone())
    positions = Positions(2, 64, LayerStorage.ring_size(storage.recipe), k.device)
    positions.set_starts(torch.tensor(padding))
    positions.advance(64)
    storage.write(k, k.clone(), positions)
    assert storage.rotated == enough
    sinks = 4 if 64 - min(padding) >= 12 else 0
    rows = [k[b, :, start + sinks :] for b, start in enumerate(padding)]
    want = torch.cat(rows, 1).mean(1) if enough else torch.zeros(HEADS, DIM)
    torch.testing.assert_close(storage.k_bias, want)


def test_the_bias_leaves_sinks_out():
    torch.manual_seed(0)
    k = torch.randn(1, HEADS, 40, DIM)
    k[:, :, :4] += 1000
    storage, _ = stored(get_recipe("nvfp4"), k, k.clone())
    torch.testing.assert_close(storage.k_bias, k[0, :, 4:].mean(1))


def test_a_view_of_k_as_v_is_not_rotated():
    k = torch.randn(1, HEADS, 40, 2 * DIM)
    for v in (k[..., :32], k[..., DIM:]):
        with pytest.raises(ValueError, match="V is a view of K"):
            stored(get_recipe("nvfp4"), k[..., : DIM + 16], v)
    # Halves of one projection have nothing in common.
    stored(get_recipe("nvfp4"), k[..., :DIM], k[..., DIM:])


def test_the_window_does_not_depend_on_what_was_dropped():
    torch.manual_seed(0)
    k, v = torch.randn(1, HEADS, 120, DIM), torch.randn(1, HEADS, 120, DIM)
    q = torch.randn(1, 4, 1, DIM)
    recipe = get_recipe("nvfp4-plain", exact_window=16, exact_prefill=False)

    def decode(dropped):
        storage = LayerStorage(recipe, 120)
        storage.allocate(k, v)
        positions = Positions(1, 120, LayerStorage.ring_size(recipe), k.device)
        for first, last in ((0, 100), *((100 + i, 101 + i) for i in range(dropped))):
            positions.advance(last - first)
            storage.write(k[:, :, first:last], v[:, :, first:last], positions)
        positions.crop(dropped)
        positions.advance(1)
        update = storage.write(k[:, :, 100:101], v[:, :, 100:101], positions)
        return update.attend(q), int(positions.exact_from)

    (expected, exact_from), *others = [decode(dropped) for dropped in (0, 1, 7, 16)]
    assert exact_from == 101 - 16
    for got, start in others:
        assert start == exact_from and torch.equal(got, expected)
