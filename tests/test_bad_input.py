"""Bad input is a ValueError or TypeError at the public call that says what was expected and what came; nothing is
written before it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from calls import empty_storage, make, run
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops.call import AttentionCall

X = torch.ones(2, 3, 4, 32)
META = torch.device("meta")

BAD_SCALES = {
    "zero": (0.0, ValueError, "positive and finite, got 0.0"),
    "negative": (-0.5, ValueError, "positive and finite, got -0.5"),
    "nan": (float("nan"), ValueError, "positive and finite, got nan"),
    "infinite": (float("inf"), ValueError, "positive and finite, got inf"),
    "subnormal": (1e-40, ValueError, "must lie in [2^-100, 2^100]"),
    "too large": (1e31, ValueError, "must lie in [2^-100, 2^100]"),
    "zero in a tensor": (torch.tensor([0.1, 0.0, 0.1]), ValueError, "positive and finite, got 0.0"),
    "nan in a tensor": (torch.tensor([0.1, torch.nan, 0.1]), ValueError, "positive and finite, got nan"),
    "bfloat16": (torch.tensor(0.1, dtype=torch.bfloat16), TypeError, "must be torch.float32, got torch.bfloat16"),
    "float16": (torch.tensor(0.1).half(), TypeError, "must be torch.float32, got torch.float16"),
    "float64": (torch.tensor(0.1).double(), TypeError, "must be torch.float32, got torch.float64"),
    "integer tensor": (torch.tensor(1), TypeError, "must be torch.float32, got torch.int64"),
    "another device": (torch.ones((), device=META), ValueError, "on meta, the data on cpu"),
    "wrong number of heads": (torch.ones(5), ValueError, "got [5]"),
    "wrong shape": (torch.ones(3, 3), ValueError, "got [3, 3]"),
    "complex": (1j, TypeError, "complex"),
    "none": (None, TypeError, "None"),
}
bad_scales = pytest.mark.parametrize(("scale", "error", "message"), BAD_SCALES.values(), ids=BAD_SCALES.keys())


@bad_scales
def test_global_scale(scale: Any, error: type[Exception], message: str) -> None:
    words, scales = torch_fp4kv.quantize(X, 0.1)
    with pytest.raises(error, match=re.escape(message)):
        torch_fp4kv.quantize(X, scale)
    with pytest.raises(error, match=re.escape(message)):
        torch_fp4kv.dequantize(words, scales, scale)
    for name in ("k_global", "v_global"):
        refused_append(error, message, **{name: scale})
        call = make(lengths=(9,), heads=3, kv_heads=3)
        with pytest.raises(error, match=re.escape(message)):
            run(call, **{name: scale})


BAD_X = {
    "head size 72": (torch.ones(2, 72), ValueError, "x: head size 72 is not a multiple of 16"),
    "head size 8": (torch.ones(2, 8), ValueError, "x: head size 8 is not"),
    "head size 0": (torch.ones(2, 0), ValueError, "x: head size 0 is not"),
    "no dimension": (torch.tensor(1.0), ValueError, "at least one dimension"),
    "integer": (torch.ones(2, 16, dtype=torch.int32), TypeError, "float32, float16 or bfloat16, got torch.int32"),
    "bool": (torch.ones(2, 16, dtype=torch.bool), TypeError, "got torch.bool"),
    "complex": (torch.ones(2, 16, dtype=torch.complex64), TypeError, "got torch.complex64"),
    "float64": (torch.ones(2, 16, dtype=torch.float64), TypeError, "got torch.float64"),
    "float8": (torch.ones(2, 16).to(torch.float8_e4m3fn), TypeError, "got torch.float8_e4m3fn"),
}


@pytest.mark.parametrize(("x", "error", "message"), BAD_X.values(), ids=BAD_X.keys())
def test_quantize_input(x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        torch_fp4kv.quantize(x, 0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale_rule": "amin"}, ValueError, "unknown scale_rule 'amin'; known: amax, 4over6, mse"),
        ({"bias": torch.zeros(16)}, ValueError, "bias must have shape [32] or [3, 32], got [16]"),
        ({"bias": torch.zeros(4, 32)}, ValueError, "got [4, 32]"),
        ({"bias": torch.zeros(32).half()}, TypeError, "bias must be torch.float32, got torch.float16"),
        ({"bias": torch.zeros(32, device=META)}, ValueError, "bias is on meta"),
    ],
    ids=["scale rule", "bias size", "bias heads", "bias dtype", "bias device"],
)
def test_quantize_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        torch_fp4kv.quantize(X, 0.1, **options)
    if "bias" in options:
        with pytest.raises(error, match=re.escape(message)):
            torch_fp4kv.dequantize(*torch_fp4kv.quantize(X, 0.1), 0.1, **options)


WORDS, SCALES = torch.zeros(2, 3, 6, 2, dtype=torch.int64), torch.zeros(2, 3, 6, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("words", "scales", "options", "error", "message"),
    [
        (WORDS.int(), SCALES, {}, TypeError, "words must be torch.int64, got torch.int32"),
        (WORDS, SCALES.int(), {}, TypeError, "scales must be torch.uint8, got torch.int32"),
        (WORDS, SCALES[:1], {}, ValueError, "scales must have shape [2, 3, 6, 2], got [1, 3, 6, 2]"),
        (WORDS, SCALES.to(META), {}, ValueError, "scales is on meta"),
        (WORDS, None, {}, ValueError, "format 'nvfp4' needs block scales"),
        (WORDS, SCALES, {"format": "int4"}, ValueError, "unknown format 'int4'"),
        (WORDS, SCALES, {"format": "fp8"}, TypeError, "words must be torch.uint8, got torch.int64"),
        (SCALES, SCALES, {"format": "fp8"}, ValueError, "pass scales=None"),
        (SCALES, None, {"format": "fp8"}, ValueError, "head size 2 is not a multiple of 16"),
        (WORDS, SCALES, {"dtype": torch.int8}, TypeError, "got torch.int8"),
        (WORDS, SCALES, {"scale_layout": "8token"}, ValueError, "unknown scale layout '8token'"),
        (WORDS, SCALES, {"scale_layout": "4token"}, ValueError, "got 6 tokens with 2 scales"),
        (WORDS[0, 0, 0, 0], SCALES[0, 0, 0, 0], {}, ValueError, "at least one dimension"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dequantize_input(
    words: Tensor, scales: Tensor | None, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        torch_fp4kv.dequantize(words, scales, 0.1, **options)


def test_interchange_form_input() -> None:
    with pytest.raises(TypeError, match="packed must be uint8"):
        torch_fp4kv.from_packed(WORDS)
    with pytest.raises(ValueError, match="whole blocks of 8 bytes"):
        torch_fp4kv.from_packed(torch.zeros(3, 12, dtype=torch.uint8))
    with pytest.raises(TypeError, match="words must be int64"):
        torch_fp4kv.to_packed(SCALES)
    with pytest.raises(ValueError, match="contiguous in the last dimension"):
        torch_fp4kv.to_packed(WORDS.transpose(2, 3))


def append_arguments(**changes: Any) -> dict[str, Any]:
    names = ("k_data", "k_scales", "v_data", "v_scales")
    arguments = dict(zip(names, (*empty_storage(2, 3, 8, 32), *empty_storage(2, 3, 8, 32))))
    slots = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11]])
    arguments |= {"k": X, "v": X, "slots": slots, "k_global": 0.1, "v_global": 0.1}
    return arguments | changes


def refused_append(error: type[Exception], message: str, **changes: Any) -> None:
    arguments = append_arguments(**changes)
    tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor) and t.device.type == "cpu"}
    before = {name: t.clone() for name, t in tensors.items()}
    with pytest.raises(error, match=re.escape(message)):
        torch_fp4kv.append(**arguments)
    for name, old in before.items():
        assert torch.equal(as_bytes(tensors[name]), as_bytes(old)), f"{name} was written"


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


def exact(slots: int = 5, **changes: Any) -> dict[str, Any]:
    copies = {
        "k_exact": torch.zeros(2, 3, slots, 32),
        "v_exact": torch.zeros(2, 3, slots, 32),
        "exact_slots": torch.arange(4).expand(2, 4),
    }
    return copies | changes


def storage(storage_format: str = "nvfp4", heads: int = 3, tokens: int = 8, head_dim: int = 32) -> dict[str, Any]:
    k_data, k_scales = empty_storage(2, heads, tokens, head_dim, storage_format)
    v_data, v_scales = empty_storage(2, heads, tokens, head_dim)
    return {"k_data": k_data, "k_scales": k_scales, "v_data": v_data, "v_scales": v_scales}


def at(slot: int, row: int = 1) -> Tensor:
    slots = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11]])
    slots[row, 2] = slot
    return slots


BAD_APPEND: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "slot at the capacity": (
        {"slots": at(16)},
        ValueError,
        "slots must lie in [0, 16), the cache's capacity, got [0, 16]",
    ),
    "slot far beyond": ({"slots": at(2**40)}, ValueError, "slots must lie in [0, 16)"),
    "negative slot": ({"slots": at(-1)}, ValueError, "got [-1, 11]"),
    "slot beyond while skipping": ({"slots": at(16), "skip_negative": True}, ValueError, "slots must lie in [0, 16)"),
    "slots of int32": ({"slots": at(4).int()}, TypeError, "slots must be torch.int64, got torch.int32"),
    "slots of another shape": ({"slots": at(4)[:, :3]}, ValueError, "slots must have shape [2, 4], got [2, 3]"),
    "slots elsewhere": ({"slots": at(4).to(META)}, ValueError, "slots is on meta, the data on cpu"),
    "k of head size 72": ({"k": torch.ones(2, 3, 4, 72)}, ValueError, "k: head size 72 is not a multiple of 16"),
    "v of head size 40": ({"v": torch.ones(2, 3, 4, 40)}, ValueError, "v: head size 40 is not a multiple of 16"),
    "k of three dimensions": ({"k": X[0]}, ValueError, "k must be [B, H, L, D], got shape [3, 4, 32]"),
    "integer k": ({"k": X.int(), "v": X.int()}, TypeError, "k must be float32, float16 or bfloat16, got torch.int32"),
    "complex v": ({"v": X.to(torch.complex64)}, TypeError, "v must be float32, float16 or bfloat16"),
    "v shorter than k": ({"v": X[:, :, :3]}, ValueError, "k and v must agree in batch, heads, tokens"),
    "v of another dtype": ({"v": X.half()}, ValueError, "k and v must agree"),
    "k and v elsewhere": ({"k": X.to(META), "v": X.to(META)}, ValueError, "k_data is on cpu, the data on meta"),
    "heads differ": (storage(heads=2), ValueError, "k_data has 2 KV heads, k has 3"),
    "head size differs": (storage(head_dim=64), ValueError, "k_data holds head size 64 as 'nvfp4', k has 32"),
    "k and v pages differ": (
        {name: t for name, t in storage(tokens=4).items() if name.startswith("v_")},
        ValueError,
        "k_data and v_data differ in pages, heads or tokens",
    ),
    "no scales": ({"k_scales": None}, ValueError, "k_scales is required for format 'nvfp4'"),
    "scales too many": (
        {**storage("fp8"), "k_format": "fp8", "k_scales": SCALES},
        ValueError,
        "must be None for format",
    ),
    "scales as float8": (
        {"v_scales": torch.zeros(2, 3, 8, 2, dtype=torch.uint8).view(torch.float8_e4m3fn)},
        TypeError,
        "v_scales must be torch.uint8, got torch.float8_e4m3fn",
    ),
    "scales of another shape": (
        {"v_scales": torch.zeros(2, 3, 8, 4, dtype=torch.uint8)},
        ValueError,
        "v_scales must have shape [2, 3, 8, 2], got [2, 3, 8, 4]",
    ),
    "packed bytes as data": (
        {"k_data": torch.zeros(2, 3, 8, 16, dtype=torch.uint8)},
        TypeError,
        "k_data must be torch.int64, got torch.uint8",
    ),
    "every second token of a cache": (
        {"k_data": torch.zeros(2, 3, 16, 2, dtype=torch.int64)[:, :, ::2]},
        ValueError,
        "k_data must be contiguous, got strides",
    ),
    "narrowed scales": (
        {"v_scales": torch.zeros(2, 3, 8, 4, dtype=torch.uint8)[..., :2]},
        ValueError,
        "v_scales must be contiguous, got strides",
    ),
    "exact storage of another dtype": (
        {**storage("exact"), "k_format": "exact", "k": X.half(), "v": X.half()},
        TypeError,
        "k_data must be torch.float16, got torch.float32",
    ),
    "format": ({"k_format": "int4"}, ValueError, "unknown k_format 'int4'; known: nvfp4, fp8, block-fp4, exact"),
    "scale rule": ({"scale_rule": "max"}, ValueError, "unknown scale_rule 'max'"),
    "scale layout": ({"v_scale_layout": "swizzled"}, ValueError, "unknown scale layout 'swizzled'"),
    "4-token layout of head size 32": ({"v_scale_layout": "4token"}, ValueError, "got 8 tokens with 2 scales"),
    "backend": (
        {"backend": "cudnn"},
        ValueError,
        "unknown backend 'cudnn' for append; known: auto, flashinfer, triton, torch",
    ),
    "backend that cannot serve": (
        {"backend": "triton"},
        ValueError,
        "Triton kernels run on GPUs, the tensors are on cpu",
    ),
    "bias of one head": ({"k_bias": torch.zeros(32)}, ValueError, "k_bias must have shape [3, 32], got [32]"),
    "bias dtype": ({"v_bias": torch.zeros(3, 32).half()}, TypeError, "v_bias must be torch.float32"),
    "bias elsewhere": ({"v_bias": torch.zeros(3, 32, device=META)}, ValueError, "v_bias is on meta"),
    "rotation": (
        {"k_rotation": 48},
        ValueError,
        "k_rotation must be 0 or a power of two that divides the head size 32",
    ),
    "factors of one head": ({"k_factors": torch.ones(32)}, ValueError, "k_factors must have shape [3, 32], got [32]"),
    "factors of 0": ({"k_factors": torch.zeros(3, 32)}, ValueError, "k_factors must be positive and finite"),
    "order dtype": ({"k_order": torch.arange(32).expand(3, -1)}, TypeError, "k_order must be torch.int32"),
    "order shape": ({"k_order": torch.arange(32).int()}, ValueError, "k_order must have shape [3, 32], got [32]"),
    "order elsewhere": ({"k_order": torch.zeros(3, 32, device=META).int()}, ValueError, "k_order is on meta"),
    "no order": (
        {"k_order": torch.arange(1, 33).int().expand(3, -1)},
        ValueError,
        "k_order must hold each channel of a head once",
    ),
    "exact copies without slots": (exact(exact_slots=None), ValueError, "k_exact, v_exact and exact_slots go together"),
    "exact slot beyond": (
        exact(slots=3),
        ValueError,
        "exact_slots must lie in [0, 3), the cache's capacity, got [0, 3]",
    ),
    "exact slot negative": (exact(exact_slots=torch.full((2, 4), -1)), ValueError, "exact_slots must lie in [0, 5)"),
    "exact copies of another dtype": (exact(k_exact=torch.zeros(2, 3, 5, 32).half()), TypeError, "k_exact must be"),
    "exact copies of fewer rows": (
        exact(v_exact=torch.zeros(1, 3, 5, 32)),
        ValueError,
        "v_exact must be [≥2, 3, E, 32]",
    ),
    "exact copies with gaps": (
        exact(v_exact=torch.zeros(2, 3, 5, 64)[..., ::2]),
        ValueError,
        "v_exact must be contiguous in the last dimension",
    ),
    "exact copies of two sizes": (exact(v_exact=torch.zeros(2, 3, 9, 32)), ValueError, "k_exact and v_exact differ"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_APPEND.values(), ids=BAD_APPEND.keys())
def test_append_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refused_append(error, message, **changes)


def rows(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call_with(**changes: Any) -> tuple[AttentionCall, dict[str, Any]]:
    options = {name: changes.pop(name) for name in ("page_size", "new", "ring") if name in changes}
    call = make(lengths=(9, 5), num_queries=2, head_dim=32, kv_heads=2, heads=4, capacity=16, **options)
    return call, {name: change(call) if callable(change) else change for name, change in changes.items()}


BAD_ATTENTION: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q of three dimensions": ({"q": lambda c: c.q[0]}, ValueError, "q must be [B, Hq, L, D], got shape [4, 2, 32]"),
    "integer q": ({"q": lambda c: c.q.int()}, TypeError, "q must be float32, float16 or bfloat16, got torch.int32"),
    "q of head size 40": ({"q": torch.zeros(2, 4, 2, 40)}, ValueError, "q: head size 40 is not a multiple of 16"),
    "q of another head size": ({"q": torch.zeros(2, 4, 2, 48)}, ValueError, "q has head size 48, k_data holds 32"),
    "heads that do not divide": ({"q": torch.zeros(2, 3, 2, 32)}, ValueError, "3 query heads cannot share 2 KV heads"),
    "more rows than pages": (
        {"q": torch.zeros(3, 4, 2, 32), "lengths": rows(1, 2, 3)},
        ValueError,
        "without block_table each row needs a page: 3 rows, 2 pages",
    ),
    "lengths of int64": ({"lengths": torch.tensor([9, 5])}, TypeError, "lengths must be torch.int32, got torch.int64"),
    "lengths of another shape": ({"lengths": rows(9)}, ValueError, "lengths must have shape [2], got [1]"),
    "lengths elsewhere": ({"lengths": rows(9, 5).to(META)}, ValueError, "lengths is on meta, the data on cpu"),
    "negative length": ({"lengths": rows(9, -1)}, ValueError, "row 1: lengths and starts must not be negative"),
    "negative start": ({"starts": rows(-2, 0)}, ValueError, "row 0: lengths and starts must not be negative"),
    "too many queries": (
        {"q_lengths": rows(2, 3)},
        ValueError,
        "row 1: lengths and starts must not be negative and q_lengths lie in [0, 2]",
    ),
    "length beyond the pages": (
        {"page_size": 4, "lengths": rows(9, 17)},
        ValueError,
        "row 1: length 17 exceeds the 16 tokens",
    ),
    "page that does not exist": (
        {"page_size": 4, "block_table": torch.full((2, 4), 10, dtype=torch.int32)},
        ValueError,
        "row 0: block_table must name pages in [0, 10), got [10, 10, 10]",
    ),
    "block table of int64": (
        {"page_size": 4, "block_table": lambda c: c.block_table.long()},
        TypeError,
        "block_table must be torch.int32, got torch.int64",
    ),
    "block table of other rows": (
        {"page_size": 4, "block_table": lambda c: c.block_table[:1]},
        ValueError,
        "block_table must be [2, max_pages], got shape [1, 4]",
    ),
    "strided storage": (
        {"k_data": torch.zeros(2, 2, 32, 2, dtype=torch.int64)[:, :, ::2]},
        ValueError,
        "k_data must be contiguous",
    ),
    "v storage of other pages": (
        {"v_data": torch.zeros(2, 2, 8, 2, dtype=torch.int64), "v_scales": torch.zeros(2, 2, 8, 2, dtype=torch.uint8)},
        ValueError,
        "k_data and v_data differ in pages, heads or tokens",
    ),
    "format that storage is not in": ({"k_format": "fp8"}, TypeError, "k_data must be torch.uint8, got torch.int64"),
    "unknown format": ({"v_format": "int4"}, ValueError, "unknown v_format 'int4'"),
    "4-token layout of head size 32": ({"v_scale_layout": "4token"}, ValueError, "got 16 tokens with 2 scales"),
    "k_new alone": ({"new": True, "v_new": None}, ValueError, "k_new and v_new go together"),
    "k_new of another length": (
        {"new": True, "k_new": lambda c: c.k_new[:, :, :1]},
        ValueError,
        "k_new must have shape [2, 2, 2, 32], got [2, 2, 1, 32]",
    ),
    "integer v_new": (
        {"new": True, "v_new": lambda c: torch.zeros(c.v_new.shape).int()},
        TypeError,
        "v_new must be float32",
    ),
    "v_new elsewhere": ({"new": True, "v_new": lambda c: c.v_new.to(META)}, ValueError, "v_new is on meta"),
    "k_exact alone": ({"ring": 4, "v_exact": None}, ValueError, "k_exact and v_exact go together"),
    "k_exact with gaps": (
        {"ring": 4, "k_exact": lambda c: c.k_exact.repeat_interleave(2, -1)[..., ::2]},
        ValueError,
        "k_exact must be contiguous in the last dimension",
    ),
    "more sinks than slots": ({"ring": 4, "num_sink_tokens": 5}, ValueError, "k_exact must be [≥2, 2, >5, 32]"),
    "negative sinks": ({"num_sink_tokens": -1}, ValueError, "must not be negative, got 0.0 and -1"),
    "exact tokens that were overwritten": (
        {"ring": 4, "exact_from": rows(4, 1)},
        ValueError,
        "row 0: exact_from must be at least 5, the oldest of the 4 tokens that the exact slots hold, got 4",
    ),
    "exact_from elsewhere": ({"ring": 4, "exact_from": rows(5, 1).to(META)}, ValueError, "exact_from is on meta"),
    "rotation": (
        {"k_rotation": 64},
        ValueError,
        "k_rotation must be 0 or a power of two that divides the head size 32",
    ),
    "k_bias of query heads": (
        {"k_bias": torch.zeros(4, 32)},
        ValueError,
        "k_bias must have shape [2, 32], got [4, 32]",
    ),
    "k_factors": ({"k_factors": torch.full((2, 32), torch.inf)}, ValueError, "k_factors must be positive and finite"),
    "k_order": ({"k_order": torch.zeros(2, 32).int()}, ValueError, "k_order must hold each channel of a head once"),
    "v_bias": ({"v_bias": torch.zeros(32)}, ValueError, "v_bias must have shape [2, 32], got [32]"),
    "v_bias dtype": ({"v_bias": torch.zeros(2, 32).half()}, TypeError, "v_bias must be torch.float32"),
    "sink logits": ({"sink_logits": torch.zeros(2)}, ValueError, "sink_logits must have shape [4], got [2]"),
    "mask of another shape": (
        {"mask": torch.ones(3, 2, 9, dtype=torch.bool)},
        ValueError,
        "mask must broadcast to [2, 4, 2] + [M], got shape [3, 2, 9]",
    ),
    "mask of five dimensions": ({"mask": torch.zeros(1, 1, 1, 1, 9)}, ValueError, "mask must broadcast"),
    "mask without columns": ({"mask": torch.zeros(2, 0)}, ValueError, "mask must broadcast"),
    "integer mask": ({"mask": torch.ones(2, 9, dtype=torch.int64)}, TypeError, "mask must be bool (True = visible) or"),
    "mask elsewhere": ({"mask": torch.zeros(2, 9, device=META)}, ValueError, "mask is on meta"),
    "nan scale": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "infinite soft-cap": ({"softcap": float("inf")}, ValueError, "softcap must be finite, got inf"),
    "negative soft-cap": ({"softcap": -1.0}, ValueError, "must not be negative, got -1.0 and 0"),
    "integer result": ({"out_dtype": torch.int8}, TypeError, "out_dtype must be float32, float16 or bfloat16"),
    "backend": ({"backend": "flash"}, ValueError, "unknown backend 'flash' for attention; known: auto, flashinfer-"),
    "backend that cannot serve": (
        {"backend": "triton"},
        ValueError,
        "Triton kernels run on GPUs, the tensors are on cpu",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ATTENTION.values(), ids=BAD_ATTENTION.keys())
def test_attention_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call, fields = call_with(**changes)
    with pytest.raises(error, match=re.escape(message)):
        run(call, **fields)


def test_misspelt_option_is_named() -> None:
    with pytest.raises(TypeError, match="windows"):
        torch_fp4kv.attention(X, *empty_storage(2, 3, 8, 32), *empty_storage(2, 3, 8, 32), 1, 1, rows(1, 1), windows=3)


@pytest.mark.parametrize("field", ["q", "k_new", "v_new", "mask", "v_bias", "sink_logits"])
def test_gradients_are_refused(field: str) -> None:
    call = make(lengths=(9,), new=True, mask=torch.zeros(9), v_bias=torch.zeros(2, 64), sink_logits=torch.zeros(4))
    with pytest.raises(RuntimeError, match="for inference"):
        run(call, **{field: getattr(call, field).clone().requires_grad_()})


def test_append_refuses_gradients_before_it_writes() -> None:
    refused_append(RuntimeError, "for inference", k=X.clone().requires_grad_())
    refused_append(RuntimeError, "for inference", v_bias=torch.zeros(3, 32, requires_grad=True))
