"""FlashInfer behind the ops: which call goes where on which GPU, and that what it is handed gives the right numbers.

No GPU: devices are mocked, and the kernels of the installed package are emulated (`flashinfer_emulators.py`).
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import flashinfer_emulators as emulators
import oracle
import pytest
import torch
from flashinfer_cases import (
    BOUNDS,
    CASES,
    EXACT,
    LAYOUT,
    PAGED_MULTI,
    PREFILLS,
    SINKS,
    V_BIAS,
    combinations,
    error,
    exact_combinations,
    in_e4m3,
    make,
    make_exact,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fp4kv
from torch_fp4kv import doctor
from torch_fp4kv.ops import backends
from torch_fp4kv.ops.call import AppendCall, AttentionCall
from torch_fp4kv.ops.flashinfer import append, exact, fa2, materialize, paged, quantize, support, trtllm_gen
from torch_fp4kv.ops.format import layout

CUDA = torch.device("cuda", 0)


@pytest.fixture
def package() -> Iterator[None]:
    pytest.importorskip("flashinfer", "0.7.4", reason="flashinfer-python is not installed")
    yield
    fa2._wrapper.cache_clear()


@contextlib.contextmanager
def gpu(capability: tuple[int, int], **changes: Any) -> Iterator[None]:
    """Within it `CUDA` has this compute capability, and what FlashInfer needs is installed."""
    settings = {"version": lambda: "0.7.4", "package_missing": lambda _name: None, "_can_compile": lambda: True}
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda _device=None: capability),
        mock.patch.object(torch.version, "cuda", changes.pop("cuda", "13.0")),
        mock.patch.multiple(support, **{**settings, **changes}),
        mock.patch.object(backends, "_installed", lambda _module: True),
    ):
        support.missing.cache_clear()
        try:
            yield
        finally:
            support.missing.cache_clear()


def emulated(name: str, call: AttentionCall) -> tuple[Tensor, list[dict[str, Any]]]:
    """Output of backend `name` over emulated kernels, and what they were called with."""
    out, _, calls = emulated_with_lse(name, call)
    return out, calls


def emulated_with_lse(name: str, call: AttentionCall) -> tuple[Tensor, Tensor | None, list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    empty = torch.empty

    def poisoned(*shape: int, **options: Any) -> Tensor:
        x = empty(*shape, **options)
        return x.fill_(255 if x.dtype == torch.uint8 else torch.nan)

    with emulators.installed(calls), gpu((12, 0)), mock.patch.object(torch, "empty", poisoned):
        out, lse = backends.attention_module(name).run(call)
    assert (lse is not None) == call.return_lse
    assert out.dtype == call.result_dtype
    assert out.is_contiguous()
    return out, lse, calls


@pytest.mark.parametrize(("name", "options"), list(combinations()))
def test_what_a_kernel_is_handed_gives_the_reference_s_numbers(
    package: None, name: str, options: dict[str, Any]
) -> None:
    call = make(LAYOUT[name], **options)
    assert support.attention_unsupported(name, call) is None
    out, _ = emulated(name, call)
    assert error(out, call) < BOUNDS[name]
    lengths = options.get("lengths", ())
    if 0 in lengths:
        assert not out[lengths.index(0)].any()


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("options", {**CASES, **PAGED_MULTI}.values(), ids=[*CASES, *PAGED_MULTI])
def test_trtllm_gen_is_as_far_off_as_e4m3_alone(package: None, options: dict[str, Any], scale: float | None) -> None:
    """However large scores are: beside operands rounded likewise, roundings of weights and output are what is left."""
    call = make("4token", **{**options, **({} if scale is None else {"scale": scale})})
    out, _ = emulated("flashinfer-trtllm-gen", call)
    assert error(out, in_e4m3(call)) < 0.6 * BOUNDS["flashinfer-trtllm-gen"]


@pytest.mark.parametrize("name", BOUNDS)
def test_a_block_table_is_read_by_rows_however_it_lies(package: None, name: str) -> None:
    call = make(LAYOUT[name], **(PREFILLS["prefill"] if support.KERNELS[name].new_tokens else {}))
    assert call.block_table is not None
    out, calls = emulated(name, replace(call, block_table=call.block_table.t().contiguous().t()))
    assert error(out, call) < BOUNDS[name]
    tables = [a["block_tables"] for a in calls if a.get("block_tables") is not None]
    assert all(table.is_contiguous() for table in tables)


@pytest.mark.parametrize("name", [name for name in BOUNDS if support.KERNELS[name].new_tokens])
def test_a_prefill_s_own_tokens_need_no_room_in_its_block_table(package: None, name: str) -> None:
    call = make(LAYOUT[name], queries=20, lengths=(37, 96, 100), new=True, capacity=112)
    assert call.block_table is not None
    out, _ = emulated(name, replace(call, block_table=call.block_table[:, :5]))
    assert error(out, call) < BOUNDS[name]


def test_xqa_serves_head_sizes_of_whole_words_of_scales(package: None) -> None:
    for head_dim in support.KERNELS["flashinfer-xqa"].head_sizes:
        call = make(head_dim=head_dim)
        assert error(emulated("flashinfer-xqa", call)[0], call) < BOUNDS["flashinfer-xqa"]
    call = make(head_dim=96)
    assert error(emulated("flashinfer-xqa", call)[0], call) > 2 * BOUNDS["flashinfer-xqa"]


def swapped(call: AttentionCall) -> AttentionCall:
    return replace(call, k_global=call.v_global, v_global=call.k_global)


def heads_mixed(call: AttentionCall) -> AttentionCall:
    return replace(call, v_global=call.v_global.flip(0))


def other_v_order(call: AttentionCall) -> AttentionCall:
    assert call.v_scales is not None
    convert = layout.v_scales_from_4token if call.v_scale_layout == "4token" else layout.v_scales_to_4token
    return replace(call, v_scales=convert(call.v_scales).contiguous())


def nibbles_swapped(call: AttentionCall) -> AttentionCall:
    packed = torch_fp4kv.to_packed(call.k_data)
    return replace(call, k_data=torch_fp4kv.from_packed(packed >> 4 | packed << 4))


def strided_v(call: AttentionCall) -> AttentionCall:
    """V in pages with room between them, as views of a larger pool."""
    pages, heads, size, groups = call.v_data.shape
    padded = torch.zeros(2 * pages, heads, size, groups, dtype=torch.int64)[::2]
    return replace(call, v_data=padded.copy_(call.v_data))


def unaligned_v(call: AttentionCall) -> AttentionCall:
    """V one word behind the start of its memory."""
    data = torch.empty(call.v_data.numel() + 1, dtype=torch.int64)[1:].view(call.v_data.shape)
    return replace(call, v_data=data.copy_(call.v_data))


MUTATIONS: dict[str, tuple[Callable[[AttentionCall], AttentionCall], tuple[str, ...]]] = {
    "global scales of K and V swapped": (swapped, tuple(BOUNDS)),
    "global scales of the heads mixed": (heads_mixed, tuple(BOUNDS)),
    "V's scales in the other order": (other_v_order, tuple(BOUNDS)),
    "nibbles of K swapped": (nibbles_swapped, tuple(BOUNDS)),
    "V with other strides": (
        strided_v,
        ("flashinfer-trtllm-gen", "flashinfer-prims-ts", "flashinfer-xqa"),
    ),
}


@pytest.mark.parametrize(
    ("mutate", "name"),
    [
        pytest.param(mutate, name, id=f"{name.removeprefix('flashinfer-')}-{mutation}")
        for mutation, (mutate, names) in MUTATIONS.items()
        for name in names
    ],
)
def test_a_planted_mistake_is_seen(package: None, mutate: Callable[[AttentionCall], AttentionCall], name: str) -> None:
    call = make(LAYOUT[name], **(PREFILLS["prefill"] if support.KERNELS[name].new_tokens else {}))
    out, _ = emulated(name, mutate(call))
    assert error(out, call) > 2 * BOUNDS[name]


LSE = [
    pytest.param(name, options, id=f"{name.removeprefix('flashinfer-')}-{case}")
    for name, kernel in support.KERNELS.items()
    if kernel.lse
    for case, options in (
        {"prefill": PREFILLS["prefill"], "row without tokens": PREFILLS["prefill, soft-cap"]}
        if kernel.new_tokens
        else {key: CASES[key] for key in ("one query", "row without tokens", "transformed and shifted K")}
        | ({"sinks": CASES["sinks"]} if kernel.sinks else {})
        | {key: PAGED_MULTI[key] for key in ("three queries", "rows of fewer tokens than queries")}
    ).items()
]


@pytest.mark.parametrize(("name", "options"), LSE)
def test_log_sum_exps_are_natural_ones_of_the_scores(package: None, name: str, options: dict[str, Any]) -> None:
    call = make(LAYOUT[name], return_lse=True, **options)
    assert support.attention_unsupported(name, call) is None
    out, lse, _ = emulated_with_lse(name, call)
    _, expected = oracle.attend(call)
    assert lse is not None
    assert lse.dtype == torch.float32
    unseen = expected == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen)
    assert float((lse - expected)[~unseen].abs().max()) < 0.3 * BOUNDS[name] * float(expected[~unseen].abs().max())
    assert error(out, call) < BOUNDS[name]


@pytest.mark.parametrize(("name", "options"), list(exact_combinations()))
def test_exact_copies_join_what_a_kernel_reads(package: None, name: str, options: dict[str, Any]) -> None:
    call = make_exact(LAYOUT[name], return_lse=True, **options)
    assert support.attention_unsupported(name, call) is None
    out, lse, _ = emulated_with_lse(name, call)
    assert error(out, call) < BOUNDS[name]
    _, expected = oracle.attend(call)
    assert lse is not None
    unseen = expected == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen)
    assert float((lse - expected)[~unseen].abs().max()) < 0.3 * BOUNDS[name] * float(expected[~unseen].abs().max())


def stored_mistakes() -> dict[str, Callable[[AttentionCall], AttentionCall]]:
    def sinks_twice(call: AttentionCall) -> AttentionCall:
        return exact_stored(replace(call, num_sink_tokens=0))

    def window_twice(call: AttentionCall) -> AttentionCall:
        return exact_stored(replace(call, exact_from=call.lengths))

    def bias_lost(call: AttentionCall) -> AttentionCall:
        return exact_stored(replace(call, k_bias=None))

    def heads_crossed(call: AttentionCall) -> AttentionCall:
        right = exact_stored(call)
        return replace(right, k_data=right.k_data.flip(1))

    exact_stored = exact.stored
    return {f.__name__: f for f in (sinks_twice, window_twice, bias_lost, heads_crossed)}


@pytest.mark.parametrize("mistake", stored_mistakes())
def test_a_mistake_in_what_is_left_to_the_kernel_is_seen(package: None, mistake: str) -> None:
    call = make_exact("linear", **EXACT["transformed and shifted K and V"])
    with mock.patch.object(exact, "stored", stored_mistakes()[mistake]):
        out, _ = emulated("flashinfer-fa2", call)
    assert error(out, call) > 2 * BOUNDS["flashinfer-fa2"]


def test_a_query_without_its_e4m3_scale_is_seen(package: None) -> None:
    def lost(x: Tensor) -> tuple[Tensor, Tensor]:
        query, scale = to_e4m3(x)
        return query, torch.ones_like(scale)

    to_e4m3, call = trtllm_gen._to_e4m3, make("4token")
    with mock.patch.object(trtllm_gen, "_to_e4m3", lost):
        out, _ = emulated("flashinfer-trtllm-gen", call)
    assert error(out, call) > 2 * BOUNDS["flashinfer-trtllm-gen"]


def test_pages_cut_from_a_static_cache_with_a_wrong_stride_are_seen(package: None) -> None:
    _cut = paged._cut

    def wrong(x: Tensor, size: int) -> Tensor:
        right = _cut(x, size)
        return right.as_strided(right.shape, (right.stride(0), right.stride(0), right.stride(2), 1))

    call = make(page_size=None)
    with mock.patch.object(paged, "_cut", wrong):
        out, _ = emulated("flashinfer-xqa", call)
    assert error(out, call) > 2 * BOUNDS["flashinfer-xqa"]


def test_a_cache_under_amax_2688_saturates_in_e4m3_and_no_append_for_it_writes_one(package: None) -> None:
    missing_six = make("4token", headroom=1 / 6)
    out, _ = emulated("flashinfer-trtllm-gen", missing_six)
    assert error(out, missing_six) > 2 * BOUNDS["flashinfer-trtllm-gen"]

    words, scales = torch.zeros(2, 1, 1, 16, 4, dtype=torch.int64), torch.zeros(2, 1, 1, 16, 4, dtype=torch.uint8)
    x = torch.randn(1, 1, 16, 64) * 20
    for rule in ("amax", "4over6", "mse"):
        torch_fp4kv.append(
            words[0],
            scales[0],
            words[1],
            scales[1],
            x,
            x,
            torch.arange(16)[None],
            x.abs().max().item() / 2688,
            x.abs().max().item() / 2688,
            scale_rule=rule,
            v_scale_layout="4token",
        )
        assert float(scales.view(torch.float8_e4m3fn).float().max()) == 72.0
        data = torch_fp4kv.to_packed(words)
        largest = emulators.decode(data[0], scales[0].view(torch.float8_e4m3fn)).abs().max()
        assert 400 < float(largest) <= 448


def test_an_fp8_workspace_saturates_new_tokens_and_takes_whole_pages_only(package: None) -> None:
    call = make("4token", **PREFILLS["prefill"])
    limit = 448 * call.k_global[:, None, None]
    wide = call.k_new * 50
    outs = [
        emulated("flashinfer-materialize-fp8", replace(call, k_new=k_new))[0]
        for k_new in (wide, wide.clamp(-limit, limit), call.k_new)
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    strided = call.k_data.transpose(1, 2).contiguous().transpose(1, 2)
    refused = replace(call, k_data=strided, v_data=strided)
    assert materialize.unsupported(refused) == "each page must be contiguous"


def test_an_fp8_workspace_with_page_0_taken_for_the_first_is_seen(package: None) -> None:
    call = make("4token", **PREFILLS["prefill"])
    attend = materialize.attend

    def shifted(call: AttentionCall, pages: tuple[Tensor, Tensor, Tensor], *rest: Any) -> Tensor:
        return attend(call, (pages[0], pages[1] - 1, pages[2]), *rest)

    with mock.patch.object(materialize, "attend", shifted):
        out, _ = emulated("flashinfer-materialize-fp8", call)
    assert not error(out, call) < 2 * BOUNDS["flashinfer-materialize-fp8"]


def test_trtllm_gen_gets_one_power_of_two_for_the_query_and_none_for_the_output(package: None) -> None:
    call = make("4token", queries=2)
    _, ((arguments),) = emulated("flashinfer-trtllm-gen", call)
    scale = arguments["bmm1_scale_log2"] / (128**-0.5 * 1.4426950408889634)
    assert float(torch.frexp(scale)[0]) == 0.5
    query = arguments["query"].float().abs().max()
    assert 224 <= float(query) <= 448
    assert arguments["bmm2_scale"] == 1.0
    assert arguments["q_len_per_req"] == 2
    assert arguments["window_left"] == -1
    assert arguments["kv_cache"][0].data_ptr() == call.k_data.data_ptr()
    assert arguments["kv_cache_sf"][1].data_ptr() == call.v_scales.data_ptr()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_the_others_as_they_are(package: None, value: float) -> None:
    call = make("4token")
    broken = replace(call, q=call.q.clone())
    broken.q[1, 2, 0, 7] = value
    want, have = (emulated("flashinfer-trtllm-gen", c)[0] for c in (call, broken))
    assert torch.equal(have[::2], want[::2])
    assert bool(have[1, 2].isnan().all())


@pytest.mark.parametrize("name", [*BOUNDS][:3])
def test_window_and_sinks_are_handed_over(package: None, name: str) -> None:
    call = make(LAYOUT[name], window=9, sink_logits=SINKS.bfloat16())
    arguments = emulated(name, call)[1][-1]
    assert arguments["window_left"] == 8
    handed = arguments["attention_sinks" if "prims" in name else "sinks"]
    assert handed.dtype == torch.float32
    assert torch.equal(handed, SINKS.bfloat16().float())


def test_fa2_splits_no_kv_where_flashinfer_saw_wrong_numbers(package: None) -> None:
    import flashinfer.prefill

    assert fa2.WITHOUT_SPLIT_KV == flashinfer.prefill._NVFP4_SPLIT_KV_BROKEN_ARCHS
    call = make()
    for capability, expected in (((9, 0), False), ((12, 0), True), ((12, 1), True)):
        calls: list[dict[str, Any]] = []
        fa2._wrapper.cache_clear()
        with emulators.installed(calls), gpu(capability):
            fa2.run(call)
        assert calls[0]["disable_split_kv"] is expected


class NoSync(TorchDispatchMode):
    """Raises where a GPU would make the host wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero")
        assert func._schema.name.split("::")[1] not in waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*BOUNDS][:3])
