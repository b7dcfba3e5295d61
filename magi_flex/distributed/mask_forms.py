"""Between MaskPlan, which kernels read, and RowIntervals alone, which stay exact under sharding."""

from __future__ import annotations

from dataclasses import replace

import torch

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.mask_outline import Outline
from magi_flex.mask_plan import CHEAP_INTERVALS, MaskPlan, MaskPlanBuilder


def to_intervals(plan: MaskPlan) -> RowIntervals:
    """The whole mask as row intervals, whatever R that takes; a row tile at a time, O(row tile x keys) memory."""
    bits = plan.bit_tiles
    if bits is None:
        return plan.intervals
    batch, heads, slots, q_len = plan.starts.shape
    parts, widest = [], 1
    for tile in range(bits.row_tiles):
        rows = slice(tile * bits.q_tile, min((tile + 1) * bits.q_tile, q_len))
        dense = plan.intervals.take_rows(rows).to_dense() | _row_tile(bits, tile).to_dense(
            rows.stop - rows.start, plan.kv_len
        )
        parts.append(RowIntervals.from_dense(dense))
        widest = max(widest, parts[-1].max_intervals)
    bounds = []
    for name, fill in (("starts", plan.kv_len), ("ends", 0)):
        padded = [
            torch.nn.functional.pad(getattr(part, name), (0, 0, 0, widest - part.max_intervals), value=fill)
            for part in parts
        ]
        bounds.append(torch.cat(padded, 3))
    return RowIntervals(bounds[0], bounds[1], plan.kv_len)


def _row_tile(bits: BitTiles, tile: int) -> BitTiles:
    """The same tiles, as if the mask had only this row tile."""
    begin, end = bits.row_ptr[..., tile].flatten(), bits.row_ptr[..., tile + 1].flatten()
    listed = torch.cat([torch.arange(b, e) for b, e in zip(begin.tolist(), end.tolist(), strict=True)])
    listed = listed.to(bits.cols.device)
    batch, heads, _ = bits.row_ptr.shape
    after = (end - begin).cumsum(0, dtype=torch.int32)
    row_ptr = torch.stack((after - (end - begin), after), 1).view(batch, heads, 2)
    return BitTiles(bits.q_tile, bits.kv_tile, row_ptr, bits.cols[listed], bits.slot[listed], bits.bits)


def to_plan(mask: RowIntervals, outline: Outline | None = None) -> MaskPlan:
    """The mask as kernels want it: intervals where they are few, else bit tiles where these are smaller.

    ``outline``: of the mask, if it is known.
    """
    if mask.max_intervals > CHEAP_INTERVALS:
        mask = mask.trim()
    if mask.max_intervals <= CHEAP_INTERVALS:
        return MaskPlan(mask, outline=outline)
    batch, heads, _, q_len = mask.starts.shape
    builder = MaskPlanBuilder(batch, heads, q_len, mask.kv_len, mask.starts.device)
    for first in range(0, q_len, builder.q_tile):
        builder.add_rows(mask.take_rows(slice(first, min(first + builder.q_tile, q_len))).to_dense())
    return replace(builder.finish(), outline=outline)
