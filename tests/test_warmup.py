"""`warmup`: what it compiles serves the requests after it, and it leaves the cache as good as new."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import compile_everywhere, greedy, llama, prompt
from torch._dynamo.utils import counters
from transformers import DynamicCache

from torch_fp4kv import NVFP4Cache, PagedNVFP4Cache, warmup
from torch_fp4kv.evaluation.scoring import cache_argument
from torch_fp4kv.startup import NUM_NEW


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_requests_after_it_compile_nothing(device):
    torch._dynamo.reset()
    model = llama(num_hidden_layers=1).to(device)
    # On a GPU transformers compiles by itself, with CUDA graphs.
    options = {"compile_config": compile_everywhere()} if device == "cpu" else {}
    ids = prompt(2, 30).to(device)
    cache = NVFP4Cache(model.config, 128, "nvfp4-plain")
    done = warmup(model, cache, batch_size=2, prompt_tokens=(20, 40), **options)
    assert done.seconds > 0
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    argument = cache_argument(model.forward)
    got = model.generate(ids, **{argument: cache}, **options, **greedy(8))
    assert counters["stats"]["unique_graphs"] == graphs
    fresh = NVFP4Cache(model.config, 128, "nvfp4-plain")
    assert torch.equal(got, model.generate(ids, **{argument: fresh}, **options, **greedy(8)))


def test_padded_and_short_prompts_have_graphs_of_their_own():
    torch._dynamo.reset()
    model = llama(num_hidden_layers=1)
    options = {"compile_config": compile_everywhere(backend="eager", mode=None)}
    cache = NVFP4Cache(model.config, 128)
    ids = prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0

    def graphs_for(ids, mask=None):
        before = counters["stats"]["unique_graphs"]
        settings = greedy(8)
        if mask is not None:
            cache.set_padding(mask)
            settings["attention_mask"] = mask
        model.generate(ids, **{cache_argument(model.forward): cache}, **options, **settings)
        cache.reset()
        return counters["stats"]["unique_graphs"] - before

    warmup(model, cache, batch_size=2, **options)
    assert graphs_for(ids) == 0 and graphs_for(ids, mask) == 1 and graphs_for(ids[:, :4]) == 1
    torch._dynamo.reset()
    warmup(model, cache, batch_size=2, prompt_tokens=(20, 4), left_padding=True, **options)
    for length in (12, 4, 7, 1):
        assert graphs_for(ids[:, :length]) == 0
        if length > 1:
            mask = torch.ones_like(ids[:, :length])
            mask[0, :1] = 0
            assert graphs_for(ids[:, :length], mask) == 0


SECOND_PROCESS = """
import torch
from hf_models import compile_everywhere, llama
from torch_fp4kv import NVFP4Cache, warmup
torch.set_num_threads(1)
model = llama(num_hidden_layers=1)
done = warmup(model, NVFP4Cache(model.config, 128, "nvfp4-plain"), compile_config=compile_everywhere())
print(done.graphs_compiled, done.graphs_from_cache)
"""


@pytest.mark.slow
def test_it_says_what_came_from_inductors_cache(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    runs = [
        subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS], env=environment, capture_output=True, text=True, check=True
        )
        for _ in range(2)
    ]
    (compiled, from_cache), (compiled_again, from_cache_again) = (map(int, run.stdout.split()) for run in runs)
    assert compiled > 0 and from_cache == 0
    assert compiled_again == 0 and from_cache_again == compiled


def test_it_takes_the_options_of_a_request():
    model, steps = llama(num_hidden_layers=1), []
    model.register_forward_hook(lambda *call: steps.append(call))
    cache = NVFP4Cache(model.config, 32)
    warmup(model, cache, prompt_tokens=(8,), max_new_tokens=500, eos_token_id=list(range(model.config.vocab_size)))
    assert len(steps) == NUM_NEW and int(cache.get_seq_length()) == 0


def test_what_it_cannot_warm_is_refused():
    model = llama(num_hidden_layers=1)
    with pytest.raises(ValueError, match="max_cache_len"):
        warmup(model, NVFP4Cache(model.config))
    with pytest.raises(ValueError, match="max_cache_len, got DynamicCache"):
        warmup(model, DynamicCache(config=model.config))
    pool = PagedNVFP4Cache(model.config, num_pages=4, max_rows=1, max_cache_len=32, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"got PagedNVFP4Cache: .* a pool is warmed by steps of its own"):
        warmup(model, pool)
    cache = NVFP4Cache(model.config, 32)
    for nothing in ({"batch_size": 0}, {"prompt_tokens": ()}, {"prompt_tokens": (8, 0)}):
        with pytest.raises(ValueError, match="one row or more and prompts of one token or more"):
            warmup(model, cache, **nothing)
    with pytest.raises(ValueError, match="do not fit max_cache_len=32"):
        warmup(model, cache, prompt_tokens=(8, 30))
    with torch.no_grad():
        model(prompt(1, 5), **{cache_argument(model.forward): cache})
    with pytest.raises(ValueError, match="holds 5 tokens"):
        warmup(model, cache, prompt_tokens=(8,))
    assert int(cache.get_seq_length()) == 5
