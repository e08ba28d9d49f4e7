"""FlashInfer's own kernels on a GPU, where it is installed: those that run on this one, against the oracle and ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from flashinfer_cases import BOUNDS, combinations, error, exact_combinations, make, make_exact
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


@pytest.mark.parametrize(("name", "options"), list(exact_combinations()))
def test_exact_copies_join_what_a_kernel_reads(name: str, options: dict[str, Any]) -> None:
    """And its log-sum-exp is what ours is: natural, with the bias of K in it."""
    call = make_exact(support.KERNELS[name].v_scale_layout, return_lse=True, **options)
    reason = support.attention_missing(name, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    out, lse = backends.attention_module(name).run(on_gpu(call))
    assert error(out.cpu(), call) < BOUNDS[name]
    _, expected = oracle.attend(call)
    unseen = expected == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, unseen)
    assert float((lse.cpu() - expected)[~unseen].abs().max()) < 0.05


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


def steps_apart(storage: list[Tensor], want: list[Tensor]) -> tuple[dict[str, float], int]:
    """Shares of the codes and block scales of K and V that differ, and the most that any differs by, in steps."""
    shares, most = {}, 0
    for name, first in (("K", 0), ("V", 2)):
        codes, expected = (
            torch.stack([torch_fp4kv.to_packed(x[first]) >> shift & 15 for shift in (0, 4)]).int()
            for x in (storage, want)
        )
        # Their zero codes keep a sign.
        signed, signed_expected = (torch.where(x > 7, 8 - x, x) for x in (codes, expected))
        code_steps = (signed - signed_expected).abs()
        scale_steps = (storage[first + 1].int() - want[first + 1].int()).abs()
        shares |= {
            f"codes of {name}": float((code_steps > 0).float().mean()),
            f"scales of {name}": float((scale_steps > 0).float().mean()),
        }
        most = max(most, int(code_steps.max()), int(scale_steps.max()))
    return shares, most


def error_of_steps(want: list[Tensor], global_scale: float, codes: float, scales: float) -> float:
    """The most (relative, 2-norm) that one step in these shares of codes and block scales makes of `want` (data, block
    scales), spread over blocks as they come.

    A step of a code, the larger of its two, is 2 block scales from a magnitude of 4 on, 1 from 2 on, else 0.5; E4M3's
    step is at most 1/8 of a scale.
    """
    values = torch_fp4kv.dequantize(*want, global_scale).abs()
    unit = (want[1].view(torch.float8_e4m3fn).float() * global_scale).repeat_interleave(16, -1)
    magnitude = (values / unit).nan_to_num()
    step = unit * torch.where(magnitude > 3.5, 2.0, torch.where(magnitude > 1.75, 1.0, 0.5))
    return float(codes**0.5 * step.norm() / values.norm()) + scales**0.5 / 8


def appended(op: str, rule: str, k_scale: float, v_scale: float) -> list[Tensor]:
    """What 4 rows of 64 tokens become in pages of 16, written by FlashInfer's or our (`op` "triton") kernel."""
    from flashinfer.page import nvfp4_quantize_append_paged_kv_cache

    torch.manual_seed(0)
    k, v = (torch.randn(4, 8, 64, 128, device="cuda").bfloat16() * factor for factor in (1.0, 0.03))
    pages = torch.randperm(16, device="cuda").view(4, 4)
    position = torch.arange(64, device="cuda").expand(4, -1)
    storage = [torch.zeros(16, 8, 16, 8, dtype=t, device="cuda") for t in (torch.int64, torch.uint8) * 2]
    if op != "by page":
        slots = pages.gather(1, position // 16) * 16 + position % 16
        torch_fp4kv.append(*storage, k, v, slots, k_scale, v_scale, scale_rule=rule, backend=op)
        return storage
    nvfp4_quantize_append_paged_kv_cache(
        *(x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)),
        torch.arange(4, device="cuda").repeat_interleave(64).int(),
        position.flatten().int(),
        (torch_fp4kv.to_packed(storage[0]), torch_fp4kv.to_packed(storage[2])),
        (storage[1].view(torch.float8_e4m3fn), storage[3].view(torch.float8_e4m3fn)),
        pages.flatten().int(),
        torch.arange(5, device="cuda").int() * 4,
        torch.full((4,), 16, device="cuda").int(),
        k_scale,
        v_scale,
        kv_layout="HND",
    )
    return storage


