"""Rows that no rule covers: evaluate them as packed bits, only where the mask can be non-empty, in O(tile) memory.

Shape legend: B batch, H query heads, Q query rows, K keys, W words of 32 keys, C key columns (tiles of the builder).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inductor_lowering.tile_bounds import Verdict
from inductor_lowering.words import intervals_words
from magi_flex.bit_tiles import unpack_bits
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import CHEAP_INTERVALS, MaskPlan, MaskPlanBuilder

TILE_ELEMENTS = 1 << 22  # pairs evaluated at a time
_TILE_ELEMENTS_OF_A_GPU = 1 << 27  # which is waited for several times a tile
_MAX_GAPS = 4  # a band of keys may be at most this many times as wide as the columns that are evaluated in it

# (rows [begin, end), keys [begin, end)) -> int32 words that broadcast to [B, H, Q, W]
EvaluateWords = Callable[[tuple[int, int], tuple[int, int]], Tensor]
# rows [begin, end) -> what is known of the builder's tiles before they are evaluated
ClassifyTiles = Callable[[tuple[int, int]], Verdict]


class RowCollector:
    """A plan from parts of its rows that come in order.

    The parts are joined as they are while all have few intervals, else they go through a builder, which decides what
    becomes bit tiles.
    """

    def __init__(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str) -> None:
        self.sizes = (batch, heads, q_len, kv_len, device)
        self.parts: list[RowIntervals] = []
        self.builder: MaskPlanBuilder | None = None

    def add(self, intervals: RowIntervals) -> None:
        """The next rows."""
        intervals = intervals.trim()
        if intervals.max_intervals > CHEAP_INTERVALS:
            stream_rows(self._through_builder(), None, intervals)
        elif self.builder is None:
            self.parts.append(intervals)
        else:
            self.builder.add_intervals(intervals)

    def stream(
        self,
        evaluate: EvaluateWords,
        domain: RowIntervals,
        always: RowIntervals | None,
        first_row: int,
        element_cost: int = 1,
        classify: ClassifyTiles | None = None,
    ) -> None:
        """The next rows, ``first_row``, ...: see stream_rows."""
        stream_rows(self._through_builder(), evaluate, domain, always, first_row, element_cost, classify)

    def _through_builder(self) -> MaskPlanBuilder:
        if self.builder is None:
            self.builder = MaskPlanBuilder(*self.sizes)
            for part in self.parts:
                self.builder.add_intervals(part)
            self.parts.clear()
        return self.builder

    def finish(self) -> MaskPlan:
        """The plan of all rows."""
        if self.builder is not None or not self.parts:
            return self._through_builder().finish()
        batch = max(x.starts.shape[0] for x in self.parts)
        heads = max(x.starts.shape[1] for x in self.parts)
        slots, kv_len = max(x.max_intervals for x in self.parts), self.sizes[3]
        starts, ends = (
            torch.cat([_pad_slots(getattr(x.expand(batch, heads), name), slots, unused) for x in self.parts], 3)
            for name, unused in (("starts", kv_len), ("ends", 0))
        )
        return MaskPlan(RowIntervals(starts, ends, kv_len))


def _pad_slots(bounds_BHRQ: Tensor, slots: int, unused: int) -> Tensor:
    return torch.nn.functional.pad(bounds_BHRQ, (0, 0, 0, slots - bounds_BHRQ.shape[2]), value=unused)


def stream_rows(
    builder: MaskPlanBuilder,
    evaluate: EvaluateWords | None,
    domain: RowIntervals,
    always: RowIntervals | None = None,
    first_row: int = 0,
    element_cost: int = 1,
    classify: ClassifyTiles | None = None,
) -> None:
    """Give rows ``first_row``, ... of the mask to the builder: (domain AND evaluate) OR always.

    Without ``evaluate`` every pair of the domain attends.  Tiles that ``classify`` knows are not evaluated.
    ``element_cost`` is how many values the program holds for one pair; tiles shrink by it.
    """
    at_once = TILE_ELEMENTS if domain.starts.device.type == "cpu" else _TILE_ELEMENTS_OF_A_GPU
    budget = at_once // max(1, builder.batch * builder.heads * element_cost)
    reach = int((domain.ends.amax((0, 1, 2)) - domain.starts.amin((0, 1, 2))).max()) if domain.q_len else 0
    rows_at_once = builder.q_tile
    # A band of rows along a diagonal reaches as many keys farther as it has rows.
    while rows_at_once < domain.q_len and 2 * rows_at_once * min(domain.kv_len, reach + 2 * rows_at_once) <= budget:
        rows_at_once *= 2
    for begin in range(0, domain.q_len, rows_at_once):
        end = min(domain.q_len, begin + rows_at_once)
        band = domain.take_rows(slice(begin, end))
        band_always = always.take_rows(slice(begin, end)) if always is not None else None
        _stream_band(builder, evaluate, band, band_always, first_row + begin, budget, classify)


def _stream_band(
    builder: MaskPlanBuilder,
    evaluate: EvaluateWords | None,
    domain: RowIntervals,
    always: RowIntervals | None,
    first_row: int,
    budget: int,
    classify: ClassifyTiles | None,
) -> None:
    rows, kv_len, kv_tile = domain.q_len, domain.kv_len, builder.kv_tile
    lead = (builder.batch, builder.heads, rows)
    wanted_C, certain_C = _active_columns(domain, kv_tile), torch.zeros((), dtype=torch.bool)
    if classify is not None:
        verdict = classify((first_row, first_row + rows))
        wanted_C = wanted_C & verdict.possible.any((0, 1, 2))
        certain_C = verdict.certain.all((0, 1, 2))
    if always is not None:
        wanted_C = wanted_C | _active_columns(always, kv_tile)
    certain_C = certain_C.to(wanted_C.device).expand(wanted_C.shape)
    spans = [
        (begin * kv_tile, min(end * kv_tile, kv_len), certain)
        for certain, columns in ((False, wanted_C & ~certain_C), (True, wanted_C & certain_C))
        for begin, end in _runs(columns)
    ]
    if not spans:
        builder.add_intervals(RowIntervals.empty(rows, kv_len, domain.starts.device))
        return
    spans.sort()
    keys_at_once = max(1, budget // (rows * kv_tile)) * kv_tile

    def tile(begin: int, end: int, certain: bool) -> Tensor:
        words = intervals_words(domain, (begin, end))
        if evaluate is not None and not certain:
            words = words & evaluate((first_row, first_row + rows), (begin, end))
        return words if always is None else words | intervals_words(always, (begin, end))

    first, last = spans[0][0], spans[-1][1]
    if last - first <= _MAX_GAPS * sum(end - begin for begin, end, _ in spans):
        band_BHQW = torch.zeros(*lead, -(-(last - first) // 32), dtype=torch.int32, device=domain.starts.device)
        for begin, end, certain in _split(spans, keys_at_once):
            band_BHQW[..., (begin - first) // 32 : -(-(end - first) // 32)] = tile(begin, end, certain)
        builder.add_words(band_BHQW, first)
        return
    parts = []
    for begin, end, certain in _split(spans, keys_at_once):
        mask_BHQK = unpack_bits(tile(begin, end, certain))[..., : end - begin]
        parts.append(RowIntervals.from_dense(mask_BHQK.expand(*lead, end - begin)).shift(begin, kv_len))
    starts, ends = (torch.cat([getattr(x, name) for x in parts], 2) for name in ("starts", "ends"))
    builder.add_intervals(RowIntervals.build(starts, ends, kv_len))


def _active_columns(domain: RowIntervals, kv_tile: int) -> Tensor:
    """Bool ``[C]``: the key tiles in which any row of ``domain`` attends."""
    used = domain.ends > domain.starts
    columns = -(-domain.kv_len // kv_tile)
    steps_C = torch.zeros(columns + 1, dtype=torch.int64, device=domain.starts.device)
    starts, ends = domain.starts[used].long(), domain.ends[used].long()
    one = torch.ones((), dtype=torch.int64, device=starts.device)
    steps_C.index_add_(0, starts // kv_tile, one.expand(len(starts)))
    steps_C.index_add_(0, (ends - 1) // kv_tile + 1, -one.expand(len(ends)))
    return steps_C.cumsum(0)[:columns] > 0


def _runs(active_C: Tensor) -> list[tuple[int, int]]:
    """Runs [begin, end) of the true columns."""
    steps = torch.nn.functional.pad(active_C.to(torch.int8), (1, 1)).diff().tolist()
    rises = [i for i, step in enumerate(steps) if step == 1]
    falls = [i for i, step in enumerate(steps) if step == -1]
    return list(zip(rises, falls, strict=True))


def _split(spans: list[tuple[int, int, bool]], size: int) -> list[tuple[int, int, bool]]:
    return [(at, min(end, at + size), certain) for begin, end, certain in spans for at in range(begin, end, size)]
