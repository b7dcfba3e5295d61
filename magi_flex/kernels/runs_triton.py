"""Triton kernels: the key runs of row tiles (and the query runs of key tiles) from row intervals.

A program makes the runs of one tile: first the *spans*, exact ranges that some row of the tile touches or that all rows
attend to, then the runs that a kernel walks.  A tile has room for so many spans and no more, which bounds its runs;
what is over is covered by the last touched span, or stays partial, so a plan is right whatever the room is.

Every kernel runs twice over all tiles: to count the runs, and to write them where the counts' prefix sums say.

Shape legend: X batch and head together, N row tiles over all of X, R intervals of a row, Q query rows, A rows or keys
of a tile, E = R * A intervals of a tile, J part of E, S spans of a tile (one lane a span, more lanes than spans),
G rows of a block, V blocks of a part of the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)  # past every position


@triton.jit
def _cover(begin_J, end_J, point_E):
    """How many of the intervals hold each point."""
    holds_EJ = (begin_J[None, :] <= point_E[:, None]) & (point_E[:, None] < end_J[None, :])
    return tl.sum(holds_EJ.to(tl.int32), axis=1)


@triton.jit
def _pick(list_S, lane_S, index):
    return tl.sum(tl.where(lane_S == index, list_S, 0), axis=0)


@triton.jit
def _write_run(runs, at, begin, end):
    tl.store(runs + 2 * at, begin)
    tl.store(runs + 2 * at + 1, end)


@triton.jit
def _rounded(begin, end, length, step, align, GRID: tl.constexpr):
    """A touched span as a run: aligned, and on the fixed grid in whole tiles."""
    begin = begin // align * align
    if GRID:
        end = tl.minimum((end + step - 1) // step * step, length)
    return begin, end


@triton.jit
def _runs(
    touched_begin_S,
    touched_end_S,
    touched,
    full_begin_S,
    full_end_S,
    lane_S,
    length,
    step,
    align,
    partial_runs,
    full_runs,
    partial_at,
    full_at,
    GRID: tl.constexpr,
    WRITE: tl.constexpr,
):
    """The runs of a tile from its sorted spans; returns the positions in the run lists after the last one.

    Full runs are whole steps counted from their touched run's begin, or from one short step later where that costs no
    step and fits the longest full span.  At most one partial run more than full ones comes from a touched span.
    """
    t = partial_at * 0
    f = partial_at * 0
    while t < touched:
        begin, end = _rounded(
            _pick(touched_begin_S, lane_S, t), _pick(touched_end_S, lane_S, t), length, step, align, GRID
        )
        t += 1
        # Spans that meet become one run, and (free runs) those that one walk covers in fewer steps than two.
        joins = t < touched
        while joins:
            next_begin, next_end = _rounded(
                _pick(touched_begin_S, lane_S, t), _pick(touched_end_S, lane_S, t), length, step, align, GRID
            )
            joins = next_begin <= end
            if not GRID:
                apart = (end - begin + step - 1) // step + (next_end - next_begin + step - 1) // step
                joins = joins | ((next_end - begin + step - 1) // step < apart)
            end = tl.where(joins, tl.maximum(end, next_end), end)
            t += joins.to(tl.int32)
            joins = joins & (t < touched)
        origin = begin
        if not GRID:
            longest = partial_at * 0
            lead = partial_at * 0
            i = f
            span_begin = _pick(full_begin_S, lane_S, i)
            while span_begin < end:
                size = _pick(full_end_S, lane_S, i) - span_begin
                better = (size > longest) | ((size == longest) & (span_begin - begin > lead))
                lead = tl.where(better, span_begin - begin, lead)
                longest = tl.maximum(longest, size)
                i += 1
                span_begin = _pick(full_begin_S, lane_S, i)
            lead = lead % step
            least = end - begin - ((end - begin + step - 1) // step - 1) * step
            phase = (tl.maximum(lead, least) + align - 1) // align * align
            fits = (lead > 0) & (phase < step) & (phase <= lead + longest % step)
            origin += tl.where(fits, phase, 0)
        done = begin
        span_begin = _pick(full_begin_S, lane_S, f)
        while span_begin < end:
            span_end = _pick(full_end_S, lane_S, f)
            whole = tl.maximum(span_end - origin, 0) // step
            if GRID:
                whole = tl.where(span_end == length, (span_end - origin + step - 1) // step, whole)
            full_begin = origin + (span_begin - origin + step - 1) // step * step
            full_end = tl.minimum(origin + whole * step, length)
            if full_begin < full_end:
                if done < full_begin:
                    if WRITE:
                        _write_run(partial_runs, partial_at, done, full_begin)
                    partial_at += 1
                if WRITE:
                    _write_run(full_runs, full_at, full_begin, full_end)
                full_at += 1
                done = full_end
            f += 1
            span_begin = _pick(full_begin_S, lane_S, f)
        if done < end:
            if WRITE:
                _write_run(partial_runs, partial_at, done, end)
            partial_at += 1
    return partial_at, full_at


@triton.jit
def _finish(
    tile,
    touched_begin_S,
    touched_end_S,
    touched,
    full_begin_S,
    full_end_S,
    lane_S,
    length,
    step,
    align,
    totals,
    partial_ptr,
    full_ptr,
    partial_runs,
    full_runs,
    GRID: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Count the runs of a tile into ``totals`` (partial ones in the upper half of an int64); or, where that holds
    running totals, write the runs and the pointers."""
    if WRITE:
        before = tl.load(totals + tile - 1, mask=tile > 0, other=0)
        partial_at = (before >> 32).to(tl.int32)
        full_at = (before & 0xFFFFFFFF).to(tl.int32)
        if tile == 0:
            tl.store(partial_ptr, 0)
            tl.store(full_ptr, 0)
        partial_at, full_at = _runs(
            touched_begin_S,
            touched_end_S,
            touched,
            full_begin_S,
            full_end_S,
            lane_S,
            length,
            step,
            align,
            partial_runs,
            full_runs,
            partial_at,
            full_at,
            GRID,
            WRITE,
        )
        tl.store(partial_ptr + tile + 1, partial_at)
        tl.store(full_ptr + tile + 1, full_at)
    else:
        partial_count, full_count = _runs(
            touched_begin_S,
            touched_end_S,
            touched,
            full_begin_S,
            full_end_S,
            lane_S,
            length,
            step,
            align,
            partial_runs,
            full_runs,
            tile * 0,
            tile * 0,
            GRID,
            WRITE,
        )
        tl.store(totals + tile, (partial_count.to(tl.int64) << 32) + full_count.to(tl.int64))


