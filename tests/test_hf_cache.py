"""Operations on a whole cache, each named after the fault that other caches had."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import greedy, llama, prompt

from torch_fp4kv import NVFP4Cache, NVFP4KVCache, PagedNVFP4Cache, Recipe, get_recipe, recipes, register_recipe
from torch_fp4kv.cache.positions import Positions

RECIPES = pytest.mark.parametrize("recipe", ["bf16", "nvfp4-plain", "nvfp4", "k8v4"])
CAPACITIES = pytest.mark.parametrize("capacity", [None, 64], ids=["growing", "static"])


@pytest.fixture(scope="module")
def model():
    return llama()


def prefilled(model, ids, capacity, recipe):
    cache = NVFP4Cache(model.config, capacity, recipe)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def steps(model, cache, ids):
    """Logits of three tokens fed one by one."""
    with torch.no_grad():
        return torch.stack([model(ids[:, i : i + 1], past_key_values=cache).logits[:, 0] for i in range(3)])


def close(got, want):
    """Equal but for float32 sums that another batch size orders differently."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def state(cache):
    return {f"{i}.{name}": t.clone() for i, layer in enumerate(cache.layers) for name, t in layer.storage.tensors()}


@RECIPES
@CAPACITIES
def test_crop_select_and_repeat_act_on_everything_stored(model, recipe, capacity):
    """Rows that were moved about decode as rows that never were."""
    ids, more = prompt(batch=2, tokens=22), prompt(batch=2, tokens=3, seed=5)
    cache = prefilled(model, ids, capacity, recipe)
    steps(model, cache, prompt(batch=2, tokens=3, seed=6))
    cache.crop(-3)
    want = steps(model, prefilled(model, ids, capacity, recipe), more)
    close(steps(model, cache, more), want)

    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    close(steps(model, cache, more.repeat_interleave(2, 0)), want.repeat_interleave(2, 1))

    cache.crop(-3)
    cache.batch_select_indices(torch.tensor([3, 0]))
    close(steps(model, cache, more.flip(0)), want.flip(1))

    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 0]))
    close(steps(model, cache, more), want)


@RECIPES
def test_crop_within_the_slack_keeps_the_exact_window(model, recipe):
    """Sixteen tokens dropped after a context longer than the ring: the window is what it was."""
    ids, more = prompt(batch=1, tokens=140), prompt(batch=1, tokens=3, seed=5)
    want = steps(model, prefilled(model, ids, 256, recipe), more)
    cache = prefilled(model, ids, 256, recipe)
    extra = prompt(batch=1, tokens=16, seed=6)
    with torch.no_grad():
        model(extra, past_key_values=cache)
    cache.crop(-16)
    torch.testing.assert_close(steps(model, cache, more), want, rtol=2e-2, atol=2e-2)


def test_crop_of_a_positive_number_is_refused(model):
    cache = prefilled(model, prompt(), 64, "nvfp4")
    with pytest.raises(ValueError, match="minus the number of tokens"):
        cache.crop(5)


@CAPACITIES
def test_crop_takes_integers_of_any_kind_and_nothing_else(model, capacity):
    cache = prefilled(model, prompt(), capacity, "nvfp4")
    with pytest.raises(TypeError, match="interpreted as an integer"):
        cache.crop(-1.5)
    cache.crop(torch.tensor(-3))
    other = prefilled(model, prompt(), capacity, "nvfp4")
    other.crop(-3)
    assert torch.equal(steps(model, cache, prompt(tokens=3)), steps(model, other, prompt(tokens=3)))
    assert type(cache.all_positions()[0].host_length) is int


@RECIPES
def test_reordered_rows_need_no_new_buffers(model, recipe):
    cache = prefilled(model, prompt(batch=3, tokens=22), 64, recipe)
    addresses = {name: t.data_ptr() for name, t in cache.layers[0].storage.tensors()}
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert {name: t.data_ptr() for name, t in cache.layers[0].storage.tensors()} == addresses


@RECIPES
def test_deepcopy_shares_nothing(model, recipe):
    ids, more = prompt(tokens=22), prompt(tokens=3, seed=5)
    cache = prefilled(model, ids, 64, recipe)
    twin = copy.deepcopy(cache)
    before = state(twin)
    want = steps(model, cache, more)
    assert all(torch.equal(t, before[name]) for name, t in state(twin).items())
    torch.testing.assert_close(steps(model, twin, more), want, rtol=0, atol=0)