APPENDS = [("flashinfer", "amax"), ("flashinfer", "4over6"), ("by page", "amax")]
SCALES = {"no ties": (0.0117, 0.00041), "ties": (0.01, 0.00041)}
"""With "ties" a block of K whose largest is 1.5 · 2^n has a scale that is all but halfway between two of E4M3."""


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("op", "rule"), APPENDS)
def test_append_writes_ours_within_one_step(op: str, rule: str, scales: str) -> None:
    storage, want = appended(op, rule, *SCALES[scales]), appended("triton", rule, *SCALES[scales])
    shares, most = steps_apart(storage, want)
    print(f"{op}, {rule}, {scales}: at most {most} apart,", *(f"{share:.2e} of the {x}" for x, share in shares.items()))
    assert want[0].any()
    if rule == "amax":
        assert most <= 1
        assert max(shares.values()) < 0.01
    else:
        # Where two candidates are as good, the other one has another scale and other codes.
        assert max(shares.values()) < 0.05
    for name, first, scale in zip("KV", (0, 2), SCALES[scales]):
        have, expected = (torch_fp4kv.dequantize(*x[first : first + 2], scale) for x in (storage, want))
        limit = error_of_steps(want[first : first + 2], scale, shares[f"codes of {name}"], shares[f"scales of {name}"])
        error = float((have - expected).norm() / expected.norm())
        print(f"{name}: error {error:.5f}, of such steps at most {limit:.5f}")
        assert error <= (limit if rule == "amax" else 0.1)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_its_decode_wrapper_gives_the_reference_s_numbers(head_dim: int) -> None:
    """FA2 as an engine calls it, `use_tensor_cores=True`, without this package around it."""
    import flashinfer

    call = make(lengths=(37, 96, 5), head_dim=head_dim)
    gpu = on_gpu(replace(call, k_global=torch.tensor(0.73), v_global=torch.tensor(0.0117)))
    assert gpu.block_table is not None
    assert gpu.k_scales is not None
    assert gpu.v_scales is not None
    counts = (call.lengths + 15) // 16
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), "HND", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        torch.cat([gpu.block_table[b, :count] for b, count in enumerate(counts.tolist())]),
        (call.lengths - 1) % 16 + 1,
        4,
        2,
        head_dim,
        16,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.uint8,
    )
    out = wrapper.run(
        gpu.q.squeeze(2),
        (torch_fp4kv.to_packed(gpu.k_data), torch_fp4kv.to_packed(gpu.v_data)),
        k_scale=0.73,
        v_scale=0.0117,
        kv_cache_sf=(gpu.k_scales.view(torch.float8_e4m3fn), gpu.v_scales.view(torch.float8_e4m3fn)),
    )
    expected = replace(call, k_global=torch.tensor(0.73), v_global=torch.tensor(0.0117))
    assert error(out.unsqueeze(2).cpu(), expected) < BOUNDS["flashinfer-fa2"]


def test_both_dequantisers_give_ours_within_a_rounding() -> None:
    """Both multiply in float32 and round once; the order of the two products may differ in the last bit of 16."""
    import flashinfer

    x = torch.randn(256, 128, device="cuda").bfloat16()
    scale = torch.tensor([0.0117], device="cuda")
    words, scales = torch_fp4kv.quantize(x, scale[0])
    want = torch_fp4kv.dequantize(words, scales, scale[0], dtype=torch.bfloat16)
    have = flashinfer.nvfp4_kv_dequantize(torch_fp4kv.to_packed(words), scales, scale, torch.bfloat16)
    assert within_a_rounding(have, want)

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
            assert within_a_rounding(x[:length], expected)
            assert bool(x[length:].isnan().all())


def within_a_rounding(have: Tensor, want: Tensor) -> bool:
    print(f"{float((have != want).float().mean()):.2e} of the values differ")
    return torch.allclose(have.float(), want.float(), rtol=2.0**-7, atol=0.0)
