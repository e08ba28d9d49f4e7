"""Attention inside compiled graphs: one graph, no recompilation as lengths change, the results of the eager op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import make, run
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fp4kv.ops.call import AttentionCall

CALLS = {
    "decode": {"lengths": (40, 9)},
    "ragged prefill": {"lengths": (40, 9), "num_queries": 5, "q_lengths": (5, 2), "starts": (3, 0)},
    "pages and soft-cap": {"lengths": (40, 9), "page_size": 8, "softcap": 3.0, "window": 20},
    "overlay": {"lengths": (40, 33), "num_queries": 3, "new": True, "ring": 8, "num_sink_tokens": 2},
    "bf16": {"lengths": (40, 9), "num_queries": 2, "dtype": torch.bfloat16},
    "mask and sinks": {"lengths": (40, 9), "mask": torch.ones(40) > 0, "sink_logits": torch.ones(4)},
    "no queries": {"lengths": (9,), "num_queries": 0},
}


def counted(function: Callable[..., Any], backend: str = "aot_eager") -> tuple[Callable[..., Any], Any]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_compiled_call_gives_the_eager_bits(options: dict[str, Any]) -> None:
    call = make(**options)
    eager = run(call)
    compiled, counter = counted(lambda q: run(call, q=q))
    for got, expected in zip(compiled(call.q), eager):
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert got.stride() == expected.stride()
    assert counter.frame_count == 1


def test_inductor_joins_it_with_its_neighbours() -> None:
    call = make(lengths=(40, 9), num_queries=2)

    def step(q: Tensor) -> Tensor:
        out, lse = run(call, q=q * 2)
        return out.transpose(1, 2).flatten(2) + lse.sum()

    torch._dynamo.reset()
    assert torch.allclose(torch.compile(step, fullgraph=True)(call.q), step(call.q), rtol=1e-5, atol=1e-6)


def test_steps_of_a_growing_row_are_one_graph() -> None:
    call = make(lengths=(64,))
    compiled, counter = counted(lambda q, lengths: run(call, q=q, lengths=lengths))
    for length in range(1, 65):
        lengths = torch.tensor([length], dtype=torch.int32)
        assert torch.equal(compiled(call.q, lengths)[0], run(call, lengths=lengths)[0])
    assert counter.frame_count == 1


def test_prompts_of_several_lengths_are_at_most_two_graphs() -> None:
    call = make(lengths=(63,), num_queries=63)
    compiled, counter = counted(lambda q: run(call, q=q))
    for num_queries in (63, 5, 17, 40, 2):
        q = call.q[:, :, :num_queries].contiguous()
        assert torch.equal(compiled(q)[0], run(call, q=q)[0])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("out_dtype", [None, torch.float16], ids=["as q", "to fp16"])
def test_fake_results_are_like_real_ones(options: dict[str, Any], out_dtype: torch.dtype | None) -> None:
    call = make(**options, out_dtype=out_dtype)
    real = run(call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fields = {
            name: mode.from_tensor(value)
            for name in AttentionCall.__slots__
            if isinstance(value := getattr(call, name), Tensor)
        }
        for fake, tensor in zip(run(call, **fields), real):
            assert (fake.shape, fake.dtype, fake.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
