"""`generate` with an `NVFP4Cache`: exact storage gives the ordinary cache's tokens, so every path can be held to it;
quantised storage gives one result on every path."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import compile_everywhere, greedy, llama, prompt
from transformers import DynamicCache, StaticCache

from torch_fp4kv import NVFP4Cache, as_static_cache, get_recipe
from torch_fp4kv.ops import backends

IMPLEMENTATIONS = ["sdpa", "fp4kv", "eager"]
SINKS_ALONE = pytest.param(get_recipe("nvfp4", exact_window=0), id="sinks alone")
QUANTISED = ["nvfp4", "nvfp4-plain", "fp8", "k8v4", "block-fp4", SINKS_ALONE]
CAPACITIES = pytest.mark.parametrize("capacity", [None, 128], ids=["growing", "static"])


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def expected(model):
    """Tokens with transformers' own cache."""
    model.set_attn_implementation("sdpa")
    return model.generate(prompt(), **greedy(40))


def run(model, implementation, cache, ids=None, **kwargs):
    model.set_attn_implementation(implementation)
    return model.generate(prompt() if ids is None else ids, past_key_values=cache, **{**greedy(40), **kwargs})


@CAPACITIES
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_exact_storage_gives_the_tokens_of_the_ordinary_cache(model, expected, implementation, capacity):
    cache = NVFP4Cache(model.config, capacity, recipe="bf16")
    assert torch.equal(run(model, implementation, cache), expected)
    assert int(cache.get_seq_length()) == 69


@pytest.mark.parametrize("recipe", QUANTISED)
def test_every_path_gives_the_same_tokens(model, recipe):
    outputs = [
        run(model, implementation, NVFP4Cache(model.config, capacity, recipe))
        for implementation in IMPLEMENTATIONS
        for capacity in (None, 128)
    ]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_attention_reads_the_quantised_cache(model):
    """Two layers and 40 steps are 2 SDPA calls on the exact prompt and 78 calls of the op; nothing is dequantised."""
    backends.served.clear()
    run(model, "sdpa", NVFP4Cache(model.config, 128))
    assert backends.served["attention", "torch"] == 78
    assert backends.served["append", "torch"] == 80
    assert not any(op == "dequantize" for op, _ in backends.served)


def test_prompt_logits_are_those_of_the_ordinary_cache(model):
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        ours = model(prompt(), past_key_values=NVFP4Cache(model.config, 128)).logits
        theirs = model(prompt()).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_left_padded_batch(model, implementation, recipe):
    """A padded row gives what it gives alone without padding."""
    ids, mask = prompt(), torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    batch = run(model, implementation, NVFP4Cache(model.config, 128, recipe), ids, attention_mask=mask)
    if recipe == "bf16":
        alone = run(model, "sdpa", None, ids[:1, 7:])
        assert torch.equal(batch[:1, 30:], alone[:, 23:])
    else:
        other = run(model, "sdpa", NVFP4Cache(model.config, None, recipe), ids, attention_mask=mask)
        assert (batch == other).float().mean() > 0.9


def test_padding_on_the_left_needs_no_dense_mask_under_fp4kv(model, monkeypatch):
    from torch_fp4kv.cache.storage import Update

    masks = []
    attend = Update.attend
    monkeypatch.setattr(Update, "attend", lambda self, q, **kw: masks.append(kw["mask"]) or attend(self, q, **kw))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    cache = NVFP4Cache(model.config, 128)
    run(model, "fp4kv", cache, attention_mask=mask)
    assert all(m is None for m in masks)
    assert cache.layers[0].positions.starts.tolist() == [7, 0]


