"""A saved cache comes back to the bit, and a file that is not one is refused without a trace."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import llama, prompt
from safetensors.torch import load_file, save_file

from torch_fp4kv import NVFP4Cache


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
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-plain", "k8v4", "bf16", "block-fp4"])
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


def call_it_newer(tensors, metadata):
    metadata["header"] = metadata["header"].replace('"version": 1', '"version": 2')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_a_bit, "altered"),
        (drop_a_tensor, "altered"),
        (call_it_another_format, "holds no saved cache"),
        (call_it_newer, "version 2; this package reads version 1"),
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
