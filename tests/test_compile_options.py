"""`enable()`, `disable()` and the backend "fp4kv" beside a user's own passes and options."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import Generated
from decode_step import append_step
from fake_cuda import cuda_code
from torch import Tensor

import torch_fp4kv as fp4
from torch_fp4kv import lowering


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True, pre_grad_custom_pass=None):
        yield
    fp4.disable()


def attend(q: Tensor, words: Tensor, scales: Tensor) -> Tensor:
    k = fp4.dequantize(words, scales, 0.01)
    return F.scaled_dot_product_attention(q, k, fp4.dequantize(words, scales, 0.01))


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return (torch.randn(1, 2, 1, 32), *fp4.quantize(torch.randn(1, 2, 20, 32), 0.01))


def rewritten() -> int:
    return lowering.report()["sdpa"].get("rewritten", 0)


class CountingPass:
    calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        CountingPass.calls += 1


@pytest.fixture
def user_pass() -> CountingPass:
    CountingPass.calls = 0
    return CountingPass()


def test_enable_and_disable() -> None:
    config, before = torch._inductor.config, rewritten()
    found = config.pre_grad_custom_pass, config.score_fusion_memory_threshold
    fp4.enable()
    fp4.enable()
    torch.compile(attend, fullgraph=True)(*arguments())
    assert rewritten() == before + 1
    fp4.disable()
    assert (config.pre_grad_custom_pass, config.score_fusion_memory_threshold) == found
    torch._dynamo.reset()
    torch.compile(attend, fullgraph=True)(*arguments())
    assert rewritten() == before + 1


def test_enable_runs_the_users_pass_too_and_disable_leaves_it(user_pass: CountingPass) -> None:
    before = rewritten()
    with torch._inductor.config.patch(pre_grad_custom_pass=user_pass):
        fp4.enable()
        torch.compile(attend, fullgraph=True)(*arguments())
        assert (rewritten(), user_pass.calls) == (before + 1, 1)
        fp4.disable()
        assert torch._inductor.config.pre_grad_custom_pass is user_pass


def test_disable_leaves_a_pass_that_was_set_after_enable(user_pass: CountingPass) -> None:
    fp4.enable()
    with torch._inductor.config.patch(pre_grad_custom_pass=user_pass):
        fp4.disable()
        assert torch._inductor.config.pre_grad_custom_pass is user_pass


def test_enable_again_adds_to_a_pass_that_was_set_since(user_pass: CountingPass) -> None:
    config, before = torch._inductor.config, rewritten()
    found = config.pre_grad_custom_pass, config.score_fusion_memory_threshold
    with config.patch(pre_grad_custom_pass=None):
        fp4.enable()
    fp4.enable()
    config.pre_grad_custom_pass = user_pass
    fp4.enable()
    torch.compile(attend, fullgraph=True)(*arguments())
    assert (rewritten(), user_pass.calls) == (before + 1, 1)
    fp4.disable()
    assert config.pre_grad_custom_pass is user_pass
    config.pre_grad_custom_pass = None
    assert (config.pre_grad_custom_pass, config.score_fusion_memory_threshold) == found


@pytest.mark.parametrize("enabled", [False, True], ids=["alone", "enabled too"])
def test_backend_runs_the_pass_of_the_users_options(user_pass: CountingPass, enabled: bool) -> None:
    if enabled:
        fp4.enable()
    before = rewritten()
    options: dict[str, Any] = {"pre_grad_custom_pass": user_pass, "max_autotune": False}
    out = torch.compile(attend, backend=fp4.compile.backend, fullgraph=True, options=options)(*arguments())
    assert out.shape == (1, 2, 1, 32)
    assert (rewritten(), user_pass.calls) == (before + 1, 1)


def test_backend_takes_modes_and_refuses_unknown_options() -> None:
    call = arguments()
    for mode in ("reduce-overhead", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        out = torch.compile(attend, backend=fp4.compile.backend, mode=mode, fullgraph=True)(*call)
        torch.testing.assert_close(out, attend(*call), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Unexpected optimization option no_such"):
        torch.compile(attend, backend=fp4.compile.backend, options={"no_such": 1})(*call)


def test_backend_is_known_by_name() -> None:
    assert [e.value for e in entry_points(group="torch_dynamo_backends", name="fp4kv")] == [
        "torch_fp4kv.compile:backend"
    ]
    before = rewritten()
    torch.compile(attend, backend="fp4kv", fullgraph=True)(*arguments())
    assert rewritten() == before + 1


def test_lowerings_need_none_of_it() -> None:
    before = lowering.report()["quantize"].get("lowered", 0)
    torch.compile(lambda x: fp4.quantize(x, 0.1), fullgraph=True)(torch.randn(2, 32))
    assert lowering.report()["quantize"]["lowered"] == before + 1


@pytest.mark.parametrize(
    ("backend", "launches"), [("inductor", 2), (fp4.compile.backend, 1)], ids=["inductor", "fp4kv"]
)
def test_decode_of_one_row_is_one_cuda_kernel(backend: Any, launches: int) -> None:
    """K's and V's writes share only the 8 bytes of a slot, which Inductor alone does not fuse for."""
    pytest.importorskip("triton")
    heads, tokens, dim = 8, 256, 128
    storage = [((1, heads, tokens, dim // 16), torch.int64), ((1, heads, tokens, dim // 16), torch.uint8)] * 2
    step = [((1, 1, heads * dim), torch.bfloat16)] * 2 + [((1, 1, 1, dim), torch.bfloat16)] * 2
    scales = [((1, 1), torch.int64)] + [((heads,), torch.float32)] * 2
    assert Generated(cuda_code(append_step, *storage, *step, *scales, backend=backend)).num_kernels == launches