@CAPACITIES
@pytest.mark.parametrize("mask", [None, torch.ones(2, 30), torch.ones(2, 30).index_fill(1, torch.tensor([9]), 0)])
def test_padding_of_a_call_that_failed_is_not_that_of_the_next(model, capacity, mask):
    model.set_attn_implementation("fp4kv")
    cache, padded = NVFP4Cache(model.config, capacity, "bf16"), torch.ones(2, 30, dtype=torch.long)
    padded[0, :7] = 0
    with torch.no_grad():
        for _ in range(2):
            model(prompt(), past_key_values=cache)
            cache.reset()
        with pytest.raises(RuntimeError, match="for inference"), torch.enable_grad():
            model(prompt(), attention_mask=padded, past_key_values=cache)
        got = model(prompt(), attention_mask=mask, past_key_values=cache).logits
        want = model(prompt(), attention_mask=mask).logits
    assert cache.layers[0].positions.starts.tolist() == [0, 0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_padding_in_the_middle_keeps_the_mask_under_fp4kv(model):
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, 10:14] = 0
    theirs = run(model, "sdpa", None, attention_mask=mask)
    ours = run(model, "fp4kv", NVFP4Cache(model.config, 128, "bf16"), attention_mask=mask)
    assert torch.equal(ours, theirs)


def test_beams(model):
    model.set_attn_implementation("sdpa")
    theirs = model.generate(prompt(), num_beams=3, **greedy(24))
    for capacity in (None, 128):
        cache = NVFP4Cache(model.config, capacity, "bf16")
        assert torch.equal(run(model, "sdpa", cache, num_beams=3, **greedy(24)), theirs)


def test_sampling_with_a_seed(model):
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    torch.manual_seed(3)
    theirs = run(model, "sdpa", None, **settings)
    torch.manual_seed(3)
    assert torch.equal(run(model, "fp4kv", NVFP4Cache(model.config, 128, "bf16"), **settings), theirs)


@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv"])
@pytest.mark.parametrize("chunk", [7, 20])
def test_chunked_prefill(model, implementation, chunk):
    """Chunks over stored history; exact storage gives the unchunked tokens."""
    theirs = run(model, "sdpa", None, prompt(tokens=70))
    ours = run(
        model, implementation, NVFP4Cache(model.config, 128, "bf16"), prompt(tokens=70), prefill_chunk_size=chunk
    )
    assert torch.equal(ours, theirs)


def test_assisted_decoding_crops(model):
    assistant = llama(seed=5, num_hidden_layers=1)
    theirs = run(model, "sdpa", None, prompt(batch=1))
    ours = run(model, "sdpa", NVFP4Cache(model.config, recipe="bf16"), prompt(batch=1), assistant_model=assistant)
    assert torch.equal(ours, theirs)


def test_prompt_longer_than_capacity_is_refused_before_anything_is_written(model):
    cache = NVFP4Cache(model.config, 32)
    with pytest.raises(ValueError, match="40 tokens exceed max_cache_len=32; nothing was written"):
        run(model, "sdpa", cache, prompt(tokens=40))
    assert int(cache.get_seq_length()) == 0
    assert cache.is_empty


def test_decoding_past_the_capacity_is_an_error(model):
    with pytest.raises(ValueError, match="exceed max_cache_len=48"):
        run(model, "sdpa", NVFP4Cache(model.config, 48))


def test_reset_gives_the_first_result_again_also_for_a_smaller_batch(model):
    cache = NVFP4Cache(model.config, 128)
    first = run(model, "sdpa", cache)
    cache.reset()
    single = run(model, "sdpa", cache, prompt()[:1])
    assert torch.equal(single, run(model, "sdpa", NVFP4Cache(model.config, 128), prompt()[:1]))
    cache.reset()
    assert torch.equal(run(model, "sdpa", cache), first)
    cache.reset()
    larger = run(model, "sdpa", cache, prompt(batch=3))
    assert torch.equal(larger, run(model, "sdpa", NVFP4Cache(model.config, 128), prompt(batch=3)))


