"""Global scales: what a cache chooses, conventions, and checkpoints of several tools."""

import json
import warnings

import pytest
import torch
from hf_models import llama
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention

import torch_fp4kv
from torch_fp4kv import NVFP4Cache, get_recipe
from torch_fp4kv.cache.positions import Positions
from torch_fp4kv.cache.storage import LayerStorage
from torch_fp4kv.checkpoint import load_scales
from torch_fp4kv.ops.statistics import block_amax
from torch_fp4kv.scales import (
    CONVENTIONS,
    choose_global_scale,
    from_decode_scale,
    scale_of_amax,
    to_decode_scale,
)

# What writers of each convention store for data up to 13.0, and the decode scale that is.
AMAX = 13.0
STORED = {
    "decode": (AMAX / 2688, AMAX / 2688),
    "amax/448": (AMAX / 448, AMAX / 448),
    "amax/2688": (AMAX / 2688, AMAX / 2688),
    "encode": (2688 / AMAX, AMAX / 2688),
    "amax/6": (AMAX / 6, AMAX / 448),
    "sglang": (AMAX / 448, 6 * AMAX / 448),
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_convention(convention):
    value, decode = STORED[convention]
    assert scale_of_amax(AMAX, convention) == pytest.approx(value)
    assert to_decode_scale(value, convention) == pytest.approx(decode)
    assert from_decode_scale(decode, convention) == pytest.approx(value)


def test_encode_is_the_reciprocal_with_either_head_room():
    assert to_decode_scale(448 / AMAX, "encode") == pytest.approx(AMAX / 448)
    assert to_decode_scale(1.0, "sglang") == from_decode_scale(1.0, "sglang") == 1.0


@pytest.mark.parametrize(
    ("value", "convention", "message"),
    [(1.0, "amax/127", "unknown convention"), (0.0, "decode", "positive"), (float("nan"), "encode", "positive")],
)
def test_conversions_that_are_refused(value, convention, message):
    for convert in (to_decode_scale, from_decode_scale, scale_of_amax):
        with pytest.raises(ValueError, match=message):
            convert(value, convention)


def chosen(x, first=0, storage_format="nvfp4"):
    return choose_global_scale(block_amax(x, torch.full((x.shape[0],), first)), storage_format)


@pytest.mark.parametrize("storage_format", ["nvfp4", "fp8"])
@pytest.mark.parametrize("size", [1e-27, 1e-3, 1.0, 7.0, 1e4, 1e27])
def test_chosen_scale(size, storage_format):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 50, 64) * torch.tensor([1.0, 0.1, 30.0])[:, None, None] * size
    scale = chosen(x, 0, storage_format)
    assert scale.shape == (3,) and bool((torch.frexp(scale).mantissa == 0.5).all())
    typical = x.unflatten(-1, (-1, 16)).abs().amax(-1).mean((0, 2, 3))
    steps = typical / scale
    low, high = (0.75, 1.5) if storage_format == "nvfp4" else (0.25, 0.5)
    assert bool(((steps > low * 0.999) & (steps <= high * 1.001)).all())


def test_chosen_scale_of_odd_data():
    assert chosen(torch.zeros(1, 2, 3, 16)).tolist() == [2.0**-8] * 2
    assert chosen(torch.zeros(1, 2, 0, 16)).tolist() == [2.0**-8] * 2
    x = torch.ones(1, 1, 4, 16)
    x[0, 0, 0] = 1e30
    x[0, 0, 1] = float("inf")
    x[0, 0, 2, 3] = float("nan")
    assert chosen(x, first=1).tolist() == chosen(torch.ones(1, 1, 1, 16)).tolist()
    # One token far above the rest neither saturates nor sets the scale alone.
    x = torch.ones(1, 1, 1000, 16)
    x[0, 0, 0] = 1e4
    assert float(chosen(x)) * 448 >= 1e4
    huge = torch.full((1, 1, 2000, 16), 3e38)
    assert float(chosen(huge)) == 2.0**100


