"""What launches of the Hopper kernels have in common."""

from __future__ import annotations

import math
import struct

import torch

from magi_flex.bit_tiles import BitTiles

SCALE = struct.Struct("<f")
BIT_TILES = "4Q4i"  # BitTileParams of the kernels, for the struct module
LOG2_E = math.log2(math.e)


def kernel_dtype(dtype: torch.dtype) -> str:
    """A name of the kernels' ``DType``."""
    return "bf16" if dtype == torch.bfloat16 else "fp16"


def bit_tile_values(tiles: BitTiles | None) -> tuple[int, ...]:
    """The fields of BitTileParams; the tensors are contiguous."""
    if tiles is None:
        return (0,) * 8
    pointers = (x.data_ptr() for x in (tiles.row_ptr, tiles.cols, tiles.slot, tiles.bits))
    return *pointers, tiles.q_tile, tiles.kv_tile // 32, tiles.row_tiles, 0
