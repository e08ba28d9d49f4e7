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


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, TWO_GPUS])])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(backend, models, step, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(step, folder / "step.pt")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return run(folder, backend)


@pytest.fixture(scope="module")
def device(backend):
    """Where this process computes what the two ranks are held to."""
    return "cuda" if backend == "nccl" else "cpu"


def test_decoding_after_a_hand_over_is_decoding_without_it(ranks):
    assert torch.equal(ranks[1]["handed over"], ranks[0]["handed over"])


def test_what_two_ranks_prefilled_one_decodes(ranks, models, device):
    model = models["two_heads"].to(device)
    want = logits_of(model, NVFP4Cache(model.config, 128), device, rows=1)[1:]
    torch.testing.assert_close(ranks[0]["joined"], want, rtol=2e-3, atol=2e-3)


def test_ops_split_over_ranks_are_the_whole_ops(ranks, step, device):
    cache = [t.to(device, copy=True) for t in step["cache"]]
    scale, k, q, slots, lengths = (step[name].to(device) for name in ("scale", "k", "q", "slots", "lengths"))
    torch_fp4kv.append(*cache, k, k, slots, scale, scale)
    out = torch_fp4kv.attention(q, *cache, scale, scale, lengths)
    for found in ranks:
        *stored, attended = found["step"]
        assert all(torch.equal(got, want.cpu()) for got, want in zip(stored, cache))
        torch.testing.assert_close(attended, out.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["two_heads", "one_head"])
def test_two_ranks_are_one_process(ranks, models, device, name, recipe):
    """Each rank keeps its own heads, or the one that both read, as one process keeps them."""
    cache = NVFP4Cache(models[name].config, 128, recipe)
    want = logits_of(models[name].to(device), cache, device)
    whole = {key: tensor.cpu() for key, tensor in cache.layers[0].storage.tensors()}
    for rank, found in enumerate(ranks):
        # Sums over ranks are ordered otherwise, and where that moves a K or V across a code's border, that code.
        torch.testing.assert_close(found[f"{name} {recipe}"], want, rtol=2e-3, atol=2e-3)
        heads = slice(rank, rank + 1) if name == "two_heads" else slice(None)
        stored = found[f"{name} {recipe} heads"]
        own = {key: t[:, heads] if t.ndim == 4 else t[heads] for key, t in whole.items()}
        assert {key: t.shape for key, t in stored.items()} == {key: t.shape for key, t in own.items()}
        if recipe == "bf16":
            torch.testing.assert_close(stored["k_data"], own["k_data"], rtol=1e-4, atol=1e-5)
        else:
            assert (stored["k_data"] == own["k_data"]).float().mean() > 0.99


@pytest.mark.parametrize("name", ["two_heads", "one_head"])
def test_generation_gives_the_tokens_of_one_process(ranks, models, device, name):
    want = models[name].to(device).generate(prompt(2, 40).to(device), disable_compile=True, **greedy(20))
    assert all(torch.equal(found[f"{name} tokens"], want.cpu()) for found in ranks)
