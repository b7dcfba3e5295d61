"""What flash-attn-4 takes for a mask that it has no flags for: interval tensors and block lists on its own tiles.

Shape legend: B mask batch, H mask heads (1 = shared), R intervals of a row, Q query rows, K keys, T row tiles of one
head, N row tiles over all of B and H, W entries of a list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.tile_plans import kernel_tile_plan
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import TilePlan

# Kernels read the bounds of rows that a tile has past the last one; no tile has more rows than this.
PADDING = 256


class BlockSize(NamedTuple):
    """Queries and keys of a block in the lists: whole multiples of the kernel's tile."""

    q: int
    kv: int


def forward_block(arch: int, head_dim: int, v_dim: int, q_rows: int) -> BlockSize:
    """The block size of the forward kernel: the smallest that its tile choice allows.

    Args:
        arch: compute capability times ten (90, 100, ...).
        q_rows: query rows of a key head (all its query heads together where they share the mask).
    """
    if arch // 10 == 9:
        if head_dim <= 64:
            return BlockSize(192, 128)
        if head_dim <= 96:
            return BlockSize(192, 144)
        if head_dim <= 128:
            return BlockSize(128, 128)
        if head_dim <= 192:
            return BlockSize(128, 128 if v_dim <= 128 else 112)
        return BlockSize(128, 80)
    stages = 2 if q_rows > 128 and v_dim != 256 else 1
    return BlockSize(128 * stages, 128)


def backward_block(arch: int, head_dim: int, v_dim: int) -> BlockSize:
    """The block size of the backward kernel."""
    if arch // 10 == 9:
        if head_dim <= 64:
            return BlockSize(128, 128)
        if head_dim <= 128:
            return BlockSize(64, 128)
        return BlockSize(64, 96 if head_dim <= 192 else 64)
    # Two thread blocks share a pair of key tiles from head dim 128 on.
    return BlockSize(128, 256 if head_dim >= 128 else 128)


class BlockLists(NamedTuple):
    """int32 ``[B, H, T]`` counts and ``[B, H, T, W]`` ascending blocks, partial and full; 0 past a count."""

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


def block_lists(plan: MaskPlan, block: BlockSize, transposed: bool, width: int | None = None) -> BlockLists:
    """Lists of key blocks for each query block; ``transposed``: of query blocks for each key block.

    Args:
        width: W; None: as long as the longest list, which takes a transfer from the mask's device.  A list that is
            longer than ``width`` is an error of the caller's.
    """
    tiles = kernel_tile_plan(plan, block.q, block.kv, transposed)
    if width is None:
        width = max([1, *(int(steps.max()) for steps in tiles.steps() if steps.numel())])
    lists: list[Tensor] = []
    for ptr, runs in ((tiles.partial_ptr, tiles.partial_runs), (tiles.full_ptr, tiles.full_runs)):
        for x in _expanded(tiles, ptr, runs, width):
            lists.append(x.view(*plan.starts.shape[:2], -1, *x.shape[1:]))
    return BlockLists(*lists)


def _expanded(tiles: TilePlan, ptr: Tensor, runs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Counts ``[N]`` and blocks ``[N, width]`` of the runs; what ``runs`` holds past the last one is not looked at."""
    step = tiles.q_tile if tiles.transposed else tiles.kv_tile
    ptr_N = ptr.long()
    begin, end = runs.long().unbind(1)
    begin, end = begin // step, (end + step - 1) // step
    used = torch.arange(len(begin), device=ptr.device) < ptr_N[-1]
    upto = torch.nn.functional.pad(torch.where(used, end - begin, 0).cumsum(0), (1, 0))
    first_N = upto[ptr_N[:-1]]
    count_N = upto[ptr_N[1:]] - first_N
    entry_W = torch.arange(width, device=ptr.device)
    number_NW = first_N[:, None] + entry_W
    blocks_NW = torch.zeros_like(number_NW)
    if len(begin):
        run_NW = (torch.searchsorted(upto, number_NW, right=True) - 1).clamp(max=len(begin) - 1)
        blocks_NW = torch.where(entry_W < count_N[:, None], begin[run_NW] + number_NW - upto[run_NW], 0)
    return count_N.to(torch.int32), blocks_NW.to(torch.int32)


def padded_bounds(intervals: RowIntervals) -> tuple[Tensor, Tensor]:
    """Starts and ends ``[B, H, R, Q + PADDING]`` with R 1, 2, 4 or 8, so that few kernels serve all masks.

    What is added is empty.  One kernel serves any number of intervals above 8.
    """
    slots = intervals.max_intervals
    if slots <= 8:
        slots = 1 << (slots - 1).bit_length()
    pad = (0, PADDING, 0, slots - intervals.max_intervals)
    starts = torch.nn.functional.pad(intervals.starts, pad, value=intervals.kv_len)
    return starts, torch.nn.functional.pad(intervals.ends, pad, value=0)
