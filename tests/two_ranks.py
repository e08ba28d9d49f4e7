"""What each of two processes does in `test_two_ranks.py`: `two_ranks.py FOLDER`, with the environment of torchrun.

FOLDER has the models that the test saved; what a rank finds is saved there as `<rank>.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_models import greedy, prompt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from torch_fp4kv import (
    Blocks,
    NVFP4Cache,
    PagedNVFP4Cache,
    append,
    attention,
    export_blocks,
    import_blocks,
    register_sharding,
)

RECIPES = ("bf16", "nvfp4", "nvfp4-plain")


def logits_of(model: Any, cache: NVFP4Cache, device: str = "cpu", rows: int = 2) -> torch.Tensor:
    """A prompt of 100 tokens, then 6 one by one."""
    ids = prompt(rows, 106).to(device)
    with torch.no_grad():
        parts = [model(ids[:, :100], past_key_values=cache).logits[:, -1]]
        parts += [model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(100, 106)]
    return torch.stack(parts).cpu()


def tensor_parallel(folder: Path, rank: int, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("two_heads", "one_head"):
        config = AutoConfig.from_pretrained(folder / name)
        if name == "one_head":
            # transformers does not split fewer heads than ranks: both ranks compute K and V of that head.
            plan = config.base_model_tp_plan.items()
            config.base_model_tp_plan = {key: style for key, style in plan if not key.endswith((".k_proj", ".v_proj"))}
        model = AutoModelForCausalLM.from_pretrained(folder / name, config=config, tp_plan="auto").eval()
        # transformers' sdpa takes the number of query heads a KV head from the config, which is that of all ranks.
        model.set_attn_implementation("fp4kv" if name == "one_head" else "sdpa")
        for recipe in RECIPES:
            cache = NVFP4Cache(model.config, 128, recipe, tp_rank=rank, tp_size=2)
            found[f"{name} {recipe}"] = logits_of(model, cache, device)
            found[f"{name} {recipe} heads"] = {n: t.cpu() for n, t in cache.layers[0].storage.tensors()}
        cache = NVFP4Cache(model.config, 128, "bf16")
        found[f"{name} tokens"] = model.generate(
            prompt(2, 40).to(device), past_key_values=cache, disable_compile=True, **greedy(20)
        ).cpu()
    return found


def hand_over(folder: Path, rank: int, device: str) -> dict[str, Any]:
    """Rank 0 prefills and sends in two messages, rank 1 decodes."""
    model = AutoModelForCausalLM.from_pretrained(folder / "two_heads").eval().to(device)
    ids = prompt(2, 106).to(device)
    cache = NVFP4Cache(model.config, 128)
    with torch.no_grad():
        if rank == 0:
            model(ids[:, :48], past_key_values=cache)
            export_blocks(cache, "a", tokens=range(48), more=True).send(1)
            model(ids[:, 48:100], past_key_values=cache)
            export_blocks(cache, "a", tokens=range(48, 100)).send(1)
        else:
            import_blocks(cache, [Blocks.receive(0, device=device) for _ in range(2)])
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(100, 106)]
    return {"handed over": torch.stack(steps).cpu()}


def prefill_on_both_decode_on_one(folder: Path, rank: int, device: str) -> dict[str, Any]:
    """Each rank prefills its heads in a pool; rank 0 takes both ranks' into a whole cache and goes on alone."""
    split = AutoModelForCausalLM.from_pretrained(folder / "two_heads", tp_plan="auto").eval()
    ids, options = prompt(1, 106).to(device), {"dtype": torch.float32, "device": device, "page_size": 16}
    pool = PagedNVFP4Cache(split.config, 8, max_rows=1, max_cache_len=128, tp_rank=rank, tp_size=2, **options)
    with torch.no_grad():
        split(ids[:, :100], past_key_values=pool.row(pool.admit()))
    blocks = export_blocks(pool, "a", [0])
    if rank == 1:
        blocks.send(0)
        return {}
    whole = AutoModelForCausalLM.from_pretrained(folder / "two_heads").eval().to(device)
    cache = NVFP4Cache(whole.config, 128)
    import_blocks(cache, [blocks, Blocks.receive(1, device=device)])
    with torch.no_grad():
        steps = [whole(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(100, 106)]
    return {"joined": torch.stack(steps).cpu()}


def ops_on_dtensors(folder: Path, rank: int, device: str) -> dict[str, Any]:
    """One step of a cache that is split over both ranks."""
    register_sharding()
    mesh = init_device_mesh(device[:4], (2,))
    given = torch.load(folder / "step.pt")

    def place(tensor: torch.Tensor, placement: Any) -> Any:
        return distribute_tensor(tensor.to(device), mesh, [placement])

    cache = [place(t, Shard(1)) for t in given["cache"]]
    scales = [place(given["scale"], Shard(0))] * 2
    k, q = place(given["k"], Replicate()), place(given["q"], Shard(3))
    append(*cache, k, k, place(given["slots"], Replicate()), *scales)
    out = attention(q, *cache, *scales, place(given["lengths"], Replicate()))
    return {"step": [t.full_tensor().cpu() for t in (*cache, out)]}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = "cpu"
    if sys.argv[2] == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(sys.argv[2], device_id=torch.device(device) if device != "cpu" else None)
    parts = (hand_over, prefill_on_both_decode_on_one, ops_on_dtensors, tensor_parallel)
    found = {name: value for part in parts for name, value in part(folder, rank, device).items()}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
