"""What launches of the Hopper kernels have in common.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from magi_flex.bit_tiles import BitTiles
from magi_flex.kernels import cuda_driver

SCALE = struct.Struct("<f")
BIT_TILES = "4Q4i"  # BitTileParams of the kernels, for the struct module
LOG2_E = math.log2(math.e)
# Axes of tensor maps, fastest first, of [batch, head, position, dim].
BY_ROW = (3, 1, 2, 0)  # heads are neighbours
BY_KEY = (3, 2, 1, 0)


def kernel_dtype(dtype: torch.dtype) -> str:
    """A name of the kernels' ``DType``."""
    return "bf16" if dtype == torch.bfloat16 else "fp16"


def bit_tile_values(tiles: BitTiles | None) -> tuple[int, ...]:
    """The fields of BitTileParams; the tensors are contiguous."""
    if tiles is None:
        return (0,) * 8
    pointers = (x.data_ptr() for x in (tiles.row_ptr, tiles.cols, tiles.slot, tiles.bits))
    return *pointers, tiles.q_tile, tiles.kv_tile // 32, tiles.row_tiles, 0


def set_backward_maps(
    params: cuda_driver.ParameterBlock,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    d_out_BHQE: Tensor,
    pack: int,
    positions: int,
    keys: int,
) -> None:
    """The tensor maps of a kernel of the backward pass: panels of 64 columns, of ``positions`` rows of ``pack`` heads
    or of ``keys`` keys."""
    rows_box, keys_box = (64, pack, positions, 1), (64, keys, 1, 1)
    boxes = ((q_BHQD, BY_ROW, rows_box), (k_BGKD, BY_KEY, keys_box), (v_BGKE, BY_KEY, keys_box))
    for index, (x, axes, box) in enumerate((*boxes, (d_out_BHQE, BY_ROW, rows_box))):
        params.set_map(index, cuda_driver.tensor_map(x, axes, box, 128))