def read_back(recipe, *parts):
    """K and V of `parts`, each written in one call, as they come back from storage alone."""
    tokens = sum(part.shape[2] for part in parts)
    storage = LayerStorage(recipe, tokens)
    storage.allocate(parts[0], parts[0].clone())
    positions = Positions(1, tokens, LayerStorage.ring_size(recipe), parts[0].device)
    for part in parts:
        positions.advance(part.shape[2])
        update = storage.write(part, part.clone(), positions)
    return update.keys(), update.values()


def test_float16_near_its_limit_comes_back_finite():
    torch.manual_seed(0)
    x = (60_000 + 5_000 * torch.rand(1, 2, 12, 64)).half()
    for name in ("nvfp4-plain", "block-fp4", "fp8"):
        for got in read_back(get_recipe(name), x):
            assert got.dtype == torch.float16 and bool(got.isfinite().all())
            # The largest float16 is 9.2 % above the least of these; a scale rounded down takes 1/16.
            assert float((got.double() / x.double() - 1).abs().max()) < 0.092


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-plain", "fp8"])
@pytest.mark.parametrize(("first", "later"), [(0.01, 10.0), (10.0, 0.5)])
def test_later_tokens_may_be_of_another_size(recipe, first, later):
    """B23: a scale frozen from the prompt clipped later tokens a thousand times larger."""
    torch.manual_seed(0)
    prefill, decode = torch.randn(1, 2, 32, 64) * first, torch.randn(1, 2, 12, 64) * later
    bare = get_recipe(recipe, exact_window=0, num_sink_tokens=0, k_bias="none", rotate_k=False)
    k, v = read_back(bare, prefill, decode)
    for got in (k[:, :, 32:], v[:, :, 32:]):
        assert float((got - decode).norm() / decode.norm()) < 0.13


def test_saturation_is_reported():
    model = llama()
    cache = NVFP4Cache(model.config, 64, "nvfp4-plain")
    k = torch.randn(1, 2, 20, 64)
    cache.update(k, k.clone(), 0)
    cache.update(k, k.clone(), 1)
    cache.check()
    cache.update(k[:, :, :1] * 1e5, k[:, :, :1] * 1e5, 0)
    cache.update(k[:, :, :1], k[:, :, :1].clone(), 1)
    with pytest.warns(UserWarning, match="blocks of K or V exceeded"):
        cache.check()


def test_a_scale_without_head_room_that_clips_fp8_is_reported():
    """amax/2688 leaves the room that block scales give; e4m3 has none of them, and clips above a sixth of amax."""
    k = torch.randn(1, 2, 20, 64, generator=torch.Generator().manual_seed(0))
    for convention, clips in (("amax/448", False), ("amax/2688", True)):
        scale = scale_of_amax(1.1 * float(k.abs().max()), convention)
        known = torch_fp4kv.LayerCalibration(k_scale=[scale], v_scale=[scale])
        cache = NVFP4Cache(llama().config, 64, "fp8", calibration=[known, known])
        for layer in (0, 1):
            cache.update(k, k.clone(), layer)
        if clips:
            with pytest.warns(UserWarning, match="blocks of K or V exceeded"):
                cache.check()
        else:
            cache.check()


def test_underflow_under_a_given_scale_is_reported():
    model = llama()
    known = torch_fp4kv.LayerCalibration(k_scale=[1.0], v_scale=[1.0])
    cache = NVFP4Cache(model.config, 64, "nvfp4-plain", calibration=[known, known])
    k = torch.randn(1, 2, 20, 64) * 0.001
    for layer in (0, 1):
        cache.update(k, k.clone(), layer)
    with pytest.warns(UserWarning, match="too large for K or V of layer 0, 1"):
        cache.check()


def checkpoint(scale, num_layers=2, name="model.layers.{}.self_attn.{}_proj.{}_scale"):
    return {name.format(i, x, x): torch.tensor(scale) for i in range(num_layers) for x in "kv"}


