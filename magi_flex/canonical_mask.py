"""The canonical mask_mod: any mask as a function of its plan's tensors alone.

It runs on every FlexAttention backend, eager and compiled, and a new mask of the same shapes is only new contents of
the captured tensors, so nothing is compiled again.

Shape legend: B mask batch, H mask head (1 = shared), R intervals of a row, Q query rows, T row tiles, N listed tiles,
P partial tiles, W 32-bit words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan


class CanonicalMaskMod:
    """mask_mod of a plan: k is in one of row q's intervals, or its bit is set in the row's bit tiles.

    Attributes:
        starts, ends: int32 ``[B, H, R, Q]``.
        kv_len: number of keys.
        bit_tiles: None, or bit tiles with ``cols``, ``slot`` and ``bits`` padded (more entries than are listed).
        search_steps: steps of the binary search for a tile (0 without bit tiles).
        by_batch, by_head, slots: whether B and H are above 1, and R.  Values of its own, because a traced function that
            reads the shapes of captured DTensors is not traced again when these change.
    """

    def __init__(self, starts: Tensor, ends: Tensor, kv_len: int, bit_tiles: BitTiles | None = None) -> None:
        self.starts = starts
        self.ends = ends
        self.kv_len = kv_len
        self.bit_tiles = bit_tiles
        self.by_batch, self.by_head = starts.shape[0] > 1, starts.shape[1] > 1
        self.slots = starts.shape[2]
        self.search_steps = 0 if bit_tiles is None else (-(-kv_len // bit_tiles.kv_tile)).bit_length()

    @staticmethod
    def from_plan(plan: MaskPlan) -> CanonicalMaskMod:
        """Pads R, and the sizes of the bit tiles' tensors, to powers of two, so that shapes rarely change."""
        slots = _power_of_two(plan.intervals.max_intervals)
        starts, ends = plan.starts, plan.ends
        if slots > plan.intervals.max_intervals:
            missing = (0, 0, 0, slots - plan.intervals.max_intervals)
            starts = torch.nn.functional.pad(starts, missing, value=plan.kv_len)
            ends = torch.nn.functional.pad(ends, missing, value=0)
        bits = plan.bit_tiles
        if bits is None:
            return CanonicalMaskMod(starts.contiguous(), ends.contiguous(), plan.kv_len)
        listed, partial = _power_of_two(len(bits.cols) + 1), _power_of_two(max(1, len(bits.bits)))
        padded = BitTiles(
            bits.q_tile,
            bits.kv_tile,
            bits.row_ptr,
            torch.nn.functional.pad(bits.cols, (0, listed - len(bits.cols))),
            torch.nn.functional.pad(bits.slot, (0, listed - len(bits.slot))),
            torch.nn.functional.pad(bits.bits, (0, 0, 0, 0, 0, partial - len(bits.bits))),
        )
        return CanonicalMaskMod(starts.contiguous(), ends.contiguous(), plan.kv_len, padded)

    def plan(self) -> MaskPlan:
        """The plan; its tensors are the captures themselves (lists of bit tiles without their padding)."""
        bits = self.bit_tiles
        return MaskPlan(
            RowIntervals(self.starts, self.ends, self.kv_len), None if bits is None else without_padding(bits)
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it captures."""
        bits = self.bit_tiles
        return self.starts, self.ends, *(() if bits is None else (bits.row_ptr, bits.cols, bits.slot, bits.bits))

    def to(self, device: torch.device | str) -> CanonicalMaskMod:
        bits = self.bit_tiles
        if bits is not None:
            moved = (x.to(device) for x in (bits.row_ptr, bits.cols, bits.slot, bits.bits))
            bits = BitTiles(bits.q_tile, bits.kv_tile, *moved)
        return CanonicalMaskMod(self.starts.to(device), self.ends.to(device), self.kv_len, bits)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        starts, ends = self.starts, self.ends
        batch = b if self.by_batch else 0
        head = h if self.by_head else 0
        attends = (kv_idx >= starts[batch, head, 0, q_idx]) & (kv_idx < ends[batch, head, 0, q_idx])
        for r in range(1, self.slots):
            inside = (kv_idx >= starts[batch, head, r, q_idx]) & (kv_idx < ends[batch, head, r, q_idx])
            attends = attends | inside
        return attends if self.bit_tiles is None else attends | self._bit(self.bit_tiles, batch, head, q_idx, kv_idx)

    def _bit(self, bits: BitTiles, batch: Tensor | int, head: Tensor | int, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Find the key's tile in the row tile's list by binary search, then read its bit."""
        row_tile, col = q_idx // bits.q_tile, kv_idx // bits.kv_tile
        low, end = bits.row_ptr[batch, head, row_tile], bits.row_ptr[batch, head, row_tile + 1]
        high = end
        for _ in range(self.search_steps):
            middle = (low + high) // 2
            before = (low < high) & (bits.cols[middle] < col)
            low, high = torch.where(before, middle + 1, low), torch.where(before, high, middle)
        slot = bits.slot[low]
        word = bits.bits[slot.clamp(min=0), q_idx % bits.q_tile, kv_idx % bits.kv_tile // 32]
        is_set = (word >> (kv_idx % 32)) & 1
        return (low < end) & (bits.cols[low] == col) & ((slot < 0) | (is_set == 1))


def without_padding(bits: BitTiles) -> BitTiles:
    """The listed tiles alone (views)."""
    listed = int(bits.row_ptr.max()) if bits.row_ptr.numel() else 0
    return BitTiles(bits.q_tile, bits.kv_tile, bits.row_ptr, bits.cols[:listed], bits.slot[:listed], bits.bits)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
