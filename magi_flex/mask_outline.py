"""How much there is to do at which keys: what a host may know of a mask whose intervals are on a device.

Shape legend: B mask batch, H mask heads (1 = shared), R intervals of a row, Q query rows, N blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals

BLOCK = 128  # keys


class Spread(NamedTuple):
    """How rows are spread over the blocks of keys of one or several masks.

    Attributes:
        masks: how many masks (batch entries times heads) the rest counts over.
        blocks: of keys.
        rows: rows that attend to any key of a block, summed over the blocks.
        longest: the most that a block has.
        changes: blocks that have another number of rows than the one before.
    """

    masks: int
    blocks: int
    rows: int
    longest: int
    changes: int


@dataclass(frozen=True, eq=False)
class Outline:
    """Counts of a mask, exact, on the CPU.

    Attributes:
        area_BH: int64, attended (query, key) pairs.
        rows_BHN: int64, rows that attend to any key of each block of BLOCK keys.
    """

    area_BH: Tensor
    rows_BHN: Tensor

    @staticmethod
    def of(intervals: RowIntervals) -> Outline:
        """Reads the data: one transfer from the mask's device."""
        starts_BHRQ, ends_BHRQ = intervals.starts, intervals.ends
        batch, heads = starts_BHRQ.shape[:2]
        blocks = -(-intervals.kv_len // BLOCK)
        used = ends_BHRQ > starts_BHRQ
        first = starts_BHRQ.clamp(max=blocks * BLOCK) // BLOCK
        end = torch.where(used, (ends_BHRQ + (BLOCK - 1)) // BLOCK, 0)
        # An interval may begin in the block in which the last one before it ends (unused slots may lie between them): a
        # row counts once.
        first[:, :, 1:] = torch.maximum(first[:, :, 1:], end.cummax(2).values[:, :, :-1])
        counted = (used & (end > first)).flatten(2).long()
        steps = torch.zeros(batch, heads, blocks + 1, dtype=torch.int64, device=starts_BHRQ.device)
        steps.scatter_add_(2, first.flatten(2).long(), counted)
        steps.scatter_add_(2, end.flatten(2).long(), -counted)
        area_BH1 = intervals.row_area().sum(2, keepdim=True)
        both = torch.cat((area_BH1, steps[..., :blocks].cumsum(2)), 2).cpu()
        return Outline(both[..., 0], both[..., 1:])

    @property
    def area(self) -> int:
        return int(self.area_BH.sum())

    def of_heads(self, heads: slice) -> Outline:
        """Of some of a mask's heads."""
        return Outline(self.area_BH[:, heads], self.rows_BHN[:, heads])

    def spread(self) -> Spread:
        rows = self.rows_BHN
        longest = int(rows.max()) if rows.numel() else 0
        return Spread(self.area_BH.numel(), rows.numel(), int(rows.sum()), longest, int((rows.diff() != 0).sum()))