def attention_output(calibration):
    """Attention over 40 tokens read from storage, and over the exact ones."""
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64), torch.randn(1, 4, 1, 64)
    storage = LayerStorage(get_recipe("nvfp4-plain", calibration=calibration[:1]), 40)
    storage.allocate(k, v)
    positions = Positions(1, 40, 0, k.device)
    positions.advance(40)
    storage.write(k, v, positions)
    got = storage.write(k[:, :, :0], v[:, :, :0], positions).attend(q, causal=False)
    return got, scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_declared_conventions_agree():
    """B17: the same data's scale as each tool stores it."""
    outputs = []
    for convention in ("amax/448", "amax/2688", "amax/6", "encode"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = load_scales(checkpoint(scale_of_amax(4.5, convention)), 2, convention=convention)
        assert loaded.num_loaded == 2 and loaded.convention == convention
        got, expected = attention_output(loaded.calibration)
        outputs.append(got)
        assert float((got - expected).norm() / expected.norm()) < 0.2
    wrong, _ = attention_output(load_scales(checkpoint(2688 / 4.5), 2, convention="decode").calibration)
    assert float((wrong - expected).norm() / expected.norm()) > 0.5
    for got in outputs:
        assert float((got - outputs[0]).norm() / outputs[0].norm()) < 0.2


def test_an_undeclared_convention_is_named():
    with pytest.warns(UserWarning, match="read as 'amax/448': an assumption"):
        load_scales(checkpoint(0.02), 2)


AUTO_ROUND = {"quant_method": "compressed-tensors", "provider": "auto-round"}


@pytest.mark.parametrize(
    ("file", "content", "convention"),
    [
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {}}, "amax/448"),
        ("config.json", {"quantization_config": {"quant_method": "modelopt"}}, "amax/448"),
        ("config.json", {"quantization_config": {"producer": {"name": "modelopt"}, "quant_algo": "NVFP4"}}, "amax/448"),
        ("config.json", {"quantization_config": {"quant_method": "auto-round"}}, "amax/2688"),
        ("config.json", {"quantization_config": {"quant_method": "auto-round", "static_kv_dtype": "fp8"}}, "amax/448"),
        ("config.json", {"quantization_config": AUTO_ROUND | {"kv_cache_scheme": {"num_bits": 4}}}, "amax/2688"),
        ("config.json", {"quantization_config": AUTO_ROUND | {"kv_cache_scheme": {"num_bits": 8}}}, "amax/448"),
        ("config.json", {"quantization_config": {"quant_method": "compressed-tensors"}}, "amax/6"),
        (
            "config.json",
            {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}},
            "amax/448",
        ),
        ("config.json", {"quantization_config": AUTO_ROUND | {"provider": "another"}}, "amax/6"),
        ("config.json", {"hidden_size": 4}, "amax/448"),
    ],
)
def test_the_tool_is_read_from_the_checkpoint(tmp_path, file, content, convention):
    save_file({"lm_head.weight": torch.ones(1), **checkpoint(0.5, 1)}, tmp_path / "model-00001.safetensors")
    second = {name.replace("layers.0", "layers.1"): tensor for name, tensor in checkpoint(0.5, 1).items()}
    save_file(second, tmp_path / "model-00002.safetensors")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=f"read as {convention!r}"):
        loaded = load_scales(tmp_path, 2)
    assert loaded.num_loaded == 2
    assert loaded.calibration[1].v_scale == pytest.approx([to_decode_scale(0.5, convention)])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.self_attn.{}_proj.{}_scale",
        "model.layers.{}.self_attn.attn.{1}_scale",
        "model.layers.{}.self_attn.{1}_scale",
        "language_model.model.layers.{}.self_attn.{}_proj.{}_scale",
        "model.language_model.layers.{}.self_attn.{}_proj.{}_scale",
        "model.layers.{}.self_attn.{1}_proj.output_scale",
        "model.layers.{}.self_attn.qkv_proj.{1}_scale",
        "transformer.h.{}.attn.{1}_scale",
    ],
)
def test_names_of_many_writers(name):
    """B19."""
    name = name.replace("{}", "{0}", 1).replace("{}_proj.{}", "{1}_proj.{1}")
    tensors = {name.format(i, x): torch.tensor(1.0 + i) for i in range(2) for x in "kv"}
    loaded = load_scales(tensors, 2, convention="decode")
    assert [layer.k_scale for layer in loaded.calibration] == [(1.0,), (2.0,)]
    assert loaded.num_loaded == 2 and loaded.unplaced == ()


def test_one_scale_for_both():
    loaded = load_scales({"model.layers.0.self_attn.kv_scale": torch.tensor([0.25])}, 1, convention="decode")
    assert loaded.calibration[0].k_scale == loaded.calibration[0].v_scale == (0.25,)


