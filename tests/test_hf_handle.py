"""What a handle stands for, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from hf_models import greedy, llama, prompt
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from torch_fp4kv import NVFP4Cache


@pytest.fixture
def handles():
    """K and V handles of a layer that holds 20 tokens, and the tensors that went in."""
    config = llama().config
    torch.manual_seed(2)
    k, v = torch.randn(2, 2, 20, 64), torch.randn(2, 2, 20, 64)
    key, value = NVFP4Cache(config, 32, "bf16").update(k, v, 0)
    return key, value, k, v


def attend(q, k, v):
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def test_it_looks_like_the_tensor(handles):
    key, value, *_ = handles
    assert key.shape == value.shape == (2, 2, 32, 64)
    assert (key.dtype, key.device, key.ndim, key.dim(), key.size(1), key.size()) == (
        torch.float32,
        torch.device("cpu"),
        4,
        4,
        2,
        key.shape,
    )


def test_sdpa_in_each_form_that_models_use(handles):
    key, value, k, v = handles
    q = torch.randn(2, 4, 20, 64)
    want = attend(q, k, v)
    forms = {
        "matmul by keyword": torch.matmul(
            input=(q @ key.transpose(2, 3).repeat_interleave(2, 1) / 8)[..., :20]
            .masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), float("-inf"))
            .softmax(-1),
            other=value[:, :, :20].repeat_interleave(2, 1),
        ),
        "enable_gqa": F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=True),
        "repeat_kv": F.scaled_dot_product_attention(q, repeat_kv(key, 2), repeat_kv(value, 2), is_causal=True),
        "repeat_interleave": F.scaled_dot_product_attention(
            q, torch.repeat_interleave(key, 2, dim=1), torch.repeat_interleave(value, 2, dim=1), is_causal=True
        ),
        "sliced": F.scaled_dot_product_attention(q, key[:, :, :20, :], value[:, :, :20], is_causal=True),
        "contiguous": F.scaled_dot_product_attention(q, key.contiguous(), value.to(torch.float32), is_causal=True),
        "mask": F.scaled_dot_product_attention(
            q, key, value, attn_mask=torch.ones(20, 32, dtype=torch.bool).tril()[None, None]
        ),
    }
    for name, got in forms.items():
        torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}")


def test_packed_query_heads_of_one_token(handles):
    """transformers may pack a single token's query heads into the query axis, and its mask with them."""
    key, value, k, v = handles
    cache = NVFP4Cache(llama().config, 32, "bf16")
    cache.update(k[:, :, :-1], v[:, :, :-1], 0)
    key, value = cache.update(k[:, :, -1:], v[:, :, -1:], 0)
    q = torch.randn(2, 4, 1, 64)
    want = attend(q, k, v)
    mask = (torch.arange(32) < 20).expand(2, 1, 1, 32)
    packed = q.reshape(2, 2, 2, 64)
    for m in (None, mask, mask.expand(2, 4, 1, 32).reshape(2, 2, 2, 32)):
        got = F.scaled_dot_product_attention(packed, key, value, attn_mask=m)
        torch.testing.assert_close(got.reshape(2, 4, 1, 64), want)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("transpose\\(1, 2\\)", lambda k: k.transpose(1, 2)),
        ("cat", lambda k: torch.cat([k, k], dim=2)),
        ("add", lambda k: torch.add(k, k)),
        ("norm", lambda k: torch.norm(k)),
        ("indexing", lambda k: k[0]),
        ("indexing", lambda k: k[:, :, 3:]),
        ("expand", lambda k: k.expand(4, 2, 32, 64)),
        ("reshape", lambda k: k.reshape(2, 2, -1)),
        ("to\\(", lambda k: k.to(torch.float16)),
        ("repeat_interleave", lambda k: torch.repeat_interleave(k, 2, dim=2)),
        ("repeat_interleave", lambda k: torch.repeat_interleave(input=k, repeats=torch.tensor([1, 3]), dim=1)),
        ("matmul", lambda k: torch.matmul(input=k, other=torch.ones(64, 2))),
    ],
)
def test_what_it_cannot_do_names_the_operation_and_the_way_out(handles, name, use):
    with pytest.raises(TypeError, match=f"{name}.*sdpa.*fp4kv.*materialize"):
        use(handles[0])


def test_an_unknown_attribute_names_the_way_out(handles):
    with pytest.raises(AttributeError, match=r"no 'softmax'.*sdpa"):
        _ = handles[0].softmax


def test_dropout_is_refused(handles):
    key, value, *_ = handles
    with pytest.raises(ValueError, match="dropout_p must be 0"):
        F.scaled_dot_product_attention(torch.randn(2, 4, 20, 64), key, value, dropout_p=0.1)


def test_keys_of_one_layer_and_values_of_another_are_refused(handles):
    key, _, k, v = handles
    _, other = NVFP4Cache(llama().config, 32).update(k, v, 0)
    with pytest.raises(TypeError, match="from one layer"):
        F.scaled_dot_product_attention(torch.randn(2, 4, 20, 64), key, other)


