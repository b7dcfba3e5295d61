"""MaskPlan: what a mask became, in the form every kernel reads.

mask = row intervals, or bit tiles where a row tile needs too many intervals (the two never overlap).

Shape legend: B mask batch, H mask head (1 = shared), T row tiles, N listed tiles, P partial tiles, W 32-bit words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals


@dataclass(frozen=True)
class BitTiles:
    """Explicit tiles of a fixed grid, in CSR form, for rows that do not fit into a few intervals.

    Attributes:
        q_tile, kv_tile: the grid; kv_tile is a multiple of 32.
        row_ptr: int32 ``[B, H, T + 1]``, positions in ``cols`` (global over B and H); T = ceil(q_len / q_tile).
        cols: int32 ``[N]``, key tile index, ascending inside a row tile.
        slot: int32 ``[N]``, index into ``bits``, or -1: every pair of the tile (inside the lengths) attends.
        bits: int32 ``[P, q_tile, kv_tile / 32]``; bit j of word w is key ``kv_tile * col + 32 * w + j``.
    """

    q_tile: int
    kv_tile: int
    row_ptr: Tensor
    cols: Tensor
    slot: Tensor
    bits: Tensor

    @property
    def nbytes(self) -> int:
        return self.row_ptr.nbytes + self.cols.nbytes + self.slot.nbytes + self.bits.nbytes


@dataclass(frozen=True)
class MaskPlan:
    """An exact mask in O(tokens) memory.  Rows that have bit tiles have no intervals, and the other way round."""

    intervals: RowIntervals
    bit_tiles: BitTiles | None = None

    @property
    def starts(self) -> Tensor:
        return self.intervals.starts

    @property
    def ends(self) -> Tensor:
        return self.intervals.ends

    @property
    def q_len(self) -> int:
        return self.intervals.q_len

    @property
    def kv_len(self) -> int:
        return self.intervals.kv_len

    @property
    def device(self) -> torch.device:
        return self.intervals.starts.device
