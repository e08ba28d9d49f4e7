"""`attention` on the CPU against the float64 oracle; memory that must not be read is poison (see calls.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from calls import equalized, make, needle, run, strided, with_everything
from decode_cases import check_hidden_by_the_lowest_number
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops import backends, torch_attention
from torch_fp4kv.ops.attention import LARGEST_WINDOW

FORMATS = ("nvfp4", "fp8", "block-fp4", "exact")


def check(**options: Any) -> None:
    call = make(**options)
    oracle.check(call, *run(call))


def normal(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CALLS = {
    "one token": {"lengths": (1,)},
    "decode": {"lengths": (63,)},
    "full page": {"lengths": (64,)},
    "a thousand": {"lengths": (1000,), "capacity": 1024},
    "rows of different length": {"lengths": (1, 63, 17, 40)},
    "row without tokens": {"lengths": (0, 9)},
    "left padding": {"lengths": (40, 40), "starts": (0, 33)},
    "row that is all padding": {"lengths": (40, 40), "starts": (40, 5)},
    "prefill": {"lengths": (63,), "num_queries": 63},
    "chunk": {"lengths": (63, 30), "num_queries": 7},
    "ragged queries": {"lengths": (40, 41, 37), "num_queries": 37, "q_lengths": (1, 1, 37)},
    "row without queries": {"lengths": (40, 20), "num_queries": 3, "q_lengths": (0, 2)},
    "more queries than tokens": {"lengths": (2, 5), "num_queries": 4},
    "not causal": {"lengths": (40, 17), "num_queries": 5, "causal": False},
    "window": {"lengths": (63, 5), "num_queries": 9, "window": 8},
    "window of one": {"lengths": (63,), "num_queries": 3, "window": 1},
    "window, not causal": {"lengths": (30,), "num_queries": 5, "window": 4, "causal": False},
    "window beyond the context": {"lengths": (30,), "num_queries": 5, "window": 1000},
    "soft-cap": {"lengths": (40,), "num_queries": 3, "softcap": 2.0, "scale": 1.0},
    "scale": {"lengths": (40,), "scale": 0.37},
    "negative scale": {"lengths": (40,), "scale": -0.37},
    "sink logits": {"lengths": (40, 0), "num_queries": 2, "sink_logits": normal(4) * 3},
    "fp16 sink logits": {"lengths": (40, 3), "sink_logits": (normal(4) * 3).half()},
    "multi-query": {"lengths": (40, 9), "heads": 8, "kv_heads": 1, "num_queries": 3},
    "every head its own": {"lengths": (40, 9), "heads": 3, "kv_heads": 3, "num_queries": 3},
    "group of seven": {"lengths": (40, 9), "heads": 14, "kv_heads": 2, "num_queries": 3},
    "value head size": {"lengths": (40,), "head_dim": 96, "v_head_dim": 32, "num_queries": 3},
    "MLA head sizes": {"lengths": (40,), "head_dim": 576, "v_head_dim": 512, "kv_heads": 1},
    "ring": {"lengths": (200, 63, 3, 64), "num_queries": 1},
    "ring with window": {"lengths": (1000, 20), "num_queries": 2, "window": 16, "capacity": 32},
    "ring with left padding": {"lengths": (100, 100), "starts": (0, 70), "num_queries": 3},
    "ring and new tokens": {"lengths": (200, 60), "num_queries": 5, "new": True, "capacity": 32},
    "pages": {"lengths": (63, 17, 1), "page_size": 16},
    "pages of one": {"lengths": (20, 17), "page_size": 1, "capacity": 20},
    "pages of seven": {"lengths": (60, 22), "page_size": 7, "num_queries": 4},
    "pages, window": {"lengths": (1000, 40), "page_size": 16, "capacity": 1024, "window": 20, "num_queries": 2},
    "pages, padding": {"lengths": (60, 40), "starts": (33, 0), "page_size": 16, "num_queries": 2},
    "pages, new": {"lengths": (60, 40), "page_size": 16, "num_queries": 20, "q_lengths": (20, 3), "new": True},
    "new tokens only": {"lengths": (9, 4), "num_queries": 9, "q_lengths": (9, 4), "new": True},
    "new tokens, not causal": {"lengths": (30, 12), "num_queries": 9, "new": True, "causal": False},
    "new tokens, window": {"lengths": (63,), "num_queries": 20, "new": True, "window": 6},
    "sinks": {"lengths": (40, 3, 1), "num_sink_tokens": 4},
    "sinks and padding": {"lengths": (40, 40, 40), "starts": (0, 33, 38), "num_sink_tokens": 4, "num_queries": 2},
    "exact ring": {"lengths": (40, 9, 3), "ring": 8},
    "sinks, ring, new, padding": {
        "lengths": (60, 33, 12, 7),
        "starts": (0, 20, 9, 2),
        "num_sink_tokens": 3,
        "ring": 8,
        "new": True,
        "num_queries": 4,
        "q_lengths": (4, 1, 2, 0),
    },
    "sinks, ring, pages, window": {
        "lengths": (60, 30),
        "page_size": 8,
        "num_sink_tokens": 2,
        "ring": 8,
        "window": 20,
        "num_queries": 3,
    },
    "sinks, ring, rolling page": {"lengths": (200, 70), "num_sink_tokens": 2, "ring": 5, "window": 48},
    "4-token scales": {"lengths": (63, 17, 1), "v_scale_layout": "4token", "num_queries": 2},
    "4-token scales, pages": {"lengths": (63, 17), "v_scale_layout": "4token", "page_size": 8},
    "4-token scales, ring": {"lengths": (203, 17), "v_scale_layout": "4token"},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_call(options: dict[str, Any]) -> None:
    check(**options)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 144, 192, 256, 512, 576])
@pytest.mark.parametrize("num_queries", [1, 17], ids=["decode", "prefill"])
def test_head_sizes(head_dim: int, num_queries: int) -> None:
    check(lengths=(63, 17), head_dim=head_dim, num_queries=num_queries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=["as q", "to fp32", "to bf16"])
def test_dtypes(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    check(lengths=(63, 17), num_queries=3, new=True, num_sink_tokens=2, ring=8, dtype=dtype, out_dtype=out_dtype)


@pytest.mark.parametrize("k_format", FORMATS)
@pytest.mark.parametrize("v_format", FORMATS)
def test_formats(k_format: str, v_format: str) -> None:
    check(lengths=(63, 17), num_queries=2, k_format=k_format, v_format=v_format, starts=(5, 0))
    check(lengths=(63, 17), k_format=k_format, v_format=v_format, page_size=8, ring=4, num_sink_tokens=1)


BATCH, HEADS, QUERIES, COLUMNS = 2, 4, 3, 40
MASK_SHAPES = [(b, h, q, COLUMNS) for b in (1, BATCH) for h in (1, HEADS) for q in (1, QUERIES)] + [
    (QUERIES, COLUMNS),
    (1, COLUMNS),
    (COLUMNS,),
    (HEADS, 1, COLUMNS),
]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "lowest float"])
def test_mask_of_every_broadcast_shape(shape: tuple[int, ...], kind: str) -> None:
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    mask = visible
    if kind == "float":
        mask = normal(*shape).masked_fill(~visible, -torch.inf)
    elif kind == "lowest float":
        mask = torch.zeros(shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    check(lengths=(37, 11), num_queries=QUERIES, mask=mask)
    check(lengths=(37, 11), num_queries=QUERIES, mask=mask, new=True, num_sink_tokens=2, ring=4, page_size=8)


def test_keys_all_hidden_by_the_lowest_number() -> None:
    call = make(lengths=(90, 33), capacity=128, num_queries=3, ring=20, out_dtype=torch.float32)
    check_hidden_by_the_lowest_number(call, run)


@pytest.mark.parametrize("window", [2**31, 2**63 - 1])
def test_kernels_get_a_window_that_int32_holds(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []

    def module(_name: str) -> Any:
        return SimpleNamespace(run=lambda call: windows.append(call.window) or torch_attention.run(call))

    monkeypatch.setattr(backends, "attention_module", module)
    check(lengths=(63, 2), num_queries=3, window=window)
    assert windows == [LARGEST_WINDOW]


@pytest.mark.parametrize("columns", [1, 20, 36, 37, 200])
def test_positions_beyond_the_mask_are_not_seen(columns: int) -> None:
    for mask in (torch.ones(columns, dtype=torch.bool), torch.zeros(1, 1, 1, columns), torch.zeros(columns).half()):
        check(lengths=(37, 60), num_queries=2, mask=mask, causal=False)
        check(lengths=(137, 60), num_queries=2, mask=mask)


def test_mask_that_is_a_strided_view() -> None:
    mask = (torch.rand(2, 63, 5, 1, generator=torch.Generator().manual_seed(1)) > 0.5).permute(0, 3, 2, 1)
    check(lengths=(63, 20), num_queries=5, mask=mask)
    check(lengths=(63, 20), num_queries=5, mask=mask[..., :1].expand(2, 4, 5, 63))


@pytest.mark.parametrize(
    "hidden",
    [
        {"lengths": (0, 0)},
        {"lengths": (9, 9), "starts": (9, 20)},
        {"lengths": (9, 9), "mask": torch.zeros(9, dtype=torch.bool)},
        {"lengths": (9, 9), "mask": torch.full((9,), -torch.inf)},
        {"lengths": (9, 9), "num_queries": 2, "q_lengths": (0, 0)},
    ],
    ids=["no tokens", "all padding", "bool mask", "float mask", "no queries"],
)
def test_query_that_sees_nothing_gives_zero_and_minus_infinity(hidden: dict[str, Any]) -> None:
    out, lse = run(make(**hidden))
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_sink_logit_is_all_that_a_query_without_keys_sees() -> None:
    sinks = normal(4)
    out, lse = run(make(lengths=(0, 5), num_queries=2, q_lengths=(1, 2), sink_logits=sinks))
    assert not out[0].any()
    assert torch.equal(lse[0, :, 0], sinks)
    assert (lse[0, :, 1] == -torch.inf).all()


def test_without_features_it_is_scaled_dot_product_attention() -> None:
    call = make(lengths=(40, 40), num_queries=5, k_format="exact", v_format="exact", capacity=40)
    for causal in (False, True):
        visible = torch.ones(5, 40, dtype=torch.bool).tril(35) if causal else torch.ones(5, 40, dtype=torch.bool)
        expected = torch.nn.functional.scaled_dot_product_attention(
            call.q.double(), call.k_data.double(), call.v_data.double(), attn_mask=visible, enable_gqa=True
        )
        oracle_out, _ = oracle.attend(replace(call, causal=causal))
        assert torch.allclose(oracle_out, expected, rtol=1e-12, atol=1e-12)
        out, _ = run(call, causal=causal)
        assert (out - expected).abs().max() <= oracle.budget(replace(call, causal=causal))[0]


@pytest.mark.parametrize("head_dim", [128, 256])
def test_default_scale_is_the_root_of_the_head_size_not_of_the_packed_one(head_dim: int) -> None:
    call = make(head_dim=head_dim)
    assert torch.equal(run(call)[0], run(call, scale=head_dim**-0.5)[0])
    assert not torch.allclose(run(call)[0], run(call, scale=(head_dim / 2) ** -0.5)[0], rtol=1e-3)


@pytest.mark.parametrize("storage_format", ["nvfp4", "exact"])
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["plain", "soft-cap"])
def test_shifted_and_rotated_keys_give_the_result_of_plain_ones(storage_format: str, softcap: float) -> None:
    options = {
        "lengths": (60, 21),
        "num_queries": 3,
        "heads": 4,
        "kv_heads": 2,
        "num_sink_tokens": 2,
        "ring": 8,
        "new": True,
        "softcap": softcap,
        "sink_logits": normal(4),
        "k_format": storage_format,
        "v_format": storage_format,
    }
    mean = normal(2, 64) * 3
    call = make(**{**equalized(), "k_bias": mean}, v_bias=normal(2, 64), **options)
    out, lse = run(call)
    oracle.check(call, out, lse)
    plain, plain_lse = run(make(**options))
    if storage_format == "exact":
        assert (out - plain).abs().max() <= 5e-6
        assert (lse - plain_lse).abs().max() <= 2e-5


def test_biases_and_transforms_do_not_touch_exact_tokens() -> None:
    call = make(lengths=(9, 4), num_queries=9, q_lengths=(9, 4), new=True)
    shifted = replace(call, **equalized(), v_bias=normal(2, 64) * 100)
    assert torch.equal(run(call)[0], run(shifted)[0])


@pytest.mark.parametrize("batch", [1, 63, 256])
def test_batches(batch: int) -> None:
    lengths = [1 + i * 7 % 40 for i in range(batch)]
    check(lengths=lengths, head_dim=256 if batch == 256 else 64, heads=2, kv_heads=1, capacity=40)


@pytest.mark.parametrize("num_queries", [1, 8, 16])
def test_few_queries_over_a_long_context(num_queries: int) -> None:
    check(lengths=(8192,), capacity=8192, num_queries=num_queries, heads=2, kv_heads=1, head_dim=64)


def test_queries_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_fp4kv.ops import torch_attention

    rows = torch.rand(2, 1, 63, 150, generator=torch.Generator().manual_seed(2)) > 0.3
    calls = [
        make(lengths=(150, 63), num_queries=63, q_lengths=(63, 20), capacity=150, window=40, mask=rows),
        make(lengths=(150, 63), num_queries=63, new=True, ring=9, num_sink_tokens=3, page_size=8, capacity=152),
        make(lengths=(150, 63), num_queries=63, new=True, causal=False, v_scale_layout="4token"),
        make(lengths=(150, 63), num_queries=63, new=True, window=7, sink_logits=normal(4)),
        make(lengths=(150, 63), num_queries=20, window=30),
    ]
    whole = [run(call) for call in calls]
    monkeypatch.setattr(torch_attention, "TILE_ELEMENTS", 2 * 2 * 64 * 17)
    monkeypatch.setattr(torch_attention, "SCORE_ELEMENTS", 2 * 4 * 16 * 5)
    for call, (out, lse) in zip(calls, whole):
        tiled, tiled_lse = run(call)
        oracle.check(call, tiled, tiled_lse)
        assert not torch.equal(tiled, out)
        assert torch.allclose(tiled_lse, lse, atol=1e-5)


@pytest.mark.parametrize("share", [False, True], ids=["all the weight", "half of it"])
def test_needle_in_a_long_context_is_found(share: bool) -> None:
    call, expected = needle(share)
    out, _ = run(call)
    assert float((out - expected).abs().max()) < 1e-2


def test_capacity_does_not_change_a_bit() -> None:
    results = [
        run(make(lengths=(1000, 63), num_queries=3, capacity=c, window=w)) for c in (1000, 2048) for w in (-1, 300)
    ]
    for first, second in zip(results[:2], results[2:]):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
    call = make(lengths=(100, 63), num_queries=3, capacity=112, page_size=16)
    wider = torch.cat([call.block_table, torch.full((2, 9), -1, dtype=torch.int32)], dim=1)
    assert torch.equal(run(call)[0], run(call, block_table=wider)[0])


def test_pages_and_one_page_agree() -> None:
    options = {"lengths": (60, 33), "num_queries": 3, "window": 25}
    paged, single = run(make(page_size=8, **options)), run(make(**options))
    for a, b in zip(paged, single):
        assert torch.allclose(a, b, atol=3e-6)


def test_log_sum_exp_merges_two_halves_into_the_whole() -> None:
    call = make(lengths=(63, 40))
    middle = torch.tensor([30, 39], dtype=torch.int32)
    out, lse = run(call)
    early, late = run(call, lengths=middle, causal=False), run(call, starts=middle)
    total = torch.logaddexp(early[1], late[1])
    merged = sum(o * (part - total).exp()[..., None] for o, part in (early, late))
    assert torch.allclose(total, lse, atol=3e-6)
    assert torch.allclose(merged, out, atol=3e-6)


@pytest.mark.parametrize("poisoned", ["q", "k_new", "v_new", "k_exact", "v_exact", "k_data", "v_data"])
def test_nan_in_one_head_stays_in_that_head_and_shows(poisoned: str) -> None:
    call = make(lengths=(40, 40), num_queries=2, new=True, ring=8, k_format="exact", v_format="exact")
    clean, clean_lse = run(call)
    tensor = getattr(call, poisoned).clone()
    tensor[1, 1, 0] = torch.nan
    out, lse = run(call, **{poisoned: tensor})
    heads = [1] if poisoned == "q" else [2, 3]
    for row in range(2):
        for head in range(4):
            if row == 1 and head in heads:
                assert out[row, head].isnan().any()
            else:
                assert torch.equal(out[row, head], clean[row, head])
                assert torch.equal(lse[row, head], clean_lse[row, head])


def test_infinity_that_nobody_sees_does_not_show() -> None:
    call = make(lengths=(40, 40), starts=(0, 20), k_format="exact", v_format="exact")
    before = run(call)
    for name in ("k_data", "v_data"):
        tensor = getattr(call, name).clone()
        tensor[1, :, :20], tensor[:, :, 40:] = torch.inf, -torch.inf
        assert torch.equal(run(call, **{name: tensor})[0], before[0])


@pytest.mark.parametrize(
    "shape", [(0, 4, 3, 64), (2, 4, 0, 64), (0, 4, 0, 64)], ids=["no batch", "no queries", "neither"]
)
def test_empty_queries(shape: tuple[int, ...]) -> None:
    call = make(lengths=(9, 9)[: shape[0]], num_queries=shape[2], new=True, ring=4)
    out, lse = run(call)
    assert out.shape == shape
    assert lse.shape == shape[:3]


def test_strided_queries_and_inputs_are_left_alone() -> None:
    call = make(lengths=(40, 20), num_queries=3, new=True)
    strided = call.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    before = {name: getattr(call, name).clone() for name in ("k_data", "k_scales", "k_new", "v_data", "lengths")}
    assert torch.equal(run(call, q=strided)[0], run(call)[0])
    for name, old in before.items():
        assert torch.equal(getattr(call, name), old)


def test_strided_numbers_of_rows_and_heads() -> None:
    for call in (with_everything(2), with_everything(20, new=True)):
        oracle.check(call, *run(strided(call)))
        for got, want in zip(run(strided(call)), run(call)):
            assert torch.equal(got, want)


def test_page_beyond_two_to_the_31_elements() -> None:
    pages, tokens = 2**21 + 8, 64
    k_data, v_data = (torch.empty(pages, 1, tokens, 16, dtype=torch.uint8) for _ in range(2))
    small = make(
        lengths=(100,), capacity=128, page_size=64, heads=2, kv_heads=1, head_dim=16, k_format="fp8", v_format="fp8"
    )
    table = torch.tensor([[pages - 1, pages - 2]], dtype=torch.int32)
    for large, data in ((k_data, small.k_data), (v_data, small.v_data)):
        large[table[0].long()] = data[small.block_table[0].long()]
    far = run(small, k_data=k_data, v_data=v_data, block_table=table)
    for got, expected in zip(far, run(small)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("storage_format", ["nvfp4", "fp8"])
def test_global_scale_per_head(storage_format: str) -> None:
    call = make(lengths=(40, 9), num_queries=2, k_format=storage_format, v_format=storage_format, page_size=8)
    call = replace(call, k_global=torch.tensor([0.01, 1 / 3]), v_global=torch.tensor([0.7, 0.003]))
    oracle.check(call, *run(call))


def test_heads_served_in_two_shards_are_the_heads_served_together() -> None:
    call = make(lengths=(40, 9), num_queries=2, ring=4, num_sink_tokens=1, new=True, sink_logits=normal(4))
    call = replace(call, k_global=torch.tensor([0.01, 1 / 3]))
    whole, whole_lse = run(call)
    for shard in range(2):
        names = ("k_data", "k_scales", "v_data", "v_scales", "k_exact", "v_exact", "k_new", "v_new")
        own = {name: getattr(call, name)[:, shard : shard + 1].contiguous() for name in names}
        queries = slice(2 * shard, 2 * shard + 2)
        out, lse = run(
            call,
            **own,
            q=call.q[:, queries],
            k_global=call.k_global[shard : shard + 1],
            sink_logits=call.sink_logits[queries],
        )
        assert torch.equal(out, whole[:, queries])
        assert torch.equal(lse, whole_lse[:, queries])


def test_backend_that_serves_can_be_asked_for_and_named() -> None:
    call = make()
    fields = {name: getattr(call, name) for name in call.__slots__ if name not in ("return_lse", "backend")}
    choice = torch_fp4kv.explain(**fields)
    assert choice.name == "torch"
    assert "the tensors are on cpu" in choice.passed_over["triton"]
    # As `attention` takes them.
    assert torch_fp4kv.explain(**{**fields, "k_global": 0.5, "v_global": 0.25}) == choice
    assert torch.equal(run(call, backend="torch")[0], run(call)[0])
