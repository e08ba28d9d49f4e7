"""`NVFP4KVCache` in the models that people write themselves."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch

from torch_fp4kv import LayerCalibration, NVFP4KVCache, get_recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
gpt = pytest.importorskip("gpt", reason="the examples are in the checkout, not in the package")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return gpt.Transformer().eval()


def prompt(tokens=40):
    return torch.randint(256, (2, tokens), generator=torch.Generator().manual_seed(1))


def test_exact_storage_gives_the_tokens_of_the_model_s_own_cache(model):
    model.setup_caches(2, 128)
    want = gpt.generate(model, prompt(), 40)
    model.setup_caches(2, 128, functools.partial(NVFP4KVCache, recipe="bf16"))
    assert torch.equal(gpt.generate(model, prompt(), 40), want)


def test_compiled_decode_is_one_graph_and_equals_eager(model):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model.setup_caches(2, 128, NVFP4KVCache)
    eager = gpt.generate(model, prompt(), 20)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        for layer in model.attention:
            layer.kv_cache.reset()
        assert torch.equal(gpt.generate(model, prompt(), 20, step=compiled), eager)
    assert counters["stats"]["unique_graphs"] == 1


def test_reset_gives_the_first_result_again(model):
    model.setup_caches(2, 128, NVFP4KVCache)
    first = gpt.generate(model, prompt(), 20)
    for layer in model.attention:
        layer.kv_cache.reset()
    assert torch.equal(gpt.generate(model, prompt(), 20), first)


def cache(**options):
    return NVFP4KVCache(2, 64, 2, 32, torch.float32, **options)


def test_positions_that_do_not_continue_are_refused_before_anything_is_written():
    kv = cache()
    x = torch.randn(2, 2, 20, 32)
    kv.update(torch.arange(20), x, x)
    before = {name: t.clone() for name, t in kv.storage.tensors()}
    with pytest.raises(ValueError, match="must be 20 … 20 in order, as the cache holds 20 tokens, got 5 … 5"):
        kv.update(torch.arange(5, 6), x[:, :, :1], x[:, :, :1])
    with pytest.raises(ValueError, match="50 tokens after 20 stored exceed max_cache_len=64"):
        kv.update(None, x.repeat(1, 1, 3, 1)[:, :, :50], x.repeat(1, 1, 3, 1)[:, :, :50])
    assert all(torch.equal(t, before[name]) for name, t in kv.storage.tensors())
    assert kv.positions.lengths.tolist() == [20, 20]


def test_moving_the_module_moves_the_cache_and_keeps_its_dtypes():
    kv = cache().to(torch.bfloat16)
    assert kv.storage.k_global.dtype == torch.float32
    moved = cache().to("meta")
    assert moved.storage.k_data.device.type == "meta"
    assert moved.positions.lengths.device.type == "meta"


def test_values_of_another_size():
    kv = cache(v_head_dim=16, recipe="bf16")
    k, v = torch.randn(2, 2, 20, 32), torch.randn(2, 2, 20, 16)
    key, value = kv(torch.arange(20), k, v)
    out = torch.nn.functional.scaled_dot_product_attention(torch.randn(2, 2, 20, 32), key, value, is_causal=True)
    assert out.shape == (2, 2, 20, 16)


def test_a_gradient_is_refused():
    x = torch.randn(2, 2, 3, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="for inference"):
        cache().update(None, x, x)


def test_a_refused_call_leaves_the_lengths():
    kv = cache()
    x = torch.randn(2, 2, 4, 32)
    kv.update(None, x, x)
    for k, v, message in (
        (x.repeat(2, 1, 1, 1), x.repeat(2, 1, 1, 1), "holds 2 rows, got 4"),
        (x[:1], x[:1], "holds 2 rows, got 1"),
        (x.repeat(1, 2, 1, 1), x.repeat(1, 2, 1, 1), "2 KV heads of size 32"),
        (x, x[:, :, :3], "2 KV heads of size 32"),
        (x[..., :16], x, "2 KV heads of size 32"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.update(None, k, v)
    with pytest.raises(TypeError, match="K must be float32"):
        kv.update(None, x.long(), x)
    assert kv.positions.lengths.tolist() == [4, 4]


@pytest.mark.parametrize("input_pos", [[0, 1, 2], [0, 2, 4, 6], [1, 2, 3, 4], [[0, 1, 2, 3]] * 2], ids=str)
def test_positions_that_are_not_those_of_the_tokens_are_refused(input_pos):
    x = torch.randn(2, 2, 4, 32)
    with pytest.raises(ValueError, match="input_pos must be"):
        cache().update(torch.tensor(input_pos), x, x)


def test_positions_that_start_again_in_compiled_code_are_reported_by_check():
    kv = cache()
    x = torch.randn(2, 2, 4, 32)
    step = torch.compile(lambda pos: kv.update(pos, x, x)[0].update.positions.lengths + 0, backend="eager")
    step(torch.arange(4))
    kv.check()
    step(torch.arange(4))
    with pytest.raises(RuntimeError, match="input_pos did not continue"):
        kv.check()
    kv.reset()
    kv.check()


def test_a_negative_number_of_tokens_cannot_be_dropped():
    kv = cache()
    kv.update(None, torch.randn(2, 2, 4, 32), torch.randn(2, 2, 4, 32))
    with pytest.raises(ValueError, match="must not be negative, got -2"):
        kv.crop(-2)
    assert kv.positions.lengths.tolist() == [4, 4]


def test_moved_buffers_serve_outside_inference_mode():
    kv = cache()
    with torch.inference_mode():
        kv.to("cpu")
    kv.update(None, torch.randn(2, 2, 4, 32), torch.randn(2, 2, 4, 32))
    assert not kv.storage.k_data.is_inference()


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = cache()

    def forward(self, q, k, v):
        k, v = self.cache.update(None, k, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_an_exported_step_goes_on_with_the_cache_or_is_refused():
    """Not strict, torch.export takes state that is no buffer for constant: each step would read the same length."""
    step, prompt = Step(), torch.randn(2, 2, 2, 20, 32)
    step.cache.update(None, *prompt)
    eager = copy.deepcopy(step)
    tokens = [(torch.randn(2, 4, 1, 32), *torch.randn(2, 2, 2, 1, 32)) for _ in range(3)]
    with pytest.raises(RuntimeError, match="strict=True"):
        torch.export.export(step, tokens[0], strict=False)
    exported = torch.export.export(step, tokens[0], strict=True).module()
    for token in tokens:
        torch.testing.assert_close(exported(*token), eager(*token), rtol=0, atol=0)


def test_the_calls_of_litgpt_and_torchtune():
    """`cache(input_pos, k, v)` and `repeat_interleave`; `update(k, v)`, `unsqueeze`, `expand` and `flatten`."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 32)
    caches = [cache(recipe="bf16") for _ in range(2)]
    keys, values = caches[0](torch.arange(9), k, v)
    repeated = [x.repeat_interleave(2, dim=1) for x in (keys, values)]
    handles = caches[1].update(k, v)
    expanded = [x.unsqueeze(2).expand(2, 2, 2, -1, 32).flatten(1, 2) for x in handles]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for one, other in (repeated, expanded):
        assert one.shape == (2, 4, 64, 32)
        got = torch.nn.functional.scaled_dot_product_attention(q, one[:, :, :9], other[:, :, :9])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for refused in (lambda: keys.unsqueeze(1), lambda: keys.flatten(1, 2), lambda: keys.repeat_interleave(2, dim=2)):
        with pytest.raises(TypeError, match="not supported"):
            refused()


def test_a_recipe_for_several_layers_is_refused():
    known = [LayerCalibration(k_bias=[[float(layer)] * 16] * 2) for layer in (1, 2)]
    recipe = get_recipe("nvfp4-plain", k_bias="calibrated", calibration=known, layers={1: {"v_format": "fp8"}})
    for changes in ({"layers": {}}, {"calibration": ()}):
        with pytest.raises(ValueError, match=r"pass recipe.for_layer\(index\)"):
            NVFP4KVCache(1, 64, 2, 16, recipe=recipe, **changes)
    storage = NVFP4KVCache(1, 64, 2, 16, recipe=recipe.for_layer(1)).storage
    assert storage.recipe.v_format == "fp8" and bool((storage.k_bias == 2).all())
    with pytest.raises(ValueError, match="needs a calibrated k_bias"):
        NVFP4KVCache(1, 64, 2, 16, recipe="nvfp4-max")
