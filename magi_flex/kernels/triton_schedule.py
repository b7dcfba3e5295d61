"""A tile plan in the form the Triton kernels read: one record a row tile, in working order.

Shape legend: N row tiles over all batch entries and heads of the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.kernels.plan_cache import derived
from magi_flex.kernels.tile_plans import kernel_tile_plan
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import TilePlan


@dataclass(frozen=True)
class Schedule:
    """Row tiles (tiles of keys in a transposed plan) of a mask.

    Attributes:
        records: int32 ``[N, 8]``: first row, end row, mask (b * H + h), begin and end in ``partial_runs``, begin and
            end in ``full_runs``, number of steps.  A record without rows is unused capacity.
        partial_runs, full_runs: int32 ``[*, 2]``, see TilePlan.
        bounded: the last step of a full run may be cut short by the run's end.
    """

    records: Tensor
    partial_runs: Tensor
    full_runs: Tensor
    bounded: bool

    @property
    def row_tiles(self) -> int:
        return self.records.shape[0]


def schedule_for(
    plan: MaskPlan, q_tile: int, kv_tile: int, transposed: bool = False, aligned: bool = False
) -> Schedule:
    """The schedule of ``plan`` for these tile sizes, kept as long as the plan's tensors are.

    Args:
        aligned: tiles on the fixed grid, record ``mask * tiles + i`` for tile i.  Otherwise tiles are ragged (on the
            grid where the mask has bit tiles), the longest of a mask first.
    """

    def build() -> Schedule:
        ragged = plan.bit_tiles is None and not aligned
        tiles = kernel_tile_plan(plan, q_tile, kv_tile, transposed, ragged)
        return make_schedule(tiles, bounded=not ragged, keep_order=aligned)

    return derived(plan, ("triton", q_tile, kv_tile, transposed, aligned), build)


def make_schedule(plan: TilePlan, bounded: bool, keep_order: bool) -> Schedule:
    """All on the plan's device, without waiting for it."""
    tiles, device = plan.tile_begin.shape[0], plan.tile_begin.device
    number = torch.arange(tiles, device=device, dtype=plan.head_ptr.dtype)
    used = number < plan.head_ptr[-1]
    mask = torch.searchsorted(plan.head_ptr, number, right=True) - 1
    mask = mask.clamp(max=max(0, plan.head_ptr.shape[0] - 2))
    full_steps, partial_steps = plan.steps()
    steps = torch.where(used, full_steps + partial_steps, 0)
    ptr = (plan.partial_ptr[:-1], plan.partial_ptr[1:], plan.full_ptr[:-1], plan.full_ptr[1:])
    rows = (torch.where(used, plan.tile_begin, 0), torch.where(used, plan.tile_end, 0))
    records = torch.stack([x.to(torch.int32) for x in (*rows, mask, *ptr, steps)], 1)
    if not keep_order:
        records = records[torch.argsort(mask * (1 << 32) - steps, stable=True)]
    return Schedule(records.contiguous(), plan.partial_runs.contiguous(), plan.full_runs.contiguous(), bounded)
