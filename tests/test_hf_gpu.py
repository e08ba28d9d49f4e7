"""`generate` on a GPU: eager, compiled with CUDA graphs, and what an overflow does there."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config

pytest.importorskip("transformers")

from hf_models import greedy, llama, prompt

from torch_fp4kv import NVFP4Cache
from torch_fp4kv.ops import backends

pytestmark = pytest.mark.gpu
RECIPES = ["nvfp4", "nvfp4-plain", "k8v4", "bf16"]


@pytest.fixture(scope="module")
def model():
    return llama().to("cuda", torch.bfloat16)


def logits(model, cache, prompt_tokens=100, steps=24):
    """Logits of tokens fed one by one after a prompt."""
    ids = prompt(tokens=prompt_tokens + steps).cuda()
    with torch.no_grad():
        model(ids[:, :prompt_tokens], past_key_values=cache)
        rows = [
            model(ids[:, i : i + 1], past_key_values=cache).logits[:, 0] for i in range(prompt_tokens, ids.shape[1])
        ]
    return torch.stack(rows).double()


@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_agree_with_the_torch_backend(model, implementation, recipe, monkeypatch):
    """The same cache read by the Triton kernels and by PyTorch: a bf16 model's rounding apart, the same logits."""
    NVFP4Cache(model.config, 8)
    model.set_attn_implementation(implementation)
    backends.served.clear()
    ours = logits(model, NVFP4Cache(model.config, 128, recipe))
    assert not any(name == "torch" for _, name in backends.served)
    monkeypatch.setattr(backends, "triton_missing", lambda device: "switched off")
    reference = logits(model, NVFP4Cache(model.config, 128, recipe))
    assert (ours - reference).norm() / reference.norm() < 2e-2


@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv"])
@torch._inductor.config.patch({"triton.cudagraph_or_error": True})
def test_generate_compiles_decoding_into_one_cuda_graph(model, implementation):
    """transformers' own compilation (reduce-overhead): one graph over three prompts and two caches, no break, CUDA
    graphs not skipped, the tokens of eager decoding, and the window's border crossed."""
    from torch._dynamo.utils import counters

    NVFP4Cache(model.config, 8)
    model.set_attn_implementation(implementation)
    torch._dynamo.reset()
    counters.clear()

    def generate(cache, tokens=40, **options):
        options |= {**greedy(120), "output_logits": True, "return_dict_in_generate": True}
        return model.generate(prompt(tokens=tokens).cuda(), past_key_values=cache, **options)

    first, second = NVFP4Cache(model.config, 256), NVFP4Cache(model.config, 256)
    eager = generate(first, disable_compile=True)
    first.reset()
    compiled = generate(first)
    generate(second, tokens=21)
    second.reset()
    again = generate(second)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert torch.equal(again.sequences, compiled.sequences)
    # Inductor keeps RoPE in float32 where eager bf16 rounds twice: the logits are close until, at a near tie, another
    # token is taken.
    compared = 0
    for row in range(eager.sequences.shape[0]):
        differs = (compiled.sequences[row, 40:] != eager.sequences[row, 40:]).nonzero()
        steps = int(differs[0]) + 1 if len(differs) else 120
        ours, theirs = (torch.stack(x.logits)[:steps, row].double() for x in (compiled, eager))
        assert (ours - theirs).norm() / theirs.norm() < 3e-2
        compared += steps
    assert compared > 40


def test_growing_and_static_caches_agree(model):
    model.set_attn_implementation("sdpa")
    outputs = [
        model.generate(
            prompt(tokens=40).cuda(),
            past_key_values=NVFP4Cache(model.config, capacity, "nvfp4"),
            disable_compile=True,
            **greedy(85),
        )
        for capacity in (None, 128)
    ]
    assert torch.equal(outputs[0], outputs[1])


def test_left_padding_and_beams(model):
    mask = torch.ones(2, 40, dtype=torch.long, device="cuda")
    mask[0, :7] = 0
    for implementation in ("sdpa", "fp4kv"):
        model.set_attn_implementation(implementation)
        for options in ({"attention_mask": mask}, {"num_beams": 3}):
            ids = prompt(tokens=40).cuda()
            theirs = model.generate(ids, **greedy(20), **options)
            ours = model.generate(
                ids,
                past_key_values=NVFP4Cache(model.config, 128, "bf16"),
                disable_compile=True,
                **greedy(20),
                **options,
            )
            assert (ours == theirs).float().mean() > 0.8


def test_an_overflow_raises_while_decoding_and_at_check(model):
    model.set_attn_implementation("sdpa")
    cache = NVFP4Cache(model.config, 48)
    with pytest.raises(RuntimeError, match="overflowed"):
        model.generate(prompt(tokens=40).cuda(), past_key_values=cache, disable_compile=True, **greedy(30))
    with pytest.raises(RuntimeError, match="overflowed"):
        cache.check()
    cache.reset()
    model.generate(prompt(tokens=20).cuda(), past_key_values=cache, disable_compile=True, **greedy(10))
    cache.check()
