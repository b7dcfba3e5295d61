"""Rows of tensors from place to place: into a message, out of it, and among other rows.

Shape legend: N rows that are copied; tensors are ``[rows, ...]``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

_ELEMENTS = 4096  # that a program copies


def copy_rows(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    source_index: Tensor | None = None,
    target_index: Tensor | None = None,
) -> None:
    """``target[target_index[i]] = source[source_index[i]]`` for each pair and each of N rows; no index: row i.

    On a GPU one kernel serves two pairs, such as keys and values, whose rows are three-dimensional and contiguous in
    their last dimension.

    Args:
        sources, targets: the pairs, any strides, on one device; a target's dtype may be another one.
        source_index, target_index: int64 ``[N]``; no row occurs twice in ``target_index``.
    """
    if len(sources) == 2 and all(_is_simple(x) for x in (*sources, *targets)) and _has_triton():
        launch_copy(sources, targets, source_index, target_index)
        return
    for source, target in zip(sources, targets, strict=True):
        rows = source if source_index is None else source.index_select(0, source_index)
        if target_index is None:
            target.copy_(rows)
        else:
            target.index_copy_(0, target_index, rows.to(target.dtype))


def _is_simple(x: Tensor) -> bool:
    return x.is_cuda and x.dim() == 4 and x.stride(3) == 1


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def launch_copy(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_index: Tensor | None, target_index: Tensor | None
) -> None:
    """:func:`copy_rows` of two pairs of four-dimensional tensors, contiguous in their last dimension, by a kernel."""
    from magi_flex.distributed.row_kernels import copy_rows_kernel

    given = source_index if target_index is None else target_index
    rows = sources[0].shape[0] if given is None else given.shape[0]
    columns = [x.shape[1:].numel() for x in targets]
    if rows == 0 or max(columns) == 0:
        return
    block_columns = min(1 << (max(columns) - 1).bit_length(), 1024)
    block_rows = _ELEMENTS // block_columns
    copy_rows_kernel[(-(-rows // block_rows), -(-max(columns) // block_columns), 2)](
        *sources,
        *targets,
        source_index,
        target_index,
        rows,
        *(step for x in (*sources, *targets) for step in x.stride()[:3]),
        *(size for x in targets for size in x.shape[2:]),
        *columns,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=8,
    )
