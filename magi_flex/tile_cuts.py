"""Where row tiles begin: on a fixed grid, or where a cost model says.

Shape legend: R intervals of a row, X batch and head together, Q query rows, Y rows of all heads one after the other,
N row tiles over all of X, D breaks over all of X, V levels of a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.spans import Spans

# Costs in key steps, rough on purpose: they only have to rank cuts.
TILE_OVERHEAD = 1.0  # of a row tile: load the queries, drain the pipeline, write the output
SHORT_STEP = 0.25  # of a step that keys only partly fill: it cannot be a full step, so it is masked


@dataclass(frozen=True)
class RowTiles:
    """Row tiles of every (batch, head): int64 ``[X + 1]`` head_ptr, and ``[N]`` begin, end, head."""

    head_ptr: Tensor
    begin: Tensor
    end: Tensor
    head: Tensor

    def rows(self, number_N: Tensor, height: int, q_len: int) -> Tensor:
        """Rows of the tiles ``number_N``, counted over all heads, ``[N, height]``; short tiles repeat the last."""
        offset = torch.arange(height, device=number_N.device)
        row_NL = torch.minimum(self.begin[number_N, None] + offset, self.end[number_N, None] - 1)
        return row_NL + self.head[number_N, None] * q_len


def fixed_row_tiles(heads: int, rows: int, height: int, device: torch.device) -> RowTiles:
    """Tiles that begin at the multiples of ``height``, for each of ``heads`` (batch, head) pairs."""
    begin = torch.arange(0, rows, height, device=device)
    count = len(begin)
    begin = begin.repeat(heads)
    head = torch.arange(heads, device=device).repeat_interleave(count)
    return RowTiles(torch.arange(heads + 1, device=device) * count, begin, (begin + height).clamp(max=rows), head)


def ragged_row_tiles(intervals: RowIntervals, height: int, step: int, align: int = 1) -> RowTiles:
    """Row tiles of at most ``height`` rows that begin where it saves key steps.

    Cost model: a row tile costs TILE_OVERHEAD plus the steps that cover its rows' keys, ceil(hull / step) summed over
    interval slots, where a slot's hull is what lies between the least start and the greatest end of the tile's rows; a
    hull that is no multiple of the step costs SHORT_STEP more.  Every row tile costs that much however few rows it has.

    *Breaks* are rows whose intervals do not follow on the row before (an end moves by more than one key: a document's
    first row), and where the keys exchanged plus the rows to the next such row (a step of them at most) are at least
    half a step.  The rows between chosen breaks are cut every ``height`` rows, counted from the first of them or, where
    the stretch holds no other break, from the last, whichever costs less (columns of a causal document all end with the
    document, so tiles that end with it have whole steps).  Choosing the breaks is a shortest path over all of them.
    Where breaks are denser than one in height / 4 rows the largest of each such stretch of a head counts.  Stretches
    over several breaks are considered up to 2 * height rows past the first of these: documents longer than a tile gain
    nothing from sharing more.

    Cuts counted from the last row are rounded up to multiples of ``align``, where that keeps tiles within the height:
    in columns of a causal document keys begin with the tile, so its runs then begin at such multiples too.
    """
    batch, heads, _, rows = intervals.starts.shape
    device = intervals.starts.device
    if not batch * heads * rows:
        return fixed_row_tiles(batch * heads, rows, height, device)
    # All heads are one sequence of rows in which tiles end with each head.
    starts_RY, ends_RY = (x.flatten(0, 1).transpose(0, 1).flatten(1) for x in (intervals.starts, intervals.ends))
    breaks_D = _breaks(starts_RY, ends_RY, rows, height, step)
    cuts, from_end = _choose_cuts(starts_RY, ends_RY, breaks_D, rows, height, step)
    size = cuts.diff()
    count = (size + height - 1) // height
    shift = torch.where(from_end, size - count * height, 0)
    round_up = -(cuts[:-1] % rows + shift) % align
    shift += torch.where(from_end & (shift + round_up <= 0), round_up, 0)
    which, nth = Spans(count, torch.zeros_like(count), count).members()
    begin = cuts[which] + (nth * height + shift[which]).clamp(min=0)
    end = torch.cat((begin[1:], cuts[-1:]))
    head = begin // rows
    head_ptr = torch.searchsorted(head, torch.arange(batch * heads + 1, device=device))
    return RowTiles(head_ptr, begin - head * rows, end - head * rows, head)


def break_spacing(height: int) -> int:
    """Rows of the stretches of which only the largest break counts."""
    return max(1, height // 4)


def look_ahead(step: int) -> int:
    """Rows up to the next break that count for a break's weight, at most: more than make it a break anyway."""
    return max(2, step)


