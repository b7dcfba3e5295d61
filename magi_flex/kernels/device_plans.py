"""Tile plans built on the GPU: a dozen launches, no waiting for the device, sizes known beforehand.

The result is a TilePlan as :func:`magi_flex.tiles.build_tile_plan` gives it, from the same cost model, with these
differences, all of them within what kernels must take:

- Arrays have a capacity that follows from the sizes alone.  Row tiles past ``head_ptr[-1]`` are empty (begin = end = 0,
  no runs), and run lists hold nothing of meaning past the last entry of their ``ptr``.
- A row tile has at most ``2 R + 2`` touched and ``2 R + 1`` full spans for R intervals a row (a power of two).  What is
  over is served as partial: the last touched span takes everything that is left, full spans too many are not listed.
  So there are at most ``2 R + 1`` full and ``4 R + 3`` partial runs a tile (every partial run ends with a touched span
  or before a full run), and the plan is right for any mask.
- Ragged tiles: every chosen stretch adds less than one tile to the ``rows / height`` of a plan without breaks, and
  there is at most one break in ``height / 4`` rows and one where a head begins.

Where rows or keys are few, or neighbouring rows alike, that is nothing but the plan that torch builds; a test compares.

Shape legend: X batch and head together, R intervals of a row, Q query rows, K keys, N row tiles (capacity), D breaks
(capacity).
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.kernels.cuda_driver import on_device
from magi_flex.mask_plan import MaskPlan
from magi_flex.tile_cuts import SHORT_STEP, TILE_OVERHEAD, RowTiles, break_spacing, fixed_row_tiles, look_ahead
from magi_flex.tiles import TilePlan, build_tile_plan

_BLOCK_ROWS = 64
_BLOCKS_AT_ONCE = 256
_LOOKS = 128  # row blocks that a key tile's program looks into, and changes that it follows
_PATH = 256  # breaks of a part of the shortest path
_PAIRS_AT_ONCE = 8192  # comparisons of a row tile's intervals that a program holds
_LANES = 256


@functools.cache
def missing() -> str | None:
    """Why plans cannot be built by our GPU kernels on this machine, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


@functools.cache
def _kernels(name: str) -> ModuleType:
    """Of the file ``<name>_triton``, imported when they are needed: Triton may be missing."""
    return importlib.import_module(f"magi_flex.kernels.{name}_triton")


def build_device_plan(
    intervals: RowIntervals, q_tile: int, kv_tile: int, transposed: bool, ragged: bool, run_align: int = 1
) -> TilePlan:
    """The tile plan of ``intervals`` (no bit tiles), enqueued on the current stream.

    Arguments are those of :func:`magi_flex.tiles.build_tile_plan`, which has checked them.  Transposed ragged plans
    count tiles by columns exactly where the starts and ends of each interval slot ascend with the rows; where they fall
    a few times the cuts are only as good as a guess, and slots without any order do not count.  The runs are exact all
    the same.
    """
    starts, ends = _padded_slots(intervals)
    batch, heads, _, q_len = starts.shape
    kv_len, device = intervals.kv_len, starts.device
    height, step = (kv_tile, q_tile) if transposed else (q_tile, kv_tile)
    rows = kv_len if transposed else q_len
    if not starts.numel() or not kv_len:
        return build_tile_plan(MaskPlan(intervals), q_tile, kv_tile, transposed)
    with on_device(device):
        bounds = _block_bounds(starts, ends) if transposed else None
        if ragged:
            sides = (starts, ends)
            if bounds is not None:
                sides = _columns(starts, ends, bounds, kv_len)
            tiles = _ragged_tiles(*sides, rows, height, step, run_align)
        else:
            tiles = _int32(fixed_row_tiles(batch * heads, rows, height, device))
        align = run_align if ragged else step
        runs = _Runs(starts, ends, kv_len, tiles, step, align, grid=not ragged)
        if bounds is None:
            lists = runs.of_row_tiles(height)
        else:
            lists = runs.of_key_tiles(bounds)
    return TilePlan(q_tile, kv_tile, transposed, tiles.head_ptr, tiles.begin, tiles.end, *lists)


