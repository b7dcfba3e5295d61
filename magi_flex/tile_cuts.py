"""Where row tiles begin: on a fixed grid, or where a cost model says.

Shape legend: R intervals of a row, X batch and head together, Q query rows, N row tiles over all of X, D breaks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals

# A row tile's own cost (load the queries, drain the pipeline, write the output) in key steps.
TILE_OVERHEAD = 1.0


@dataclass(frozen=True)
class RowTiles:
    """Row tiles of every (batch, head): int64 ``[X + 1]`` head_ptr, and ``[N]`` begin, end, head."""

    head_ptr: Tensor
    begin: Tensor
    end: Tensor
    head: Tensor


def fixed_row_tiles(heads: int, rows: int, height: int, device: torch.device) -> RowTiles:
    """Tiles that begin at the multiples of ``height``, for each of ``heads`` (batch, head) pairs."""
    begin = torch.arange(0, rows, height, device=device)
    count = len(begin)
    begin = begin.repeat(heads)
    head = torch.arange(heads, device=device).repeat_interleave(count)
    return RowTiles(torch.arange(heads + 1, device=device) * count, begin, (begin + height).clamp(max=rows), head)


def ragged_row_tiles(intervals: RowIntervals, height: int, step: int) -> RowTiles:
    """Row tiles of at most ``height`` rows that begin where it saves key steps.

    Cost model: a row tile costs TILE_OVERHEAD plus the steps that cover its rows' keys, ceil(hull / step) summed over
    interval slots, where a slot's hull is what lies between the least start and the greatest end of the tile's rows.
    Every row tile costs that much however few rows it has.

    *Breaks* are rows whose intervals do not follow on the row before (an end moves by more than one key: a document's
    first row), and where the keys exchanged plus the rows to the next such row are at least half a step.  The rows
    between chosen breaks are cut every ``height`` rows; choosing the breaks is a shortest path over all of them.
    Where breaks are denser than one in height / 4 rows the largest of each such stretch counts.  Runs of rows over
    several breaks are considered up to 2 * height rows past the first of these: documents longer than a tile gain
    nothing from sharing more.
    """
    batch, heads, _, rows = intervals.starts.shape
    device = intervals.starts.device
    begins: list[Tensor] = []
    for b in range(batch):
        for h in range(heads):
            starts_RQ, ends_RQ = intervals.starts[b, h], intervals.ends[b, h]
            breaks = _breaks(starts_RQ, ends_RQ, height, step)
            cuts = _choose_breaks(starts_RQ, ends_RQ, breaks, height, step)
            count = (cuts.diff() + height - 1) // height
            which = torch.repeat_interleave(torch.arange(len(count), device=device), count)
            nth = torch.arange(len(which), device=device) - (count.cumsum(0) - count)[which]
            begins.append(cuts[which] + nth * height)
    counts = torch.tensor([len(x) for x in begins], device=device)
    begin = torch.cat(begins) if begins else torch.zeros(0, dtype=torch.int64, device=device)
    end = torch.cat([torch.nn.functional.pad(x, (0, 1), value=rows)[1:] for x in begins]) if begins else begin
    head = torch.repeat_interleave(torch.arange(batch * heads, device=device), counts)
    return RowTiles(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), begin, end, head)


def _breaks(starts_RQ: Tensor, ends_RQ: Tensor, height: int, step: int) -> Tensor:
    """Candidate rows to begin a tile at, ascending, with row 0 first and the number of rows last."""
    rows = starts_RQ.shape[1]
    size_RQ = (ends_RQ - starts_RQ).clamp(min=0)
    begin_moved_RQ = (starts_RQ[:, 1:] - starts_RQ[:, :-1]).abs()
    end_moved_RQ = (ends_RQ[:, 1:] - ends_RQ[:, :-1]).abs()
    jump = ((begin_moved_RQ > 1) | (end_moved_RQ > 1)).any(0).nonzero().squeeze(1)
    moved_RD = begin_moved_RQ[:, jump] + end_moved_RQ[:, jump]
    other_keys_D = torch.minimum(moved_RD, size_RQ[:, jump + 1] + size_RQ[:, jump]).sum(0)
    row = jump + 1
    rows_ahead_D = torch.nn.functional.pad(row, (0, 1), value=rows).diff()
    weight = other_keys_D + rows_ahead_D
    is_break = weight >= max(2, step // 2)
    row, weight = row[is_break], weight[is_break]
    stretch = max(1, height // 4)
    bucket = row // stretch
    weight = weight * rows + (rows - row)  # ties go to the first
    best = weight.new_full((rows // stretch + 1,), -1).scatter_reduce_(0, bucket, weight, "amax")
    row = row[weight == best[bucket]]
    return torch.nn.functional.pad(torch.nn.functional.pad(row, (1, 0)), (0, 1), value=rows)


def _choose_breaks(starts_RQ: Tensor, ends_RQ: Tensor, breaks_D: Tensor, height: int, step: int) -> Tensor:
    """The breaks at which to cut (the first and last entry always): shortest path in the cost model."""
    if len(breaks_D) <= 2:
        return breaks_D if breaks_D[-1] > 0 else breaks_D[:1]
    device = breaks_D.device
    size = breaks_D.diff()
    count = size // height  # whole tiles between a break and the next
    origin = torch.arange(len(size), device=device)
    # Every stretch from break i to break j: whole tiles up to the break after i, then the tail.
    furthest = torch.searchsorted(breaks_D, breaks_D[1:] + 2 * height, right=True) - 1
    ends_per_origin = furthest - origin
    i = torch.repeat_interleave(origin, ends_per_origin)
    j = i + 1 + torch.arange(len(i), device=device) - (ends_per_origin.cumsum(0) - ends_per_origin)[i]
    tail_begin = breaks_D[:-1] + count * height
    tail_tiles = (breaks_D[j] - tail_begin[i] + height - 1) // height
    whole = torch.repeat_interleave(origin, count)
    whole_nth = torch.arange(len(whole), device=device) - (count.cumsum(0) - count)[whole]
    pair = torch.repeat_interleave(torch.arange(len(i), device=device), tail_tiles)
    pair_nth = torch.arange(len(pair), device=device) - (tail_tiles.cumsum(0) - tail_tiles)[pair]
    begin = torch.cat((breaks_D[whole] + whole_nth * height, tail_begin[i][pair] + pair_nth * height))
    end = torch.cat((begin[: len(whole)] + height, torch.minimum(begin[len(whole) :] + height, breaks_D[j][pair])))
    cost = _tile_costs(starts_RQ, ends_RQ, begin, end, step)
    whole_cost = torch.zeros(len(size), dtype=cost.dtype, device=device).index_add_(0, whole, cost[: len(whole)])
    pair_cost = whole_cost[i].index_add(0, pair, cost[len(whole) :])
    return breaks_D[_shortest_path(i.tolist(), j.tolist(), pair_cost.tolist(), len(breaks_D))]


def _tile_costs(starts_RQ: Tensor, ends_RQ: Tensor, begin: Tensor, end: Tensor, step: int) -> Tensor:
    """Cost of a row tile of the rows [begin, end), in key steps, float64."""
    cost = torch.full(begin.shape, TILE_OVERHEAD, dtype=torch.float64, device=begin.device)
    size = end - begin
    least, greatest, span = starts_RQ, ends_RQ, 1
    # ``least[q]`` covers ``span`` rows from q; two of them cover any range of span to 2 * span rows.
    while len(begin) and span <= int(size.max()):
        mine = ((size >= span) & (size < 2 * span)).nonzero().squeeze(1)
        first, second = begin[mine], end[mine] - span
        hull = torch.maximum(greatest[:, first], greatest[:, second])
        hull = hull - torch.minimum(least[:, first], least[:, second])
        cost[mine] += ((hull.clamp(min=0) + step - 1) // step).sum(0)
        least = torch.minimum(least[:, :-span], least[:, span:])
        greatest = torch.maximum(greatest[:, :-span], greatest[:, span:])
        span *= 2
    return cost


def _shortest_path(origins: list[int], targets: list[int], costs: list[float], nodes: int) -> list[int]:
    """Nodes of the cheapest path from the first to the last; edges go up and are sorted by origin."""
    best = [math.inf] * nodes
    came_from = [0] * nodes
    best[0] = 0.0
    for origin, target, cost in zip(origins, targets, costs, strict=True):
        reached = best[origin] + cost
        if reached < best[target]:
            best[target], came_from[target] = reached, origin
    path = [nodes - 1]
    while path[-1]:
        path.append(came_from[path[-1]])
    return path[::-1]