def _breaks(starts_RY: Tensor, ends_RY: Tensor, rows: int, height: int, step: int) -> Tensor:
    """Candidate rows to begin a tile at, ascending; the first row of every head and the end of the last are there."""
    total = starts_RY.shape[1]
    size_RY = (ends_RY - starts_RY).clamp(min=0)
    begin_moved_RY = (starts_RY[:, 1:] - starts_RY[:, :-1]).abs()
    end_moved_RY = (ends_RY[:, 1:] - ends_RY[:, :-1]).abs()
    jump = ((begin_moved_RY > 1) | (end_moved_RY > 1)).any(0).nonzero().squeeze(1)
    moved_RD = begin_moved_RY[:, jump] + end_moved_RY[:, jump]
    other_keys_D = torch.minimum(moved_RD, size_RY[:, jump + 1] + size_RY[:, jump]).sum(0)
    row = jump + 1
    following = torch.minimum(torch.cat((row[1:], row.new_tensor([total])[: len(row)])), (row // rows + 1) * rows)
    rows_ahead_D = (following - row).clamp(max=look_ahead(step))
    weight = other_keys_D + rows_ahead_D
    is_break = (weight >= max(2, step // 2)) & (row % rows > 0)
    row, weight = row[is_break], weight[is_break]
    stretch = break_spacing(height)
    buckets = -(-rows // stretch)
    bucket = row // rows * buckets + row % rows // stretch
    weight = weight * total + (total - row)  # ties go to the first
    best = weight.new_full((total // rows * buckets,), -1).scatter_reduce_(0, bucket, weight, "amax")
    row = row[weight == best[bucket]]
    return torch.cat((row, torch.arange(0, total + 1, rows, device=row.device))).sort().values


def _choose_cuts(
    starts_RY: Tensor, ends_RY: Tensor, breaks_D: Tensor, rows: int, height: int, step: int
) -> tuple[Tensor, Tensor]:
    """Breaks to cut at, ends of heads included, and for each stretch between two whether tiles count from its end."""
    device = breaks_D.device
    size = breaks_D.diff()
    segment = torch.arange(len(size), device=device)
    # Every stretch from break i to break j of one head: whole tiles up to the break after i, then the tail.
    head_end = (breaks_D[:-1] // rows + 1) * rows
    furthest = torch.searchsorted(breaks_D, torch.minimum(breaks_D[1:] + 2 * height, head_end), right=True) - 1
    i, j = Spans(segment, segment + 1, furthest + 1).members()
    count = size // height
    whole, nth_whole = Spans(segment, torch.zeros_like(count), count).members()
    tail_begin = breaks_D[:-1] + count * height
    tail_tiles = (breaks_D[j] - tail_begin[i] + height - 1) // height
    pair, nth_tail = Spans(i, torch.zeros_like(i), tail_tiles).members()
    from_front = breaks_D[whole] + nth_whole * height
    from_end = breaks_D[whole + 1] - (nth_whole + 1) * height
    tail = tail_begin[i[pair]] + nth_tail * height
    begin = torch.cat((from_front, from_end, tail, breaks_D[:-1]))
    end = torch.cat((from_front + height, from_end + height, torch.minimum(tail + height, breaks_D[j[pair]])))
    end = torch.cat((end, breaks_D[1:] - count * height))
    costs = _tile_costs(starts_RY, ends_RY, begin, end, height, step)
    front_cost, end_cost, tail_cost, rest_cost = costs.split([len(whole), len(whole), len(pair), len(size)])
    zero = torch.zeros(len(size), dtype=torch.float64, device=device)
    end_cost = zero.index_add(0, whole, end_cost) + torch.where(size % height > 0, rest_cost, 0)
    pair_cost = zero.index_add(0, whole, front_cost)[i].index_add(0, pair, tail_cost)
    counts_from_end = (j == i + 1) & (end_cost[i] < pair_cost)
    pair_cost = torch.where(counts_from_end, end_cost[i], pair_cost)
    path = _shortest_path(i.tolist(), j.tolist(), pair_cost.tolist(), len(breaks_D))
    first_pair = torch.searchsorted(i, segment)  # of each break: the stretch to the next one
    chosen = torch.tensor(path, dtype=torch.int64, device=device)
    to_next = chosen.diff() == 1
    return breaks_D[chosen], to_next & counts_from_end[first_pair[chosen[:-1]]]


def _tile_costs(starts_RY: Tensor, ends_RY: Tensor, begin: Tensor, end: Tensor, height: int, step: int) -> Tensor:
    """Cost of row tiles of the rows [begin, end), at most ``height`` each, in key steps, float64.

    Empty ranges (their costs do not count) are taken as one row.
    """
    rows, device = starts_RY.shape[1], begin.device
    size = (end - begin).clamp(min=1)
    # Table entry (level, q) is for 2^level rows from q; the tables of all levels lie one after the other.  Two entries
    # of a level cover any range of 2^level to 2^(level + 1) rows.
    spans = [1 << level for level in range(min(height, rows).bit_length())]
    spans_V = torch.tensor(spans, device=device)
    level = torch.searchsorted(spans_V, size, right=True) - 1
    lengths_V = rows + 1 - spans_V
    first = (lengths_V.cumsum(0) - lengths_V)[level] + begin
    second = first + size - spans_V[level]
    cost = torch.full(begin.shape, TILE_OVERHEAD, dtype=torch.float64, device=device)
    for least, greatest in zip(starts_RY, ends_RY, strict=True):
        least_levels, greatest_levels = [least], [greatest]
        for span in spans[:-1]:
            least_levels.append(torch.minimum(least_levels[-1][:-span], least_levels[-1][span:]))
            greatest_levels.append(torch.maximum(greatest_levels[-1][:-span], greatest_levels[-1][span:]))
        least, greatest = torch.cat(least_levels), torch.cat(greatest_levels)
        hull = torch.maximum(greatest[first], greatest[second]) - torch.minimum(least[first], least[second])
        hull = hull.clamp(min=0)
        cost += (hull + step - 1) // step + (hull % step > 0) * SHORT_STEP
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
