"""Row intervals: the keys a query row attends to, as a few half-open intervals.

Query row ``q`` attends to key ``k`` iff some ``r`` has ``starts[r] <= k < ends[r]``.  The same idea appears as HSTU
functions in MagiAttention (attend in [0, F0) u [F1, F2) u ...).

Shape legend: B mask batch (1 = shared by all), H mask head (1 = shared by all), R intervals of a row, Q query rows,
K keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_NETWORK_SLOTS = 16
_CHUNK_ELEMENTS = 1 << 18  # intervals held at a time while rows are compared


def canonicalize(starts_BHRQ: Tensor, ends_BHRQ: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """Sort, clip and merge arbitrary intervals of each row into canonical form (int32, same R).

    Canonical: sorted by start, disjoint, not adjacent, within [0, kv_len]; the unused ones come last and are stored
    as ``(kv_len, 0)``, so that the minimum of starts and the maximum of ends over rows need no emptiness check.
    """
    starts = starts_BHRQ.clamp(0, kv_len).to(torch.int32)
    ends = ends_BHRQ.clamp(0, kv_len).to(torch.int32)
    empty = ends <= starts
    slots = list(zip(starts.masked_fill(empty, kv_len).unbind(2), ends.masked_fill_(empty, 0).unbind(2), strict=True))
    if len(slots) > 1:
        _sort_by_start(slots)
        _merge_sorted(slots, kv_len)
        _sort_by_start(slots)
    return torch.stack([s for s, _ in slots], 2), torch.stack([e for _, e in slots], 2)


def _sort_by_start(slots: list[tuple[Tensor, Tensor]]) -> None:
    """Order the (start, end) pairs of each row, in place: few slots by a sorting network (whole-tensor operations)."""
    if len(slots) > _NETWORK_SLOTS:
        starts, order = torch.stack([s for s, _ in slots], 2).sort(dim=2)
        ends = torch.stack([e for _, e in slots], 2).gather(2, order)
        slots[:] = zip(starts.unbind(2), ends.unbind(2), strict=True)
        return
    for i, j in _sorting_network(len(slots)):
        (start_i, end_i), (start_j, end_j) = slots[i], slots[j]
        swap = start_j < start_i
        slots[i] = torch.minimum(start_i, start_j), torch.where(swap, end_j, end_i)
        slots[j] = torch.maximum(start_i, start_j), torch.where(swap, end_i, end_j)


@functools.cache
def _sorting_network(size: int) -> tuple[tuple[int, int], ...]:
    """Comparators of Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2, algorithm M)."""
    comparators = []
    largest = 1 << max(0, (size - 1).bit_length() - 1)
    phase = largest
    while phase:
        block, offset, distance = largest, 0, phase
        while True:
            comparators += [(i, i + distance) for i in range(size - distance) if i & phase == offset]
            if block == phase:
                break
            block, offset, distance = block // 2, phase, block - phase
        phase //= 2
    return tuple(comparators)


def _merge_sorted(slots: list[tuple[Tensor, Tensor]], kv_len: int) -> None:
    """Join what overlaps or touches, in place; the joined interval takes the slot of its first member."""
    reach = [slots[0][1]]
    begins = [slots[0][1] > 0]
    for start, end in slots[1:]:
        begins.append((start > reach[-1]) & (end > 0))
        reach.append(torch.maximum(reach[-1], end))
    joined_end = reach[-1]
    for r in reversed(range(len(slots))):
        own_end = joined_end
        if r:
            joined_end = torch.where(begins[r], reach[r - 1], joined_end)
        slots[r] = slots[r][0].masked_fill(~begins[r], kv_len), own_end.masked_fill(~begins[r], 0)


def _ascending(bounds_BHRQ: Tensor) -> bool:
    return bool((bounds_BHRQ[..., 1:] >= bounds_BHRQ[..., :-1]).all())


def _count_up_to(bounds_BHQ: Tensor, kv_len: int) -> Tensor:
    """For every key, how many of the bounds are at most that key, int64 ``[B, H, K]``."""
    batch, heads, q_len = bounds_BHQ.shape
    head = torch.arange(batch * heads, device=bounds_BHQ.device).repeat_interleave(q_len)
    count = torch.bincount(head * (kv_len + 1) + bounds_BHQ.flatten(), minlength=batch * heads * (kv_len + 1))
    return count.view(batch, heads, kv_len + 1)[..., :kv_len].cumsum(2)


def _changes(intervals: RowIntervals, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that a row has and the row before has not (``step`` 1), or the other way round (-1), as (row, begin, end).

    Rows are those of all heads with one more a head, the empty one after the last; ascending.
    """
    pad = (1, 1)
    starts = torch.nn.functional.pad(intervals.starts, pad, value=intervals.kv_len).flatten(0, 1).transpose(0, 1)
    ends = torch.nn.functional.pad(intervals.ends, pad, value=0).flatten(0, 1).transpose(0, 1)
    before = [x[..., :-1].flatten(1) for x in (starts, ends)]
    here = [x[..., 1:].flatten(1) for x in (starts, ends)]
    (own_starts, own_ends), (other_starts, other_ends) = (here, before)[::step]
    changed = ((own_starts != other_starts) | (own_ends != other_ends)).any(0).nonzero().squeeze(1)
    per_row = intervals.max_intervals * (intervals.max_intervals + 1)
    parts = []
    for row in changed.split(max(1, _CHUNK_ELEMENTS // per_row)):
        # The other row's gaps: before its first interval, between two, after the last.
        other_start, other_end = other_starts[:, row], other_ends[:, row]
        gap_begins = other_end.masked_fill_(other_end <= other_start, intervals.kv_len)
        gap_begins = torch.nn.functional.pad(gap_begins, (0, 0, 1, 0), value=0)
        gap_ends = torch.nn.functional.pad(other_start, (0, 0, 0, 1), value=intervals.kv_len)
        begins = torch.maximum(own_starts[:, row].T[:, :, None], gap_begins.T[:, None]).flatten()
        ends = torch.minimum(own_ends[:, row].T[:, :, None], gap_ends.T[:, None]).flatten()
        kept = (ends > begins).nonzero().squeeze(1)
        parts.append((row[kept // per_row], begins[kept], ends[kept]))
    row, begin, end = (torch.cat(column) for column in zip(*parts, strict=True))
    return row, begin, end


@dataclass(frozen=True)
class RowIntervals:
    """Canonical key intervals of every query row (see :func:`canonicalize`).

    Attributes:
        starts: int32 ``[B, H, R, Q]``, first key of each interval.
        ends: int32 ``[B, H, R, Q]``, one past the last key; an interval with ``ends <= starts`` is empty.
        kv_len: number of keys.
    B and H are 1 where the mask does not depend on the batch entry or the query head.  R is at least 1.
    """

    starts: Tensor
    ends: Tensor
    kv_len: int

    # ---- construction -------------------------------------------------------------------------------------------

    @staticmethod
    def build(starts_BHRQ: Tensor, ends_BHRQ: Tensor, kv_len: int) -> RowIntervals:
        """From arbitrary (unsorted, overlapping, out of range) intervals, integer ``[B, H, R, Q]`` with R >= 1.

        Raises ValueError for other shapes or dtypes, and for a kv_len outside of int32.
        """
        if starts_BHRQ.dim() != 4 or starts_BHRQ.shape != ends_BHRQ.shape or not starts_BHRQ.shape[2]:
            raise ValueError(
                f"starts, ends: are {list(starts_BHRQ.shape)} and {list(ends_BHRQ.shape)}; "
                "give both as [batch, heads, intervals, rows] with at least one interval"
            )
        for name, bounds in (("starts", starts_BHRQ), ("ends", ends_BHRQ)):
            if bounds.is_floating_point() or bounds.is_complex() or bounds.dtype == torch.bool:
                raise ValueError(f"{name}: is {bounds.dtype}; give integers")
        if not 0 <= kv_len < 2**31:
            raise ValueError(f"kv_len: is {kv_len}; give a number of keys from 0 to 2**31 - 1")
        return RowIntervals(*canonicalize(starts_BHRQ, ends_BHRQ, kv_len), kv_len)

    @staticmethod
    def full(q_len: int, kv_len: int, device: torch.device | str = "cpu") -> RowIntervals:
        """Every row attends to every key; B, H and R are 1."""
        starts = torch.zeros(1, 1, 1, q_len, dtype=torch.int32, device=device)
        return RowIntervals.build(starts, starts + kv_len, kv_len)

    @staticmethod
    def empty(q_len: int, kv_len: int, device: torch.device | str = "cpu") -> RowIntervals:
        """No row attends to any key; B, H and R are 1."""
        zeros = torch.zeros(1, 1, 1, q_len, dtype=torch.int32, device=device)
        return RowIntervals.build(zeros, zeros, kv_len)

    @staticmethod
    def from_dense(mask_BHQK: Tensor) -> RowIntervals:
        """From a dense bool mask ``[B, H, Q, K]``; R is the largest number of runs in any row."""
        batch, heads, q_len, kv_len = mask_BHQK.shape
        edges = torch.nn.functional.pad(mask_BHQK.flatten(0, 2).to(torch.int8), (1, 1)).diff(dim=-1)
        row, starts = (edges == 1).nonzero(as_tuple=True)
        _, ends = (edges == -1).nonzero(as_tuple=True)
        return RowIntervals.from_runs(row, starts, ends, (batch, heads, q_len), kv_len)

    @staticmethod
    def from_runs(
        row: Tensor, starts: Tensor, ends: Tensor, shape_BHQ: tuple[int, int, int], kv_len: int
    ) -> RowIntervals:
        """From a flat list of intervals that are canonical in each row and sorted by row.

        ``row`` is int64 ``[N]``, numbered over B, H and Q; ``starts`` and ``ends`` are integers ``[N]``.  R is the
        largest number of intervals in any row.
        """
        batch, heads, q_len = shape_BHQ
        total_rows = batch * heads * q_len
        count = torch.bincount(row, minlength=total_rows)
        slots = max(1, int(count.max())) if len(row) else 1
        slot = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        bounds = []
        for values, unused in ((starts, kv_len), (ends, 0)):
            bound = torch.full((total_rows, slots), unused, dtype=torch.int32, device=row.device)
            bound[row, slot] = values.to(torch.int32)
            bounds.append(bound.view(batch, heads, q_len, slots).transpose(2, 3).contiguous())
        return RowIntervals(bounds[0], bounds[1], kv_len)

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def q_len(self) -> int:
        return self.starts.shape[3]

    @property
    def max_intervals(self) -> int:
        """R, the number of interval slots of a row."""
        return self.starts.shape[2]

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.ends.nbytes

    def row_area(self) -> Tensor:
        """Attended keys of each row, int64 ``[B, H, Q]``."""
        return (self.ends.long() - self.starts.long()).clamp_(min=0).sum(2)

    def area(self) -> int:
        """Attended (query, key) pairs, summed over B and H."""
        return int(self.row_area().sum())

    def to_dense(self) -> Tensor:
        """Dense bool mask ``[B, H, Q, K]`` (for tests and small sizes)."""
        batch, heads, _, q_len = self.starts.shape
        steps = torch.zeros(batch, heads, q_len, self.kv_len + 1, dtype=torch.int32, device=self.starts.device)
        used = (self.ends > self.starts).to(torch.int32).transpose(2, 3)
        steps.scatter_add_(3, self.starts.long().transpose(2, 3), used)
        steps.scatter_add_(3, self.ends.long().transpose(2, 3), -used)
        return steps.cumsum(3, dtype=torch.int32)[..., : self.kv_len] > 0

    # ---- batch, heads, rows ---------------------------------------------------------------------------------------

    def expand(self, batch: int, heads: int) -> RowIntervals:
        """Views with these B and H (each must be what it is now, or replace a 1)."""
        shape = (batch, heads, *self.starts.shape[2:])
        for name, size, wanted in (("batch", self.starts.shape[0], batch), ("heads", self.starts.shape[1], heads)):
            if size not in (1, wanted):
                raise ValueError(f"{name}: is {wanted}, but the mask has {size}; 1 or {size} can be expanded")
        return RowIntervals(self.starts.expand(shape), self.ends.expand(shape), self.kv_len)

    # ---- algebra ------------------------------------------------------------------------------------------------

    def trim(self) -> RowIntervals:
        """Drop interval slots that no row uses (reads the data)."""
        used = max(1, int((self.ends > self.starts).any(-1).sum(2).max())) if self.starts.numel() else 1
        if used == self.max_intervals:
            return self
        return RowIntervals(self.starts[:, :, :used].contiguous(), self.ends[:, :, :used].contiguous(), self.kv_len)

    def _aligned(self, other: RowIntervals) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if self.q_len != other.q_len or self.kv_len != other.kv_len:
            raise ValueError(
                f"other: has {other.q_len} x {other.kv_len} rows x keys, but {self.q_len} x {self.kv_len} is needed"
            )
        batch, heads = (
            theirs if mine == 1 else mine
            for mine, theirs in zip(self.starts.shape[:2], other.starts.shape, strict=False)
        )
        one, two = self.expand(batch, heads), other.expand(batch, heads)
        return (one.starts, one.ends), (two.starts, two.ends)

    def union(self, other: RowIntervals) -> RowIntervals:
        """Row-wise union; R1 + R2 slots.  B and H broadcast."""
        (s0, e0), (s1, e1) = self._aligned(other)
        return RowIntervals.build(torch.cat((s0, s1), 2), torch.cat((e0, e1), 2), self.kv_len)

    def intersect(self, other: RowIntervals) -> RowIntervals:
        """Row-wise intersection; at most R1 + R2 - 1 intervals a row.  B and H broadcast."""
        (s0, e0), (s1, e1) = self._aligned(other)
        starts = torch.maximum(s0[:, :, :, None], s1[:, :, None]).flatten(2, 3)
        ends = torch.minimum(e0[:, :, :, None], e1[:, :, None]).flatten(2, 3)
        starts, ends = canonicalize(starts, ends, self.kv_len)
        most = self.max_intervals + other.max_intervals - 1
        return RowIntervals(starts[:, :, :most].contiguous(), ends[:, :, :most].contiguous(), self.kv_len)

    def complement(self) -> RowIntervals:
        """The keys that each row does not attend to; R + 1 slots."""
        empty = self.ends <= self.starts
        ends = self.ends.masked_fill(empty, self.kv_len)
        edge = torch.zeros_like(self.starts[:, :, :1])
        return RowIntervals.build(
            torch.cat((edge, ends), 2), torch.cat((self.starts, edge + self.kv_len), 2), self.kv_len
        )

    def shift(self, offset: int | Tensor, kv_len: int | None = None) -> RowIntervals:
        """Move every interval by ``offset`` keys (an int or a tensor broadcastable to [B, H, R, Q])."""
        kv_len = self.kv_len if kv_len is None else kv_len
        empty = self.ends <= self.starts
        starts = (self.starts.long() + offset).clamp(0, kv_len)
        ends = (self.ends.long() + offset).clamp(0, kv_len)
        return RowIntervals.build(starts, ends.masked_fill(empty, 0), kv_len)

    def transpose(self, max_intervals: int) -> RowIntervals | None:
        """The mask by columns: rows and keys change roles (reads the data).

        None where some key would need more than ``max_intervals`` intervals of rows.
        """
        batch, heads, _, q_len = self.starts.shape
        if self.max_intervals == 1 and _ascending(self.starts) and _ascending(self.ends):
            # The rows that end past a key are the last ones, those that begin up to it the first ones.
            begins, ends = (_count_up_to(x.squeeze(2), self.kv_len) for x in (self.ends, self.starts))
            return RowIntervals.build(begins[:, :, None], ends[:, :, None], q_len)
        total_keys = batch * heads * self.kv_len
        appear, vanish = (_changes(self, step) for step in (1, -1))
        if sum(int((end - begin).sum()) for _, begin, end in (appear, vanish)) > 2 * max_intervals * total_keys:
            return None
        bounds = []
        for (row, begin, end), unused in ((appear, q_len), (vanish, 0)):
            size = (end - begin).long()
            which = torch.repeat_interleave(torch.arange(len(size), device=row.device), size)
            key = torch.arange(len(which), device=row.device) + (begin - size.cumsum(0) + size)[which]
            row = row[which]
            key += row // (q_len + 1) * self.kv_len
            count = torch.bincount(key, minlength=total_keys)
            slots = max(1, int(count.max())) if total_keys else 1
            if slots > max_intervals:
                return None
            bound_YR = torch.full((total_keys, slots), unused, dtype=torch.int32, device=row.device)
            if slots == 1:
                slot = torch.zeros_like(key)
            else:  # rows ascend, so a stable sort by key numbers the runs of each key
                key, order = key.sort(stable=True)
                row = row[order]
                slot = torch.arange(len(key), device=row.device) - (count.cumsum(0) - count)[key]
            bound_YR[key, slot] = (row % (q_len + 1)).to(torch.int32)
            bounds.append(bound_YR.view(batch, heads, self.kv_len, slots).transpose(2, 3).contiguous())
        return RowIntervals(bounds[0], bounds[1], q_len)

    # ---- sharding -----------------------------------------------------------------------------------------------

    def take_rows(self, rows: Tensor | slice) -> RowIntervals:
        """The same keys, only these rows, in the given order."""
        return RowIntervals(self.starts[..., rows].contiguous(), self.ends[..., rows].contiguous(), self.kv_len)

    def take_keys(self, keys: Tensor) -> RowIntervals:
        """Keep the sorted, distinct ``keys`` (not checked) and renumber them 0, 1, ...

        Each interval stays one interval, because what is kept of it is consecutive among the kept keys.
        """
        keys = keys.to(torch.int32)
        starts = torch.searchsorted(keys, self.starts.contiguous(), out_int32=True)
        ends = torch.searchsorted(keys, self.ends.contiguous(), out_int32=True)
        return RowIntervals.build(starts, ends, len(keys))
