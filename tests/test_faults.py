"""After a fault a cache is as before the step or says that it is not, and `reset` makes it like new."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import greedy, llama, prompt

from torch_fp4kv import NVFP4Cache, NVFP4KVCache, PagedNVFP4Cache
from torch_fp4kv.cache import buffers, storage

RECIPES = pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
SAYS_SO = r"ended halfway|reset\(\)"


@pytest.fixture(scope="module")
def model():
    return llama()


def tokens(model, cache, ids):
    with torch.no_grad():
        return torch.stack([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])])


def prefilled(model, capacity=None, recipe="nvfp4", batch=2, length=30):
    cache = NVFP4Cache(model.config, capacity, recipe)
    with torch.no_grad():
        model(prompt(batch, length), past_key_values=cache)
    return cache


def is_as_new(model, cache, capacity, recipe, batch=2):
    """Whether `cache`, reset, does what a new one does."""
    cache.reset()
    ids = prompt(batch, 4, seed=3)
    with torch.no_grad():
        model(prompt(batch), past_key_values=cache)
    return torch.equal(tokens(model, cache, ids), tokens(model, prefilled(model, capacity, recipe, batch), ids))


class Stop(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


class Interrupt:
    """Raises `Stop` at the `at`-th line that runs in the package's cache modules, as an interrupt may."""

    def __init__(self, at: int | None) -> None:
        self.at, self.lines = at, 0

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, error, where) -> bool:
        sys.settrace(self.before)
        return kind is Stop

    def _trace(self, frame, event, argument):
        if "torch_fp4kv/cache" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise Stop
        return self._trace


def step(cache, tokens, seed=0, rows=2):
    """What attention of both layers gives for new random tokens, without a model."""
    generator, out = torch.Generator().manual_seed(seed), []
    for layer in range(2):
        k, v, q = (torch.randn(2, heads, tokens, 32, generator=generator)[:rows] for heads in (1, 1, 2))
        k, v, q = (x if rows <= 2 else x[[0, 1, 0]] for x in (k, v, q))
        handles = cache.update(k, v, layer)
        out.append(torch.nn.functional.scaled_dot_product_attention(q, *handles, is_causal=tokens > 1, enable_gqa=True))
    return torch.stack(out)


