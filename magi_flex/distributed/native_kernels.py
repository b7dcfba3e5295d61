"""Triton kernels of the native group collectives: rows into the memory of other GPUs, and what came joined.

They know nothing of processes: peers are addresses.  So a test can play all ranks in one process.

Shape legend: S sent rows, T received rows, P ranks, N rows of an accumulator, C copies (= T).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def push_rows_kernel(
    source,
    index,
    routes,
    peers,
    offset,
    stride_row,
    stride_a,
    stride_b,
    ROUTES: tl.constexpr,
    LANES: tl.constexpr,
    SIZE_B: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rows of one tensor into the staging buffers of their destinations, read where they lie.

    A row is ``[A, SIZE_B, WORDS]`` integers of any width, COLUMNS in all; strides and offset count in them.

    Args:
        source: the tensor.
        index: int64 ``[S]``, its rows in sending order.
        routes: int64 ``[ROUTES, 4]``: destination, first place in ``index``, rows, first row in the staging buffer.
        peers: int64 ``[P]``, addresses of the staging buffers.
        offset: where the tensor's rows begin in a staging buffer; they follow one another there.
    """
    lane = tl.arange(0, LANES)
    counts = tl.load(routes + lane * 4 + 2, lane < ROUTES, 0)
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    ends = tl.cumsum(blocks)
    for block in range(tl.program_id(0), tl.sum(blocks), tl.num_programs(0)):
        route = tl.sum((ends <= block).to(tl.int32))
        first_block = tl.sum(tl.where(lane == route, ends - blocks, 0))
        destination = tl.load(routes + route * 4)
        first = tl.load(routes + route * 4 + 1)
        count = tl.load(routes + route * 4 + 2)
        base = tl.load(routes + route * 4 + 3)
        row = (block - first_block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = row < count
        from_row = tl.load(index + first + row, is_row, 0)
        staging = tl.load(peers + destination).to(tl.pointer_type(source.dtype.element_ty))
        staging = tl.multiple_of(staging, 16)
        for begin in range(0, COLUMNS, BLOCK_COLUMNS):
            column = begin + tl.arange(0, BLOCK_COLUMNS)
            place = (column // (SIZE_B * WORDS)) * stride_a + (column // WORDS % SIZE_B) * stride_b + column % WORDS
            here = is_row[:, None] & (column < COLUMNS)[None, :]
            words = tl.load(source + from_row[:, None] * stride_row + place[None, :], here)
            tl.store(staging + offset + (base + row)[:, None] * COLUMNS + column[None, :], words, here)


@triton.jit
def flags_kernel(pads, rank, epoch, RANKS: tl.constexpr, LANES: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr):
    """Tells every rank that this one's rows of call ``epoch`` are there, and waits until all have said so.

    ``pads``: int64 ``[P]``, addresses of the ranks' signal pads; word r of a pad is the last call that rank r finished.
    """
    lane = tl.arange(0, LANES)
    is_rank = lane < RANKS
    if SIGNAL:
        pad = tl.load(pads + lane, is_rank, 0).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(pad + rank, epoch, mask=is_rank, sem="release", scope="sys")
    if WAIT:
        own = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
        missing = 1
        while missing > 0:
            seen = tl.atomic_add(own + lane, 0, mask=is_rank, sem="acquire", scope="sys")
            missing = tl.sum((is_rank & (seen < epoch)).to(tl.int32))


@triton.jit
def sum_rows_kernel(
    total,
    received,
    copies,
    row_ptr,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Adds the copies of each row to it, one after the other, so that the result does not depend on timing.

    LARGEST: takes the largest instead.

    Args:
        total: float ``[N, COLUMNS]``.
        received: of the same dtype, ``[T, COLUMNS]``.
        copies: int64 ``[C]``, places in ``received``, by row and in order of source.
        row_ptr: int64 ``[N + 1]``, where a row's copies begin.
    """
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        begin = tl.load(row_ptr + row, row < rows, 0)
        count = tl.load(row_ptr + row + 1, row < rows, 0) - begin
        most = tl.max(count)
        for first in range(0, COLUMNS, BLOCK_COLUMNS):
            column = first + tl.arange(0, BLOCK_COLUMNS)
            is_column = (column < COLUMNS)[None, :]
            target = total + row[:, None] * COLUMNS + column[None, :]
            changes = (count > 0)[:, None] & is_column
            value = tl.load(target, changes, 0)
            for i in range(0, most):
                here = i < count
                place = tl.load(copies + begin + i, here, 0)
                copy = tl.load(received + place[:, None] * COLUMNS + column[None, :], here[:, None] & is_column, 0)
                joined = tl.maximum(value, copy) if LARGEST else value + copy
                value = tl.where(here[:, None], joined, value)
            tl.store(target, value, changes)


@triton.jit
def merge_rows_kernel(
    out,
    lse,
    received_out,
    received_lse,
    copies,
    row_ptr,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Joins the copies of each row to it by their log-sum-exp (see kernels/merge.py), in order of source.

    Args:
        out, lse: float ``[N, HEADS, DIM]`` and ``[N, HEADS]``; the received ones have T rows.
        copies, row_ptr: as in :func:`sum_rows_kernel`.
    """
    dim = tl.arange(0, BLOCK_DIM)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        begin = tl.load(row_ptr + row)
        end = tl.load(row_ptr + row + 1)
        if end > begin:
            for first in range(0, HEADS, BLOCK_HEADS):
                head = first + tl.arange(0, BLOCK_HEADS)
                is_head = head < HEADS
                here = is_head[:, None] & (dim < DIM)[None, :]
                place = tl.cast(row, tl.int64) * HEADS + head
                inner = place[:, None] * DIM + dim[None, :]
                old_lse = tl.load(lse + place, is_head, float("-inf"))
                value = tl.load(out + inner, here, 0)
                for i in range(begin, end):
                    copy = tl.load(copies + i) * HEADS + head
                    new_lse = tl.load(received_lse + copy, is_head, float("-inf"))
                    new = tl.load(received_out + copy[:, None] * DIM + dim[None, :], here, 0)
                    largest = tl.maximum(old_lse, new_lse)
                    shift = tl.where(largest == float("-inf"), 0, largest)
                    old_weight = tl.exp2(old_lse - shift)
                    new_weight = tl.exp2(new_lse - shift)
                    weight = old_weight + new_weight
                    safe = tl.where(weight > 0, weight, 1)
                    value = (value * old_weight[:, None] + new * new_weight[:, None]) / safe[:, None]
                    old_lse = tl.where(weight > 0, shift + tl.log2(safe), float("-inf"))
                tl.store(out + inner, value, here)
                tl.store(lse + place, old_lse, is_head)
