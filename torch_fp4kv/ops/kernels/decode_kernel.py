"""The decode kernel: one warp streams, unpacks and multiplies; see `decode.py` for how its work is cut.

Raw words go through shared memory (`cp.async`) and are unpacked in registers straight into operands of `mma.m16n8k16`
(see `decode_layouts.py`, `decode_unpack.py`). The warp keeps maximum, sum and accumulator of each column to itself.
Letters are those of `decode.py`; DP and DVP are padded head sizes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode_common import (
    CODE_SCALE,
    EXACT_SLOTS,
    GROUPS,
    finite,
    first_of_group,
    fold,
    fold_weights,
    row_range,
    spans_of_program,
)
from .decode_copy import copy_tile, direct_scales, next_lap
from .decode_exact import exact_split
from .decode_layouts import k_scale_map, k_swizzle, k_word_map, v_scale_map, v_swizzle, v_word_map, words_per_lane
from .decode_operands import (
    linear,
    load_query,
    pair_tokens,
    query_operand,
    spread_probabilities,
    stored_query,
    swizzled,
    unpack_words,
)
from .decode_results import final_scores, fold_waiting, put_aside, store_partial, visible_tokens


@gluon.jit(do_not_specialize=["tile_limit", "program_limit"])
def decode_kernel(
    q,
    k_data,
    k_scales,
    v_data,
    v_scales,
    k_global,
    lengths,
    q_lengths,
    starts,
    block_table,
    exact_from,
    k_bias,
    k_factors,
    k_order,
    mask,
    k_exact,
    v_exact,
    partial_out,
    partial_max,
    partial_sum,
    stride_q_b,
    stride_q_h,
    stride_q_l,
    stride_q_d,
    stride_k_p,
    stride_k_h,
    stride_ks_p,
    stride_ks_h,
    stride_v_p,
    stride_v_h,
    stride_vs_p,
    stride_vs_h,
    stride_table,
    stride_ke_b,
    stride_ke_h,
    stride_ke_e,
    stride_ve_b,
    stride_ve_h,
    stride_ve_e,
    stride_mask_b,
    stride_mask_h,
    stride_mask_l,
    stride_mask_m,
    mask_columns,
    stride_k_global,
    batch,
    queries,
    page_size,
    log_page_size,
    window,
    num_sink_tokens,
    ring,
    num_exact,
    num_stored,
    num_blocks,
    tile_limit,
    program_limit,
    stored_slots,
    slot_stride,
    scale,
    softcap,
    multiplier_1,
    multiplier_5,
    multiplier_9,
    H: gl.constexpr,
    G: gl.constexpr,
    C: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    DV: gl.constexpr,
    DVP: gl.constexpr,
    ROTATION: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,
    STRIDE: gl.constexpr,
    TILES: gl.constexpr,
    MOST: gl.constexpr,
    PAGING: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASK: gl.constexpr,
    EXACT: gl.constexpr,
    E4M3: gl.constexpr,
    PDL: gl.constexpr,
):
    """Partial attention of a tile, or of one to GROUPS groups, of a row, KV head and block of columns; see `decode.py`.

    `scale` is in units of log2(e). Words and scales are int32 views, scales of padded head sizes uint8.
    Accumulators are stored in units of v_global / CODE_SCALE.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HS: gl.constexpr = max(C, 8)
    # Rows of the accumulators, and of what is summed over.
    M: gl.constexpr = DVP // 2 if C == 4 else DVP
    TERMS: gl.constexpr = 2 * N if C == 4 else N
    W: gl.constexpr = DP // 8
    WV: gl.constexpr = DVP // 8
    KJ: gl.constexpr = words_per_lane(DP)[0]
    VJ: gl.constexpr = words_per_lane(DVP)[1]
    K_SCALES: gl.constexpr = linear(k_scale_map(N, DP))
    V_SCALES: gl.constexpr = linear(v_scale_map(N, DVP))
    multipliers = (multiplier_1, multiplier_5, multiplier_9)
    if PDL:
        # In this order, as the merge reads lengths before it waits.
        gdc_wait()
        gdc_launch_dependents()

    rows_heads = batch * H
    program = gl.program_id(0)
    if EXACT:  # noqa: SIM102 - known when the kernel is compiled
        # These are short: last, they fill the gaps that others leave.
        if program >= num_stored:
            program -= num_stored
            block = program % num_blocks
            row_head = program // num_blocks % rows_heads
            part = program // (num_blocks * rows_heads)
            b = row_head // H
            head = row_head % H
            length, n, start, begin, end, inner_begin, inner_end = row_range(
                b, lengths, q_lengths, starts, None, queries, page_size, num_sink_tokens, window, 2, False, False
            )
            ring_from = length
            if exact_from is not None:
                ring_from = gl.load(exact_from + b)
            exact_split(
                q,
                k_exact,
                v_exact,
                mask,
                partial_out,
                partial_max,
                partial_sum,
                b,
                head,
                row_head,
                block,
                part * EXACT_SLOTS,
                stored_slots + part,
                slot_stride,
                length,
                n,
                start,
                ring_from,
                ring,
                num_exact,
                stride_q_b,
                stride_q_h,
                stride_q_l,
                stride_q_d,
                stride_ke_b,
                stride_ke_h,
                stride_ke_e,
                stride_ve_b,
                stride_ve_h,
                stride_ve_e,
                stride_mask_b,
                stride_mask_h,
                stride_mask_l,
                stride_mask_m,
                mask_columns,
                queries,
                window,
                num_sink_tokens,
                scale,
                softcap,
                G,
                C,
                D,
                DP,
                DV,
                DVP,
                CAUSAL,
                WINDOW,
                SOFTCAP,
                MASK,
                MMA,
            )
            return
    # STRIDE neighbours read neighbouring tokens. Slots that short rows leave empty come last.
    slot = program // (STRIDE * num_blocks * rows_heads) * STRIDE + program % STRIDE
    row_head = program // (STRIDE * num_blocks) % rows_heads
    block = program // STRIDE % num_blocks
    b = row_head // H
    head = row_head % H

    query_of = (q, k_order, b, head, block, queries, stride_q_b, stride_q_h, stride_q_l, stride_q_d)
    if C > 4:
        # What is loaded after the copies waits behind them, and without a barrier the compiler puts these loads there.
        # Four columns gain nothing, as work on the query then delays the copies.
        query = load_query(*query_of, G, C, HS, D, DP)
        k_scale = gl.load(k_global + head * stride_k_global)
        debug_barrier()
    length, n, start, begin, end, inner_begin, inner_end = row_range(
        b, lengths, q_lengths, starts, exact_from, queries, page_size, num_sink_tokens, window, PAGING, CAUSAL, WINDOW
    )
    SPAN: gl.constexpr = GROUP * STRIDE
    first_tile = begin // N
    end_tile = (end + N - 1) // N
    first_span = first_tile // (SPAN * GROUPS) * GROUPS
    if end_tile - first_tile <= tile_limit:
        first = first_tile + slot
        stop = gl.minimum(first + 1, end_tile)
        slot = first - first_span * SPAN
    else:
        spans = spans_of_program(first_span, gl.cdiv(end_tile, SPAN), program_limit // STRIDE, MOST)
        span = first_span + slot // STRIDE * spans
        first = first_of_group(span * SPAN + slot % STRIDE, first_tile, STRIDE)
        stop = gl.minimum((span + spans) * SPAN, end_tile)
    if first >= stop:
        return

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    k_smem = gl.allocate_shared_memory(gl.int32, [N, W], swizzled(k_swizzle(DP)))
    v_smem = gl.allocate_shared_memory(gl.int32, [N // 2, 2 * WV], swizzled(v_swizzle(DVP)))
    ks_smem = gl.allocate_shared_memory(gl.int32, [N * DP // 64], FLAT)
    vs_smem = gl.allocate_shared_memory(gl.int32, [N * DVP // 64], FLAT)
    # A group, and a pair of them, that wait to be folded.
    waiting_acc = gl.allocate_shared_memory(gl.float32, [MOST // 2, M, HS], ROWS)
    waiting_total = gl.allocate_shared_memory(gl.float32, [MOST // 2, HS], FLAT)
    waiting_top = gl.allocate_shared_memory(gl.float32, [MOST // 2, HS], FLAT)
    waiting = (waiting_acc, waiting_total, waiting_top)
    k_data += head.to(gl.int64) * stride_k_h
    v_data += head.to(gl.int64) * stride_v_h
    k_scales += head.to(gl.int64) * stride_ks_h
    v_scales += head.to(gl.int64) * stride_vs_h
    row_pages = block_table
    wrapped = 0
    page = b
    if PAGING == 0 or PAGING == 3:
        k_data += b.to(gl.int64) * stride_k_p
        v_data += b.to(gl.int64) * stride_v_p
        k_scales += b.to(gl.int64) * stride_ks_p
        v_scales += b.to(gl.int64) * stride_vs_p
        wrapped = next_lap(gl.to_tensor(0), first * N, page_size)
    else:
        row_pages += b.to(gl.int64) * stride_table
        if PAGING == 1:
            page = gl.load(row_pages + (first * N >> log_page_size))
    copy_tile(
        k_smem,
        ks_smem,
        k_data,
        k_scales,
        stride_k_p,
        stride_ks_p,
        first * N,
        wrapped,
        page,
        begin,
        end - 1,
        row_pages,
        page_size,
        log_page_size,
        N,
        D,
        DP,
        1,
        PAGING,
    )
    async_copy.commit_group()
    copy_tile(
        v_smem,
        vs_smem,
        v_data,
        v_scales,
        stride_v_p,
        stride_vs_p,
        first * N,
        wrapped,
        page,
        begin,
        end - 1,
        row_pages,
        page_size,
        log_page_size,
        N,
        DV,
        DVP,
        2,
        PAGING,
    )
    async_copy.commit_group()
    if PAGING == 0 or PAGING == 3:
        wrapped = next_lap(wrapped, (first + STRIDE) * N, page_size)
    elif PAGING == 1:
        page = gl.load(row_pages + (gl.minimum((first + STRIDE) * N, end - 1) >> log_page_size))

    if C == 4:
        query = load_query(*query_of, G, C, HS, D, DP)
        k_scale = gl.load(k_global + head * stride_k_global)
    query, shift = stored_query(query.to(gl.float32), k_bias, k_factors, k_order, head, D, ROTATION)
    query, factor = query_operand(query, B, MMA)
    # Not 0, which -inf would turn into NaN.
    factor = gl.maximum(factor * (scale * CODE_SCALE * k_scale), 1.2e-38)
    column = block * C + gl.arange(0, HS, layout=gl.SliceLayout(0, MMA)) % C
    query_position = length - n + column // G
    if k_bias is not None:
        shift = gl.convert_layout(shift, gl.SliceLayout(0, MMA)) * scale

    ones = gl.full([16, TERMS], 1.0, gl.float16, A)
    acc = gl.zeros([M, HS], gl.float32, MMA)
    total = gl.zeros([16, HS], gl.float32, MMA)
    top = gl.full([HS], -float("inf"), gl.float32, gl.SliceLayout(0, MMA))
    KS_TYPE: gl.constexpr = gl.uint8 if DP == 64 else gl.int16
    VS_TYPE: gl.constexpr = gl.int16 if DVP == 256 else gl.uint8
    KR: gl.constexpr = 8 if DP == 256 else 4
    VR: gl.constexpr = 4 if DVP == 64 else 8
    for i in range(first, stop, STRIDE):
        start = i * N
        ahead = i + STRIDE
        whole = (start >= inner_begin) & (start + N <= inner_end)
        position = start + gl.arange(0, N, layout=gl.SliceLayout(1, MMA))

        async_copy.wait_group(1)
        words = k_smem.load(linear(k_word_map(N, DP)))
        if D == DP:
            ks = ks_smem._reinterpret(KS_TYPE, [N, KR], ROWS).load(K_SCALES).to(gl.int16)
        else:
            ks = direct_scales(
                k_scales,
                stride_ks_p,
                start,
                start // page_size * page_size,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                D,
                KR,
                2,
                K_SCALES,
                PAGING,
            )
        if DP == 256:
            words = gl.permute(gl.reshape(words, [N, 2, 4, KJ]), (0, 2, 1, 3))
            ks = gl.permute(gl.reshape(ks, [N, 2, 4]), (0, 2, 1))
            k = unpack_words(words, ks, multipliers, KJ, 2, E4M3)
            k = gl.permute(k, (0, 2, 7, 6, 5, 4, 1, 3))
        else:
            k = unpack_words(gl.reshape(words, [N, 4, KJ]), ks, multipliers, KJ, DP // 64, E4M3)
            k = gl.permute(k, (0, 6, 5, 4, 3, 1, 2))
        k = gl.convert_layout(gl.reshape(k, [N, DP]), A, assert_trivial=True)
        s = mma_v2(k, query, gl.zeros([N, HS], gl.float32, MMA))
        if ahead < stop:
            copy_tile(
                k_smem,
                ks_smem,
                k_data,
                k_scales,
                stride_k_p,
                stride_ks_p,
                ahead * N,
                wrapped,
                page,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                D,
                DP,
                1,
                PAGING,
            )
        async_copy.commit_group()

        FACTOR_LATER: gl.constexpr = not SOFTCAP and not MASK
        if not FACTOR_LATER:
            s = s * factor[None, :]
            if k_bias is not None:
                s += shift[None, :]
            s = final_scores(
                s,
                position,
                column,
                b,
                head,
                queries,
                softcap,
                mask,
                stride_mask_b,
                stride_mask_h,
                stride_mask_l,
                stride_mask_m,
                mask_columns,
                G,
                SOFTCAP,
                MASK,
            )
        if not whole:
            seen = (position >= begin) & (position < end)
            s = visible_tokens(s, position, seen, query_position, window, CAUSAL, WINDOW)
        tile_top = gl.max(s, 0)
        if FACTOR_LATER:
            tile_top = tile_top * factor
            if k_bias is not None:
                tile_top += shift
        tile_top = gl.ceil(tile_top)
        if not TILES:
            tile_top, old_weight, _ = fold_weights(top, tile_top)
            old_weight = gl.expand_dims(old_weight, 0)
            acc = acc * old_weight
            total = total * old_weight
            top = tile_top
        base = -finite(tile_top)
        if FACTOR_LATER:
            if k_bias is not None:
                base += shift
            shifted = gl.fma(s, gl.broadcast(factor[None, :], s)[0], gl.broadcast(base[None, :], s)[0])
        else:
            shifted = s + base[None, :]
        p = spread_probabilities(gl.exp2(shifted), N, C, B)

        async_copy.wait_group(1)
        words = v_smem.load(linear(v_word_map(N, DVP)))
        if DV == DVP:
            vs = vs_smem._reinterpret(VS_TYPE, [N, VR], ROWS).load(gl.SliceLayout(2, V_SCALES)).to(gl.int16)
        else:
            vs = direct_scales(
                v_scales,
                stride_vs_p,
                start,
                start // page_size * page_size,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                DV,
                VR,
                DVP // 128,
                gl.SliceLayout(2, V_SCALES),
                PAGING,
            )
        if not whole:
            # Slots never written may hold NaN scales, which a probability of 0 does not hide.
            token = start + gl.arange(0, N, layout=gl.SliceLayout(1, vs.type.layout))
            vs = gl.where(((token >= begin) & (token < end))[:, None], vs, gl.zeros_like(vs))
        vs = gl.expand_dims(vs, 2)
        if DVP == 64:
            vs = gl.broadcast(vs, gl.full([N, 4, 2], 0, gl.int16, V_SCALES))[0]
        vs = gl.reshape(vs, [N // 8, 4, 2, 8])
        words = gl.reshape(words, [N // 8, 4, 2, 8, VJ])
        if C == 4:
            vs = gl.reshape(gl.permute(vs, (0, 2, 1, 3)), [N, 8])
            words = gl.reshape(gl.permute(words, (0, 2, 1, 3, 4)), [N, 8, VJ])
            v = unpack_words(words, vs, multipliers, VJ, 2 if DVP == 256 else 1, E4M3)
            v = gl.reshape(v, [N // 8, 2, 4] + v.shape[1:])  # noqa: RUF005
            v = gl.permute(v, (8, 7, 6, 5, 3, 0, 1, 2, 4))
        else:
            words, vs = pair_tokens(words, vs)
            v = unpack_words(words, vs, multipliers, min(2 * VJ, 4), 0, E4M3)
            v = gl.reshape(v, [N // 8, 4, 8, max(1, DVP // 128)] + v.shape[-5:])  # noqa: RUF005
            v = gl.permute(v, (3, 8, 7, 6, 5, 2, 0, 1, 4))
        v = gl.convert_layout(gl.reshape(v, [M, TERMS]), A, assert_trivial=True)
        if TILES:
            tile_acc = mma_v2(v, p, gl.zeros([M, HS], gl.float32, MMA))
            tile_total = mma_v2(ones, p, gl.zeros([16, HS], gl.float32, MMA))
        else:
            acc = mma_v2(v, p, acc)
            total = mma_v2(ones, p, total)
        if ahead < stop:
            copy_tile(
                v_smem,
                vs_smem,
                v_data,
                v_scales,
                stride_v_p,
                stride_vs_p,
                ahead * N,
                wrapped,
                page,
                begin,
                end - 1,
                row_pages,
                page_size,
                log_page_size,
                N,
                DV,
                DVP,
                2,
                PAGING,
            )
        async_copy.commit_group()
        if PAGING == 0 or PAGING == 3:
            wrapped = next_lap(wrapped, (ahead + STRIDE) * N, page_size)
        elif PAGING == 1:
            page = gl.load(row_pages + (gl.minimum((ahead + STRIDE) * N, end - 1) >> log_page_size))

        if TILES:
            top, old_weight, new_weight = fold_weights(top, tile_top)
            old_weight = gl.expand_dims(old_weight, 0)
            new_weight = gl.expand_dims(new_weight, 0)
            acc = fold(acc, old_weight, tile_acc, new_weight)
            total = fold(total, old_weight, tile_total, new_weight)
        if (i % SPAN >= SPAN - STRIDE) & (i + STRIDE < stop):
            group = i // SPAN
            if (group % 2 == 1) & (group > first // SPAN):
                acc, total, top = fold_waiting(waiting, 0, acc, total, top, MMA)
            put_aside(waiting, group % (MOST // 2), acc, total, top)
            acc = gl.zeros([M, HS], gl.float32, MMA)
            total = gl.zeros([16, HS], gl.float32, MMA)
            top = gl.full([HS], -float("inf"), gl.float32, gl.SliceLayout(0, MMA))
    async_copy.wait_group(0)
    first_group = first // SPAN
    last_group = (first + (stop - 1 - first) // STRIDE * STRIDE) // SPAN
    if (last_group % 2 == 1) & (last_group > first_group):
        acc, total, top = fold_waiting(waiting, 0, acc, total, top, MMA)
    if MOST > 2 and last_group // 2 > first_group // 2:
        acc, total, top = fold_waiting(waiting, 1, acc, total, top, MMA)
    store_partial(
        partial_out,
        partial_max,
        partial_sum,
        acc,
        top,
        total,
        row_head,
        block,
        slot,
        slot_stride,
        queries,
        G,
        C,
        HS,
        DV,
        DVP,
        MMA,
    )
