"""Planning by all ranks of a group together: each solves its part, and the parts are gathered as plain tensors.

Shape legend: P ranks, M masks, C chunks, N ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.agreement import all_gather, group_device, mask_checksum, require_agreement
from magi_flex.distributed.dispatch import Dispatch, chunk_areas, default_chunk_size, solve_dispatch
from magi_flex.distributed.key_ranges import KeyRanges, needed_ranges, over_ranges
from magi_flex.intervals import RowIntervals
from magi_flex.mask_outline import Outline, Spread


def check_masks(masks: Sequence[RowIntervals], group: dist.ProcessGroup, options: Sequence[int] = ()) -> None:
    """Raises ValueError on every rank unless all ranks plan the same masks with the same ``options``.  A collective."""
    values: list[Tensor | int] = [len(masks), *options]
    require_agreement(group, "masks", values + [mask_checksum(mask) for mask in masks])


def gather_dispatch(masks: Sequence[RowIntervals], row_counts: Sequence[int], group: dist.ProcessGroup) -> Dispatch:
    """:func:`solve_dispatch`, its areas computed in parts.  A collective.

    All ranks take rank 0's result: it hangs on sums of fractions, which other threads or processors may round
    differently.
    """
    length, ranks = masks[0].q_len, group.size()
    chunk_size = default_chunk_size(length, ranks)
    chunks = -(-length // chunk_size)
    share = -(-chunks // ranks)
    first = min(group.rank() * share, chunks)
    own_MC = torch.zeros(len(masks), share, dtype=torch.float64)
    for own_C, mask in zip(own_MC, masks, strict=True):
        part = chunk_areas(mask, chunk_size, first, min(first + share, chunks))
        own_C[: len(part)] = part
    area_MC = all_gather(own_MC, group).transpose(0, 1).flatten(1)[:, :chunks]
    solved = solve_dispatch(masks, row_counts, chunk_size, area_MC=area_MC)
    segments_N3 = torch.stack((solved.segment_ranks(), solved.begin, solved.end), 1).to(group_device(group))
    count = torch.tensor([len(segments_N3)], device=segments_N3.device)
    dist.broadcast(count, group=group, group_src=0)
    if group.rank() != 0:
        segments_N3 = segments_N3.new_empty(int(count), 3)
    dist.broadcast(segments_N3, group=group, group_src=0)
    return Dispatch.from_segments(length, ranks, *segments_N3.cpu().unbind(1))


class Needed(NamedTuple):
    """What the ranks' rows attend to under one mask.

    Attributes:
        ranges: the keys, of each rank.
        spreads: of each rank, how its rows are spread over these keys.
    """

    ranges: KeyRanges
    spreads: list[Spread]


def needed_by_rank(mask: RowIntervals, q_dispatch: Dispatch, rank: int) -> tuple[KeyRanges, Spread]:
    """The keys that a rank's rows attend to (of one unit), and how its rows are spread over them."""
    ranges = needed_ranges(mask, q_dispatch, [rank])
    device = mask.starts.device
    rows = mask.take_rows(q_dispatch.rows(rank).to(device))
    return ranges, Outline.of(over_ranges(rows, ranges.begin.to(device), ranges.end.to(device))).spread()


def gather_needed(masks: Sequence[RowIntervals], q_dispatch: Dispatch, group: dist.ProcessGroup) -> list[Needed]:
    """Of each mask, every rank's own rows computed by itself.  A collective."""
    own = [needed_by_rank(mask, q_dispatch, group.rank()) for mask in masks]
    # A column for the number of ranges, the others for the spread.
    counts_PMC = all_gather(torch.tensor([(len(part.begin), *spread) for part, spread in own]), group)
    flat = torch.cat([torch.stack((part.begin, part.end), 1) for part, _ in own])
    last_PM = counts_PMC[..., 0].cumsum(1)
    most = int(last_PM[:, -1].max())
    gathered_PN2 = all_gather(torch.nn.functional.pad(flat, (0, 0, 0, most - len(flat))), group)
    place = torch.arange(most)
    needed = []
    for i, mask in enumerate(masks):
        end_P, count_P = last_PM[:, i], counts_PMC[:, i, 0]
        of_mask_PN = (place < end_P[:, None]) & (place >= (end_P - count_P)[:, None])
        begin, end = gathered_PN2[of_mask_PN].unbind(1)
        ranges = KeyRanges(mask.kv_len, torch.nn.functional.pad(count_P.cumsum(0), (1, 0)), begin, end)
        needed.append(Needed(ranges, [Spread(*values) for values in counts_PMC[:, i, 1:].tolist()]))
    return needed
