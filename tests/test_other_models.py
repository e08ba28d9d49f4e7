"""litgpt's and torchtune's own models with `NVFP4KVCache` in place of their cache class, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_fp4kv import NVFP4KVCache

HEADS, KV_HEADS, DIM, CAPACITY, PROMPT, STEPS = 4, 2, 64, 128, 40, 60


def litgpt_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`(set_caches, step)`; litgpt asks whether the cache is an instance of the name `KVCache` in its module."""
    litgpt = pytest.importorskip("litgpt.model", reason="litgpt is not installed")
    from litgpt.config import Config

    monkeypatch.setattr(litgpt, "KVCache", (litgpt.KVCache, NVFP4KVCache))
    config = Config(
        block_size=CAPACITY,
        vocab_size=64,
        padded_vocab_size=64,
        n_layer=2,
        n_head=HEADS,
        n_query_groups=KV_HEADS,
        n_embd=HEADS * DIM,
        rotary_percentage=1.0,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=128,
    )
    model = litgpt.GPT(config)
    own = litgpt.KVCache[0]

    def set_caches(make: Any) -> None:
        model.mask_cache = litgpt.build_mask_cache(CAPACITY)
        for block in model.transformer.h:
            shape = (1, KV_HEADS, CAPACITY, DIM)
            block.attn.kv_cache = own(shape, shape, dtype=torch.float32) if make is None else make()

    def step(ids: Tensor, first: int) -> Tensor:
        return model(ids, torch.arange(first, first + ids.shape[1]))

    return set_caches, step


def torchtune_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`(set_caches, step)`."""
    models = pytest.importorskip("torchtune.models.llama3", reason="torchtune is not installed")
    model = models.llama3(
        vocab_size=64,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        embed_dim=HEADS * DIM,
        max_seq_len=CAPACITY,
        intermediate_dim=128,
    )

    def set_caches(make: Any) -> None:
        for layer in model.layers:
            layer.attn.kv_cache = None
        model.setup_caches(1, torch.float32, decoder_max_seq_len=CAPACITY)
        for layer in model.layers:
            if make is not None:
                layer.attn.kv_cache = make()

    def step(ids: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + ids.shape[1])
        mask = (torch.arange(CAPACITY) <= positions[:, None])[None]
        return model(ids, mask=mask, input_pos=positions[None])

    return set_caches, step


@pytest.mark.parametrize("make", [litgpt_model, torchtune_model], ids=["litgpt", "torchtune"])
@pytest.mark.parametrize(("recipe", "tolerance"), [("bf16", 1e-4), ("nvfp4", 0.1)])
def test_logits_are_those_of_the_model_s_own_cache(
    make: Any, recipe: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    set_caches, step = make(monkeypatch)
    ids = torch.randint(64, (1, PROMPT + STEPS))

    def logits() -> Tensor:
        rows = [step(ids[:, :PROMPT], 0)]
        rows += [step(ids[:, i : i + 1], i) for i in range(PROMPT, ids.shape[1])]
        return torch.cat(rows, 1)

    with torch.no_grad():
        set_caches(None)
        expected = logits()
        set_caches(lambda: NVFP4KVCache(1, CAPACITY, KV_HEADS, DIM, torch.float32, recipe=recipe))
        found = logits()
    assert float((found - expected).norm() / expected.norm()) < tolerance
    if recipe == "nvfp4":
        assert not torch.equal(found[:, -1], expected[:, -1])
