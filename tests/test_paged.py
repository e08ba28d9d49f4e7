"""Continuous batching over a pool of pages: each sequence gives what it gives alone."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import greedy, llama, prompt

from torch_fp4kv import LayerCalibration, NVFP4Cache, PagedNVFP4Cache


@pytest.fixture(scope="module")
def model():
    model = llama()
    NVFP4Cache(model.config, 8)
    return model


def pool_for(model, num_pages=24, recipe="bf16", **options):
    settings = {"max_rows": 3, "max_cache_len": 128, "page_size": 16, "dtype": torch.float32, **options}
    return PagedNVFP4Cache(model.config, num_pages, recipe=recipe, **settings)


def alone(model, ids, tokens, recipe="bf16"):
    model.set_attn_implementation("sdpa")
    return model.generate(ids, past_key_values=NVFP4Cache(model.config, 128, recipe), **greedy(tokens))[0].tolist()


def prefill(model, pool, ids):
    row = pool.admit()
    with torch.no_grad():
        logits = model(ids, past_key_values=pool.row(row)).logits
    return row, int(logits[0, -1].argmax())


def decode(model, pool, last, step=None):
    """One greedy token for each row of `last`, in place."""
    ids = pool.step(list(last))
    tokens = torch.zeros(pool.max_rows, 1, dtype=torch.long)
    for row, token in last.items():
        tokens[row] = token
    with torch.no_grad():
        logits = (model if step is None else step)(tokens, position_ids=ids, past_key_values=pool.batch).logits
    for row in last:
        last[row] = int(logits[row, -1].argmax())


@pytest.mark.parametrize("implementation", ["sdpa", "fp4kv"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "nvfp4-plain"])
def test_sequences_come_and_go(model, implementation, recipe):
    """Prompts of different length join and leave; pages that were used before are used again."""
    prompts = [prompt(batch=1, tokens=n, seed=n) for n in (21, 40, 33, 18)]
    want = [alone(model, ids, 24, recipe) for ids in prompts]
    model.set_attn_implementation(implementation)
    pool = pool_for(model, num_pages=14, recipe=recipe)
    got: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    last: dict[int, int] = {}
    waiting = list(range(4))
    while waiting or rows:
        while waiting and len(rows) < 3 and pool.free_pages > 7:
            sequence = waiting.pop(0)
            row, token = prefill(model, pool, prompts[sequence])
            rows[row], last[row] = sequence, token
            got[sequence] = [*prompts[sequence][0].tolist(), token]
        decode(model, pool, last)
        for row, sequence in list(rows.items()):
            got[sequence].append(last[row])
            if len(got[sequence]) == len(want[sequence]):
                pool.free(row)
                del rows[row], last[row]
    assert pool.free_pages == 14
    agreement = [sum(a == b for a, b in zip(got[i], want[i])) / len(want[i]) for i in range(4)]
    # Quantised, the pool keeps the first sequence's scales; the first sequence itself is as alone.
    assert agreement[0] == 1
    assert min(agreement) == 1 if recipe == "bf16" else min(agreement) > 0.6


def test_a_fork_shares_pages_until_it_writes(model):
    model.set_attn_implementation("sdpa")
    ids = prompt(batch=1, tokens=40)
    want = alone(model, ids, 30, "nvfp4")[40:]
    pool = pool_for(model, recipe="nvfp4")
    row, token = prefill(model, pool, ids)
    used = 24 - pool.free_pages
    fork = pool.fork(row)
    assert 24 - pool.free_pages == used
    last, tokens = {row: token, fork: token}, []
    for i in range(29):
        decode(model, pool, last)
        tokens.append((last[row], last[fork]))
        if i == 0:
            assert 24 - pool.free_pages == used + 1
    assert [a for a, _ in tokens] == [b for _, b in tokens] == want[1:]
    pool.free(row)
    decode(model, pool, {fork: last[fork]})
    pool.free(fork)
    assert pool.free_pages == 24


def test_pages_are_read_only_after_they_were_written(model):
    model.set_attn_implementation("sdpa")
    ids = prompt(batch=1, tokens=40)
    want = alone(model, ids, 10)
    pool = pool_for(model)
    for layer in pool.layers:
        layer.k_data.fill_(float("nan"))
        layer.v_data.fill_(float("nan"))
    row, token = prefill(model, pool, ids)
    last, got = {row: token}, [token]
    for _ in range(9):
        decode(model, pool, last)
        got.append(last[row])
    assert got == want[40:]


def test_rows_that_take_no_part_are_left_alone(model):
    model.set_attn_implementation("sdpa")
    pool = pool_for(model, recipe="nvfp4")
    first, token = prefill(model, pool, prompt(batch=1, tokens=40))
    second, _ = prefill(model, pool, prompt(batch=1, tokens=22))
    pages = pool._pages.held[second]
    before = [pool.layers[0].k_data[pages].clone(), pool.layers[0].k_exact[second].clone()]
    for _ in range(3):
        decode(model, pool, {first: token})
    assert pool.length(second) == 22
    assert torch.equal(pool.layers[0].k_data[pages], before[0])
    assert torch.equal(pool.layers[0].k_exact[second, :, :-1], before[1][:, :-1])


def test_an_exhausted_pool_says_so_and_changes_nothing(model):
    model.set_attn_implementation("sdpa")
    pool = pool_for(model, num_pages=3)
    row, _ = prefill(model, pool, prompt(batch=1, tokens=48))
    with pytest.raises(RuntimeError, match="1 pages are needed and 0 are free"):
        pool.step([row])
    assert pool.length(row) == 48
    other = pool.admit()
    with pytest.raises(RuntimeError, match="are free"), torch.no_grad():
        model(prompt(batch=1, tokens=5), past_key_values=pool.row(other))
    with pytest.raises(ValueError, match="row 2 is not in use"):
        pool.step([2])
    pool.admit()
    with pytest.raises(RuntimeError, match="all 3 rows are in use"):
        pool.admit()


def test_a_sequence_longer_than_its_limit_is_refused(model):
    pool = pool_for(model, max_cache_len=32)
    with pytest.raises(ValueError, match="40 tokens after 0 exceed max_cache_len=32"), torch.no_grad():
        model(prompt(batch=1, tokens=40), past_key_values=pool.row(pool.admit()))


@pytest.mark.parametrize("page_size", [8, 48])
def test_page_sizes_are_powers_of_two(model, page_size):
    with pytest.raises(ValueError, match="power of two"):
        pool_for(model, page_size=page_size)


@pytest.mark.slow
def test_a_decode_step_is_compiled_once(model):
    from torch._dynamo.utils import counters

    model.set_attn_implementation("fp4kv")
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for step in (None, compiled):
        pool = pool_for(model, recipe="nvfp4")
        row, token = prefill(model, pool, prompt(batch=1, tokens=40))
        last, tokens = {row: token}, []
        for i in range(12):
            if i == 4:
                other, token = prefill(model, pool, prompt(batch=1, tokens=22))
                last[other] = token
            decode(model, pool, last, step)
            tokens.append(dict(last))
        results.append(tokens)
    assert results[0] == results[1]
    assert counters["stats"]["unique_graphs"] == 1


def test_one_view_of_a_row_serves_many_calls(model):
    """Each layer writes at the new token's slot, not at that of an earlier call."""
    model.set_attn_implementation("sdpa")
    ids = prompt(batch=1, tokens=20)
    pool = pool_for(model)
    got = model.generate(ids, past_key_values=pool.row(pool.admit()), **greedy(20))
    assert got[0].tolist() == alone(model, ids, 20)


