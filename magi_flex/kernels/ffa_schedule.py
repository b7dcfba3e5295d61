"""A tile plan in the form the Hopper kernels read: row tiles in working order, with their runs.

Shape legend: B mask batch, H mask head, N row tiles over all B and H, P partial runs; Q
query rows, D head dim, G key/value heads, K keys, E value head dim, R intervals of a row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.kernels.cuda_driver import on_device
from magi_flex.tiles import TilePlan

_LANES = 128
# Keys and values of the heads that are worked on together should stay in L2 (50 MB on an H100, 60 MB on an H200).
_L2_BYTES = 32 << 20


@dataclass(frozen=True)
class Schedule:
    """Row tiles, longest first within each (mask batch, mask head).

    Attributes:
        tile_rows: int32 ``[N, 4]``: first row, end row, mask (b * H + h), number of whole key tiles to visit.
        tile_runs: int32 ``[N, 4]``: begin and end in ``partial_runs``, begin and end in ``full_runs``.
        tile_heads: int32 ``[N, 2]``: begin and end of the keys of a short step before the runs; empty where there is
            none.
        partial_runs, full_runs: int32 ``[*, 2]``: begin and end in keys; runs without keys may occur.
        count: int32 ``[1]``: N but for unused capacity, which comes last.
    """

    tile_rows: Tensor
    tile_runs: Tensor
    tile_heads: Tensor
    partial_runs: Tensor
    full_runs: Tensor
    count: Tensor

    @property
    def row_tiles(self) -> int:
        return self.tile_rows.shape[0]


class Shares(NamedTuple):
    """How the row tiles of a schedule are dealt to a kernel's blocks, for every batch entry and (packed) head.

    Attributes:
        replicas: how often a row tile is worked on: heads and batch entries that share its mask.
        replica_heads: heads among them.
        section: replicas in working order whose keys and values the second-level cache holds together.
        items: row tiles times replicas.
        grid: blocks, each on a multiprocessor of its own.
    """

    replicas: int
    replica_heads: int
    section: int
    items: int
    grid: int


def deal(
    schedule: Schedule,
    q_BHQD: Tensor,
    v_BGKE: Tensor,
    starts_BHRQ: Tensor,
    pack: int,
    columns: int,
    multiprocessors: int,
) -> Shares:
    """``starts``: of the mask's intervals; ``pack``: heads of a row tile; ``columns``: of a key and its value, as the
    kernel loads them; ``multiprocessors``: that may be used."""
    batch, heads = q_BHQD.shape[:2]
    _, kv_heads, kv_len, _ = v_BGKE.shape
    mask_batch, mask_heads = starts_BHRQ.shape[:2]
    replica_heads = heads // pack if mask_heads == 1 else 1
    replicas = replica_heads * (batch if mask_batch == 1 else 1)
    section = min(replicas, max(1, _L2_BYTES // (kv_len * columns * 2)) * (heads // kv_heads // pack))
    items = schedule.row_tiles * replicas
    return Shares(replicas, replica_heads, section, items, min(items, max(1, multiprocessors)))


def make_schedule(plan: TilePlan, narrow_tile: int) -> Schedule:
    """Order the row tiles of ``plan`` (all on the plan's device).

    Args:
        narrow_tile: a row tile's visit begins with a short step of at most that many keys, where one of its partial
            runs leaves so few over; 0: no short steps.
    """
    plan, heads = _split_short_steps(plan, narrow_tile)
    owner = owning_mask(plan)
    full_steps, partial_steps = plan.steps()
    steps = full_steps + partial_steps
    cost = 2 * steps + (heads[:, 1] > heads[:, 0])
    order = torch.argsort(owner * (1 << 32) - cost, stable=True)
    rows = torch.stack((plan.tile_begin, plan.tile_end, owner.int(), steps.int()), 1)
    runs = torch.stack((plan.partial_ptr[:-1], plan.partial_ptr[1:], plan.full_ptr[:-1], plan.full_ptr[1:]), 1)
    return Schedule(
        rows[order].contiguous(),
        runs[order].contiguous(),
        heads[order].contiguous(),
        plan.partial_runs.contiguous(),
        plan.full_runs.contiguous(),
        plan.head_ptr[-1:],
    )


def device_schedule(plan: TilePlan, narrow_tile: int) -> Schedule:
    """:func:`make_schedule` in three launches, of a plan that was built on the device, whose runs it takes over."""
    from magi_flex.kernels.schedule_triton import weigh_tiles, write_schedule

    tiles, masks = plan.tile_begin.shape[0], plan.head_ptr.shape[0] - 1
    # Every tile has room for the same number of runs.
    most_partial, most_full = (len(runs) // max(tiles, 1) for runs in (plan.partial_runs, plan.full_runs))
    device = plan.tile_begin.device
    owners, whole_steps, short_runs = torch.empty((3, tiles), dtype=torch.int32, device=device)
    sort_keys = torch.empty(tiles, dtype=torch.int64, device=device)
    grid = (-(-tiles // _LANES),)
    with on_device(device):
        weigh_tiles[grid](
            *(plan.head_ptr, plan.partial_ptr, plan.full_ptr, plan.partial_runs, plan.full_runs),
            *(owners, whole_steps, short_runs, sort_keys, masks, tiles, plan.kv_tile, narrow_tile),
            *(masks.bit_length(), most_partial, most_full, _LANES),
        )
        order = torch.argsort(sort_keys, stable=True)
        rows, runs = torch.empty((2, tiles, 4), dtype=torch.int32, device=device)
        heads = torch.empty((tiles, 2), dtype=torch.int32, device=device)
        write_schedule[grid](
            *(order, plan.tile_begin, plan.tile_end, owners, whole_steps, short_runs),
            *(plan.partial_ptr, plan.full_ptr, plan.partial_runs, rows, runs, heads, tiles, plan.kv_tile, _LANES),
        )
    return Schedule(rows, runs, heads, plan.partial_runs, plan.full_runs, plan.head_ptr[-1:])


def owning_mask(plan: TilePlan) -> Tensor:
    """The mask (b * H + h) of each row tile, int64 ``[N]``; unused capacity counts as the last one's."""
    number = torch.arange(plan.tile_begin.shape[0], device=plan.head_ptr.device, dtype=torch.int32)
    return (torch.searchsorted(plan.head_ptr, number, right=True) - 1).clamp_(max=plan.head_ptr.shape[0] - 2)


def _split_short_steps(plan: TilePlan, narrow_tile: int) -> tuple[TilePlan, Tensor]:
    """The plan without each row tile's short step, and these steps as int32 ``[N, 2]``."""
    tiles, runs = plan.tile_begin.shape[0], plan.partial_runs
    number_P = torch.arange(len(runs), device=runs.device)
    owner_P = torch.searchsorted(plan.partial_ptr, number_P, right=True, out_int32=False) - 1
    left_over_P = (runs[:, 1] - runs[:, 0]) % plan.kv_tile
    is_short_P = (left_over_P > 0) & (left_over_P <= narrow_tile) & (number_P < plan.partial_ptr[-1])
    owner_P.clamp_(max=tiles - 1)  # of unused capacity
    # The first such run of each row tile.
    none = len(runs)
    first = torch.full((tiles,), none, dtype=torch.int64, device=runs.device)
    first.scatter_reduce_(0, owner_P, torch.where(is_short_P, number_P, none), "amin")
    taken_P = is_short_P & (first[owner_P] == number_P)
    end_P = runs[:, 1] - torch.where(taken_P, left_over_P, 0)
    # A row tile without one reads the padding: an empty step.
    steps_P = torch.nn.functional.pad(torch.stack((end_P, runs[:, 1]), 1), (0, 0, 0, 1))
    trimmed = torch.stack((runs[:, 0], end_P), 1)
    return dataclasses.replace(plan, partial_runs=trimmed), steps_P[first]
