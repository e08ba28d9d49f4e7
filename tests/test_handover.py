"""A sequence handed over decodes as if it had stayed, and messages that are not all there change nothing."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from hf_models import llama, prompt

from torch_fp4kv import (
    Blocks,
    LayerCalibration,
    NVFP4Cache,
    PagedNVFP4Cache,
    export_blocks,
    get_recipe,
    import_blocks,
)

SINKS_ALONE = pytest.param(get_recipe("nvfp4", exact_window=0), id="sinks alone")


@pytest.fixture(scope="module")
def model():
    return llama()


def prefilled(model, capacity=128, recipe="nvfp4", tokens=120, batch=2, padding=0):
    cache = NVFP4Cache(model.config, capacity, recipe)
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, :padding] = 0
    if padding:
        cache.set_padding(mask)
    with torch.no_grad():
        model(prompt(batch, tokens), attention_mask=mask, past_key_values=cache)
    return cache


def decode(model, cache, batch=2, steps=4, padding=0):
    """Logits of some more tokens."""
    ids, length = prompt(batch, steps, seed=3), int(cache.get_seq_length())
    mask = torch.ones(batch, length + steps, dtype=torch.long)
    mask[0, :padding] = 0
    with torch.no_grad():
        return torch.stack(
            [
                model(ids[:, i : i + 1], attention_mask=mask[:, : length + i + 1], past_key_values=cache).logits
                for i in range(steps)
            ]
        )


def pool_of(model, page_size=16, recipe="nvfp4", **options):
    return PagedNVFP4Cache(
        model.config,
        40,
        max_rows=3,
        max_cache_len=160,
        page_size=page_size,
        dtype=torch.float32,
        recipe=recipe,
        **options,
    )


def prefill_row(model, pool, tokens=120, seed=1):
    row = pool.admit()
    with torch.no_grad():
        model(prompt(1, tokens, seed), past_key_values=pool.row(row))
    return row


def decode_row(model, pool, row, steps=4):
    logits = []
    for i in range(steps):
        ids = pool.step([row])
        tokens = torch.zeros(pool.max_rows, 1, dtype=torch.long)
        tokens[row] = prompt(1, steps, seed=3)[0, i]
        with torch.no_grad():
            logits.append(model(tokens, position_ids=ids, past_key_values=pool.batch).logits[row, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("padding", [0, 5], ids=["", "padded"])
@pytest.mark.parametrize("capacities", [(128, 128), (128, 256), (None, 160), (128, None)], ids=str)
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-plain", "k8v4", "bf16", "block-fp4", SINKS_ALONE])
def test_decoding_goes_on_as_without_the_hand_over(model, recipe, capacities, padding):
    cache = prefilled(model, capacities[0], recipe, padding=padding)
    blocks = export_blocks(cache, "a")
    want = decode(model, cache, padding=padding)
    other = NVFP4Cache(model.config, capacities[1], recipe)
    assert import_blocks(other, blocks) == [0, 1]
    assert torch.equal(decode(model, other, padding=padding), want)


@pytest.mark.parametrize("window", [0, 64])
def test_short_prompts_and_used_buffers(model, window):
    """Too short for a bias, so that K is not rotated; the buffers were last used for one that was."""
    recipe = get_recipe("nvfp4", exact_window=window, num_sink_tokens=0)
    cache = prefilled(model, tokens=5, recipe=recipe)
    blocks = export_blocks(cache, "a")
    other = prefilled(model, tokens=40, recipe=recipe)
    addresses = [t.data_ptr() for _, t in other.layers[1].storage.tensors()]
    other.reset()
    import_blocks(other, blocks)
    assert [t.data_ptr() for _, t in other.layers[1].storage.tensors()] == addresses
    assert torch.equal(decode(model, other), decode(model, cache))


def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    settings = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**settings, num_key_value_heads=2, vocab_size=64, head_dim=32, sliding_window=24)
    return MistralForCausalLM(config).eval()


def test_a_sliding_layer_hands_over_what_its_ring_holds():
    """A window of 24 in a ring of 128."""
    model = mistral()
    cache = prefilled(model, 256, tokens=190)
    cache.crop(-3)
    pieces = (range(100), range(100, 160), range(160, 187))
    parts = [export_blocks(cache, "a", tokens=piece, more=piece.stop < 187) for piece in pieces]
    assert [p.header["layers"][0]["first"] for p in parts] == [62, 100, 160]
    assert [tokens_sent(part) for part in parts] == [[38, 38], [60, 60], [0, 0]]
    other = NVFP4Cache(model.config, 256)
    import_blocks(other, parts)
    assert tokens_sent(export_blocks(cache, "b")) == [37, 37]
    want, got = ({name: x[:, :, -125:] for name, x in stored(either).items()} for either in (cache, other))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert torch.equal(decode(model, other), decode(model, cache))
    for either in (cache, other):
        either.crop(-9)
    assert torch.equal(decode(model, other), decode(model, cache))


@pytest.mark.parametrize("capacity", [None, 100, 400])
def test_what_a_handed_over_sliding_layer_can_drop(capacity):
    model = mistral()
    cache, other = prefilled(model, 256, "nvfp4-plain", tokens=190), NVFP4Cache(model.config, capacity, "nvfp4-plain")
    cache.crop(-94)
    import_blocks(other, export_blocks(cache, "a"))
    for either in (cache, other):
        with pytest.raises(RuntimeError, match="at most 104 can be dropped, got 11; nothing was dropped"):
            either.crop(-11)
        either.crop(-10)
    assert torch.equal(decode(model, other), decode(model, cache))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-plain"])
def test_pools_with_other_page_sizes(model, recipe):
    sender, receiver = pool_of(model, 16, recipe), pool_of(model, 64, recipe)
    rows = [prefill_row(model, sender, tokens, seed=tokens) for tokens in (120, 33)]
    receiver.admit()
    blocks = {row: export_blocks(sender, f"request {row}", [row]) for row in rows}
    taken = {row: import_blocks(receiver, blocks[row])[0] for row in rows}
    assert list(taken.values()) == [1, 2]
    for row in rows:
        assert receiver.length(taken[row]) == sender.length(row)
        torch.testing.assert_close(
            decode_row(model, receiver, taken[row]), decode_row(model, sender, row), rtol=1e-5, atol=1e-5
        )
    with pytest.raises(ValueError, match="'request 0' came before and is in row 1"):
        import_blocks(receiver, blocks[0])
    receiver.free(taken[rows[0]])
    free = receiver.free_pages
    row = import_blocks(receiver, blocks[0])[0]
    receiver.free(row)
    assert receiver.free_pages == free


def test_between_a_pool_and_a_cache(model):
    pool = pool_of(model)
    row = prefill_row(model, pool)
    cache = NVFP4Cache(model.config, 128)
    import_blocks(cache, export_blocks(pool, "a", [row]))
    back = pool_of(model, 32)
    import_blocks(back, export_blocks(cache, "b"))
    want = decode_row(model, pool, row)
    assert torch.equal(decode_row(model, back, 0), want)
    torch.testing.assert_close(decode(model, cache, batch=1)[:, 0, -1], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["nvfp4-plain", "nvfp4"])
def test_v_s_scales_in_the_order_of_sm100(model, recipe):
    """They travel in linear order; block scales of a linear pool may be too large for readers of the other."""
    sender = pool_of(model, 16, recipe, v_scale_layout="4token")
    blocks = export_blocks(sender, "a", [prefill_row(model, sender)])
    want = decode_row(model, sender, 0)
    for layout in ("4token", "linear"):
        receiver = pool_of(model, 32, recipe, v_scale_layout=layout)
        assert import_blocks(receiver, blocks) == [0]
        got, sent = stored(receiver), stored(sender)
        assert all(torch.equal(got[name][:, :, :120], sent[name][:, :, :120]) for name in sent)
        assert torch.equal(decode_row(model, receiver, 0), want)
        again = export_blocks(receiver, "b", [0], range(120), more=True)
        assert torch.equal(again.tensors()["layers.1.v_scales"].float(), blocks.tensors()["layers.1.v_scales"].float())
    linear = export_blocks(prefilled(model, recipe=recipe), "a")
    with pytest.raises(ValueError, match="larger than the 4-token layout"):
        import_blocks(pool_of(model, 32, recipe, v_scale_layout="4token"), linear)


def test_a_pool_takes_no_other_scales(model):
    pool = pool_of(model)
    prefill_row(model, pool)
    before = pool.free_pages
    with pytest.raises(ValueError, match="its k_bias in layer 0 is another"):
        import_blocks(pool, export_blocks(prefilled(model), "a", [1]))
    assert (pool.free_pages, pool.rows) == (before, [0])


def test_a_pool_without_room_changes_nothing(model):
    sender, receiver = pool_of(model), pool_of(model)
    row = prefill_row(model, sender)
    blocks = [export_blocks(sender, f"{i}", [row]) for i in range(4)]
    for one in blocks[:3]:
        import_blocks(receiver, one)
    with pytest.raises(RuntimeError, match="all 3 rows are in use"):
        import_blocks(receiver, blocks[3])
    receiver.free(0)
    receiver._pages._free, kept = receiver._pages._free[:2], receiver._pages._free
    with pytest.raises(RuntimeError, match="8 pages are needed and 2 are free"):
        import_blocks(receiver, blocks[3])
    assert (receiver.rows, len(kept)) == ([1, 2], 24)


def stored(cache, rows=None):
    """All codes and scales of some rows in interchange form, whatever pages they lie in."""
    rows = cache.rows if rows is None else rows
    length = cache.length(rows[0]) if isinstance(cache, PagedNVFP4Cache) else int(cache.get_seq_length())
    return export_blocks(cache, "all", rows, range(length), more=True).tensors()


def tokens_sent(blocks, layer=0):
    """Of how many tokens the K and V of a layer travel as codes."""
    return [blocks.tensors()[f"layers.{layer}.{name}_data"].shape[2] for name in "kv"]


def calibrated(layers=2, dim=64):
    torch.manual_seed(0)
    known = [
        LayerCalibration(
            k_bias=torch.randn(2, dim),
            v_bias=torch.randn(2, dim),
            k_factors=torch.rand(2, dim) + 0.5,
            k_order=torch.stack([torch.randperm(dim) for _ in range(2)]),
        )
        for _ in range(layers)
    ]
    return get_recipe("nvfp4-max", calibration=known, exact_window=64)


CODES_LEFT_OUT = {
    # recipe, codes of K and V that travel of 120 tokens: all but those of the exact window
    "nvfp4": (get_recipe("nvfp4", exact_window=64), [56, 56]),
    "nvfp4-max": (calibrated(), [56, 56]),
    "k8v4": (get_recipe("k8v4", exact_window=64), [56, 56]),
    "block-fp4": (get_recipe("block-fp4", exact_window=64, k_bias="prompt"), [56, 56]),
    "K exact": (get_recipe("nvfp4", exact_window=64, k_format="exact"), [56, 56]),
    "nvfp4-plain": (get_recipe("nvfp4-plain"), [120, 120]),
    "sinks alone": (get_recipe("nvfp4", exact_window=0), [120, 120]),
    "a window of all": (get_recipe("nvfp4", exact_window=128), [4, 4]),
    "a window of all, no sinks": (get_recipe("nvfp4", exact_window=128, num_sink_tokens=0), [0, 0]),
}


@pytest.mark.parametrize(("recipe", "sent"), CODES_LEFT_OUT.values(), ids=CODES_LEFT_OUT)
def test_codes_that_follow_from_exact_values_stay_behind(model, recipe, sent):
    """Whatever the receiver's form, it stores the sender's bytes."""
    cache = prefilled(model, 160, recipe, tokens=120)
    blocks = export_blocks(cache, "a")
    assert tokens_sent(blocks) == tokens_sent(blocks, 1) == sent
    want = stored(cache)
    for receiver in (NVFP4Cache(model.config, 256, recipe), NVFP4Cache(model.config, None, recipe)):
        import_blocks(receiver, blocks)
        got = stored(receiver)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    pool = pool_of(model, 32, recipe)
    (row,) = import_blocks(pool, export_blocks(cache, "b", [1]))
    got = stored(pool, [row])
    assert all(torch.equal(got[name], want[name][1:]) for name in want)
    assert tokens_sent(export_blocks(pool, "c", [row])) == sent


@pytest.mark.parametrize(
    ("padding", "crop", "more", "sent"),
    [
        # 120 tokens, the last 64 of which are exact; the ring has 80 slots.
        (0, 0, 0, 56),
        (50, 0, 0, 56),
        (70, 0, 0, 74),  # the padded row keeps its first four apart
        (0, 16, 0, 40),
        (0, 20, 0, 40),  # what the ring held no longer reaches back 64 tokens
        (0, 20, 30, 66),
        (0, 119, 0, 1),
        (0, 119, 3, 4),
        (70, 49, 0, 71),
    ],
)
def test_codes_after_padding_crops_and_what_came_then(model, padding, crop, more, sent):
    cache = prefilled(model, 160, get_recipe("nvfp4", exact_window=64), tokens=120, padding=padding)
    cache.crop(-crop)
    if more:
        decode(model, cache, steps=more)
    blocks, want = export_blocks(cache, "a"), stored(cache)
    assert tokens_sent(blocks) == [sent, sent]
    other = NVFP4Cache(model.config, 256, get_recipe("nvfp4", exact_window=64))
    import_blocks(other, blocks)
    got = stored(other)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert torch.equal(decode(model, other, padding=padding), decode(model, cache, padding=padding))


def test_crops_after_a_hand_over(model):
    """Tokens decoded since then go without a trace; of those handed over, each leaves the exact window one shorter."""
    cache, other = prefilled(model, 160), NVFP4Cache(model.config, 160)
    import_blocks(other, export_blocks(cache, "a"))
    for either in (cache, other):
        decode(model, either, steps=7)
        either.crop(-7)
    assert torch.equal(decode(model, other), decode(model, cache))
    for either in (cache, other):
        either.crop(-4 - 9)
    (ours,), (theirs,) = ({id(layer.positions): layer.positions for layer in c.layers}.values() for c in (other, cache))
    assert ours.held_from.tolist() == [120 - 88] * 2 and theirs.held_from.tolist() == [127 - 88 - 16] * 2
    shorter = decode(model, other, steps=9)
    assert not torch.equal(shorter, decode(model, copy.deepcopy(cache), steps=9))
    theirs.held_from.copy_(ours.held_from)
    assert torch.equal(shorter, decode(model, cache, steps=9))
    assert torch.equal(decode(model, other), decode(model, cache))


def test_bytes_of_another_quantiser_travel(model):
    """One code of a token that is also exact, and one in its block scale, which the receiver is told."""
    cache = prefilled(model)
    cache.layers[0].storage.k_data[1, 0, 60, 0] ^= 1
    cache.layers[1].storage.v_scales[0, 1, 70, 2] += 1
    blocks, want = export_blocks(cache, "a"), stored(cache)
    few = tokens_sent(export_blocks(prefilled(model), "b"))
    assert tokens_sent(blocks) == [120, few[1]] and tokens_sent(blocks, 1) == [few[0], 120]
    other = NVFP4Cache(model.config, 128)
    import_blocks(other, blocks)
    got = stored(other)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_another_search_for_block_scales_leaves_the_same_bytes(model):
    """Backends may search them differently: the receiver takes those that were chosen, whatever its own would be."""
    cache = prefilled(model, recipe=get_recipe("nvfp4", scale_rule="4over6"))
    for layer in cache.layers:
        layer.storage.recipe = get_recipe("nvfp4")
    other = NVFP4Cache(model.config, 128)
    blocks = export_blocks(cache, "a")
    assert tokens_sent(blocks) == tokens_sent(export_blocks(prefilled(model), "b"))
    import_blocks(other, blocks)
    got, want = stored(other), stored(cache)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")], ids=" to ".join)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-max", "k8v4", "block-fp4"])
def test_a_gpu_s_bytes_on_another_device(name, devices):
    recipe = calibrated(1) if name == "nvfp4-max" else get_recipe(name, exact_window=64)
    torch.manual_seed(0)
    config = llama(num_hidden_layers=1).config
    caches = [NVFP4Cache(config, 256, recipe) for _ in devices]
    k, v = (torch.randn(2, 2, 200, 64).to(devices[0], torch.bfloat16) for _ in "kv")
    caches[0].update(k, v, 0)
    blocks = export_blocks(caches[0], "a")
    assert tokens_sent(blocks)[1] == 200 - caches[0].layers[0].positions.window
    import_blocks(caches[1], Blocks(blocks.header, blocks.payload.to(devices[1])))
    want, got = (stored(cache) for cache in caches)
    assert all(torch.equal(got[name].cpu().view(torch.uint8), want[name].cpu().view(torch.uint8)) for name in want)


def heads(cache):
    """All that a hand-over carries, by layer and name, one head after the other."""
    return [
        {name: t.movedim(1 if t.ndim == 4 else 0, 0) for name, t in layer.storage.tensors()} for layer in cache.layers
    ]


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 4), (8, 2)], ids=str)
def test_ranks_of_another_number(senders, receivers):
    """Four KV heads, also where there are more ranks than heads."""
    config = llama(num_key_value_heads=4, num_hidden_layers=1).config
    torch.manual_seed(0)
    k, v = torch.randn(1, 4, 70, 64), torch.randn(1, 4, 70, 64)
    whole = NVFP4Cache(config, 96)
    whole.update(k, v, 0)
    where = whole.layers[0].positions
    caches = [NVFP4Cache(config, 96, tp_rank=rank, tp_size=senders) for rank in range(senders)]
    for cache in caches:
        mine = cache.shard.heads(4)
        cache.update(k[:, mine.start : mine.stop], v[:, mine.start : mine.stop], 0)
    messages = [
        export_blocks(cache, "a", tokens=t, more=t.stop < 70) for cache in caches for t in (range(40), range(40, 70))
    ]
    if senders > 4:
        with pytest.raises(ValueError, match=r"came (from two ranks|twice)"):
            import_blocks(NVFP4Cache(config, 96), messages)
        messages = [m for i, m in enumerate(messages) if i // 2 % (senders // 4) == 0]
    for rank in range(receivers):
        cache = NVFP4Cache(config, 128, tp_rank=rank, tp_size=receivers)
        import_blocks(cache, messages[::-1])
        mine = cache.shard.heads(4)
        for got, want in zip(heads(cache), heads(whole)):
            assert got.keys() == want.keys()
            for name in got:
                part = want[name][mine.start : mine.stop]
                if name in ("k_exact", "v_exact"):
                    held = [*range(4), *[4 + p % where.ring for p in range(max(4, 70 - where.window), 70)]]
                    assert torch.equal(got[name][:, :, held], part[:, :, held])
                else:
                    tokens = 70 if got[name].ndim == 4 else None
                    assert torch.equal(
                        got[name][:, :, :tokens] if tokens else got[name], part[:, :, :tokens] if tokens else part
                    )


def test_a_rank_wants_all_its_heads(model):
    config = llama(num_key_value_heads=4, num_hidden_layers=1).config
    cache = NVFP4Cache(config, 96, tp_rank=1, tp_size=4)
    x = torch.randn(1, 1, 70, 64)
    cache.update(x, x.clone(), 0)
    with pytest.raises(ValueError, match="KV head 0 of layer 0 of 'a' is missing"):
        import_blocks(NVFP4Cache(config, 96, tp_rank=0, tp_size=2), export_blocks(cache, "a"))


def test_calibrated_numbers_go_by_head():
    config = llama(num_hidden_layers=1).config
    numbers = {"k_scale": (0.5, 0.25), "v_scale": (0.125,), "k_bias": torch.arange(128.0).view(2, 64)}
    recipe = dataclasses.replace(get_recipe("nvfp4"), k_bias="calibrated", calibration=(LayerCalibration(**numbers),))
    x = torch.randn(1, 2, 70, 64)
    ranks = [NVFP4Cache(config, 96, recipe, tp_rank=rank, tp_size=2) for rank in range(2)]
    for rank, cache in enumerate(ranks):
        cache.update(x[:, rank : rank + 1], -x[:, rank : rank + 1], 0)
        assert cache.layers[0].storage.k_global.tolist() == [numbers["k_scale"][rank]]
        assert torch.equal(cache.layers[0].storage.k_bias, numbers["k_bias"][rank : rank + 1])
    messages = [export_blocks(cache, "a") for cache in ranks]
    import_blocks(NVFP4Cache(config, 96, recipe), messages)
    other = dataclasses.replace(recipe.calibration[0], k_scale=(0.5, 0.5))
    with pytest.raises(ValueError, match="layer 0 was calibrated with other numbers"):
        import_blocks(NVFP4Cache(config, 96, dataclasses.replace(recipe, calibration=(other,))), messages)


@pytest.mark.parametrize(("tokens", "head_dim"), [(4096, 64), (4096, 128), (8192, 128)])
def test_bytes_on_the_wire(tokens, head_dim):
    """The default recipe, exact tokens and header included, beside K and V in BF16."""
    config = llama(num_hidden_layers=1).config
    cache = NVFP4Cache(config, tokens)
    x = torch.randn(1, 2, tokens, head_dim, dtype=torch.bfloat16)
    cache.update(x, x.clone(), 0)
    assert export_blocks(cache, "a").nbytes <= 0.30 * (2 * x.numel() * x.element_size())


def parts(cache):
    return [
        export_blocks(cache, "a", tokens=range(0, 32), more=True),
        export_blocks(cache, "a", tokens=range(32, 64), more=True),
        export_blocks(cache, "a", tokens=range(64, 120)),
    ]


def alter_payload(messages):
    messages[1].payload[7] ^= 1


def swap_words(messages):
    words = messages[1].payload.view(torch.int64)
    words[[3, 4]] = words[[4, 3]]


def alter_header(messages):
    messages[2].header["starts"][0] += 1


def call_it_newer(messages):
    messages[0].header["version"] = 3


FAULTS = {
    "dropped first": (lambda m: m[1:], "are missing: tokens 0 to 31"),
    "dropped middle": (lambda m: [m[0], m[2]], "are missing: tokens 32 to 63"),
    "dropped last": (lambda m: m[:2], "the last blocks of 'a' are missing: tokens from 64"),
    "duplicated": (lambda m: [*m, m[1]], "came twice: tokens 32 to 63"),
    "duplicated last": (lambda m: [*m, m[2]], "came twice: tokens 64 to 119"),
    "altered": (lambda m: alter_payload(m) or m, "were altered"),
    "cut off": (lambda m: [*m[:2], Blocks(m[2].header, m[2].payload[:-3])], "were altered: a payload of uint8"),
    "with more behind": (lambda m: [*m[:2], Blocks(m[2].header, F.pad(m[2].payload, (0, 8)))], "were altered: a pay"),
    "not of bytes": (lambda m: [*m[:2], Blocks(m[2].header, m[2].payload.view(torch.int64))], "were altered: a pay"),
    "without a checksum": (lambda m: m[1].header.pop("sha256") and m, "were altered"),
    "without a version": (lambda m: m[1].header.pop("version") and m, "of version None"),
    "in another order": (lambda m: swap_words(m) or m, "were altered"),
    "header altered": (lambda m: alter_header(m) or m, "were altered"),
    "newer": (lambda m: call_it_newer(m) or m, "of version 3; this package reads version 2"),
    "none": (lambda m: [], "no blocks were given"),
    "no blocks": (lambda m: [Blocks({"format": "pt"}, m[0].payload)], "format is 'pt'"),
}


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_messages_that_are_not_all_there_change_nothing(model, change, message):
    cache = prefilled(model, tokens=20)
    cache.reset()
    before = {name: t.clone() for name, t in cache.layers[0].storage.tensors()}
    with pytest.raises(ValueError, match=message):
        import_blocks(cache, change(parts(prefilled(model))))
    assert cache.is_empty
    assert all(torch.equal(t, before[name]) for name, t in cache.layers[0].storage.tensors())


def test_a_payload_may_begin_anywhere(model):
    cache, other = prefilled(model), NVFP4Cache(model.config, 128)
    blocks = export_blocks(cache, "a")
    import_blocks(other, Blocks(blocks.header, F.pad(blocks.payload, (3, 0))[3:]))
    assert torch.equal(decode(model, other), decode(model, cache))


def test_messages_of_another_hand_over_are_refused(model):
    mine, cache = parts(prefilled(model)), NVFP4Cache(model.config, 128)
    foreign = export_blocks(prefilled(model), "b", tokens=range(32, 64), more=True)
    with pytest.raises(ValueError, match="blocks of 'b' are among those of 'a'"):
        import_blocks(cache, [mine[0], foreign, mine[2]])
    fewer_rows = parts(prefilled(model, batch=1))[1]
    with pytest.raises(ValueError, match="from caches that differ in rows"):
        import_blocks(cache, [mine[0], fewer_rows, mine[2]])
    with pytest.raises(ValueError, match="recipe of layer 0 is"):
        import_blocks(NVFP4Cache(model.config, 128, "nvfp4-plain"), mine)
    with pytest.raises(ValueError, match="120 tokens exceed max_cache_len=64"):
        import_blocks(NVFP4Cache(model.config, 64), mine)
    with pytest.raises(ValueError, match="it has 2 layers, the cache 3"):
        import_blocks(NVFP4Cache(llama(num_hidden_layers=3).config, 128), mine)
    with pytest.raises(ValueError, match="reset"):
        import_blocks(prefilled(model), mine)


def test_what_cannot_be_exported_is_named(model, monkeypatch):
    cache = prefilled(model)
    with pytest.raises(ValueError, match="must reach the row's end at 120, not 64"):
        export_blocks(cache, "a", tokens=range(64))
    with pytest.raises(ValueError, match="within the 120 that are stored"):
        export_blocks(cache, "a", tokens=range(121), more=True)
    with pytest.raises(ValueError, match="row 2 is not in use"):
        export_blocks(cache, "a", rows=[2])
    with pytest.raises(ValueError, match="nothing to hand over"):
        export_blocks(NVFP4Cache(model.config), "a")
    for half in (cache, NVFP4Cache(model.config, 128)):
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(model.model.layers[0].mlp, "forward", lambda x: {}["interrupted"])
            decode(model, half)
        with pytest.raises(RuntimeError, match="ended halfway"):
            export_blocks(half, "a")