def test_the_host_waits_for_nothing(package: None, name: str) -> None:
    module = backends.attention_module(name)
    call = make(LAYOUT[name], queries=min(3, support.KERNELS[name].max_queries))
    kept = {"flashinfer-trtllm-gen": "trtllm_decode", "flashinfer-prims-ts": "prims_ts_decode"}
    with (
        mock.patch.object(emulators, kept.get(name, "xqa_decode"), lambda a: a["out"].zero_()),
        emulators.installed([]),
        NoSync(),
    ):
        module.run(call)


# Which call goes where.

PLAIN, FOUR_TOKEN = make(), make("4token")
WINDOWED = make(k_exact=torch.zeros(3, 2, 85, 128), v_exact=torch.zeros(3, 2, 85, 128), num_sink_tokens=4)
NEW = torch.zeros(3, 2, 32, 128, dtype=torch.bfloat16)
PREFILL = make(queries=32, lengths=(37, 96, 32), new=True)

CHOSEN = {
    (8, 0): ("triton-gluon", "triton", "triton-gluon", "triton-prefill"),
    (9, 0): ("triton-gluon", "triton", "triton-gluon", "triton-prefill"),
    (10, 0): ("triton-gluon", "flashinfer-trtllm-gen", "triton-gluon", "triton-prefill"),
    (10, 3): ("triton-gluon", "flashinfer-trtllm-gen", "triton-gluon", "triton-prefill"),
    (10, 7): ("triton-gluon", "triton", "triton-gluon", "triton-prefill"),
    (11, 0): ("triton-gluon", "triton", "triton-gluon", "triton-prefill"),
    (12, 0): ("flashinfer-xqa", "triton", "triton-gluon", "triton-prefill"),
    (12, 1): ("flashinfer-xqa", "triton", "triton-gluon", "triton-prefill"),
}
"""For a plain cache, one with V's scales in the 4-token order, one with an exact window, and a prefill."""


