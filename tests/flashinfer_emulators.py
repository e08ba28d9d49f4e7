"""FlashInfer's NVFP4 kernels as they read their arguments, in float64 with the roundings that their sources show.

Each emulator is put in place of a function of the installed package and gets its arguments bound to that function's
own signature, so that a name or a position which is not there fails. What a kernel is handed is read as the kernel
reads it: V's data and scales with K's strides where it does so, scales in the order it expects, products rounded to
E4M3 where it rounds them. Read from FlashInfer 0.7.4; where a kernel is a closed binary (trtllm-gen) its roundings
are those that its launcher and the sources around it imply.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@contextlib.contextmanager
def installed(calls: list[dict[str, Any]]) -> Iterator[None]:
    """Within it the package's kernels are emulated; the bound arguments of each call are appended to `calls`."""
    import flashinfer
    import flashinfer.decode
    import flashinfer.page
    import flashinfer.prefill

    def of(owner: Any, name: str, emulate: Callable[[dict[str, Any]], Any]) -> Any:
        return mock.patch.object(owner, name, _bound(inspect.signature(getattr(owner, name)), emulate, calls))

    prims_ts = types.ModuleType("flashinfer.attention.prims_ts")
    for name, emulate in (
        ("batch_decode_with_paged_kv_cache", prims_ts_decode),
        ("get_prims_ts_batch_decode_workspace_size", lambda _arguments: 4096),
    ):
        setattr(prims_ts, name, _bound(source_signature("attention/prims_ts/decode.py", name), emulate, calls))
    kernels = types.ModuleType("flashinfer.quantization.kernels")
    name = "nvfp4_kv_materialize_fp8"
    materialize = source_signature("quantization/kernels/nvfp4_kv_materialize.py", name)
    setattr(kernels, name, _bound(materialize, materialize_fp8, calls))
    append = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
    with contextlib.ExitStack() as stack:
        for patch in (
            of(flashinfer.decode, "trtllm_batch_decode_with_kv_cache", trtllm_decode),
            of(flashinfer.decode, "xqa_batch_decode_with_kv_cache", xqa_decode),
            of(flashinfer.page, append, append_by_slot),
            of(flashinfer, "fp4_quantize", fp4_quantize),
            of(flashinfer, "nvfp4_kv_dequantize_paged", dequantize_paged),
            mock.patch.object(flashinfer.prefill, "BatchPrefillWithPagedKVCacheWrapper", _fa2(calls)),
            # Importing these needs nvidia-cutlass-dsl.
            mock.patch.dict(sys.modules, {prims_ts.__name__: prims_ts, kernels.__name__: kernels}),
        ):
            stack.enter_context(patch)
        yield


