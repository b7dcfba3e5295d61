"""Rows of a sequence in dispatch order: shifting them without gathering the sequence.

Shape legend: Q local rows.
"""

from __future__ import annotations

import torch

from magi_flex.distributed.dispatch import Dispatch, expand_ranges
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.key_ranges import KeyRanges, held_pieces, overlaps


def roll_plan(dispatch: Dispatch, rank: int, shift: int) -> GroupPlan:
    """The cast that gives local row i, at position p of the sequence, the row at ``(p - shift) mod length``.

    As ``torch.roll(x, shift)``; only rows whose source is on another rank travel.
    """
    length, ranks = dispatch.length, dispatch.ranks
    wanted = _shifted(dispatch, shift)
    held = held_pieces(dispatch)
    receive = overlaps(wanted, torch.tensor([rank]), held)
    order = torch.argsort(receive.begin)
    receive = receive.select(order)
    receive = receive.select(torch.argsort(receive.owner, stable=True))
    send = overlaps(wanted, torch.arange(ranks), held.select(held.owner == rank))
    send = send.select(torch.argsort(send.begin))
    send = send.select(torch.argsort(send.unit, stable=True))
    rows = dispatch.rows(rank)
    source = torch.repeat_interleave(receive.owner, receive.rows)
    position = expand_ranges(receive.begin, receive.end)
    target = torch.searchsorted(rows, (position + shift) % max(1, length))
    return GroupPlan(
        len(rows),
        len(rows),
        expand_ranges(send.offset, send.offset + send.rows),
        torch.zeros(ranks, dtype=torch.int64).index_add_(0, send.unit, send.rows),
        torch.bincount(source, minlength=ranks),
        target,
    )


def _shifted(dispatch: Dispatch, shift: int) -> KeyRanges:
    """For each rank, where the rows that it wants are."""
    length = dispatch.length
    if length == 0:
        empty = torch.zeros(0, dtype=torch.int64)
        return KeyRanges(0, torch.zeros(dispatch.ranks + 1, dtype=torch.int64), empty, empty)
    begin = (dispatch.begin - shift) % length
    end = begin + dispatch.end - dispatch.begin
    unit = dispatch.segment_ranks()
    wraps = end > length
    begin = torch.cat((begin, torch.zeros_like(end[wraps])))
    unit = torch.cat((unit, unit[wraps]))
    end = torch.cat((end.clamp(max=length), end[wraps] - length))
    return KeyRanges.union(length, dispatch.ranks, unit, begin, end)
