"""Cases that the interpreter (CPU) and a GPU both run: the append, quantise and prefill kernels against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import calls
import oracle
import torch
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.format import blocks, reference

GLOBAL_SCALES = (1e-6, 2.0**-8, 0.1, 1 / 3, 1.0, 1e3)
HEAD_SIZES = (16, 64, 80, 96, 112, 128, 144, 576)


def hard_blocks(global_scale: float) -> Tensor:
    """float32 `[n, 16]`: ties and their neighbours, ±0, subnormals, NaN, ±inf, amax from 1e-38 to 3e38."""
    torch.manual_seed(0)
    found = [torch.zeros(16), torch.full((16,), -0.0), torch.full((16,), torch.nan), torch.full((16,), 1e-45)]
    for scale_bits in (1, 7, 8, 0x30, 0x7E):
        unit = reference.f32(reference.e4m3_value(scale_bits) * global_scale)
        ties = torch.tensor([t * unit for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)])
        for near in (ties, ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(0.0))):
            found.append(torch.cat([near, -near, torch.tensor([6 * unit, -0.0])]))
    for exponent in range(-38, 39, 4):
        found.append(torch.randn(16) * 3.0 * 10.0**exponent)
    for value in (torch.nan, torch.inf, -torch.inf):
        block = torch.randn(16) * global_scale
        block[3] = value
        found.append(block)
    # Block scales halfway between two of E4M3, where the global scale is a power of two.
    for tie in (1.0625, 1.1875, 1.5 * 2.0**-9, 2.5 * 2.0**-9):
        found.append(torch.linspace(-1, 1, 16) * (6 * tie * global_scale))
    for size in (2.0**-11, 2.0**-10, 2.0**-9, 1.0, 100.0, 448.0, 1000.0):
        found.append(torch.randn(16) * size * global_scale * 6)
    return torch.stack(found)


def check_against_the_scalar_reference(x: Tensor, global_scale: float, words: Tensor, scales: Tensor) -> None:
    """`words`, `scales` `[n]` are those of `x` `[n, 16]` by the scalar program."""
    g = reference.f32(global_scale)
    for block, word, bits in zip(x.float().tolist(), words.tolist(), scales.tolist()):
        codes, expected_bits = reference.quantize_block(block, g)
        assert bits == expected_bits
        assert [(word >> 4 * r) & 15 for r in range(16)] == codes


def dense(x: Tensor) -> Tensor:
    return x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": dense,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "strided columns": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:, :1].expand_as(x),
    "every other token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
}

BIASES = {"k_bias": (3, 64), "v_bias": (3, 64)}
APPENDS: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1, "rows": 5},
    "long": {"tokens": 70},
    "576 and 512": {"head_dim": 576, "v_head_dim": 512},
    "80 and 112": {"head_dim": 80, "v_head_dim": 112, "tokens": 70},
    "skip negative": {"skip_negative": True},
    "exact ring": {"exact": 9},
    "exact ring, skip negative": {"exact": 9, "skip_negative": True},
    "fp8": {"k_format": "fp8", "v_format": "fp8"},
    "block-fp4": {"k_format": "block-fp4", "v_format": "block-fp4"},
    "exact": {"k_format": "exact", "v_format": "exact"},
    "4-token, scales that saturate": {"v_scale_layout": "4token", "layout": lambda x: x * 30},
    "fp8 and 4-token": {"k_format": "fp8", "v_scale_layout": "4token"},
    "bias": {"tensors": BIASES},
    "fp8 bias": {"tensors": BIASES, "k_format": "fp8", "v_format": "fp8"},
    "exact bias": {"tensors": BIASES, "k_format": "exact", "v_format": "exact"},
    "rotated": {"k_rotation": 64, "tensors": BIASES, "scale_rule": "mse", "exact": 9},
    "rotated in 16s": {"k_rotation": 16, "head_dim": 80, "v_head_dim": 112, "tokens": 70},
    "equalised": {"tensors": {"k_factors": (3, 144)}, "head_dim": 144, "v_head_dim": 64, "exact": 9},
    "equalised, reordered and rotated": {"transformed": True, "exact": 9, "tokens": 70},
    "reordered, fp8": {"transformed": True, "head_dim": 80, "k_format": "fp8", "layout": LAYOUTS["strided columns"]},
    "rotated, fp8": {"k_rotation": 64, "head_dim": 576, "k_format": "fp8"},
    "one page": {"pages": 1, "page_size": 480},
    **{f"layout {name}": {"layout": layout, "tokens": 20} for name, layout in LAYOUTS.items()},
}


def check_append(
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 2,
    heads: int = 3,
    tokens: int = 5,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    pages: int = 11,
    page_size: int = 20,
    exact: int = 0,
    skip_negative: bool = False,
    layout: Callable[[Tensor], Tensor] = dense,
    tensors: dict[str, tuple[int, ...]] | None = None,
    transformed: bool = False,
    k_format: str = "nvfp4",
    v_format: str = "nvfp4",
    **options: Any,
) -> None:
    """The kernel writes what the op's PyTorch body writes, and leaves poison everywhere else."""
    from torch_fp4kv.ops.kernels import append as kernel

    torch.manual_seed(0)
    v_head_dim = v_head_dim or head_dim
    k, v = (layout(torch.randn(rows, heads, tokens, d).to(dtype)) for d in (head_dim, v_head_dim))
    slots = torch.randperm(pages * page_size)[: rows * tokens].view(rows, tokens)
    if skip_negative:
        slots[:, ::3] = -1
    for name, shape in (tensors or {}).items():
        options[name] = torch.rand(shape) + 0.5 if name == "k_factors" else torch.randn(shape)
    if transformed:
        options.update(calls.equalized(heads, head_dim))
    scales = (torch.tensor(0.1), torch.linspace(0.01, 1 / 3, heads))
    results = []
    for run, where in ((kernel.append, device), (torch_fp4kv.append, "cpu")):
        storage = [
            *calls.empty_storage(pages, heads, page_size, head_dim, k_format, dtype),
            *calls.empty_storage(pages, heads, page_size, v_head_dim, v_format, dtype),
        ]
        given = {name: value.to(where) if isinstance(value, Tensor) else value for name, value in options.items()}
        if exact:
            for name, d in (("k_exact", head_dim), ("v_exact", v_head_dim)):
                given[name] = torch.full((rows + 1, heads, exact, d), 7.0, dtype=dtype, device=where)
            # As a cache chooses them: each slot for one token at most, the last one for those that have none.
            ring = torch.arange(rows * tokens).view(rows, tokens).remainder(exact - 1)
            ring[:, : max(1, tokens - exact + 1)] = exact - 1
            given["exact_slots"] = ring.to(where)
        storage = [None if s is None else s.to(where) for s in storage]
        inputs = [x if where == "cpu" else _same_layout(x, where) for x in (k, v)]
        run(
            *storage,
            *inputs,
            slots.to(where),
            *(s.to(where) for s in scales),
            skip_negative=skip_negative,
            k_format=k_format,
            v_format=v_format,
            **given,
        )
        rings = [given[name][:, :, :-1] for name in ("k_exact", "v_exact") if exact]
        results.append([s.cpu().nan_to_num(1e30) for s in (*storage, *rings) if s is not None])
    for ours, expected in zip(*results):
        assert torch.equal(ours, expected)


