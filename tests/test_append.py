"""`append`: writes the bytes of `quantize` at its slots and nothing else, in place, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import empty_storage, equalized
from compiled import compare, generated
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops.format import blocks, e4m3, layout
from torch_fp4kv.ops.format.rotation import rotate

PAGES, HEADS, TOKENS, DIM = 5, 3, 16, 64
SLOTS = torch.tensor([[7, 0, 63, 17], [79, 33, 16, 40]])
FORMATS = ("nvfp4", "fp8", "block-fp4", "exact")


def new_tokens(dtype: torch.dtype = torch.float32, v_head_dim: int = DIM) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (*SLOTS.shape[:1], HEADS, SLOTS.shape[1])
    k = torch.randn(*shape, DIM, generator=generator)
    return k.to(dtype), torch.randn(*shape, v_head_dim, generator=generator).to(dtype)


def encoded(x: Tensor, storage_format: str, global_scale: float, rule: str = "amax") -> tuple[Tensor, Tensor | None]:
    if storage_format == "nvfp4":
        return torch_fp4kv.quantize(x, global_scale, scale_rule=rule)
    if storage_format == "block-fp4":
        return blocks.encode_block_fp4(x)
    if storage_format == "fp8":
        return e4m3.encode_signed(x.float() / torch.tensor(global_scale)).to(torch.uint8), None
    return x, None


def check_written(storage: Tensor, before: Tensor, rows: Tensor, slots: Tensor) -> None:
    """`storage` holds `rows` `[B, H, L, ·]` at `slots` and is `before` everywhere else."""
    expected = before.clone()
    for b, i in torch.cartesian_prod(torch.arange(slots.shape[0]), torch.arange(slots.shape[1])).tolist():
        slot = int(slots[b, i])
        expected[slot // before.shape[2], :, slot % before.shape[2]] = rows[b, :, i]
    assert torch.equal(storage.nan_to_num(1e30), expected.nan_to_num(1e30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("k_format", FORMATS)
@pytest.mark.parametrize("v_format", FORMATS)
def test_writes_at_its_slots_and_nothing_else(k_format: str, v_format: str, dtype: torch.dtype) -> None:
    k, v = new_tokens(dtype, v_head_dim=32)
    k_storage = empty_storage(PAGES, HEADS, TOKENS, DIM, k_format, dtype)
    v_storage = empty_storage(PAGES, HEADS, TOKENS, 32, v_format, dtype)
    before = [None if s is None else s.clone() for s in (*k_storage, *v_storage)]
    inputs = [k.clone(), v.clone(), SLOTS.clone()]
    torch_fp4kv.append(*k_storage, *v_storage, k, v, SLOTS, 0.01, 1 / 3, k_format=k_format, v_format=v_format)
    written = (*encoded(k, k_format, 0.01), *encoded(v, v_format, 1 / 3))
    for storage, old, rows in zip((*k_storage, *v_storage), before, written):
        if storage is not None:
            check_written(storage, old, rows, SLOTS)
    for tensor, old in zip((k, v, SLOTS), inputs):
        assert torch.equal(tensor, old)


VIEWS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_strided_tokens_write_the_bytes_of_their_contiguous_copy(view) -> None:
    k, v = (view(x) for x in new_tokens(torch.bfloat16))
    storages = []
    for pair in ((k, v), (k.contiguous(), v.contiguous())):
        storage = [*empty_storage(PAGES, HEADS, TOKENS, DIM), *empty_storage(PAGES, HEADS, TOKENS, DIM)]
        torch_fp4kv.append(*storage, *pair, SLOTS, 0.01, 0.02)
        storages.append(storage)
    for strided, plain in zip(*storages):
        assert torch.equal(strided, plain)


def test_padding_slot_of_a_captured_graph_is_skipped_exact_copy_included() -> None:
    k, v = new_tokens()
    slots = torch.tensor([[-1, 5, -1, -1], [-1, -1, 18, -1]])
    exact_slots = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    storage = [*empty_storage(PAGES, HEADS, TOKENS, DIM), *empty_storage(PAGES, HEADS, TOKENS, DIM)]
    exact = [torch.full((2, HEADS, 5, DIM), torch.nan) for _ in range(2)]
    before = [s.clone() for s in storage]
    torch_fp4kv.append(
        *storage,
        *(k, v, slots, 0.01, 0.02),
        k_exact=exact[0],
        v_exact=exact[1],
        exact_slots=exact_slots,
        skip_negative=True,
    )
    rows = (*torch_fp4kv.quantize(k, 0.01), *torch_fp4kv.quantize(v, 0.02))
    kept = [torch.stack([r[0, :, 1], r[1, :, 2]])[:, :, None] for r in rows]
    for s, old, row in zip(storage, before, kept):
        check_written(s, old, row, torch.tensor([[5], [18]]))
    for e, x in zip(exact, (k, v)):
        assert torch.equal(e[0, :, 1], x[0, :, 1])
        assert torch.equal(e[1, :, 2], x[1, :, 2])
        assert int(e.isfinite().all(-1).sum()) == 2 * HEADS


def test_all_padding_writes_nothing() -> None:
    k, v = new_tokens()
    storage = [*empty_storage(PAGES, HEADS, TOKENS, DIM), *empty_storage(PAGES, HEADS, TOKENS, DIM)]
    before = [s.clone() for s in storage]
    torch_fp4kv.append(*storage, k, v, torch.full_like(SLOTS, -1), 0.01, 0.02, skip_negative=True)
    assert all(torch.equal(s, old) for s, old in zip(storage, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bias_then_transform_then_quantise_and_exact_copies_stay_raw(dtype: torch.dtype) -> None:
    k, v = new_tokens(dtype)
    generator = torch.Generator().manual_seed(1)
    k_bias, v_bias = torch.randn(HEADS, DIM, generator=generator), torch.randn(HEADS, DIM, generator=generator)
    options = equalized(HEADS, DIM)
    transform = {name: options[name] for name in ("k_factors", "k_order", "k_rotation")}
    for bias in (k_bias, None):
        storage = [*empty_storage(PAGES, HEADS, TOKENS, DIM), *empty_storage(PAGES, HEADS, TOKENS, DIM)]
        before = [s.clone() for s in storage]
        exact = [torch.full((3, HEADS, 5, DIM), torch.nan, dtype=dtype) for _ in range(2)]
        torch_fp4kv.append(
            *storage,
            *(k, v, SLOTS, torch.full((HEADS,), 0.1), torch.tensor([0.01, 0.1, 1 / 3])),
            k_bias=bias,
            v_bias=v_bias,
            **transform,
            k_exact=exact[0],
            v_exact=exact[1],
            exact_slots=torch.tensor([[3, 0, 2, 1], [0, 1, 2, 4]]),
            scale_rule="4over6",
        )
        shifted = k.float() if bias is None else k.float() - bias[:, None]
        equal = shifted * options["k_factors"][:, None]
        ordered = torch.stack([equal[:, h, :, order.long()] for h, order in enumerate(options["k_order"])], 1)
        rows = (
            *torch_fp4kv.quantize(rotate(ordered, 16), 0.1, scale_rule="4over6"),
            *torch_fp4kv.quantize(v.float() - v_bias[:, None], torch.tensor([0.01, 0.1, 1 / 3]), scale_rule="4over6"),
        )
        for s, old, row in zip(storage, before, rows):
            check_written(s, old, row, SLOTS)
        assert torch.equal(exact[0][0, :, [3, 0, 2, 1]], k[0])
        assert torch.equal(exact[1][1, :, [0, 1, 2, 4]], v[1])
        assert exact[0][2].isnan().all()
        assert exact[0][0, :, 4].isnan().all()


@pytest.mark.parametrize("v_format", ["nvfp4", "block-fp4"])
@pytest.mark.parametrize("order", ["page after page", "single tokens"])
def test_4token_scales_land_where_the_whole_page_conversion_puts_them(v_format: str, order: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, HEADS, 2 * TOKENS, 128, generator=generator) * torch.logspace(-1, 1, 128)
    storages = {}
    for name in ("linear", "4token"):
        storage = [
            *empty_storage(2, HEADS, TOKENS, 128, v_format),
            *empty_storage(2, HEADS, TOKENS, 128, v_format),
        ]
        positions = torch.randperm(2 * TOKENS, generator=torch.Generator().manual_seed(3))
        for part in positions.split(1 if order == "single tokens" else 2 * TOKENS):
            torch_fp4kv.append(
                *storage,
                *(x[:, :, part], x[:, :, part], part[None], 0.1, 0.1),
                k_format=v_format,
                v_format=v_format,
                v_scale_layout=name,
            )
        storages[name] = storage
    for linear, other in zip(storages["linear"][:3], storages["4token"][:3]):
        assert torch.equal(linear, other)
    assert torch.equal(storages["4token"][3], layout.v_scales_to_4token(storages["linear"][3]))
    assert storages["linear"][3].unique().numel() > 8


def test_each_of_sixteen_scales_of_a_token_is_stored() -> None:
    x = torch.arange(1, 17.0).repeat_interleave(16).expand(1, 2, 3, 256) * 6
    storage = [*empty_storage(1, 2, 8, 256), *empty_storage(1, 2, 8, 256)]
    torch_fp4kv.append(*storage, x, x, torch.tensor([[0, 3, 7]]), 1.0, 1.0)
    for scales in (storage[1], storage[3]):
        assert torch.equal(e4m3.decode(scales[0, 1, [0, 3, 7]]), torch.arange(1, 17.0).expand(3, 16))


@pytest.mark.parametrize(
    ("batch", "tokens", "capacity"), [(0, 4, 16), (2, 0, 16), (2, 0, 0)], ids=["no batch", "no tokens", "no capacity"]
)
def test_nothing_to_write(batch: int, tokens: int, capacity: int) -> None:
    storage = [*empty_storage(2, HEADS, capacity, DIM), *empty_storage(2, HEADS, capacity, DIM)]
    before = [s.clone() for s in storage]
    x = torch.zeros(batch, HEADS, tokens, DIM)
    torch_fp4kv.append(*storage, x, x, torch.zeros(batch, tokens, dtype=torch.int64), 0.01, 0.01)
    assert all(torch.equal(s, old) for s, old in zip(storage, before))


def test_slot_beyond_two_to_the_31_elements() -> None:
    tokens = 2**27 + 16
    k_data, v_data = (torch.empty(1, 1, tokens, 16, dtype=torch.uint8) for _ in range(2))
    x = torch.ones(1, 1, 1, 16)
    torch_fp4kv.append(
        k_data, None, v_data, None, x, x * 2, torch.tensor([[tokens - 1]]), 1.0, 1.0, k_format="fp8", v_format="fp8"
    )
    assert k_data.view(-1)[-16:].tolist() == [0x38] * 16
    assert v_data.view(-1)[-16:].tolist() == [0x40] * 16


def append(*arguments: Any) -> None:
    torch_fp4kv.append(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled_writes_what_eager_writes(dtype: torch.dtype) -> None:
    storage = [*empty_storage(PAGES, HEADS, TOKENS, DIM), *empty_storage(PAGES, HEADS, TOKENS, DIM)]
    compare(append, *storage, *new_tokens(dtype), SLOTS, torch.tensor(0.01), torch.tensor(1 / 3))


def test_compiled_write_is_in_place_without_a_buffer_of_the_cache_s_size() -> None:
    storage = [*empty_storage(PAGES, HEADS, 1024, DIM), *empty_storage(PAGES, HEADS, 1024, DIM)]
    arguments = [*storage, *new_tokens(), SLOTS, torch.tensor(0.01), torch.tensor(0.02)]
    code = generated(append, *arguments)
    cache_size = min(s.numel() for s in storage)
    assert all(size < cache_size for size in code.allocations)
    assert "clone" not in code.calls


def test_compiled_write_into_layers_of_one_buffer_copies_nothing() -> None:
    layers = [[torch.zeros(4, *s.shape, dtype=s.dtype) for s in empty_storage(2, HEADS, 1024, DIM)] for _ in range(2)]

    def step(k: Tensor, v: Tensor, slots: Tensor, *layers: Tensor) -> None:
        for i in range(4):
            k_words, k_scales, v_words, v_scales = (buffer[i] for buffer in layers)
            torch_fp4kv.append(k_words, k_scales, v_words, v_scales, k * (i + 1), v, slots, G, G)

    G = torch.tensor(0.01)
    flat = [*layers[0], *layers[1]]
    k, v = new_tokens()
    compare(step, k, v, SLOTS, *flat)
    code = generated(step, k, v, SLOTS, *flat)
    assert all(size < flat[1][0].numel() for size in code.allocations)


def test_compiled_step_reads_what_it_wrote() -> None:
    storage = [*empty_storage(2, HEADS, 8, DIM), *empty_storage(2, HEADS, 8, DIM)]
    k, v = new_tokens()
    slots = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11]])

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *storage: Tensor) -> Tensor:
        torch_fp4kv.append(*storage, k, v, slots, 0.01, 0.02)
        return torch_fp4kv.attention(q, *storage, 0.01, 0.02, lengths)

    # Lowered attention adds up its four float32 products of values up to about 4 in another order.
    lengths = torch.tensor([4, 4], dtype=torch.int32)
    compare(step, torch.randn(2, 6, 1, DIM), k, v, lengths, *storage, tolerance=4 * 4 * 2**-23)
