"""Small random models of real classes: exact storage gives the tokens of the model's own cache, quantised storage the
same tokens eager and compiled, growing and static."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import compile_everywhere, greedy, prompt  # noqa: E402

from torch_fp4kv import NVFP4Cache, as_static_cache  # noqa: E402

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {"pad_token_id": 0, "sliding_window": None},
    "Gemma2": {**SLIDING, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 32},
    "Gemma3Text": {**SLIDING, "query_pre_attn_scalar": 32},
    # In full layers K and V have other heads and sizes, and are the same; the last layers read K and V of the first.
    "Gemma4Text": {
        **{**SLIDING, "layer_types": ["sliding_attention", *["full_attention"] * 2, "sliding_attention"]},
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 16,
        "pad_token_id": 0,
    },
    "GptOss": {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_scaling": None},
    "Granite": {},
    "Olmo2": {},
    "Cohere2": {**SLIDING},
}
NEEDS_FP4KV = {"Gemma2": "soft-capping", "GptOss": "sinks"}


def build(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS.get(name, {}), **settings})
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(scope="module", params=list(MODELS))
def named_model(request):
    return request.param, build(request.param)


def run(model, implementation, cache, ids, **kwargs):
    model.set_attn_implementation(implementation)
    return model.generate(ids, past_key_values=cache, **{**greedy(30), **kwargs})


def ours(name):
    return "fp4kv" if name in NEEDS_FP4KV else "sdpa"


@pytest.mark.parametrize("tokens", [10, 40], ids=["short", "past-the-window"])
@pytest.mark.parametrize("capacity", [None, 128], ids=["growing", "static"])
def test_exact_storage_gives_the_tokens_of_the_ordinary_cache(named_model, tokens, capacity):
    name, model = named_model
    NVFP4Cache(model.config, 8)
    ids = prompt(tokens=tokens)
    theirs = run(model, "eager", None, ids)
    for implementation in {ours(name), "fp4kv"}:
        assert torch.equal(run(model, implementation, NVFP4Cache(model.config, capacity, "bf16"), ids), theirs)


def test_chunked_prefill_and_padding(named_model):
    name, model = named_model
    NVFP4Cache(model.config, 8)
    ids = prompt(tokens=60)
    theirs = run(model, "eager", None, ids)
    chunked = run(model, ours(name), NVFP4Cache(model.config, 128, "bf16"), ids, prefill_chunk_size=20)
    assert torch.equal(chunked, theirs)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    theirs = run(model, "eager", None, ids, attention_mask=mask)
    for implementation in {ours(name), "fp4kv"}:
        cache = NVFP4Cache(model.config, 128, "bf16")
        assert torch.equal(run(model, implementation, cache, ids, attention_mask=mask), theirs)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-plain"])
def test_quantised_storage_gives_one_result(named_model, recipe):
    name, model = named_model
    NVFP4Cache(model.config, 8)
    ids = prompt(tokens=40)
    growing = run(model, ours(name), NVFP4Cache(model.config, None, recipe), ids)
    assert torch.equal(run(model, ours(name), NVFP4Cache(model.config, 128, recipe), ids), growing)


@pytest.mark.slow
def test_compiled_decode(named_model):
    name, model = named_model
    NVFP4Cache(model.config, 8)
    ids = prompt(tokens=20)
    torch._dynamo.reset()
    eager = run(model, ours(name), NVFP4Cache(model.config, 128), ids)
    compiled = run(model, ours(name), NVFP4Cache(model.config, 128), ids, compile_config=compile_everywhere())
    assert torch.equal(compiled, eager)


@pytest.mark.parametrize("name", list(NEEDS_FP4KV))
def test_what_sdpa_cannot_do_is_refused_by_transformers(name):
    """These classes don't offer sdpa; `fp4kv` is the way to a quantised cache."""
    model = build(name)
    if getattr(model, "_supports_sdpa", False):
        pytest.skip(f"transformers {transformers.__version__} offers sdpa for it, with any cache")
    with pytest.raises(ValueError):
        run(model, "sdpa", NVFP4Cache(model.config, 128), prompt())


