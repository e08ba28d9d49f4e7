"""500 compiled decode steps past every border a cache has: one graph, no break, no recompilation, eager's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import llama, mistral, prompt

from torch_fp4kv import NVFP4Cache, PagedNVFP4Cache

STEPS, PROMPT, CAPACITY = 500, 40, 576
DEVICES = [
    pytest.param(("cpu", "default"), id="cpu", marks=pytest.mark.slow),
    pytest.param(("cuda", "reduce-overhead"), id="gpu", marks=pytest.mark.gpu),
]


def full(device: str) -> Any:
    """One layer: the exact window ends and its ring goes round, tiles and splits end."""
    return llama(num_hidden_layers=1).to(device)


def sliding(device: str) -> Any:
    """Its storage is a ring of 64 tokens, which goes round eight times."""
    return mistral(48, num_hidden_layers=1).to(device)


def static_steps(model: Any, step: Any, ids: Tensor) -> Iterator[Tensor]:
    """Logits `[B, V]` of each token after the prompt, fed one by one."""
    cache = NVFP4Cache(model.config, CAPACITY)
    model(ids[:, :PROMPT], past_key_values=cache)
    for i in range(PROMPT, ids.shape[1]):
        yield step(ids[:, i : i + 1], past_key_values=cache).logits[:, -1].clone()


def paged_steps(model: Any, step: Any, ids: Tensor) -> Iterator[Tensor]:
    """As `static_steps`, through a pool: 31 pages begin."""
    rows = ids.shape[0]
    pool = PagedNVFP4Cache(
        model.config,
        rows * CAPACITY // 16,
        max_rows=rows,
        max_cache_len=CAPACITY,
        page_size=16,
        dtype=model.dtype,
        device=model.device,
    )
    for row in range(rows):
        model(ids[row : row + 1, :PROMPT], past_key_values=pool.row(pool.admit()))
    for i in range(PROMPT, ids.shape[1]):
        positions = pool.step(list(range(rows)))
        logits = step(ids[:, i : i + 1], position_ids=positions, past_key_values=pool.batch).logits
        yield logits[:, -1].clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "steps"),
    [(full, static_steps), (sliding, static_steps), (full, paged_steps)],
    ids=["static", "sliding", "paged"],
)
def test_500_steps_are_one_graph(
    make: Callable[..., Any],
    steps: Callable[..., Iterator[Tensor]],
    device: tuple[str, str],
) -> None:
    from torch._dynamo.utils import counters

    name, mode = device
    # In float32: this random model would magnify bf16's other roundings in fused code to a third of its logits.
    model = make(name)
    NVFP4Cache(model.config, 8)
    model.set_attn_implementation("fp4kv")
    ids = prompt(tokens=PROMPT + STEPS).to(name)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    strict = torch._inductor.config.patch({"triton.cudagraph_or_error": True})
    with torch.no_grad(), strict, torch._dynamo.config.patch(error_on_recompile=True):
        expected = torch.stack(list(steps(model, model, ids))).double()
        found = torch.stack(list(steps(model, compiled, ids))).double()
        # Another cache of the same geometry runs the same code.
        again = torch.stack(list(steps(model, compiled, ids[:, : PROMPT + 20]))).double()
    error = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(error.max()) < 2e-2
    torch.testing.assert_close(again, found[:20], rtol=0, atol=1e-3 * float(found.abs().max()))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0
