"""Tile plans: which key runs a tile of query rows visits, for one kernel's tile sizes (CSR, O(tiles) memory)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TilePlan:
    """Row tiles and their key runs; in the transposed plan the roles of queries and keys are swapped.

    Shape legend: B mask batch, H mask head, N row tiles over all B and H, F full runs, P partial runs.

    Attributes:
        q_tile, kv_tile: the most rows of a row tile, and the step in which a kernel walks a run.
        transposed: row tiles are key tiles and the runs are query runs.
        head_ptr: int32 ``[B * H + 1]``, row tiles of each (batch, head).
        tile_begin, tile_end: int32 ``[N]``, rows of each tile (ragged plans: any first row, at most q_tile rows).
        full_ptr, full_runs: int32 ``[N + 1]``, ``[F, 2]``: (begin, end) in keys; every pair attends.
        partial_ptr, partial_runs: int32 ``[N + 1]``, ``[P, 2]``: the mask must be applied.
    Runs of one row tile are ascending and disjoint; pairs outside of all runs do not attend.
    """

    q_tile: int
    kv_tile: int
    transposed: bool
    head_ptr: Tensor
    tile_begin: Tensor
    tile_end: Tensor
    full_ptr: Tensor
    full_runs: Tensor
    partial_ptr: Tensor
    partial_runs: Tensor
