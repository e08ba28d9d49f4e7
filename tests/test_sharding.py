"""DTensor rules of the ops, seen from rank 0 of two that do not exist; `test_two_ranks.py` has values of real ones."""

from __future__ import annotations

import calls
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_fp4kv

HEADS, DIM = 4, 64


@pytest.fixture(scope="module")
def mesh():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch_fp4kv.register_sharding()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def place(mesh, tensor, placement):
    """`tensor`, whole on each rank, split as `placement` says."""
    local = tensor.chunk(2, placement.dim)[0].contiguous() if isinstance(placement, Shard) else tensor
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def cache(heads=HEADS):
    return [t for _ in range(2) for t in (torch.zeros(1, heads, 32, 4).long(), torch.zeros(1, heads, 32, 4).byte())]


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("scale", ["one", "per head", "per row"])
def test_quantize_and_dequantize_split_as_their_input(mesh, ndim, scale):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, DIM)[(0,) * (4 - ndim)]
    shape = {"one": (), "per head": x.shape[-3:-2] if ndim > 2 else (), "per row": x.shape[:-1]}[scale]
    g = torch.rand(shape) + 0.01
    words, scales = torch_fp4kv.quantize(x, g)
    for dim in range(ndim - 1):
        placement = g_placement = Shard(dim)
        if scale != "per row":
            g_placement = Shard(0) if scale == "per head" and dim == ndim - 3 else Replicate()
        args = place(mesh, x, placement), place(mesh, g, g_placement)
        w, s = torch_fp4kv.quantize(*args)
        assert w.placements == s.placements == (placement,)
        assert torch.equal(w.to_local(), place(mesh, words, placement).to_local())
        back = torch_fp4kv.dequantize(w, s, args[1], dtype=torch.float32)
        assert back.placements == (placement,)
        want = torch_fp4kv.dequantize(words, scales, g, dtype=torch.float32)
        assert torch.equal(back.to_local(), place(mesh, want, placement).to_local())


@pytest.mark.parametrize(
    ("placement", "new"), [(Replicate(), Replicate()), (Shard(1), Replicate()), (Shard(1), Shard(1))], ids=str
)
def test_append_and_attention_split_as_the_cache(mesh, placement, new):
    """New K, V and queries are split on the way; the rank's own part of the cache is written in place."""
    torch.manual_seed(0)
    x, q, slots = torch.randn(1, HEADS, 6, DIM), torch.randn(1, 2 * HEADS, 1, DIM), torch.arange(6)[None]
    g, lengths, sinks = torch.rand(HEADS) + 0.01, torch.tensor([6], dtype=torch.int32), torch.randn(2 * HEADS)
    mask = torch.rand(1, 2 * HEADS, 1, 6) > 0.3
    per_head = Shard(0) if isinstance(placement, Shard) else Replicate()
    want, mine = cache(), [place(mesh, t, placement) for t in cache()]
    torch_fp4kv.append(*want, x, x, slots, g, g)
    scales = [place(mesh, g, per_head)] * 2
    torch_fp4kv.append(*mine, *[place(mesh, x, new)] * 2, place(mesh, slots, Replicate()), *scales)
    for got, whole in zip(mine, want):
        assert torch.equal(got.to_local(), place(mesh, whole, placement).to_local())
    out, lse = torch_fp4kv.attention(
        place(mesh, q, new),
        *mine,
        *scales,
        place(mesh, lengths, Replicate()),
        mask=place(mesh, mask, placement),
        sink_logits=place(mesh, sinks, per_head),
        return_lse=True,
    )
    whole = torch_fp4kv.attention(q, *want, g, g, lengths, mask=mask, sink_logits=sinks, return_lse=True)
    assert out.placements == lse.placements == (placement,)
    for got, expected in zip((out, lse), whole):
        assert torch.equal(got.to_local(), place(mesh, expected, placement).to_local())


def test_what_cannot_be_split_is_refused(mesh):
    x, g = torch.randn(1, HEADS, 6, DIM), torch.tensor(0.01)
    slots = place(mesh, torch.arange(6)[None], Replicate())
    new, scale = place(mesh, x, Shard(1)), place(mesh, g, Replicate())
    bias = torch.zeros(HEADS, DIM)
    torch_fp4kv.quantize(new, scale, bias=place(mesh, bias, Shard(0)))
    with pytest.raises(RuntimeError, match="bias must be placed as S"):
        torch_fp4kv.quantize(new, scale, bias=place(mesh, bias, Replicate()))
    mixed = [place(mesh, t, Shard(1) if i else Replicate()) for i, t in enumerate(cache())]
    with pytest.raises(ValueError, match="k_scales must be placed as k_data is"):
        torch_fp4kv.append(*mixed, new, new, slots, scale, scale)
    pages = [place(mesh, t, Shard(2)) for t in cache()]
    with pytest.raises(ValueError, match="k_data must be replicated or Shard"):
        torch_fp4kv.append(*pages, new, new, slots, scale, scale)
    three = [place(mesh, t, Shard(1)) for t in cache(3)]
    odd = place(mesh, x[:, :3], Shard(1))
    with pytest.raises(ValueError, match="heads cannot be split evenly over 2 ranks"):
        torch_fp4kv.append(*three, odd, odd, slots, scale, scale)
    heads = [place(mesh, t, Shard(1)) for t in cache()]
    with pytest.raises(TypeError, match="slots must be a DTensor, as the others are, got a Tensor"):
        torch_fp4kv.append(*heads, new, new, torch.arange(6)[None], scale, scale)
    with pytest.raises(TypeError, match="k_scales must be a DTensor"):
        torch_fp4kv.append(heads[0], cache()[1], *heads[2:], new, new, slots, scale, scale)
    assert not any(t.to_local().any() for t in heads)


def test_exact_copies_and_transforms_go_with_their_heads(mesh):
    torch.manual_seed(0)
    x, slots, g = torch.randn(1, HEADS, 6, DIM), torch.arange(6)[None], torch.tensor(0.01)
    bias = torch.randn(HEADS, DIM)
    exact = torch.zeros(1, HEADS, 9, DIM)
    want, copies = cache(), {"k_exact": exact.clone(), "v_exact": exact.clone()}
    options = {"v_bias": bias, **calls.equalized(HEADS, DIM)}
    rotation = {"k_rotation": options.pop("k_rotation")}
    torch_fp4kv.append(*want, x, x, slots, g, g, **options, **rotation, **copies, exact_slots=slots)
    mine = [place(mesh, t, Shard(1)) for t in cache()]
    placed = {name: place(mesh, exact.clone(), Shard(1)) for name in copies}
    heads = {name: place(mesh, t, Shard(0)) for name, t in options.items()}
    whole = [place(mesh, t, Replicate()) for t in (x, x, slots, g, g)]
    torch_fp4kv.append(*mine, *whole, **heads, **rotation, **placed, exact_slots=whole[2])
    for got, expected in zip([*mine, *placed.values()], [*want, *copies.values()]):
        assert torch.equal(got.to_local(), place(mesh, expected, Shard(1)).to_local())
