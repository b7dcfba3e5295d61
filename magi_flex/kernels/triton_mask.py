"""Masking a tile inside a Triton kernel: from the rows' intervals, or from bit tiles.

Queries and keys of a tile are index tensors that broadcast against each other ([M, 1] and [1, N], or the other way
round in the transposed kernel), so that one function serves both.
"""

from __future__ import annotations

import triton
import triton.language as tl

MISSING_TILE = tl.constexpr(-2)
FULL_TILE = tl.constexpr(-1)  # as in BitTiles.slot


@triton.jit
def attends(mask, row, row_ok, row_0, col, col_0, mask_head, q_len, SLOTS: tl.constexpr, BIT_TILES: tl.constexpr):
    """Whether each (query, key) of a tile attends.

    Args:
        mask: (starts, ends, slots, bit row_ptr, bit cols, bit slots, bits); see :func:`in_bits`.  ``starts`` and
            ``ends`` are int32 [mask heads, slots, q_len].
        row, row_ok: query numbers, and whether they are inside the lengths; ``row_0``: the tile's first.
        col: key numbers; ``col_0``: the tile's first.
        mask_head: which batch entry and head of the mask (b * H + h).
        SLOTS: intervals of a row, rounded up to a power of two so that few kernels serve all masks.
        BIT_TILES: their (rows, keys), or () where the mask has none.
    """
    known = first_interval(mask, row, row_ok, mask_head, q_len)
    return attends_beyond(known, mask, row, row_ok, row_0, col, col_0, mask_head, q_len, SLOTS, BIT_TILES)


@triton.jit
def first_interval(mask, row, row_ok, mask_head, q_len):
    """(first key, number of keys) of each row's first interval."""
    return interval(mask, mask_head.to(tl.int64) * mask[2] * q_len + row, row_ok)


@triton.jit
def attends_beyond(
    known, mask, row, row_ok, row_0, col, col_0, mask_head, q_len, SLOTS: tl.constexpr, BIT_TILES: tl.constexpr
):
    """What :func:`attends` says, where the rows' first interval is known."""
    result = in_intervals(known, mask, row, row_ok, col, mask_head, q_len, SLOTS)
    if len(BIT_TILES) > 0:
        bands = tl.cdiv(q_len, BIT_TILES[0])
        row_ptr = mask[3] + mask_head.to(tl.int64) * (bands + 1) + row_0 // BIT_TILES[0]
        result = result | in_bits(row_ptr, mask[4], mask[5], mask[6], row, row_ok, col, col_0, BIT_TILES)
    return result


@triton.jit
def in_intervals(known, mask, row, row_ok, col, mask_head, q_len, SLOTS: tl.constexpr):
    """Whether each pair lies in an interval of the row; ``known`` is the first."""
    result = inside(known, col)
    for slot in tl.static_range(1, SLOTS):
        at = (mask_head.to(tl.int64) * mask[2] + slot) * q_len + row
        result = result | inside(interval(mask, at, row_ok & (slot < mask[2])), col)
    return result


@triton.jit
def interval(mask, at, readable):
    """(first key, number of keys) at place ``at`` of the starts and ends; nothing where not readable."""
    first = tl.load(mask[0] + at, mask=readable, other=0)
    return first, tl.maximum(tl.load(mask[1] + at, mask=readable, other=0) - first, 0)


@triton.jit
def inside(interval, col):
    """One unsigned comparison: for keys before the start the difference is a huge number."""
    return (col - interval[0]).to(tl.uint32, bitcast=True) < interval[1].to(tl.uint32, bitcast=True)


@triton.jit
def in_bits(row_ptr, cols, slots, bits, row, row_ok, col, col_0, BIT_TILES: tl.constexpr):
    """The tile lies inside one tile of the bit tiles' grid, in the band of rows that ``row_ptr`` points to."""
    low = tl.load(row_ptr)
    end = tl.load(row_ptr + 1)
    wanted = col_0 // BIT_TILES[1]
    high = end
    while low < high:
        middle = (low + high) // 2
        before = tl.load(cols + middle) < wanted
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    listed = low < end
    listed = listed & (tl.load(cols + low, mask=listed, other=-1) == wanted)
    slot = tl.load(slots + low, mask=listed, other=MISSING_TILE)
    words = BIT_TILES[1] // 32
    at = (slot.to(tl.int64) * BIT_TILES[0] + row % BIT_TILES[0]) * words + col % BIT_TILES[1] // 32
    word = tl.load(bits + at, mask=row_ok & (col >= 0) & (slot >= 0), other=0)
    return (((word >> (col % 32)) & 1) != 0) | (slot == FULL_TILE)
