"""Dispatch: which rows of the sequence each rank holds.

The work of a row is the number of keys it attends to (exact, from row intervals).  Two solvers:

- :func:`dispatch_min_heap` gives chunks in descending order of area to the least loaded rank that is not full (Graham's
  LPT rule with a capacity, as in MagiAttention).  It balances area and ignores what has to be moved.
- :func:`dispatch_banded` balances area and rows exactly and keeps neighbouring rows together.  Chunks denser than the
  mean form one queue and the others a second one, both in sequence order; every rank takes one window of each queue.
  A rank must hold the mean density, heavy rows lie above it and light rows below it, so that for any number of rows
  there is exactly one way to cut the two queues which gives each rank its rows and its area.  A rank's rows are then a
  few contiguous bands: documents stay whole, and of a long document a rank needs a prefix instead of nearly all.

Shape legend: P ranks, N row segments, C chunks, M masks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals

MAX_CHUNK = 128
CHUNKS_PER_RANK = 64
GREEDY_CHUNKS = 1 << 14


@dataclass(frozen=True)
class Dispatch:
    """Every row of ``[0, length)`` is held by exactly one rank; a rank holds its rows in ascending order.

    Attributes:
        length: rows of the whole sequence.
        segment_ptr: int64 ``[P + 1]``, segments of each rank.
        begin, end: int64 ``[N]``, row segments, ascending and not adjacent inside a rank.
    """

    length: int
    segment_ptr: Tensor
    begin: Tensor
    end: Tensor

    @staticmethod
    def from_segments(length: int, ranks: int, rank_N: Tensor, begin_N: Tensor, end_N: Tensor) -> Dispatch:
        """From segments in any order; raises ValueError unless they cover ``[0, length)`` exactly once."""
        keep = end_N > begin_N
        rank_N, begin_N, end_N = rank_N[keep], begin_N[keep], end_N[keep]
        order = torch.argsort(begin_N)
        covered = torch.cat((begin_N.new_zeros(1), end_N[order]))
        expected = torch.cat((begin_N[order], begin_N.new_tensor([length])))
        if not torch.equal(covered, expected):
            raise ValueError(f"segments: must cover rows 0 to {length} exactly once; merge overlaps and fill gaps")
        order = order[torch.argsort(rank_N[order], stable=True)]
        rank_N, begin_N, end_N = rank_N[order], begin_N[order], end_N[order]
        first = torch.ones_like(begin_N, dtype=torch.bool)
        first[1:] = (rank_N[1:] != rank_N[:-1]) | (begin_N[1:] != end_N[:-1])
        last = torch.ones_like(first)
        last[:-1] = first[1:]
        segment_ptr = torch.searchsorted(rank_N[first].contiguous(), torch.arange(ranks + 1))
        return Dispatch(length, segment_ptr, begin_N[first], end_N[last])

    @staticmethod
    def from_ranges(length: int, ranges: Sequence[Sequence[tuple[int, int]]]) -> Dispatch:
        """From the row ranges of each rank."""
        flat = [(rank, b, e) for rank, own in enumerate(ranges) for b, e in own]
        columns = torch.tensor(flat, dtype=torch.int64).reshape(-1, 3).unbind(1)
        return Dispatch.from_segments(length, len(ranges), *columns)

    @staticmethod
    def contiguous(length: int, row_counts: Sequence[int]) -> Dispatch:
        """Rank 0 holds the first ``row_counts[0]`` rows, rank 1 the next ones, ..."""
        end = torch.tensor(list(row_counts), dtype=torch.int64).cumsum(0)
        begin = torch.cat((end.new_zeros(1), end[:-1]))
        return Dispatch.from_segments(length, len(row_counts), torch.arange(len(row_counts)), begin, end)

    @property
    def ranks(self) -> int:
        return len(self.segment_ptr) - 1

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Row segments of a rank."""
        part = slice(int(self.segment_ptr[rank]), int(self.segment_ptr[rank + 1]))
        return list(zip(self.begin[part].tolist(), self.end[part].tolist(), strict=True))

    def segment_ranks(self) -> Tensor:
        """The rank of each segment, int64 ``[N]``."""
        return torch.repeat_interleave(torch.arange(self.ranks), self.segment_ptr.diff())

    def segment_offsets(self) -> Tensor:
        """Index of each segment's first row among its rank's rows, int64 ``[N]``."""
        before = torch.cat((self.begin.new_zeros(1), (self.end - self.begin).cumsum(0)))
        return before[:-1] - before[self.segment_ptr[:-1]].repeat_interleave(self.segment_ptr.diff())

    def row_counts(self) -> list[int]:
        before = torch.cat((self.begin.new_zeros(1), (self.end - self.begin).cumsum(0)))
        return before[self.segment_ptr].diff().tolist()

    def rows(self, rank: int) -> Tensor:
        """Rows of a rank, ascending, int64."""
        part = slice(int(self.segment_ptr[rank]), int(self.segment_ptr[rank + 1]))
        return expand_ranges(self.begin[part], self.end[part])

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """All rows in dispatch order (those of rank 0, then of rank 1, ...), int32 ``[length]``."""
        size, step = self.end - self.begin, self.begin + 1
        step[1:] -= self.end[:-1]
        rows = torch.ones(self.length, dtype=torch.int32, device=device)
        rows[(size.cumsum(0) - size).to(device)] = step.to(device, torch.int32)
        rows[:1] -= 1
        return rows.cumsum_(0)

    def loads(self, masks: Sequence[RowIntervals]) -> Tensor:
        """Attended pairs of each rank under each mask (mean over the mask's batch and heads), float64 ``[M, P]``."""
        out = torch.zeros(len(masks), self.ranks, dtype=torch.float64)
        for load_P, mask in zip(out, masks, strict=True):
            area = _row_areas(mask, slice(None)).cumsum(0, dtype=torch.float64).cpu()
            before = torch.nn.functional.pad(area, (1, 0))
            load_P.index_add_(0, self.segment_ranks(), before[self.end] - before[self.begin])
        return out

    def imbalance(self, masks: Sequence[RowIntervals]) -> float:
        """Slowest over mean: sum over masks of the largest load, over the sum of the mean loads (1 is perfect).

        Layers that use different masks run one after the other, so each mask has its own slowest rank.
        """
        return _imbalance(self.loads(masks))


