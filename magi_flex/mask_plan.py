"""MaskPlan: what a mask became, in the form every kernel reads.

mask = row intervals, or bit tiles where a row tile needs too many intervals (the two never overlap).

Shape legend: B mask batch, H mask head (1 = shared), T row tiles, Q query rows, K keys, W 32-bit words.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles, count_bits, pack_bits
from magi_flex.intervals import RowIntervals
from magi_flex.mask_outline import Outline
from magi_flex.mask_structure import Structure
from magi_flex.tiles import TilePlan, build_tile_plan

__all__ = ["BitTiles", "MaskPlan", "MaskPlanBuilder"]

CHEAP_INTERVALS = 8  # up to here a kernel masks a row's intervals for less than it costs to read bits
MOST_INTERVALS = 32  # no plan has more: kernels loop over R, and the canonical mask_mod is unrolled
_BAND_ELEMENTS = 1 << 22  # dense elements that from_dense encodes at a time


@dataclass(frozen=True)
class MaskPlan:
    """An exact mask in O(tokens) memory.  Rows that have bit tiles have no intervals, and the other way round.

    ``structure`` and ``outline`` are given where they are known without looking at the intervals; None says nothing
    about the mask.
    ``memo`` holds what kernels derive from the plan, as long as it lives (``kernels/plan_cache.py``).
    """

    intervals: RowIntervals
    bit_tiles: BitTiles | None = None
    structure: Structure | None = None
    outline: Outline | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are without the memo, which may hold what cannot leave the process."""
        return MaskPlan, (self.intervals, self.bit_tiles, self.structure, self.outline)

    @staticmethod
    def from_dense(mask_BHQK: Tensor, max_intervals: int = CHEAP_INTERVALS) -> MaskPlan:
        """From a dense bool mask ``[B, H, Q, K]``; see :class:`MaskPlanBuilder` for what becomes of each row."""
        if mask_BHQK.dim() != 4 or mask_BHQK.dtype != torch.bool:
            raise ValueError(
                f"mask: is {mask_BHQK.dtype} {list(mask_BHQK.shape)}; give a bool tensor [batch, heads, q_len, kv_len]"
            )
        batch, heads, q_len, kv_len = mask_BHQK.shape
        builder = MaskPlanBuilder(batch, heads, q_len, kv_len, mask_BHQK.device, max_intervals)
        tiles = max(1, _BAND_ELEMENTS // max(1, batch * heads * builder.q_tile * kv_len))
        for rows_BHQK in mask_BHQK.split(tiles * builder.q_tile, dim=2):
            builder.add_rows(rows_BHQK)
        return builder.finish()

    def with_outline(self) -> MaskPlan:
        """The plan with what hosts want to know of a mask on a device: one transfer, unless it is known already or the
        mask has bit tiles."""
        if self.bit_tiles is not None or self.structure is not None or self.outline is not None:
            return self
        return replace(self, outline=Outline.of(self.intervals))

    @property
    def starts(self) -> Tensor:
        return self.intervals.starts

    @property
    def ends(self) -> Tensor:
        return self.intervals.ends

    @property
    def q_len(self) -> int:
        return self.intervals.q_len

    @property
    def kv_len(self) -> int:
        return self.intervals.kv_len

    @property
    def device(self) -> torch.device:
        return self.intervals.starts.device

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that the plan consists of."""
        bits = self.bit_tiles
        return self.starts, self.ends, *(() if bits is None else (bits.row_ptr, bits.cols, bits.slot, bits.bits))

    @functools.cached_property
    def counts_changes(self) -> bool:
        """Whether its tensors count writes to them, which inference tensors do not."""
        return not any(x.is_inference() for x in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.intervals.nbytes + (self.bit_tiles.nbytes if self.bit_tiles else 0)

    def area(self) -> int:
        """Attended (query, key) pairs, summed over the plan's B and H."""
        area = self.intervals.area()
        if self.bit_tiles is not None:
            area += int(self.bit_tiles.tile_area(self.q_len, self.kv_len).sum())
        return area

    def to_dense(self) -> Tensor:
        """Dense bool mask ``[B, H, Q, K]`` (for tests and small sizes)."""
        dense = self.intervals.to_dense()
        return dense if self.bit_tiles is None else dense | self.bit_tiles.to_dense(self.q_len, self.kv_len)

    def tiles(self, q_tile: int, kv_tile: int, transposed: bool = False, ragged: bool = False) -> TilePlan:
        """The runs of tiles that a kernel visits; see :func:`magi_flex.tiles.build_tile_plan`."""
        return build_tile_plan(self, q_tile, kv_tile, transposed, ragged)


class MaskPlanBuilder:
    """A MaskPlan from dense rows that arrive in order, a few row tiles at a time, in O(plan) memory.

    A row tile whose rows need at most ``max_intervals`` key intervals becomes intervals.  Beyond that, the row tiles
    that become bit tiles are those that make the whole plan smallest: R intervals cost 8 R bytes for every row of the
    mask, so a single row tile must not raise R for all.

        builder = MaskPlanBuilder(batch, heads, q_len, kv_len, device)
        for band_BHQK in ...:            # bool, a multiple of builder.q_tile rows (the last one may have fewer)
            builder.add_rows(band_BHQK)
        plan = builder.finish()
    """

    q_tile = 128
    kv_tile = 128

    def __init__(
        self,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        device: torch.device | str,
        max_intervals: int = CHEAP_INTERVALS,
    ):
        if max_intervals < 1:
            raise ValueError(f"max_intervals: is {max_intervals}; give at least 1")
        self.batch, self.heads, self.q_len, self.kv_len = batch, heads, q_len, kv_len
        self.device = torch.device(device)
        self.max_intervals = max_intervals
        self._row_tiles = -(-q_len // self.q_tile)
        self._col_tiles = -(-kv_len // self.kv_tile)
        self._rows_done = 0
        # Row tiles are numbered over B, H and T.  Each is held as runs (where few or smaller) or as bits.
        self._runs: list[tuple[Tensor, Tensor, Tensor]] = []  # row (over B, H, Q), start, end
        self._needs: list[tuple[Tensor, Tensor, Tensor]] = []  # row tiles held as runs: number, R, bytes as bits
        self._bits: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # row tile, col, is partial, bits of partial ones

    def add_rows(self, mask_BHQK: Tensor, first_key: int = 0) -> None:
        """The next rows, bool ``[B, H, rows, keys]``, of the keys from ``first_key`` on; no other key attends.

        ``first_key`` is a multiple of ``kv_tile``, and so is the number of keys unless it reaches ``kv_len``.
        """
        batch, heads, rows, keys = mask_BHQK.shape
        left = self.q_len - self._rows_done
        if (batch, heads) != (self.batch, self.heads) or rows > left:
            raise ValueError(
                f"mask: is {list(mask_BHQK.shape)}; [{self.batch}, {self.heads}, at most {left}, keys] is needed"
            )
        end = first_key + keys
        if first_key % self.kv_tile or end > self.kv_len or (end % self.kv_tile and end != self.kv_len):
            raise ValueError(
                f"mask: has the keys from {first_key} to {end}; both must be multiples of {self.kv_tile}, or the end "
                f"the last key, {self.kv_len}"
            )
        missing = -keys % 32
        self.add_words(pack_bits(torch.nn.functional.pad(mask_BHQK, (0, missing)) if missing else mask_BHQK), first_key)

    def add_words(self, words_BHQW: Tensor, first_key: int = 0) -> None:
        """As add_rows, with the keys packed as pack_bits does; bits past ``kv_len`` must be 0."""
        rows, words = words_BHQW.shape[2:]
        tiles, tile_T = self._next_row_tiles(rows)
        if not words_BHQW.numel():
            return
        padding = (0, -words % (self.kv_tile // 32), 0, tiles * self.q_tile - rows)
        padded = torch.nn.functional.pad(words_BHQW, padding) if any(padding) else words_BHQW
        self._encode(padded.reshape(len(tile_T), self.q_tile, -1), tile_T, first_key // self.kv_tile)

    def add_intervals(self, intervals: RowIntervals) -> None:
        """The next rows, in canonical form; B and H may be 1.  Rows of many intervals cost less as words."""
        if intervals.kv_len != self.kv_len:
            raise ValueError(f"intervals: have {intervals.kv_len} keys; {self.kv_len} are needed")
        intervals = intervals.expand(self.batch, self.heads)
        tiles, tile_T = self._next_row_tiles(intervals.q_len)
        if not tile_T.numel():
            return
        used_GQR = (intervals.ends > intervals.starts).flatten(0, 1).transpose(1, 2)
        head, row, _ = used_GQR.nonzero(as_tuple=True)
        starts = intervals.starts.flatten(0, 1).transpose(1, 2)[used_GQR]
        ends = intervals.ends.flatten(0, 1).transpose(1, 2)[used_GQR]
        tile = tile_T.view(-1, tiles)[head, row // self.q_tile]
        row = self._global_row(tile, row)
        need_GQ = torch.nn.functional.pad(used_GQR.sum(2), (0, tiles * self.q_tile - intervals.q_len))
        # Bytes as bits: the tiles in which a run begins or ends are about those that are partial.
        cols = torch.cat((starts, ends - 1)).long() // self.kv_tile
        cells = tile.repeat(2) * self._col_tiles + cols
        partial_T = torch.bincount(cells.unique() // self._col_tiles, minlength=self._all_row_tiles)[tile_T]
        bit_bytes_T = partial_T * (self.q_tile * self.kv_tile // 8 + 8)
        need_T = need_GQ.unflatten(1, (tiles, self.q_tile)).amax(2).flatten()
        self._needs.append((tile_T, need_T, bit_bytes_T))
        self._runs.append((row, starts, ends))

    def _next_row_tiles(self, rows: int) -> tuple[int, Tensor]:
        """How many row tiles of each head ``rows`` more rows are, and their numbers over B, H and T."""
        left = self.q_len - self._rows_done
        if rows > left or (rows % self.q_tile and rows != left):
            raise ValueError(f"mask: has {rows} rows; give a multiple of {self.q_tile}, or the {left} that are left")
        tiles = -(-rows // self.q_tile)
        head = torch.arange(self.batch * self.heads, device=self.device)[:, None] * self._row_tiles
        tile = torch.arange(tiles, device=self.device) + self._rows_done // self.q_tile
        self._rows_done += rows
        return tiles, (head + tile).flatten()

    @property
    def _all_row_tiles(self) -> int:
        return self.batch * self.heads * self._row_tiles

    def _encode(self, words_TQW: Tensor, tile_T: Tensor, first_col: int) -> None:
        """Hold these row tiles as runs or as bits."""
        rises_TQW, falls_TQW = _edges(words_TQW)
        runs_TQ = count_bits(rises_TQW).sum(2, dtype=torch.int64)
        need_T = runs_TQ.amax(1)
        full_TC, partial_TC = self._classify(words_TQW, tile_T, first_col)
        bit_bytes_T = self._bit_bytes(full_TC, partial_TC)
        as_runs_T = self._as_runs(need_T, 8 * runs_TQ.sum(1), bit_bytes_T)
        self._needs.append((tile_T[as_runs_T], need_T[as_runs_T], bit_bytes_T[as_runs_T]))
        row, starts = _positions(rises_TQW[as_runs_T].flatten(0, 1))
        _, ends = _positions(falls_TQW[as_runs_T].flatten(0, 1))
        first_key = first_col * self.kv_tile
        row = self._global_row(tile_T[as_runs_T][row // self.q_tile], row)
        self._runs.append((row, starts + first_key, ends + first_key))
        as_bits_T = ~as_runs_T
        self._hold_bits(words_TQW[as_bits_T], tile_T[as_bits_T], full_TC[as_bits_T], partial_TC[as_bits_T], first_col)

    def _as_runs(self, need_T: Tensor, run_bytes_T: Tensor, bit_bytes_T: Tensor) -> Tensor:
        """Row tiles to hold as runs for now."""
        return (need_T <= self.max_intervals) | ((need_T <= MOST_INTERVALS) & (run_bytes_T <= bit_bytes_T))

    def _global_row(self, tile: Tensor, row: Tensor) -> Tensor:
        head, tile_in_head = tile // self._row_tiles, tile % self._row_tiles
        return head * self.q_len + tile_in_head * self.q_tile + row % self.q_tile

    def _classify(self, words_TQW: Tensor, tile_T: Tensor, first_col: int) -> tuple[Tensor, Tensor]:
        """Which tiles of each row tile are full (inside the lengths), and which partial."""
        cols = words_TQW.shape[2] * 32 // self.kv_tile
        area_TC = count_bits(words_TQW).unflatten(2, (cols, -1)).sum((1, 3), dtype=torch.int64)
        rows_T = (self.q_len - tile_T % self._row_tiles * self.q_tile).clamp(max=self.q_tile)
        keys_C = self.kv_len - torch.arange(first_col, first_col + cols, device=self.device) * self.kv_tile
        full_TC = area_TC == rows_T[:, None] * keys_C.clamp(max=self.kv_tile)
        return full_TC, (area_TC > 0) & ~full_TC

    def _bit_bytes(self, full_TC: Tensor, partial_TC: Tensor) -> Tensor:
        return partial_TC.sum(1) * (self.q_tile * self.kv_tile // 8 + 8) + full_TC.sum(1) * 8

    def _hold_bits(
        self, words_TQW: Tensor, tile_T: Tensor, full_TC: Tensor, partial_TC: Tensor, first_col: int
    ) -> None:
        tile, col = (full_TC | partial_TC).nonzero(as_tuple=True)
        words_TCQW = words_TQW.unflatten(2, (full_TC.shape[1], -1)).transpose(1, 2)
        self._bits.append((tile_T[tile], col + first_col, partial_TC[tile, col], words_TCQW[partial_TC]))

    def finish(self) -> MaskPlan:
        """The plan of all rows."""
        if self._rows_done != self.q_len:
            raise ValueError(f"add_rows: got {self._rows_done} of {self.q_len} rows")
        if not self._runs:
            empty = RowIntervals.empty(self.q_len, self.kv_len, self.device)
            return MaskPlan(empty.expand(self.batch, self.heads))
        row, starts, ends = (torch.cat(parts) for parts in zip(*self._runs, strict=True))
        tile, need, bit_bytes = (torch.cat(parts) for parts in zip(*self._needs, strict=True))
        slots = self._choose_slots(need, bit_bytes)
        to_bits = torch.zeros(self._all_row_tiles, dtype=torch.bool, device=self.device)
        to_bits[tile[need > slots]] = True
        tile_of_run = row // self.q_len * self._row_tiles + row % self.q_len // self.q_tile
        moved = to_bits[tile_of_run]
        self._expand(tile_of_run[moved], row[moved], starts[moved], ends[moved])
        row, order = row[~moved].sort(stable=True)
        starts, ends = starts[~moved][order], ends[~moved][order]
        shape = (self.batch, self.heads, self.q_len)
        return MaskPlan(RowIntervals.from_runs(row, starts, ends, shape, self.kv_len), self._to_bit_tiles())

    def _choose_slots(self, need_T: Tensor, bit_bytes_T: Tensor) -> int:
        """R: of all that keep row tiles of up to ``max_intervals`` as intervals, the one with the smallest plan."""
        fits = need_T[need_T <= self.max_intervals]
        least = max(1, int(fits.max()) if fits.numel() else 1)
        need = torch.cat((need_T.clamp(min=least), need_T.new_tensor([least])))
        bit_bytes = torch.cat((bit_bytes_T, bit_bytes_T.new_zeros(1)))
        need, order = need.sort()
        as_bits_up_to = bit_bytes[order].cumsum(0)
        slots, count = need.unique_consecutive(return_counts=True)
        as_bits = as_bits_up_to[-1] - as_bits_up_to[count.cumsum(0) - 1]
        slots, as_bits = slots[slots <= max(least, MOST_INTERVALS)], as_bits[slots <= max(least, MOST_INTERVALS)]
        return int(slots[(8 * slots * self.batch * self.heads * self.q_len + as_bits).argmin()])

    def _expand(self, tile: Tensor, row: Tensor, starts: Tensor, ends: Tensor) -> None:
        """Hold row tiles as bits that were held as runs."""
        if not tile.numel():
            return
        tile, order = tile.sort(stable=True)
        row, starts, ends = row[order], starts[order].long(), ends[order].long()
        tiles, count = tile.unique_consecutive(return_counts=True)
        first_col, last = int(starts.min()) // self.kv_tile, -(-int(ends.max()) // self.kv_tile)
        first_key, width = first_col * self.kv_tile, (last - first_col) * self.kv_tile
        at_once = max(1, _BAND_ELEMENTS // max(1, self.q_tile * width))
        for tiles_T, count_T in zip(tiles.split(at_once), count.split(at_once), strict=True):
            runs = int(count_T.sum())
            local_tile = torch.repeat_interleave(torch.arange(len(tiles_T), device=self.device), count_T)
            local_row = row[:runs] % self.q_len % self.q_tile
            steps_TQK = torch.zeros(len(tiles_T), self.q_tile, width + 1, dtype=torch.int8, device=self.device)
            steps_TQK[local_tile, local_row, starts[:runs] - first_key] = 1
            steps_TQK[local_tile, local_row, ends[:runs] - first_key] = -1  # runs of a row neither touch nor overlap
            words_TQW = pack_bits(steps_TQK.cumsum(2, dtype=torch.int8)[..., :width].to(torch.bool))
            self._hold_bits(words_TQW, tiles_T, *self._classify(words_TQW, tiles_T, first_col), first_col)
            row, starts, ends = row[runs:], starts[runs:], ends[runs:]

    def _to_bit_tiles(self) -> BitTiles | None:
        if not any(tile.numel() for tile, *_ in self._bits):
            return None
        tile, col, partial = (torch.cat(parts) for parts in list(zip(*self._bits, strict=True))[:3])
        slot = torch.where(partial, partial.cumsum(0) - 1, -1)
        order = (tile * self._col_tiles + col).argsort()
        counts = torch.bincount(tile, minlength=self._all_row_tiles)
        ptr = counts.cumsum(0).view(self.batch, self.heads, self._row_tiles)
        row_ptr = torch.cat(((ptr - counts.view_as(ptr))[..., :1], ptr), 2)
        return BitTiles(
            self.q_tile,
            self.kv_tile,
            row_ptr.to(torch.int32),
            col[order].to(torch.int32),
            slot[order].to(torch.int32),
            torch.cat([bits.flatten(2) for *_, bits in self._bits]),
        )


def _edges(words: Tensor) -> tuple[Tensor, Tensor]:
    """Bits where a run of ones begins, and where it has just ended; one word longer than ``words`` ``[..., W]``."""
    words = torch.nn.functional.pad(words, (0, 1))
    before = words << 1
    before[..., 1:] |= (words[..., :-1] >> 31) & 1
    return words & ~before, ~words & before


def _positions(words_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Row (int64) and position (int32) of every set bit, in row-major order."""
    row, word = words_RW.nonzero(as_tuple=True)
    bit = torch.arange(32, dtype=torch.int32, device=words_RW.device)
    which, offset = ((words_RW[row, word][:, None] >> bit) & 1).nonzero(as_tuple=True)
    return row[which], (word[which] * 32 + offset).to(torch.int32)
