"""Attention in float64, row by row, over the dequantised cache: what every backend's numbers are held against.

`attend` says what `torch_fp4kv/ops/attention.py` says, one sentence at a time; `budget` turns the distance between its
float64 and its float32 result into the error a float32 backend may have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.dequantize import values


def attend(
    call: AttentionCall, dtype: torch.dtype = torch.float64, query_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`(out [B, Hq, L, Dv], lse [B, Hq, L])` of `call`, computed in `dtype`; what stored keys meet is rounded to
    `query_dtype`."""
    batch, num_heads, num_queries, _ = call.q.shape
    out = torch.zeros(batch, num_heads, num_queries, call.v_head_dim, dtype=dtype, device=call.q.device)
    lse = torch.full((batch, num_heads, num_queries), -torch.inf, dtype=dtype, device=call.q.device)
    pages = _pages(call)
    for b in range(batch):
        num_new = num_queries if call.q_lengths is None else int(call.q_lengths[b])
        out[b, :, :num_new], lse[b, :, :num_new] = _row(call, b, pages, num_new, dtype, query_dtype or dtype)
    return out, lse


def budget(call: AttentionCall, result_dtype: torch.dtype | None = None) -> tuple[float, float]:
    """Largest errors of `out` and `lse` that float32 arithmetic in another order, and one final rounding, explain.

    The float32 run of the oracle has errors e. Another summation order has errors like it: 8·e covers what differs
    from draw to draw, and 8 float32 ulps of the largest value covers calls too small for e to be typical.
    """
    exact, rough = attend(call), attend(call, torch.float32)
    limits = []
    for reference, other in zip(exact, rough):
        finite = reference[reference.isfinite()]
        top = float(finite.abs().max()) if finite.numel() else 0.0
        error = (other.double() - reference)[reference.isfinite()]
        limits.append(8 * (float(error.abs().max()) if error.numel() else 0.0) + 8 * 2.0**-23 * max(top, 1e-30))
    rounding = torch.finfo(result_dtype or call.result_dtype).eps / 2
    return limits[0] + rounding * float(exact[0].abs().max() if exact[0].numel() else 0.0), limits[1]


def check(call: AttentionCall, out: Tensor, lse: Tensor | None = None) -> None:
    """Fails unless `out` (and `lse`) are those of `call` within `budget`."""
    expected, expected_lse = attend(call)
    out_budget, lse_budget = budget(call)
    assert out.shape == expected.shape
    assert out.dtype == call.result_dtype
    assert out.is_contiguous()
    error = (out.double() - expected).abs()
    assert not error.isnan().any(), "NaN where the oracle has a number"
    assert float(error.max() if error.numel() else 0.0) <= out_budget, f"{float(error.max())} > {out_budget}"
    if lse is not None:
        assert lse.dtype == torch.float32
        unseen = expected_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, unseen)
        error = (lse.double() - expected_lse)[~unseen].abs()
        assert float(error.max() if error.numel() else 0.0) <= lse_budget, f"{float(error.max())} > {lse_budget}"


