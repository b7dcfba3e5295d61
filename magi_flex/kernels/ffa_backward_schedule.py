"""A transposed tile plan in the form the Hopper backward reads: key tiles in working order, split over query heads.

Shape legend: N key tiles over all mask batch entries and mask heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.kernels.ffa_schedule import owning_mask
from magi_flex.kernels.tile_plans import kernel_tile_plan, objection
from magi_flex.mask_outline import BLOCK
from magi_flex.mask_plan import MaskPlan
from magi_flex.mask_structure import Band
from magi_flex.tiles import TilePlan

ROW_GROUP = 8  # rows of a group of the dQ sums: steps begin at multiples of it
# 50 MB on an H100, 60 MB on an H200; what is visited at a time is less than what a section holds.
L2_BYTES = 64 << 20
# Cost model in steps, fitted to timings (docs/ffa.md): loads and drained pipeline of a work item; clearing and
# converting the sums of a key tile whose dK and dV are summed in memory; what longest-first order leaves at the end, of
# the longest item.
_ITEM_STEPS, _BLOCK_STEPS, _TAIL = 3.5, 6.0, 0.1
# Key tiles that share rows but take different numbers of steps (causal) drift apart and then work on different query
# heads, so that L2 no longer serves their loads and sums: this factor more time for items of eight heads, if every tile
# takes another number than the one before, and one head for each item fills L2; none if these fill half of it.
_DRIFT = 0.2


@dataclass(frozen=True)
class BackwardSchedule:
    """A transposed tile plan with what the kernel's scheduler reads.

    Attributes:
        plan: key tiles and their query runs.
        heads: query heads that a work item walks, a divisor of the query heads per key/value head.  If it is less than
            these, the parts of dK and dV are summed in float32 in memory: more, smaller items.
        entries: int32 ``[*, 4]``, key tiles in working order, most steps first: the mask (b * H + h) of an item's first
            query head, the tile counted inside that mask, the steps of ``plan.q_tile`` query rows that the tile takes
            over all heads of the item, 0.
        count: int32 ``[1]``, how many entries there are; None where the array has no room for more.
    """

    plan: TilePlan
    heads: int
    entries: Tensor
    count: Tensor | None = None


def plan_backward(
    plan: MaskPlan,
    rows: int,
    keys: int,
    batch: int,
    heads: int,
    kv_heads: int,
    processors: int,
    split: bool = True,
    pack: int = 1,
    row_bytes: int = 1024,
) -> BackwardSchedule:
    """The schedule of a backward pass with ``rows`` query rows a step and ``keys`` keys a tile.

    Args:
        plan: the mask.
        batch, heads, kv_heads: of q and k.
        processors: multiprocessors that share the work.
        split: an item may walk some of a group's heads only (the parts of dK and dV are then summed in no fixed order).
        pack: query heads of a step, all with one mask.
        row_bytes: that an item visits for a query position (:attr:`BackwardInstance.row_bytes`; head dim 128 has 1024).
    """
    head_bytes = plan.q_len * row_bytes
    group, positions = heads // kv_heads, rows // pack
    mask_batch, mask_heads = plan.starts.shape[:2]
    # Heads that share a key/value head also share its key tiles, which only the fixed grid promises between masks.
    ragged = mask_heads == 1 or group == 1
    align = ROW_GROUP // pack
    tiles = kernel_tile_plan(plan, positions, keys, transposed=True, ragged=ragged, run_align=align)
    # From here on what counts is packs of heads.
    packs = group // pack
    copies = (heads // pack if mask_heads == 1 else 1) * (batch if mask_batch == 1 else 1)
    walked = packs
    on_device = objection(plan.device, plan.bit_tiles is not None) is None
    if split and not on_device:
        walked = choose_heads(tile_steps(tiles, align), copies, packs, processors, head_bytes)
    elif split and (mask_batch == 1 or mask_heads > 1):
        # (Else shared sums of a batch entry's tiles are found by their number, which must not be a capacity.)
        steps = known_steps(plan, positions, keys, align)
        if steps is not None:
            walked = choose_heads(steps, copies, packs, processors, head_bytes)
        else:
            walked = heads_unseen(mask_batch * mask_heads * -(-plan.kv_len // keys), copies, packs, processors)
    schedule = make_backward_schedule(tiles, mask_heads, walked * pack, pack)
    return replace(schedule, count=tiles.head_ptr[-1:]) if on_device and ragged else schedule


class KeyWork(NamedTuple):
    """The key tiles of one query head: how many, their steps in sum, those of the longest, how many have another number
    of steps than the one before, and the bytes of the head's rows that they visit (unless given, more than L2 has)."""

    tiles: float
    steps: float
    longest: float
    changes: float
    head_bytes: float = math.inf


def choose_heads(steps_N: Tensor, copies: int, group: int, processors: int, head_bytes: float = math.inf) -> int:
    """Query heads of a work item: the divisor of ``group`` with the least :func:`item_steps`.

    Args:
        steps_N: steps of each key tile for one query head.
        copies: (batch, query head) pairs that share the tiles.
        head_bytes: see :class:`KeyWork`.

    (Reads three numbers from the device.)
    """
    tiles = steps_N.numel()
    if group == 1 or not tiles:
        return group
    numbers = torch.stack((steps_N.sum(), steps_N.max(), (steps_N.diff() != 0).sum())).tolist()
    work = KeyWork(tiles, *map(float, numbers), head_bytes)
    return min(_item_sizes(group), key=lambda heads: item_steps(work, heads, copies, group, processors))


