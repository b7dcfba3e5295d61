"""Triton kernel: intervals cut down to the run of keys that has the row's label.

Shape legend: X batch and head together, Q query rows, K keys, R intervals of a row, W rows (one a lane).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _count(labels, size, label_W, UP_TO: tl.constexpr, BITS: tl.constexpr):
    """How many of the ascending labels are below each one (``UP_TO``: or equal to it); ``BITS``: of ``size``."""
    low_W = tl.zeros_like(label_W).to(tl.int32)
    high_W = low_W + size
    for _ in range(BITS):
        middle_W = (low_W + high_W) // 2
        searching_W = low_W < high_W
        found_W = tl.load(labels + tl.minimum(middle_W, size - 1))
        if UP_TO:
            counts_W = searching_W & (found_W <= label_W)
        else:
            counts_W = searching_W & (found_W < label_W)
        low_W = tl.where(counts_W, middle_W + 1, low_W)
        high_W = tl.where(searching_W & (counts_W == 0), middle_W, high_W)
    return low_W


@triton.jit
def rows_in_runs(
    sorted_labels,
    order,
    row_labels,
    rest_starts,
    rest_ends,
    starts,
    ends,
    returns,
    q_len,
    kv_len,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The rows' intervals inside the first to the last key of their label, canonical; ``returns`` becomes 1 where a
    row attends and not all keys in between have its label.

    ``sorted_labels``, ``order`` ``[X, K]``: the labels of the keys, ascending, and their keys, equal ones in order.
    """
    x = tl.program_id(1).to(tl.int64)
    row_W = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside_W = row_W < q_len
    label_W = tl.load(row_labels + x * q_len + row_W, mask=inside_W, other=0)
    first_W = _count(sorted_labels + x * kv_len, kv_len, label_W, False, BITS)
    after_W = _count(sorted_labels + x * kv_len, kv_len, label_W, True, BITS)
    known_W = inside_W & (first_W < after_W)
    begin_W = tl.load(order + x * kv_len + first_W, mask=known_W, other=0).to(tl.int32)
    end_W = tl.load(order + x * kv_len + after_W - 1, mask=known_W, other=-1).to(tl.int32) + 1
    written_W = tl.zeros_like(row_W)
    for r in range(SLOTS):
        at_W = (x * SLOTS + r) * q_len + row_W
        start_W = tl.maximum(tl.load(rest_starts + at_W, mask=inside_W, other=0), begin_W)
        stop_W = tl.minimum(tl.load(rest_ends + at_W, mask=inside_W, other=0), end_W)
        used_W = start_W < stop_W
        # Intervals that are left stay in order; the slots that this leaves over come last.
        to_W = (x * SLOTS + written_W).to(tl.int64) * q_len + row_W
        tl.store(starts + to_W, start_W, mask=used_W)
        tl.store(ends + to_W, stop_W, mask=used_W)
        written_W += used_W.to(tl.int32)
    for r in range(SLOTS):
        at_W = (x * SLOTS + r) * q_len + row_W
        tl.store(starts + at_W, kv_len, mask=inside_W & (r >= written_W))
        tl.store(ends + at_W, 0, mask=inside_W & (r >= written_W))
    returns_W = (written_W > 0) & (end_W - begin_W != after_W - first_W)
    if tl.max(returns_W.to(tl.int32), axis=0) > 0:
        tl.store(returns, 1)
