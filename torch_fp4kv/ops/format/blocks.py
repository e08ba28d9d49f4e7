"""Blocks of 16 in PyTorch: the body of the CPU ops, and what every other backend is compared with.

Shapes: `x` is `[..., D]`, `words` int64 `[..., D/16]` (nibble r of a word is element r of its block), `scales` uint8
`[..., D/16]` (e4m3 bits, or a power-of-two exponent for `block-fp4`), `global_scale` broadcasts against `[..., D/16]`.
Each float32 operation is rounded once and stands in the order of docs/format.md, so equal input gives equal bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from . import e4m3
from .constants import BLOCK, E2M1_MAX, E2M1_THRESHOLDS, E2M1_VALUES, E4M3_MAX

SCALE_RULES: dict[str, tuple[float, ...]] = {
    "amax": (6.0,),
    "4over6": (6.0, 4.0),
    "mse": (6.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.5, 7.0),
}
"""What a block's largest magnitude may be divided by. The first candidate wins ties (see `encode`)."""


def split(x: Tensor) -> Tensor:
    """`[..., D]` in any float dtype to float32 blocks `[..., D/16, 16]`."""
    return x.to(torch.float32).unflatten(-1, (-1, BLOCK))


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block `[..., D/16]`; NaN counts as 0."""
    return torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(-1)


def codes(blocks: Tensor, bound: Tensor) -> Tensor:
    """4-bit codes (uint8) of float32 `blocks` `[..., D/16, 16]` for the value `bound` `[..., D/16]` of code 1.0.

    Compares `|x|` with `t · bound`, rounded to nearest, ties to the even code, saturating at 6. NaN, and everything
    in a block whose bound is 0, is code 0; a zero code has no sign.
    """
    bound = bound.unsqueeze(-1)
    magnitude = blocks.abs()
    code = torch.zeros_like(blocks, dtype=torch.uint8)
    for threshold, inclusive in E2M1_THRESHOLDS:
        limit = bound * threshold
        code += magnitude >= limit if inclusive else magnitude > limit
    code = torch.where(bound > 0, code, 0)
    return code | ((blocks < 0) & (code > 0)).to(torch.uint8) << 3


def pack(code: Tensor) -> Tensor:
    """uint8 codes `[..., D/16, 16]` to words `[..., D/16]`."""
    return (code[..., 0::2] | code[..., 1::2] << 4).contiguous().view(torch.int64).squeeze(-1)


def unpack(words: Tensor) -> Tensor:
    """float32 values `[..., D/16, 16]` of the codes in `words` `[..., D/16]`."""
    packed = words.contiguous().unsqueeze(-1).view(torch.uint8)
    return embedding(packed.to(torch.int32), _byte_values(words.device)).flatten(-2)


def code_values(code: Tensor) -> Tensor:
    """float32 values of uint8 codes."""
    return embedding(code.to(torch.int32), _nibble_values(code.device).unsqueeze(-1)).squeeze(-1)


def encode(
    x: Tensor, global_scale: Tensor, scale_rule: str = "amax", scale_max: float = E4M3_MAX
) -> tuple[Tensor, Tensor]:
    """NVFP4 `(words, scales)` of `x`, block scales saturating at `scale_max`; see docs/format.md for each step.

    A rule with several divisors keeps the candidate of least squared error (float32 sum over the block); the first
    wins ties, and a candidate whose largest `code · scale` exceeds 448 is not taken, so that readers which go through
    e4m3 stay exact.
    """
    blocks = split(x)
    amax = block_amax(blocks)
    first, *others = SCALE_RULES[scale_rule]
    bits, code = _candidate(blocks, amax, global_scale, first, scale_max)
    if others:
        error = _squared_error(blocks, code, bits, global_scale)
        for divisor in others:
            new_bits, new_code = _candidate(blocks, amax, global_scale, divisor, scale_max)
            new_error = _squared_error(blocks, new_code, new_bits, global_scale)
            largest = code_values(new_code & 7).amax(-1) * e4m3.decode(new_bits)
            better = (new_error < error) & (largest <= 448.0)
            error = torch.where(better, new_error, error)
            bits = torch.where(better, new_bits, bits)
            code = torch.where(better.unsqueeze(-1), new_code, code)
    return pack(code), bits.to(torch.uint8)


def decode(words: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """float32 `[..., D]`: `e2m1(code) · (e4m3(scale) · global_scale)`."""
    scale = e4m3.decode(scales) * global_scale
    return (unpack(words) * scale.unsqueeze(-1)).flatten(-2)


def encode_block_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """One level: `scales` holds `e + 127` of the power of two `2^e ≥ amax / 6` that scales the block."""
    blocks = split(x)
    amax = block_amax(blocks).clamp(2.0**-120, 2.0**120)
    mantissa, exponent = torch.frexp(amax / E2M1_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    bound = torch.ldexp(torch.ones_like(amax), exponent)
    return pack(codes(blocks, bound)), (exponent + 127).to(torch.uint8)


def decode_block_fp4(words: Tensor, scales: Tensor) -> Tensor:
    """float32 `[..., D]`: `e2m1(code) · 2^(scale - 127)`."""
    bound = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - 127)
    return (unpack(words) * bound.unsqueeze(-1)).flatten(-2)


def _candidate(
    blocks: Tensor, amax: Tensor, global_scale: Tensor, divisor: float, scale_max: float
) -> tuple[Tensor, Tensor]:
    bits = e4m3.encode((amax * (1.0 / (global_scale * divisor))).clamp(max=scale_max))
    return bits, codes(blocks, e4m3.decode(bits) * global_scale)


def _squared_error(blocks: Tensor, code: Tensor, bits: Tensor, global_scale: Tensor) -> Tensor:
    bound = (e4m3.decode(bits) * global_scale).unsqueeze(-1)
    error = code_values(code) * bound - torch.where(blocks.isnan(), 0.0, blocks)
    return (error * error).sum(-1)


def _nibble_values(device: torch.device) -> Tensor:
    return torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=device)


def _byte_values(device: torch.device) -> Tensor:
    """Row b holds the values of the even and odd element that byte b packs."""
    nibble = _nibble_values(device)
    return torch.stack([nibble.repeat(16), nibble.repeat_interleave(16)], dim=-1)