def _int32(tiles: RowTiles) -> RowTiles:
    return RowTiles(*(x.to(torch.int32) for x in (tiles.head_ptr, tiles.begin, tiles.end, tiles.head)))


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _padded_slots(intervals: RowIntervals) -> tuple[Tensor, Tensor]:
    """Starts and ends, contiguous, for a power of two of intervals: kernels are compiled for each number."""
    starts, ends = intervals.starts, intervals.ends
    missing = _power_of_two(starts.shape[2]) - starts.shape[2]
    if missing:
        starts = torch.nn.functional.pad(starts, (0, 0, 0, missing), value=intervals.kv_len)
        ends = torch.nn.functional.pad(ends, (0, 0, 0, missing))
    return starts.contiguous(), ends.contiguous()


def room(slots: int) -> tuple[int, int]:
    """Touched and full spans that a tile has room for."""
    return 2 * slots + 2, 2 * slots + 1


# ---- runs -----------------------------------------------------------------------------------------------------------


class _Bounds:
    """Bounds of row blocks, int32 ``[4, X * R, blocks]``, and how slots are used, ``[X * R, 3]`` (see the kernel)."""

    def __init__(self, values: Tensor, use: Tensor) -> None:
        self.values, self.use = values, use


def _block_bounds(starts: Tensor, ends: Tensor) -> _Bounds:
    batch, heads, slots, q_len = starts.shape
    all_slots, blocks = batch * heads * slots, -(-q_len // _BLOCK_ROWS)
    values = torch.empty(4, all_slots, blocks, dtype=torch.int32, device=starts.device)
    use = torch.zeros(all_slots, 3, dtype=torch.int32, device=starts.device)
    use[:, 0].fill_(q_len)
    at_once = 16
    grid = (-(-blocks // at_once), all_slots)
    _kernels("key_runs").block_bounds[grid](starts, ends, values, use, q_len, all_slots, blocks, at_once, _BLOCK_ROWS)
    return _Bounds(values, use)


class _Runs:
    """Counts and then writes the runs of all tiles."""

    def __init__(
        self, starts: Tensor, ends: Tensor, kv_len: int, tiles: RowTiles, step: int, align: int, grid: bool
    ) -> None:
        self.starts, self.ends, self.kv_len, self.tiles = starts, ends, kv_len, tiles
        self.step, self.align, self.grid = step, align, grid
        self.touched, self.full = room(starts.shape[2])

    def of_row_tiles(self, height: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots = self.starts.shape[2]
        entries = _power_of_two(slots) * _power_of_two(height)
        at_once = min(entries, max(1, _PAIRS_AT_ONCE // entries))
        sizes = (self.starts.shape[3], self.kv_len, slots, self.step, self.align)
        options = (_power_of_two(slots), _power_of_two(height), at_once)
        return self._run(_kernels("runs").row_tile_runs, (self.starts, self.ends), sizes, options)

    def of_key_tiles(self, bounds: _Bounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, all_slots, blocks = bounds.values.shape
        slots, q_len = self.starts.shape[2:]
        sizes = (q_len, blocks, slots, all_slots, self.step, self.align, _LOOKS)
        options = (min(_BLOCKS_AT_ONCE, _power_of_two(blocks)), _BLOCK_ROWS)
        return self._run(_kernels("key_runs").key_tile_runs, (self.starts, self.ends, bounds.values), sizes, options)

    def _run(
        self, kernel: object, inputs: tuple[Tensor, ...], sizes: tuple[int, ...], options: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tiles = (self.tiles.begin, self.tiles.end, self.tiles.head)
        lanes = _power_of_two(max(self.touched, self.full) + 1)
        count, device = len(self.tiles.begin), self.starts.device

        def launch(totals: Tensor, lists: tuple[Tensor, ...], write: bool) -> None:
            kernel[(count,)](  # type: ignore[index]
                *(*inputs, *tiles, totals, *lists, *sizes, *options),
                *(lanes, self.touched, self.full, self.grid, write),
            )

        counts = torch.empty(count, dtype=torch.int64, device=device)
        launch(counts, (counts,) * 4, write=False)
        totals = counts.cumsum(0)
        del counts  # the lists, made now, are what takes memory
        partial_ptr, full_ptr = (torch.empty(count + 1, dtype=torch.int32, device=device) for _ in range(2))
        partial_runs, full_runs = (
            torch.empty(count * most, 2, dtype=torch.int32, device=device)
            for most in (self.touched + self.full, self.full)
        )
        launch(totals, (partial_ptr, full_ptr, partial_runs, full_runs), write=True)
        return full_ptr, full_runs, partial_ptr, partial_runs


# ---- ragged tiles ---------------------------------------------------------------------------------------------------


def _columns(starts: Tensor, ends: Tensor, bounds: _Bounds, kv_len: int) -> tuple[Tensor, Tensor]:
    """For each slot the rows that hold a key, int32 ``[B, H, R, K]`` (see the kernel)."""
    batch, heads, slots, q_len = starts.shape
    columns = [torch.empty(batch, heads, slots, kv_len, dtype=torch.int32, device=starts.device) for _ in range(2)]
    grid = (-(-kv_len // _LANES), batch * heads * slots)
    _kernels("cuts").column_bounds[grid](
        starts, ends, bounds.use, *columns, q_len, kv_len, q_len.bit_length() + 1, _LANES
    )
    return columns[0], columns[1]


def _ragged_tiles(starts: Tensor, ends: Tensor, rows: int, height: int, step: int, align: int) -> RowTiles:
    batch, heads, slots, _ = starts.shape
    device, count, cuts = starts.device, batch * heads, _kernels("cuts")
    total = count * rows
    stretch, ahead = break_spacing(height), look_ahead(step)
    buckets = -(-rows // stretch)
    bounds = (starts, ends)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    best = zeros(count, buckets, dtype=torch.int64)
    at_once = 64
    window = _power_of_two(at_once + ahead)
    cuts.weigh_breaks[(-(-rows // at_once), count)](
        *bounds, best, rows, slots, stretch, buckets, ahead, max(2, step // 2), at_once, window
    )
    most_breaks = count * (buckets + 1)
    ranks = torch.nn.functional.pad(best > 0, (1, 0), value=True).flatten().cumsum(0, dtype=torch.int32)
    breaks = torch.full((most_breaks + 2,), total, dtype=torch.int32, device=device)
    cuts.list_breaks[(-(-most_breaks // _LANES),)](best, ranks, breaks, most_breaks, buckets, rows, _LANES)
    first_break = ranks.view(count, buckets + 1)[:, 0] - 1
    del best, ranks  # what is large goes as soon as it is used

    bits = most_breaks.bit_length() + 1
    model = {"OVERHEAD": int(4 * TILE_OVERHEAD), "SHORT": int(4 * SHORT_STEP), "ROWS": _power_of_two(height)}
    whole_totals = (breaks[:-1].diff() // height).cumsum(0, dtype=torch.int32)
    from_front, from_end = zeros(2, most_breaks, dtype=torch.int64)
    if total >= height:
        cuts.whole_tile_costs[(total // height,)](
            *(*bounds, breaks, whole_totals, from_front, from_end, most_breaks, rows, slots, height, step, bits),
            **model,
        )
    reach = (2 * height - 1) // stretch + 4  # breaks that a stretch may end at
    costs = torch.empty(most_breaks, reach, dtype=torch.int64, device=device)
    counts_from_end = zeros(most_breaks)
    cuts.stretch_costs[(most_breaks,)](
        *(*bounds, breaks, from_front, from_end, costs, counts_from_end),
        *(most_breaks, total, rows, slots, height, step, reach),
        **model,
    )
    came_from = torch.empty_like(breaks)
    cuts.shortest_paths[(most_breaks,)](
        breaks, costs, came_from, total, rows, height, reach, _power_of_two(reach), _PATH, num_warps=1
    )
    del costs, from_front, from_end, whole_totals
    tiles, stretch_end, is_from_end = zeros(3, most_breaks)
    cuts.choose_stretches[(most_breaks,)](
        breaks, came_from, counts_from_end, tiles, stretch_end, is_from_end, total, rows, height, _PATH, num_warps=1
    )
    tile_totals = tiles.cumsum(0, dtype=torch.int32)
    most_tiles = total // height + most_breaks
    begin, end, head = (torch.empty(most_tiles, dtype=torch.int32, device=device) for _ in range(3))
    cuts.write_tiles[(-(-most_tiles // _LANES),)](
        *(breaks, tiles, tile_totals, stretch_end, is_from_end, begin, end, head),
        *(most_breaks, most_tiles, rows, height, align, bits, _LANES),
    )
    before = tile_totals[first_break] - tiles[first_break]
    return RowTiles(torch.cat((before, tile_totals[-1:])), begin, end, head)
