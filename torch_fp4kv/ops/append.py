"""`fp4kv::append`: new K and V, quantised and written into the cache in place.

Shapes: B batch, H KV heads, L new tokens a row, D and Dv head sizes, P pages, T tokens a page, E exact slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backends, checks
from ._library import define
from .call import AppendCall, head_dim_of
from .format import blocks, e4m3, layout
from .format.constants import SCALE_MAX
from .format.transform import KeyTransform


def append(
    k_data: Tensor,
    k_scales: Tensor | None,
    v_data: Tensor,
    v_scales: Tensor | None,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_global: float | Tensor,
    v_global: float | Tensor,
    *,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    k_factors: Tensor | None = None,
    k_order: Tensor | None = None,
    k_rotation: int = 0,
    k_exact: Tensor | None = None,
    v_exact: Tensor | None = None,
    exact_slots: Tensor | None = None,
    skip_negative: bool = False,
    k_format: str = "nvfp4",
    v_format: str = "nvfp4",
    scale_rule: str = "amax",
    v_scale_layout: str = "linear",
    backend: str = "auto",
) -> None:
    """Quantises `k` and `v` and writes them at `slots`, in place; everything else in the cache stays as it is.

    Args:
        k_data, v_data: mutated. int64 words `[P, H, T, D/16]` ("nvfp4", "block-fp4"), uint8 e4m3 bits `[P, H, T, D]`
            ("fp8") or float `[P, H, T, D]` ("exact").
        k_scales, v_scales: mutated. uint8 `[P, H, T, D/16]` for the two 4-bit formats, else None.
        k, v: `[B, H, L, D]` and `[B, H, L, Dv]`, floating point, any strides. Not modified; no views of what is.
        slots: int64 `[B, L]`, `page · T + offset` of each token; no slot twice in a call.
        k_global, v_global: decode scales: a number, or float32 `[]` or `[H]`.
        k_bias, v_bias: float32 `[H, D]` and `[H, Dv]`, subtracted before quantising.
        k_factors: float32 `[H, D]`, positive; `k - k_bias` is multiplied by it.
        k_order: int32 `[H, D]`; channel `k_order[h, j]` of that is stored as the j-th.
        k_rotation: if not 0, that is rotated in blocks of so many channels (`format/rotation.py`). `attention` takes
            the same four of K.
        k_exact, v_exact: mutated. `[≥B, H, E, D]` and `[≥B, H, E, Dv]`, contiguous in the last dimension: the raw k
            and v are also written at `exact_slots` (int64 `[B, L]`, within a row); slot E - 1 is scratch, nobody reads
            it.
        skip_negative: leave out tokens whose slot is negative (padding of a captured graph), exact copies included.
        k_format, v_format: "nvfp4", "fp8", "block-fp4" or "exact".
        scale_rule: as in `quantize`.
        v_scale_layout: "linear", or "4token" (SM100 kernels), where block scales of K and V saturate at 72 in place
            of 448: those kernels turn `code · block_scale` into e4m3.
        backend: "auto", or the name of one that must serve.

    Raises:
        TypeError, ValueError: an argument is not as above, or a slot is out of range where the host can see it.
    """
    checks.one_of(k_format, checks.FORMATS, "k_format")
    checks.one_of(v_format, checks.FORMATS, "v_format")
    checks.scale_rule(scale_rule)
    _check_new(k, v)
    _check_storage(k_data, k_scales, k, k_format, "k")
    _check_storage(v_data, v_scales, v, v_format, "v")
    if tuple(k_data.shape[:3]) != tuple(v_data.shape[:3]):
        raise ValueError(
            f"k_data and v_data differ in pages, heads or tokens: {list(k_data.shape)}, {list(v_data.shape)}"
        )
    checks.scale_layout(v_scale_layout, v_scales)
    _check_slot_tensor(slots, k, "slots")
    _check_exact(k_exact, v_exact, exact_slots, k, v)
    heads, head_dim = k.shape[1], k.shape[3]
    checks.transform(KeyTransform(k_bias, k_factors, k_order, k_rotation), (heads, head_dim), k.device)
    checks.bias(v_bias, ((heads, v.shape[3]),), k.device, "v_bias")
    torch.ops.fp4kv.append(
        k_data,
        k_scales,
        v_data,
        v_scales,
        k,
        v,
        slots,
        _scale(k_global, k, "k_global"),
        _scale(v_global, v, "v_global"),
        k_bias=k_bias,
        v_bias=v_bias,
        k_factors=k_factors,
        k_order=k_order,
        k_rotation=k_rotation,
        k_exact=k_exact,
        v_exact=v_exact,
        exact_slots=exact_slots,
        skip_negative=skip_negative,
        k_format=k_format,
        v_format=v_format,
        scale_rule=scale_rule,
        v_scale_layout=v_scale_layout,
        backend=backend,
    )


def _scale(scale: float | Tensor, x: Tensor, name: str) -> Tensor:
    tensor = checks.global_scale(scale, x.device, name)
    checks.scale_shape(tensor, ((x.shape[1],),), name)
    return tensor


def _check_slot_tensor(slots: Tensor, x: Tensor, name: str) -> None:
    checks.has_dtype(slots, torch.int64, name)
    checks.shape(slots, (x.shape[0], x.shape[2]), name)
    checks.same_device(slots, x.device, name)


def _check_new(k: Tensor, v: Tensor) -> None:
    for x, name in ((k, "k"), (v, "v")):
        checks.floating(x, name)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, H, L, D], got shape {list(x.shape)}")
        checks.head_dim(x.shape[3], name)
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            "k and v must agree in batch, heads, tokens, dtype and device, got "
            f"{list(k.shape)} {k.dtype} {k.device} and {list(v.shape)} {v.dtype} {v.device}"
        )


def _check_storage(data: Tensor, scales: Tensor | None, x: Tensor, storage_format: str, name: str) -> None:
    checks.storage(data, scales, storage_format, name, x.device)
    if data.shape[1] != x.shape[1]:
        raise ValueError(f"{name}_data has {data.shape[1]} KV heads, {name} has {x.shape[1]}")
    if storage_format == "exact":
        checks.has_dtype(data, x.dtype, f"{name}_data")
    if head_dim_of(data, storage_format) != x.shape[3]:
        raise ValueError(
            f"{name}_data holds head size {head_dim_of(data, storage_format)} as {storage_format!r}, "
            f"{name} has {x.shape[3]}"
        )


def _check_exact(
    k_exact: Tensor | None, v_exact: Tensor | None, exact_slots: Tensor | None, k: Tensor, v: Tensor
) -> None:
    given = [t is not None for t in (k_exact, v_exact, exact_slots)]
    if not any(given):
        return
    if k_exact is None or v_exact is None or exact_slots is None:
        raise ValueError("k_exact, v_exact and exact_slots go together")
    for exact, x, name in ((k_exact, k, "k_exact"), (v_exact, v, "v_exact")):
        checks.has_dtype(exact, x.dtype, name)
        checks.same_device(exact, x.device, name)
        batch, heads, _, head_dim = x.shape
        if exact.ndim != 4 or exact.shape[0] < batch or (exact.shape[1], exact.shape[3]) != (heads, head_dim):
            raise ValueError(f"{name} must be [≥{batch}, {heads}, E, {head_dim}], got shape {list(exact.shape)}")
        checks.exact_copies(exact, name)
    if k_exact.shape[2] != v_exact.shape[2]:
        raise ValueError(f"k_exact and v_exact differ in slots: {list(k_exact.shape)}, {list(v_exact.shape)}")
    _check_slot_tensor(exact_slots, k, "exact_slots")


def _body(*args: Any, **kwargs: Any) -> None:
    call = AppendCall(*args, **kwargs)
    checks.scale_values(call.k_global, "k_global")
    checks.scale_values(call.v_global, "v_global")
    checks.transform_values(call.transform)
    name = backends.choose("append", call.k.device, call.backend, call).name
    if name == "flashinfer":
        from .flashinfer import append as flashinfer

        flashinfer.append(call)
    elif name == "triton":
        from .kernels import append as kernel

        kernel.append(**{field: getattr(call, field) for field in AppendCall.__slots__ if field != "backend"})
    else:
        _append(call)


def _append(call: AppendCall) -> None:
    """In PyTorch, on any device."""
    k, v, slots, k_exact, v_exact, exact_slots = (
        call.k,
        call.v,
        call.slots,
        call.k_exact,
        call.v_exact,
        call.exact_slots,
    )
    keep = slots >= 0 if call.skip_negative else None
    _check_slots(slots, keep, call.k_data.shape[0] * call.k_data.shape[2], "slots")
    if k_exact is not None and exact_slots is not None:
        _check_slots(exact_slots, keep, k_exact.shape[2], "exact_slots")
    _write(call, call.k_data, call.k_scales, call.transform.key(k), call.k_global, keep, call.k_format, "linear")
    stored_v = v if call.v_bias is None else v.to(torch.float32) - call.v_bias[:, None, :]
    _write(call, call.v_data, call.v_scales, stored_v, call.v_global, keep, call.v_format, call.v_scale_layout)
    if k_exact is not None and v_exact is not None and exact_slots is not None:
        rows = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(exact_slots)
        if keep is not None:
            rows, exact_slots = rows[keep], exact_slots[keep]
        k_exact[rows, :, exact_slots] = _rows(k, keep)
        v_exact[rows, :, exact_slots] = _rows(v, keep)


def _check_slots(slots: Tensor, keep: Tensor | None, num_slots: int, name: str) -> None:
    """Raises ValueError where the host can see a slot (of a token kept) that does not exist."""
    if slots.device.type != "cpu":
        return
    used = slots if keep is None else slots[keep]
    if used.numel() and (int(used.min()) < 0 or int(used.max()) >= num_slots):
        raise ValueError(
            f"{name} must lie in [0, {num_slots}), the cache's capacity, got [{int(used.min())}, {int(used.max())}]"
        )


def _write(
    call: AppendCall,
    data: Tensor,
    scales: Tensor | None,
    x: Tensor,
    global_scale: Tensor,
    keep: Tensor | None,
    storage_format: str,
    scale_layout: str,
) -> None:
    """Encodes `x` `[B, H, L, D]` and scatters it into `data` and `scales`; with `[B, L, H, ·]` rows of one slot."""
    page_size = data.shape[2]
    per_head = global_scale[:, None, None] if global_scale.ndim else global_scale
    new_scales: Tensor | None = None
    if storage_format == "nvfp4":
        new, new_scales = blocks.encode(x, per_head, call.scale_rule, SCALE_MAX[call.v_scale_layout])
    elif storage_format == "block-fp4":
        new, new_scales = blocks.encode_block_fp4(x)
    elif storage_format == "fp8":
        new = e4m3.encode_signed(x.to(torch.float32) / per_head).to(torch.uint8)
    else:
        new = x.to(data.dtype)
    pages, offsets = call.slots // page_size, call.slots % page_size
    if keep is not None:
        pages, offsets = pages[keep], offsets[keep]
    data[pages, :, offsets] = _rows(new, keep)
    if scales is None or new_scales is None:
        return
    if scale_layout == "linear":
        scales[pages, :, offsets] = _rows(new_scales, keep)
    else:
        _scatter_4token(scales, _rows(new_scales, keep), pages, offsets)


def _rows(x: Tensor, keep: Tensor | None) -> Tensor:
    """`[B, H, L, ·]` as one row a token: `[B, L, H, ·]`, or `[N, H, ·]` of the tokens kept."""
    rows = x.transpose(1, 2)
    return rows if keep is None else rows[keep]


def _scatter_4token(scales: Tensor, rows: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """A token's scales land in four rows of its 4-token group; see `layout.v_scales_to_4token`."""
    heads, groups = scales.shape[1], scales.shape[3]
    linear = torch.arange(scales.shape[2] * groups, device=scales.device).view(1, 1, scales.shape[2], groups)
    source = layout.v_scales_to_4token(linear).flatten()
    target = torch.empty_like(source)
    target[source] = torch.arange(source.numel(), device=source.device)
    index = target.view(scales.shape[2], groups)[offsets]
    head = torch.arange(heads, device=scales.device)[:, None]
    scales.view(scales.shape[0], heads, -1)[pages[..., None, None], head, index[..., None, :]] = rows


def _fake(
    k_data: Tensor,
    k_scales: Tensor | None,
    v_data: Tensor,
    v_scales: Tensor | None,
    k: Tensor,
    v: Tensor,
    *_args: object,
    **_kwargs: object,
) -> None:
    return None


APPEND = define(
    "append(Tensor(a!) k_data, Tensor(b!)? k_scales, Tensor(c!) v_data, Tensor(d!)? v_scales, Tensor k, Tensor v, "
    "Tensor slots, Tensor k_global, Tensor v_global, *, Tensor? k_bias=None, Tensor? v_bias=None, "
    "Tensor? k_factors=None, Tensor? k_order=None, int k_rotation=0, Tensor(e!)? k_exact=None, "
    "Tensor(f!)? v_exact=None, Tensor? exact_slots=None, bool skip_negative=False, "
    'str k_format="nvfp4", str v_format="nvfp4", str scale_rule="amax", str v_scale_layout="linear", '
    'str backend="auto") -> ()',
    body=_body,
    fake=_fake,
)
