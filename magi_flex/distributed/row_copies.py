"""Rows of tensors from place to place: into a message, out of it, and among other rows.

Shape legend: N rows that are copied; tensors are ``[rows, ...]``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from magi_flex.kernels.ffa_copy_rows import can_copy, launch_copy_rows
from magi_flex.kernels.route import load


def copy_rows(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    source_index: Tensor | None = None,
    target_index: Tensor | None = None,
) -> None:
    """``target[target_index[i]] = source[source_index[i]]`` for each pair and each of N rows; no index: row i.

    On Hopper one kernel serves all pairs, such as keys and values, where it can: one launch, strided rows at the rate
    of memory.

    Args:
        sources, targets: the pairs, any strides, on one device; a target's dtype may be another one.
        source_index, target_index: int64 ``[N]``; no row occurs twice in ``target_index``.
    """
    if _has_kernel(targets[0].device) and can_copy(sources, targets):
        launch_copy_rows(sources, targets, source_index, target_index)
        return
    for source, target in zip(sources, targets, strict=True):
        rows = source if source_index is None else source.index_select(0, source_index)
        if target_index is None:
            target.copy_(rows)
        else:
            target.index_copy_(0, target_index, rows.to(target.dtype))


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    backend = load("ffa")
    return not isinstance(backend, str) and backend.missing(device) is None