@RECIPES
def test_offload_moves_everything_and_prefetch_brings_it_back(model, recipe):
    cache = prefilled(model, prompt(tokens=22), 64, recipe)
    before = state(cache)
    for layer in cache.layers:
        layer.offload()
        assert all(t.device.type == "cpu" for _, t in layer.storage.tensors())
        layer.prefetch()
    assert all(torch.equal(t, before[name]) for name, t in state(cache).items())


def test_early_initialization_allocates_everything(model):
    cache = NVFP4Cache(model.config, 64)
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
    addresses = {name: t.data_ptr() for name, t in cache.layers[1].storage.tensors()}
    assert cache.is_initialized
    assert cache.is_empty
    out = model.generate(prompt(), past_key_values=cache, **greedy(10))
    assert {name: t.data_ptr() for name, t in cache.layers[1].storage.tensors()} == addresses
    assert torch.equal(out, model.generate(prompt(), past_key_values=NVFP4Cache(model.config, 64), **greedy(10)))


def test_one_config_serves_two_caches_of_two_models(model):
    """A cache made from a config changes neither the config nor a later cache."""
    before = model.config.to_dict()
    NVFP4Cache(model.config, 64)
    other = llama(num_hidden_layers=3)
    assert len(NVFP4Cache(other.config, 64)) == 3
    assert len(NVFP4Cache(model.config, 64)) == 2
    assert model.config.to_dict() == before


def test_the_first_real_tokens_of_a_padded_row_are_its_sinks(model):
    cache = NVFP4Cache(model.config, 64)
    mask = torch.ones(2, 22, dtype=torch.long)
    mask[0, :7] = 0
    cache.set_padding(mask)
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 22, 64), torch.randn(2, 2, 22, 64)
    cache.update(k, v, 0)
    exact = cache.layers[0].storage.k_exact
    assert torch.equal(exact[0, :, :4], k[0, :, 7:11])
    assert torch.equal(exact[1, :, :4], k[1, :, :4])


def test_padding_is_left_out_of_bias_and_scales(model):
    mask = torch.ones(2, 22, dtype=torch.long)
    mask[0, :7] = 0
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 22, 64), torch.randn(2, 2, 22, 64)
    caches = [NVFP4Cache(model.config, 64) for _ in range(2)]
    for cache, noise in zip(caches, (0.0, 1e4)):
        cache.set_padding(mask)
        k[0, :, :7] = noise
        cache.update(k, v, 0)
    first, second = (cache.layers[0].storage for cache in caches)
    assert torch.equal(first.k_global, second.k_global)
    torch.testing.assert_close(first.k_bias, second.k_bias)


@pytest.mark.parametrize("row", [[1, 1, 0, 1], [1, 1, 1, 0]], ids=["hole", "right"])
def test_padding_elsewhere_than_on_the_left_is_refused(model, row):
    with pytest.raises(ValueError, match="padding on the left only"):
        NVFP4Cache(model.config, 64).set_padding(torch.tensor([row]))


def test_padding_after_the_first_token_is_refused(model):
    cache = prefilled(model, prompt(), 64, "nvfp4")
    with pytest.raises(ValueError, match="before the first tokens"):
        cache.set_padding(torch.ones(2, 30))


def test_later_tokens_hundreds_of_times_larger_keep_their_precision_or_are_reported(model):
    """A scale frozen from a quiet prompt must not clip a loud token in silence."""
    torch.manual_seed(0)
    cache = NVFP4Cache(model.config, 64, "nvfp4-plain")
    quiet, loud = torch.randn(1, 2, 20, 64), 5 * torch.randn(1, 2, 1, 64)
    cache.update(quiet, quiet, 0)
    _, value = cache.update(loud, loud, 0)
    cache.check()
    stored = value.update.values()[:, :, 20:21]
    assert (stored - loud).norm() / loud.norm() < 0.12
    cache.update(1000 * loud, 1000 * loud, 0)
    with pytest.warns(UserWarning, match="blocks of K or V exceeded the range of their scale"):
        cache.check()


def test_check_reports_a_row_that_outgrew_the_capacity(model):
    cache = prefilled(model, prompt(), 32, "nvfp4")
    positions = cache.layers[0].positions
    positions.advance(2)
    cache.check()
    positions.advance(1)
    positions.crop(1)
    with pytest.raises(RuntimeError, match=r"outgrew|overflowed"):
        cache.check()
    cache.reset()
    cache.check()


