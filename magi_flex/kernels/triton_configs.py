"""Tile sizes of the Triton kernels: a table, and what a search found for the GPU at hand (triton_search.py).

The table is for Hopper and holds judgement, not measurements: the kernels have not run on a GPU yet.  Other chips take
it as far as their shared memory goes.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from magi_flex.kernels.triton_score import source_folder

LARGEST_HEAD_DIM = 512
DIRECTIONS = ("forward", "kv", "q")  # the forward kernel, the two of the backward
_HOPPER_SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class Tiles:
    """``rows`` queries and ``keys`` keys of a tile, whichever of them a program keeps."""

    rows: int
    keys: int
    warps: int
    stages: int


# By direction and bytes of an element: (largest padded head dim, tiles), ascending.
_TABLE: dict[tuple[str, int], tuple[tuple[int, Tiles], ...]] = {
    ("forward", 2): (
        (64, Tiles(128, 128, 4, 3)),
        (128, Tiles(128, 64, 8, 3)),
        (256, Tiles(64, 64, 4, 2)),
        (512, Tiles(64, 32, 8, 1)),
    ),
    ("kv", 2): (
        (32, Tiles(64, 64, 4, 3)),
        (128, Tiles(64, 128, 8, 2)),
        (256, Tiles(64, 64, 8, 1)),
        (512, Tiles(32, 32, 8, 1)),
    ),
    ("q", 2): (
        (32, Tiles(64, 64, 4, 3)),
        (128, Tiles(128, 64, 8, 2)),
        (256, Tiles(64, 64, 8, 1)),
        (512, Tiles(32, 32, 8, 1)),
    ),
    ("forward", 4): (
        (64, Tiles(64, 32, 4, 2)),
        (128, Tiles(32, 32, 4, 2)),
        (256, Tiles(32, 16, 4, 1)),
        (512, Tiles(16, 16, 4, 1)),
    ),
    ("kv", 4): (
        (64, Tiles(32, 32, 4, 1)),
        (128, Tiles(16, 32, 4, 1)),
        (512, Tiles(16, 16, 4, 1)),
    ),
    ("q", 4): (
        (64, Tiles(32, 32, 4, 1)),
        (128, Tiles(32, 16, 4, 1)),
        (512, Tiles(16, 16, 4, 1)),
    ),
}  # fmt: skip


def shared_bytes(direction: str, tiles: Tiles, head_dim: int, v_dim: int, element_size: int) -> int:
    """About what a kernel needs of shared memory, from above: what it keeps, what it streams, tiles of weights."""
    kept, streamed = (tiles.keys, tiles.rows) if direction == "kv" else (tiles.rows, tiles.keys)
    weights = tiles.rows * tiles.keys * (1 if direction == "forward" else 2)
    return element_size * ((kept + tiles.stages * streamed) * (head_dim + v_dim) + weights)


def tiles_for(direction: str, dtype: torch.dtype, head_dim: int, v_dim: int, device: torch.device) -> Tiles:
    """For padded head dims (powers of two from 16 to LARGEST_HEAD_DIM): what the search found, else the table's."""
    widest = max(head_dim, v_dim)
    found = _searched(device).get(key_of(direction, dtype.itemsize, widest))
    if found is not None:
        return found
    tiles = next(tiles for limit, tiles in _TABLE[direction, dtype.itemsize] if widest <= limit)
    return fit(direction, tiles, head_dim, v_dim, dtype.itemsize, shared_limit(device))


def fit(direction: str, tiles: Tiles, head_dim: int, v_dim: int, element_size: int, limit: int) -> Tiles:
    """``tiles``, made smaller until they need at most ``limit`` bytes: fewer stages first, then what is streamed."""
    streamed, kept = ("rows", "keys") if direction == "kv" else ("keys", "rows")
    while shared_bytes(direction, tiles, head_dim, v_dim, element_size) > limit:
        if tiles.stages > 1:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif getattr(tiles, streamed) > 32 or (getattr(tiles, kept) <= 16 and getattr(tiles, streamed) > 16):
            tiles = replace(tiles, **{streamed: getattr(tiles, streamed) // 2})
        elif getattr(tiles, kept) > 16:
            tiles = replace(tiles, **{kept: getattr(tiles, kept) // 2})
        else:
            break
    return tiles


def shared_limit(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    return _device_limit(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _device_limit(index: int) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


# ---- what a search found -----------------------------------------------------------------------------------------------


def key_of(direction: str, element_size: int, widest: int) -> str:
    return f"{direction}:{element_size}:{widest}"


def results_file(index: int) -> Path:
    chip = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(index))
    return source_folder() / f"tiles-{chip}.json"


def _searched(device: torch.device) -> dict[str, Tiles]:
    if device.type != "cuda":
        return {}
    return _load(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _load(index: int) -> dict[str, Tiles]:
    path = results_file(index)
    if not path.exists():
        return {}
    return {key: Tiles(**sizes) for key, sizes in json.loads(path.read_text()).items()}
