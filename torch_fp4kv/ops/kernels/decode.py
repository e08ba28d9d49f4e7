"""Decode attention over an NVFP4 cache: split-KV in Gluon for NVIDIA GPUs (sm_80 and newer), then a merge.

Letters: B batch, H KV heads, G query heads a KV head, L queries a row, C columns of a program (of G · L), D and DV head
sizes of K and V, N tokens a tile, T tokens a page, P pages, E exact slots, R exact ring slots.

Results do not depend on how the work is spread. Tiles lie at multiples of N tokens and each is computed on its own;
the GROUP tiles i, i + STRIDE, … of a span of GROUP · STRIDE tiles are folded in order into a group, the same groups of
four neighbouring spans in pairs into a set, and sets are merged in a fixed order. A program (one warp) takes a set, a
pair of groups, a group or a tile, as the length of the row makes enough of them; the merge does the folds that remain.
So the grid follows from the capacity, and lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..call import AttentionCall
from .decode_common import EXACT_SLOTS, GROUPS, LOG2E
from .decode_kernel import decode_kernel
from .decode_merge import merge_kernel
from .decode_unpack import SHIFTS

MAX_QUERIES = 16
MAX_COLUMNS = 512
HEAD_SIZES = (64, 80, 96, 128, 192, 256)


@dataclass(frozen=True)
class Configuration:
    """Fixed choices for a shape, measured on an H200.

    Attributes:
        columns: columns of a program (C).
        tokens: tokens of a tile (N).
        group: tiles of a group.
        stride: tiles from one of a group to the next, and warps of the merge.
        tiles: whether each tile is computed on its own; else a group is, whose sums then stay in place.
        most: most groups of a program, 2 or 4.
        registers: cap on the registers of a thread, or None.
        programs: most programs that give each tile, or each group, its own: as many as the GPU holds.
    """

    columns: int
    tokens: int
    group: int
    stride: int = 8
    tiles: bool = True
    most: int = GROUPS.value
    registers: int | None = None
    programs: int = 132 * 16


def configuration(columns: int, dp: int, dvp: int, capability: tuple[int, int]) -> Configuration:
    """The choices for `columns` columns and padded head sizes on a GPU of compute capability `capability`."""
    d = max(dp, dvp)
    c = 4 if columns <= 4 else min(16, 2048 // d, max(8, power_of_two(columns)))
    if c == 4:
        tokens = 8192 // d
        # Code for Blackwell spills with 168.
        registers = 128 if d <= 128 else None if capability >= (10, 0) else 168
        return Configuration(c, tokens, 256 // tokens, registers=registers)
    if c == 8 and d <= 128:
        tokens = 4096 // d
        return Configuration(c, tokens, 256 // tokens, tiles=False, registers=128)
    # Accumulators take half of the registers: eight programs an SM.
    tokens = min(64, 8192 // d)
    return Configuration(c, tokens, 32 * c // tokens, tiles=False, most=2)


def padded(d: int) -> int:
    """Head size as the kernel's layouts have it."""
    return 64 if d <= 64 else 128 if d <= 128 else 256


