"""Who builds the tile plans of kernels: torch operations that wait for the device, or our GPU kernels, which do not.

The one place that chooses.  Callers may rely on nothing but what both builders promise: loops over runs are bounded by
the ``ptr`` arrays, row tiles past ``head_ptr[-1]`` are empty.
"""

from __future__ import annotations

import torch

from magi_flex.kernels import device_plans
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import TilePlan, build_tile_plan, check_tile_sizes

AUTO = "auto"
BUILDERS = ("torch", "device")
_choice = AUTO


def check_builder(choice: str) -> str:
    """``choice`` itself; raises ValueError if there is no such builder."""
    if choice not in (AUTO, *BUILDERS):
        raise ValueError(f"plans: got {choice!r}, allowed are {', '.join((AUTO, *BUILDERS))}")
    return choice


def choose_builder(choice: str) -> str:
    """Set who builds plans on GPUs, for the whole process; returns the choice from before."""
    global _choice
    before, _choice = _choice, check_builder(choice)
    return before


def builder_choice() -> str:
    return _choice


def objection(device: torch.device, has_bit_tiles: bool) -> str | None:
    """Why our GPU kernels do not build the plan of such a mask, or None."""
    if device.type != "cuda":
        return f"plans on a {device.type} device are built by torch"
    if has_bit_tiles:
        return "the mask has bit tiles"
    missing = device_plans.missing()
    if missing:
        return missing
    if _choice == "torch":
        return "plans='torch' was chosen"
    return None


def has_room(plan: MaskPlan) -> bool:
    """Whether ragged tile plans of this mask may have room for more row tiles than they hold."""
    return objection(plan.device, plan.bit_tiles is not None) is None


def kernel_tile_plan(
    plan: MaskPlan, q_tile: int, kv_tile: int, transposed: bool = False, ragged: bool = False, run_align: int = 1
) -> TilePlan:
    """The tile plan of :func:`magi_flex.tiles.build_tile_plan`, built without waiting for the device where possible.

    Raises ValueError as that function does.
    """
    if objection(plan.device, plan.bit_tiles is not None) is not None:
        return build_tile_plan(plan, q_tile, kv_tile, transposed, ragged, run_align)
    check_tile_sizes(q_tile, kv_tile, transposed, run_align)
    return device_plans.build_device_plan(plan.intervals, q_tile, kv_tile, transposed, ragged, run_align)
