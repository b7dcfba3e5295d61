"""What the Hopper kernels are told about a mask: schedules for their tiles, tables, whether rows are short.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.cuda_driver import multiprocessors
from magi_flex.kernels.ffa_backward import BackwardInstance
from magi_flex.kernels.ffa_backward_schedule import BackwardSchedule, plan_backward
from magi_flex.kernels.ffa_forward import ForwardInstance
from magi_flex.kernels.ffa_gradient_q import GradientQInstance
from magi_flex.kernels.ffa_schedule import Schedule, device_schedule, make_schedule
from magi_flex.kernels.plan_cache import derived
from magi_flex.kernels.request import AttentionRequest
from magi_flex.kernels.tile_plans import has_room, kernel_tile_plan
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Band


def forward_schedule(plan: MaskPlan, instance: ForwardInstance | GradientQInstance) -> Schedule:
    """Row tiles of ``plan`` for ``instance``, kept as long as the plan's tensors are."""
    sizes = (instance.q_tile, instance.kv_tile)

    def build() -> Schedule:
        tiles = kernel_tile_plan(plan, *sizes, ragged=True)
        return (device_schedule if has_room(plan) else make_schedule)(tiles, instance.narrow_tile)

    return derived(plan, ("ffa forward", *sizes, instance.narrow_tile), build)


def backward_schedule(request: AttentionRequest, instance: BackwardInstance, split: bool = True) -> BackwardSchedule:
    """Key tiles of the request's plan, kept as long as the plan's tensors are."""
    batch, heads = request.q.shape[:2]
    sizes = (instance.rows, instance.keys, batch, heads, request.k.shape[1])
    pack = instance.pack
    processors = multiprocessors(request.q.device)

    def build() -> BackwardSchedule:
        return plan_backward(request.plan, *sizes, processors, split, pack, instance.row_bytes)

    return derived(request.plan, ("ffa backward", *sizes, split, pack, instance.row_bytes), build)


def has_few_keys(plan: MaskPlan, limit: int) -> bool | Tensor:
    """Whether a row of ``plan`` (without bit tiles) attends to fewer than ``limit`` keys on average.

    An int32 ``[1]`` on the plan's device where the host would have to wait for it: plans that are built there.
    """
    if plan.kv_len < limit:
        return True

    def build() -> bool | Tensor:
        if isinstance(plan.structure, Band):
            return plan.structure.area(plan.q_len, plan.kv_len) < limit * plan.q_len
        if plan.outline is not None:
            return plan.outline.area < limit * plan.starts[:, :, 0].numel()
        keys = (plan.ends - plan.starts).clamp_(min=0).sum(dtype=torch.int64)
        few = keys < limit * plan.starts[:, :, 0].numel()
        return few.int().view(1) if has_room(plan) else bool(few)

    return derived(plan, ("ffa few keys", limit), build)


def contiguous_intervals(plan: MaskPlan) -> RowIntervals:
    return RowIntervals(plan.starts.contiguous(), plan.ends.contiguous(), plan.kv_len)


def contiguous_bit_tiles(plan: MaskPlan) -> BitTiles | None:
    tiles = plan.bit_tiles
    if tiles is None:
        return None
    tensors = (tiles.row_ptr, tiles.cols, tiles.slot, tiles.bits)
    return BitTiles(tiles.q_tile, tiles.kv_tile, *(x.contiguous() for x in tensors))
