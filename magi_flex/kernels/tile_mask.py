"""Bool masks of single tiles of a MaskPlan, for kernels written in plain torch.

Shape legend: B mask batch, H mask heads (1 = shared), R intervals of a row, T key tiles, rows and keys of one tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_flex.mask_plan import MaskPlan


class RowTileMask:
    """The mask of rows [row_begin, row_end) of one group of batch entries and heads, one key tile at a time.

    ``batch`` and ``heads`` select what the plan does not share.  With bit tiles, ``row_begin`` and ``kv_tile`` must be
    multiples of the bit tiles' grid.
    """

    def __init__(self, plan: MaskPlan, batch: slice, heads: slice, row_begin: int, row_end: int, kv_tile: int):
        self.kv_tile, self.kv_len = kv_tile, plan.kv_len
        self.rows = row_end - row_begin
        starts, ends = (_select(x, batch, heads)[..., row_begin:row_end] for x in (plan.starts, plan.ends))
        empty = ends <= starts
        self.starts_BHQR = starts.masked_fill(empty, 0).transpose(2, 3).long()
        self.ends_BHQR = ends.masked_fill(empty, 0).transpose(2, 3).long()
        self.bits: dict[int, list[tuple[int, int, int, int, int]]] = {}  # key tile: (b, h, first row, col, slot)
        self.bit_tiles = plan.bit_tiles
        if plan.bit_tiles is not None:
            self._list_bit_tiles(plan, batch, heads, row_begin, row_end)

    def _list_bit_tiles(self, plan: MaskPlan, batch: slice, heads: slice, row_begin: int, row_end: int) -> None:
        tiles = plan.bit_tiles
        assert tiles is not None
        row_ptr = _select(tiles.row_ptr, batch, heads)
        first, last = row_begin // tiles.q_tile, -(-row_end // tiles.q_tile)
        ptr = row_ptr[:, :, first : last + 1].tolist()
        for b, per_head in enumerate(ptr):
            for h, bounds in enumerate(per_head):
                begin, end = bounds[0], bounds[-1]
                cols, slots = tiles.cols[begin:end].tolist(), tiles.slot[begin:end].tolist()
                for tile in range(last - first):
                    for i in range(bounds[tile] - begin, bounds[tile + 1] - begin):
                        key_tile = cols[i] * tiles.kv_tile // self.kv_tile
                        entry = (b, h, tile * tiles.q_tile, cols[i], slots[i])
                        self.bits.setdefault(key_tile, []).append(entry)

    def key_tiles(self) -> list[tuple[int, int]]:
        """(begin, end) in keys of the tiles in which any row attends to a key."""
        count = -(-self.kv_len // self.kv_tile)
        seen = (self.ends_BHQR > self.starts_BHQR).flatten()
        edges = torch.zeros(count + 1, dtype=torch.int64, device=seen.device)
        first = (self.starts_BHQR // self.kv_tile).flatten()[seen]
        after = ((self.ends_BHQR - 1) // self.kv_tile + 1).flatten()[seen]
        ones = torch.ones_like(first)
        edges.scatter_add_(0, first, ones).scatter_add_(0, after, -ones)
        touched = set((edges.cumsum(0)[:-1] > 0).nonzero().flatten().tolist()) | set(self.bits)
        return [(t * self.kv_tile, min((t + 1) * self.kv_tile, self.kv_len)) for t in sorted(touched)]

    def mask(self, key_begin: int, key_end: int) -> Tensor | None:
        """Bool ``[B, H, rows, keys]`` of one of :meth:`key_tiles`; None where every pair attends."""
        keys = key_end - key_begin
        starts = self.starts_BHQR.clamp(key_begin, key_end) - key_begin
        ends = self.ends_BHQR.clamp(key_begin, key_end) - key_begin
        steps = torch.zeros(*starts.shape[:3], keys + 1, dtype=torch.int32, device=starts.device)
        ones = torch.ones((), dtype=torch.int32, device=starts.device).expand(starts.shape)
        steps.scatter_add_(3, starts, ones).scatter_add_(3, ends, -ones)
        mask = steps.cumsum(3)[..., :keys] > 0
        for b, h, row, col, slot in self.bits.get(key_begin // self.kv_tile, ()):
            tiles = self.bit_tiles
            assert tiles is not None
            begin = col * tiles.kv_tile - key_begin
            target = mask[b, h, row : row + tiles.q_tile, begin : begin + tiles.kv_tile]
            if slot < 0:
                target.fill_(True)
            else:
                shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
                bits = ((tiles.bits[slot][..., None] >> shifts) & 1).flatten(1).to(torch.bool)
                target |= bits[: target.shape[0], : target.shape[1]]
        return None if bool(mask.all()) else mask


def _select(x: Tensor, batch: slice, heads: slice) -> Tensor:
    """Slice the first two dims, except where they are shared (size 1)."""
    x = x if x.shape[0] == 1 else x[batch]
    return x if x.shape[1] == 1 else x[:, heads]
