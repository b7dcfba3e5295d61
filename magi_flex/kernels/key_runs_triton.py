"""Triton kernels: the query runs of key tiles from row intervals; spans and runs are those of runs_triton.py.

Shape legend: X batch and head together, N key tiles over all of X, R intervals of a row, S spans of a tile (one lane a
span, more lanes than spans), G rows of a block, V blocks of a part of the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from magi_flex.kernels.runs_triton import NONE, finish_tile


@triton.jit
def block_bounds(
    starts, ends, bounds, use, q_len, slots_of_all, blocks, BLOCKS_AT_ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """Least and greatest start and end of each block of rows, int32 ``[4, X * R, blocks]``, and of each slot,
    ``[X * R, 3]``, the first and last row that uses it and how often its start or end falls from a row to the next."""
    slot = tl.program_id(1).to(tl.int64)
    block_V = tl.program_id(0) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    row_VG = block_V[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    exists_VG = row_VG < q_len
    row_VG = tl.minimum(row_VG, q_len - 1)  # a short block repeats its last row
    start_VG = tl.load(starts + slot * q_len + row_VG)
    end_VG = tl.load(ends + slot * q_len + row_VG)
    used_VG = start_VG < end_VG
    before_VG = tl.maximum(row_VG - 1, 0)
    start_before_VG = tl.load(starts + slot * q_len + before_VG)
    end_before_VG = tl.load(ends + slot * q_len + before_VG)
    falls_VG = (start_VG < start_before_VG) | (end_VG < end_before_VG)
    falls_VG = falls_VG & exists_VG & used_VG & (start_before_VG < end_before_VG)
    inside_V = block_V < blocks
    plane = (tl.program_id(1).to(tl.int64) * 0 + slots_of_all) * blocks
    out = bounds + slot * blocks + block_V
    tl.store(out, tl.min(tl.where(used_VG, start_VG, NONE), axis=1), mask=inside_V)
    tl.store(out + plane, tl.max(tl.where(used_VG, start_VG, NONE), axis=1), mask=inside_V)
    tl.store(out + 2 * plane, tl.min(tl.where(used_VG, end_VG, -1), axis=1), mask=inside_V)
    tl.store(out + 3 * plane, tl.max(tl.where(used_VG, end_VG, -1), axis=1), mask=inside_V)
    of_slot = use + 3 * slot
    tl.atomic_min(of_slot, tl.min(tl.min(tl.where(used_VG, row_VG, NONE), axis=1), axis=0))
    tl.atomic_max(of_slot + 1, tl.max(tl.max(tl.where(used_VG, row_VG, -1), axis=1), axis=0))
    tl.atomic_add(of_slot + 2, tl.sum(tl.sum(falls_VG.to(tl.int32), axis=1), axis=0))


@triton.jit
def _advance(spans, kind, new_kind, row, lane_S, TOUCHED: tl.constexpr, FULL: tl.constexpr):
    """From ``row`` on rows are of ``new_kind`` (0: touches no key of the tile, 1: some, 2: all), before of ``kind``.

    ``spans``: begins and ends of the touched spans and of the full ones, and how many there are of each.
    """
    touched_begin_S, touched_end_S, full_begin_S, full_end_S, touched, full = spans
    opens = (kind == 0) & (new_kind > 0)
    closes = (kind > 0) & (new_kind == 0)
    touched_begin_S = tl.where((lane_S == touched) & opens & (touched < TOUCHED), row, touched_begin_S)
    touched = tl.where(opens, tl.minimum(touched, TOUCHED - 1), touched)  # what is over prolongs the last span
    touched_end_S = tl.where((lane_S == touched) & closes, row, touched_end_S)
    touched += closes.to(tl.int32)
    full_opens = (kind != 2) & (new_kind == 2)
    full_closes = (kind == 2) & (new_kind != 2)
    full_begin_S = tl.where((lane_S == full) & full_opens & (full < FULL), row, full_begin_S)
    full_end_S = tl.where((lane_S == full) & full_closes & (full < FULL), row, full_end_S)
    full = tl.minimum(full + full_closes.to(tl.int32), FULL)
    return touched_begin_S, touched_end_S, full_begin_S, full_end_S, touched, full


@triton.jit
def key_tile_runs(
    starts,
    ends,
    bounds,
    tile_begin,
    tile_end,
    tile_head,
    totals,
    partial_ptr,
    full_ptr,
    partial_runs,
    full_runs,
    q_len,
    blocks,
    SLOTS: tl.constexpr,
    slots_of_all,
    step,
    align,
    budget,
    BLOCKS_AT_ONCE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LANES: tl.constexpr,
    TOUCHED: tl.constexpr,
    FULL: tl.constexpr,
    GRID: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Query runs of the tile of keys [tile_begin, tile_end), a program a tile.

    Rows are passed over block by block.  Bounds of a block's starts and ends mostly tell what all of its rows are;
    where they do not, its rows are looked at.  After ``budget`` looks and changes the rest of the rows is one touched
    span, as far as the bounds do not exclude it.
    """
    tile = tl.program_id(0)
    key_begin, key_end = tl.load(tile_begin + tile), tl.load(tile_end + tile)
    head = tl.load(tile_head + tile).to(tl.int64)
    plane = (head * 0 + slots_of_all) * blocks
    lane_S = tl.arange(0, LANES)
    begin_S = tl.full([LANES], NONE, tl.int32)
    end_S = tl.zeros([LANES], tl.int32)
    spans = (begin_S, end_S, begin_S, end_S, tile * 0, tile * 0)
    kind = tile * 0
    looks = tile * 0 + budget
    known = tile * 0  # rows before are done with
    rest_begin = tile * 0 + NONE
    rest_end = tile * 0
    part = tl.where(key_begin < key_end, 0, blocks)
    while part < blocks:
        block_V = part + tl.arange(0, BLOCKS_AT_ONCE)
        inside_V = block_V < blocks
        some_V = block_V < 0
        each_V = block_V < 0
        some_full_V = block_V < 0
        each_full_V = block_V < 0
        for r in range(SLOTS):
            at = bounds + (head * SLOTS + r) * blocks + block_V
            least_start_V = tl.load(at, mask=inside_V, other=NONE)
            greatest_start_V = tl.load(at + plane, mask=inside_V, other=NONE)
            least_end_V = tl.load(at + 2 * plane, mask=inside_V, other=-1)
            greatest_end_V = tl.load(at + 3 * plane, mask=inside_V, other=-1)
            some_V = some_V | ((least_start_V < key_end) & (greatest_end_V > key_begin))
            each_V = each_V | ((greatest_start_V < key_end) & (least_end_V > key_begin))
            some_full_V = some_full_V | ((least_start_V <= key_begin) & (greatest_end_V >= key_end))
            each_full_V = each_full_V | ((greatest_start_V <= key_begin) & (least_end_V >= key_end))
        kind_V = tl.where(each_full_V, 2, tl.where(some_V, tl.where(each_V & ~some_full_V, 1, 3), 0))  # 3: not known
        block = tl.min(tl.where(inside_V & (kind_V != kind) & (looks > 0), block_V, NONE), axis=0)
        while block < NONE:
            new_kind = tl.sum(tl.where(block_V == block, kind_V, 0), axis=0)
            if new_kind == 3:
                row_G = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
                inside_G = row_G < q_len
                some_G = row_G < 0
                each_G = row_G < 0
                for r in range(SLOTS):
                    at = (head * SLOTS + r) * q_len + row_G
                    start_G = tl.load(starts + at, mask=inside_G, other=0)
                    end_G = tl.load(ends + at, mask=inside_G, other=0)
                    some_G = some_G | ((start_G < end_G) & (start_G < key_end) & (end_G > key_begin))
                    each_G = each_G | ((start_G <= key_begin) & (end_G >= key_end))
                kind_G = tl.where(each_G, 2, tl.where(some_G, 1, 0))
                row = tl.min(tl.where(inside_G & (kind_G != kind), row_G, NONE), axis=0)
                while row < NONE:
                    row_kind = tl.sum(tl.where(row_G == row, kind_G, 0), axis=0)
                    spans = _advance(spans, kind, row_kind, row, lane_S, TOUCHED, FULL)
                    kind = row_kind
                    looks -= 1
                    row = tl.min(tl.where(inside_G & (kind_G != kind) & (row_G > row), row_G, NONE), axis=0)
            else:
                spans = _advance(spans, kind, new_kind, block * BLOCK_ROWS, lane_S, TOUCHED, FULL)
                kind = new_kind
            looks -= 1
            known = tl.minimum((block + 1) * BLOCK_ROWS, q_len)
            block = tl.min(
                tl.where(inside_V & (kind_V != kind) & (block_V > block) & (looks > 0), block_V, NONE), axis=0
            )
        if looks > 0:
            known = tl.minimum((part + BLOCKS_AT_ONCE) * BLOCK_ROWS, q_len)
        else:
            rest_V = inside_V & (kind_V != 0) & (block_V * BLOCK_ROWS >= known)
            rest_begin = tl.minimum(rest_begin, tl.min(tl.where(rest_V, block_V * BLOCK_ROWS, NONE), axis=0))
            rest_end = tl.maximum(rest_end, tl.max(tl.where(rest_V, (block_V + 1) * BLOCK_ROWS, 0), axis=0))
        part += BLOCKS_AT_ONCE
    # What is open ends with the rows that are known; the rest prolongs the last span, or is one of its own.
    spans = _advance(spans, kind, 0, known, lane_S, TOUCHED, FULL)
    touched_begin_S, touched_end_S, full_begin_S, full_end_S, touched, full = spans
    if rest_end > 0:
        first = touched == 0
        touched_begin_S = tl.where((lane_S == 0) & first, rest_begin, touched_begin_S)
        touched = tl.maximum(touched, 1)
        touched_end_S = tl.where(lane_S == touched - 1, tl.minimum(rest_end, q_len), touched_end_S)
    finish_tile(
        tile,
        touched_begin_S,
        touched_end_S,
        touched,
        full_begin_S,
        full_end_S,
        lane_S,
        q_len,
        step,
        align,
        totals,
        partial_ptr,
        full_ptr,
        partial_runs,
        full_runs,
        GRID,
        WRITE,
    )
