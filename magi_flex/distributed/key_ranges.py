"""The keys that ranks need, as sorted disjoint ranges, and where each of them is held.

Shape legend: U units (ranks, or nodes), N ranges, L pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.distributed.dispatch import Dispatch
from magi_flex.intervals import RowIntervals


@dataclass(frozen=True)
class KeyRanges:
    """Half-open key ranges of every unit in CSR form; those of one unit are ascending, disjoint and not adjacent.

    Attributes:
        kv_len: number of keys.
        ptr: int64 ``[U + 1]``.
        begin, end: int64 ``[N]``.
    """

    kv_len: int
    ptr: Tensor
    begin: Tensor
    end: Tensor

    @staticmethod
    def union(kv_len: int, units: int, unit_N: Tensor, begin_N: Tensor, end_N: Tensor) -> KeyRanges:
        """The union of arbitrary non-empty ranges of each unit."""
        stride = kv_len + 1  # ranges of different units do not touch
        begin, order = torch.sort(unit_N * stride + begin_N)
        reach = (unit_N * stride + end_N)[order].cummax(0).values
        first = torch.ones_like(begin, dtype=torch.bool)
        first[1:] = begin[1:] > reach[:-1]
        last = torch.ones_like(first)
        last[:-1] = first[1:]
        begin, end = begin[first], reach[last]
        ptr = torch.searchsorted(begin, torch.arange(units + 1) * stride)
        shift = begin.div(stride, rounding_mode="floor") * stride
        return KeyRanges(kv_len, ptr, begin - shift, end - shift)

    @property
    def units(self) -> int:
        return len(self.ptr) - 1

    def unit_ids(self) -> Tensor:
        """The unit of each range, int64 ``[N]``."""
        return torch.repeat_interleave(torch.arange(self.units), self.ptr.diff())

    def grouped(self, group_size: int) -> KeyRanges:
        """The union over each ``group_size`` units in a row (of the ranks of a node)."""
        unit = self.unit_ids().div(group_size, rounding_mode="floor")
        return KeyRanges.union(self.kv_len, self.units // group_size, unit, self.begin, self.end)

    def counts(self) -> Tensor:
        """Keys of each unit, int64 ``[U]``."""
        before = torch.nn.functional.pad((self.end - self.begin).cumsum(0), (1, 0))
        return before[self.ptr].diff()


def _joined_intervals(mask: RowIntervals, row_ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """(begin, end), int32: intervals of the rows, neighbouring rows joined where their intervals overlap or touch.

    What is left to sort is a few ranges per document instead of one per row.
    """
    empty = torch.zeros(0, dtype=torch.int32)
    if not row_ranges:
        return empty, empty
    starts = torch.cat([mask.starts[..., b:e] for b, e in row_ranges], -1).flatten(0, 2).cpu()
    ends = torch.cat([mask.ends[..., b:e] for b, e in row_ranges], -1).flatten(0, 2).cpu()
    first = torch.ones_like(starts, dtype=torch.bool)
    first[:, 1:] = (starts[:, 1:] > ends[:, :-1]) | (ends[:, 1:] < starts[:, :-1])  # an empty slot is (kv_len, 0)
    group = first.view(-1).cumsum(0, dtype=torch.int32).sub_(1).long()
    groups = int(group[-1]) + 1
    begin = torch.full((groups,), mask.kv_len, dtype=torch.int32).scatter_reduce_(0, group, starts.view(-1), "amin")
    end = torch.zeros(groups, dtype=torch.int32).scatter_reduce_(0, group, ends.view(-1), "amax")
    return begin, end


def needed_ranges(mask: RowIntervals, q_dispatch: Dispatch, ranks: Sequence[int] | None = None) -> KeyRanges:
    """The keys that each rank's rows attend to for any batch entry and head, its own keys included.

    Units are the ranks, or those named in ``ranks``.
    """
    ranks = range(q_dispatch.ranks) if ranks is None else ranks
    parts = [_joined_intervals(mask, q_dispatch.ranges(rank)) for rank in ranks]
    begin = torch.cat([begin for begin, _ in parts]).long()
    end = torch.cat([end for _, end in parts]).long()
    unit = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(begin) for begin, _ in parts]))
    keep = end > begin
    return KeyRanges.union(mask.kv_len, len(parts), unit[keep], begin[keep], end[keep])


def over_ranges(rows: RowIntervals, begin_N: Tensor, end_N: Tensor) -> RowIntervals:
    """As ``take_keys``, for the keys of ascending disjoint ranges that hold every attended key; intervals may become
    adjacent."""
    if not len(begin_N):
        return RowIntervals.empty(rows.q_len, 0, rows.starts.device)
    size_N = end_N - begin_N
    before_N = size_N.cumsum(0) - size_N

    def place(bounds: Tensor) -> Tensor:
        which = (torch.searchsorted(begin_N, bounds.long(), right=True) - 1).clamp_(min=0)
        inside = (bounds - begin_N[which]).clamp_(min=0)
        return (before_N[which] + torch.minimum(inside, size_N[which])).int()

    return RowIntervals(place(rows.starts), place(rows.ends), int(size_N.sum()))


@dataclass(frozen=True)
class Pieces:
    """Key ranges that one unit needs and one owner holds, int64 ``[L]`` each.

    Attributes:
        unit: who needs it (rank or node).
        owner: the rank that holds the keys.
        begin, end: the keys.
        offset: index of ``begin`` among the owner's keys.
        stage: the stage in which the keys move.
    """

    unit: Tensor
    owner: Tensor
    begin: Tensor
    end: Tensor
    offset: Tensor
    stage: Tensor

    def select(self, which: Tensor) -> Pieces:
        """The pieces of a bool mask or an index tensor."""
        return Pieces(*(column[which] for column in self.columns()))

    def columns(self) -> tuple[Tensor, ...]:
        return self.unit, self.owner, self.begin, self.end, self.offset, self.stage

    @property
    def rows(self) -> Tensor:
        return self.end - self.begin


def held_pieces(kv_dispatch: Dispatch) -> Pieces:
    """Where every key is held, ascending by key (``unit`` and ``stage`` are 0)."""
    order = torch.argsort(kv_dispatch.begin)
    owner, begin = kv_dispatch.segment_ranks()[order], kv_dispatch.begin[order]
    zeros = torch.zeros_like(begin)
    return Pieces(zeros, owner, begin, kv_dispatch.end[order], kv_dispatch.segment_offsets()[order], zeros)


def overlaps(ranges: KeyRanges, units: Tensor, held: Pieces) -> Pieces:
    """The parts of the ``held`` pieces that each of ``units`` (indices into ``ranges``) needs.

    ``unit`` of the result is from ``units``; the rest comes from ``held``.  Sorted by (position in ``units``, order in
    ``held``, key).
    """
    stride = ranges.kv_len + 1
    shift = ranges.unit_ids() * stride
    begin_N, end_N = ranges.begin + shift, ranges.end + shift
    query_begin = (units[:, None] * stride + held.begin).flatten()
    query_end = (units[:, None] * stride + held.end).flatten()
    first = torch.searchsorted(end_N, query_begin, right=True)
    count = (torch.searchsorted(begin_N, query_end) - first).clamp_(min=0)
    query = torch.repeat_interleave(torch.arange(len(count)), count)
    hit = torch.arange(len(query)) - (count.cumsum(0) - count - first)[query]
    unit, which = query.div(max(1, len(held.begin)), rounding_mode="floor"), query % max(1, len(held.begin))
    begin = torch.maximum(ranges.begin[hit], held.begin[which])
    end = torch.minimum(ranges.end[hit], held.end[which])
    offset = held.offset[which] + begin - held.begin[which]
    return Pieces(units[unit], held.owner[which], begin, end, offset, held.stage[which])


def split_stages(pieces: Pieces, stages: int) -> Pieces:
    """Deal out the keys of every (unit, owner) pair over the stages: in key order, equally many to each.

    Each link then carries the same load in every stage, and sender and receiver find the same cut from the pair's own
    list.  Every pair's pieces must be complete.  Sorted by (unit, owner, key).
    """
    if len(pieces.begin) == 0:
        return pieces
    order = torch.argsort(pieces.begin, stable=True)
    pair = (pieces.unit * (int(pieces.owner.max()) + 1) + pieces.owner)[order]
    pair, by_pair = torch.sort(pair, stable=True)
    pieces = pieces.select(order[by_pair])
    if stages == 1:
        return pieces
    rows = pieces.rows
    before = rows.cumsum(0) - rows
    first = torch.ones_like(pair, dtype=torch.bool)
    first[1:] = pair[1:] != pair[:-1]
    index = first.cumsum(0) - 1
    position = before - before[first][index]  # of the piece inside its pair's list
    total = torch.zeros(int(index[-1]) + 1, dtype=torch.int64).index_add_(0, index, rows)[index]
    low = (position * stages).div(total, rounding_mode="floor")
    high = ((position + rows - 1) * stages).div(total, rounding_mode="floor")
    count = high - low + 1
    source = torch.repeat_interleave(torch.arange(len(count)), count)
    stage = torch.arange(len(source)) - (count.cumsum(0) - count - low)[source]
    stage_begin = -(-stage * total[source]).div(stages, rounding_mode="floor")
    stage_end = -(-(stage + 1) * total[source]).div(stages, rounding_mode="floor")
    skip = (stage_begin - position[source]).clamp_(min=0)
    stop = torch.minimum(stage_end - position[source], rows[source])
    keep = stop > skip
    source, stage, skip, stop = source[keep], stage[keep], skip[keep], stop[keep]
    begin = pieces.begin[source]
    return Pieces(
        pieces.unit[source], pieces.owner[source], begin + skip, begin + stop, pieces.offset[source] + skip, stage
    )
