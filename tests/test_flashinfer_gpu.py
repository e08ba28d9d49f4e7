"""FlashInfer's own kernels on a GPU, where it is installed: those that run on this one, against the oracle and ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_cases import BOUNDS, combinations, error, make
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops import backends
from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.flashinfer import support

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def package() -> None:
    reason = support.not_installed()
    if reason is not None:
        pytest.skip(reason)


def on_gpu(call: AttentionCall) -> AttentionCall:
    fields = {name: getattr(call, name) for name in AttentionCall.__slots__}
    return replace(call, **{name: x.cuda() for name, x in fields.items() if isinstance(x, Tensor)})


def run(name: str, call: AttentionCall) -> Tensor:
    reason = support.attention_missing(name, call.q.device)
    if reason is not None:
        pytest.skip(reason)
    out: Tensor = backends.attention_module(name).run(call)[0]
    return out


@pytest.mark.parametrize(("name", "options"), list(combinations()))
def test_a_kernel_gives_the_reference_s_numbers(name: str, options: dict[str, Any]) -> None:
    call = make(support.KERNELS[name].v_scale_layout, **options)
    assert error(run(name, on_gpu(call)).cpu(), call) < BOUNDS[name]


@pytest.mark.parametrize("name", [name for name in BOUNDS if support.KERNELS[name].capture])
def test_replays_of_a_captured_call_follow_lengths_and_pages(name: str) -> None:
    """Fault that engines had: a graph captured at short lengths, replayed at others."""
    call = make(support.KERNELS[name].v_scale_layout, lengths=(96, 96, 96))
    captured = on_gpu(replace(call, lengths=torch.tensor([3, 5, 1], dtype=torch.int32)))
    run(name, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(name, captured)
    for lengths in ((96, 17, 64), (1, 96, 33), (50, 50, 2)):
        captured.lengths.copy_(torch.tensor(lengths))
        for _ in range(2):
            graph.replay()
        assert error(out.cpu(), replace(call, lengths=torch.tensor(lengths, dtype=torch.int32))) < BOUNDS[name]


@pytest.mark.parametrize("rule", ["amax", "4over6"])
def test_append_writes_ours_within_one_code(rule: str) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(4, 8, 50, 128, device="cuda").bfloat16() * factor for factor in (1.0, 0.03))
    slots = torch.randperm(16 * 16, device="cuda")[:200].view(4, 50)
    stored = []
    for backend in ("flashinfer", "triton"):
        storage = [torch.zeros(16, 8, 16, 8, dtype=t, device="cuda") for t in (torch.int64, torch.uint8) * 2]
        options = {"scale_rule": rule, "backend": backend}
        torch_fp4kv.append(*storage, k, v, slots, 0.0117, 0.00041, **options)
        stored.append(storage)
    for first, scale in ((0, 0.0117), (2, 0.00041)):
        (data, bits), (want_data, want_bits) = (storage[first : first + 2] for storage in stored)
        # Without signs: their zeros keep one.
        codes = torch_fp4kv.to_packed(data) ^ torch_fp4kv.to_packed(want_data)
        differ = float(((codes & 0x77) > 0).float().mean()), float((bits != want_bits).float().mean())
        print(f"{rule}: {differ[0]:.2e} of the bytes and {differ[1]:.2e} of the scales differ")
        assert max(differ) < (0.01 if rule == "amax" else 0.05)
        have, want = torch_fp4kv.dequantize(data, bits, scale), torch_fp4kv.dequantize(want_data, want_bits, scale)
        assert float((have - want).norm() / want.norm()) < (0.02 if rule == "amax" else 0.1)


def test_both_dequantisers_give_ours_within_a_rounding() -> None:
    import flashinfer

    x = torch.randn(256, 128, device="cuda").bfloat16()
    scale = torch.tensor([0.0117], device="cuda")
    words, scales = torch_fp4kv.quantize(x, scale[0])
    want = torch_fp4kv.dequantize(words, scales, scale[0], dtype=torch.bfloat16)
    have = flashinfer.nvfp4_kv_dequantize(torch_fp4kv.to_packed(words), scales, scale, torch.bfloat16)
    assert float((have.float() - want.float()).abs().max()) <= 2.0**-8 * float(want.float().abs().max())

    pages = words.view(16, 2, 8, 8), scales.view(16, 2, 8, 8).view(torch.float8_e4m3fn)
    table = torch.randperm(16, device="cuda").to(torch.int32).view(2, 8)
    lengths = torch.tensor([64, 19], dtype=torch.int32, device="cuda")
    out = torch.full((2, 2, 64, 2, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
    data = torch_fp4kv.to_packed(pages[0])
    flashinfer.nvfp4_kv_dequantize_paged(
        (data, data), (pages[1], pages[1]), table, lengths, scale, scale, out[0], out[1], kv_layout="HND"
    )
    for b, length in enumerate(lengths.tolist()):
        expected = want.view(16, 2, 8, 128)[table[b].long()].transpose(1, 2).flatten(0, 1)[:length]
        for x in out[:, b]:
            assert float((x[:length] - expected).float().abs().max()) <= 2.0**-8 * float(expected.float().abs().max())
            assert bool(x[length:].isnan().all())