OPERATIONS = {
    "append": lambda cache: step(cache, 1, seed=2),
    "append, growing": lambda cache: step(cache, 300, seed=2),
    "crop": lambda cache: cache.crop(-2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("capacity", [None, 512], ids=["growing", "static"])
@pytest.mark.parametrize("places", [10, pytest.param(None, marks=pytest.mark.slow)], ids=["ten", "all"])
def test_an_interrupt_at_any_line(operation, capacity, places):
    """As before or as after, or the next step says so; after reset all is well."""
    config = llama(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32).config
    run = OPERATIONS[operation]

    def fresh(tokens=20):
        cache = NVFP4Cache(config, capacity)
        step(cache, tokens)
        return cache

    after = fresh()
    with Interrupt(None) as counted:
        run(after)
    new = step(NVFP4Cache(config, capacity), 20)
    outcomes = [step(fresh(), 1, seed=1), step(after, 1, seed=1, rows=len(after.rows) or 2)]
    said = 0
    for at in range(1, counted.lines + 1, max(1, counted.lines // places) if places else 1):
        cache = fresh()
        with Interrupt(at) as interrupt:
            run(cache)
        assert interrupt.lines == at
        try:
            got = step(cache, 1, seed=1, rows=len(cache.rows) or 2)
        except RuntimeError as error:
            assert "reset()" in str(error)
            said += 1
        else:
            assert any(got.shape == want.shape and torch.equal(got, want) for want in outcomes)
        cache.reset()
        assert torch.equal(step(cache, 20), new)
    assert said


def pool_step(pool, rows, seed):
    pool.step(rows)
    return pool_tokens(pool.batch, 1, seed, pool.max_rows)


def pool_tokens(view, tokens, seed, rows=1):
    """As `step`, for a pool."""
    generator, out = torch.Generator().manual_seed(seed), []
    for layer in range(2):
        k, v, q = (torch.randn(rows, heads, tokens, 32, generator=generator) for heads in (1, 1, 2))
        handles = view.update(k, v, layer)
        out.append(torch.nn.functional.scaled_dot_product_attention(q, *handles, is_causal=tokens > 1, enable_gqa=True))
    return torch.stack(out)


POOL_OPERATIONS = {
    "fork": lambda pool: pool.fork(0),
    "free": lambda pool: pool.free(1),
    "step": lambda pool: pool.step([0, 1]),
    "step of a fork": lambda pool: pool.step([0, pool.fork(0)]),
}


@pytest.mark.parametrize("operation", POOL_OPERATIONS)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["fifth", "all"])
def test_an_interrupt_at_any_line_of_a_pool(operation, every):
    """Row 0 goes on as before, or says so; each page is free or held, and never given to two rows."""
    config = llama(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32).config
    run = POOL_OPERATIONS[operation]

    def fresh():
        pool = PagedNVFP4Cache(config, 12, 4, 96, page_size=16, dtype=torch.float32, recipe="bf16", num_sink_tokens=4)
        for tokens in (20, 30):
            pool_tokens(pool.row(pool.admit()), tokens, seed=tokens)
        return pool

    with Interrupt(None) as counted:
        run(fresh())
    want = pool_step(fresh(), [0], seed=3)[:, 0]
    for at in range(1, counted.lines + 1, every):
        pool = fresh()
        with Interrupt(at):
            run(pool)
        for row in pool.rows[1:]:
            pool.free(row)
        for _ in range(3):
            row = pool.admit()
            pool_tokens(pool.row(row), 31, seed=row)
        torch.testing.assert_close(pool_step(pool, [0], seed=3)[:, 0], want)
        for row in pool.rows:
            pool.free(row)
        assert pool.free_pages == 12


@RECIPES
def test_an_allocation_that_fails_while_growing(model, recipe, monkeypatch):
    """Whichever of a growth's allocations fails, in whichever layer: nothing of it is kept."""
    ids, long = prompt(2, 4, seed=3), prompt(2, 300, seed=5)
    want = tokens(model, prefilled(model, recipe=recipe), ids)
    allocations = 0
    allocate = buffers.allocate

    def failing(*args):
        nonlocal allocations
        allocations += 1
        if allocations == fail_at:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(*args)

    for fail_at in (1, 2, 3, 4, 5):
        cache, allocations = prefilled(model, recipe=recipe), 0
        sizes = [layer.storage.tokens for layer in cache.layers]
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            patch.setattr(storage, "allocate", failing)
            model(long, past_key_values=cache)
        in_first_layer = fail_at <= (4 if recipe == "nvfp4" else 2)
        if in_first_layer:
            assert [layer.storage.tokens for layer in cache.layers] == sizes
            assert torch.equal(tokens(model, cache, ids), want)
        else:
            with pytest.raises(RuntimeError, match=SAYS_SO):
                tokens(model, cache, ids)
        assert is_as_new(model, cache, None, recipe)
        if recipe == "bf16" and fail_at == 4:
            break


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_an_allocation_that_fails_for_a_larger_batch(monkeypatch, fail_at):
    """In the middle of the first layer or of the second; the third has rows for two still, the first for four."""
    model = llama(num_hidden_layers=3)
    cache = prefilled(model, 64)
    cache.reset()
    allocate, of_scales = storage.allocate, 0

    def failing(shape, dtype, device):
        nonlocal of_scales
        of_scales += dtype == torch.uint8
        if dtype == torch.uint8 and of_scales == fail_at:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(shape, dtype, device)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        patch.setattr(storage, "allocate", failing)
        model(prompt(4), past_key_values=cache)
    assert is_as_new(model, cache, 64, "nvfp4")
    assert is_as_new(model, cache, 64, "nvfp4", batch=4)


def test_an_exception_between_two_layers_of_a_pool_s_step(model, monkeypatch):
    model.set_attn_implementation("sdpa")
    pool = PagedNVFP4Cache(model.config, 24, max_rows=3, max_cache_len=64, page_size=16, dtype=torch.float32)
    for _ in range(3):
        row = pool.admit()
        with torch.no_grad():
            model(prompt(1, 20, seed=row), past_key_values=pool.row(row))
    batch = {"position_ids": pool.step([0, 2]), "past_key_values": pool.batch}
    with monkeypatch.context() as patch, pytest.raises(KeyError), torch.no_grad():
        patch.setattr(model.model.layers[0].mlp, "forward", lambda x: {}["interrupted"])
        model(torch.zeros(3, 1, dtype=torch.long), **batch)
    for again in (lambda: pool.step([0]), lambda: pool.fork(2), lambda: model(prompt(1), past_key_values=pool.row(0))):
        with pytest.raises(RuntimeError, match="ended halfway"), torch.no_grad():
            again()
    pool.step([1])
    with pytest.raises(RuntimeError, match="row 2 ended halfway"):
        pool.step([1, 2])
    pool.free(0)
    pool.free(2)
    assert pool.admit() == 0
    pool.step([1])


def test_a_row_of_eight_without_room(model):
    model.set_attn_implementation("sdpa")
    pool = PagedNVFP4Cache(model.config, 64, max_rows=8, max_cache_len=32, page_size=16, dtype=torch.float32)
    for row in range(8):
        pool.admit()
        with torch.no_grad():
            model(prompt(1, 32 if row == 3 else 20, seed=row), past_key_values=pool.row(row))
    lengths, free = pool.batch.layers[0].positions.lengths.tolist(), pool.free_pages
    with pytest.raises(ValueError, match="row 3: 1 tokens after 32 exceed max_cache_len=32"):
        pool.step(range(8))
    assert (pool.batch.layers[0].positions.lengths.tolist(), pool.free_pages) == (lengths, free)
    assert [pool.length(row) for row in range(8)] == lengths
    pool.step([row for row in range(8) if row != 3])


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-plain", "k8v4", "fp8"])
def test_nan_in_one_head_s_k_stays_in_that_head(model, recipe):
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 4, 1, 64)
    bad = k.clone()
    bad[0, 1, 10] = float("nan")
    outputs = []
    for x in (k, bad):
        cache = NVFP4Cache(model.config, 128, recipe)
        cache.update(x, v, 0)
        handles = cache.update(q[:, :2], q[:, :2], 0)
        outputs.append(torch.nn.functional.scaled_dot_product_attention(q, *handles, enable_gqa=True))
        cache.reset()
        handles = cache.update(k, v, 0)
        outputs.append(handles[0].update.keys())
    assert torch.equal(outputs[0][:, :2], outputs[2][:, :2])
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("kind", ["growing", "static", "module", "pool"])
def test_a_first_update_of_no_tokens_chooses_no_scale(model, kind):
    torch.manual_seed(0)
    x = 50 * torch.randn(1, 2, 40, 64)

    def fresh():
        if kind == "module":
            cache = NVFP4KVCache(1, 64, 2, 64, torch.float32)
            return cache.storage, lambda x: cache(None, x, -x)
        if kind == "pool":
            pool = PagedNVFP4Cache(model.config, 8, max_rows=1, max_cache_len=64, page_size=16, dtype=torch.float32)
            row = pool.row(pool.admit())
            return pool.layers[0], lambda x: [row.update(x, -x, layer) for layer in range(2)]
        cache = NVFP4Cache(model.config, 64 if kind == "static" else None)
        return cache.layers[0].storage, lambda x: [cache.update(x, -x, layer) for layer in range(2)]

    (mine, update), (other, update_other) = fresh(), fresh()
    update(x[:, :, :0])
    update(x)
    update_other(x)
    for (name, got), (_, want) in zip(mine.tensors(), other.tensors()):
        assert torch.equal(got[:, :, :40] if got.ndim == 4 else got, want[:, :, :40] if want.ndim == 4 else want), name


def test_a_module_cache_whose_call_ended_halfway(monkeypatch):
    cache = NVFP4KVCache(1, 64, 2, 64, torch.float32)
    x = torch.randn(1, 2, 20, 64)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(storage, "append", lambda *args, **kwargs: {}["interrupted"])
        cache(None, x, -x)
    with pytest.raises(RuntimeError, match=SAYS_SO):
        cache(None, x, -x)
    cache.reset()
    other = NVFP4KVCache(1, 64, 2, 64, torch.float32)
    got, want = cache(None, x, -x), other(None, x, -x)
    assert torch.equal(got[0].update.keys(), want[0].update.keys())


def test_two_generations_at_once(model):
    """Two threads, two caches, one model."""
    model.set_attn_implementation("fp4kv")
    ids = [prompt(2, 30, seed=7), prompt(1, 50, seed=8)]

    def generate(i):
        return model.generate(ids[i], past_key_values=NVFP4Cache(model.config, 128 if i else None), **greedy(12))

    want, got = [generate(0), generate(1)], [[], []]
    threads = [threading.Thread(target=lambda i=i: got[i].extend(generate(i) for _ in range(3))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs, expected in zip(got, want):
        assert len(outputs) == 3
        assert all(torch.equal(output, expected) for output in outputs)
