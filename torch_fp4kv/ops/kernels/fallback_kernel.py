"""The kernels of `fallback.py`; letters are those there.

Stored tiles are multiplied as they were stored: e4m3 and e2m1 · e4m3 have at most 6 significant bits, so that float16
holds them, and the global scale acts on scores and results. Queries are brought into float16's range by a power of two
a row; one that 11 bits do not hold is two numbers, high and low.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .nvfp4 import power_of_two, round_to

MERGE_SPLITS = tl.constexpr(128)
"""Splits that the merge takes at once."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-(2.0**127))
"""Lower numbers of a mask count as this one, which stays finite in units of log2(e): they hide less than -inf does."""
CODE_SCALE = tl.constexpr(16384.0)
"""Decoded 4-bit values lack this factor."""


@triton.jit
def _e4m3(bits):
    """float16 of e4m3 `bits` (integers)."""
    bits = bits.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _four_e4m3(words, E4M3: tl.constexpr):
    """float16 of each of the four bytes of int32 `words`, by the instruction for it where there is one (`E4M3`)."""
    if E4M3:
        parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            .reg .b16 a, b, c, d;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $4, $5, 0x7362;
            mov.b32 {a, b}, low;
            mov.b32 {c, d}, high;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            cvt.rn.f16x2.e4m3x2 $2, c;
            cvt.rn.f16x2.e4m3x2 $3, d;
            }""",
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        parts = (_e4m3(words), _e4m3(words >> 8), _e4m3(words >> 16), _e4m3(words >> 24))
    return parts


@triton.jit
def _four_e2m1(words, factor, FAST: tl.constexpr):
    """float16 of each of the four codes of int16 `words`, times `factor` (float16) / 2^14.

    As float16 bits the magnitude is its value times 2^-14: the two formats are alike, subnormal included.
    """
    if FAST:
        parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $4, 9;
            shl.b32 b, $4, 12;
            and.b32 a, a, 0x0E000E00;
            lop3.b32 a, b, 0x80008000, a, 0xEA;
            mul.rn.f16x2 $0, a, $5;
            shl.b32 a, $4, 5;
            shl.b32 b, $4, 8;
            and.b32 a, a, 0x0E000E00;
            lop3.b32 a, b, 0x80008000, a, 0xEA;
            mul.rn.f16x2 $1, a, $5;
            shl.b32 a, $4, 1;
            shl.b32 b, $4, 4;
            and.b32 a, a, 0x0E000E00;
            lop3.b32 a, b, 0x80008000, a, 0xEA;
            mul.rn.f16x2 $2, a, $5;
            shr.u32 a, $4, 3;
            and.b32 a, a, 0x0E000E00;
            lop3.b32 a, $4, 0x80008000, a, 0xEA;
            mul.rn.f16x2 $3, a, $5;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        parts = (
            _e2m1(words << 12) * factor,
            _e2m1(words << 8) * factor,
            _e2m1(words << 4) * factor,
            _e2m1(words) * factor,
        )
    return parts


@triton.jit
def _e2m1(code):
    """float16 of the code in the highest four bits of int16 `code`, divided by 2^14."""
    return ((code & -0x8000) | ((code >> 3) & 0x0E00)).to(tl.float16, bitcast=True)


@triton.jit
def _as(x, TYPE: tl.constexpr):
    if TYPE == "fp16":
        x = x.to(tl.float16)
    elif TYPE == "bf16":
        x = x.to(tl.bfloat16)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def _word_pointer(data, FORMAT: tl.constexpr):
    """`data` as words of four elements; "exact" data as it is."""
    if FORMAT == "fp8":
        data = data.to(tl.pointer_type(tl.int32), bitcast=True)
    elif FORMAT != "exact":
        data = data.to(tl.pointer_type(tl.int16), bitcast=True)
    return data


@triton.jit
def _rows(data, page, slot, head, page_stride, head_stride, token_stride, N: tl.constexpr, WHOLE: tl.constexpr):
    """Pointers `[N]` to tokens: N neighbours from `slot` on (`WHOLE`), or each at its own `page` and `slot`."""
    if data is None:
        rows = None
    elif WHOLE:
        rows = (data + page * page_stride + head * head_stride + slot * token_stride) + tl.arange(0, N) * token_stride
    else:
        rows = data + head * head_stride + page * page_stride + slot * token_stride
    return rows


@triton.jit
def _stored_tile(
    rows,
    scale_rows,
    scale_stride,
    slot,
    valid,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
    FOUR_TOKEN: tl.constexpr,
    TYPE: tl.constexpr,
    E4M3: tl.constexpr,
    FAST: tl.constexpr,
):
    """The tokens at `rows`, without global scale and CODE_SCALE; 0 where not `valid`.

    Tiles `[N, BLOCK_D / 4]` of the elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3, which an instruction or two makes of a
    word each; of "exact" tokens one tile `[N, BLOCK_D]`.
    """
    PER_WORD: tl.constexpr = 1 if FORMAT == "exact" else 4
    d = tl.arange(0, BLOCK_D // PER_WORD)[None, :]
    mask = valid[:, None]
    if D < BLOCK_D:
        mask = mask & (d < D // PER_WORD)
    words = tl.load(rows[:, None] + d, mask=mask, other=0)
    if FORMAT == "exact":
        parts = (words,)
    elif FORMAT == "fp8":
        parts = _four_e4m3(words, E4M3)
    else:
        S: tl.constexpr = BLOCK_D // 16
        s = tl.arange(0, S)[None, :]
        mask = valid[:, None]
        if D < BLOCK_D:
            mask = mask & (s < D // 16)
        scale_rows = scale_rows[:, None]
        if FOUR_TOKEN:
            scale_rows += (s // (D // 64) - slot[:, None] % 4) * scale_stride
            s = s % (D // 64) * 4 + slot[:, None] % 4
        bits = tl.load(scale_rows + s, mask=mask, other=0)
        if FORMAT == "nvfp4":
            parts = _four_e2m1(words, _each_of_four(_e4m3(bits)), FAST)
        else:
            a, b, c, d = _four_e2m1(words, tl.full(words.shape, 1.0, tl.float16), FAST)
            factor = _each_of_four(power_of_two(bits.to(tl.int32)))
            parts = (  # type: ignore[assignment]
                a.to(tl.float32) * CODE_SCALE * factor,
                b.to(tl.float32) * CODE_SCALE * factor,
                c.to(tl.float32) * CODE_SCALE * factor,
                d.to(tl.float32) * CODE_SCALE * factor,
            )
    return _all_as(parts, TYPE)


@triton.jit
def _each_of_four(x):
    """`[N, 4 S]`: each of `x` `[N, S]` four times."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], 4]), [x.shape[0], 4 * x.shape[1]])