def hadamard(size: int) -> Tensor:
    """Orthonormal float64 `[size, size]`: -1 where row and column number have an odd number of bits in common."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) * size**-0.5


def transform_matrix(call: AttentionCall) -> Tensor:
    """float64 `[H, D, D]`, what a query `[H, ·, D]` is multiplied by before it meets stored keys."""
    heads, d = call.num_kv_heads, call.head_dim
    matrix = torch.eye(d, dtype=torch.float64, device=call.q.device).repeat(heads, 1, 1)
    if call.k_factors is not None:
        matrix = matrix / call.k_factors.double().unsqueeze(-1)
    if call.k_order is not None:
        matrix = torch.stack([rows[:, order.long()] for rows, order in zip(matrix, call.k_order)])
    if call.k_rotation:
        block = hadamard(call.k_rotation).to(call.q.device)
        matrix = matrix @ torch.block_diag(*[block] * (d // call.k_rotation))
    return matrix


def _stored_query(call: AttentionCall, q: Tensor) -> Tensor:
    if call.k_factors is None and call.k_order is None and not call.k_rotation:
        return q
    return q @ transform_matrix(call).to(q.dtype).repeat_interleave(call.group, 0)


def _row(
    call: AttentionCall,
    b: int,
    pages: tuple[Tensor, Tensor],
    num_new: int,
    dtype: torch.dtype,
    query_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    device = call.q.device
    length = int(call.lengths[b])
    start = 0 if call.starts is None else int(call.starts[b])
    positions = torch.arange(start, max(start, length), device=device)
    k, v, exact, exists = _tokens(call, b, pages, start, length, num_new, positions)
    k, v = (x.to(dtype).repeat_interleave(call.group, 0) for x in (k, v))
    q = call.q[b, :, :num_new].to(dtype)
    from_storage = _stored_query(call, q).to(query_dtype).to(dtype) @ k.transpose(1, 2)
    if call.k_bias is not None:
        from_storage = from_storage + q @ call.k_bias.to(dtype).repeat_interleave(call.group, 0).unsqueeze(-1)
    scores = torch.where(exact, q @ k.transpose(1, 2), from_storage) * call.softmax_scale
    if call.softcap > 0:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    own = length - num_new + torch.arange(num_new, device=device)[:, None]
    visible = exists.expand(num_new, -1)
    if call.causal:
        visible = visible & (positions <= own)
    if call.window > 0:
        visible = visible & (positions > own - call.window)
    if call.mask is not None:
        columns = call.mask.shape[-1]
        mask = call.mask.expand(*call.q.shape[:3], columns)[b, :, :num_new, positions.clamp(max=columns - 1)]
        visible = visible & (positions < columns)
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            scores = scores + mask.to(dtype)
    scores = torch.where(visible, scores, -torch.inf)
    if call.sink_logits is not None:
        sink = call.sink_logits.to(dtype)[:, None, None].expand(-1, num_new, 1)
        scores = torch.cat([scores, sink], dim=-1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], dim=1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, torch.softmax(scores, -1))
    return weights @ v, lse


def _tokens(
    call: AttentionCall, b: int, pages: tuple[Tensor, Tensor], start: int, length: int, num_new: int, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v `[H, t, ·]` at `positions`, whether each is an exact copy, and whether the call has it at all."""
    heads, page_size = call.k_data.shape[1:3]
    end = length if call.k_new is None else length - num_new
    new = positions >= end
    sink, ring = torch.zeros_like(new), torch.zeros_like(new)
    if call.k_exact is not None:
        sink = ~new & (positions < start + call.num_sink_tokens)
        if call.exact_from is not None:
            ring = ~new & ~sink & (positions >= int(call.exact_from[b]))
    stored = ~new & ~sink & ~ring
    if call.block_table is None:
        stored &= positions >= end - page_size
    found = []
    for page_values, exact_values, new_values, size in (
        (pages[0], call.k_exact, call.k_new, call.head_dim),
        (pages[1], call.v_exact, call.v_new, call.v_head_dim),
    ):
        x = torch.zeros(heads, positions.numel(), size, dtype=torch.float64, device=positions.device)
        if new_values is not None:
            x[:, new] = new_values[b, :, positions[new] - end].double()
        if exact_values is not None:
            x[:, sink] = exact_values[b, :, positions[sink] - start].double()
        if ring.any():
            x[:, ring] = exact_values[b, :, call.num_sink_tokens + positions[ring] % call.ring_size].double()
        p = positions[stored]
        page = torch.full_like(p, b) if call.block_table is None else call.block_table[b, p // page_size].long()
        x[:, stored] = page_values[page, :, p % page_size].transpose(0, 1)
        found.append(x)
    k, v = found
    if call.v_bias is not None:
        v[:, stored] += call.v_bias[:, None].double()
    return k, v, new | sink | ring, new | sink | ring | stored


def _pages(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """All of storage in float64, without biases."""
    v_scales = call.v_scales
    if v_scales is not None and call.v_scale_layout == "4token":
        v_scales = _linear(v_scales)
    k = values(call.k_data, call.k_scales, call.k_global, call.k_format)
    return k.double(), values(call.v_data, v_scales, call.v_global, call.v_format).double()


def _linear(scales: Tensor) -> Tensor:
    """V scales `[P, H, T, S]` from the 4-token layout, by its formula."""
    tokens, groups = scales.shape[2:]
    t = torch.arange(tokens, device=scales.device)[:, None]
    s = torch.arange(groups, device=scales.device)
    return scales[:, :, t // 4 * 4 + s // (groups // 4), s % (groups // 4) * 4 + t % 4]