@pytest.mark.parametrize(("capability", "expected"), CHOSEN.items(), ids=str)
def test_each_gpu_gets_its_backend(capability: tuple[int, int], expected: tuple[str, ...]) -> None:
    with gpu(capability):
        chosen = [backends.choose("attention", CUDA, "auto", call) for call in (PLAIN, FOUR_TOKEN, WINDOWED, PREFILL)]
    assert tuple(choice.name for choice in chosen) == expected
    if capability in ((12, 0), (12, 1)):
        assert "log-sum-exp" in chosen[2].passed_over["flashinfer-xqa"]
    if capability[0] == 9:
        reason = "for compute capability 12.0, 12.1; this GPU has 9.0"
        assert chosen[0].passed_over["flashinfer-xqa"] == reason


@pytest.mark.parametrize(("queries", "name"), [(1, "triton"), (8, "triton"), (16, "triton-prefill")])
def test_few_queries_over_fp8_go_to_the_portable_kernel(queries: int, name: str) -> None:
    data = torch.zeros(1, 2, 64, 64, dtype=torch.uint8)
    q = torch.zeros(1, 8, queries, 64, dtype=torch.bfloat16)
    one, lengths = torch.ones(()), torch.tensor([40], dtype=torch.int32)
    call = AttentionCall(q, data, None, data, None, one, one, lengths, k_format="fp8", v_format="fp8")
    with gpu((9, 0)):
        assert backends.choose("attention", CUDA, "auto", call).name == name
        assert backends.choose("attention", CUDA, "triton-prefill", call).name == "triton-prefill"


