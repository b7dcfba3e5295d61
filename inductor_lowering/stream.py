"""The general mask: evaluate the program tile by tile, only where the mask can be non-empty, in O(tile) memory.

Shape legend: B batch, H query heads, Q query rows, K keys, C key columns (tiles of the plan builder's grid).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlanBuilder

TILE_ELEMENTS = 1 << 22  # mask elements evaluated at a time
_MAX_GAPS = 4  # a band of keys may be at most this many times as wide as the columns that are evaluated in it

# (rows [begin, end), keys [begin, end)) -> bool that broadcasts to [B, H, rows, keys]
EvaluateTile = Callable[[tuple[int, int], tuple[int, int]], Tensor]


def stream_rows(
    builder: MaskPlanBuilder,
    evaluate: EvaluateTile,
    domain: RowIntervals,
    always: RowIntervals | None,
    first_row: int,
    element_cost: int = 1,
) -> None:
    """Give rows ``first_row``, ... of the mask to the builder: (domain AND evaluate) OR always.

    ``element_cost`` is how many values the program holds for one mask element; tiles shrink by it.
    """
    batch, heads = builder.batch, builder.heads
    budget = TILE_ELEMENTS // max(1, batch * heads * element_cost)
    rows_at_once = max(1, budget // max(1, domain.kv_len * builder.q_tile)) * builder.q_tile
    for begin in range(0, domain.q_len, rows_at_once):
        end = min(domain.q_len, begin + rows_at_once)
        band = domain.take_rows(slice(begin, end))
        band_always = always.take_rows(slice(begin, end)) if always is not None else None
        _stream_band(builder, evaluate, band, band_always, first_row + begin, budget)


def _stream_band(
    builder: MaskPlanBuilder,
    evaluate: EvaluateTile,
    domain: RowIntervals,
    always: RowIntervals | None,
    first_row: int,
    budget: int,
) -> None:
    rows = domain.q_len
    spans = _active_keys(domain if always is None else domain.union(always), builder.kv_tile)
    if not spans:
        builder.add_intervals(RowIntervals.empty(rows, domain.kv_len, domain.starts.device))
        return
    first, last = spans[0][0], spans[-1][1]
    keys_at_once = max(1, budget // (rows * builder.kv_tile)) * builder.kv_tile

    def tile(begin: int, end: int) -> Tensor:
        mask = evaluate((first_row, first_row + rows), (begin, end))
        mask = mask.expand(builder.batch, builder.heads, rows, end - begin)
        mask = mask & _restrict(domain, begin, end).to_dense()
        return mask if always is None else mask | _restrict(always, begin, end).to_dense()

    if last - first <= _MAX_GAPS * sum(end - begin for begin, end in spans):
        band_BHQK = torch.zeros(
            builder.batch, builder.heads, rows, last - first, dtype=torch.bool, device=domain.starts.device
        )
        for begin, end in _split(spans, keys_at_once):
            band_BHQK[..., begin - first : end - first] = tile(begin, end)
        builder.add_rows(band_BHQK, first)
        return
    parts = [
        RowIntervals.from_dense(tile(begin, end)).shift(begin, domain.kv_len)
        for begin, end in _split(spans, keys_at_once)
    ]
    starts = torch.cat([x.starts for x in parts], 2)
    ends = torch.cat([x.ends for x in parts], 2)
    builder.add_intervals(RowIntervals.build(starts, ends, domain.kv_len))


def _restrict(domain: RowIntervals, begin: int, end: int) -> RowIntervals:
    """The part inside keys [begin, end), renumbered from 0."""
    starts, ends = domain.starts.clamp(begin, end) - begin, domain.ends.clamp(begin, end) - begin
    return RowIntervals(starts, ends, end - begin)


def _active_keys(domain: RowIntervals, kv_tile: int) -> list[tuple[int, int]]:
    """Spans of whole key tiles (the last one may be short) in which any row of ``domain`` attends."""
    used = domain.ends > domain.starts
    columns = -(-domain.kv_len // kv_tile)
    steps_C = torch.zeros(columns + 1, dtype=torch.int64, device=domain.starts.device)
    starts, ends = domain.starts[used].long(), domain.ends[used].long()
    one = torch.ones((), dtype=torch.int64, device=starts.device)
    steps_C.index_add_(0, starts // kv_tile, one.expand(len(starts)))
    steps_C.index_add_(0, (ends - 1) // kv_tile + 1, -one.expand(len(ends)))
    active_C = torch.nn.functional.pad((steps_C.cumsum(0) > 0).to(torch.int8), (1, 1)).diff().tolist()
    rises = [i for i, step in enumerate(active_C) if step == 1]
    falls = [i for i, step in enumerate(active_C) if step == -1]
    return [(a * kv_tile, min(b * kv_tile, domain.kv_len)) for a, b in zip(rises, falls, strict=True)]


def _split(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    return [(at, min(end, at + size)) for begin, end in spans for at in range(begin, end, size)]
