"""Tile plans: time to build them, and how many steps a kernel takes over them, on the fixed grid and with ragged tiles.

Efficiency is the mask's area over the area of all steps: what part of the matrix products is of use.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.harness import Row, interleave, table, write_results
from benchmarks.workloads import document_lengths
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan
from magi_flex.tiles import TilePlan


def plans(size: int) -> dict[str, MaskPlan]:
    """The benchmark masks, one interval a row."""
    row = torch.arange(size)
    doc, position = (x.long() for x in mods.documents_from_lengths(document_lengths(size)))
    begin = row - position
    length = torch.bincount(doc)[doc]
    block_end = torch.minimum((position // 2048 + 1) * 2048, length)

    def plan(starts: Tensor, ends: Tensor) -> MaskPlan:
        return MaskPlan(RowIntervals.build(starts.view(1, 1, 1, -1), ends.view(1, 1, 1, -1), size))

    return {
        "full": plan(row * 0, row * 0 + size),
        "causal": plan(row * 0, row + 1),
        "documents": plan(begin, begin + length),
        "documents, causal": plan(begin, row + 1),
        "window 1024, causal": plan(row - 1023, row + 1),
        "documents, block causal": plan(begin, begin + block_end),
    }


def steps(tiles: TilePlan) -> tuple[int, int]:
    full, partial = tiles.steps()
    return int(full.sum()), int(partial.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlens", default="8192,32768,1048576")
    parser.add_argument("--tile", default="128,128", help="rows and keys of a tile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    q_tile, kv_tile = (int(x) for x in args.tile.split(","))
    rows = []
    for size in (int(x) for x in args.seqlens.split(",")):
        for mask, plan in plans(size).items():
            for direction, transposed in (("fwd", False), ("bwd", True)):
                kinds = {"ragged": True, "fixed": False}
                work = {
                    kind: lambda p=plan, t=transposed, r=ragged: p.tiles(q_tile, kv_tile, t, r)
                    for kind, ragged in kinds.items()
                }
                timings = interleave(work, repeats=5, warmup=1)
                more: dict[str, float | int] = {"tile_rows": q_tile, "tile_keys": kv_tile}
                for kind in kinds:
                    tiles = work[kind]()
                    full, partial = steps(tiles)
                    more |= {
                        f"{kind}_steps": full + partial,
                        f"{kind}_masked_steps": partial,
                        f"{kind}_efficiency": plan.area() / ((full + partial) * q_tile * kv_tile),
                        f"{kind}_bytes": tiles.nbytes,
                        f"{kind}_min_ms": timings[kind].min_ms,
                    }
                beside = {"fixed": timings["fixed"].median_ms}
                ms = timings["ragged"].median_ms
                rows.append(Row("tiles", "ragged", mask, size, direction=direction, ms=ms, beside=beside, more=more))
    print(table(rows))
    for row in rows:
        more = row.more
        print(
            f"{row.mask:24s} {row.S:8d} {row.direction}  steps (masked): "
            f"fixed {more['fixed_steps']} ({more['fixed_masked_steps']}), {more['fixed_efficiency']:.3f}; "
            f"ragged {more['ragged_steps']} ({more['ragged_masked_steps']}), {more['ragged_efficiency']:.3f}"
        )
    print(write_results("tiles", rows))


if __name__ == "__main__":
    main()
