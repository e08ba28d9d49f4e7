"""Two processes: tensor-parallel transformers models, and a sequence handed from one to the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import greedy, llama, prompt
from two_ranks import RECIPES, logits_of

import torch_fp4kv
from torch_fp4kv import NVFP4Cache

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run(folder: Path, backend: str) -> list[dict]:
    """What the two ranks of `two_ranks.py` saved."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = str(Path(torch_fp4kv.__file__).parents[1])
    worker = Path(__file__).with_name("two_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(folder), backend],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = []
    try:
        for process in ranks:
            _, error = process.communicate(timeout=240)
            errors.append(error)
    finally:
        for process in ranks:
            process.kill()
    assert not any(process.returncode for process in ranks), "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def models():
    return {"two_heads": llama(), "one_head": llama(num_key_value_heads=1)}


@pytest.fixture(scope="module")
def step():
    """What one append and one attention take."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 64)
    words, scales = torch_fp4kv.quantize(torch.zeros(2, 4, 32, 64), 1.0)
    return {
        "cache": [words, scales, words.clone(), scales.clone()],
        "scale": torch.rand(4) + 0.01,
        "k": x,
        "q": torch.randn(2, 8, 6, 64),
        "slots": torch.arange(6) + torch.tensor([[0], [32]]),
        "lengths": torch.tensor([6, 6], dtype=torch.int32),
    }


@pytest.fixture(
    scope="module",
    params=["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, TWO_GPUS])],
)
def ranks(request, models, step, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(step, folder / "step.pt")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return run(folder, request.param)


def test_decoding_after_a_hand_over_is_decoding_without_it(ranks):
    assert torch.equal(ranks[1]["handed over"], ranks[0]["handed over"])


def test_ops_split_over_ranks_are_the_whole_ops(ranks, step):
    cache, scale = [t.clone() for t in step["cache"]], step["scale"]
    torch_fp4kv.append(*cache, step["k"], step["k"], step["slots"], scale, scale)
    out = torch_fp4kv.attention(step["q"], *cache, scale, scale, step["lengths"])
    for found in ranks:
        *stored, attended = found["step"]
        assert all(torch.equal(got, want) for got, want in zip(stored, cache))
        torch.testing.assert_close(attended, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["two_heads", "one_head"])
def test_two_ranks_are_one_process(ranks, models, name, recipe):
    """Each rank keeps its own heads, or the one that both read, as one process keeps them."""
    cache = NVFP4Cache(models[name].config, 96, recipe)
    want = logits_of(models[name], cache)
    for rank, found in enumerate(ranks):
        # Sums over ranks are ordered otherwise, and where that moves a K or V across a code's border, that code.
        torch.testing.assert_close(found[f"{name} {recipe}"], want, rtol=2e-3, atol=2e-3)
        heads = slice(rank, rank + 1) if name == "two_heads" else slice(None)
        for key, tensor in cache.layers[0].storage.tensors():
            part = tensor[:, heads] if tensor.ndim == 4 else tensor[heads]
            assert found[f"{name} {recipe} heads"][key].shape == part.shape
        stored = found[f"{name} {recipe} heads"]["k_data"]
        own = cache.layers[0].storage.k_data[:, heads]
        assert (stored == own).float().mean() > 0.99 if recipe != "bf16" else torch.allclose(stored, own, atol=1e-5)


@pytest.mark.parametrize("name", ["two_heads", "one_head"])
def test_generation_gives_the_tokens_of_one_process(ranks, models, name):
    want = models[name].generate(prompt(2, 40), **greedy(20))
    assert all(torch.equal(found[f"{name} tokens"], want) for found in ranks)