def test_a_mask_over_what_is_stored_is_needed_where_it_hides_more_than_padding(model):
    """And where it is not, the look at it has told of an overflow too."""
    padding = torch.ones(2, 30, dtype=torch.long)
    padding[1, :3] = 0
    for first in (torch.ones(2, 30, dtype=torch.long), padding):
        cache = NVFP4Cache(model.config, 32)
        cache.set_padding(first)
        with torch.no_grad():
            model(prompt(), past_key_values=cache)
        known = torch.cat([first, torch.ones(2, 1, dtype=torch.long)], 1)
        assert cache.needs_no_mask(known, 1)
        assert cache.needs_no_mask(known.bool(), 1)
        assert not cache.needs_no_mask(known[:, :-1], 1)
        for row, column in ((0, 0), (0, 12), (1, 30)):
            hides = known.clone()
            hides[row, column] = 0
            assert not cache.needs_no_mask(hides, 1)
        if first is padding:
            shows = known.clone()
            shows[1, 2] = 1
            assert not cache.needs_no_mask(shows, 1)
        wide = torch.ones(2, 40, dtype=torch.long)
        with pytest.raises(ValueError, match="3 tokens after 30 stored exceed max_cache_len=32; nothing was written"):
            cache.needs_no_mask(wide, 3)
        # As on a GPU, where compiled code may have gone on.
        cache.layers[0].positions.advance(3)
        with pytest.raises(RuntimeError, match="overflowed"):
            cache.needs_no_mask(wide, 1)


def test_the_device_is_asked_once_a_token(model, monkeypatch):
    """Whether a mask is needed, or else whether a row overflowed."""
    polls, mask = [], torch.ones(2, 31, dtype=torch.long)
    cache = prefilled(model, prompt(), 64, "nvfp4")
    monkeypatch.setattr(Positions, "poll", lambda self: polls.append(self))
    for _ in range(5):
        cache.get_mask_sizes(1, 0)
        assert cache.needs_no_mask(mask, 1)
    assert len(polls) == 1
    for _ in range(5):
        cache.get_mask_sizes(1, 0)
    assert len(polls) == 5


def test_another_batch_on_a_cache_in_use_is_refused(model):
    cache = prefilled(model, prompt(batch=2), 64, "nvfp4")
    with torch.no_grad(), pytest.raises(ValueError, match="holds 2 rows, got 3"):
        model(prompt(batch=3, tokens=1), past_key_values=cache)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 1], IndexError, r"rows must lie in \[0, 1\), got \[0, 1\]; nothing was changed"),
        ([-1], IndexError, r"got \[-1\]"),
        ([0.0], TypeError, "vector of integers"),
        ([True, False], TypeError, "a bool for each of 1 rows"),
        ([[0]], TypeError, "vector of integers"),
    ],
    ids=str,
)
@pytest.mark.parametrize("operation", ["batch_select_indices", "reorder_cache"])
def test_rows_that_are_not_there_are_refused_and_nothing_changes(model, operation, rows, error, message):
    """Buffers have a second row still, of an earlier prompt."""
    cache, more = prefilled(model, prompt(), 64, "nvfp4"), prompt(batch=1, tokens=3, seed=5)
    cache.reset()
    with torch.no_grad():
        model(prompt(batch=1), past_key_values=cache)
    with pytest.raises(error, match=message):
        getattr(cache, operation)(torch.tensor(rows))
    with pytest.raises(ValueError, match="repeats must be positive, got 0"):
        cache.batch_repeat_interleave(0)
    cache.batch_select_indices([0])
    want = steps(model, prefilled(model, prompt(batch=1), 64, "nvfp4"), more)
    assert torch.equal(steps(model, cache, more), want)


@pytest.mark.parametrize(("heads", "size"), [(3, 64), (2, 32)])
def test_other_heads_or_sizes_are_refused_before_anything_is_written(model, heads, size):
    cache = prefilled(model, prompt(), 64, "nvfp4")
    before, length = state(cache), int(cache.get_seq_length())
    with pytest.raises(ValueError, match="holds 2 KV heads of size 64"):
        cache.update(torch.zeros(2, heads, 1, size), torch.zeros(2, heads, 1, size), 0)
    assert int(cache.get_seq_length()) == length
    assert all(torch.equal(t, before[name]) for name, t in state(cache).items())