def test_a_prefill_between_step_and_batch_leaves_that_row_out(model):
    model.set_attn_implementation("sdpa")
    pool = pool_for(model)
    first, token = prefill(model, pool, prompt(batch=1, tokens=20))
    ids = pool.step([first])
    second, _ = prefill(model, pool, prompt(batch=1, tokens=22))
    with torch.no_grad():
        model(torch.full((3, 1), token), position_ids=ids, past_key_values=pool.batch)
    assert [pool.length(first), pool.length(second)] == [21, 22]
    assert pool.batch.layers[0].positions.lengths.tolist() == [21, 22, 0]


def test_steps_that_cannot_be_are_refused_and_change_nothing(model):
    model.set_attn_implementation("sdpa")
    pool = pool_for(model)
    row, token = prefill(model, pool, prompt(batch=1, tokens=20))
    new = pool.admit()
    batch = {"position_ids": torch.full((3, 1), 20), "past_key_values": pool.batch}
    with pytest.raises(ValueError, match=f"row {row} is named twice"):
        pool.step([row, row])
    with pytest.raises(ValueError, match=f"row {new} has no prompt yet"):
        pool.step([row, new])
    with pytest.raises(RuntimeError, match=r"after each pool\.step"), torch.no_grad():
        model(torch.full((3, 1), token), **batch)
    pool.step([row])
    pool.step([row])
    assert pool.length(row) == 21
    with torch.no_grad():
        model(torch.full((3, 1), token), **batch)
    with pytest.raises(RuntimeError, match=r"after each pool\.step"), torch.no_grad():
        model(torch.full((3, 1), token), **batch)
    assert pool.batch.layers[0].positions.lengths.tolist() == [21, 0, 0]


