"""The decode step of a layer up to attention, as tests compile it."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_fp4kv as fp4
from torch_fp4kv import LayerCalibration, NVFP4KVCache, get_recipe

BATCH, HEADS, TOKENS, DIM, RING = 16, 8, 4096, 128, 145
BF16, F32, I64, U8 = torch.bfloat16, torch.float32, torch.int64, torch.uint8
STORAGE = [((BATCH, HEADS, TOKENS, DIM // 16), I64), ((BATCH, HEADS, TOKENS, DIM // 16), U8)]
CACHE_ELEMENTS = BATCH * HEADS * TOKENS * DIM // 16


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def append_step(kw: Tensor, ks: Tensor, vw: Tensor, vs: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
    """A layer's decode step up to attention: K's RoPE and the cache write, exact ring too where `rest` has one."""
    cos, sin, slots, k_scale, v_scale, *ring = rest
    heads = [x.view(x.shape[0], x.shape[1], HEADS, DIM).transpose(1, 2) for x in (k, v)]
    exact = dict(zip(("k_exact", "v_exact", "exact_slots"), ring))
    fp4.append(kw, ks, vw, vs, rope(heads[0], cos, sin), heads[1], slots, k_scale, v_scale, **exact)


def caches(recipe: str, layers: int) -> list[NVFP4KVCache]:
    """One cache a layer, as after a prompt; the first one's positions are those of all."""
    ones, order = [[1.0] * DIM] * HEADS, [list(range(DIM))] * HEADS
    calibration = [LayerCalibration(k_bias=ones, k_factors=ones, k_order=order)]
    known = get_recipe(recipe, calibration=calibration if recipe == "nvfp4-max" else ())
    found = [NVFP4KVCache(BATCH, TOKENS, HEADS, DIM, BF16, device="cuda", recipe=known) for _ in range(layers)]
    for cache in found:
        cache.storage.empty = False
    return found


def attention_step(layers: list[NVFP4KVCache], cos: Tensor, sin: Tensor, *projected: Tensor) -> Tensor:
    """A decode step's attention, RoPE to output; `projected` are q, k and v of each layer, which waits for the last."""
    positions = layers[0].positions
    positions.advance(1)
    out = projected[0]
    for cache, q, k, v in zip(layers, projected[1::3], projected[2::3], projected[3::3], strict=True):
        q, k, v = (x.view(BATCH, 1, -1, DIM).transpose(1, 2) for x in (q + out, k + out.chunk(4, -1)[0], v))
        update = cache.storage.write(rope(k, cos, sin), v, positions)
        out = update.attend(rope(q, cos, sin)).transpose(1, 2).flatten(2)
    return out


def attention_arguments(layers: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the tensors of `attention_step`."""
    wide, narrow = ((BATCH, 1, 4 * HEADS * DIM), BF16), ((BATCH, 1, HEADS * DIM), BF16)
    return [((BATCH, 1, 1, DIM), BF16)] * 2 + [wide] + [wide, narrow, narrow] * layers


def step_arguments(new: int, ring: bool = False) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of `append_step`'s arguments for `new` tokens a row."""
    projected = [((BATCH, new, HEADS * DIM), BF16)] * 2
    positions = [((BATCH, 1, new, DIM), BF16)] * 2
    scales = [((HEADS,), F32)] * 2
    exact = [((BATCH, HEADS, RING, DIM), BF16)] * 2 + [((BATCH, new), I64)] if ring else []
    return [*STORAGE, *STORAGE, *projected, *positions, ((BATCH, new), I64), *scales, *exact]