def _same_layout(x: Tensor, device: str) -> Tensor:
    """`x` on `device` with the same strides and offset."""
    base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


PREFILLS: dict[str, dict[str, Any]] = {
    "history and new": {"new": True},
    "stored alone": {},
    "paged": {"page_size": 32, "new": True},
    "left padding": {"starts": (7, 20), "new": True},
    "window": {"window": 17, "new": True},
    "window over stored": {"window": 17},
    "not causal": {"causal": False, "new": True},
    "soft-cap": {"softcap": 5.0, "new": True},
    "padded queries": {"q_lengths": (20, 3), "new": True},
    "80 and 96": {"head_dim": 80, "v_head_dim": 96, "new": True},
    "64 and 128": {"head_dim": 64, "v_head_dim": 128, "new": True},
    "192 and 128": {"head_dim": 192, "v_head_dim": 128, "lengths": (250, 33), "capacity": 256, "new": True},
    "no group": {"heads": 2, "new": True},
    "first chunk": {"lengths": (20, 20), "new": True},
    "ring of storage": {"lengths": (300, 150), "new": True, "window": 100},
    "exact ring": {"ring": 24, "num_sink_tokens": 4, "starts": (3, 2), "new": True},
    "exact ring over stored": {"ring": 24, "num_sink_tokens": 4},
    "sinks alone": {"num_sink_tokens": 4, "new": True},
    "4-token scales": {"v_scale_layout": "4token", "page_size": 16, "new": True},
    "fp8": {"k_format": "fp8", "v_format": "fp8", "new": True},
    "exact": {"k_format": "exact", "v_format": "exact", "new": True},
    "rotated keys": {"k_rotation": 64, "new": True},
    "shifted keys": {"k_bias": calls.equalized()["k_bias"], "new": True},
    "transformed keys": {**calls.equalized(), "new": True, "ring": 24, "num_sink_tokens": 4},
    "transformed keys of 80": {**calls.equalized(2, 80), "head_dim": 80, "v_head_dim": 96},
}