def test_a_head_size_that_is_no_multiple_of_16_is_named(model):
    cache = NVFP4Cache(model.config, 64)
    with pytest.raises(ValueError, match="head size 72"):
        cache.update(torch.zeros(1, 2, 3, 72), torch.zeros(1, 2, 3, 72), 0)


def test_nan_in_one_head_stays_there(model):
    torch.manual_seed(0)
    k, v = torch.randn(1, 2, 20, 64), torch.randn(1, 2, 20, 64)
    bad = k.clone()
    bad[0, 1, 3] = float("nan")
    clean, dirty = (NVFP4Cache(model.config, 64, "nvfp4-plain") for _ in range(2))
    clean.update(k, v, 0)
    dirty.update(bad, v, 0)
    for (name, a), (_, b) in zip(clean.layers[0].storage.tensors(), dirty.layers[0].storage.tensors()):
        assert torch.equal(a[0, 0] if a.ndim == 4 else a[0], b[0, 0] if b.ndim == 4 else b[0]), name


def test_bytes_are_those_of_the_format(model):
    """Plain NVFP4 is 72 of BF16's 256 bytes at D = 128; at D = 64 the same ratio."""
    cache = NVFP4Cache(model.config, 4096, "nvfp4-plain")
    cache.update(torch.zeros(1, 2, 20, 64), torch.zeros(1, 2, 20, 64), 0)
    storage = cache.layers[0].storage
    bf16 = 2 * 2 * 4096 * 64 * 2
    constants = 2 * 2 * 4
    assert storage.nbytes() - constants == bf16 * 72 / 256


def test_recipes_by_name_and_field(model, monkeypatch):
    assert NVFP4Cache(model.config, 64, recipe="nvfp4", exact_window=128).layers[0].storage.recipe.exact_window == 128
    with pytest.raises(ValueError, match=r"unknown recipe 'nvfp5'; known: nvfp4, "):
        NVFP4Cache(model.config, 64, recipe="nvfp5")
    with pytest.raises(ValueError, match="storage dtype, not a recipe"):
        NVFP4Cache(model.config, 64, recipe="fp4")
    with pytest.raises(TypeError, match="no field 'windw'"):
        NVFP4Cache(model.config, 64, windw=3)
    monkeypatch.setattr("torch_fp4kv.recipe._RECIPES", recipes())
    name = "test-only"
    register_recipe(name, Recipe(exact_window=8))
    assert get_recipe(name).exact_window == 8
    with pytest.raises(ValueError, match="exists already"):
        register_recipe(name, Recipe())


def test_max_cache_len_must_be_positive(model):
    with pytest.raises(ValueError, match="max_cache_len must be positive, got 0"):
        NVFP4Cache(model.config, 0)


def test_max_cache_len_and_config_of_another_type_are_named(model):
    with pytest.raises(TypeError, match=r"max_cache_len must be an int, got 64\.0"):
        NVFP4Cache(model.config, 64.0)
    with pytest.raises(TypeError, match="must be a model's config"):
        NVFP4Cache(model)


@CAPACITIES
def test_a_call_that_ended_halfway_is_noticed(model, monkeypatch, capacity):
    """The first layer has the token, the second has not: going on would read a slot that was never written."""
    cache = prefilled(model, prompt(), capacity, "nvfp4")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(model.model.layers[0].mlp, "forward", lambda x: {}["interrupted"])
        steps(model, cache, prompt(tokens=3))
    with pytest.raises(RuntimeError, match=r"ended halfway \(reset\(\) the cache\)"):
        steps(model, cache, prompt(tokens=3))
    cache.reset()
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    want = steps(model, prefilled(model, prompt(), capacity, "nvfp4"), prompt(tokens=3))
    close(steps(model, cache, prompt(tokens=3)), want)


def test_a_wider_dtype_after_reset_gets_buffers_of_its_own(model):
    cache = prefilled(llama().to(torch.bfloat16), prompt(), 64, "bf16")
    cache.reset()
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    assert cache.layers[1].storage.k_data.dtype == torch.float32
    close(steps(model, cache, prompt(tokens=3)), steps(model, prefilled(model, prompt(), 64, "bf16"), prompt(tokens=3)))