BY_NAME = {
    "flashinfer-trtllm-gen": [(10, 0), (10, 3)],
    "flashinfer-prims-ts": [(10, 0), (10, 3), (10, 7)],
    "flashinfer-xqa": [(12, 0), (12, 1)],
    "flashinfer-fa2": [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)],
    "flashinfer-dequantize": [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)],
    "flashinfer-materialize-fp8": [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)],
}
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)]


@pytest.mark.parametrize("name", BY_NAME)
def test_by_name_a_kernel_serves_where_it_runs_and_is_an_error_elsewhere(name: str) -> None:
    for capability in CAPABILITIES:
        call = make(LAYOUT[name], **(PREFILLS["prefill"] if support.KERNELS[name].new_tokens else {}))
        with gpu(capability):
            if capability in BY_NAME[name]:
                assert backends.choose("attention", CUDA, name, call).name == name
                continue
            message = f"cannot serve this attention: for compute capability .* this GPU has {capability[0]}\\."
            with pytest.raises(ValueError, match=message):
                backends.choose("attention", CUDA, name, call)


def test_preferred_backends_come_first_where_they_serve() -> None:
    try:
        torch_fp4kv.prefer("flashinfer-dequantize", "flashinfer-fa2")
        with gpu((12, 0)):
            for call, name in (
                (PREFILL, "flashinfer-dequantize"),
                (PLAIN, "flashinfer-fa2"),
                (FOUR_TOKEN, "triton"),
                (WINDOWED, "triton-gluon"),
            ):
                choice = backends.choose("attention", CUDA, "auto", call)
                assert choice.name == name
            assert "flashinfer-fa2" in choice.passed_over
        with pytest.raises(ValueError, match="unknown backend 'cudnn' for attention; known: flashinfer-trtllm-gen"):
            torch_fp4kv.prefer("cudnn")
    finally:
        torch_fp4kv.prefer()
    with gpu((12, 0)):
        assert backends.choose("attention", CUDA, "auto", PLAIN).name == "flashinfer-xqa"


ABSENT = {
    "not installed": ({"version": lambda: None}, "pip install 'torch-fp4kv"),
    "too old": ({"version": lambda: "0.6.18"}, "0.6.18 is installed, 0.7.4 is the first that is used"),
    "too old, post-release": ({"version": lambda: "0.7.3.post1"}, "0.7.3.post1 is installed"),
    "torch without CUDA": ({"cuda": None}, "this torch is built without CUDA"),
    "no compiler": ({"_can_compile": lambda: False}, "neither nvcc nor flashinfer-jit-cache"),
}


@pytest.mark.parametrize(("changes", "reason"), ABSENT.values(), ids=ABSENT)
def test_without_flashinfer_the_others_serve_and_say_why(changes: dict[str, Any], reason: str) -> None:
    with gpu((12, 0), **changes):
        choice = backends.choose("attention", CUDA, "auto", PLAIN)
        assert choice.name == "triton-gluon"
        assert reason in choice.passed_over["flashinfer-xqa"]
        with pytest.raises(ValueError, match="backend 'flashinfer-xqa' cannot serve this attention"):
            backends.choose("attention", CUDA, "flashinfer-xqa", PLAIN)