def least_item_steps(work: KeyWork, copies: float, group: int, processors: int) -> float:
    """:func:`item_steps` of the heads that :func:`choose_heads` takes."""
    return min(item_steps(work, heads, copies, group, processors) for heads in _item_sizes(group))


def _item_sizes(group: int) -> list[int]:
    return [heads for heads in range(group, 0, -1) if group % heads == 0]


def item_steps(work: KeyWork, heads: int, copies: float, group: int, processors: int) -> float:
    """Estimated time of a pass, in steps of one multiprocessor, where an item walks ``heads`` query heads.

    All steps and items shared evenly, with the penalty of drift, plus the tail, but no less than the longest item; for
    items of one length the number of rounds.
    """
    items = work.tiles * copies / heads
    sums = _BLOCK_STEPS * work.tiles * copies / group / processors if heads < group else 0.0
    longest_item = work.longest * heads + _ITEM_STEPS
    if work.longest * work.tiles <= 1.05 * work.steps:
        return math.ceil(items / processors) * longest_item + sums
    shared = (work.steps * copies + items * _ITEM_STEPS) / processors + sums
    beyond_l2 = min(max(2 * copies / heads * work.head_bytes / L2_BYTES - 1, 0.0), 1.0)
    shared *= 1 + _DRIFT * beyond_l2 * work.changes / work.tiles * (math.log2(heads) / 3) ** 2
    return max(shared + _TAIL * longest_item, longest_item)


def heads_unseen(tiles: int, copies: int, group: int, processors: int) -> int:
    """As :func:`choose_heads`, where the device must not be waited for: the most heads that leave each multiprocessor
    about four items, so that longest-first order evens out what they differ by; half of them where that leaves sixteen
    and more, against drift (docs/ffa.md); else one."""
    share = tiles * copies / processors
    heads = next((h for h in range(group, 0, -1) if group % h == 0 and share >= 3.75 * h), 1)
    return heads // 2 if heads % 2 == 0 and share >= 15 * heads else heads


def known_steps(plan: MaskPlan, rows: int, keys: int, align: int = ROW_GROUP) -> Tensor | None:
    """About :func:`tile_steps`, on the CPU; None where the host would have to look at a mask on a device."""
    if isinstance(plan.structure, Band):
        return band_steps(plan.structure, plan.q_len, plan.kv_len, rows, keys, align)
    if plan.outline is None:
        return None
    # Where a tile has 64 keys: both halves of a block are taken to have its rows.
    return -(-plan.outline.rows_BHN.flatten().repeat_interleave(BLOCK // keys) // rows)


def band_steps(band: Band, q_len: int, kv_len: int, rows: int, keys: int, align: int = ROW_GROUP) -> Tensor:
    """:func:`tile_steps` of tiles on the fixed grid, for a mask that is known without looking at its intervals."""
    begin = torch.arange(0, kv_len, keys)
    end = (begin + keys).clamp(max=kv_len)
    to_row = q_len - kv_len  # of the key that is a row's own
    first = torch.zeros_like(begin) if band.right is None else begin + to_row - band.right
    last = torch.full_like(end, q_len) if band.left is None else end + to_row + band.left
    first = first.clamp(min=0) // align * align
    return ((last.clamp(max=q_len) - first).clamp(min=0) + rows - 1) // rows


def tile_steps(plan: TilePlan, align: int = ROW_GROUP) -> Tensor:
    """Steps of ``plan.q_tile`` rows of each key tile, int64 ``[N]``: they begin at multiples of ``align``."""
    total = torch.zeros_like(plan.tile_begin, dtype=torch.int64)
    for runs, ptr in ((plan.full_runs, plan.full_ptr), (plan.partial_runs, plan.partial_ptr)):
        first = runs[:, 0].long() // align * align
        steps = (runs[:, 1] - first + plan.q_tile - 1) // plan.q_tile
        total += torch.nn.functional.pad(steps.cumsum(0), (1, 0))[ptr.long()].diff()
    return total


def make_backward_schedule(plan: TilePlan, mask_heads: int, heads: int, pack: int = 1) -> BackwardSchedule:
    """Order the key tiles of ``plan`` for items of ``heads`` query heads (all on the plan's device).

    Where the mask depends on the query head and several heads share a key/value head, these must have the same key
    tiles (a fixed grid).
    """
    if not plan.transposed:
        raise ValueError("plan: has row tiles of queries; the backward needs the transposed plan (key tiles)")
    steps = tile_steps(plan, ROW_GROUP // pack)
    counts = plan.head_ptr.diff().long()
    masks = torch.arange(len(counts), device=counts.device)
    if mask_heads == 1 or heads == 1:
        mask = owning_mask(plan)
        tile = torch.arange(len(mask), device=mask.device) - plan.head_ptr[mask]
        steps = steps * (heads // pack)
    else:
        tiles = plan.tile_begin.shape[0] // len(counts)
        steps = steps.view(-1, heads, tiles).sum(1).flatten()
        mask = masks[::heads].repeat_interleave(tiles)
        tile = torch.arange(tiles, device=masks.device).repeat(len(counts) // heads)
    order = torch.argsort(steps, descending=True, stable=True)
    entries = torch.stack((mask, tile, steps, torch.zeros_like(steps)), 1)[order]
    return BackwardSchedule(plan, heads, entries.to(torch.int32).contiguous())
