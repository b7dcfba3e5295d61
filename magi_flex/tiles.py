"""Tile plans: which key runs a tile of query rows visits, for one kernel's tile sizes (CSR, O(tiles) memory).

Shape legend: B mask batch, H mask head, X batch and head together, N row tiles over all of X, R intervals of a row,
Y rows of all heads one after the other, L rows of a tile, F full runs, P partial runs, T row tiles of one head,
C key tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magi_flex import spans as span_sets
from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.spans import Spans
from magi_flex.tile_cuts import RowTiles, fixed_row_tiles, ragged_row_tiles

_CHUNK_ELEMENTS = 1 << 18  # gathered interval bounds at a time


class ExactMask(Protocol):
    """What a tile plan is built from: a MaskPlan."""

    @property
    def intervals(self) -> RowIntervals: ...

    @property
    def bit_tiles(self) -> BitTiles | None: ...


@dataclass(frozen=True)
class TilePlan:
    """Row tiles and the key runs that each visits.

    In the transposed plan queries and keys change roles: "row" tiles are tiles of keys and the runs are runs of
    queries.  ``q_tile`` always belongs to the queries and ``kv_tile`` to the keys.  Call the size of a row tile its
    *height* (q_tile, or kv_tile when transposed) and the other one the *step*: a kernel walks a run from its begin in
    steps, and what the last step has past the run's end is not part of the run.

    Attributes:
        q_tile, kv_tile: the tile sizes.
        transposed: row tiles are key tiles and the runs are query runs.
        head_ptr: int32 ``[B * H + 1]``, row tiles of each (batch, head).
        tile_begin, tile_end: int32 ``[N]``, rows of each tile, ascending; together they are all rows.  On the fixed
            grid a tile begins at a multiple of the height; ragged tiles begin at any row and have at most height rows.
        full_ptr, full_runs: int32 ``[N + 1]``, ``[F, 2]``: (begin, end) in keys; every pair attends.  A full run's
            length is a multiple of the step; in plans that are not ragged it may also end at the last key.
        partial_ptr, partial_runs: int32 ``[N + 1]``, ``[P, 2]``: the mask must be applied.
    Plans that are built on the device (magi_flex/kernels/device_plans.py) have unused capacity: row tiles past
    ``head_ptr[-1]`` are empty (begin = end = 0), entries of run lists past the last one of their ``ptr`` mean nothing.
    No run is empty.  Runs of one row tile (full and partial together) are disjoint, and ascending in each list; pairs
    outside of all runs do not attend.  On the fixed grid runs begin and end at multiples of the step (or end at the
    last key).
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

    @property
    def nbytes(self) -> int:
        tensors = (self.head_ptr, self.tile_begin, self.tile_end, self.full_ptr, self.full_runs)
        return sum(x.nbytes for x in (*tensors, self.partial_ptr, self.partial_runs))

    def steps(self) -> tuple[Tensor, Tensor]:
        """How many (full, partial) steps each row tile takes, int64 ``[N]`` each."""
        step = self.q_tile if self.transposed else self.kv_tile
        counts = []
        for ptr, runs in ((self.full_ptr, self.full_runs), (self.partial_ptr, self.partial_runs)):
            steps = (runs[:, 1].long() - runs[:, 0] + step - 1) // step
            total = torch.cat((steps.new_zeros(1), steps.cumsum(0)))
            counts.append(total[ptr.long()].diff())
        return counts[0], counts[1]


def build_tile_plan(
    plan: ExactMask, q_tile: int, kv_tile: int, transposed: bool = False, ragged: bool = False, run_align: int = 1
) -> TilePlan:
    """The runs that a kernel with these tile sizes visits, in O(rows) time and memory.

    Args:
        plan: the mask (a MaskPlan).
        q_tile, kv_tile: rows and keys of a tile.
        transposed: tiles of keys with query runs, for kernels that keep keys and values (the backward pass).
        ragged: row tiles may begin at any row, and runs at any key.  Cuts are chosen by the cost model of
            :func:`magi_flex.tile_cuts.ragged_row_tiles`.  Transposed ragged plans need the mask by columns; where
            that has many more intervals than the rows, or the mask has bit tiles, the tiles stay on the fixed grid.
        run_align: ragged plans: runs begin at multiples of it (it divides the step).

    On the fixed grid of a mask without bit tiles the classes are exact: a tile is full iff every pair inside the
    lengths attends, empty iff none does.  Tiles that overlap partial bit tiles count as partial.
    Raises ValueError for tile sizes below 1, and for a ``run_align`` that does not divide the step.
    """
    step = check_tile_sizes(q_tile, kv_tile, transposed, run_align)
    if ragged:
        by_row: RowIntervals | None = plan.intervals
        if transposed:
            few = 4 * plan.intervals.max_intervals
            by_row = plan.intervals.transpose(max_intervals=few) if plan.bit_tiles is None else None
        if by_row is not None:
            height = kv_tile if transposed else q_tile
            tiles = ragged_row_tiles(by_row, height, step, run_align)
            touched, full = _tile_spans(by_row, plan.bit_tiles, tiles, height)
            full, partial = _free_runs(touched, full, step, run_align, by_row.kv_len)
            return _assemble(q_tile, kv_tile, transposed, tiles, full, partial)
    return _grid_plan(plan, q_tile, kv_tile, transposed, short_full_steps=not ragged)


