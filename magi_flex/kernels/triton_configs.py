"""Tile sizes of the Triton kernels and how work is cut.

The table is for Hopper.  Its entries for 16-bit elements and head dims up to 128 come from timing a few candidates at
D=128 on an H200, the others from how many registers the compiled kernels need.  Other chips take it as far as their
shared memory goes.  What triton_search.py found for the GPU at hand goes before the table.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from magi_flex.kernels.triton_score import source_folder

LARGEST_HEAD_DIM = 512
HOPPER_HEAD_DIM = 128  # the largest of the Hopper kernels
DIRECTIONS = ("forward", "kv", "q")  # the forward kernel, the two of the backward
LEAST_TILE = 16  # of a matrix product
_SCORES_OF_A_THREAD = {"steps": 32, "general": 16}  # where a score mod is computed; few registers spill then
_MOST_SPLITS = 64
_STEPS_OF_A_SPLIT = 4  # key steps that make a split worth its merging
_REDUCTION_BYTES = 4 << 10
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
        (64, Tiles(128, 128, 8, 3)),
        (128, Tiles(64, 64, 4, 3)),
        (256, Tiles(128, 64, 8, 2)),
        (512, Tiles(64, 32, 8, 1)),
    ),
    ("kv", 2): (
        (128, Tiles(64, 128, 8, 3)),
        (256, Tiles(64, 64, 8, 1)),
        (512, Tiles(32, 32, 8, 1)),
    ),
    ("q", 2): (
        (128, Tiles(128, 64, 8, 3)),
        (256, Tiles(64, 64, 8, 1)),
        (512, Tiles(32, 32, 8, 1)),
    ),
    ("forward", 4): (
        (64, Tiles(64, 32, 8, 2)),
        (128, Tiles(32, 32, 8, 2)),
        (256, Tiles(32, 16, 8, 1)),
        (512, Tiles(16, 16, 4, 1)),
    ),
    ("kv", 4): (
        (64, Tiles(32, 32, 8, 1)),
        (128, Tiles(16, 32, 8, 1)),
        (512, Tiles(16, 16, 4, 1)),
    ),
    ("q", 4): (
        (64, Tiles(32, 32, 8, 1)),
        (128, Tiles(32, 16, 8, 1)),
        (512, Tiles(16, 16, 4, 1)),
    ),
}  # fmt: skip


def shared_bytes(direction: str, tiles: Tiles, head_dim: int, v_dim: int, element_size: int) -> int:
    """What a kernel needs of shared memory, from above: what it keeps, what it streams, weights, reductions."""
    both = head_dim + v_dim
    if direction == "forward":
        kept, streamed = tiles.rows * head_dim, tiles.keys * both
    else:
        sizes = (tiles.keys, tiles.rows) if direction == "kv" else (tiles.rows, tiles.keys)
        kept, streamed = sizes[0] * both, sizes[1] * both
    weights = tiles.rows * tiles.keys if element_size == 4 else 0  # 16-bit ones stay in registers
    return element_size * (kept + tiles.stages * streamed + weights) + _REDUCTION_BYTES


def fits(directions: Sequence[str], head_dim: int, v_dim: int, element_size: int, device: torch.device) -> bool:
    """Whether the smallest tiles of these padded head dims fit into the device's shared memory."""
    least = Tiles(LEAST_TILE, LEAST_TILE, 4, 1)
    return all(shared_bytes(d, least, head_dim, v_dim, element_size) <= shared_limit(device) for d in directions)


def tiles_for(direction: str, dtype: torch.dtype, head_dim: int, v_dim: int, device: torch.device) -> Tiles:
    """For padded head dims (powers of two from 16 to LARGEST_HEAD_DIM): what the search found, else the table's."""
    widest = max(head_dim, v_dim)
    found = _searched(device).get(key_of(direction, dtype.itemsize, widest))
    if found is not None:
        return found
    tiles = next(tiles for limit, tiles in _TABLE[direction, dtype.itemsize] if widest <= limit)
    return fit(direction, tiles, head_dim, v_dim, dtype.itemsize, shared_limit(device))


def for_score_mod(direction: str, tiles: Tiles, general: bool) -> Tiles:
    """``tiles`` for a kernel with a score mod: more values of a score are alive, so a thread has fewer scores."""
    streamed, kept = ("rows", "keys") if direction == "kv" else ("keys", "rows")
    if getattr(tiles, kept) >= 128:  # with fewer, two groups of warps would have to share a product's rows
        tiles = replace(tiles, warps=8)
    most = _SCORES_OF_A_THREAD["general" if general else "steps"] * 32 * tiles.warps
    while tiles.rows * tiles.keys > most and getattr(tiles, streamed) > LEAST_TILE:
        tiles = replace(tiles, **{streamed: getattr(tiles, streamed) // 2})
    return tiles


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


# ---- other sizes -----------------------------------------------------------------------------------------------------


def padded(head_dim: int, element_size: int) -> int:
    """A head dim as the kernels see it.

    On Hopper, Triton 3.6 multiplies wrongly by 16-bit tiles with fewer than 64 columns that its pipeliner did not load
    (seen with 16 and 32 columns, for bfloat16 and float16).
    """
    return max(64 if element_size == 2 else LEAST_TILE, 1 << (head_dim - 1).bit_length())


def packing(q_len: int, group: int, mask_heads: int, rows: int) -> tuple[int, int]:
    """(rows of a tile, query heads in it): few queries share a tile with the other heads of their key head."""
    if q_len >= rows:
        return rows, 1
    needed = 1 << (q_len - 1).bit_length()
    pack = 1
    while mask_heads == 1 and group % (2 * pack) == 0 and 2 * pack * needed <= rows:
        pack *= 2
    return min(rows, max(LEAST_TILE, needed * pack)), pack


def split_count(programs: int, kv_len: int, keys: int, processors: int) -> int:
    """How many programs share the keys of a row tile, so that few rows keep all multiprocessors busy."""
    if 2 * programs > processors:
        return 1
    return max(1, min(2 * processors // programs, kv_len // (keys * _STEPS_OF_A_SPLIT), _MOST_SPLITS))


# ---- what a search found ---------------------------------------------------------------------------------------------


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
