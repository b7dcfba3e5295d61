"""A tile plan in the form the Hopper kernels read: row tiles in working order, with their runs.

Shape legend: B mask batch, H mask head, N row tiles over all B and H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.tiles import TilePlan


@dataclass(frozen=True)
class Schedule:
    """Row tiles, longest first within each (mask batch, mask head).

    Attributes:
        tile_rows: int32 ``[N, 4]``: first row, end row, mask (b * H + h), number of key tiles to visit.
        tile_runs: int32 ``[N, 4]``: begin and end in ``partial_runs``, begin and end in ``full_runs``.
        partial_runs, full_runs: int32 ``[*, 2]``: begin and end in keys.
    """

    tile_rows: Tensor
    tile_runs: Tensor
    partial_runs: Tensor
    full_runs: Tensor

    @property
    def row_tiles(self) -> int:
        return self.tile_rows.shape[0]


def make_schedule(plan: TilePlan) -> Schedule:
    """Order the row tiles of ``plan`` (all on the plan's device, no synchronization)."""
    counts = plan.head_ptr.diff()
    masks = torch.arange(len(counts), device=counts.device)
    owner = torch.repeat_interleave(masks, counts, output_size=plan.tile_begin.shape[0])
    full_steps, partial_steps = plan.steps()
    cost = full_steps + partial_steps
    order = torch.argsort(owner * (1 << 32) - cost, stable=True)
    rows = torch.stack((plan.tile_begin, plan.tile_end, owner.int(), cost.int()), 1)
    runs = torch.stack((plan.partial_ptr[:-1], plan.partial_ptr[1:], plan.full_ptr[:-1], plan.full_ptr[1:]), 1)
    return Schedule(
        rows[order].contiguous(), runs[order].contiguous(), plan.partial_runs.contiguous(), plan.full_runs.contiguous()
    )
