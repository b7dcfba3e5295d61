"""Planning by all ranks of a group together: each solves its part, and the parts are gathered as plain tensors.

Shape legend: P ranks, M masks, C chunks, N ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed.agreement import group_device, mask_checksum, require_agreement
from magi_flex.distributed.dispatch import Dispatch, chunk_areas, default_chunk_size, solve_dispatch
from magi_flex.distributed.key_ranges import KeyRanges, needed_ranges, stack_ranges
from magi_flex.intervals import RowIntervals


def check_masks(masks: Sequence[RowIntervals], group: dist.ProcessGroup, options: Sequence[int] = ()) -> None:
    """Raises ValueError on every rank unless all ranks plan the same masks with the same ``options``.  A collective."""
    values: list[Tensor | int] = [len(masks), *options]
    require_agreement(group, "masks", values + [mask_checksum(mask) for mask in masks])


def gather_dispatch(masks: Sequence[RowIntervals], row_counts: Sequence[int], group: dist.ProcessGroup) -> Dispatch:
    """:func:`solve_dispatch`, the areas computed in parts.  A collective.

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
    area_MC = torch.cat(all_gather(own_MC, group), 1)[:, :chunks]
    solved = solve_dispatch(masks, row_counts, chunk_size, area_MC=area_MC)
    segments_N3 = torch.stack((solved.segment_ranks(), solved.begin, solved.end), 1).to(group_device(group))
    count = torch.tensor([len(segments_N3)], device=segments_N3.device)
    dist.broadcast(count, group=group, group_src=0)
    if group.rank() != 0:
        segments_N3 = segments_N3.new_empty(int(count), 3)
    dist.broadcast(segments_N3, group=group, group_src=0)
    return Dispatch.from_segments(length, ranks, *segments_N3.cpu().unbind(1))


def gather_needed(masks: Sequence[RowIntervals], q_dispatch: Dispatch, group: dist.ProcessGroup) -> list[KeyRanges]:
    """:func:`needed_ranges` of each mask, every rank's own rows computed by itself.  A collective."""
    own = [needed_ranges(mask, q_dispatch, [group.rank()]) for mask in masks]
    counts_PM = torch.stack(all_gather(torch.tensor([len(part.begin) for part in own]), group))
    flat = torch.cat([torch.stack((part.begin, part.end), 1) for part in own])
    most = int(counts_PM.sum(1).max())
    padded = torch.nn.functional.pad(flat, (0, 0, 0, most - len(flat)))
    gathered = [
        table[: int(counts_M.sum())].split(counts_M.tolist())
        for table, counts_M in zip(all_gather(padded, group), counts_PM, strict=True)
    ]
    return [
        stack_ranges(
            [
                KeyRanges(mask.kv_len, torch.tensor([0, len(tables[i])]), tables[i][:, 0], tables[i][:, 1])
                for tables in gathered
            ]
        )
        for i, mask in enumerate(masks)
    ]


def all_gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """``x`` of every rank (equal shapes), on the CPU.  A collective."""
    x = x.to(group_device(group)).contiguous()
    out = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(out, x, group=group)
    return [part.cpu() for part in out]
