"""`torch.library.opcheck` of every op over strided, expanded, odd-aligned, size-1 and empty inputs.

Shapes: B batch, H KV heads, Hq query heads, L new tokens a row, D head size, P pages, T tokens a page.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.format.constants import BLOCK, E4M3_MAX_BITS

Arguments = tuple[list[Any], dict[str, Any]]

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], dim=2)[:, :, ::2],
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:, :1].expand_as(x),
}
"""The same shape `[B, H, L, ·]` in other strides; "sliced" and "expanded" hold other values."""

SIZES = {"plain": (2, 3, 5, 32), "size one": (1, 1, 1, 16), "no batch": (0, 3, 5, 32), "no tokens": (2, 3, 0, 32)}
"""`[B, H, L, D]`"""


@dataclass(frozen=True)
class OpCase:
    """One op with one set of inputs; `str` of it is a readable test id.

    Attributes:
        op: name in `torch.ops.fp4kv`.
        name: what is special about the inputs.
        make: called with a device, returns `(args, kwargs)`, the same values each time.
    """

    op: str
    name: str
    make: Callable[[torch.device], Arguments]

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"

    def check(self, device: str | torch.device = "cpu") -> None:
        """Runs opcheck's four utilities (schema, autograd registration, fake tensor, AOT dispatch).

        Raises:
            torch.testing._internal.optests.generate_tests.OpCheckError: one of them found the op at fault.
        """
        torch.manual_seed(zlib.crc32(str(self).encode()))
        args, kwargs = self.make(torch.device(device))
        torch.library.opcheck(getattr(torch.ops.fp4kv, self.op).default, tuple(args), kwargs)


def _inputs(size: str, view: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return VIEWS[view](torch.randn(SIZES[size], device=device).to(dtype))


def _stored(
    shape: tuple[int, ...], storage_format: str, device: torch.device, exact: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """`(data, scales)` of `[P, H, T, D]` values, random where they are stored as bits; no NaN among them."""
    if storage_format == "exact":
        return torch.randn(shape, device=device).to(exact), None
    if storage_format == "fp8":
        return torch.randint(E4M3_MAX_BITS + 1, shape, dtype=torch.uint8, device=device), None
    blocks = (*shape[:3], shape[3] // BLOCK)
    # A block-FP4 scale is an exponent: 2^(bits - 127).
    low, high = (0, E4M3_MAX_BITS + 1) if storage_format == "nvfp4" else (110, 140)
    data = torch.randint(-(2**62), 2**62, blocks, device=device)
    return data, torch.randint(low, high, blocks, dtype=torch.uint8, device=device)


def _quantize(size: str, view: str) -> OpCase:
    def make(device: torch.device) -> Arguments:
        return [_inputs(size, view, device), torch.tensor(0.01, device=device)], {}

    return OpCase("quantize", f"{size}, {view}", make)


def _quantize_with_all(device: torch.device) -> Arguments:
    scale, bias = torch.tensor([0.01, 0.02, 0.03], device=device), torch.randn(3, 32, device=device)
    return [_inputs("plain", "transposed", device, torch.float32), scale], {"bias": bias, "scale_rule": "mse"}


def _dequantize(size: str, view: str) -> OpCase:
    def make(device: torch.device) -> Arguments:
        words, scales = _stored(SIZES[size], "nvfp4", device)
        assert scales is not None
        return [VIEWS[view](words), VIEWS[view](scales), torch.tensor(0.01, device=device)], {"dtype": torch.bfloat16}

    return OpCase("dequantize", f"{size}, {view}", make)


def _dequantize_other(storage_format: str) -> OpCase:
    def make(device: torch.device) -> Arguments:
        data, scales = _stored((2, 3, 4, 64), storage_format, device)
        options = {
            "bias": torch.randn(64, device=device),
            "dtype": torch.float32,
            "format": storage_format,
            "scale_layout": "linear" if scales is None else "4token",
        }
        return [data, scales, torch.tensor([0.1, 0.2, 0.3], device=device)], options

    return OpCase("dequantize", storage_format, make)


def _append_arguments(k: Tensor, k_format: str = "nvfp4", v_format: str = "nvfp4") -> list[Any]:
    """The positional arguments that store `k` `[B, H, L, D]`, and twice it as V, in pages of 8 tokens."""
    batch, heads, num_tokens, head_dim = k.shape
    pages = (batch, heads, 8, head_dim)
    storage = [*_stored(pages, k_format, k.device, k.dtype), *_stored(pages, v_format, k.device, k.dtype)]
    slots = torch.arange(batch, device=k.device)[:, None] * 8 + torch.arange(num_tokens, device=k.device)
    scales = torch.tensor(0.01, device=k.device), torch.full((heads,), 0.02, device=k.device)
    return [*storage, k, k * 2, slots, *scales]


def _append(size: str, view: str) -> OpCase:
    return OpCase("append", f"{size}, {view}", lambda device: (_append_arguments(_inputs(size, view, device)), {}))


def _append_with_all(k_format: str, v_format: str, scale_rule: str) -> OpCase:
    def make(device: torch.device) -> Arguments:
        k = _inputs("plain", "transposed", device, torch.float32)
        exact = torch.zeros(3, 3, 7, 32, device=device)
        options = {
            "v_bias": torch.randn(3, 32, device=device),
            **_transform(3, device),
            "k_exact": exact,
            "v_exact": exact.clone(),
            "exact_slots": torch.arange(5, device=device).expand(2, 5),
            "skip_negative": True,
            "k_format": k_format,
            "v_format": v_format,
            "scale_rule": scale_rule,
        }
        return _append_arguments(k, k_format, v_format), options

    return OpCase("append", f"all arguments, {k_format} and {v_format}", make)


def _transform(heads: int, device: torch.device) -> dict[str, Any]:
    order = torch.stack([torch.randperm(32, device=device) for _ in range(heads)])
    return {
        "k_bias": torch.randn(heads, 32, device=device),
        "k_factors": torch.rand(heads, 32, device=device) + 0.5,
        "k_order": order.int(),
        "k_rotation": 16,
    }


def _append_rotated(device: torch.device) -> Arguments:
    k = _inputs("plain", "transposed", device, torch.float32)
    return _append_arguments(k), {"k_bias": torch.randn(3, 32, device=device), "k_rotation": 32}


def _attention_arguments(
    device: torch.device,
    lengths: tuple[int, ...] = (9, 5),
    num_queries: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    capacity: int = 24,
    page_size: int | None = None,
    k_format: str = "nvfp4",
    v_format: str = "nvfp4",
    ring: int = 0,
    num_sink_tokens: int = 0,
    new: bool = False,
    rows: dict[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> Arguments:
    """Arguments over random storage; `ring` and `num_sink_tokens` ask for exact copies, `new` for the queries' own
    tokens, `rows` has int32 tensors `[B]` by name."""

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    def numbers(row: tuple[int, ...]) -> Tensor:
        return torch.tensor(row, dtype=torch.int32, device=device)

    batch = len(lengths)
    pages, tokens = batch, capacity
    if page_size is not None:
        per_row = capacity // page_size
        pages, tokens = batch * per_row, page_size
        options["block_table"] = torch.randperm(pages, device=device).view(batch, per_row).int()
    if ring or num_sink_tokens:
        slots = num_sink_tokens + ring + 1
        options["k_exact"], options["v_exact"] = (values(batch, kv_heads, slots, head_dim) for _ in "kv")
        options["exact_from"] = numbers(tuple(max(0, length - ring) for length in lengths))
        options["num_sink_tokens"] = num_sink_tokens
    if new:
        options["k_new"], options["v_new"] = (values(batch, kv_heads, num_queries, head_dim) for _ in "kv")
    options.update({name: numbers(row) for name, row in (rows or {}).items()})
    shape = (pages, kv_heads, tokens, head_dim)
    scale = torch.tensor(0.01, device=device)
    storage = [*_stored(shape, k_format, device), *_stored(shape, v_format, device)]
    q = values(batch, heads, num_queries, head_dim)
    return [q, *storage, scale, scale, numbers(lengths)], {"k_format": k_format, "v_format": v_format, **options}


ATTENTION: dict[str, dict[str, Any]] = {
    "decode": {},
    "prefill of ragged rows": {"num_queries": 4, "rows": {"q_lengths": (4, 2), "starts": (1, 0)}},
    "block table": {"page_size": 4},
    "exact overlay": {"lengths": (20, 17), "num_queries": 3, "new": True, "ring": 4, "num_sink_tokens": 2},
    "other formats": {"k_format": "fp8", "v_format": "block-fp4", "out_dtype": torch.float16, "window": 4},
    "exact K": {"k_format": "exact", "softcap": 5.0},
    "size one": {"lengths": (1,), "heads": 1, "kv_heads": 1},
    "no batch": {"lengths": ()},
    "no queries": {"num_queries": 0},
    "nothing stored": {"lengths": (0, 0), "capacity": 0},
}


def _attention(op: str, name: str) -> OpCase:
    return OpCase(op, name, lambda device: _attention_arguments(device, **ATTENTION[name]))


def _attention_of_views(view: str) -> OpCase:
    def make(device: torch.device) -> Arguments:
        args, kwargs = _attention_arguments(device, num_queries=4)
        args[0] = VIEWS[view](args[0])
        kwargs["mask"] = torch.rand(2, 1, 9, 4, device=device).transpose(2, 3) > 0.5
        kwargs["sink_logits"] = torch.randn(8, device=device)[::2]
        kwargs.update(_transform(2, device))
        return args, kwargs

    return OpCase("attention_with_lse", f"queries {view}, strided mask", make)


_INPUTS = [("plain", view) for view in VIEWS] + [(size, "contiguous") for size in SIZES if size != "plain"]

OP_CASES: tuple[OpCase, ...] = (
    *(_quantize(*case) for case in _INPUTS),
    OpCase("quantize", "all arguments", _quantize_with_all),
    *(_dequantize(*case) for case in _INPUTS),
    *(_dequantize_other(storage_format) for storage_format in ("fp8", "block-fp4")),
    *(_append(*case) for case in _INPUTS),
    _append_with_all("fp8", "block-fp4", "amax"),
    _append_with_all("exact", "nvfp4", "4over6"),
    OpCase("append", "rotated K", _append_rotated),
    *(_attention(op, name) for op in ("attention", "attention_with_lse") for name in ATTENTION),
    *(_attention_of_views(view) for view in VIEWS),
)
"""Every op of this package with every input here; for `pytest.mark.parametrize("case", OP_CASES, ids=str)`."""