@triton.jit
def _all_as(parts, TYPE: tl.constexpr):
    if len(parts) == 1:
        parts = (_as(parts[0], TYPE),)
    else:
        parts = (_as(parts[0], TYPE), _as(parts[1], TYPE), _as(parts[2], TYPE), _as(parts[3], TYPE))
    return parts


@triton.jit
def _exact_tile(
    tensors, b, head, slot, index, in_exact, in_new, D: tl.constexpr, BLOCK_D: tl.constexpr, TYPE: tl.constexpr
):
    """`[N, BLOCK_D]`: exact slots where `in_exact`, new tokens where `in_new`, else 0. `tensors`: with strides."""
    exact, exact_0, exact_1, exact_2, exact_3, new, new_0, new_1, new_2, new_3 = tensors
    d = tl.arange(0, BLOCK_D)[None, :]
    x = _as(tl.zeros([slot.shape[0], BLOCK_D], tl.float32), TYPE)
    if exact is not None:
        at = exact + b * exact_0 + head * exact_1 + slot * exact_2
        x += _as(tl.load(at[:, None] + d * exact_3, mask=in_exact[:, None] & (d < D), other=0.0), TYPE)
    if new is not None:
        at = new + b * new_0 + head * new_1 + index * new_2
        x += _as(tl.load(at[:, None] + d * new_3, mask=in_new[:, None] & (d < D), other=0.0), TYPE)
    return x