def test_a_second_model_uses_the_same_class(model, expected):
    other = llama(seed=9, num_hidden_layers=3, num_key_value_heads=4, head_dim=32)
    theirs = run(other, "sdpa", None)
    assert torch.equal(run(other, "sdpa", NVFP4Cache(other.config, 128, "bf16")), theirs)
    assert torch.equal(run(model, "sdpa", NVFP4Cache(model.config, 128, "bf16")), expected)


def test_buffers_serve_in_and_out_of_inference_mode(model, expected):
    cache = NVFP4Cache(model.config, 128, "bf16")
    with torch.inference_mode():
        model(prompt(), past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        assert torch.equal(run(model, "sdpa", cache), expected)
    with torch.inference_mode():
        cache.reset()
        assert torch.equal(run(model, "sdpa", cache), expected)
        cache.reset()
        twin = copy.deepcopy(cache)
    assert torch.equal(run(model, "sdpa", twin), expected)


def test_a_gradient_is_refused(model):
    with pytest.raises(RuntimeError, match="for inference"):
        model(prompt(), past_key_values=NVFP4Cache(model.config, 128))


def decoded_logits(model, cache):
    """Logits of 20 tokens fed one by one after a prompt of 20."""
    ids = prompt(tokens=40)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits[:, 0] for i in range(20, 40)]
    return torch.stack(steps).double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models(dtype):
    """No further from the float32 model than the ordinary cache is."""
    exact = decoded_logits(llama(), DynamicCache())
    half = llama().to(dtype)
    cache = NVFP4Cache(half.config, 128, "bf16")
    ours = (decoded_logits(half, cache) - exact).norm()
    theirs = (decoded_logits(llama().to(dtype), DynamicCache()) - exact).norm()
    assert ours <= 1.1 * theirs
    assert cache.layers[0].storage.dtype == dtype


def test_autocast(model):
    exact = decoded_logits(model, DynamicCache())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = (decoded_logits(model, NVFP4Cache(model.config, 128, "bf16")) - exact).norm()
        theirs = (decoded_logits(model, DynamicCache()) - exact).norm()
    assert ours <= 1.1 * theirs