EXACT_OPTIONS: dict[str, Any] = {"k_exact": NEW, "v_exact": NEW, "exact_from": torch.zeros(3, dtype=torch.int32)}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sinks on FA2": ("flashinfer-fa2", {"sink_logits": SINKS}, "ignores sink logits without an error"),
    "soft-cap on XQA": ("flashinfer-xqa", {"softcap": 30.0}, "has no soft-cap"),
    "soft-cap on trtllm-gen": ("flashinfer-trtllm-gen", {"softcap": 30.0}, "has no soft-cap"),
    "head size": ("flashinfer-trtllm-gen", {"head_dim": 192}, "one head size among (64, 128, 256), got 192"),
    "head size on FA2": ("flashinfer-fa2", {"head_dim": 64}, "one head size among (128, 256), got 64"),
    "head size on XQA": ("flashinfer-xqa", {"head_dim": 96}, "one head size among (64, 128, 192, 256), got 96"),
    "page size": ("flashinfer-trtllm-gen", {"page_size": 96}, "the page size must be among (16, 32, 64), got 96"),
    "page size on XQA": ("flashinfer-xqa", {"page_size": 48}, "the page size must be among (16, 32, 64, 128), got 48"),
    "static cache": ("flashinfer-trtllm-gen", {"page_size": None}, "takes pages behind a block table only"),
    "static cache, queries": ("flashinfer-fa2", {"page_size": None, "queries": 2}, "a row may be a ring"),
    "static cache, window": ("flashinfer-xqa", {"page_size": None, "window": 9}, "a row may be a ring"),
    "capacity": ("flashinfer-xqa", {"page_size": None, "capacity": 40, "lengths": (5, 9, 40)}, "multiple of 16"),
    "capacity on FA2": ("flashinfer-fa2", {"page_size": None, "capacity": 40, "lengths": (5, 9, 40)}, "multiple of 16"),
    "queries": ("flashinfer-xqa", {"queries": 2}, "at most 1 new tokens a row, got 2"),
    "group": ("flashinfer-xqa", {"heads": 48}, "at most 16 query heads a KV head, got 24"),
    "group on trtllm-gen": ("flashinfer-trtllm-gen", {"heads": 48}, "at most 16 query heads a KV head, got 24"),
    "group on prims-ts": ("flashinfer-prims-ts", {"heads": 258}, "at most 128 query heads a KV head, got 129"),
    "not causal": ("flashinfer-fa2", {"queries": 2, "causal": False}, "several new tokens are causal"),
    "mask": ("flashinfer-xqa", {"mask": torch.ones(1, 1, 1, 96, dtype=torch.bool)}, "takes no mask"),
    "left padding": ("flashinfer-xqa", {"starts": torch.zeros(3, dtype=torch.int32)}, "takes no starts"),
    "ragged queries": ("flashinfer-xqa", {"q_lengths": torch.ones(3, dtype=torch.int32)}, "takes no q_lengths"),
    "log-sum-exp": ("flashinfer-xqa", {"return_lse": True}, "gives no log-sum-exp"),
    "sink and bias of V": ("flashinfer-xqa", {"sink_logits": SINKS, "v_bias": V_BIAS}, "weights must sum to 1"),
    "sink and bias of K": (
        "flashinfer-xqa",
        {"sink_logits": SINKS, "k_bias": torch.ones(2, 128)},
        "a constant in every score",
    ),
    "soft-cap and bias of K": ("flashinfer-fa2", {"softcap": 9.0, "k_bias": torch.ones(2, 128)}, "a constant in every"),
    "negative scale": ("flashinfer-xqa", {"scale": -1.0}, "must be positive"),
    "exact window": ("flashinfer-xqa", {"k_exact": NEW, "v_exact": NEW}, "has no log-sum-exp"),
    "exact window, trtllm-gen": ("flashinfer-trtllm-gen", {"k_exact": NEW, "v_exact": NEW}, "has no log-sum-exp"),
    "exact, sinks in a page": ("flashinfer-prims-ts", {**EXACT_OPTIONS, "num_sink_tokens": 4}, "the 4 sinks must fill"),
    "exact, window": ("flashinfer-fa2", {**EXACT_OPTIONS, "window": 20}, "without a window"),
    "exact, two new tokens": ("flashinfer-fa2", {**EXACT_OPTIONS, "queries": 2}, "for one new token a row"),
    "exact, static cache": ("flashinfer-fa2", {**EXACT_OPTIONS, "page_size": None}, "behind a block table"),
    "exact, soft-cap and bias": (
        "flashinfer-fa2",
        {**EXACT_OPTIONS, "softcap": 30.0, "k_bias": torch.ones(2, 128)},
        "a constant in every score",
    ),
    "exact, prefill": ("flashinfer-dequantize", {**EXACT_OPTIONS, "new": True}, "cannot leave out stored tokens"),
    "prefill without its tokens": ("flashinfer-dequantize", {}, "is for prefills that bring their own tokens"),
    "prefill, static cache": ("flashinfer-dequantize", {"new": True, "page_size": None}, "behind a block table only"),
    "prefill, bias": ("flashinfer-dequantize", {"new": True, "v_bias": V_BIAS}, "must meet the same query"),
    "prefill, V's order": ("flashinfer-materialize-fp8", {"new": True, "v_scale_layout": "linear"}, "as '4token'"),
    "prefill on FA2": ("flashinfer-fa2", {"new": True}, "reads the call's own tokens from storage only"),
    "no query": ("flashinfer-xqa", {"queries": 0}, "there is no query"),
}


