"""A plan on rectangles of the mask: dense tiles, and how many pairs of each block attend.

Shape legend: B mask batch, H mask head (1 = shared), G = B * H, Q query rows, K keys, N query blocks, M key blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles, unpack_bits
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan


def dense_tile(plan: MaskPlan, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """A plan's dense mask on a tile, bool ``[B, H, rows, keys]``."""
    part = plan.intervals.take_rows(slice(*rows))
    starts, ends = (x.clamp(*keys) - keys[0] for x in (part.starts, part.ends))
    dense = RowIntervals(starts, ends, keys[1] - keys[0]).to_dense()
    bits = plan.bit_tiles
    if bits is None:
        return dense
    q_tile, kv_tile = bits.q_tile, bits.kv_tile
    for b in range(dense.shape[0]):
        for h in range(dense.shape[1]):
            for tile in range(rows[0] // q_tile, -(-rows[1] // q_tile)):
                first, last = bits.row_ptr[b, h, tile : tile + 2].tolist()
                for col, slot in zip(bits.cols[first:last].tolist(), bits.slot[first:last].tolist(), strict=True):
                    _paste(dense[b, h], bits, (tile * q_tile, col * kv_tile), slot, (rows[0], keys[0]))
    return dense


def _paste(dense_QK: Tensor, bits: BitTiles, corner: tuple[int, int], slot: int, origin: tuple[int, int]) -> None:
    """Write one bit tile, whose first pair is ``corner``, into a dense mask whose first pair is ``origin``."""
    row, key = corner[0] - origin[0], corner[1] - origin[1]
    row_from, key_from = max(0, -row), max(0, -key)
    target = dense_QK[max(0, row) : max(0, row + bits.q_tile), max(0, key) : max(0, key + bits.kv_tile)]
    if slot < 0:
        target.fill_(True)
        return
    tile = unpack_bits(bits.bits[slot])
    target |= tile[row_from : row_from + target.shape[0], key_from : key_from + target.shape[1]]


def block_area(mask_plan: MaskPlan, q_block: int, kv_block: int) -> Tensor:
    """Attended pairs of each block, int64 ``[B, H, N, M]``."""
    batch, heads, _, q_len = mask_plan.starts.shape
    rows, columns = -(-q_len // q_block), -(-mask_plan.kv_len // kv_block)
    bits = mask_plan.bit_tiles
    if bits is not None and (q_block % bits.q_tile or kv_block % bits.kv_tile):
        area = torch.zeros(batch, heads, rows, columns, dtype=torch.int64, device=mask_plan.device)
        for n in range(rows):
            band = dense_tile(mask_plan, (n * q_block, min(q_len, (n + 1) * q_block)), (0, mask_plan.kv_len))
            keys = torch.nn.functional.pad(band.sum(2), (0, columns * kv_block - mask_plan.kv_len))
            area[:, :, n] = keys.unflatten(2, (columns, kv_block)).sum(3)
        return area
    # Keys below x: all of the blocks before x // kv_block, and x % kv_block of that one.
    before = torch.zeros(batch * heads * rows, columns + 1, dtype=torch.int64, device=mask_plan.device)
    inside = torch.zeros_like(before)
    row_Q = torch.arange(q_len, device=mask_plan.device) // q_block
    head_G = torch.arange(batch * heads, device=mask_plan.device).view(batch, heads, 1, 1) * rows
    row_cell = (head_G + row_Q) * (columns + 1)
    # An unused interval counts as [0, 0).
    for bound, sign in ((mask_plan.ends, 1), (torch.minimum(mask_plan.starts, mask_plan.ends), -1)):
        block = bound // kv_block
        cell = (row_cell + block).flatten()
        rest = bound - block * kv_block
        inside.view(-1).index_add_(0, cell, rest.flatten().long(), alpha=sign)
        before.view(-1).index_add_(0, cell, cell.new_ones(()).expand(len(cell)), alpha=sign)
    after = before.sum(1, keepdim=True) - before.cumsum(1)
    area = (inside + after * kv_block)[:, :columns].reshape(batch, heads, rows, columns).contiguous()
    if bits is not None:
        tile = bits.tile_rows()
        block = tile // bits.row_tiles * rows + tile % bits.row_tiles * bits.q_tile // q_block
        cell = block * columns + bits.cols * bits.kv_tile // kv_block
        area.view(-1).index_add_(0, cell, bits.tile_area(q_len, mask_plan.kv_len))
    return area