def prefill_call(dtype: torch.dtype, **options: Any) -> AttentionCall:
    """Two rows of 20 queries in `dtype` over 90 and 33 tokens, changed by `options` of `calls.make`."""
    options = {"lengths": (90, 33), "num_queries": 20, "capacity": 128, **options}
    return calls.make(dtype=dtype, return_lse=True, **options)


def check_prefill(call: AttentionCall, device: str, tolerance: float) -> None:
    """The kernel's output has a relative error (2-norm) under `tolerance`, its log-sum-exp an error under 1e-4."""
    from dataclasses import replace

    from torch_fp4kv.ops.kernels import prefill

    assert prefill.unsupported(call) is None
    fields = {n: getattr(call, n) for n in AttentionCall.__slots__ if isinstance(getattr(call, n), Tensor)}
    moved = replace(call, **{n: t.to(device) for n, t in fields.items()}, out_dtype=torch.float32)
    out, lse = prefill.run(moved)
    # The tensor cores take transformed queries in 16 bits.
    expected, expected_lse = oracle.attend(call, query_dtype=call.q.dtype)
    assert lse is not None
    assert float((out.cpu() - expected).norm() / expected.norm()) < tolerance
    unseen = expected_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, unseen)
    assert torch.all(out.cpu()[unseen] == 0)
    assert float((lse.cpu() - expected_lse)[~unseen].abs().max()) < 1e-4


def check_searched(device: str, rule: str) -> None:
    """Each block has the squared error that the reference leaves it: hard blocks, and random ones."""
    from torch_fp4kv.ops.kernels import quantize as kernel

    torch.manual_seed(0)
    for global_scale in GLOBAL_SCALES:
        x = torch.cat([hard_blocks(global_scale), torch.randn(500, 16) * global_scale * 30])
        x = x[x.isfinite().all(-1)]
        g = torch.tensor(global_scale)
        words, scales = (t.cpu() for t in kernel.quantize(x.to(device), g.to(device), None, rule))
        error, expected = (
            (blocks.decode(*stored, g) - x).double().square().sum(-1)
            for stored in ((words, scales), blocks.encode(x, g, rule))
        )
        torch.testing.assert_close(error, expected, rtol=1e-5, atol=0.0)


def check_quantize(device: str, dtype: torch.dtype, head_dim: int, view: str, per: str) -> None:
    """`quantize` and `dequantize` give the bytes of the PyTorch bodies, for a strided `x` and a scale per `per`."""
    from torch_fp4kv.ops.kernels import quantize as kernel

    torch.manual_seed(0)
    x = LAYOUTS[view](torch.randn(2, 3, 7, head_dim).to(dtype))
    scale = {"tensor": torch.tensor(1 / 3), "head": torch.rand(3) + 0.1, "row": torch.rand(2, 3, 7) + 0.1}[per]
    bias = torch.randn(3, head_dim) if per == "head" else None
    words, scales = kernel.quantize(
        _same_layout(x, device), scale.to(device), None if bias is None else bias.to(device), "amax"
    )
    expected = torch_fp4kv.quantize(x, scale, bias=bias)
    assert torch.equal(words.cpu(), expected[0])
    assert torch.equal(scales.cpu(), expected[1])
    for out_dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = kernel.dequantize(words, scales, scale.to(device), None if bias is None else bias.to(device), out_dtype)
        assert torch.equal(out.cpu(), torch_fp4kv.dequantize(*expected, scale, bias=bias, dtype=out_dtype))


def check_hard_blocks(device: str, global_scale: float, dtype: torch.dtype) -> None:
    """Append's bytes, of K and V, are those of the scalar program and of `blocks.encode`."""
    from torch_fp4kv.ops.kernels import append as kernel

    x = hard_blocks(global_scale).to(dtype)
    new = x.view(1, 1, -1, 16).to(device)
    tokens = x.shape[0]
    storage = [s.to(device) for s in calls.empty_storage(1, 1, tokens, 16) * 2]
    g = torch.tensor(global_scale, device=device)
    kernel.append(*storage, new, new.clone(), torch.arange(tokens, device=device)[None], g, g)
    k_words, k_scales, v_words, v_scales = (s.cpu().view(tokens) for s in storage)
    assert torch.equal(k_words, v_words)
    assert torch.equal(k_scales, v_scales)
    check_against_the_scalar_reference(x, global_scale, k_words, k_scales)
    words, scales = blocks.encode(x, torch.tensor(global_scale))
    assert torch.equal(k_words, words.view(tokens))
    assert torch.equal(k_scales, scales.view(tokens))