@pytest.mark.parametrize(
    "options",
    [{}, {"exact_window": 3}, {"exact_prefill": False}, {"materialize": True}],
    ids=["default", "window", "read-back", "materialized"],
)
@pytest.mark.parametrize("implementation", ["eager", "fp4kv"])
def test_prompts_and_chunks_longer_than_a_sliding_ring(options, implementation):
    """Queries see keys that the same call overwrites, dequantised too."""
    model = build("Gemma2")
    model.set_attn_implementation("eager")
    ids = prompt(tokens=330)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("eager" if "materialize" in options else implementation)
        for parts in ((120, 40, 1, 150, 19), (300, 30)):
            cache = NVFP4Cache(model.config, 330, "bf16", **options)
            got = [model(part, past_key_values=cache).logits for part in ids.split(parts, 1)]
            torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("capacity", [None, 128], ids=["growing", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv", "eager"])
def test_chunked_attention(implementation, capacity):
    """Not by `generate`, which in transformers 5.17 takes no static cache of any kind for this model."""
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "pad_token_id": 0}
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 32}
    model = build("Llama4Text", **experts, **kinds)
    ids = prompt(tokens=100)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation(implementation)
        cache = NVFP4Cache(model.config, capacity, "bf16", exact_window=8)
        got = [model(part, past_key_values=cache).logits for part in ids.split((40, 1, 30, 16, 5, 8), 1)]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv", "eager"])
