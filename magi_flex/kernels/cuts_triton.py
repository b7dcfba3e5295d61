"""Triton kernels: where ragged row tiles begin, as :func:`magi_flex.tile_cuts.ragged_row_tiles` chooses it.

The steps are those of that function; its cost model and terms (breaks, stretches) are described there.  The shortest
path is cut at rows that every path visits (where a head or a document of more than two tiles begins) and at every
``PATH``-th break, so that its parts are found side by side.

Shape legend: X batch and head together, Q rows of a head, R intervals of a row, D breaks over all of X, N row tiles,
W rows (or lanes), A rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)
_NO_WAY = tl.constexpr(1 << 60)
_ORDERLY_ROWS = tl.constexpr(64)


@triton.jit
def _find(totals, size, ordinal_W, BITS: tl.constexpr):
    """First index whose running total is more than ``ordinal``; ``totals`` ascend, ``BITS``: of ``size``."""
    low_W = ordinal_W * 0
    high_W = low_W + size
    for _ in range(BITS):
        middle_W = (low_W + high_W) // 2
        searching_W = low_W < high_W
        after_W = searching_W & (tl.load(totals + tl.minimum(middle_W, size - 1)) <= ordinal_W)
        low_W = tl.where(after_W, middle_W + 1, low_W)
        high_W = tl.where(searching_W & (after_W == 0), middle_W, high_W)
    return low_W


@triton.jit
def _moves(starts, ends, at_W, row_W, has_before_W):
    """How far the start and the end of a slot's interval have moved since the row before, and both rows' sizes."""
    start_W = tl.load(starts + at_W, mask=has_before_W, other=0)
    end_W = tl.load(ends + at_W, mask=has_before_W, other=0)
    start_before_W = tl.load(starts + at_W - 1, mask=has_before_W, other=0)
    end_before_W = tl.load(ends + at_W - 1, mask=has_before_W, other=0)
    sizes_W = tl.maximum(end_W - start_W, 0).to(tl.int64) + tl.maximum(end_before_W - start_before_W, 0)
    return tl.abs(start_W - start_before_W), tl.abs(end_W - end_before_W), sizes_W


@triton.jit
def weigh_breaks(
    starts,
    ends,
    best,
    q_len,
    SLOTS: tl.constexpr,
    stretch,
    buckets,
    ahead,
    least,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The heaviest break of every ``stretch`` rows: its weight (upper half) and row, 0 where there is none.

    A program weighs ROWS rows and looks ``ahead`` <= WINDOW - ROWS rows ahead.
    """
    head = tl.program_id(1).to(tl.int64)
    first = head * SLOTS * q_len
    row_A = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_W = tl.program_id(0) * ROWS + tl.arange(0, WINDOW)
    has_before_A = (row_A > 0) & (row_A < q_len)
    has_before_W = (row_W > 0) & (row_W < q_len)
    jumps_A = row_A < 0
    jumps_W = row_W < 0
    weight_A = tl.zeros([ROWS], tl.int64)
    for r in range(SLOTS):
        begin_moved_W, end_moved_W, _ = _moves(starts, ends, first + r * q_len + row_W, row_W, has_before_W)
        jumps_W = jumps_W | (begin_moved_W > 1) | (end_moved_W > 1)
        begin_moved_A, end_moved_A, sizes_A = _moves(starts, ends, first + r * q_len + row_A, row_A, has_before_A)
        jumps_A = jumps_A | (begin_moved_A > 1) | (end_moved_A > 1)
        weight_A += tl.minimum(begin_moved_A.to(tl.int64) + end_moved_A, sizes_A)
    follows_AW = jumps_W[None, :] & (row_W[None, :] > row_A[:, None])
    next_A = tl.min(tl.where(follows_AW, row_W[None, :], q_len), axis=1)
    weight_A = tl.minimum(weight_A + tl.minimum(next_A - row_A, ahead), _NONE)
    key_A = (weight_A << 32) + (-row_A + _NONE).to(tl.int64)  # of equal ones the first
    tl.atomic_max(best + head * buckets + row_A // stretch, key_A, mask=jumps_A & has_before_A & (weight_A >= least))


@triton.jit
def list_breaks(best, ranks, breaks, total, buckets, q_len, LANES: tl.constexpr):
    """Rows of all breaks in order, counted over all heads; every head begins with one."""
    at_W = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside_W = at_W < total
    head_W = at_W // (buckets + 1)
    bucket_W = at_W % (buckets + 1) - 1
    key_W = tl.load(best + head_W * buckets + bucket_W, mask=inside_W & (bucket_W >= 0), other=1)
    row_W = tl.where(bucket_W < 0, 0, -(key_W & 0x7FFFFFFF).to(tl.int32) + _NONE)
    rank_W = tl.load(ranks + at_W, mask=inside_W, other=1)
    tl.store(breaks + rank_W - 1, head_W * q_len + row_W, mask=inside_W & (key_W > 0))


@triton.jit
def _tile_cost(
    starts,
    ends,
    begin,
    end,
    q_len,
    SLOTS: tl.constexpr,
    step,
    OVERHEAD: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Cost of one row tile of the rows [begin, end), counted over all heads, in quarters of a key step."""
    head = begin // q_len
    offset_A = tl.arange(0, ROWS)
    row_A = tl.minimum(begin + offset_A, tl.maximum(end, begin + 1) - 1) - head * q_len
    cost = tl.full([], OVERHEAD, tl.int64)
    for r in range(SLOTS):
        at_A = (head.to(tl.int64) * SLOTS + r) * q_len + row_A
        least = tl.min(tl.load(starts + at_A), axis=0)
        greatest = tl.max(tl.load(ends + at_A), axis=0)
        hull = tl.maximum(greatest - least, 0)
        cost += 4 * ((hull + step - 1) // step).to(tl.int64) + tl.where(hull % step > 0, SHORT, 0)
    return cost


@triton.jit
def whole_tile_costs(
    starts,
    ends,
    breaks,
    whole_totals,
    from_front,
    from_end,
    most_breaks,
    q_len,
    SLOTS: tl.constexpr,
    height,
    step,
    BITS: tl.constexpr,
    OVERHEAD: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum, for each break, what the whole tiles up to the next one cost, counted from the front and from the end."""
    ordinal = tl.program_id(0)
    if ordinal < tl.load(whole_totals + most_breaks - 1):
        i = _find(whole_totals, most_breaks, ordinal, BITS)
        begin, end = tl.load(breaks + i), tl.load(breaks + i + 1)
        nth = ordinal - tl.load(whole_totals + i) + (end - begin) // height
        first = begin + nth * height
        cost = _tile_cost(starts, ends, first, first + height, q_len, SLOTS, step, OVERHEAD, SHORT, ROWS)
        tl.atomic_add(from_front + i, cost)
        first = end - (nth + 1) * height
        cost = _tile_cost(starts, ends, first, first + height, q_len, SLOTS, step, OVERHEAD, SHORT, ROWS)
        tl.atomic_add(from_end + i, cost)


@triton.jit
def stretch_costs(
    starts,
    ends,
    breaks,
    from_front,
    from_end,
    costs,
    counts_from_end,
    most_breaks,
    total_rows,
    q_len,
    SLOTS: tl.constexpr,
    height,
    step,
    REACH: tl.constexpr,
    OVERHEAD: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Cost of the stretches from a break to each of the next REACH ones, and whether the first counts from its end."""
    i = tl.program_id(0)
    begin = tl.load(breaks + i)
    if begin < total_rows:
        follows = tl.load(breaks + i + 1)
        furthest = tl.minimum(follows + 2 * height, (begin // q_len + 1) * q_len)
        tail = begin + (follows - begin) // height * height
        front = tl.load(from_front + i)
        before = begin
        for e in range(REACH):
            end = tl.load(breaks + tl.minimum(i + 1 + e, most_breaks))
            cost = tl.full([], _NO_WAY, tl.int64)
            if (end <= furthest) & (end > before):
                cost = front
                at = tail
                while at < end:
                    cost += _tile_cost(
                        starts,
                        ends,
                        at,
                        tl.minimum(at + height, end),
                        q_len,
                        SLOTS,
                        step,
                        OVERHEAD,
                        SHORT,
                        ROWS,
                    )
                    at += height
                if e == 0:
                    other = tl.load(from_end + i)
                    if tail < end:
                        other += _tile_cost(
                            starts,
                            ends,
                            begin,
                            begin + (end - tail),
                            q_len,
                            SLOTS,
                            step,
                            OVERHEAD,
                            SHORT,
                            ROWS,
                        )
                    tl.store(counts_from_end + i, (other < cost).to(tl.int32))
                    cost = tl.minimum(cost, other)
            tl.store(costs + i.to(tl.int64) * REACH + e, cost)
            before = end


@triton.jit
def _is_visited(breaks, i, q_len, height, PATH: tl.constexpr):
    """Whether every path goes through break ``i``: a stretch over it reaches at least the next one, if that is near."""
    row = tl.load(breaks + i)
    return (row % q_len == 0) | (tl.load(breaks + i + 1) - row > 2 * height) | (i % PATH == 0)


@triton.jit
def shortest_paths(
    breaks,
    costs,
    came_from,
    total_rows,
    q_len,
    height,
    REACH: tl.constexpr,
    LANES: tl.constexpr,
    PATH: tl.constexpr,
):
    """For each break the one before it on the cheapest path, a program each part between breaks that all paths visit.

    The last LANES breaks' distances are kept in a ring.
    """
    first = tl.program_id(0)
    searching = tl.load(breaks + first) < total_rows
    searching = searching & _is_visited(breaks, first, q_len, height, PATH)
    lane_W = tl.arange(0, LANES)
    best_W = tl.where(lane_W == first % LANES, tl.zeros([LANES], tl.int64), tl.full([LANES], _NO_WAY, tl.int64))
    j = first + 1
    while searching:
        behind_W = (j - 1 - lane_W) & (LANES - 1)
        i_W = j - 1 - behind_W
        known_W = (behind_W < REACH) & (i_W >= first)
        cost_W = tl.load(costs + i_W.to(tl.int64) * REACH + behind_W, mask=known_W, other=_NO_WAY)
        reached_W = best_W + cost_W
        least = tl.min(reached_W, axis=0)
        origin = tl.min(tl.where(reached_W == least, i_W, _NONE), axis=0)
        tl.store(came_from + j, origin)
        best_W = tl.where(lane_W == j % LANES, least, best_W)
        searching = (tl.load(breaks + j) < total_rows) & (_is_visited(breaks, j, q_len, height, PATH) == 0)
        j += 1


@triton.jit
def choose_stretches(
    breaks,
    came_from,
    counts_from_end,
    tiles,
    stretch_end,
    is_from_end,
    total_rows,
    q_len,
    height,
    PATH: tl.constexpr,
):
    """Walk the paths back: for each chosen break how many tiles its stretch has, its end, and how it is counted."""
    j = tl.program_id(0) + 1
    walking = tl.load(breaks + j - 1) < total_rows
    walking = walking & ((tl.load(breaks + j) == total_rows) | _is_visited(breaks, j, q_len, height, PATH))
    while walking:
        i = tl.load(came_from + j)
        begin, end = tl.load(breaks + i), tl.load(breaks + j)
        tl.store(tiles + i, (end - begin + height - 1) // height)
        tl.store(stretch_end + i, end)
        tl.store(is_from_end + i, tl.where(j == i + 1, tl.load(counts_from_end + i), 0))
        j = i
        walking = _is_visited(breaks, j, q_len, height, PATH) == 0


@triton.jit
def write_tiles(
    breaks,
    tiles,
    tile_totals,
    stretch_end,
    is_from_end,
    tile_begin,
    tile_end,
    tile_head,
    most_breaks,
    most_tiles,
    q_len,
    height,
    align,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Rows and head of every tile; those past the last are empty."""
    ordinal_W = tl.program_id(0) * LANES + tl.arange(0, LANES)
    used_W = ordinal_W < tl.load(tile_totals + most_breaks - 1)
    i_W = tl.minimum(_find(tile_totals, most_breaks, ordinal_W, BITS), most_breaks - 1)
    count_W = tl.load(tiles + i_W)
    nth_W = ordinal_W - tl.load(tile_totals + i_W) + count_W
    first_W, stop_W = tl.load(breaks + i_W), tl.load(stretch_end + i_W)
    head_W = first_W // q_len
    row_W = first_W - head_W * q_len
    from_end_W = tl.load(is_from_end + i_W) > 0
    shift_W = tl.where(from_end_W, stop_W - first_W - count_W * height, 0)
    missing_W = -(row_W + shift_W) % align
    missing_W = (missing_W + align) % align
    shift_W += tl.where(from_end_W & (shift_W + missing_W <= 0), missing_W, 0)
    begin_W = row_W + tl.maximum(nth_W * height + shift_W, 0)
    end_W = row_W + tl.maximum((nth_W + 1) * height + shift_W, 0)
    end_W = tl.where(nth_W == count_W - 1, stop_W - head_W * q_len, end_W)
    inside_W = ordinal_W < most_tiles
    tl.store(tile_begin + ordinal_W, tl.where(used_W, begin_W, 0), mask=inside_W)
    tl.store(tile_end + ordinal_W, tl.where(used_W, end_W, 0), mask=inside_W)
    tl.store(tile_head + ordinal_W, tl.where(used_W, head_W, 0), mask=inside_W)


@triton.jit
def column_bounds(
    starts, ends, use, column_starts, column_ends, q_len, kv_len, BITS: tl.constexpr, LANES: tl.constexpr
):
    """The rows of each interval slot that hold a key, for slots whose starts and ends ascend.

    Where they fall a few times, a guess; where more often (once in ``_ORDERLY_ROWS`` rows), all rows of the slot, so
    that it is no reason to cut anywhere.
    """
    slot = tl.program_id(1).to(tl.int64)
    key_W = tl.program_id(0) * LANES + tl.arange(0, LANES)
    first, last, falls = tl.load(use + 3 * slot), tl.load(use + 3 * slot + 1), tl.load(use + 3 * slot + 2)
    size = tl.maximum(last + 1 - first, 1)
    orderly = (falls - 1) * _ORDERLY_ROWS <= size
    used = first <= last
    first = tl.minimum(first, q_len - 1)
    begin_W = first + _find(ends + slot * q_len + first, size, key_W, BITS)
    end_W = first + _find(starts + slot * q_len + first, size, key_W, BITS)
    begin_W = tl.where(orderly, begin_W, first)
    end_W = tl.where(orderly, end_W, first + size)
    used_W = (begin_W < end_W) & used
    tl.store(column_starts + slot * kv_len + key_W, tl.where(used_W, begin_W, q_len), mask=key_W < kv_len)
    tl.store(column_ends + slot * kv_len + key_W, tl.where(used_W, end_W, 0), mask=key_W < kv_len)
