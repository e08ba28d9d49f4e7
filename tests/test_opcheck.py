"""`torch.library.opcheck`, all four utilities, for each op over contiguous, strided, size-1 and empty inputs."""

from __future__ import annotations

from typing import Any

import calls
import pytest
import torch
from torch import Tensor

VIEWS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], dim=2)[:, :, ::2],
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:, :1].expand_as(x),
}
SIZES = {"plain": (2, 3, 5, 32), "size one": (1, 1, 1, 16), "no batch": (0, 3, 5, 32), "no tokens": (2, 3, 0, 32)}
CASES = [("plain", view) for view in VIEWS] + [(size, "contiguous") for size in SIZES if size != "plain"]
cases = pytest.mark.parametrize(("size", "view"), CASES, ids=[f"{size}, {view}" for size, view in CASES])


def opcheck(op: Any, *args: Any, **kwargs: Any) -> None:
    result = torch.library.opcheck(op, args, kwargs)
    assert set(result.values()) == {"SUCCESS"}
    assert len(result) == 4


def data(size: str, view: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return VIEWS[view](torch.randn(SIZES[size], generator=torch.Generator().manual_seed(0)).to(dtype))


@cases
def test_quantize(size: str, view: str) -> None:
    x = data(size, view)
    opcheck(torch.ops.fp4kv.quantize.default, x, torch.tensor(0.01))


def test_quantize_with_all_arguments() -> None:
    x = data("plain", "transposed", torch.float32)
    scale, bias = torch.tensor([0.01, 0.02, 0.03]), torch.randn(3, 32)
    opcheck(torch.ops.fp4kv.quantize.default, x, scale, bias=bias, scale_rule="mse")


@cases
def test_dequantize(size: str, view: str) -> None:
    words, scales = torch.ops.fp4kv.quantize(data(size, "contiguous"), torch.tensor(0.01))
    opcheck(
        torch.ops.fp4kv.dequantize.default,
        VIEWS[view](words),
        VIEWS[view](scales),
        torch.tensor(0.01),
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("storage_format", ["fp8", "block-fp4"])
def test_dequantize_other_formats(storage_format: str) -> None:
    stored, scales = calls.empty_storage(2, 3, 4, 64, storage_format)
    scales = None if scales is None else torch.arange(100, 196, dtype=torch.uint8).view(scales.shape)
    layout = "linear" if scales is None else "4token"
    opcheck(
        torch.ops.fp4kv.dequantize.default,
        stored & 0x7654321076543210 if scales is not None else stored & 0x77,
        scales,
        torch.tensor([0.1, 0.2, 0.3]),
        bias=torch.randn(64),
        dtype=torch.float32,
        format=storage_format,
        scale_layout=layout,
    )


def append_arguments(k: Tensor, **formats: str) -> list[Any]:
    batch, heads, num_tokens, head_dim = k.shape
    storage = [
        *calls.empty_storage(batch, heads, 8, head_dim, formats.get("k_format", "nvfp4"), k.dtype),
        *calls.empty_storage(batch, heads, 8, head_dim, formats.get("v_format", "nvfp4"), k.dtype),
    ]
    storage = [s if s is None else torch.zeros_like(s) for s in storage]
    slots = torch.arange(batch)[:, None] * 8 + torch.arange(num_tokens)
    return [*storage, k, k * 2, slots, torch.tensor(0.01), torch.full((heads,), 0.02)]


@cases
def test_append(size: str, view: str) -> None:
    opcheck(torch.ops.fp4kv.append.default, *append_arguments(data(size, view)))


@pytest.mark.parametrize(
    "formats",
    [
        {"k_format": "fp8", "v_format": "block-fp4"},
        {"k_format": "exact", "v_format": "nvfp4", "scale_rule": "4over6"},
    ],
    ids=["fp8 and block-fp4", "exact and nvfp4"],
)
def test_append_with_all_arguments(formats: dict[str, str]) -> None:
    k = data("plain", "transposed", torch.float32)
    exact = torch.zeros(3, 3, 7, 32)
    opcheck(
        torch.ops.fp4kv.append.default,
        *append_arguments(k, **formats),
        k_bias=torch.randn(3, 32),
        v_bias=torch.randn(3, 32),
        k_transform=torch.randn(3, 32, 32),
        k_exact=exact,
        v_exact=exact.clone(),
        exact_slots=torch.arange(5).expand(2, 5),
        skip_negative=True,
        **formats,
    )


def test_append_with_a_rotation() -> None:
    k = data("plain", "transposed", torch.float32)
    opcheck(torch.ops.fp4kv.append.default, *append_arguments(k), k_bias=torch.randn(3, 32), k_rotation=32)


def attention_arguments(**options: Any) -> tuple[list[Any], dict[str, Any]]:
    call = calls.make(head_dim=32, **options)
    fields = {name: getattr(call, name) for name in call.__slots__ if name != "return_lse"}
    required = ("q", "k_data", "k_scales", "v_data", "v_scales", "k_global", "v_global", "lengths")
    return [fields.pop(name) for name in required], fields


ATTENTION = {
    "decode": {"lengths": (9, 5)},
    "prefill of ragged rows": {"lengths": (9, 5), "num_queries": 4, "q_lengths": (4, 2), "starts": (1, 0)},
    "block table": {"lengths": (9, 5), "page_size": 4},
    "exact overlay": {"lengths": (20, 17), "num_queries": 3, "new": True, "ring": 4, "num_sink_tokens": 2},
    "other formats": {"k_format": "fp8", "v_format": "block-fp4", "out_dtype": torch.float16, "window": 4},
    "size one": {"lengths": (1,), "heads": 1, "kv_heads": 1},
    "no batch": {"lengths": ()},
    "no queries": {"num_queries": 0},
    "nothing stored": {"lengths": (0, 0), "capacity": 0},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
@pytest.mark.parametrize("op", ["attention", "attention_with_lse"])
def test_attention(op: str, options: dict[str, Any]) -> None:
    args, kwargs = attention_arguments(**options)
    args[0] = args[0].nan_to_num(1.0)
    opcheck(getattr(torch.ops.fp4kv, op).default, *args, **kwargs)


@pytest.mark.parametrize("view", VIEWS)
def test_attention_of_strided_queries_and_masks(view: str) -> None:
    args, kwargs = attention_arguments(lengths=(9, 5), num_queries=4)
    args[0] = VIEWS[view](args[0])
    kwargs["mask"] = torch.rand(2, 1, 9, 4).transpose(2, 3) > 0.5
    kwargs["sink_logits"] = torch.randn(8)[::2]
    kwargs["q_stored"] = VIEWS[view](torch.randn(args[0].shape))
    kwargs["k_rotation"] = 16
    opcheck(torch.ops.fp4kv.attention_with_lse.default, *args, **kwargs)