@pytest.mark.parametrize("capacity", [None, 128], ids=["growing", "static"])
def test_layers_that_share_k_and_v_take_the_last_queries_only(implementation, capacity, keep):
    """Of a prompt, of a chunk after it, and of one beside padding."""
    model, ids = build("Gemma4Text"), prompt(tokens=70)
    mask = torch.ones_like(ids)
    for padding in (0, 5):
        mask[0, :padding] = 0
        with torch.no_grad():
            model.set_attn_implementation("eager")
            want = model(ids, attention_mask=mask, use_cache=False).logits
            model.set_attn_implementation(implementation)
            cache = NVFP4Cache(model.config, capacity, "bf16")
            for start, stop in ((0, 40), (40, 70)):
                part = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
                got = model(**part, past_key_values=cache, logits_to_keep=keep).logits
                torch.testing.assert_close(got, want[:, stop - keep : stop], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("drop", [1, 16, 104])
def test_a_sliding_layer_can_be_cropped_within_its_slack(drop):
    """A window of 24 in a ring of 128."""
    model = build("Mistral")
    ids, more = prompt(tokens=150), prompt(tokens=20, seed=7)
    with torch.no_grad():
        want = model(torch.cat([ids, more], 1)).logits[:, -1]
        cache = NVFP4Cache(model.config, 300, "bf16")
        model(ids, past_key_values=cache)
        model(prompt(tokens=drop, seed=3), past_key_values=cache)
        cache.crop(-drop)
        parts = more.split((1, 16, 1, 1, 1), 1)
        got = [model(part, past_key_values=cache).logits[:, -1] for part in parts][-1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_deeper_crop_of_a_sliding_layer_is_refused():
    model = build("Mistral")
    cache = NVFP4Cache(model.config, 300, "bf16")
    with torch.no_grad():
        model(prompt(tokens=150), past_key_values=cache)
    cache.crop(-100)
    with pytest.raises(RuntimeError, match="at most 104 can be dropped, got 7; nothing was dropped"):
        cache.crop(-7)
    assert int(cache.get_seq_length()) == 50


@pytest.mark.parametrize("capacity", [None, 200], ids=["growing", "static"])
def test_many_candidates_are_dropped_from_sliding_layers(capacity):
    """transformers' assistants propose 20 tokens at a time."""
    model = build("Mistral")
    ids, cache = prompt(batch=1, tokens=40), NVFP4Cache(model.config, capacity, "bf16")
    got = run(model, "sdpa", cache, ids, prompt_lookup_num_tokens=25, max_matching_ngram_size=1)
    assert torch.equal(got, run(model, "eager", None, ids))


def test_an_unknown_layer_type_is_named():
    config = build("Llama").config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layer 1 is 'linear_attention'"):
        NVFP4Cache(config, 64)


def encoder_decoder(name: str) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A model, what its encoder reads (over a hundred states, more than the exact window), and `generate` options."""
    torch.manual_seed(0)
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 1}
    if name == "Bart":
        tokens["forced_eos_token_id"] = None
        config = transformers.BartConfig(d_model=128, init_std=0.2, **sizes, **heads, **tokens)
        return transformers.BartForConditionalGeneration(config).eval(), prompt(tokens=120), greedy(12)
    if name == "Whisper":
        audio = {"num_mel_bins": 8, "max_source_positions": 120, "max_target_positions": 64}
        special = {"bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None}
        config = transformers.WhisperConfig(d_model=128, init_std=0.2, **audio, **sizes, **heads, **tokens, **special)
        model = transformers.WhisperForConditionalGeneration(config).eval()
        return model, torch.randn(2, 8, 240), {"max_new_tokens": 12, "do_sample": False}
    config = transformers.T5Config(**tokens, d_model=128, d_kv=32, d_ff=64, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config).eval(), prompt(tokens=120), greedy(12)


@pytest.fixture(scope="module", params=["Bart", "Whisper", "T5"])
def translator(request):
    return encoder_decoder(request.param)


@pytest.mark.parametrize("capacity", [None, 64], ids=["growing", "static"])
def test_the_decoder_of_an_encoder_decoder(translator, capacity):
    model, source, options = translator
    own = NVFP4Cache(model.config, capacity, "bf16")
    cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    got = model.generate(source, past_key_values=cache, **options)
    assert torch.equal(got, model.generate(source, **options))


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "nvfp4-plain"])
def test_what_the_encoder_says_is_stored_once(translator, recipe):
    """Cross-attention reads what its first call quantised: the tokens of dequantised tensors, or of the model's own
    caches where nothing is quantised."""
    model, source, options = translator

    def run(materialize):
        own, cross = (NVFP4Cache(model.config, None, recipe, materialize) for _ in range(2))
        cache = transformers.EncoderDecoderCache(own, cross)
        out = model.generate(source, past_key_values=cache, **options)
        assert [layer.calls for layer in cross.layers] == [1, 1]
        assert int(cross.get_seq_length()) == 120
        assert min(layer.calls for layer in own.layers) > 5
        return out

    got = run(materialize=False)
    assert torch.equal(got, model.generate(source, **options) if recipe == "bf16" else run(materialize=True))


def test_an_encoder_decoder_is_not_given_one_cache_for_both():
    """It would store what the encoder says behind its own tokens."""
    model, source, options = encoder_decoder("Bart")
    with pytest.raises(RuntimeError, match=r"EncoderDecoderCache\(NVFP4Cache\(config\), NVFP4Cache\(config\)\)"):
        model.generate(source[:, :8], past_key_values=NVFP4Cache(model.config), **options)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention_takes_tensors_or_is_refused(name):
    """MLA computes K and V from what is cached, so it needs tensors."""
    torch.manual_seed(0)
    latent = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    experts = {"first_k_dense_replace": 2, "n_routed_experts": 4, "moe_intermediate_size": 32, "pad_token_id": 0}
    sizes = {**COMMON, "num_key_value_heads": 4, "head_dim": 16}
    config = getattr(transformers, f"{name}Config")(**sizes, **latent, **experts)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = prompt(tokens=40)
    want = model.generate(ids, **greedy(12))
    for capacity in (None, 128):
        cache = NVFP4Cache(config, capacity, "bf16", materialize=True)
        assert torch.equal(model.generate(ids, past_key_values=cache, **greedy(12)), want)
        cache = NVFP4Cache(config, capacity, "nvfp4", materialize=True)
        assert (model.generate(ids, past_key_values=cache, **greedy(12)) == want).float().mean() > 0.9
    with pytest.raises(TypeError, match=r"linear is not supported.*materialize=True"):
        model.generate(ids, past_key_values=NVFP4Cache(config), **greedy(12))


@pytest.mark.parametrize("capacities", [(None, None), (64, 128)], ids=["growing", "static"])
@pytest.mark.parametrize("source_tokens", [1, 5, 120])
def test_short_masked_and_repeated_sources(capacities, source_tokens):
    """An encoder's few states are read from storage at once; padding of the source and beams reach both parts."""
    model, source, options = encoder_decoder("Bart")
    source = source[:, :source_tokens]
    mask = torch.ones_like(source)
    mask[0, 3:] = 0
    for more in ({}, {"attention_mask": mask}, {"num_beams": 3}):
        parts = (NVFP4Cache(model.config, capacity, "bf16") for capacity in capacities)
        cache = transformers.EncoderDecoderCache(*parts)
        got = model.generate(source, past_key_values=cache, disable_compile=True, **options, **more)
        assert torch.equal(got, model.generate(source, **options, **more))


def test_cache_implementation_static_of_an_encoder_decoder():
    model, source, options = encoder_decoder("Bart")
    with as_static_cache(model, "bf16"):
        got = model.generate(
            source, cache_implementation="static", disable_compile=True, return_dict_in_generate=True, **options
        )
    cache = getattr(got, "cache", None) or got.past_key_values
    assert isinstance(cache.self_attention_cache, NVFP4Cache)
    assert isinstance(cache.cross_attention_cache, NVFP4Cache)
    assert torch.equal(got.sequences, model.generate(source, **options))
