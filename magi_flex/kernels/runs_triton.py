"""Triton kernels: the key runs of row tiles from row intervals (of key tiles: key_runs_triton.py).

A program makes the runs of one tile: first the *spans*, exact ranges that some row of the tile touches or that all rows
attend to, then the runs that a kernel walks.  A tile has room for so many spans and no more, which bounds its runs;
what is over is covered by the last touched span, or stays partial, so a plan is right whatever the room is.

Every kernel runs twice over all tiles: to count the runs, and to write them where the counts' prefix sums say.

Shape legend: X batch and head together, N row tiles over all of X, R intervals of a row, Q query rows, A rows or keys
of a tile, E = R * A intervals of a tile, J part of E, S spans of a tile (one lane a span, more lanes than spans).
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(2147483647)  # past every position


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
def finish_tile(
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
    touched_begin_S = tl.full([LANES], NONE, tl.int32)
    touched_end_S = tl.zeros([LANES], tl.int32)
    full_begin_S = tl.full([LANES], NONE, tl.int32)
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
        touched_start_E = tl.where(used_E & (before_start_E == 0), start_E, NONE)
        touched_stop_E = tl.where(used_E & (at_end_E == 0), end_E, NONE)
        full_start_E = tl.where(used_E & (at_start_E == rows), start_E, NONE)
        full_stop_E = tl.where(used_E & (before_end_E == rows), end_E, NONE)

        begin = tl.min(touched_start_E, axis=0)
        while begin < NONE:
            end = tl.min(tl.where(touched_stop_E > begin, touched_stop_E, NONE), axis=0)
            touched += 1
            last = touched == TOUCHED  # takes all that is left
            end = tl.where(last, tl.max(tl.where(used_E, end_E, 0), axis=0), end)
            touched_begin_S = tl.where(lane_S == touched - 1, begin, touched_begin_S)
            touched_end_S = tl.where(lane_S == touched - 1, end, touched_end_S)
            begin = tl.min(tl.where((touched_start_E > end) & (touched < TOUCHED), touched_start_E, NONE), axis=0)
        begin = tl.min(full_start_E, axis=0)
        while begin < NONE:
            end = tl.min(tl.where(full_stop_E > begin, full_stop_E, NONE), axis=0)
            full_begin_S = tl.where(lane_S == full, begin, full_begin_S)
            full_end_S = tl.where(lane_S == full, end, full_end_S)
            full += 1
            begin = tl.min(tl.where((full_start_E > end) & (full < FULL), full_start_E, NONE), axis=0)
    finish_tile(
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