def test_a_row_that_waits_for_its_step_is_not_forked_or_prefilled(model):
    """A fork would write its own next token over the row's, in the page that they share."""
    model.set_attn_implementation("sdpa")
    pool, expected = pool_for(model), pool_for(model)
    for one in (pool, expected):
        prefill(model, one, prompt(batch=1, tokens=20))
    position_ids = pool.step([0])
    assert torch.equal(position_ids, expected.step([0]))
    for early in (lambda: pool.fork(0), lambda: model(prompt(batch=1, tokens=3), past_key_values=pool.row(0))):
        with pytest.raises(RuntimeError, match="step made room for a token of row 0"), torch.no_grad():
            early()
    batch = {"input_ids": torch.full((3, 1), 5), "position_ids": position_ids}
    with torch.no_grad():
        logits = [model(**batch, past_key_values=one.batch).logits[0] for one in (pool, expected)]
    assert torch.equal(*logits)
    assert pool.length(pool.fork(0)) == 21


def test_a_page_that_an_abandoned_step_took_is_not_shared(model):
    """The row's next token would lie where the fork's does."""
    model.set_attn_implementation("sdpa")
    pool = pool_for(model)
    row, token = prefill(model, pool, prompt(batch=1, tokens=32))
    pool.step([row])
    pool.step([])
    fork = pool.fork(row)
    last = {row: token, fork: (token + 1) % 64}
    decode(model, pool, last)
    decode(model, pool, last)
    assert last[row] == alone(model, prompt(batch=1, tokens=32), 3)[-1]
    assert not set(pool._pages.held[row][2:]) & set(pool._pages.held[fork][2:])


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("reset", ()),
        ("crop", (-1,)),
        ("reorder_cache", (torch.tensor([0]),)),
        ("batch_select_indices", (torch.tensor([0]),)),
        ("batch_repeat_interleave", (2,)),
        ("offload", (0,)),
    ],
)
def test_what_a_pool_does_not_do_is_named(model, operation, arguments):
    pool = pool_for(model)
    for cache in (pool.batch, pool.row(pool.admit())):
        with pytest.raises(TypeError, match="come by admit and fork, go by free"):
            getattr(cache, operation)(*arguments)


def test_rows_of_another_number_are_refused_before_anything_is_taken(model):
    model.set_attn_implementation("sdpa")
    pool = pool_for(model)
    row = pool.admit()
    with pytest.raises(ValueError, match="holds 1 rows, got 2"), torch.no_grad():
        model(prompt(batch=2), past_key_values=pool.row(row))
    assert (pool.length(row), pool.free_pages) == (0, 24)


def test_a_prefill_that_ended_halfway_is_noticed(model, monkeypatch):
    model.set_attn_implementation("sdpa")
    pool = pool_for(model)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(model.model.layers[0].mlp, "forward", lambda x: {}["interrupted"])
        prefill(model, pool, prompt(batch=1))
    for again in (lambda: model(prompt(batch=1), past_key_values=pool.row(0)), lambda: pool.step([0])):
        with pytest.raises(RuntimeError, match="with row 0 ended halfway"), torch.no_grad():
            again()
    pool.free(0)
    assert prefill(model, pool, prompt(batch=1))[0] == 0


