"""Peak memory of a prompt on a GPU, beside transformers' static cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import llama, prompt
from transformers import StaticCache

from torch_fp4kv import NVFP4Cache

pytestmark = pytest.mark.gpu


def peak(model, make_cache, ids):
    """Bytes at the peak of one call of the model, its weights left out, the cache in."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cache = make_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv"])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-plain"])
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_a_prompt_takes_no_more_than_with_the_static_cache(tokens, recipe, implementation):
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = llama(**sizes, num_key_value_heads=4).to("cuda", torch.bfloat16)
    ids = prompt(1, tokens).cuda()
    for warm in (ids[:, :64], ids):
        theirs = peak(model, lambda: StaticCache(config=model.config, max_cache_len=tokens), warm)
    NVFP4Cache(model.config)
    model.set_attn_implementation(implementation)
    for warm in (ids[:, :64], ids):
        ours = peak(model, lambda: NVFP4Cache(model.config, tokens, recipe), warm)
    print(f"{tokens} tokens, {recipe}, {implementation}: {ours >> 20} MiB, StaticCache {theirs >> 20} MiB")
    assert ours <= theirs