def unsupported(call: AttentionCall) -> str | None:
    """Why this kernel cannot serve `call`, or None."""
    queries, d, dv = call.q.shape[2], call.head_dim, call.v_head_dim
    if (call.k_format, call.v_format) != ("nvfp4", "nvfp4"):
        return f"K and V must be nvfp4, got {call.k_format} and {call.v_format}"
    if call.k_new is not None:
        return "new keys and values are for the prefill kernel"
    if queries > MAX_QUERIES or queries * call.group > MAX_COLUMNS:
        return f"at most {MAX_QUERIES} queries and {MAX_COLUMNS} columns, got {queries} and {queries * call.group}"
    if d not in HEAD_SIZES or dv not in HEAD_SIZES:
        return f"head sizes must be among {HEAD_SIZES}, got {d} and {dv}"
    if call.v_scale_layout != "linear":
        return f"V scales must be linear, got {call.v_scale_layout!r}"
    if call.softmax_scale <= 0:
        return f"the softmax scale must be positive, got {call.softmax_scale}"
    size = call.page_size
    if call.block_table is None and size % 16:
        return f"the cache must hold a multiple of 16 tokens, got {size}"
    tile = 8192 // max(padded(d), padded(dv))
    if call.block_table is None and size < tile and 2 * size != tile:
        # A tile would go round the ring more than once.
        return f"the cache must hold {tile // 2} tokens, or {tile} or more, got {size}"
    if call.block_table is not None and (size < 16 or size & (size - 1)):
        return f"the page size must be a power of two from 16, got {size}"
    for name, data, row in (
        ("k_data", call.k_data, d // 16),
        ("k_scales", call.k_scales, d // 16),
        ("v_data", call.v_data, dv // 16),
        ("v_scales", call.v_scales, dv // 16),
    ):
        assert data is not None
        aligned = all(stride * data.element_size() % 16 == 0 for stride in data.stride()[:2])
        if data.stride()[2:] != (row, 1) or not aligned or data.data_ptr() % 16:
            return f"{name} must be contiguous over tokens and aligned to 16 bytes, strides are {data.stride()}"
    return None


@dataclass(frozen=True)
class Plan:
    """What follows from the shapes of a call: how its work is cut, and what the kernels are compiled for.

    Attributes:
        config: the choices for these shapes.
        blocks: column blocks.
        programs: programs a row, head and block for stored tokens.
        tile_limit: tiles of a row up to which each has its own program.
        program_limit: programs a row, head and block up to which those take less than a set.
        stored_slots: slots for results of stored tokens.
        exact_slots: slots, and programs, for exact tokens.
        merge_elements: output elements that a program of the merge takes.
        merge_count: partial results of each row of tiles that the merge loads at a time.
        merge_warps: warps of the merge.
        shape: what both kernels are compiled for.
    """

    config: Configuration
    blocks: int
    programs: int
    tile_limit: int
    program_limit: int
    stored_slots: int
    exact_slots: int
    merge_elements: int
    merge_count: int
    merge_warps: int
    shape: dict[str, int]


@lru_cache(maxsize=1024)
def plan(
    rows_heads: int,
    heads: int,
    group: int,
    queries: int,
    d: int,
    dv: int,
    capacity: int,
    page_size: int,
    paged: bool,
    window: int,
    causal: bool,
    exact_tokens: int,
    capability: tuple[int, int],
) -> Plan:
    """The plan for `rows_heads` = B · H rows and heads that hold up to `capacity` tokens."""
    columns = group * queries
    config = configuration(columns, padded(d), padded(dv), capability)
    blocks = -(-columns // config.columns)
    others = rows_heads * blocks
    reach = min(capacity, window + queries - 1) if window > 0 else capacity
    span = config.tokens * config.group * config.stride
    sets = -(-reach // (span * config.most)) * config.stride
    groups = -(-reach // span) * config.stride
    tiles = -(-reach // config.tokens)
    # The range of a window or a ring does not begin with a set and may touch one more.
    more = int(window > 0 or not paged)
    sets += more * config.stride * GROUPS.value // config.most
    groups += more * GROUPS.value * config.stride
    program_limit = config.programs // others
    tile_limit = min(tiles, program_limit)
    if not config.tiles or tile_limit <= 2 * config.stride:
        # Groups make nearly as many programs.
        tile_limit = 0
    programs = round_up(max(sets, min(groups, program_limit), tile_limit), config.stride)
    # Slots of tiles count from the set that the first lies in.
    slots = max(programs, tile_limit + GROUPS.value * config.group * config.stride if tile_limit else 0)
    paging = 0 if page_size % config.tokens == 0 else 3
    if paged:
        paging = 1 if page_size >= config.tokens else 2
    merge_elements = 32
    while merge_elements < padded(dv) and rows_heads * columns * padded(dv) // merge_elements > config.programs // 2:
        merge_elements *= 2
    merge_programs = rows_heads * columns * -(-dv // merge_elements)
    return Plan(
        config,
        blocks,
        programs,
        tile_limit,
        program_limit,
        stored_slots=round_up(slots, 16),
        exact_slots=-(-exact_tokens // EXACT_SLOTS.value),
        merge_elements=merge_elements,
        merge_count=min(32, power_of_two(max(1, programs // config.stride - more))),
        merge_warps=min(config.stride, 1 << max(1, config.programs // merge_programs).bit_length() - 1),
        shape={
            "H": heads,
            "G": group,
            "DV": dv,
            "N": config.tokens,
            "GROUP": config.group,
            "STRIDE": config.stride,
            "MOST": config.most,
            "PAGING": paging,
            "CAUSAL": causal and queries > 1,
            "WINDOW": window > 0,
            "EXACT": exact_tokens > 0,
        },
    )


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Serves a call for which `unsupported` is None."""
    call = call.dense()
    q, device, table = call.q, call.q.device, call.block_table
    batch, _, queries, d = q.shape
    heads, dv, page_size = call.num_kv_heads, call.v_head_dim, call.page_size
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    if q.numel() == 0:
        return out, lse
    window = max(call.window, 0)
    sinks = 0 if call.k_exact is None else call.num_sink_tokens
    ring = 0 if call.k_exact is None or call.exact_from is None else call.ring_size
    exact_from = call.exact_from if ring else None
    capability = torch.cuda.get_device_capability(device)
    p = plan(
        batch * heads,
        heads,
        call.group,
        queries,
        d,
        dv,
        call.capacity,
        page_size,
        table is not None,
        window,
        call.causal,
        sinks + ring,
        capability,
    )
    slots = p.stored_slots + p.exact_slots
    partials = batch * q.shape[1] * queries * slots
    partial_out = torch.empty(partials * dv, dtype=torch.float32, device=device)
    partial_max = torch.empty(partials, dtype=torch.float32, device=device)
    partial_sum = torch.empty_like(partial_max)
    k_words, v_words = call.k_data.view(torch.int32), call.v_data.view(torch.int32)
    k_scales, v_scales = call.k_scales, call.v_scales
    assert k_scales is not None
    assert v_scales is not None
    k_scales = k_scales.view(torch.int32) if d == padded(d) else k_scales
    v_scales = v_scales.view(torch.int32) if dv == padded(dv) else v_scales
    mask = call.mask
    if mask is not None:
        mask = mask.expand(*q.shape[:3], mask.shape[-1])
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    pdl = capability >= (9, 0)
    num_stored = p.programs * batch * heads * p.blocks
    with torch.cuda.device(device):
        decode_kernel[(num_stored + p.exact_slots * batch * heads * p.blocks,)](
            q,
            k_words,
            k_scales,
            v_words,
            v_scales,
            call.k_global,
            call.lengths,
            call.q_lengths,
            call.starts,
            table,
            exact_from,
            call.k_bias,
            call.k_factors,
            call.k_order,
            mask,
            call.k_exact,
            call.v_exact,
            partial_out,
            partial_max,
            partial_sum,
            *q.stride(),
            *k_words.stride()[:2],
            *k_scales.stride()[:2],
            *v_words.stride()[:2],
            *v_scales.stride()[:2],
            0 if table is None else table.stride(0),
            *_strides(call.k_exact)[:3],
            *_strides(call.v_exact)[:3],
            *_strides(mask),
            0 if mask is None else mask.shape[-1],
            call.k_global.ndim,
            batch,
            queries,
            page_size,
            page_size.bit_length() - 1,
            window,
            sinks,
            max(ring, 1),
            sinks + ring,
            num_stored,
            p.blocks,
            p.tile_limit,
            p.program_limit,
            p.stored_slots,
            slots,
            call.softmax_scale * LOG2E.value,
            call.softcap,
            *SHIFTS,
            C=p.config.columns,
            D=d,
            DP=padded(d),
            DVP=padded(dv),
            ROTATION=call.k_rotation,
            TILES=p.config.tiles,
            SOFTCAP=call.softcap > 0,
            MASK=0 if mask is None else 1 if mask.dtype == torch.uint8 else 2,
            E4M3=capability >= (8, 9),
            PDL=pdl,
            **p.shape,
            num_warps=1,
            maxnreg=p.config.registers,
            launch_pdl=pdl,
        )
        merge_kernel[(batch * q.shape[1] * queries, -(-dv // p.merge_elements))](
            partial_out,
            partial_max,
            partial_sum,
            out,
            lse,
            call.lengths,
            call.q_lengths,
            call.starts,
            exact_from,
            call.sink_logits,
            call.v_global,
            call.v_bias,
            call.v_global.ndim,
            queries,
            page_size,
            window,
            sinks,
            p.exact_slots,
            p.tile_limit,
            p.program_limit,
            p.stored_slots,
            slots,
            BLOCK_D=p.merge_elements,
            COUNT=p.merge_count,
            TILES=p.tile_limit > 0,
            SETS=p.program_limit < p.config.stride,
            PDL=pdl,
            **p.shape,
            num_warps=p.merge_warps,
            maxnreg=255,
            launch_pdl=pdl,
        )
    return out, lse


def power_of_two(x: int) -> int:
    """The first power of two that is not below `x`."""
    return 1 << (x - 1).bit_length()


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else x.stride()
