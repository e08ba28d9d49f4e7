"""A saved cache comes back to the bit, and a file that is not one is refused without a trace."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import llama, prompt
from safetensors.torch import load_file, save_file

from torch_fp4kv import NVFP4Cache, get_recipe


@pytest.fixture(scope="module")
def model():
    return llama()


def prefilled(model, capacity=64, recipe="nvfp4", tokens=30):
    cache = NVFP4Cache(model.config, capacity, recipe)
    with torch.no_grad():
        model(prompt(tokens=tokens), past_key_values=cache)
    return cache


def decode(model, cache):
    ids = prompt(tokens=4, seed=3)
    with torch.no_grad():
        return torch.stack([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(4)])


@pytest.mark.parametrize("capacity", [None, 64], ids=["growing", "static"])
@pytest.mark.parametrize(
    "recipe",
    ["nvfp4", "nvfp4-plain", "k8v4", "bf16", "block-fp4", get_recipe("nvfp4", exact_window=0, num_sink_tokens=0)],
    ids=lambda recipe: recipe if isinstance(recipe, str) else "nvfp4 read from storage",
)
@pytest.mark.parametrize("tokens", [5, 30], ids=["short", "long"])
def test_decoding_goes_on_as_without_the_detour(model, tmp_path, capacity, recipe, tokens):
    cache = prefilled(model, capacity, recipe, tokens)
    cache.save(tmp_path / "cache.safetensors")
    want = decode(model, cache)
    fresh = NVFP4Cache(model.config, capacity, recipe)
    fresh.load(tmp_path / "cache.safetensors")
    assert torch.equal(decode(model, fresh), want)
    assert int(fresh.get_seq_length()) == tokens + 4
    used = prefilled(model, capacity, recipe, tokens=20)
    used.load(tmp_path / "cache.safetensors")
    assert torch.equal(decode(model, used), want)


def test_a_file_holds_the_tokens_in_use_only(model, tmp_path):
    prefilled(model, capacity=1000, recipe="nvfp4-plain").save(tmp_path / "cache.safetensors")
    assert (tmp_path / "cache.safetensors").stat().st_size < 2 * 2 * 2 * 2 * 30 * 36 + 4096
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]


def alter(path, change):
    """Rewrites a file with `change(tensors, metadata)` applied."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def flip_a_bit(tensors, metadata):
    tensors["layers.1.v_scales"].view(-1)[7] ^= 1


def drop_a_tensor(tensors, metadata):
    del tensors["layers.1.v_scales"]


def call_it_another_format(tensors, metadata):
    metadata["format"] = "pt"


def say_k_is_not_rotated(tensors, metadata):
    metadata["header"] = metadata["header"].replace('"rotated": true', '"rotated": false')


def leave_out_the_header(tensors, metadata):
    del metadata["header"]


def call_it_newer(tensors, metadata):
    metadata["version"] = "5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_a_bit, "altered"),
        (drop_a_tensor, "altered"),
        (say_k_is_not_rotated, "altered"),
        (leave_out_the_header, "altered"),
        (call_it_another_format, "holds no saved cache"),
        (call_it_newer, "version 5; this package reads version 4"),
    ],
)
def test_a_file_that_is_not_a_saved_cache_is_refused_and_nothing_changes(model, tmp_path, change, message):
    path = tmp_path / "cache.safetensors"
    prefilled(model).save(path)
    alter(path, change)
    cache = prefilled(model, tokens=20)
    want = {name: t.clone() for name, t in cache.layers[0].storage.tensors()}
    with pytest.raises(ValueError, match=message):
        cache.load(path)
    assert all(torch.equal(t, want[name]) for name, t in cache.layers[0].storage.tensors())
    assert int(cache.get_seq_length()) == 20


def test_a_truncated_file_is_refused(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    prefilled(model).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        NVFP4Cache(model.config, 64).load(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: NVFP4Cache(c, 128), "max_cache_len is 64, the cache's 128"),
        (lambda c: NVFP4Cache(c, 64, "nvfp4-plain"), "its recipes is"),
        (lambda c: NVFP4Cache(llama(num_hidden_layers=3).config, 64), "its windows is"),
    ],
)
def test_a_cache_of_another_geometry_is_refused(model, tmp_path, make, message):
    path = tmp_path / "cache.safetensors"
    prefilled(model).save(path)
    with pytest.raises(ValueError, match=message):
        make(model.config).load(path)


def test_an_empty_cache_cannot_be_saved(model, tmp_path):
    with pytest.raises(ValueError, match="nothing to save"):
        NVFP4Cache(model.config, 64).save(tmp_path / "cache.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [1, 30], ids=["a later call", "the first"])
def test_a_cache_whose_layers_differ_is_not_saved(model, tmp_path, monkeypatch, tokens):
    """Loaded, it would no longer say so."""
    cache = NVFP4Cache(model.config, 64) if tokens == 30 else prefilled(model)
    with monkeypatch.context() as patch, pytest.raises(KeyError), torch.no_grad():
        patch.setattr(model.model.layers[0].mlp, "forward", lambda x: {}["interrupted"])
        model(prompt(tokens=tokens), past_key_values=cache)
    with pytest.raises(RuntimeError, match="ended halfway"):
        cache.save(tmp_path / "cache.safetensors")
    assert not list(tmp_path.iterdir())


def test_buffers_of_other_heads_are_refused_and_nothing_changes(model, tmp_path):
    """One saved head must not be copied to each of two."""
    path = tmp_path / "cache.safetensors"
    prefilled(llama(num_key_value_heads=1)).save(path)
    cache = prefilled(model, tokens=20)
    want = cache.layers[0].storage.k_data.clone()
    with pytest.raises(ValueError, match=r"of layer 0 are \[1, 64, 64\], the cache's \[2, 64, 64\]"):
        cache.load(path)
    assert torch.equal(cache.layers[0].storage.k_data, want)
    assert int(cache.get_seq_length()) == 20


@pytest.mark.parametrize("rows", [1, 3])
def test_buffers_of_another_number_of_rows_are_replaced(model, tmp_path, rows):
    path = tmp_path / "cache.safetensors"
    cache = prefilled(model)
    cache.save(path)
    other = NVFP4Cache(model.config, 64)
    with torch.no_grad():
        model(prompt(batch=rows, tokens=40), past_key_values=other)
    other.load(path)
    assert torch.equal(decode(model, other), decode(model, cache))


def test_rows_without_tokens_are_not_saved(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = NVFP4Cache(model.config, 64)
    with torch.no_grad():
        model(prompt(batch=3), past_key_values=cache)
        cache.reset()
        model(prompt(), past_key_values=cache)
    cache.save(path)
    other = NVFP4Cache(model.config, 64)
    other.load(path)
    assert torch.equal(decode(model, other), decode(model, cache))


def test_layers_that_read_another_s_tokens_store_none(tmp_path):
    """The last layers of Gemma 3n share K and V of earlier ones."""
    from hf_models import greedy
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        hidden_size=64,
        intermediate_size=[64] * 4,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        pad_token_id=0,
    )
    model = Gemma3nForCausalLM(config).eval()
    cache = NVFP4Cache(config, 64, "bf16")
    got = model.generate(prompt(), past_key_values=cache, **greedy(8))
    assert torch.equal(got, model.generate(prompt(), **greedy(8)))
    cache.save(tmp_path / "cache.safetensors")
    other = NVFP4Cache(config, 64, "bf16")
    other.load(tmp_path / "cache.safetensors")
    assert torch.equal(decode(model, other), decode(model, cache))