@pytest.mark.parametrize(
    ("name", "attend"),
    [
        ("V in place of K", lambda q, k, v: F.scaled_dot_product_attention(q, v, k, enable_gqa=True)),
        ("K in place of V", lambda q, k, v: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)),
        ("1 rows", lambda q, k, v: F.scaled_dot_product_attention(q[:1], k, v, enable_gqa=True)),
        (
            "is_causal of 4 queries",
            lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :4], k, v, is_causal=True, enable_gqa=True),
        ),
    ],
)
def test_attention_that_would_be_another_than_asked_for_is_refused(handles, name, attend):
    key, value, *_ = handles
    with pytest.raises(TypeError, match=name):
        attend(torch.randn(2, 4, 20, 64), key, value)


@pytest.mark.parametrize("implementation", ["flex_attention"])
def test_implementations_that_read_tensors_are_refused_with_advice(implementation):
    model = llama()
    model.set_attn_implementation(implementation)
    with torch.no_grad(), pytest.raises((TypeError, AttributeError, RuntimeError), match="sdpa"):
        model(prompt(), past_key_values=NVFP4Cache(model.config, 64))


def test_output_attentions_is_refused_under_fp4kv_and_served_by_eager():
    model = llama()
    NVFP4Cache(model.config, 64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(prompt(), past_key_values=NVFP4Cache(model.config, 64), output_attentions=True).attentions
    assert attentions[0].shape[:3] == (2, 4, 30)
    from torch_fp4kv.cache.attention_interface import fp4kv_attention

    with pytest.raises(ValueError, match="output_attentions"):
        fp4kv_attention(model, torch.zeros(1), None, None, None, output_attentions=True)


def test_eager_attention_warns_once(monkeypatch):
    monkeypatch.setattr("torch_fp4kv.cache.handle._warned", False)
    model = llama()
    model.set_attn_implementation("eager")
    with torch.no_grad(), pytest.warns(UserWarning, match="dequantises") as record:
        model(prompt(), past_key_values=NVFP4Cache(model.config, 64))
    assert len([w for w in record if "dequantises" in str(w.message)]) == 1


def test_materialize_hands_out_tensors():
    model = llama()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(prompt(), past_key_values=NVFP4Cache(model.config, 64)).logits
        got = model(prompt(), past_key_values=NVFP4Cache(model.config, 64, materialize=True)).logits
    torch.testing.assert_close(got, want)


def test_fp4kv_serves_ordinary_tensors_and_caches():
    model = llama()
    NVFP4Cache(model.config, 8)
    with torch.no_grad():
        want = model(prompt()).logits
        model.set_attn_implementation("fp4kv")
        torch.testing.assert_close(model(prompt()).logits, want)
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[1, :4] = 0
        masked = model(prompt(), attention_mask=mask).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(masked, model(prompt(), attention_mask=mask).logits)


def test_nothing_of_transformers_is_patched():
    """Only a new name is added to the two registries."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    NVFP4Cache(llama().config, 8)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__module__.startswith("transformers.")
    assert "fp4kv" in AttentionInterface._global_mapping
    assert AttentionMaskInterface._global_mapping["sdpa"] is sdpa_mask


@pytest.mark.parametrize("num_new", [1, 20])
def test_tokens_cut_off_by_a_slice_are_not_seen_without_a_mask(num_new):
    cache = NVFP4Cache(llama().config, 64, "bf16")
    k, v, q = torch.randn(2, 2, 20 + num_new, 64), torch.randn(2, 2, 20 + num_new, 64), torch.randn(2, 2, num_new, 64)
    cache.update(k[:, :, :20], v[:, :, :20], 0)
    key, value = cache.update(k[:, :, 20:], v[:, :, 20:], 0)
    got = F.scaled_dot_product_attention(q, key[:, :, :7], value[:, :, :7])
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k[:, :, :7], v[:, :, :7]))
    with pytest.raises(TypeError, match="different lengths"):
        F.scaled_dot_product_attention(q, key[:, :, :7], value)


def test_a_mask_of_one_column_is_for_every_token(handles):
    key, value, k, v = handles
    q, mask = torch.randn(2, 2, 20, 64), torch.ones(20, 1, dtype=torch.bool)
    got = F.scaled_dot_product_attention(q, key, value, attn_mask=mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv", "eager"])
@pytest.mark.parametrize("capacity", [None, 64], ids=["growing", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_materialized_tensors_get_their_mask(implementation, capacity, padded):
    """They have a column for each token there is room for, which a mask must hide."""
    model = llama()
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0 if padded else 1
    want = model.generate(prompt(), attention_mask=mask, **greedy(8))
    model.set_attn_implementation(implementation)
    cache = NVFP4Cache(model.config, capacity, "bf16", materialize=True)
    got = model.generate(prompt(), attention_mask=mask, past_key_values=cache, **greedy(8))
    assert torch.equal(got, want)


def test_another_model_s_padding_is_not_taken_for_the_last_cache_s():
    """Under "sdpa" nobody asks for the cache that a mask was sized for; the next "fp4kv" mask is not about it."""
    model, other = llama(), llama(seed=3)
    cache = NVFP4Cache(model.config, 64)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        cache.reset()
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[0, :7] = 0
        want = other(prompt(), attention_mask=mask, use_cache=False).logits
        other.set_attn_implementation("fp4kv")
        got = other(prompt(), attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[:, 7:], want[:, 7:])
