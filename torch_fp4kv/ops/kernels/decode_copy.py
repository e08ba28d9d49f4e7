"""How the decode kernel starts the copies of a tile, and where its tokens lie. Letters are those of `decode.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def next_lap(wrapped, position, T):
    """Tokens in the laps that a ring of T slots has completed before `position`, from those at an earlier one."""
    if position - wrapped >= T:
        wrapped = position // T * T
    return wrapped


@gluon.jit
def token_slots(token, position, wrapped, first, last, row_pages, stride, T, LOG_T, PAGING: gl.constexpr):
    """Page offset and slot of tokens `position + token`, clamped to first … last: pages of others may not exist."""
    if PAGING == 1 or PAGING == 2:
        token = gl.maximum(gl.minimum(position + token, last), first)
        page_offset = gl.load(row_pages + (token >> LOG_T)).to(gl.int64) * stride
        slot = token & (T - 1)
    else:
        slot = position - wrapped + token
        slot = gl.where(slot >= T, slot - T, slot)
        page_offset = (slot * 0).to(gl.int64)
    return page_offset, slot


@gluon.jit
def copy_tile(
    words_smem,
    scales_smem,
    words,
    scales,
    stride_words,
    stride_scales,
    position,
    wrapped,
    page,
    first,
    last,
    row_pages,
    T,
    LOG_T,
    N: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    TOKENS_A_ROW: gl.constexpr,
    PAGING: gl.constexpr,
):
    """Starts the copy of a tile's words to `[N / TOKENS_A_ROW, TOKENS_A_ROW · DP/8]` and of its scales to `[N · D/64]`.

    `words` and `scales` (int32) point at the head, without a table in the row's page. PAGING 0: slots follow one
    another; 1: the whole tile lies in `page`; 2: every 16 tokens may lie in another page; 3: slots wrap at T. With a
    padded head size scales stay behind (see `direct_scales`).
    """
    W: gl.constexpr = D // 8
    WP: gl.constexpr = DP // 8
    COLUMNS: gl.constexpr = TOKENS_A_ROW * WP
    ROWS: gl.constexpr = 128 // COLUMNS
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [ROWS, COLUMNS // 4], [1, 1], [1, 0])
    row = gl.arange(0, N // TOKENS_A_ROW, layout=gl.SliceLayout(1, WORDS))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WORDS))[None, :]
    if D == DP:
        S4: gl.constexpr = D // 64
        SCALES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
        unit = gl.arange(0, N * S4, layout=SCALES)
    if D == DP and (PAGING == 0 or PAGING == 1):
        if PAGING == 1:
            words += page.to(gl.int64) * stride_words
            scales += page.to(gl.int64) * stride_scales
            slot = gl.multiple_of(position & (T - 1), 16)
        else:
            slot = gl.multiple_of(position - wrapped, 16)
        # A lane's own part, then the part that all lanes share and that becomes an immediate of each copy.
        pointers = words + slot * W + ((row & (ROWS - 1)) * COLUMNS + column)
        pointers += (row & -ROWS) * COLUMNS
        async_copy.async_copy_global_to_shared(words_smem, pointers)
        async_copy.async_copy_global_to_shared(scales_smem, scales + slot * S4 + unit)
    else:
        token = row * TOKENS_A_ROW + column // WP
        page_offset, slot = token_slots(
            token, position, wrapped, first, last, row_pages, stride_words, T, LOG_T, PAGING
        )
        pointers = words + page_offset + slot * W + column % WP
        if D == DP:
            async_copy.async_copy_global_to_shared(words_smem, pointers)
            page_offset, slot = token_slots(
                unit // S4, position, wrapped, first, last, row_pages, stride_scales, T, LOG_T, PAGING
            )
            async_copy.async_copy_global_to_shared(scales_smem, scales + page_offset + slot * S4 + unit % S4)
        else:
            async_copy.async_copy_global_to_shared(words_smem, pointers, mask=column % WP + row * 0 < W)


@gluon.jit
def direct_scales(
    scales,
    stride,
    position,
    wrapped,
    first,
    last,
    row_pages,
    T,
    LOG_T,
    N: gl.constexpr,
    D: gl.constexpr,
    OPERANDS: gl.constexpr,
    BYTES: gl.constexpr,
    LAYOUT: gl.constexpr,
    PAGING: gl.constexpr,
):
    """int16 scale operands `[N, OPERANDS]` of BYTES bytes, 0 in the padding, read from `scales` (uint8) in place."""
    token = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT)), 1)
    index = gl.expand_dims(gl.arange(0, OPERANDS, layout=gl.SliceLayout(0, LAYOUT)), 0) * BYTES
    page_offset, slot = token_slots(token, position, wrapped, first, last, row_pages, stride, T, LOG_T, PAGING)
    pointers = scales + page_offset + slot * (D // 16) + index
    result = gl.load(pointers, mask=index + token * 0 < D // 16, other=0).to(gl.int16)
    if BYTES == 2:
        second = gl.load(pointers + 1, mask=index + 1 + token * 0 < D // 16, other=0).to(gl.int16)
        result = result | (second << 8)
    return result
