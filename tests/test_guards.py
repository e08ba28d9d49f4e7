"""What compiled code looks at before each token: of a layer that nothing was replaced in, one tag."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import llama, mistral, prompt

from torch_fp4kv import NVFP4Cache, PagedNVFP4Cache


def sliding() -> Any:
    return mistral(24)


@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv"])
@pytest.mark.parametrize("make", [llama, sliding], ids=["full", "sliding"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "bf16"])
def test_a_layer_is_guarded_by_one_tag(make: Any, recipe: str, implementation: str) -> None:
    """And none is compared with another. (Torch 2.13 and later look at tags where they are told to.)"""
    model = make()
    model.set_attn_implementation(implementation)
    torch._dynamo.reset()

    def step(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
        return logits

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    cache = NVFP4Cache(model.config, 64, recipe)
    settings = {"error_on_recompile": True, "use_recursive_dict_tags_for_guards": True}
    with torch.no_grad(), torch._dynamo.config.patch(settings):
        step(prompt(), cache)
        for _ in range(3):
            compiled(prompt(tokens=1), cache)
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(step.__code__)
    guards = str(entry.guard_manager)
    layers = re.findall(r"source=L\['cache'\]\.layers\[\d+\],.*", guards)
    assert len(layers) == 2
    # That is: the tag vouches for all below it, and nothing below it is looked at.
    assert all("tag_safe=(True, True)" in layer for layer in layers)
    assert not re.findall(r"LAMBDA_GUARD: L\['cache'\].*", guards)


def test_the_tag_tells_of_every_change() -> None:
    """Compiled code with the same cache after a reset, a prompt too short for a bias, fewer rows and other buffers."""
    model = llama()
    model.set_attn_implementation("fp4kv")
    torch._dynamo.reset()

    def step(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
        return logits

    def fewer_rows(cache: NVFP4Cache) -> None:
        step(prompt(), cache)
        cache.batch_select_indices([1])

    def other_buffers(cache: NVFP4Cache) -> None:
        step(prompt(seed=3), cache)
        for layer in cache.layers:
            layer.storage.move_to("cpu")

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    cache, eager = NVFP4Cache(model.config, 64), NVFP4Cache(model.config, 64)
    starts = (
        lambda cache: step(prompt(), cache),
        lambda cache: step(prompt(tokens=3), cache),
        other_buffers,
        lambda cache: step(prompt(seed=2), cache),
        fewer_rows,
    )
    settings = {"use_recursive_dict_tags_for_guards": True}
    with torch.no_grad(), torch._dynamo.config.patch(settings):
        for start in starts:
            for one in (cache, eager):
                one.reset()
                start(one)
            rows = len(cache.rows)
            for i in range(3):
                ids = prompt(tokens=1, seed=i)[:rows]
                torch.testing.assert_close(compiled(ids, cache), step(ids, eager))


CHANGES: dict[str, Any] = {
    "nothing": lambda cache: None,
    "growth": lambda cache: [cache.update(x := torch.randn(2, 2, 300, 64), -x, layer) for layer in range(2)],
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "move": lambda cache: [layer.storage.move_to("cpu") for layer in cache.layers],
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_compiled_code_mutates_has_a_static_address(change: Any) -> None:
    """Else Inductor makes no CUDA graph of it ("skipping cudagraphs due to mutated inputs")."""
    model = llama()
    cache, pool = NVFP4Cache(model.config), PagedNVFP4Cache(model.config, 24, 3, max_cache_len=64, page_size=16)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        model(prompt(1), past_key_values=pool.row(pool.admit()))
    changed = change(cache)
    owners = [*pool.layers, pool.batch.layers[0].positions]
    for layer in (changed if isinstance(changed, NVFP4Cache) else cache).layers:
        owners += [layer.storage, layer.positions]
    for owner in owners:
        for name, tensor in owner.tensors():
            assert hasattr(tensor, "_dynamo_static_input_type"), name


def test_steps_of_a_pool_are_compiled_once() -> None:
    """Of any rows, over the end of a page."""
    model = llama(num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    pools = [PagedNVFP4Cache(model.config, 24, max_rows=3, max_cache_len=64, page_size=16) for _ in range(2)]
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for pool in pools:
            for row in range(2):
                model(prompt(1, 13 + row), past_key_values=pool.row(pool.admit()))
        for i, rows in enumerate(([0, 1], [0, 1], [1], [0, 1], [0], [1, 0])):
            ids = prompt(3, 1, seed=i)
            got, want = (
                step(ids, position_ids=pool.step(rows), past_key_values=pool.batch).logits[rows]
                for step, pool in ((compiled, pools[0]), (model, pools[1]))
            )
            torch.testing.assert_close(got, want)
    assert [pools[0].length(row) for row in range(2)] == [pools[1].length(row) for row in range(2)] == [18, 19]
