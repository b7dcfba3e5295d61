"""The Triton kernel of row copies (row_copies.py).

Shape legend: N rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy(
    source,
    target,
    from_row,
    to_row,
    is_row,
    column,
    source_row,
    source_a,
    source_b,
    target_row,
    target_a,
    target_b,
    SIZE_B: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    a, b, inner = column // (SIZE_B * INNER), column // INNER % SIZE_B, column % INNER
    here = is_row[:, None] & (column < COLUMNS)[None, :]
    read = source + from_row[:, None] * source_row + (a * source_a + b * source_b + inner)[None, :]
    write = target + to_row[:, None] * target_row + (a * target_a + b * target_b + inner)[None, :]
    tl.store(write, tl.load(read, here).to(target.dtype.element_ty), here)


@triton.jit(do_not_specialize=["rows"])
def copy_rows_kernel(
    source_0,
    source_1,
    target_0,
    target_1,
    source_index,
    target_index,
    rows,
    source_row_0,
    source_a_0,
    source_b_0,
    source_row_1,
    source_a_1,
    source_b_1,
    target_row_0,
    target_a_0,
    target_b_0,
    target_row_1,
    target_a_1,
    target_b_1,
    SIZE_B_0: tl.constexpr,
    INNER_0: tl.constexpr,
    SIZE_B_1: tl.constexpr,
    INNER_1: tl.constexpr,
    COLUMNS_0: tl.constexpr,
    COLUMNS_1: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rows of two tensors, ``[A, SIZE_B, INNER]`` each; the grid is blocks of rows, of columns, and the two.

    Args:
        source_index, target_index: int64 ``[N]``, or None: row i.
        rows: N.
        source_row_0, ...: strides in elements.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    from_row = row
    to_row = row
    if source_index is not None:
        from_row = tl.load(source_index + row, is_row, 0)
    if target_index is not None:
        to_row = tl.load(target_index + row, is_row, 0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    if tl.program_id(2) == 0:
        _copy(  # fmt: skip
            source_0,
            target_0,
            from_row,
            to_row,
            is_row,
            column,
            source_row_0,
            source_a_0,
            source_b_0,
            target_row_0,
            target_a_0,
            target_b_0,
            SIZE_B_0,
            INNER_0,
            COLUMNS_0,
        )
    else:
        _copy(  # fmt: skip
            source_1,
            target_1,
            from_row,
            to_row,
            is_row,
            column,
            source_row_1,
            source_a_1,
            source_b_1,
            target_row_1,
            target_a_1,
            target_b_1,
            SIZE_B_1,
            INNER_1,
            COLUMNS_1,
        )