def test_what_cannot_be_placed_is_listed():
    """B18: calibrated scales were dropped silently."""
    tensors = {
        **checkpoint(0.5, 1),
        "model.layers.5.self_attn.k_proj.k_scale": torch.tensor(1.0),
        "vision_tower.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0),
        "model.layers.0.self_attn.v_proj.k_scale": torch.tensor(1.0),
        "model.layers.0.self_attn.k_proj.weight_scale": torch.tensor(1.0),
        "model.layers.0.self_attn.k_proj.bias": torch.ones(4),
    }
    with pytest.warns(UserWarning) as caught:
        loaded = load_scales(tensors, 2, convention="decode")
    messages = [str(warning.message) for warning in caught]
    assert any("loaded for 1 of 2 layers; none for 1" in message for message in messages)
    assert any("3 KV scales or biases belong to no layer" in message for message in messages)
    assert len(loaded.unplaced) == 3 and loaded.num_loaded == 1
    with pytest.raises(ValueError, match="no KV scale or bias for any of 2 layers"):
        load_scales({"model.layers.0.self_attn.k_proj.weight": torch.ones(2)}, 2)
    with pytest.raises(ValueError, match="k_scale of layer 0: a scale must be positive"):
        load_scales(checkpoint(0.0, 1), 1, convention="decode")


def test_biases_of_a_checkpoint():
    bias = torch.arange(128.0)
    tensors = {f"model.layers.{i}.self_attn.{x}_proj.{x}_bias": bias for i in range(2) for x in "kv"}
    with pytest.raises(ValueError, match="pass num_kv_heads"):
        load_scales(tensors, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_scales(tensors, 2, num_kv_heads=2)
    with pytest.warns(UserWarning, match="biases of K loaded for 1 of 2 layers; none for 0,"):
        some = load_scales({name: x for name, x in tensors.items() if "layers.1" in name}, 2, num_kv_heads=2)
    assert some.apply(get_recipe("nvfp4")).k_bias == "prompt"
    recipe = loaded.apply(get_recipe("nvfp4"))
    assert recipe.k_bias == "calibrated"
    assert recipe.for_layer(1).calibration[0].k_bias == tuple(map(tuple, bias.view(2, 64).tolist()))
    cache = NVFP4Cache(llama().config, 64, recipe)
    k = torch.randn(1, 2, 20, 64)
    cache.update(k, k.clone(), 0)
    storage = cache.layers[0].storage
    assert torch.equal(storage.k_bias, bias.view(2, 64)) and torch.equal(storage.v_bias, bias.view(2, 64))


def test_given_scales_survive_compile():
    """B21: nothing is measured in compiled code that eager code did not measure."""
    known = torch_fp4kv.LayerCalibration(k_scale=[2.0**-5], v_scale=[2.0**-6])
    model = llama()
    cache = NVFP4Cache(model.config, 64, "nvfp4-plain", calibration=[known, known])
    step = torch.compile(lambda k, v: cache.update(k, v, 0), backend="eager")
    k = torch.randn(1, 2, 20, 64)
    step(k, k.clone())
    assert cache.layers[0].storage.k_global.tolist() == [2.0**-5] * 2


@pytest.mark.parametrize("dim", [128, 256])
def test_scores_are_scaled_by_the_head_size_once(dim):
    """B24: D was taken from the packed cache."""
    torch.manual_seed(0)
    k, q = torch.randn(1, 2, 40, dim), torch.randn(1, 4, 1, dim)
    recipe = get_recipe("nvfp4-plain", exact_prefill=False)
    storage = LayerStorage(recipe, 40)
    storage.allocate(k, k.clone())
    positions = Positions(1, 40, 0, k.device)
    positions.advance(40)
    update = storage.write(k, k.clone(), positions)
    keys, values = update.keys().repeat_interleave(2, 1), update.values().repeat_interleave(2, 1)
    expected = torch.softmax(q @ keys.transpose(2, 3) * dim**-0.5, -1) @ values
    torch.testing.assert_close(update.attend(q), expected, rtol=1e-4, atol=1e-5)