def expand_ranges(begin_N: Tensor, end_N: Tensor) -> Tensor:
    """The integers of all half-open ranges, one range after the other, int64."""
    length_N = end_N - begin_N
    shift_N = begin_N - (length_N.cumsum(0) - length_N)
    shift = torch.repeat_interleave(shift_N, length_N)
    return shift.add_(torch.arange(len(shift), device=shift.device))


def even_row_counts(length: int, ranks: int) -> list[int]:
    """Rows of each rank, as equal as can be, larger ones first."""
    return [length // ranks + (rank < length % ranks) for rank in range(ranks)]


def dtensor_row_counts(length: int, ranks: int) -> list[int]:
    """Rows of each rank as DTensor's ``Shard`` cuts a dimension: ceil(length / ranks) each until none are left."""
    step = -(-length // ranks)
    return [min(step, max(0, length - rank * step)) for rank in range(ranks)]


def default_chunk_size(length: int, ranks: int) -> int:
    return max(1, min(MAX_CHUNK, length // (ranks * CHUNKS_PER_RANK)))


def _row_areas(mask: RowIntervals, rows: slice) -> Tensor:
    """Attended keys of each row, summed over batch, heads and slots, divided by batch * heads (float32 if needed)."""
    width = (mask.ends[..., rows] - mask.starts[..., rows]).clamp_(min=0)
    batch, heads, slots, q_len = width.shape
    if batch * heads * slots == 1:
        return width.view(q_len)
    total = width.view(-1, q_len).sum(0)
    return total if batch * heads == 1 else total.double().div_(batch * heads)


def chunk_areas(mask: RowIntervals, chunk_size: int, first_chunk: int = 0, last_chunk: int | None = None) -> Tensor:
    """Attended pairs of chunks ``first_chunk`` to ``last_chunk`` (default: all) of ``chunk_size`` rows, float64
    ``[C]``; the mean over the mask's batch and heads."""
    chunks = -(-mask.q_len // chunk_size)
    last_chunk = chunks if last_chunk is None else last_chunk
    out = torch.zeros(max(0, last_chunk - first_chunk), dtype=torch.float64)
    block = max(1, (1 << 18) // chunk_size)  # a block's temporaries stay in cache
    for first in range(first_chunk, last_chunk, block):
        last = min(first + block, last_chunk)
        area = _row_areas(mask, slice(first * chunk_size, min(last * chunk_size, mask.q_len)))
        missing = (last - first) * chunk_size - len(area)
        area = torch.nn.functional.pad(area, (0, missing)) if missing else area
        dtype = torch.float64 if area.is_floating_point() else torch.int64
        out[first - first_chunk : last - first_chunk] = area.view(last - first, chunk_size).sum(1, dtype=dtype)
    return out


def dispatch_min_heap(area_C: Tensor, chunk_size: int, length: int, row_counts: Sequence[int]) -> Dispatch:
    """Chunks in descending order of area (ties: the later chunk first) to the least loaded rank that is not full.

    A chunk that does not fit into what is left of a rank is cut, and the rest goes on as a chunk of its own.
    """
    _check_counts(length, row_counts)
    room = list(row_counts)
    heap = [(0.0, rank) for rank, count in enumerate(row_counts) if count]
    pieces: list[tuple[int, int, int]] = []
    areas = area_C.tolist()
    for chunk in torch.argsort(area_C, stable=True).flip(0).tolist():
        begin, end = chunk * chunk_size, min((chunk + 1) * chunk_size, length)
        per_row = areas[chunk] / (end - begin)
        while begin < end:
            load, rank = heapq.heappop(heap)
            rows = min(room[rank], end - begin)
            pieces.append((rank, begin, begin + rows))
            begin += rows
            room[rank] -= rows
            if room[rank]:
                heapq.heappush(heap, (load + per_row * rows, rank))
    columns = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return Dispatch.from_segments(length, len(row_counts), *columns)


def dispatch_banded(area_C: Tensor, chunk_size: int, length: int, row_counts: Sequence[int]) -> Dispatch:
    """One window of the dense chunks and one of the others for each rank (see the head of this file).

    Areas are taken as spread evenly inside a chunk; a rank's area is its share of the rows.
    """
    _check_counts(length, row_counts)
    ranks = len(row_counts)
    first_row_C = torch.arange(len(area_C)) * chunk_size
    rows_C = (length - first_row_C).clamp_(max=chunk_size)
    mean = float(area_C.sum()) / max(1, length)
    heavy_C = area_C > mean * rows_C
    queues = [torch.nonzero(heavy_C)[:, 0], torch.nonzero(~heavy_C)[:, 0]]
    rows_before = [torch.nn.functional.pad(rows_C[queue].cumsum(0), (1, 0)) for queue in queues]
    # How far the first rows of a queue are from the mean area, up in the heavy queue and down in the light one.
    excess = [
        (torch.nn.functional.pad(area_C[queue].cumsum(0), (1, 0)) - mean * rows).mul_(sign).cummax(0).values
        for queue, rows, sign in zip(queues, rows_before, (1, -1), strict=True)
    ]
    # Any number of rows of the heavy queue goes with as many of the light one as make up for its excess.  Both are
    # linear between the edges of chunks, so the edges of both queues together are all the corners of the path.
    heavy = torch.cat((rows_before[0].double(), _interpolate(excess[1], excess[0], rows_before[0].double())))
    light = torch.cat((_interpolate(excess[0], excess[1], rows_before[1].double()), rows_before[1].double()))
    both, order = torch.sort(heavy + light)
    total_P = torch.tensor(list(row_counts), dtype=torch.int64).cumsum(0).double()  # rows of both windows up to a rank
    wanted_P = _interpolate(total_P, both, heavy[order])
    heavy_cuts, total, cut = [0], 0, 0
    for wanted, count in zip(wanted_P.round().long().tolist(), row_counts, strict=True):
        light_left = int(rows_before[1][-1]) - (total - cut)
        cut = min(max(wanted, cut, cut + count - light_left), cut + count, int(rows_before[0][-1]))
        total += count
        heavy_cuts.append(cut)
    heavy_cuts_P = torch.tensor(heavy_cuts)
    light_cuts_P = torch.nn.functional.pad(total_P.long(), (1, 0)) - heavy_cuts_P
    parts = [
        _cut_queue(first_row_C[queues[i]], rows_before[i], cuts) for i, cuts in enumerate((heavy_cuts_P, light_cuts_P))
    ]
    return Dispatch.from_segments(length, ranks, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """The value at ``x`` of the line through the points (xs, ys), xs ascending; constant beyond the ends."""
    if len(xs) == 1:
        return ys.expand(x.shape)
    right = torch.searchsorted(xs, x, right=True).clamp_(1, len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    share = ((x - x0) / (x1 - x0)).nan_to_num_(1.0).clamp_(0, 1)
    return y0 + (y1 - y0) * share


def _cut_queue(first_row_C: Tensor, rows_before: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rank, begin, end) of the pieces of a queue of chunks that is cut at ``cuts`` (rows of the queue, one a rank)."""
    joins = torch.zeros(len(first_row_C), dtype=torch.bool)  # chunks that follow the one before: few runs are left
    joins[1:] = first_row_C[1:] == first_row_C[:-1] + rows_before.diff()[:-1]
    first_row, run_begin = first_row_C[~joins], rows_before[:-1][~joins]
    edges = torch.unique(torch.cat((run_begin, rows_before[-1:], cuts)))
    begin, end = edges[:-1], edges[1:]
    run = torch.searchsorted(run_begin, begin, right=True) - 1
    rank = torch.searchsorted(cuts, begin, right=True) - 1
    shift = (first_row - run_begin)[run]
    return rank, begin + shift, end + shift


def dispatch_greedy(area_MC: Tensor, chunk_size: int, length: int, row_counts: Sequence[int]) -> Dispatch:
    """As :func:`dispatch_min_heap` for several masks: a chunk goes where the largest relative load stays least."""
    _check_counts(length, row_counts)
    ranks = len(row_counts)
    share_MC = area_MC / area_MC.sum(1, keepdim=True).clamp(min=1e-300)
    load_PM = torch.zeros(ranks, len(area_MC), dtype=torch.float64)
    room = list(row_counts)
    full_P = torch.tensor([not count for count in row_counts])
    pieces: list[tuple[int, int, int]] = []
    for chunk in torch.argsort(share_MC.amax(0), stable=True).flip(0).tolist():
        begin, end = chunk * chunk_size, min((chunk + 1) * chunk_size, length)
        per_row_M = share_MC[:, chunk] / (end - begin)
        while begin < end:
            after_P = (load_PM + per_row_M * (end - begin)).amax(1).masked_fill_(full_P, torch.inf)
            rank = int(after_P.argmin())
            rows = min(room[rank], end - begin)
            pieces.append((rank, begin, begin + rows))
            begin += rows
            room[rank] -= rows
            full_P[rank] = room[rank] == 0
            load_PM[rank] += per_row_M * rows
    columns = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return Dispatch.from_segments(length, ranks, *columns)


def _check_counts(length: int, row_counts: Sequence[int]) -> None:
    if sum(row_counts) != length or min(row_counts, default=-1) < 0:
        raise ValueError(
            f"row_counts: {len(row_counts)} counts, the least {min(row_counts, default=None)}, add up to "
            f"{sum(row_counts)}; they must be at least 0 and add up to the sequence length {length}"
        )


def _imbalance(load_MP: Tensor) -> float:
    mean = float(load_MP.mean(1).sum())
    return float(load_MP.amax(1).sum()) / mean if mean else 1.0


def solve_dispatch(
    masks: Sequence[RowIntervals],
    row_counts: Sequence[int],
    chunk_size: int | None = None,
    tolerance: float = 0.02,
    area_MC: Tensor | None = None,
) -> Dispatch:
    """One dispatch for all ``masks`` (of equal q_len): layers that alternate share it.

    Bands on the summed area; where that leaves single masks out of balance by more than ``tolerance``, the greedy
    rule that watches every mask, if it does better.

    Args:
        row_counts: rows of each rank (any, they need not be equal); see :func:`even_row_counts`.
        chunk_size: rows of a chunk; default: at most 128, and at least 64 chunks a rank where the length allows it.
        area_MC: areas from :func:`chunk_areas`, if they are known already.

    Raises:
        ValueError: no mask, lengths that differ, row counts that do not add up.
    """
    if not masks:
        raise ValueError("masks: is empty; give at least one mask")
    length = masks[0].q_len
    if any(mask.q_len != length for mask in masks):
        raise ValueError(f"masks: have q_len {[mask.q_len for mask in masks]}; one dispatch needs equal lengths")
    chunk_size = default_chunk_size(length, len(row_counts)) if chunk_size is None else chunk_size
    if area_MC is None:
        area_MC = torch.stack([chunk_areas(mask, chunk_size) for mask in masks])
    best = dispatch_banded(area_MC.sum(0), chunk_size, length, row_counts)
    if len(masks) == 1:
        return best
    imbalance = best.imbalance(masks)
    if imbalance <= 1 + tolerance:
        return best
    coarse = chunk_size * max(1, -(-area_MC.shape[1] // GREEDY_CHUNKS))
    coarse_MC = torch.stack([chunk_areas(mask, coarse) for mask in masks])
    other = dispatch_greedy(coarse_MC, coarse, length, row_counts)
    return other if other.imbalance(masks) < imbalance else best