@pytest.mark.parametrize(("name", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_a_kernel_gets_wrong_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    call = make(**{"v_scale_layout": LAYOUT[name], **options})
    assert reason in str(support.attention_unsupported(name, call))


@pytest.mark.parametrize("name", [*BOUNDS][:4])
def test_storage_that_a_kernel_reads_otherwise_is_refused(name: str) -> None:
    call = make(LAYOUT[name])
    other = "linear" if LAYOUT[name] == "4token" else "4token"
    for changed, reason in (
        (replace(call, v_scale_layout=other), f"reads V's scales as {LAYOUT[name]!r}"),
        (strided_v(call), "the same strides"),
        (unaligned_v(call), "aligned to 16 bytes"),
        (replace(call, q=call.q.float()), "the query must be torch.bfloat16"),
        (replace(call, k_format="fp8"), "K and V must be nvfp4, got fp8"),
        (replace(call, v_data=call.v_data[..., :4], v_scales=call.v_scales[..., :4]), "one head size"),
    ):
        assert reason in str(support.attention_unsupported(name, changed))
    with mock.patch.object(support, "capturing", lambda _device: True):
        reason = support.attention_unsupported(name, call)
    assert (reason is None) == support.KERNELS[name].capture


# The whole way, through the op.


@pytest.mark.parametrize("name", [*BOUNDS][:4])
def test_doctor_s_round_trip_goes_through_the_op_and_sees_wrong_numbers(
    package: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "missing", lambda *_arguments: None)
    monkeypatch.setattr(support, "capability", lambda _device: (12, 0))
    cpu = torch.device("cpu")
    with emulators.installed([]):
        assert doctor._flashinfer_problem(cpu, name) is None
        fold = paged.fold_query
        monkeypatch.setattr(backends.attention_module(name), "fold_query", lambda call: fold(call) * 3)
        assert "is off by" in str(doctor._flashinfer_problem(cpu, name))


@pytest.mark.parametrize(
    ("name", "window"),
    [("flashinfer-xqa", 0), ("flashinfer-trtllm-gen", 0), ("flashinfer-prims-ts", 0), ("flashinfer-fa2", 16)],
)
def test_a_model_decodes_over_it(package: None, name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches hand over calls that these kernels serve, with an exact window or without; a model's logits follow."""
    pytest.importorskip("transformers")
    from hf_models import llama, prompt

    torch_fp4kv.register_attention()
    # Scores of a few units: the sharper they are, the more E4M3 of q and k shows.
    model = llama(initializer_range=0.05, head_dim=128 if name == "flashinfer-fa2" else 64).to(torch.bfloat16)
    model.set_attn_implementation("fp4kv")
    ids, logits = prompt(batch=1, tokens=40), {}
    monkeypatch.setattr(support, "capability", lambda _device: (9, 0))
    monkeypatch.setattr(support, "missing", lambda *_arguments: None)
    calls: list[dict[str, Any]] = []
    for backend in ("torch", name):
        pool = torch_fp4kv.PagedNVFP4Cache(
            *(model.config, 8, 1, 128),
            page_size=16,
            recipe=torch_fp4kv.get_recipe("nvfp4", exact_window=window, num_sink_tokens=4 if window else 0),
            v_scale_layout=LAYOUT[name],
        )
        row = pool.admit()
        try:
            torch_fp4kv.prefer(backend)
            with torch.no_grad(), emulators.installed(calls):
                model(ids, past_key_values=pool.row(row))
                for token in range(3):
                    positions = pool.step([row])
                    logits[backend] = model(
                        torch.tensor([[token]]), position_ids=positions, past_key_values=pool.batch
                    ).logits.float()
        finally:
            torch_fp4kv.prefer()
    assert len([a for a in calls if "block_tables" in a or "paged_kv_indices" in a]) == 3 * len(pool.layers)
    error = (logits[name] - logits["torch"]).norm() / logits["torch"].norm()
    assert 0 < float(error) < 2 * BOUNDS[name] + 0.01


@pytest.mark.parametrize("name", ["flashinfer-dequantize", "flashinfer-materialize-fp8"])
def test_a_model_prefills_over_history_by_it(package: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from hf_models import llama, prompt

    torch_fp4kv.register_attention()
    model = llama(initializer_range=0.05).to(torch.bfloat16)
    model.set_attn_implementation("fp4kv")
    ids, logits = prompt(batch=1, tokens=40), {}
    monkeypatch.setattr(support, "missing", lambda *_arguments: None)
    calls: list[dict[str, Any]] = []
    for backend in ("torch", name):
        pool = torch_fp4kv.PagedNVFP4Cache(
            *(model.config, 8, 1, 128), page_size=16, recipe="nvfp4-plain", v_scale_layout=LAYOUT[name]
        )
        row = pool.admit()
        try:
            torch_fp4kv.prefer(backend)
            with torch.no_grad(), emulators.installed(calls):
                for chunk in ids.split(23, 1):
                    logits[backend] = model(chunk, past_key_values=pool.row(row)).logits.float()
        finally:
            torch_fp4kv.prefer()
    # The first chunk has no history.
    assert len([a for a in calls if "paged_kv_indices" in a]) == len(pool.layers)
    error = (logits[name] - logits["torch"]).norm() / logits["torch"].norm()
    assert 0 < float(error) < 2 * BOUNDS[name] + 0.01


def test_doctor_notes_what_flashinfer_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (support.FAST_MATH_OFF, support.FAST_MATH_OFF_CUDA):
        monkeypatch.delenv(variable, raising=False)
    with gpu((10, 0)):
        fast_math, pools, windows, by_name = doctor._flashinfer_notes([CUDA])
        assert "use fast math" in fast_math
        monkeypatch.setenv(support.FAST_MATH_OFF_CUDA, "1")
        assert "exact math with backend='cuda' (TRTLLM_" in doctor._flashinfer_notes([CUDA])[0]
    assert "v_scale_layout='4token'" in pools
    assert "exact window (the default recipe)" in windows
    assert by_name.endswith("goes by name to flashinfer-prims-ts or flashinfer-fa2 too")
    monkeypatch.setenv(support.FAST_MATH_OFF, "1")
    with gpu((9, 0)):
        assert doctor._flashinfer_notes([CUDA]) == [
            "FlashInfer's quantisers, used by name only, use exact math (FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1)",
            "cuda:0: decode over an exact window in a paged cache goes by name to flashinfer-fa2 too",
        ]
    with gpu((9, 0), version=lambda: None):
        assert doctor._flashinfer_notes([CUDA]) == []


# Workspaces.


def test_scratch_is_new_at_each_call_with_its_counters_zeroed() -> None:
    """What a kernel left, or another stream's kernel uses, is never seen; and nothing outlives a graph's capture."""
    with mock.patch.object(torch, "empty", lambda *shape, **options: torch.full(shape, 255, dtype=torch.uint8)):
        first, second = (paged.scratch(torch.device("cpu"), 64, zeroed=16) for _ in range(2))
    for buffer in (first, second):
        assert not buffer[:16].any()
        assert bool((buffer[16:] == 255).all())
    assert first.data_ptr() != second.data_ptr()


def test_fa2_has_a_wrapper_for_each_stream(package: None) -> None:
    with emulators.installed([]):
        device = torch.device("cpu")
        first = fa2._wrapper(device, 0, "HND")
        assert fa2._wrapper(device, 0, "HND") is first
        assert fa2._wrapper(device, 7, "HND") is not first


# Append and quantise.


def append_arguments(**options: Any) -> AppendCall:
    """K and V of two rows and three tokens into pages of 4, one slot negative."""
    torch.manual_seed(1)
    shape = (2, 2, 3, 128)
    spread = torch.exp(torch.rand(2, 2, 3, 8) * 3).repeat_interleave(16, -1)
    k, v = (torch.randn(shape) * spread).bfloat16(), (torch.randn(shape) * spread * 0.02).bfloat16()
    storage = [torch.zeros(4, 2, 4, 8, dtype=t) for t in (torch.int64, torch.uint8) * 2]
    slots = torch.tensor([[3, 9, 1], [14, -1, 6]])
    scales = torch.tensor(0.23), torch.tensor(0.0047)
    return AppendCall(*storage, k, v, slots, *scales, **{"skip_negative": True, **options})


@pytest.mark.parametrize("rule", ["amax", "4over6"])
def test_append_by_flashinfer_writes_what_ours_does_within_one_code(package: None, rule: str) -> None:
    theirs, ours = append_arguments(scale_rule=rule), append_arguments(scale_rule=rule, backend="torch")
    calls: list[dict[str, Any]] = []
    with emulators.installed(calls):
        append.append(theirs)
    fields = {name: getattr(ours, name) for name in AppendCall.__slots__}
    torch_fp4kv.append(**fields)
    exact = torch.zeros(2, 4, 2, 4, 128, dtype=torch.bfloat16)
    as_exact = {"k_format": "exact", "v_format": "exact", "k_scales": None, "v_scales": None}
    torch_fp4kv.append(**{**fields, **as_exact, "k_data": exact[0], "v_data": exact[1]})
    for name, stored in zip("kv", exact):
        assert stored.any()
        errors, codes = [], []
        for call in (theirs, ours):
            data, scales, scale = (getattr(call, f"{name}_{part}") for part in ("data", "scales", "global"))
            errors.append((torch_fp4kv.dequantize(data, scales, scale) - stored).norm().item())
            # A zero's sign is theirs alone.
            magnitudes = torch_fp4kv.to_packed(data)
            codes.append(torch.stack([magnitudes & 7, magnitudes >> 4 & 7]).int())
        assert errors[0] == pytest.approx(errors[1], rel=2e-3)
        if rule == "amax":
            difference = (codes[0] - codes[1]).abs()
            assert int(difference.max()) <= 1
            assert float((difference > 0).float().mean()) < 0.005
    assert (calls[0]["nvfp4_4over6"] is None) == (rule == "amax")


def test_append_with_scales_swapped_is_seen(package: None) -> None:
    call, ours = append_arguments(), append_arguments(backend="torch")
    with emulators.installed([]):
        append.append(replace(call, k_global=call.v_global, v_global=call.k_global))
    torch_fp4kv.append(**{name: getattr(ours, name) for name in AppendCall.__slots__})
    have, want = (torch_fp4kv.dequantize(c.v_data, c.v_scales, ours.v_global) for c in (call, ours))
    assert float((have - want).norm() / want.norm()) > 0.5


def test_append_is_flashinfer_s_on_12_x_alone_and_by_name_from_8_0() -> None:
    call = append_arguments()
    for capability in CAPABILITIES:
        with gpu(capability):
            chosen = backends.choose("append", CUDA, "auto", call).name
            assert chosen == ("flashinfer" if capability[0] == 12 else "triton")
            if capability in BY_NAME["flashinfer-fa2"]:
                assert backends.choose("append", CUDA, "flashinfer", call).name == "flashinfer"
            else:
                with pytest.raises(ValueError, match="cannot serve this append: for compute capability"):
                    backends.choose("append", CUDA, "flashinfer", call)


APPEND_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"k_bias": torch.zeros(2, 128)}, "subtracts no bias"),
    "exact copies": ({"exact_slots": torch.zeros(2, 3, dtype=torch.int64)}, "keeps no exact copies"),
    "scale rule": ({"scale_rule": "mse"}, "has no scale rule 'mse'"),
    "format": ({"k_format": "fp8"}, "K and V must be nvfp4"),
    "V's order": ({"v_scale_layout": "4token"}, "in linear order only"),
}


@pytest.mark.parametrize(("options", "reason"), APPEND_REFUSED.values(), ids=APPEND_REFUSED)
def test_append_refuses(options: dict[str, Any], reason: str) -> None:
    call = append_arguments(**options)
    with gpu((12, 0)):
        assert reason in backends.choose("append", CUDA, "auto", call).passed_over["flashinfer"]


def test_append_refuses_a_scale_a_head_and_float32() -> None:
    call = append_arguments()
    assert "one global scale" in str(support.append_unsupported(replace(call, k_global=torch.ones(2))))
    assert "must be 16-bit" in str(support.append_unsupported(replace(call, k=call.k.float())))
    assert "one head size" in str(support.append_unsupported(replace(call, k=call.k[..., :32], v=call.v[..., :32])))


@pytest.mark.parametrize("backend", ["cuda", "cute-dsl"])
@pytest.mark.parametrize("scales", ["one", "a head", "a row"])
def test_quantize_by_flashinfer_is_ours_within_one_code(package: None, backend: str, scales: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 2, 5, 64).bfloat16()
    shape = {"one": (), "a head": (2,), "a row": (3, 2, 5)}[scales]
    scale = torch.rand(shape) * 0.01 + 0.004
    reason = quantize.unsupported(x, scale, None, "amax", backend)
    if backend == "cute-dsl" and scales != "one":
        assert reason == "CuTe-DSL takes one global scale"
        return
    assert reason is None
    calls: list[dict[str, Any]] = []
    with emulators.installed(calls), mock.patch.object(quantize, "_ran", False):
        words, bits = quantize.run(x, scale, "amax", backend)
    want_words, want_bits = torch_fp4kv.quantize(x, scale)
    assert words.shape == want_words.shape
    assert words.is_contiguous()
    assert int((bits.int() - want_bits.int()).abs().max()) <= 1
    have, want = torch_fp4kv.dequantize(words, bits, scale), torch_fp4kv.dequantize(want_words, want_bits, scale)
    assert float((have - want).norm() / want.norm()) < 0.02
    assert calls[0]["backend"] == backend
    assert calls[0]["nvfp4_4over6"] is None


def test_quantize_with_the_reciprocal_of_a_scale_is_seen(package: None) -> None:
    x, scale = torch.randn(5, 64).bfloat16(), torch.tensor(0.01)
    with emulators.installed([]), mock.patch.object(quantize, "_ran", False):
        words, bits = quantize.run(x, 1.0 / scale, "amax", "cuda")
    have, want = (
        torch_fp4kv.dequantize(words, bits, scale),
        torch_fp4kv.dequantize(*torch_fp4kv.quantize(x, scale), scale),
    )
    assert float((have - want).norm() / want.norm()) > 0.5


def test_quantize_says_why_flashinfer_cannot(package: None) -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    for options, reason in (
        ({"backend": "cuda"}, "FlashInfer is for NVIDIA GPUs"),
        ({"backend": "cutlass"}, "unknown backend 'cutlass'; known: auto, flashinfer, cuda, cute-dsl"),
        ({"backend": "cuda", "bias": torch.zeros(64)}, "subtracts no bias"),
        ({"backend": "cuda", "scale_rule": "mse"}, "has no scale rule 'mse'"),
    ):
        with pytest.raises(ValueError, match=reason):
            torch_fp4kv.quantize(x, 0.01, **options)
    with pytest.raises(ValueError, match="x must be 16-bit"):
        torch_fp4kv.quantize(x.float(), 0.01, backend="cuda")


@pytest.mark.parametrize(("cutlass", "expected"), [(None, "cute-dsl"), ("absent", "cuda")])
def test_cute_dsl_is_preferred_where_it_is_installed(cutlass: str | None, expected: str) -> None:
    with mock.patch.object(support, "package_missing", lambda _name: cutlass):
        assert quantize.resolve("flashinfer", torch.ones(())) == expected
        assert quantize.resolve("flashinfer", torch.ones(4)) == "cuda"
        assert quantize.resolve("cuda", torch.ones(())) == "cuda"


def test_the_quantiser_s_fake_has_the_shapes_of_ours() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, 5, 64, dtype=torch.bfloat16)
        words, scales = torch.ops.fp4kv.flashinfer_quantize(x, torch.empty(()))
    assert (words.shape, words.dtype) == ((3, 5, 4), torch.int64)
    assert (scales.shape, scales.dtype) == ((3, 5, 4), torch.uint8)