@triton.jit
def row_tile_runs(
    starts,
    ends,
    tile_begin,
    tile_end,
    tile_head,
    totals,
    partial_ptr,
    full_ptr,
    partial_runs,
    full_runs,
    q_len,
    kv_len,
    SLOTS: tl.constexpr,
    step,
    align,
    PADDED_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    TOUCHED: tl.constexpr,
    FULL: tl.constexpr,
    GRID: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Key runs of the tile of rows [tile_begin, tile_end), a program a tile.

    A touched span begins at an interval's start before which no row's interval holds a key, and ends likewise; a full
    span begins at a start that the intervals of all rows hold.  So the ends of spans are found by comparing the tile's
    intervals with one another.
    """
    tile = tl.program_id(0)
    row_begin, row_end = tl.load(tile_begin + tile), tl.load(tile_end + tile)
    lane_S = tl.arange(0, LANES)
    touched_begin_S = tl.full([LANES], _NONE, tl.int32)
    touched_end_S = tl.zeros([LANES], tl.int32)
    full_begin_S = tl.full([LANES], _NONE, tl.int32)
    full_end_S = tl.zeros([LANES], tl.int32)
    touched = tile * 0
    full = tile * 0
    if row_begin < row_end:
        first = tl.load(tile_head + tile).to(tl.int64) * SLOTS * q_len
        entry_E = tl.arange(0, PADDED_SLOTS * ROWS)
        inside_E = (entry_E // ROWS < SLOTS) & (row_begin + entry_E % ROWS < row_end)
        at_E = first + (entry_E // ROWS).to(tl.int64) * q_len + row_begin + entry_E % ROWS
        start_E = tl.load(starts + at_E, mask=inside_E, other=0)
        end_E = tl.load(ends + at_E, mask=inside_E, other=0)
        used_E = start_E < end_E
        before_start_E = tl.zeros([PADDED_SLOTS * ROWS], tl.int32)
        at_start_E = tl.zeros([PADDED_SLOTS * ROWS], tl.int32)
        before_end_E = tl.zeros([PADDED_SLOTS * ROWS], tl.int32)
        at_end_E = tl.zeros([PADDED_SLOTS * ROWS], tl.int32)
        for part in range(0, PADDED_SLOTS * ROWS, AT_ONCE):
            entry_J = part + tl.arange(0, AT_ONCE)
            inside_J = (entry_J // ROWS < SLOTS) & (row_begin + entry_J % ROWS < row_end)
            at_J = first + (entry_J // ROWS).to(tl.int64) * q_len + row_begin + entry_J % ROWS
            start_J = tl.load(starts + at_J, mask=inside_J, other=0)
            end_J = tl.load(ends + at_J, mask=inside_J, other=0)
            before_start_E += _cover(start_J, end_J, start_E - 1)
            at_start_E += _cover(start_J, end_J, start_E)
            before_end_E += _cover(start_J, end_J, end_E - 1)
            at_end_E += _cover(start_J, end_J, end_E)
        rows = row_end - row_begin
        touched_start_E = tl.where(used_E & (before_start_E == 0), start_E, _NONE)
        touched_stop_E = tl.where(used_E & (at_end_E == 0), end_E, _NONE)
        full_start_E = tl.where(used_E & (at_start_E == rows), start_E, _NONE)
        full_stop_E = tl.where(used_E & (before_end_E == rows), end_E, _NONE)

        begin = tl.min(touched_start_E, axis=0)
        while begin < _NONE:
            end = tl.min(tl.where(touched_stop_E > begin, touched_stop_E, _NONE), axis=0)
            touched += 1
            last = touched == TOUCHED  # takes all that is left
            end = tl.where(last, tl.max(tl.where(used_E, end_E, 0), axis=0), end)
            touched_begin_S = tl.where(lane_S == touched - 1, begin, touched_begin_S)
            touched_end_S = tl.where(lane_S == touched - 1, end, touched_end_S)
            begin = tl.min(tl.where((touched_start_E > end) & (touched < TOUCHED), touched_start_E, _NONE), axis=0)
        begin = tl.min(full_start_E, axis=0)
        while begin < _NONE:
            end = tl.min(tl.where(full_stop_E > begin, full_stop_E, _NONE), axis=0)
            full_begin_S = tl.where(lane_S == full, begin, full_begin_S)
            full_end_S = tl.where(lane_S == full, end, full_end_S)
            full += 1
            begin = tl.min(tl.where((full_start_E > end) & (full < FULL), full_start_E, _NONE), axis=0)
    _finish(
        tile,
        touched_begin_S,
        touched_end_S,
        touched,
        full_begin_S,
        full_end_S,
        lane_S,
        kv_len,
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


# ---- key tiles ------------------------------------------------------------------------------------------------------


@triton.jit
def block_bounds(
    starts, ends, bounds, used_rows, q_len, slots_of_all, blocks, BLOCKS_AT_ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """Least and greatest start and end of each block of rows, int32 ``[4, X * R, blocks]``, and the first and last row
    that uses each slot, ``[X * R, 2]``."""
    slot = tl.program_id(1).to(tl.int64)
    block_V = tl.program_id(0) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    row_VG = block_V[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    row_VG = tl.minimum(row_VG, q_len - 1)  # a short block repeats its last row
    start_VG = tl.load(starts + slot * q_len + row_VG)
    end_VG = tl.load(ends + slot * q_len + row_VG)
    used_VG = start_VG < end_VG
    inside_V = block_V < blocks
    plane = (tl.program_id(1).to(tl.int64) * 0 + slots_of_all) * blocks
    out = bounds + slot * blocks + block_V
    tl.store(out, tl.min(tl.where(used_VG, start_VG, _NONE), axis=1), mask=inside_V)
    tl.store(out + plane, tl.max(tl.where(used_VG, start_VG, _NONE), axis=1), mask=inside_V)
    tl.store(out + 2 * plane, tl.min(tl.where(used_VG, end_VG, -1), axis=1), mask=inside_V)
    tl.store(out + 3 * plane, tl.max(tl.where(used_VG, end_VG, -1), axis=1), mask=inside_V)
    tl.atomic_min(used_rows + 2 * slot, tl.min(tl.min(tl.where(used_VG, row_VG, _NONE), axis=1), axis=0))
    tl.atomic_max(used_rows + 2 * slot + 1, tl.max(tl.max(tl.where(used_VG, row_VG, -1), axis=1), axis=0))


@triton.jit
def _advance(
    kind,
    new_kind,
    row,
    touched_begin_S,
    touched_end_S,
    touched,
    full_begin_S,
    full_end_S,
    full,
    lane_S,
    TOUCHED: tl.constexpr,
    FULL: tl.constexpr,
):
    """From ``row`` on rows are of ``new_kind`` (0: touches no key of the tile, 1: some, 2: all), before of ``kind``."""
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
    return touched_begin_S, touched_end_S, touched, full_begin_S, full_end_S, full


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
    touched_begin_S = tl.full([LANES], _NONE, tl.int32)
    touched_end_S = tl.zeros([LANES], tl.int32)
    full_begin_S = tl.full([LANES], _NONE, tl.int32)
    full_end_S = tl.zeros([LANES], tl.int32)
    touched = tile * 0
    full = tile * 0
    kind = tile * 0
    looks = tile * 0 + budget
    known = tile * 0  # rows before are done with
    rest_begin = tile * 0 + _NONE
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
            least_start_V = tl.load(at, mask=inside_V, other=_NONE)
            greatest_start_V = tl.load(at + plane, mask=inside_V, other=_NONE)
            least_end_V = tl.load(at + 2 * plane, mask=inside_V, other=-1)
            greatest_end_V = tl.load(at + 3 * plane, mask=inside_V, other=-1)
            some_V = some_V | ((least_start_V < key_end) & (greatest_end_V > key_begin))
            each_V = each_V | ((greatest_start_V < key_end) & (least_end_V > key_begin))
            some_full_V = some_full_V | ((least_start_V <= key_begin) & (greatest_end_V >= key_end))
            each_full_V = each_full_V | ((greatest_start_V <= key_begin) & (least_end_V >= key_end))
        kind_V = tl.where(each_full_V, 2, tl.where(some_V, tl.where(each_V & ~some_full_V, 1, 3), 0))  # 3: not known
        block = tl.min(tl.where(inside_V & (kind_V != kind) & (looks > 0), block_V, _NONE), axis=0)
        while block < _NONE:
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
                row = tl.min(tl.where(inside_G & (kind_G != kind), row_G, _NONE), axis=0)
                while row < _NONE:
                    row_kind = tl.sum(tl.where(row_G == row, kind_G, 0), axis=0)
                    touched_begin_S, touched_end_S, touched, full_begin_S, full_end_S, full = _advance(
                        kind,
                        row_kind,
                        row,
                        touched_begin_S,
                        touched_end_S,
                        touched,
                        full_begin_S,
                        full_end_S,
                        full,
                        lane_S,
                        TOUCHED,
                        FULL,
                    )
                    kind = row_kind
                    looks -= 1
                    row = tl.min(tl.where(inside_G & (kind_G != kind) & (row_G > row), row_G, _NONE), axis=0)
            else:
                touched_begin_S, touched_end_S, touched, full_begin_S, full_end_S, full = _advance(
                    kind,
                    new_kind,
                    block * BLOCK_ROWS,
                    touched_begin_S,
                    touched_end_S,
                    touched,
                    full_begin_S,
                    full_end_S,
                    full,
                    lane_S,
                    TOUCHED,
                    FULL,
                )
                kind = new_kind
            looks -= 1
            known = tl.minimum((block + 1) * BLOCK_ROWS, q_len)
            block = tl.min(
                tl.where(inside_V & (kind_V != kind) & (block_V > block) & (looks > 0), block_V, _NONE), axis=0
            )
        if looks > 0:
            known = tl.minimum((part + BLOCKS_AT_ONCE) * BLOCK_ROWS, q_len)
        else:
            rest_V = inside_V & (kind_V != 0) & (block_V * BLOCK_ROWS >= known)
            rest_begin = tl.minimum(rest_begin, tl.min(tl.where(rest_V, block_V * BLOCK_ROWS, _NONE), axis=0))
            rest_end = tl.maximum(rest_end, tl.max(tl.where(rest_V, (block_V + 1) * BLOCK_ROWS, 0), axis=0))
        part += BLOCKS_AT_ONCE
    # What is open ends with the rows that are known; the rest prolongs the last span, or is one of its own.
    touched_begin_S, touched_end_S, touched, full_begin_S, full_end_S, full = _advance(
        kind,
        0,
        known,
        touched_begin_S,
        touched_end_S,
        touched,
        full_begin_S,
        full_end_S,
        full,
        lane_S,
        TOUCHED,
        FULL,
    )
    if rest_end > 0:
        first = touched == 0
        touched_begin_S = tl.where((lane_S == 0) & first, rest_begin, touched_begin_S)
        touched = tl.maximum(touched, 1)
        touched_end_S = tl.where(lane_S == touched - 1, tl.minimum(rest_end, q_len), touched_end_S)
    _finish(
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
