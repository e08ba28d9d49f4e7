"""A gpt-fast-style decoder whose attention calls `kv_cache.update(input_pos, k, v)`, with an FP4 cache for its own.

Run: python examples/gpt.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fp4kv import NVFP4KVCache


class KVCache(nn.Module):
    """The model's own cache: full precision, written at `input_pos`."""

    def __init__(
        self, max_batch_size: int, max_seq_length: int, n_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype))
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype))

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        return self.k_cache, self.v_cache


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wqkv = nn.Linear(dim, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.kv_cache: nn.Module | None = None

    def forward(self, x: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        sizes = [n * self.head_dim for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]
        q, k, v = (
            part.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for part in self.wqkv(x).split(sizes, dim=-1)
        )
        q, k = rotate(q, input_pos), rotate(k, input_pos)
        k, v = self.kv_cache.update(input_pos, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, dim))


class Transformer(nn.Module):
    """Pre-norm blocks of attention and a SiLU MLP; `setup_caches` gives each layer the cache class it is asked for."""

    def __init__(
        self, vocab: int = 256, dim: int = 256, n_layers: int = 2, n_heads: int = 4, n_kv_heads: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = nn.ModuleList(Attention(dim, n_heads, n_kv_heads) for _ in range(n_layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(n_layers)
        )
        self.output = nn.Linear(dim, vocab, bias=False)
        self.max_seq_length = 0

    def setup_caches(self, max_batch_size: int, max_seq_length: int, cache_class: type[nn.Module] = KVCache) -> None:
        self.max_seq_length = max_seq_length
        dtype = self.output.weight.dtype
        for layer in self.attention:
            layer.kv_cache = cache_class(max_batch_size, max_seq_length, layer.n_kv_heads, layer.head_dim, dtype=dtype)

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        mask = torch.arange(self.max_seq_length, device=tokens.device) <= input_pos[:, None]
        x = self.embed(tokens)
        for attention, mlp in zip(self.attention, self.mlp):
            x = x + attention(F.rms_norm(x, x.shape[-1:]), input_pos, mask)
            x = x + mlp(F.rms_norm(x, x.shape[-1:]))
        return self.output(F.rms_norm(x, x.shape[-1:]))


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of `x` `[B, H, n, D]` at `position` `[n]`."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = position[:, None] * frequency
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@torch.no_grad()
def generate(model: Transformer, prompt: Tensor, new_tokens: int, step: object = None) -> Tensor:
    """Greedy tokens `[B, n + new_tokens]`; `step` stands in for the model after the prompt (a compiled one, say)."""
    step = model if step is None else step
    tokens = [prompt]
    position = torch.arange(prompt.shape[1], device=prompt.device)
    token = model(prompt, position)[:, -1:].argmax(-1)
    for i in range(new_tokens):
        tokens.append(token)
        if i + 1 < new_tokens:
            position = torch.tensor([prompt.shape[1] + i], device=prompt.device)
            token = step(token, position)[:, -1:].argmax(-1)
    return torch.cat(tokens, dim=1)


def main() -> None:
    torch.manual_seed(0)
    model = Transformer().eval()
    prompt = torch.randint(256, (2, 40))
    model.setup_caches(2, 128)
    exact = generate(model, prompt, 40)
    model.setup_caches(2, 128, NVFP4KVCache)
    eager = generate(model, prompt, 40)
    for layer in model.attention:
        layer.kv_cache.reset()
    compiled = generate(model, prompt, 40, step=torch.compile(model, fullgraph=True))
    print("FP4 tokens that agree with full precision:", int((eager == exact)[:, 40:].sum()), "of 80")
    print("compiled agrees with eager:", torch.equal(compiled, eager))


if __name__ == "__main__":
    main()