def test_exact_math_is_set_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(support.FAST_MATH_OFF, "0")
    monkeypatch.setattr(quantize, "_ran", False)
    torch_fp4kv.exact_math()
    assert os.environ[support.FAST_MATH_OFF] == "1"
    monkeypatch.setattr(quantize, "_ran", True)
    with pytest.raises(RuntimeError, match="before the first use"):
        torch_fp4kv.exact_math()


# The package itself.


def test_the_package_is_what_this_was_written_for(package: None) -> None:
    import flashinfer
    from flashinfer.utils import register_custom_op

    assert (0, 7, 4) <= support._numbers(flashinfer.__version__) < (0, 8)
    capabilities = [10 * major + minor for major, minor in CAPABILITIES]
    supported = [cc for cc in capabilities if flashinfer.nvfp4_kv_quantize.is_compute_capability_supported(cc)]
    assert supported == [10 * major + minor for major, minor in support.QUANTIZE_CAPABILITIES]
    # Its KV kernels are no torch ops, so ours around them is the only one that torch.compile sees.
    assert register_custom_op("flashinfer::x", mutates_args=())(len) is len
    kernels = Path(flashinfer.__file__).parent / "quantization" / "kernels"
    # Importing it needs nvidia-cutlass-dsl.
    materialize = (kernels / "nvfp4_kv_materialize.py").read_text()
    assert (
        "@supported_compute_capability([100, 103, 107, 110, 120, 121])\ndef _nvfp4_kv_materialize_check" in materialize
    )
    for function in (flashinfer.nvfp4_kv_dequantize, flashinfer.nvfp4_kv_dequantize_paged):
        assert [cc for cc in capabilities if function.is_compute_capability_supported(cc)] == capabilities[1:]
    names = inspect.signature(flashinfer.nvfp4_kv_dequantize_paged).parameters
    assert list(names)[:8] == [
        "paged_kv_cache",
        "kv_cache_sf",
        "block_tables",
        "seq_lens",
        "k_scale",
        "v_scale",
        "output_k",
        "output_v",
    ]


def test_fast_math_s_variable_is_one_that_the_package_reads(package: None) -> None:
    import flashinfer
    import flashinfer.quantization.fp4_quantization as module

    assert support.FAST_MATH_OFF in inspect.getsource(module)
    source = Path(flashinfer.__file__).parent / "data" / "csrc" / "nv_internal" / "cpp" / "common" / "envUtils.cpp"
    assert all(f'getBoolEnv("{x}")' in source.read_text() for x in (support.FAST_MATH_OFF, support.FAST_MATH_OFF_CUDA))
