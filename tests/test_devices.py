"""A model on several devices: each layer's part of the cache is where its layer is, each head on its rank."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from hf_models import greedy, llama, prompt

from torch_fp4kv import NVFP4Cache, NVFP4KVCache, PagedNVFP4Cache, export_blocks, import_blocks

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def devices(cache):
    """Of each layer: where its storage, exact window and positions are."""
    return [
        {t.device.type for _, t in (*layer.storage.tensors(), *layer.positions.tensors())} for layer in cache.layers
    ]


@pytest.mark.parametrize("capacity", [None, 64], ids=["growing", "static"])
def test_storage_and_positions_follow_the_layer(capacity):
    """The meta device stands for the second one: it holds shapes, and mixing it with another is an error."""
    cache = NVFP4Cache(llama().config, capacity, "k8v4")
    places = ("cpu", "meta")
    for tokens in (20, 1):
        for layer, device in enumerate(places):
            x = torch.randn(2, 2, tokens, 64, device=device)
            key, value = cache.update(x, x.clone(), layer)
            q = torch.randn(2, 4, tokens, 64, device=device)
            out = F.scaled_dot_product_attention(q, key, value, is_causal=tokens > 1, enable_gqa=True)
            assert (key.device.type, out.device.type) == (device, device)
    assert devices(cache) == [{"cpu"}, {"meta"}]
    assert [layer.leads for layer in cache.layers] == [True, True]
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    assert devices(cache) == [{"cpu"}, {"meta"}]
    assert [layer.positions.batch_size for layer in cache.layers] == [4, 4]
    assert int(cache.get_seq_length()) == 20
    cache.reset()
    assert cache.is_empty


def test_layers_of_two_devices_come_together():
    cache = NVFP4Cache(llama(num_hidden_layers=3).config, 64, "k8v4")
    for layer, device in enumerate(("cpu", "meta", "meta")):
        x = torch.randn(2, 2, 20, 64, device=device)
        cache.update(x, x.clone(), layer)
    assert cache.to("meta") is cache
    assert devices(cache) == [{"meta"}] * 3
    assert [layer.leads for layer in cache.layers] == [True, False, False]
    assert cache.all_positions() == [cache.layers[2].positions]
    for layer in range(3):
        x = torch.randn(2, 2, 1, 64, device="meta")
        cache.update(x, x.clone(), layer)


@pytest.mark.parametrize("made", ["growing", "static", "module", "pool"])
def test_tokens_of_another_device_are_refused_before_anything_is_written(made):
    x = torch.randn(1, 2, 20, 64)
    token, elsewhere = x[:, :, :1], x[:, :, :1].to("meta")
    if made == "module":
        cache = NVFP4KVCache(1, 64, 2, 64, torch.float32)
        update, positions = cache.update, lambda: cache.positions
    else:
        config = llama(num_hidden_layers=1).config
        pool = PagedNVFP4Cache(config, 4, 1, 64, 16, torch.float32)
        cache = pool.row(pool.admit()) if made == "pool" else NVFP4Cache(config, 64 if made == "static" else None)
        update, positions = functools.partial(cache.update, layer_idx=0), lambda: cache.layers[0].positions
    update(x, x.clone())
    with pytest.raises(ValueError, match="this layer is on cpu, K on meta and V on meta"):
        update(elsewhere, elsewhere)
    assert positions().lengths.tolist() == [20]
    update(token, token)
    assert positions().lengths.tolist() == [21]


@pytest.mark.parametrize("pooled", [False, True], ids=["cache", "pool"])
def test_a_rank_keeps_its_head_where_there_are_fewer_heads_than_ranks(pooled):
    """Four ranks, two KV heads that each computes, eight query heads: ranks 0 and 1 read the first, 2 and 3 the
    second."""
    config = llama(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=32).config
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 20, 32), torch.randn(1, 2, 20, 32), torch.randn(1, 8, 20, 32)

    def attended(q, **shard):
        if pooled:
            pool = PagedNVFP4Cache(config, 4, 1, 32, 16, torch.float32, recipe="nvfp4-plain", **shard)
            cache = pool.row(pool.admit())
        else:
            cache = NVFP4Cache(config, 32, "nvfp4-plain", **shard)
        cache.update(k, v, 0)
        handles = cache.update(k[:, :, :1], v[:, :, :1], 0)
        return F.scaled_dot_product_attention(q[:, :, :1], *handles, enable_gqa=True)

    want = attended(q).chunk(4, 1)
    for rank in range(4):
        got = attended(q[:, 2 * rank : 2 * rank + 2], tp_rank=rank, tp_size=4)
        torch.testing.assert_close(got, want[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_cache_moved_away_and_back_decodes_as_before(recipe):
    model = llama().cuda()
    ids, more = prompt(tokens=40).cuda(), prompt(tokens=2, seed=3).cuda()
    cache = NVFP4Cache(model.config, 64, recipe)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
        cache.to("cpu")
        assert devices(cache) == [{"cpu"}] * 2
        cache.to("cuda")
        for i in range(2):
            logits = [model(more[:, i : i + 1], past_key_values=one).logits for one in (cache, twin)]
            assert torch.equal(*logits)


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_two_gpus_give_the_tokens_of_one(recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    llama(num_hidden_layers=4).save_pretrained(tmp_path)
    layers = {f"model.layers.{i}": i // 2 for i in range(4)}
    split = {"model.embed_tokens": 0, "model.rotary_emb": 0, **layers, "model.norm": 1, "lm_head": 1}
    outputs = []
    for device_map in ({"": 0}, split):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map).eval()
        cache = NVFP4Cache(model.config, 128, recipe)
        ids = prompt(tokens=40).cuda()
        outputs.append(model.generate(ids, past_key_values=cache, disable_compile=True, **greedy(40)))
        for i, layer in enumerate(cache.layers):
            assert layer.storage.k_data.device.index == device_map.get(f"model.layers.{i}", 0)
            assert layer.positions.lengths.device == layer.storage.k_data.device
        other = NVFP4Cache(model.config, 256, recipe)
        import_blocks(other, export_blocks(cache, "a"))
        for sent, taken in zip(cache.layers, other.layers):
            assert taken.storage.k_data.device.index == 0
            assert torch.equal(taken.storage.k_data[:, :, :79].cpu(), sent.storage.k_data[:, :, :79].cpu())
    assert torch.equal(outputs[0], outputs[1])
