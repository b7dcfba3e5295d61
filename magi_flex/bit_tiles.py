"""Bit tiles: the rows of a mask that do not fit into a few intervals, one bit a pair, partial tiles only.

Shape legend: B mask batch, H mask head (1 = shared), T row tiles, N listed tiles, P partial tiles, W 32-bit words,
Q query rows, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GATHER_BITS = 0x0102040810204080  # times eight 0/1 bytes: their bits, in order, in the top byte


def pack_bits(mask: Tensor) -> Tensor:
    """Bool ``[..., 32 W]`` to int32 ``[..., W]``; bit j of word w is element ``32 w + j``."""
    *lead, size = mask.shape
    eights = mask.contiguous().view(torch.uint8).view(*lead, size // 8, 8).view(torch.int64).squeeze(-1)
    packed = (eights * _GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)
    return packed.view(*lead, size // 32, 4).view(torch.int32).squeeze(-1)


def unpack_bits(words: Tensor) -> Tensor:
    """The inverse of :func:`pack_bits`."""
    bit = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> bit).bitwise_and_(1).to(torch.bool).flatten(-2)


def count_bits(words: Tensor) -> Tensor:
    """Set bits of each byte of int32 ``[..., W]``: uint8 ``[..., 4 W]``."""
    byte = words[..., None].contiguous().view(torch.uint8).flatten(-2)  # a single word may have any stride
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@dataclass(frozen=True)
class BitTiles:
    """Explicit tiles of a fixed grid, in CSR form.

    Attributes:
        q_tile, kv_tile: the grid; kv_tile is a multiple of 32.
        row_ptr: int32 ``[B, H, T + 1]``, positions in ``cols`` (global over B and H); T = ceil(q_len / q_tile).
        cols: int32 ``[N]``, key tile index, ascending inside a row tile.
        slot: int32 ``[N]``, index into ``bits``, or -1: every pair of the tile (inside the lengths) attends.
        bits: int32 ``[P, q_tile, kv_tile / 32]``; bit j of word w is key ``kv_tile * col + 32 * w + j``; bits outside
            of the lengths are 0.
    """

    q_tile: int
    kv_tile: int
    row_ptr: Tensor
    cols: Tensor
    slot: Tensor
    bits: Tensor

    @property
    def nbytes(self) -> int:
        return self.row_ptr.nbytes + self.cols.nbytes + self.slot.nbytes + self.bits.nbytes

    @property
    def row_tiles(self) -> int:
        """T, row tiles of one (batch, head)."""
        return self.row_ptr.shape[2] - 1

    def tile_rows(self) -> Tensor:
        """Row tile of each listed tile, counted over B, H and T, int64 ``[N]``."""
        counts_BHT = self.row_ptr.diff(dim=2).flatten().long()
        return torch.repeat_interleave(torch.arange(counts_BHT.numel(), device=counts_BHT.device), counts_BHT)

    def tile_area(self, q_len: int, kv_len: int) -> Tensor:
        """Attended pairs of each listed tile, int64 ``[N]``."""
        rows = (q_len - self.tile_rows() % max(1, self.row_tiles) * self.q_tile).clamp(max=self.q_tile)
        keys = (kv_len - self.cols.long() * self.kv_tile).clamp(max=self.kv_tile)
        counts_P = count_bits(self.bits).sum((1, 2), dtype=torch.int64)
        if not counts_P.numel():
            return rows * keys
        return torch.where(self.slot < 0, rows * keys, counts_P[self.slot.long().clamp(min=0)])

    def to_dense(self, q_len: int, kv_len: int) -> Tensor:
        """Dense bool ``[B, H, Q, K]`` (for tests and small sizes)."""
        batch, heads, _ = self.row_ptr.shape
        row_tiles, col_tiles = self.row_tiles, -(-kv_len // self.kv_tile)
        tiles = torch.zeros(
            batch * heads * row_tiles, col_tiles, self.q_tile, self.kv_tile, dtype=torch.bool, device=self.bits.device
        )
        row, col, partial = self.tile_rows(), self.cols.long(), self.slot >= 0
        tiles[row[~partial], col[~partial]] = True
        tiles[row[partial], col[partial]] = unpack_bits(self.bits[self.slot[partial].long()])
        dense = tiles.transpose(1, 2).reshape(batch, heads, row_tiles * self.q_tile, col_tiles * self.kv_tile)
        return dense[:, :, :q_len, :kv_len]