def source_signature(file: str, name: str) -> inspect.Signature:
    """Signature of function `name` in a file of the package that cannot be imported here; defaults as source text."""
    import flashinfer

    tree = ast.parse((Path(flashinfer.__file__).parent / file).read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list, function.returns = [], None
    for argument in (*function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    function.body = [ast.Pass()]
    namespace: dict[str, Any] = {"torch": torch}
    exec(ast.unparse(function), namespace)
    return inspect.signature(namespace[name])


def _bound(
    signature: inspect.Signature, emulate: Callable[..., Any], calls: list[dict[str, Any]]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(dict(bound.arguments))
        return emulate(dict(bound.arguments))

    return call


def e4m3(x: Tensor) -> Tensor:
    """float64 rounded to E4M3 as a satfinite conversion does."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).double()


def decode(data: Tensor, scales: Tensor) -> Tensor:
    """float64 `[..., D]` of packed bytes `[..., D/2]` (low nibble first) and float8_e4m3fn scales `[..., D/16]`."""
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    return E2M1[codes.long()] * scales.double().repeat_interleave(16, -1)


def linear_from_4token(scales: Tensor) -> Tensor:
    """Scales `[P, H, T, S]` in order of tokens, from where trtllm-gen's source says that it finds them."""
    tokens, groups = scales.shape[2:]
    t, s = torch.arange(tokens)[:, None], torch.arange(groups)
    return scales.view(torch.uint8)[:, :, t // 4 * 4 + s // (groups // 4), s % (groups // 4) * 4 + t % 4].view(
        torch.float8_e4m3fn
    )


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    causal: bool = True,
    window_left: int = -1,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    round_weights: Callable[[Tensor], Tensor] = lambda p: p,
) -> tuple[Tensor, Tensor]:
    """float64 `[B, L, Hq, D]` of `q` `[B, L, Hq, D]` over pages `[P, H, T, D]`, and its log-sum-exp `[B, L, Hq]`, of
    base 2; the L queries end at each length."""
    batch, queries, heads, d = q.shape
    kv_heads, size = k_pages.shape[1:3]
    out = torch.zeros(batch, queries, heads, d, dtype=torch.float64)
    lse = torch.zeros(batch, queries, heads, dtype=torch.float64)
    for b in range(batch):
        length = int(lengths[b])
        assert 0 < queries <= length <= table.shape[1] * size
        pages = table[b, : -(-length // size)].long()
        assert int(pages.min()) >= 0
        assert int(pages.max()) < k_pages.shape[0]
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k_pages, v_pages))
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        scores = q[b].transpose(0, 1).double() @ k.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        own = length - queries + torch.arange(queries)[:, None]
        position = torch.arange(length)
        seen = torch.ones(queries, length, dtype=torch.bool)
        if causal:
            seen &= position <= own
        if window_left >= 0:
            seen &= position >= own - window_left
        scores = scores.masked_fill(~seen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.double()[:, None, None] - top)
        out[b] = (round_weights(weights) @ v / total).transpose(0, 1)
        lse[b] = ((top + total.log()) / math.log(2)).squeeze(-1).T
    return out, lse


def _kv(arguments: dict[str, Any], cache: str, scales: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, V and their scales; V's data with the strides of K, and V's scales with those of K's scales."""
    (k, v), (k_scales, v_scales) = arguments[cache], arguments[scales]
    assert isinstance(arguments[cache], tuple), "a list of caches is taken for one tensor"
    for data in (k, v):
        assert data.dtype == torch.uint8
        assert data.stride(-1) == 1
    for data in (k_scales, v_scales):
        assert data.dtype == torch.float8_e4m3fn
        assert data.stride(-1) == 1
    assert all(x.data_ptr() % 16 == 0 for x in (k, v, k_scales, v_scales))
    return k, v.as_strided(v.shape, k.stride()), k_scales, v_scales.as_strided(v_scales.shape, k_scales.stride())


def _common(arguments: dict[str, Any], page_sizes: tuple[int, ...], table: str = "block_tables") -> None:
    assert arguments["kv_layout"] == "HND"
    assert arguments[table].dtype == torch.int32
    assert arguments[table].stride(-1) == 1
    pages = next(arguments[name] for name in ("kv_cache", "paged_kv_cache") if name in arguments)
    assert pages[0].shape[2] in page_sizes


def trtllm_decode(a: dict[str, Any]) -> Tensor:
    """SM100 and SM103: everything in E4M3, V's scales in the 4-token order."""
    _common(a, (16, 32, 64))
    assert a["backend"] == "trtllm-gen"
    query, out, length = a["query"], a["out"], a["q_len_per_req"]
    assert query.dtype == out.dtype == torch.float8_e4m3fn
    assert query.shape == out.shape
    assert query.shape[-1] in (64, 128, 256)
    assert a["seq_lens"].dtype == torch.int32
    scale = a["bmm1_scale_log2"]
    assert scale.dtype == torch.float32
    assert scale.shape == (1,)
    batch = query.shape[0] // length
    # It then makes zeroed counters of its own.
    assert a["multi_ctas_kv_counter_buffer"] is None
    assert a["workspace_buffer"].numel() >= 128 << 20
    k, v, k_scales, v_scales = _kv(a, "kv_cache", "kv_cache_sf")
    for data in (k_scales, v_scales):
        assert data.stride(-2) == data.shape[-1]
    # TMA descriptors: strides in multiples of 16 bytes, each dimension's above the one before it, as 32-bit ints.
    for data in (k, k_scales):
        assert all(stride % 16 == 0 for stride in data.stride()[:2])
        assert data.stride(0) >= data.stride(1) >= data.stride(2)
        assert 2 * data.stride(0) < 2**31
    result, _ = attend(
        query.double().view(batch, length, *query.shape[1:]),
        e4m3(decode(k, k_scales)),
        e4m3(decode(v, linear_from_4token(v_scales))),
        a["block_tables"],
        a["seq_lens"],
        float(scale) * math.log(2),
        window_left=a["window_left"],
        sinks=a["sinks"],
        round_weights=lambda p: e4m3(p * 256) / 256,
    )
    out.copy_((result * a["bmm2_scale"]).clamp(-448, 448).view(out.shape).to(out.dtype))
    return out


def prims_ts_decode(a: dict[str, Any]) -> Tensor:
    """SM100 and later 10.x: 16-bit query and weights, V's scales in the 4-token order."""
    _common(a, (4, 8, 16, 32, 64, 128))
    query, out, length = a["q"], a["out"], a["seq_len_q"]
    assert query.dtype == out.dtype == torch.bfloat16
    assert query.ndim == (3 if length == 1 else 4)
    assert query.shape == out.shape
    assert not a["validate"]
    assert a["max_kv_len"] == a["block_tables"].shape[1] * a["paged_kv_cache"][0].shape[2]
    assert not a["workspace_buffer"].any()
    assert a["mask_type"] == "causal" or (length == 1 and a["window_left"] < 0)
    k, v, k_scales, v_scales = _kv(a, "paged_kv_cache", "kv_scale_factors")
    result, lse = attend(
        query.double().view(-1, length, *query.shape[-2:]),
        decode(k, k_scales),
        decode(v, linear_from_4token(v_scales)),
        a["block_tables"],
        a["seq_lens_kv"],
        a["softmax_scale"],
        causal=a["mask_type"] == "causal",
        window_left=a["window_left"],
        sinks=a["attention_sinks"],
        round_weights=_bf16,
    )
    out.copy_((result * a["output_scale"]).view(out.shape))
    if a["lse"] is not None:
        assert a["lse"].shape == query.shape[:-1]
        assert a["lse"].is_contiguous()
        assert a["lse_mode"] == "base2"
        a["lse"].copy_(lse.view(a["lse"].shape))
    return out


def xqa_decode(a: dict[str, Any]) -> Tensor:
    """SM120 and SM121: 16-bit, V's scales linear, strides in whole rows of a head."""
    _common(a, (16, 32, 64, 128))
    query, out, d = a["query"], a["out"], a["query"].shape[-1]
    assert query.dtype == out.dtype == torch.bfloat16
    assert a["q_len_per_req"] == 1
    # A row and KV head has a counter, which its last block sets back to 0.
    semaphores = a["workspace_buffer"][: 8 << 20].view(torch.int32)[: query.shape[0] * a["kv_cache"][0].shape[1]]
    assert not semaphores.any()
    assert isinstance(a["kv_cache_sf"], tuple)
    k, v, k_scales, v_scales = _kv(a, "kv_cache", "kv_cache_sf")
    for data, row in ((k, d // 2), (k_scales, d // 16)):
        assert all(stride % row == 0 for stride in data.stride()[:3])
    # A token's scales come in words of 4, and those past the last whole one do not.
    whole = torch.arange(d // 16) < d // 64 * 4
    k_scales, v_scales = (x.float() * whole for x in (k_scales, v_scales))
    kv_scale = a["bmm2_scale"] * a["o_scale"]
    q_scale = a["bmm1_scale"] / kv_scale * d**0.5
    result, _ = attend(
        query.double().unsqueeze(1),
        decode(k, k_scales),
        decode(v, v_scales),
        a["block_tables"],
        a["seq_lens"],
        q_scale * kv_scale / d**0.5,
        window_left=a["window_left"],
        sinks=a["sinks"],
        round_weights=_bf16,
    )
    out.copy_((result * kv_scale).view(out.shape))
    return out


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _fa2(calls: list[dict[str, Any]]) -> type:
    """A stand-in for the FA2 wrapper: V's strides are its own, sinks are not looked at."""
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as Real

    make, plan, run = (inspect.signature(getattr(Real, name)) for name in ("__init__", "plan", "run"))

    class Wrapper:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = make.bind(self, *args, **kwargs).arguments
            self.layout = bound["kv_layout"]
            assert bound["backend"] == "fa2"

        def plan(self, *args: Any, **kwargs: Any) -> None:
            bound = plan.bind(self, *args, **kwargs)
            bound.apply_defaults()
            self.planned = dict(bound.arguments)
            calls.append(self.planned)

        def run(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
            bound = run.bind(self, *args, **kwargs)
            bound.apply_defaults()
            calls.append(dict(bound.arguments))
            p, r, q = self.planned, bound.arguments, bound.arguments["q"]
            assert q.dtype == p["q_data_type"] == torch.bfloat16
            k, v = r["paged_kv_cache"]
            assert p["kv_data_type"] == k.dtype == v.dtype
            if k.dtype == torch.uint8:
                k_scales, v_scales = r["kv_cache_sf"]
                k, v = decode(k, k_scales), decode(v, v_scales)
            k, v = (x.double() if self.layout == "HND" else x.double().transpose(1, 2) for x in (k, v))
            assert p["page_size"] == k.shape[2]
            out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
            for b in range(len(p["qo_indptr"]) - 1):
                first, end = p["qo_indptr"][b : b + 2].tolist()
                pages = p["paged_kv_indices"][slice(*p["paged_kv_indptr"][b : b + 2].tolist())]
                length = (len(pages) - 1) * p["page_size"] + int(p["paged_kv_last_page_len"][b])
                result, own_lse = attend(
                    q[None, first:end],
                    k,
                    v,
                    pages[None],
                    torch.tensor([length]),
                    p["sm_scale"],
                    causal=p["causal"],
                    window_left=p["window_left"],
                    softcap=p["logits_soft_cap"],
                    round_weights=_bf16,
                )
                out[first:end], lse[first:end] = result[0], own_lse[0]
            lse *= {"log2": 1.0, "ln": math.log(2)}[r["lse_base"]]
            return (out, lse) if r["return_lse"] else out

    return Wrapper


def dequantize_paged(a: dict[str, Any]) -> None:
    """Any GPU from 8.0: rows past a length are left as they are, scales are linear, for V too."""
    assert a["kv_layout"] == "HND"
    assert a["seq_lens"].dtype == torch.int32
    for data, scales, scale, out in zip(
        a["paged_kv_cache"], a["kv_cache_sf"], (a["k_scale"], a["v_scale"]), (a["output_k"], a["output_v"])
    ):
        assert out.is_contiguous()
        assert scale.dtype == torch.float32
        assert scale.numel() == 1
        size = data.shape[2]
        assert a["block_tables"].shape[1] * size >= out.shape[1]
        for b, length in enumerate(a["seq_lens"].tolist()):
            assert length <= out.shape[1]
            pages = a["block_tables"][b, : -(-length // size)].long()
            x = decode(data[pages], scales[pages]).transpose(1, 2).flatten(0, 1)[:length]
            out[b, :length] = (x * float(scale)).to(out.dtype)


def materialize_fp8(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Blackwell: pages of E4M3 behind one of zeros, none past a length; V's scales in the 4-token order."""
    k, v, k_scales, v_scales = (a[name] for name in ("k_cache", "v_cache", "k_block_scales", "v_block_scales"))
    pages, heads, size, d = k.shape[0], k.shape[1], k.shape[2], 2 * k.shape[3]
    assert size % 4 == 0
    assert d % 64 == 0
    for data in (k, v, k_scales, v_scales):
        assert data.dtype == torch.uint8
        assert data[0].is_contiguous()
        assert data.data_ptr() % 16 == data.stride(0) % 16 == 0
    assert a["block_tables"].dtype == a["seq_lens"].dtype == torch.int32
    assert a["uses_shared_paged_kv_idx"]
    indptr, columns = a["kv_page_indptr"], -(-a["max_kv_len"] // size)
    assert indptr.dtype == torch.int32
    assert a["num_pages"] == int(indptr[-1])
    assert a["block_tables"].shape[1] >= columns
    values = [
        e4m3(decode(k, k_scales.view(torch.float8_e4m3fn))),
        e4m3(decode(v, linear_from_4token(v_scales).view(torch.float8_e4m3fn))),
    ]
    out = torch.full((a["num_pages"] + 1, 2, heads, size, d), torch.nan, dtype=torch.float8_e4m3fn)
    out.view(torch.uint8)[0] = 0
    table = torch.zeros(len(indptr) - 1, columns, dtype=torch.int32)
    for b, length in enumerate(a["seq_lens"].tolist()):
        assert length <= a["max_kv_len"]
        for j in range(-(-length // size)):
            page, source = int(indptr[b]) + j + 1, int(a["block_tables"][b, j])
            assert page <= int(indptr[b + 1])
            assert 0 <= source < pages
            present = min(size, length - j * size)
            for part, x in enumerate(values):
                out[page, part, :, :present] = x[source, :, :present].to(out.dtype)
            table[b, j] = page
    return out, table


def append_by_slot(a: dict[str, Any]) -> None:
    """Any GPU from 8.0: division by approximate reciprocals, scales linear, one scale each for K and V."""
    slots, size = a["slot_mapping"], a["paged_kv_cache"][0].shape[2]
    assert a["kv_layout"] == "HND"
    assert slots.dtype in (torch.int32, torch.int64)
    for x, data, scales, global_scale in zip(
        (a["append_key"], a["append_value"]), a["paged_kv_cache"], a["kv_cache_sf"], (a["k_scale"], a["v_scale"])
    ):
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(-1) == 1
        assert data.dtype == torch.uint8
        assert scales.dtype == torch.float8_e4m3fn
        assert global_scale.dtype == torch.float32
        assert global_scale.numel() == 1
        packed, sf = _quantize(x.float(), global_scale, a["nvfp4_4over6"])
        for row, slot in enumerate(slots.tolist()):
            if 0 <= slot < data.shape[0] * size:
                data[slot // size, :, slot % size] = packed[row]
                scales.view(torch.uint8)[slot // size, :, slot % size] = sf[row]


def fp4_quantize(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Blackwell; `global_scale` multiplies, one or one a row."""
    x, encode = a["input"], a["global_scale"]
    assert x.ndim == 2
    assert x.is_contiguous()
    assert x.dtype in (torch.float16, torch.bfloat16)
    assert encode.dtype == torch.float32
    assert encode.numel() in (1, x.shape[0] if a["backend"] == "cuda" else 1)
    assert not a["is_sf_swizzled_layout"]
    assert not a["is_global_scale_inversed"]
    assert a["sf_vec_size"] == 16
    return _quantize(x.float(), 1.0 / encode.view(-1, 1), a["nvfp4_4over6"])


def _quantize(x: Tensor, global_scale: Tensor, recipe: Any) -> tuple[Tensor, Tensor]:
    """Packed bytes and scale bytes of `x` `[..., D]`; `global_scale` (decode) broadcasts against `[..., D/16]`."""
    assert recipe is None or (recipe.e4m3_max, recipe.err_mode_name, recipe.err_use_fast_math) == (448, "MSE", False)
    blocks = x.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1)

    def candidate(divisor: float) -> tuple[Tensor, Tensor, Tensor]:
        sf = (amax / (divisor * global_scale)).clamp(max=448).to(torch.float8_e4m3fn)
        step = sf.float() * global_scale
        y = blocks * torch.where(step > 0, 1.0 / step, 0.0).unsqueeze(-1)
        edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        magnitude = y.abs().unsqueeze(-1)
        passed = torch.where(torch.arange(7) % 2 == 1, magnitude >= edges, magnitude > edges)
        codes = passed.sum(-1) | (torch.signbit(y).long() << 3)
        error = (E2M1[codes] * step.double().unsqueeze(-1) - blocks.double()).square().sum(-1)
        return sf.view(torch.uint8), codes, error

    sf, codes, error = candidate(6.0)
    if recipe is not None:
        other, other_codes, other_error = candidate(4.0)
        better = other_error < error
        sf, codes = torch.where(better, other, sf), torch.where(better.unsqueeze(-1), other_codes, codes)
    codes = codes.flatten(-2).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, sf
