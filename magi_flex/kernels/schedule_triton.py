"""Triton kernels: row tiles in working order, as :func:`magi_flex.kernels.ffa_schedule.make_schedule` has them.

Shape legend: N row tiles over all masks, P partial runs, W row tiles of a program (one a lane).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh_tiles(
    head_ptr,
    partial_ptr,
    full_ptr,
    partial_runs,
    full_runs,
    owners,
    whole_steps,
    short_runs,
    sort_keys,
    masks,
    tiles,
    kv_tile,
    narrow_tile,
    BITS: tl.constexpr,
    MOST_PARTIAL: tl.constexpr,
    MOST_FULL: tl.constexpr,
    LANES: tl.constexpr,
):
    """Of each tile: its mask, whole steps, the run that leaves a short step over (-1: none), and what it is sorted by.

    ``MOST_PARTIAL``, ``MOST_FULL``: runs of a tile at most; ``BITS``: of the number of masks.
    """
    tile_W = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside_W = tile_W < tiles
    # The last mask that begins at or before the tile; unused capacity counts as the last one's.
    low_W = tile_W * 0
    high_W = low_W + masks
    for _ in range(BITS):
        middle_W = (low_W + high_W) // 2
        searching_W = low_W < high_W
        before_W = searching_W & (tl.load(head_ptr + tl.minimum(middle_W, masks - 1)) <= tile_W)
        low_W = tl.where(before_W, middle_W + 1, low_W)
        high_W = tl.where(searching_W & (before_W == 0), middle_W, high_W)
    owner_W = low_W - 1
    steps_W = tile_W * 0
    short_W = tile_W * 0 - 1
    first_W = tl.load(partial_ptr + tile_W, mask=inside_W, other=0)
    end_W = tl.load(partial_ptr + tile_W + 1, mask=inside_W, other=0)
    for i in range(MOST_PARTIAL):
        at_W = first_W + i
        known_W = at_W < end_W
        size_W = tl.load(partial_runs + 2 * at_W + 1, mask=known_W, other=0)
        size_W -= tl.load(partial_runs + 2 * at_W, mask=known_W, other=0)
        left_over_W = size_W % kv_tile
        is_short_W = (short_W < 0) & (left_over_W > 0) & (left_over_W <= narrow_tile)
        short_W = tl.where(is_short_W, at_W, short_W)
        steps_W += (tl.where(is_short_W, size_W - left_over_W, size_W) + kv_tile - 1) // kv_tile
    first_W = tl.load(full_ptr + tile_W, mask=inside_W, other=0)
    end_W = tl.load(full_ptr + tile_W + 1, mask=inside_W, other=0)
    for i in range(MOST_FULL):
        at_W = first_W + i
        known_W = at_W < end_W
        size_W = tl.load(full_runs + 2 * at_W + 1, mask=known_W, other=0)
        size_W -= tl.load(full_runs + 2 * at_W, mask=known_W, other=0)
        steps_W += (size_W + kv_tile - 1) // kv_tile
    tl.store(owners + tile_W, owner_W, mask=inside_W)
    tl.store(whole_steps + tile_W, steps_W, mask=inside_W)
    tl.store(short_runs + tile_W, short_W, mask=inside_W)
    cost_W = 2 * steps_W + (short_W >= 0).to(tl.int32)
    tl.store(sort_keys + tile_W, (owner_W.to(tl.int64) << 32) - cost_W, mask=inside_W)


@triton.jit
def write_schedule(
    order,
    tile_begin,
    tile_end,
    owners,
    whole_steps,
    short_runs,
    partial_ptr,
    full_ptr,
    partial_runs,
    tile_rows,
    tile_runs,
    tile_heads,
    tiles,
    kv_tile,
    LANES: tl.constexpr,
):
    """The tables of a Schedule, tiles in ``order``; runs that leave a short step over lose it in ``partial_runs``."""
    to_W = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside_W = to_W < tiles
    tile_W = tl.load(order + to_W, mask=inside_W, other=0)
    tl.store(tile_rows + 4 * to_W, tl.load(tile_begin + tile_W, mask=inside_W), mask=inside_W)
    tl.store(tile_rows + 4 * to_W + 1, tl.load(tile_end + tile_W, mask=inside_W), mask=inside_W)
    tl.store(tile_rows + 4 * to_W + 2, tl.load(owners + tile_W, mask=inside_W), mask=inside_W)
    tl.store(tile_rows + 4 * to_W + 3, tl.load(whole_steps + tile_W, mask=inside_W), mask=inside_W)
    tl.store(tile_runs + 4 * to_W, tl.load(partial_ptr + tile_W, mask=inside_W), mask=inside_W)
    tl.store(tile_runs + 4 * to_W + 1, tl.load(partial_ptr + tile_W + 1, mask=inside_W), mask=inside_W)
    tl.store(tile_runs + 4 * to_W + 2, tl.load(full_ptr + tile_W, mask=inside_W), mask=inside_W)
    tl.store(tile_runs + 4 * to_W + 3, tl.load(full_ptr + tile_W + 1, mask=inside_W), mask=inside_W)
    short_W = tl.load(short_runs + tile_W, mask=inside_W, other=-1)
    has_short_W = short_W >= 0
    begin_W = tl.load(partial_runs + 2 * short_W, mask=has_short_W, other=0)
    end_W = tl.load(partial_runs + 2 * short_W + 1, mask=has_short_W, other=0)
    rest_W = end_W - (end_W - begin_W) % kv_tile
    tl.store(tile_heads + 2 * to_W, rest_W, mask=inside_W)
    tl.store(tile_heads + 2 * to_W + 1, end_W, mask=inside_W)
    tl.store(partial_runs + 2 * short_W + 1, rest_W, mask=has_short_W)