@triton.jit
def _query(q, real, q_3, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """float32 `[M, BLOCK_D]` of the query rows at `q`."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(q[:, None] + d[None, :] * q_3, mask=real[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _parts(q, FORMAT: tl.constexpr):
    """`q` in parts as `_stored_tile` has them."""
    parts = (q,)
    if FORMAT != "exact":
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 4, 2, 2]))
        q_0, q_2 = tl.split(even)
        q_1, q_3 = tl.split(odd)
        parts = (q_0, q_1, q_2, q_3)  # type: ignore[assignment]
    return parts


@triton.jit
def _product(q, k, scores, PRECISION: tl.constexpr):
    """`scores + q · k`, `[M, N]`, of parts."""
    for i in tl.static_range(len(k)):
        scores = tl.dot(q[i], tl.trans(k[i]), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _weighted(weights, v, acc, PRECISION: tl.constexpr):
    """`acc + weights · v`; of bfloat16 `v` with weights of 16 bits, in two products."""
    if v.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        acc = tl.dot(high, v, acc)
        acc = tl.dot((weights - high.to(tl.float32)).to(tl.bfloat16), v, acc)
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _visible_scores(
    scores,
    position,
    visible,
    query,
    mask,
    softcap,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
):
    """`scores` in base 2 with soft-cap and mask; -inf where not `visible` (`[M, N]`) or hidden by an option.

    `mask`: pointers `[M]` to its rows, their stride and size.
    """
    if SOFTCAP:
        scores = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))
    if CAUSAL:
        visible = visible & (position[None, :] <= query[:, None])
    if WINDOW:
        visible = visible & (position[None, :] > query[:, None] - window)
    if MASK > 0:
        mask_rows, mask_3, mask_columns = mask
        at = mask_rows[:, None] + position.to(tl.int64)[None, :] * mask_3
        visible = visible & (position < mask_columns)[None, :]
        if MASK == 1:
            visible = visible & (tl.load(at, mask=visible, other=0) != 0)
        else:
            added = tl.load(at, mask=visible, other=0.0).to(tl.float32)
            scores += tl.where(added == float("-inf"), added, tl.maximum(added, LOWEST) * LOG2E)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _softmax(scores, top, total, EXPONENT: tl.constexpr):
    """`(weights · 2^EXPONENT, what earlier sums are to be multiplied by, top, total)` with the tile added."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - finite_top)
    weights = tl.exp2(scores - (finite_top - EXPONENT)[:, None])
    return weights, keep, new_top, total * keep + tl.sum(weights, axis=1)


@triton.jit(do_not_specialize=["batch"])
def attention_kernel(
    q,
    q_0,
    q_1,
    q_2,
    q_3,
    q_stored,
    q_stored_0,
    q_stored_1,
    q_stored_2,
    q_stored_3,
    stored_bias,
    stored_bias_0,
    stored_bias_1,
    stored_bias_2,
    k_data,
    k_0,
    k_1,
    k_2,
    k_scales,
    k_scales_0,
    k_scales_1,
    v_data,
    v_0,
    v_1,
    v_2,
    v_scales,
    v_scales_0,
    v_scales_1,
    k_global,
    k_global_0,
    v_global,
    v_global_0,
    v_bias,
    v_bias_0,
    block_table,
    block_table_0,
    k_new,
    k_new_0,
    k_new_1,
    k_new_2,
    k_new_3,
    v_new,
    v_new_0,
    v_new_1,
    v_new_2,
    v_new_3,
    k_exact,
    k_exact_0,
    k_exact_1,
    k_exact_2,
    k_exact_3,
    v_exact,
    v_exact_0,
    v_exact_1,
    v_exact_2,
    v_exact_3,
    exact_from,
    mask,
    mask_0,
    mask_1,
    mask_2,
    mask_3,
    mask_columns,
    lengths,
    q_lengths,
    starts,
    sink_logits,
    out,
    lse,
    batch,
    num_queries,
    page_size,
    window,
    scale,
    softcap,
    split_tokens,
    K_SCALES_2: tl.constexpr,
    V_SCALES_2: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr,
    EXACT_TYPE: tl.constexpr,
    FOUR_TOKEN: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    RING: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PARTIAL: tl.constexpr,
    PDL: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    E4M3: tl.constexpr,
    FAST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """M query rows of one KV head against one split of the tokens, the first split with the sinks.

    Writes `out` and `lse`, or with PARTIAL the float32 parts `[num_splits, B, Hq, L, Dv]` and `[num_splits, B, Hq, L]`
    (log-sum-exp in base 2, sink not in) for `merge_kernel`; of a query that sees nothing of a split the second alone.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Triton passes Python's floats as float32, a program of Inductor as float64, in which all products would be.
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    row_tiles = tl.cdiv(num_queries * GROUP, M)
    first_row = tl.program_id(0) % row_tiles * M
    row_head = tl.program_id(0) // row_tiles
    split = row_head // (batch * HEADS)
    row_head -= split * (batch * HEADS)
    b = (row_head // HEADS).to(tl.int64)
    head = (row_head % HEADS).to(tl.int64)
    length = tl.load(lengths + b)
    num_new = num_queries
    if q_lengths is not None:
        num_new = tl.load(q_lengths + b)
    start = 0
    if starts is not None:
        start = tl.load(starts + b)
    first_query = length - num_new
    end = length
    if k_new is not None:
        end = first_query
    ring_from = end
    if RING > 0:
        ring_from = tl.minimum(ring_from, tl.load(exact_from + b))
    sink_end = tl.minimum(start + NUM_SINKS, end)
    stored_from = tl.maximum(sink_end, 0)
    if block_table is None:
        stored_from = tl.maximum(stored_from, end - page_size)

    row = first_row + tl.arange(0, M)
    i = row // GROUP
    query = first_query + i
    q_head = head * GROUP + row % GROUP
    real = i < tl.minimum(num_new, num_queries)
    low_query = first_query + first_row // GROUP
    high_query = tl.minimum(first_query + (first_row + M - 1) // GROUP, length - 1)

    # This split's part of all that follows the sinks: stored tokens up to stored_end, exact and new ones from there.
    low = tl.maximum(tl.minimum(stored_from, tl.maximum(ring_from, sink_end)), start)
    high = length
    sink_low = tl.maximum(start, 0)
    if WINDOW:
        low = tl.maximum(low, low_query - window + 1)
        sink_low = tl.maximum(sink_low, low_query - window + 1)
    if CAUSAL:
        high = tl.minimum(high, high_query + 1)
    if PARTIAL:
        first_split = low // split_tokens
        low = tl.maximum(low, (first_split + split) * split_tokens)
        high = tl.minimum(high, (first_split + split + 1) * split_tokens)
    stored_low = tl.maximum(low, stored_from)
    num_stored = tl.maximum(tl.minimum(high, ring_from) - stored_low, 0)

    k_data = _word_pointer(k_data, K_FORMAT)
    v_data = _word_pointer(v_data, V_FORMAT)
    i64 = i.to(tl.int64)
    stored_q, s_0, s_1, s_2, s_3 = q, q_0, q_1, q_2, q_3
    if q_stored is not None:
        stored_q, s_0, s_1, s_2, s_3 = q_stored, q_stored_0, q_stored_1, q_stored_2, q_stored_3
    q_rows = stored_q + b * s_0 + q_head * s_1 + i64 * s_2
    unit = tl.full([M], 1.0, tl.float32) * (scale * LOG2E)
    q_tile = _query(q_rows, real, s_3, D, BLOCK_D)
    SPLIT_QUERY: tl.constexpr = q_stored is not None and K_TYPE == "fp16" and K_FORMAT != "exact"
    if K_TYPE == "fp16" and K_FORMAT != "exact":
        exponent = tl.maximum((tl.max(tl.abs(q_tile), axis=1).to(tl.int32, bitcast=True) >> 23) & 0xFF, 30)
        unit *= ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        q_tile *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    q_high = _as(q_tile, K_TYPE)
    q_parts = _parts(q_high, K_FORMAT)
    if SPLIT_QUERY:
        q_low = _parts(_as(q_tile - q_high.to(tl.float32), K_TYPE), K_FORMAT)
    if K_FORMAT == "nvfp4" or K_FORMAT == "fp8":
        unit *= tl.load(k_global + head * k_global_0)
    if K_FORMAT == "nvfp4":
        unit *= CODE_SCALE
    shift = tl.zeros([M], tl.float32)
    if stored_bias is not None:
        at = b * stored_bias_0 + q_head * stored_bias_1 + i64 * stored_bias_2
        shift = tl.load(stored_bias + at, mask=real, other=0.0) * (scale * LOG2E)
    row_mask = None
    if MASK > 0:
        row_mask = (mask + b * mask_0 + q_head * mask_1 + i64 * mask_2, mask_3, mask_columns)

    # In float16 small weights would be subnormal numbers, or none.
    EXPONENT: tl.constexpr = 15 if V_TYPE == "fp16" else 0
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc_0 = tl.zeros([M, BLOCK_DV if V_FORMAT == "exact" else BLOCK_DV // 4], tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    end_tile = tl.where(num_stored > 0, tl.cdiv(stored_low + num_stored, N), 0)
    for tile in tl.range(stored_low // N, end_tile, num_stages=STAGES):
        position = tile * N + tl.arange(0, N)
        valid = (position - stored_low).to(tl.uint32) < num_stored.to(tl.uint32)
        if WHOLE:
            slot = tl.multiple_of(tile * N % page_size, N).to(tl.int64)
            page = b
            if block_table is not None:
                page = tl.load(block_table + b * block_table_0 + tile * N // page_size).to(tl.int64)
            token = tl.arange(0, N)
        else:
            # Positions past the row are not read.
            token = position % page_size
            slot = token.to(tl.int64)
            page = b + tl.zeros([N], tl.int64)
            if block_table is not None:
                entry = block_table + b * block_table_0 + position // page_size
                page = tl.load(entry, mask=valid, other=0).to(tl.int64)
        rows = _rows(k_data, page, slot, head, k_0, k_1, k_2, N, WHOLE)
        scale_rows = _rows(k_scales, page, slot, head, k_scales_0, k_scales_1, K_SCALES_2, N, WHOLE)
        k = _stored_tile(rows, scale_rows, K_SCALES_2, token, valid, D, BLOCK_D, K_FORMAT, False, K_TYPE, E4M3, FAST)
        scores = _product(q_parts, k, tl.zeros([M, N], tl.float32), PRECISION)
        if SPLIT_QUERY:
            scores = _product(q_low, k, scores, PRECISION)
        scores = scores * unit[:, None]
        if stored_bias is not None:
            scores += shift[:, None]
        seen = valid[None, :] & real[:, None]
        scores = _visible_scores(
            scores, position, seen, query, row_mask, softcap, window, CAUSAL, WINDOW, SOFTCAP, MASK
        )
        weights, keep, top, total = _softmax(scores, top, total, EXPONENT)
        rows = _rows(v_data, page, slot, head, v_0, v_1, v_2, N, WHOLE)
        scale_rows = _rows(v_scales, page, slot, head, v_scales_0, v_scales_1, V_SCALES_2, N, WHOLE)
        v = _stored_tile(
            rows, scale_rows, V_SCALES_2, token, valid, DV, BLOCK_DV, V_FORMAT, FOUR_TOKEN, V_TYPE, E4M3, FAST
        )
        acc_0 = _weighted(weights, v[0], acc_0 * keep[:, None], PRECISION)
        if V_FORMAT != "exact":
            acc_1 = _weighted(weights, v[1], acc_1 * keep[:, None], PRECISION)
            acc_2 = _weighted(weights, v[2], acc_2 * keep[:, None], PRECISION)
            acc_3 = _weighted(weights, v[3], acc_3 * keep[:, None], PRECISION)

    dv = tl.arange(0, BLOCK_DV)
    acc = acc_0
    if V_FORMAT != "exact":
        acc = tl.reshape(tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3)), [M, BLOCK_DV])
    v_unit = 1.0
    if V_FORMAT == "nvfp4" or V_FORMAT == "fp8":
        v_unit = tl.load(v_global + head * v_global_0)
    if V_FORMAT == "nvfp4":
        v_unit *= CODE_SCALE
    total *= 2.0**-EXPONENT
    acc *= v_unit * 2.0**-EXPONENT
    if v_bias is not None:
        acc += total[:, None] * tl.load(v_bias + head * v_bias_0 + dv, mask=dv < DV, other=0.0)[None, :]

    if k_exact is not None or k_new is not None:
        num_sink_tiles = 0
        if NUM_SINKS > 0 and split == 0:
            num_sink_tiles = tl.maximum(tl.cdiv(sink_end - sink_low, N), 0)
        low = tl.maximum(low, ring_from)
        num_tiles = num_sink_tiles + tl.maximum(tl.cdiv(high - low, N), 0)
        q_rows = q + b * q_0 + q_head * q_1 + i64 * q_2
        k_tensors = (k_exact, k_exact_0, k_exact_1, k_exact_2, k_exact_3, k_new, k_new_0, k_new_1, k_new_2, k_new_3)
        v_tensors = (v_exact, v_exact_0, v_exact_1, v_exact_2, v_exact_3, v_new, v_new_0, v_new_1, v_new_2, v_new_3)
        exact_q = (_as(_query(q_rows, real, q_3, D, BLOCK_D), EXACT_TYPE),)
        for tile in tl.range(0, num_tiles, num_stages=1):
            of_sinks = tile < num_sink_tiles
            base = tl.where(of_sinks, sink_low + tile * N, low + (tile - num_sink_tiles) * N)
            position = base + tl.arange(0, N)
            inside = position < tl.where(of_sinks, sink_end, high)
            is_sink = inside & (position < sink_end)
            is_new = inside & (position >= end)
            in_ring = inside & (position >= sink_end) & (position < end)
            slot = position - start
            if RING > 0:
                slot = tl.where(is_sink, slot, NUM_SINKS + tl.maximum(position, 0) % RING)
            in_exact = is_sink | in_ring
            k = _exact_tile(k_tensors, b, head, slot, position - end, in_exact, is_new, D, BLOCK_D, EXACT_TYPE)
            scores = _product(exact_q, (k,), tl.zeros([M, N], tl.float32), PRECISION) * (scale * LOG2E)
            seen = inside[None, :] & real[:, None]
            scores = _visible_scores(
                scores, position, seen, query, row_mask, softcap, window, CAUSAL, WINDOW, SOFTCAP, MASK
            )
            weights, keep, top, total = _softmax(scores, top, total, 0)
            v = _exact_tile(v_tensors, b, head, slot, position - end, in_exact, is_new, DV, BLOCK_DV, EXACT_TYPE)
            acc = _weighted(weights, v, acc * keep[:, None], PRECISION)

    if not PARTIAL and sink_logits is not None:
        sink = tl.load(sink_logits + q_head, mask=real, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        keep = tl.exp2(top - new_top)
        acc *= keep[:, None]
        total = total * keep + tl.exp2(sink - new_top)
        top = new_top
    seen = real & (total > 0.0)
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    log_sum = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    written = i < num_queries
    at = ((split * batch + b) * (HEADS * GROUP) + q_head) * num_queries + i64
    if PARTIAL:
        tl.store(lse + at, log_sum, mask=written)
        written = written & seen
    elif lse is not None:
        tl.store(lse + at, log_sum * LN2, mask=written)
    result = round_to(acc, out.dtype.element_ty, FAST)
    tl.store(out + at[:, None] * DV + dv[None, :], result, mask=written[:, None] & (dv < DV)[None, :])


@triton.jit
def merge_kernel(
    parts,
    part_sums,
    sink_logits,
    q_lengths,
    out,
    lse,
    num_splits,
    num_rows,
    num_heads,
    num_queries,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
    FAST: tl.constexpr,
):
    """BLOCK_DV elements of one query row: its splits, MERGE_SPLITS after MERGE_SPLITS, and its sink."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in range(0, num_splits, MERGE_SPLITS):
        split = first + tl.arange(0, MERGE_SPLITS)
        at = split * num_rows + row
        log_sum = tl.load(part_sums + at, mask=split < num_splits, other=float("-inf"))
        mask = (log_sum > float("-inf"))[:, None] & (dv < DV)[None, :]
        part = tl.load(parts + at[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp2(top - finite_top)
        weight = tl.exp2(log_sum - finite_top)
        acc = acc * keep + tl.sum(part * weight[:, None], 0)
        total = total * keep + tl.sum(weight, 0)
        top = new_top
    if sink_logits is not None:
        sink = tl.load(sink_logits + row // num_queries % num_heads).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        keep = tl.exp2(top - new_top)
        acc = acc * keep
        total = total * keep + tl.exp2(sink - new_top)
        top = new_top
    seen = total > 0.0
    if q_lengths is not None:
        seen = seen & (row % num_queries < tl.load(q_lengths + row // (num_queries * num_heads)))
    result = tl.where(seen, acc / tl.where(seen, total, 1.0), 0.0)
    tl.store(out + row * DV + dv, round_to(result, out.dtype.element_ty, FAST), mask=dv < DV)
    if lse is not None:
        # All programs of a row write the same number.
        tl.store(lse + row, tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf")))
