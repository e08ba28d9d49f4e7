"""Small random models of real classes: exact storage gives the tokens of the model's own cache, quantised storage the
same tokens eager and compiled, growing and static."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import compile_everywhere, greedy, prompt  # noqa: E402

from torch_fp4kv import NVFP4Cache  # noqa: E402

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
    "GptOss": {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_scaling": None},
    "Granite": {},
    "Olmo2": {},
    "Cohere2": {**SLIDING},
}
NEEDS_FP4KV = {"Gemma2": "soft-capping", "GptOss": "sinks"}


def build(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name]})
    stem = "Gemma3" if name == "Gemma3Text" else name
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
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


@pytest.mark.parametrize("drop", [1, 16])
def test_a_sliding_layer_can_be_cropped_within_its_slack(drop):
    model = build("Mistral")
    ids, more = prompt(tokens=50), prompt(tokens=4, seed=7)
    with torch.no_grad():
        want = model(torch.cat([ids, more], 1)).logits[:, -1]
        cache = NVFP4Cache(model.config, 128, "bf16")
        model(ids, past_key_values=cache)
        model(prompt(tokens=drop, seed=3), past_key_values=cache)
        cache.crop(-drop)
        got = [model(more[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(4)][-1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_deeper_crop_of_a_sliding_layer_is_refused():
    model = build("Mistral")
    cache = NVFP4Cache(model.config, 128, "bf16")
    with torch.no_grad():
        model(prompt(tokens=50), past_key_values=cache)
    cache.crop(-10)
    with pytest.raises(RuntimeError, match="at most 16 can be dropped, got 7; nothing was dropped"):
        cache.crop(-7)
    assert int(cache.get_seq_length()) == 40


def test_an_unknown_layer_type_is_named():
    config = build("Llama").config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layer 1 is 'linear_attention'"):
        NVFP4Cache(config, 64)


@pytest.fixture(scope="module")
def bart():
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    config = transformers.BartConfig(d_model=128, init_std=0.2, **sizes, **heads, **tokens)
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("capacity", [None, 64], ids=["growing", "static"])
def test_the_decoder_of_an_encoder_decoder(bart, capacity):
    own = NVFP4Cache(bart.config, capacity, "bf16")
    cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    got = bart.generate(prompt(), past_key_values=cache, **greedy(8))
    assert torch.equal(got, bart.generate(prompt(), **greedy(8)))


def test_an_encoder_decoder_is_not_given_one_cache_for_both(bart):
    """It would store what the encoder says behind its own tokens."""
    with pytest.raises(RuntimeError, match=r"takes EncoderDecoderCache\(NVFP4Cache\(config\), DynamicCache\(\)\)"):
        bart.generate(prompt(tokens=8), past_key_values=NVFP4Cache(bart.config), **greedy(8))
