"""AttnSlice lists: a mask as rectangles of query range x key range, each full or cut along diagonals (MagiAttention).

A slice with rows [q0, q1) and keys [k0, k1) holds, of its pairs,
    full        all;
    causal      k < k1 - (q1 - 1 - q): the diagonal ends in the bottom right corner;
    inv_causal  k >= k0 + (q - q0): the diagonal begins in the top left corner;
    bi_causal   both.
The mask is the union of its slices, which may overlap.

Shape legend: N slices, Q query rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import CHEAP_INTERVALS, MaskPlan, MaskPlanBuilder
from magi_flex.spans import Spans, union

SLICE_TYPES = ("full", "causal", "inv_causal", "bi_causal")

Ranges = Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True)
class AttnSlices:
    """Half-open row and key ranges, and the type of each slice."""

    q_ranges: list[tuple[int, int]]
    k_ranges: list[tuple[int, int]]
    types: list[str]


def intervals_from_attn_slices(
    q_ranges: Ranges,
    k_ranges: Ranges,
    types: Sequence[str | int],
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
) -> RowIntervals:
    """The union of the slices as row intervals, ``[1, 1, R, Q]`` with the least R.

    Args:
        q_ranges, k_ranges: N half-open (begin, end), within [0, q_len] and [0, kv_len]; empty ones are allowed.
        types: of each slice, a name of SLICE_TYPES or its index.
        q_len, kv_len: lengths of the mask.
        device: where the result lives.
    Raises ValueError for ranges that are reversed or out of bounds, unknown types, and lists of different lengths.
    """
    q_N2 = _checked_ranges("q_ranges", q_ranges, "q_len", q_len, device)
    k_N2 = _checked_ranges("k_ranges", k_ranges, "kv_len", kv_len, device)
    type_N = _type_numbers(types, device)
    if not len(q_N2) == len(k_N2) == len(type_N):
        raise ValueError(
            f"q_ranges, k_ranges, types: have {len(q_N2)}, {len(k_N2)} and {len(type_N)} entries; "
            "give one of each for every slice"
        )
    which, row = Spans(torch.arange(len(q_N2), device=device), q_N2[:, 0], q_N2[:, 1]).members()
    begin, end = k_N2[which].unbind(1)
    causal, inverse = (type_N & 1).bool()[which], (type_N & 2).bool()[which]
    end = torch.where(causal, end - (q_N2[which, 1] - 1 - row), end)
    begin = torch.where(inverse, begin + (row - q_N2[which, 0]), begin)
    merged = union(Spans(row, begin, end), kv_len)
    return RowIntervals.from_runs(merged.group, merged.begin, merged.end, (1, 1, q_len), kv_len)


def plan_from_attn_slices(
    q_ranges: Ranges,
    k_ranges: Ranges,
    types: Sequence[str | int],
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
) -> MaskPlan:
    """:func:`intervals_from_attn_slices`, with bit tiles where that is smaller for rows of many intervals."""
    intervals = intervals_from_attn_slices(q_ranges, k_ranges, types, q_len, kv_len, device)
    if intervals.max_intervals <= CHEAP_INTERVALS:
        return MaskPlan(intervals)
    builder = MaskPlanBuilder(1, 1, q_len, kv_len, device)
    builder.add_intervals(intervals)
    return builder.finish()


def to_attn_slices(intervals: RowIntervals) -> AttnSlices:
    """Disjoint slices whose union is the mask, few where neighbouring rows move by 0 or 1 key (reads the data).

    From the first row on, a slice takes as many rows as one type can hold; every interval slot is cut by itself.
    Raises ValueError for masks that differ by batch or head: convert each (batch, head) alone.
    """
    if intervals.starts.shape[:2] != (1, 1):
        batch, heads = intervals.starts.shape[:2]
        raise ValueError(f"intervals: have {batch} batch entries and {heads} heads; give one of each")
    out = AttnSlices([], [], [])
    for starts_Q, ends_Q in zip(intervals.starts[0, 0], intervals.ends[0, 0], strict=True):
        used_Q = ends_Q > starts_Q
        by_start_Q, by_end_Q = starts_Q.diff(), ends_Q.diff()
        follows_Q = used_Q[1:] & used_Q[:-1] & (by_start_Q >> 1 == 0) & (by_end_Q >> 1 == 0)
        step_Q = torch.where(follows_Q, by_start_Q * 2 + by_end_Q, -1)  # from a row to the next: a type, or -1
        step, count = step_Q.unique_consecutive(return_counts=True)
        used, starts, ends = used_Q.tolist(), starts_Q.tolist(), ends_Q.tolist()
        row = 0
        for kind, last in zip([*step.tolist(), -1], [*count.cumsum(0).tolist(), intervals.q_len], strict=True):
            if kind < 0:
                parts = [(n, n + 1, 0) for n in range(row, last) if used[n]]
                row = max(row, last)
            else:  # rows up to ``last`` belong together, but the first of them may be taken
                parts = [(row, last + 1, kind)] if row < last else []
                row = last + 1 if row < last else row
            for begin, end, kind_of_part in parts:
                out.q_ranges.append((begin, end))
                out.k_ranges.append((starts[begin], ends[end - 1]))
                out.types.append(SLICE_TYPES[kind_of_part])
    return out


def _checked_ranges(name: str, ranges: Ranges, length_name: str, length: int, device: torch.device | str) -> Tensor:
    """int64 ``[N, 2]``."""
    ranges_N2 = torch.as_tensor(ranges, device=device)
    if not ranges_N2.numel():
        return torch.zeros(0, 2, dtype=torch.int64, device=device)
    if ranges_N2.dim() != 2 or ranges_N2.shape[1] != 2 or ranges_N2.is_floating_point():
        raise ValueError(f"{name}: is {ranges_N2.dtype} {list(ranges_N2.shape)}; give integers, a (begin, end) each")
    begin, end = ranges_N2[:, 0], ranges_N2[:, 1]
    bad = ((begin < 0) | (end > length) | (begin > end)).nonzero()
    if len(bad):
        n = int(bad[0])
        raise ValueError(
            f"{name}[{n}]: is ({int(begin[n])}, {int(end[n])}); 0 <= begin <= end <= {length_name} = {length} is needed"
        )
    return ranges_N2.long()


def _type_numbers(types: Sequence[str | int], device: torch.device | str) -> Tensor:
    """int64 ``[N]``: bit 0 causal, bit 1 inverse causal."""
    numbers = []
    for n, kind in enumerate(types.tolist() if isinstance(types, Tensor) else types):
        if isinstance(kind, str) and kind in SLICE_TYPES:
            numbers.append(SLICE_TYPES.index(kind))
        elif isinstance(kind, int) and not isinstance(kind, bool) and 0 <= kind < len(SLICE_TYPES):
            numbers.append(kind)
        else:
            raise ValueError(f"types[{n}]: is {kind!r}; give one of {', '.join(SLICE_TYPES)}, or its index 0 to 3")
    return torch.tensor(numbers, dtype=torch.int64, device=device)
