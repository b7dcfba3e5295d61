"""A BlockMask's lists as key intervals of query blocks.

Stock semantics: a pair attends iff its block is listed as full, or its block is listed as partial and mask_mod holds.

Shape legend: B batch, H heads (1 = shared), N query blocks, M key blocks, L list entries, R intervals, Q query rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan
from magi_flex.plan_blocks import block_area


class KeyRegion(Protocol):
    """Pairs that a mask is solved in: key intervals of any rows, for ``batch`` and ``heads`` (1 = shared)."""

    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    def rows(self, begin: int, end: int) -> RowIntervals: ...


@dataclass(frozen=True)
class PlanRows:
    """The pairs of a plan; for one with bit tiles all pairs, of which the plan's own have to be picked by its bits."""

    plan: MaskPlan

    @property
    def batch(self) -> int:
        return self.plan.starts.shape[0]

    @property
    def heads(self) -> int:
        return self.plan.starts.shape[1]

    def rows(self, begin: int, end: int) -> RowIntervals:
        """The intervals of rows [begin, end)."""
        if self.plan.bit_tiles is not None:
            return RowIntervals.full(end - begin, self.plan.kv_len, self.plan.device).expand(self.batch, self.heads)
        rows = self.plan.intervals.take_rows(slice(begin, end))
        return RowIntervals.build(rows.starts, rows.ends, self.plan.kv_len).trim()


@dataclass(frozen=True)
class BlockRows:
    """Key intervals that are the same for all ``q_block`` rows of a query block.

    Attributes:
        blocks: intervals in keys, a "row" being a query block.
        q_block: rows of a query block.
        q_len: rows in all; the last block may have fewer.
        kv_block, listed_BHNM: keys of a key block, and whether each block is listed (None where no list was given).
    """

    blocks: RowIntervals
    q_block: int
    q_len: int
    kv_block: int | None = None
    listed_BHNM: Tensor | None = None

    @staticmethod
    def from_lists(
        num_blocks_BHN: Tensor, indices_BHNL: Tensor, block_size: tuple[int, int], q_len: int, kv_len: int
    ) -> BlockRows:
        """From one of a BlockMask's pairs of lists.  Blocks outside of the lengths have no pairs and are dropped.

        Raises ValueError where the shapes do not belong together or the lists have too few rows for ``q_len``.
        """
        if num_blocks_BHN.shape != indices_BHNL.shape[:-1] or num_blocks_BHN.dim() > 3:
            raise ValueError(
                f"kv_num_blocks: is {list(num_blocks_BHN.shape)} beside kv_indices {list(indices_BHNL.shape)}; "
                "[B, H, query blocks] and [B, H, query blocks, list entries] are needed"
            )
        listed_BHNM = listed_blocks(num_blocks_BHN, indices_BHNL, block_size, q_len, kv_len)
        q_block, kv_block = block_size
        runs = RowIntervals.from_dense(listed_BHNM)
        blocks = RowIntervals.build(runs.starts.long() * kv_block, runs.ends.long() * kv_block, kv_len)
        return BlockRows(blocks, q_block, q_len, kv_block, listed_BHNM)

    @staticmethod
    def full(q_len: int, kv_len: int, device: torch.device | str) -> BlockRows:
        """Every pair."""
        return BlockRows(RowIntervals.full(1 if q_len else 0, kv_len, device), max(1, q_len), q_len)

    @property
    def batch(self) -> int:
        return self.blocks.starts.shape[0]

    @property
    def heads(self) -> int:
        return self.blocks.starts.shape[1]

    def rows(self, begin: int, end: int) -> RowIntervals:
        """The intervals of rows [begin, end), only as many slots as these rows need."""
        block_Q = torch.arange(begin, end, device=self.blocks.starts.device) // self.q_block
        return self.blocks.take_rows(block_Q).trim()


def listed_blocks(
    num_blocks_BHN: Tensor, indices_BHNL: Tensor, block_size: tuple[int, int], q_len: int, kv_len: int
) -> Tensor:
    """Whether each block is listed, bool ``[B, H, N, M]``; see :meth:`BlockRows.from_lists`."""
    while indices_BHNL.dim() < 4:
        num_blocks_BHN, indices_BHNL = num_blocks_BHN[None], indices_BHNL[None]
    q_block, kv_block = block_size
    rows, columns = -(-q_len // q_block), -(-kv_len // kv_block)
    if num_blocks_BHN.shape[2] < rows:
        raise ValueError(
            f"kv_num_blocks: has {num_blocks_BHN.shape[2]} query blocks of {q_block} rows, but q_len is {q_len}; "
            f"{rows} are needed"
        )
    num_blocks_BHN, indices_BHNL = num_blocks_BHN[:, :, :rows], indices_BHNL[:, :, :rows].long()
    entry_L = torch.arange(indices_BHNL.shape[3], device=indices_BHNL.device)
    listed = (entry_L < num_blocks_BHN[..., None]) & (indices_BHNL >= 0) & (indices_BHNL < columns)
    target = torch.where(listed, indices_BHNL, columns)
    dense_BHNM = torch.zeros(*target.shape[:3], columns + 1, dtype=torch.bool, device=target.device)
    return dense_BHNM.scatter_(3, target, True)[..., :columns]


def agreement(plan: MaskPlan, block_size: tuple[int, int], partial_BHNM: Tensor, full_BHNM: Tensor | None) -> Tensor:
    """Whether listed blocks change nothing: every block with attending pairs is listed, and full ones are full in
    ``plan``.  A bool tensor; nothing is read from the device unless the plan has bit tiles."""
    area_BHNM = block_area(plan, *block_size)
    listed_BHNM, agrees = partial_BHNM, torch.ones((), dtype=torch.bool, device=plan.device)
    if full_BHNM is not None:
        rows_N, keys_M = (
            (length - torch.arange(0, length, block, device=plan.device)).clamp(max=block)
            for length, block in zip((plan.q_len, plan.kv_len), block_size, strict=True)
        )
        agrees = ~(full_BHNM & (area_BHNM != rows_N[:, None] * keys_M)).any()
        listed_BHNM = listed_BHNM | full_BHNM
    return agrees & ~((area_BHNM > 0) & ~listed_BHNM).any()


def lists_agree(plan: MaskPlan, partial: BlockRows, full: BlockRows | None) -> bool:
    """Whether the lists change nothing: every block with attending pairs is listed, and full ones are full in ``plan``.

    ``plan`` and the lists have the same lengths.
    """
    listed_BHNM, kv_block = partial.listed_BHNM, partial.kv_block
    if listed_BHNM is None or kv_block is None:
        return False
    if full is not None and full.listed_BHNM is None:
        return False
    full_BHNM = None if full is None else full.listed_BHNM
    return bool(agreement(plan, (partial.q_block, kv_block), listed_BHNM, full_BHNM))