def check_tile_sizes(q_tile: int, kv_tile: int, transposed: bool, run_align: int) -> int:
    """The step.  Raises ValueError as :func:`build_tile_plan` does."""
    for name, size in (("q_tile", q_tile), ("kv_tile", kv_tile), ("run_align", run_align)):
        if size < 1:
            raise ValueError(f"{name}: is {size}; give at least 1")
    step = q_tile if transposed else kv_tile
    if step % run_align:
        raise ValueError(f"run_align: is {run_align}; give a divisor of the step, {step}")
    return step


def _grid_plan(plan: ExactMask, q_tile: int, kv_tile: int, transposed: bool, short_full_steps: bool) -> TilePlan:
    """``short_full_steps``: the last step of a full run may be cut short by the length."""
    intervals = plan.intervals
    q_len, kv_len, device = intervals.q_len, intervals.kv_len, intervals.starts.device
    heads = intervals.starts.shape[0] * intervals.starts.shape[1]
    row_tiles, col_tiles = -(-q_len // q_tile), -(-kv_len // kv_tile)
    tiles = fixed_row_tiles(heads, q_len, q_tile, device)
    touched, full = _grid_tiles(*_tile_spans(intervals, plan.bit_tiles, tiles, q_tile), kv_tile, kv_len)
    step, length = kv_tile, kv_len
    if transposed:
        touched, full = (span_sets.transpose(x, heads, row_tiles, col_tiles) for x in (touched, full))
        tiles = fixed_row_tiles(heads, kv_len, kv_tile, device)
        step, length = q_tile, q_len
    if not short_full_steps:
        full = Spans(full.group, full.begin, full.end.clamp(max=length // step)).nonempty()
    partial = span_sets.difference(touched, full, -(-length // step))
    full, partial = (Spans(x.group, x.begin * step, (x.end * step).clamp(max=length)) for x in (full, partial))
    return _assemble(q_tile, kv_tile, transposed, tiles, full, partial)


@dataclass(frozen=True)
class TileCounts:
    """Tiles of the fixed grid by class, over all of the plan's B and H."""

    full: int
    partial: int
    empty: int


def count_tiles(plan: ExactMask, q_tile: int, kv_tile: int) -> TileCounts:
    """Full, partial and empty tiles on the fixed grid."""
    full, partial = (int(x.sum()) for x in build_tile_plan(plan, q_tile, kv_tile).steps())
    batch, heads = plan.intervals.starts.shape[:2]
    total = batch * heads * -(-plan.intervals.q_len // q_tile) * -(-plan.intervals.kv_len // kv_tile)
    return TileCounts(full, partial, total - full - partial)


def block_lists(plan: ExactMask, q_block: int, kv_block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists as FlexAttention's BlockMask holds them.

    Returns:
        (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices), int32 ``[B, H, T]`` and ``[B, H, T, C]`` by
        turns; the first pair lists partial blocks.  Entries past a row's count are 0.  The index tensors have T * C
        entries whatever the mask is, so choose blocks that are large for the length.
    """
    tiles = build_tile_plan(plan, q_block, kv_block)
    batch, heads = plan.intervals.starts.shape[:2]
    row_tiles, col_tiles = -(-plan.intervals.q_len // q_block), -(-plan.intervals.kv_len // kv_block)
    lists = []
    for ptr, runs in ((tiles.partial_ptr, tiles.partial_runs), (tiles.full_ptr, tiles.full_runs)):
        row = torch.repeat_interleave(torch.arange(len(ptr) - 1, device=ptr.device), ptr.diff().long())
        begin, end = runs[:, 0].long() // kv_block, (runs[:, 1].long() + kv_block - 1) // kv_block
        which, col = Spans(row, begin, end).members()
        row = row[which]
        count = torch.bincount(row, minlength=batch * heads * row_tiles)
        slot = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        indices = torch.zeros(batch * heads * row_tiles, col_tiles, dtype=torch.int32, device=row.device)
        indices[row, slot] = col.to(torch.int32)
        lists += [count.to(torch.int32).view(batch, heads, row_tiles), indices.view(batch, heads, row_tiles, col_tiles)]
    return lists[0], lists[1], lists[2], lists[3]


# ---- touched and full keys of each row tile -------------------------------------------------------------------------


def _tile_spans(
    intervals: RowIntervals, bit_tiles: BitTiles | None, tiles: RowTiles, height: int
) -> tuple[Spans, Spans]:
    """Keys that some row of a tile attends to, and keys that every row attends to (sorted; groups are tiles)."""
    length = intervals.kv_len
    starts_RY, ends_RY = (x.flatten(0, 1).transpose(0, 1).flatten(1) for x in (intervals.starts, intervals.ends))
    touched: list[Spans] = []
    full: list[Spans] = []
    # Tiles without a simple structure: spans of their rows, and how many rows each span stands for.
    rows: list[Spans] = []
    weights: list[Tensor] = []
    has_bits_N = torch.zeros_like(tiles.begin, dtype=torch.bool)
    if bit_tiles is not None:
        spans, weight = _bit_spans(bit_tiles, tiles, intervals.q_len, length)
        has_bits_N[spans.group] = True
        rows, weights = [spans], [weight]
    at_once = max(1, _CHUNK_ELEMENTS // (intervals.max_intervals * height))
    for number_N in torch.arange(len(tiles.begin), device=has_bits_N.device).split(at_once):
        row_NL = tiles.rows(number_N, height, intervals.q_len)
        bounds = starts_RY[:, row_NL], ends_RY[:, row_NL]
        simple_touched, simple_full, other = _interval_spans(*bounds, number_N, tiles, has_bits_N)
        touched.append(simple_touched)
        full.append(simple_full)
        rows.append(other)
        weights.append(torch.ones_like(other.begin))
    spans = Spans.concat(rows)
    pieces, count = span_sets.coverage(spans, torch.cat(weights), length)
    full.append(pieces.select(count == (tiles.end - tiles.begin)[pieces.group]))
    touched.append(spans)
    return span_sets.union(Spans.concat(touched), length), span_sets.union(Spans.concat(full), length)


def _interval_spans(
    starts_RNL: Tensor, ends_RNL: Tensor, number_N: Tensor, tiles: RowTiles, has_bits_N: Tensor
) -> tuple[Spans, Spans, Spans]:
    """For the row tiles ``number_N``: touched and full keys of the simple ones, all intervals of the rest.

    Bounds are those of the tiles' rows; a short tile repeats its last row.

    Simple: neighbouring rows overlap or touch in every slot, so that a slot's union is its hull; and no slot reaches
    into the next one's hull, so that the keys common to all rows are common inside one slot.
    """
    used_RNL = ends_RNL > starts_RNL
    used_RN = used_RNL.all(2)
    begin_RN, end_RN = starts_RNL.amin(2), ends_RNL.amax(2)
    meets_RNL = (starts_RNL[..., 1:] <= ends_RNL[..., :-1]) & (starts_RNL[..., :-1] <= ends_RNL[..., 1:])
    simple_N = ((used_RN == used_RNL.any(2)) & (meets_RNL.all(2) | ~used_RN)).all(0)
    simple_N &= (end_RN[:-1] <= begin_RN[1:]).all(0) & ~has_bits_N[number_N]

    tile, slot = (used_RN & simple_N).T.nonzero(as_tuple=True)
    group = number_N[tile]
    touched = Spans(group, begin_RN[slot, tile].long(), end_RN[slot, tile].long())
    full = Spans(group, starts_RNL.amax(2)[slot, tile].long(), ends_RNL.amin(2)[slot, tile].long())

    other_N = (~simple_N).nonzero().squeeze(1)
    row_L = torch.arange(starts_RNL.shape[2], device=number_N.device)
    inside_NL = row_L < (tiles.end - tiles.begin)[number_N[other_N], None]
    slot, tile, row = (used_RNL[:, other_N] & inside_NL).nonzero(as_tuple=True)
    tile = other_N[tile]
    others = Spans(number_N[tile], starts_RNL[slot, tile, row].long(), ends_RNL[slot, tile, row].long())
    return touched, full, others


def _bit_spans(bit_tiles: BitTiles, tiles: RowTiles, q_len: int, kv_len: int) -> tuple[Spans, Tensor]:
    """Keys of the bit tiles that each row tile overlaps, and how many of its rows attend to all of them."""
    height, width = bit_tiles.q_tile, bit_tiles.kv_tile
    row_ptr_XT = bit_tiles.row_ptr.flatten(0, 1).long()
    first = tiles.begin // height
    pair, band = Spans(tiles.begin, first, (tiles.end - 1) // height + 1).members()
    overlap = torch.minimum(tiles.end[pair], (band + 1) * height) - torch.maximum(tiles.begin[pair], band * height)
    head = tiles.head[pair]
    listed = Spans(pair, row_ptr_XT[head, band], row_ptr_XT[head, band + 1])
    which, entry = listed.members()
    begin = bit_tiles.cols[entry].long() * width
    spans = Spans(pair[which], begin, (begin + width).clamp(max=kv_len))
    return spans, torch.where(bit_tiles.slot[entry] < 0, overlap[which], 0)


# ---- runs that a kernel walks ---------------------------------------------------------------------------------------


def _grid_tiles(touched: Spans, full: Spans, step: int, length: int) -> tuple[Spans, Spans]:
    """Touched and full tiles of the grid; the last tile is full where its keys inside the length are."""
    touched = Spans(touched.group, touched.begin // step, (touched.end + step - 1) // step)
    full_end = torch.where(full.end == length, (length + step - 1) // step, full.end // step)
    full = Spans(full.group, (full.begin + step - 1) // step, full_end)
    tiles = -(-length // step)
    return span_sets.union(touched, tiles), span_sets.union(full, tiles)


def _free_runs(touched: Spans, full: Spans, step: int, align: int, length: int) -> tuple[Spans, Spans]:
    """Full and partial runs that begin at any multiple of ``align``, in as few steps as cover the touched keys."""
    if align > 1:
        touched = span_sets.union(Spans(touched.group, touched.begin // align * align, touched.end), length)
    touched = _bridge_gaps(touched, step)
    size = touched.size()
    steps = (size + step - 1) // step
    # Steps begin at the run's begin, or after one short step of ``phase`` keys where that costs no further step.  The
    # phase that fits the longest stretch of full keys gives it the most full steps.
    stride = length + 1
    owner = torch.searchsorted(touched.group * stride + touched.begin, full.group * stride + full.begin, right=True) - 1
    longest = torch.zeros_like(size).scatter_reduce_(0, owner, full.size(), "amax")
    is_longest = full.size() == longest[owner]
    lead_of_full = (full.begin - touched.begin[owner])[is_longest]
    lead = torch.zeros_like(size).scatter_reduce_(0, owner[is_longest], lead_of_full, "amax")
    slack = longest % step
    least_phase = size - (steps - 1) * step
    phase = (torch.maximum(lead % step, least_phase) + align - 1) // align * align
    fits = (lead % step > 0) & (phase < step) & (phase <= lead % step + slack)
    phase = torch.where(fits, phase, 0)
    origin = (touched.begin + phase)[owner]
    first = (full.begin - origin + step - 1).div(step, rounding_mode="floor")
    last = (full.end - origin).div(step, rounding_mode="floor")
    full = Spans(full.group, origin + first * step, origin + last * step).nonempty()
    return full, span_sets.difference(touched, full, length)


def _bridge_gaps(touched: Spans, step: int) -> Spans:
    """Join neighbouring runs of a row tile where one walk over both, and the gap, takes fewer steps."""
    while True:
        steps = (touched.size() + step - 1) // step
        together = (touched.end[1:] - touched.begin[:-1] + step - 1) // step
        joins = (touched.group[1:] == touched.group[:-1]) & (together < steps[1:] + steps[:-1])
        number = joins.to(torch.int64).cumsum(0)
        # In a chain of joins every other one is taken in this pass, counted from the chain's begin.
        before_chain = torch.where(joins, 0, number).cummax(0).values
        joins &= (number - before_chain) % 2 == 1
        if not joins.any():
            return touched
        keep_begin = torch.nn.functional.pad(~joins, (1, 0), value=True)
        keep_end = torch.nn.functional.pad(~joins, (0, 1), value=True)
        touched = Spans(touched.group[keep_begin], touched.begin[keep_begin], touched.end[keep_end])


def _assemble(q_tile: int, kv_tile: int, transposed: bool, tiles: RowTiles, full: Spans, partial: Spans) -> TilePlan:
    parts = []
    for spans in (full, partial):
        count = torch.bincount(spans.group, minlength=len(tiles.begin))
        ptr = torch.nn.functional.pad(count.cumsum(0), (1, 0)).to(torch.int32)
        parts += [ptr, torch.stack((spans.begin, spans.end), 1).to(torch.int32)]
    begin, end = tiles.begin.to(torch.int32), tiles.end.to(torch.int32)
    return TilePlan(q_tile, kv_tile, transposed, tiles.head_ptr.to(torch.int32), begin, end, *parts)