def test_layers_of_a_pool_may_differ_in_heads_and_size():
    config = llama().config
    config.per_layer_config = {1: {"num_key_value_heads": 1, "head_dim": 32}}
    pool = PagedNVFP4Cache(config, 4, max_rows=1, max_cache_len=64, page_size=16)
    assert [tuple(layer.k_data.shape) for layer in pool.layers] == [(4, 2, 16, 4), (4, 1, 16, 2)]


def test_a_pool_refuses_sliding_layers_that_only_the_window_tells():
    config = llama().config
    config.sliding_window = 24
    with pytest.raises(ValueError, match="layers with full attention"):
        PagedNVFP4Cache(config, 4, max_rows=1, max_cache_len=64)


@pytest.mark.parametrize("name", ["num_pages", "max_rows", "max_cache_len"])
def test_a_pool_of_nothing_is_refused(model, name):
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        pool_for(model, **{name: 0})


def test_a_pool_with_v_s_scales_in_the_order_of_sm100_gives_the_same_tokens(model):
    model.set_attn_implementation("fp4kv")
    sequences = []
    for layout in ("linear", "4token"):
        pool = pool_for(model, recipe="nvfp4-plain", v_scale_layout=layout)
        rows = [prefill(model, pool, prompt(batch=1, tokens=n, seed=n)) for n in (21, 40)]
        last = dict(rows)
        for _ in range(8):
            decode(model, pool, last)
        sequences.append(last)
        scales = [layer.v_scales for layer in pool.layers]
    assert sequences[0] == sequences[1]
    assert all(layer.v_scale_layout == "4token" for layer in pool.layers)
    assert all(scale.any() for scale in scales)


def test_a_given_scale_without_headroom_is_raised_where_block_scales_saturate_early(model):
    """Under amax/2688 no block scale would be left below 448, and readers of this layout need 72 or less."""
    ids = prompt(batch=1, tokens=40, seed=1)
    plain = pool_for(model, recipe="nvfp4-plain", v_scale_layout="4token")
    prefill(model, plain, ids)
    given = [LayerCalibration(k_scale=(1e-4,), v_scale=(1e-4,))] * len(plain.layers)
    pool = pool_for(model, recipe="nvfp4-plain", v_scale_layout="4token", calibration=given)
    prefill(model, pool, ids)
    for layer in pool.layers:
        largest = max(int(layer.k_scales.max()), int(layer.v_scales.max()))
        assert 0x68 <= largest <= 0x69
        assert float(layer.k_global.max()) > 1e-4


def test_a_pool_refuses_the_order_of_sm100_for_a_head_size_without_it(model):
    config = copy.deepcopy(model.config)
    config.head_dim = 32
    with pytest.raises(ValueError, match="the 4-token V scale layout needs"):
        PagedNVFP4Cache(config, 4, max_rows=1, max_cache_len=64, v_scale_layout="4token")


def test_no_mask_is_made_over_all_positions_of_a_pool(model, monkeypatch):
    """Each row is plain causal, and kernels that take no mask can serve it."""
    from torch_fp4kv.cache import storage

    masks, attention = [], storage.attention
    monkeypatch.setattr(storage, "attention", lambda *a, **k: masks.append(k["mask"]) or attention(*a, **k))
    model.set_attn_implementation("fp4kv")
    pool = pool_for(model, recipe="nvfp4")
    rows = [prefill(model, pool, prompt(batch=1, tokens=n, seed=n)) for n in (21, 40)]
    decode(model, pool, dict(rows))
    with torch.no_grad():
        model(prompt(batch=1, tokens=20, seed=3), past_key_values=pool.row(rows[0][0]))
    assert masks == [None] * (2 * len(pool.layers))


def test_a_pool_whose_first_prompt_is_too_short_for_a_bias_says_so(model):
    model.set_attn_implementation("sdpa")
    pool = pool_for(model, recipe="nvfp4")
    with pytest.warns(UserWarning, match="first prompt has 3 tokens, and fewer than 8 give no bias"):
        prefill(model, pool, prompt(batch=1, tokens=3))
    assert not pool.layers[0].rotated