def test_padding_of_other_rows_is_refused(model):
    cache = NVFP4Cache(model.config, 64)
    with pytest.raises(ValueError, match=r"mask \[B, n\], got shape \[30\]"):
        cache.set_padding(torch.ones(30))
    cache.set_padding(torch.ones(3, 30))
    with pytest.raises(ValueError, match="given 3 rows, the first tokens have 2"), torch.no_grad():
        model(prompt(), past_key_values=cache)
    assert cache.is_empty


def test_padding_said_twice_is_the_second(model):
    cache = prefilled(model, prompt(), 64, "nvfp4")
    cache.reset()
    mask = torch.ones(2, 30)
    mask[0, :5] = 0
    cache.set_padding(mask)
    cache.set_padding(torch.ones(2, 30))
    assert cache.layers[0].positions.starts.tolist() == [0, 0]
    assert not cache.layers[0].positions.padded


def test_a_cache_describes_itself(model):
    cache = NVFP4Cache(model.config, 64, layers={1: "bf16"})
    kept = "K nvfp4, V nvfp4, first 4 and last 88 exact | K exact, V exact"
    assert repr(cache) == f"NVFP4Cache(2 layers, {kept}; max_cache_len=64, empty, 0.00 MiB)"
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    assert repr(cache) == f"NVFP4Cache(2 layers, {kept}; max_cache_len=64, 2 rows of 30 tokens, {mebibytes(cache)} MiB)"
    assert repr(NVFP4Cache(model.config, recipe="fp8")).startswith("NVFP4Cache(2 layers, K fp8, V fp8; growing, empty")
    pool = PagedNVFP4Cache(model.config, 8, max_rows=3, max_cache_len=64, page_size=16, recipe="k8v4", exact_window=0)
    pool.admit()
    kept = "K fp8, V nvfp4, first 4 and last 0 exact"
    pages = f"8 pages of 16 tokens, 8 free, 1 of 3 rows in use, {mebibytes(pool)} MiB"
    assert repr(pool) == f"PagedNVFP4Cache(2 layers, {kept}; {pages})"
    module = NVFP4KVCache(2, 64, 2, 64, recipe="fp8")
    assert repr(module) == f"NVFP4KVCache(K fp8, V fp8; 0 of 64 tokens, 2 rows, {mebibytes(module)} MiB)"


def mebibytes(cache):
    return f"{cache.nbytes() / 2**20:.2f}"


@CAPACITIES
def test_layers_may_differ_in_heads_and_sizes_and_k_from_v(capacity):
    config = llama().config
    cache = NVFP4Cache(config, capacity, "nvfp4-plain")
    torch.manual_seed(0)
    shapes = ((2, 64, 64), (1, 128, 32))
    given = [[torch.randn(2, heads, 25, d) for d in sizes] for heads, *sizes in shapes]
    for start, stop in ((0, 20), (20, 24), (24, 25)):
        handles = [cache.update(k[:, :, start:stop], v[:, :, start:stop], i) for i, (k, v) in enumerate(given)]
    for (key, value), (k, v) in zip(handles, given):
        for got, want in ((key.update.keys(), k), (value.update.values(), v)):
            assert (got[:, :, :25] - want).norm() / want.norm() < 0.12
        q = torch.randn(2, 4, 1, k.shape[3])
        out = torch.nn.functional.scaled_dot_product_attention(q, key, value, enable_gqa=True)
        keys, values = key.update.keys()[:, :, :25], value.update.values()[:, :, :25]
        want = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@RECIPES
def test_a_pickled_cache_has_all_of_its_state(model, recipe):
    cache, more = prefilled(model, prompt(), 64, recipe), prompt(tokens=3, seed=5)
    twin = pickle.loads(pickle.dumps(cache))
    assert torch.equal(steps(model, twin, more), steps(model, cache, more))


def test_rows_hold_whole_tiles_and_no_token_more_than_asked_for() -> None:
    """The decode kernel takes rows of a multiple of 16 tokens alone, and no other path where 128 divide them."""
    cache = NVFP4Cache(llama().config, 1000)
    k, v = torch.randn(2, 1, 2, 1000, 64)
    for index in range(2):
        cache.update(k, v, index)
    assert cache.layers[0].storage.k_data.shape[2] == 1024
    with pytest.raises(ValueError, match="max_cache_len=1000"):
        cache.update(k[:, :, :1], v[:, :, :1], 0)