def assert_compiled_once(model, implementation, steps):
    """Three prompts of different length and `steps` steps: one graph, no break, and the tokens of eager decoding."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    def cache():
        return NVFP4Cache(model.config, 256)

    eager = run(model, implementation, cache(), **greedy(steps))
    compiled = run(model, implementation, cache(), compile_config=compile_everywhere(), **greedy(steps))
    assert torch.equal(compiled, eager)
    for tokens in (21, 25):
        ids = prompt(tokens=tokens)
        run(model, implementation, cache(), ids, compile_config=compile_everywhere(), **greedy(4))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_compiled_decode_is_one_graph(model):
    assert_compiled_once(model, "sdpa", steps=12)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv"])
def test_compiled_decode_is_one_graph_across_the_exact_window(model, implementation):
    assert_compiled_once(model, implementation, steps=200)


@CAPACITIES
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_mask_that_hides_a_stored_token_from_the_next_is_honoured(model, implementation, capacity):
    mask = torch.ones(2, 31, dtype=torch.long)
    mask[0, 4] = 0
    logits = []
    for cache in (DynamicCache(), NVFP4Cache(model.config, capacity, "bf16")):
        model.set_attn_implementation("sdpa" if isinstance(cache, DynamicCache) else implementation)
        with torch.no_grad():
            model(prompt(), attention_mask=torch.ones_like(mask[:, :30]), past_key_values=cache)
            logits.append(model(prompt(tokens=1), attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@CAPACITIES
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 7, 17])
def test_a_second_turn_with_padding_goes_on(model, implementation, capacity, tokens):
    """The whole conversation again, with the cache of the first turn: left padding, and padding between the turns."""
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    outputs = []
    for cache in (DynamicCache(), NVFP4Cache(model.config, capacity, "bf16")):
        name = "sdpa" if isinstance(cache, DynamicCache) else implementation
        first = run(model, name, cache, attention_mask=mask, **greedy(5))
        turn, seen = prompt(tokens=tokens, seed=4), torch.ones(2, 5 + tokens, dtype=torch.long)
        seen[1, 5 : 5 + tokens // 2] = 0
        ids, both = torch.cat([first, turn], 1), torch.cat([mask, seen], 1)
        outputs.append(run(model, name, cache, ids, attention_mask=both, **greedy(5)))
    assert torch.equal(outputs[1], outputs[0])


def test_a_compiled_prompt_may_be_of_any_length(model):
    """A symbolic number of tokens decides whether there is a bias; scales are chosen in compiled code too."""
    torch._dynamo.reset()
    model.set_attn_implementation("sdpa")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for tokens in (20, 33, 7):
        mine, other = NVFP4Cache(model.config, 64), NVFP4Cache(model.config, 64)
        with torch.no_grad():
            want = model(prompt(tokens=tokens), past_key_values=other).logits
            got = compiled(prompt(tokens=tokens), past_key_values=mine).logits
        torch.testing.assert_close(got, want)
        for layer, expected in zip(mine.layers, other.layers):
            assert not torch.any(layer.storage.k_global == 1)
            for (name, stored), (_, twin) in zip(layer.storage.tensors(), expected.storage.tensors()):
                torch.testing.assert_close(stored, twin, rtol=0, atol=0, msg=name)


@CAPACITIES
def test_a_prefix_is_copied_to_continuations_and_not_quantised_again(model, capacity):
    """Each of three continuations in one batch is what the same prefix gives alone; the prefix stays as it was."""
    prefix, turns = prompt(batch=1, tokens=100), prompt(batch=3, tokens=5, seed=4)
    cache = NVFP4Cache(model.config, capacity and 2 * capacity)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(prefix, past_key_values=cache)
    before = [t.clone() for layer in cache.layers for _, t in layer.storage.tensors()]

    def after(turn):
        twin = copy.deepcopy(cache)
        twin.batch_repeat_interleave(len(turn))
        for layer, other in zip(cache.layers, twin.layers):
            for (_, stored), (_, copied) in zip(layer.storage.tensors(), other.storage.tensors()):
                assert torch.equal(copied, stored.expand_as(copied))
        ids = torch.cat([prefix.expand(len(turn), -1), turn], 1)
        return model.generate(ids, past_key_values=twin, **greedy(20))

    together = after(turns)
    assert torch.equal(together, torch.cat([after(turns[i : i + 1]) for i in range(3)]))
    assert all(
        torch.equal(now, was) for now, was in zip((t for x in cache.layers for _, t in x.storage.tensors()), before)
    )


def test_cache_implementation_static_can_be_this_cache(model):
    """For as long as the block lasts, at the length that generate asks for, and on this model only."""
    model.set_attn_implementation("sdpa")
    want = run(model, "sdpa", NVFP4Cache(model.config, 69))

    def generate(**options):
        result = model.generate(prompt(), return_dict_in_generate=True, **{**greedy(40), **options})
        return result.sequences, getattr(result, "cache", None) or result.past_key_values

    with as_static_cache(model):
        got, cache = generate(cache_implementation="static")
        assert isinstance(cache, NVFP4Cache)
        assert cache.layers[0].max_cache_len >= 69
        assert torch.equal(got, want)
        assert isinstance(generate()[1], DynamicCache)
        with pytest.raises(ValueError, match="not 'offloaded_static'"):
            generate(cache_implementation="offloaded_static")
        with as_static_cache(torch.compile(model), "fp8"):
            assert generate(cache_implementation="static")[1].recipe == get_recipe("fp8")
        assert generate(cache_implementation="static")[1].recipe == get_recipe("nvfp4")
    assert isinstance(generate(cache_implementation="static")[1], StaticCache)
    with as_static_cache(model, "nvfp4", exact_window=0):
        assert generate(cache_implementation="static")[1].recipe.exact_window == 0
