"""Dispatch and exchange planning on one core: time, balance, moved keys, predicted rates.

    python -m benchmarks.bench_dispatch          # or: python -m magi_flex bench dispatch

Writes ``benchmarks/results/dispatch.json``.  ``beside`` has the same work done by the area-only min-heap dispatch.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Row, interleave, table, write_results
from magi_flex.distributed import planning
from magi_flex.distributed.agreement import mask_checksum
from magi_flex.distributed.context_parallel import ContextParallel
from magi_flex.distributed.cost_model import Shape
from magi_flex.distributed.dispatch import (
    Dispatch,
    chunk_areas,
    dispatch_min_heap,
    dtensor_row_counts,
    even_row_counts,
    solve_dispatch,
)
from magi_flex.distributed.exchange_plan import build_exchange_plan
from magi_flex.distributed.key_ranges import held_pieces, needed_ranges, overlaps
from magi_flex.distributed.simulator import Cluster, Simulation
from magi_flex.distributed.workloads import document_mask, draw_document_lengths
from magi_flex.intervals import RowIntervals

ROWS_OF_A_RANK = 8192
SEEDS = 6


def cpu_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Processor time of one core, median: on a machine that others load, the wall clock says little."""
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - begin))
    return statistics.median(taken)


def min_heap(mask: RowIntervals, ranks: int) -> Dispatch:
    counts = even_row_counts(mask.q_len, ranks)
    return dispatch_min_heap(chunk_areas(mask, 512), 512, mask.q_len, counts)


def banded(mask: RowIntervals, ranks: int) -> Dispatch:
    return solve_dispatch([mask], even_row_counts(mask.q_len, ranks))


def moved_keys(mask: RowIntervals, dispatch: Dispatch) -> int:
    pieces = overlaps(needed_ranges(mask, dispatch), torch.arange(dispatch.ranks), held_pieces(dispatch))
    return int(pieces.rows[pieces.unit != pieces.owner].sum())


def bench_solvers() -> list[Row]:
    rows = []
    for length, ranks in ((1 << 22, 512), (1 << 24, 4096)):
        mask = document_mask(draw_document_lengths(length, 0))
        solvers = {"banded": lambda m=mask, r=ranks: banded(m, r), "min_heap": lambda m=mask, r=ranks: min_heap(m, r)}
        times = interleave(solvers, repeats=5, warmup=1)
        rows.append(
            Row(
                "dispatch",
                "banded",
                "document_causal",
                length,
                ms=times["banded"].median_ms,
                beside={"min_heap": times["min_heap"].median_ms},
                more={
                    "ranks": ranks,
                    "cpu_ms": cpu_ms(solvers["banded"]),
                    "imbalance": solvers["banded"]().imbalance([mask]),
                },
            )
        )
    return rows


def bench_planning() -> list[Row]:
    """4M tokens on 512 ranks of 64 nodes: all on one rank, and one rank's part where the ranks share the work."""
    length, ranks, rank = 1 << 22, 512, 17
    mask = document_mask(draw_document_lengths(length, 0))
    dispatch, areas = banded(mask, ranks), chunk_areas(mask, 128)[None]
    needed = needed_ranges(mask, dispatch)
    counts = even_row_counts(length, ranks)

    def whole() -> None:
        solved = banded(mask, ranks)
        build_exchange_plan(mask, solved, solved, rank, needed_ranges(mask, solved), 4, 8)

    def part() -> None:
        mask_checksum(mask)
        chunk_areas(mask, 128, 0, length // 128 // ranks)
        solved = solve_dispatch([mask], counts, 128, area_MC=areas)
        needed_ranges(mask, solved, [rank])
        build_exchange_plan(mask, solved, solved, rank, needed, 4, 8)

    works: dict[str, Callable[[], object]] = {"whole": whole, "part": part}
    times = interleave(works, repeats=7, warmup=1)
    nbytes = build_exchange_plan(mask, dispatch, dispatch, rank, needed, 4, 8).nbytes
    return [
        Row(
            "exchange plan",
            name,
            "document_causal",
            length,
            ms=timing.median_ms,
            more={"ranks": ranks, "cpu_ms": cpu_ms(works[name]), **more},
        )
        for (name, timing), more in zip(times.items(), ({}, {"plan_bytes": nbytes}), strict=True)
    ]


def bench_rank() -> Row:
    """All that one rank does for a new mask of 4M tokens on 512 ranks: ContextParallel, and the plans of both passes.

    What the other ranks would send is solved ahead; the group is one that sends nothing.
    """
    length, ranks = 1 << 22, 512
    mask = document_mask(draw_document_lengths(length, 0))
    areas_C = chunk_areas(mask, 128)
    dispatch = solve_dispatch([mask], dtensor_row_counts(length, ranks), 128, area_MC=areas_C[None])
    of_ranks = [planning.needed_by_rank(mask, dispatch, rank) for rank in range(ranks)]
    counts_P1C = torch.tensor([[(len(part.begin), *spread)] for part, spread in of_ranks])
    ranges = [torch.stack((part.begin, part.end), 1) for part, _ in of_ranks]
    answers = itertools.cycle(
        [areas_C.view(ranks, 1, -1), counts_P1C, torch.nn.utils.rnn.pad_sequence(ranges, batch_first=True)]
    )

    def gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
        answer = next(answers)
        assert torch.equal(answer[0], own)
        return answer

    def plan() -> None:
        cp = ContextParallel(mesh, mask, ranks_per_node=8)
        for backward in (False, True):
            cp.masks[0].plan(Shape(64, 8, 128, 128), backward)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    with mock.patch.object(planning, "all_gather", gathered):
        times = interleave({"rank": plan}, repeats=7, warmup=1)["rank"]
        cpu = cpu_ms(plan, repeats=9)
    dist.destroy_process_group()
    return Row(
        "plans of a rank", "rank", "document_causal", length, ms=times.median_ms, more={"ranks": ranks, "cpu_ms": cpu}
    )


def bench_moved(ranks: int) -> Row:
    """Medians over draws of documents, 8K tokens a rank; the ratio of the sums is what counts."""
    length = ROWS_OF_A_RANK * ranks
    moved: dict[str, list[int]] = {"banded": [], "min_heap": []}
    imbalance = []
    for seed in range(SEEDS):
        mask = document_mask(draw_document_lengths(length, seed))
        for name, dispatch in (("banded", banded(mask, ranks)), ("min_heap", min_heap(mask, ranks))):
            moved[name].append(moved_keys(mask, dispatch))
            if name == "banded":
                imbalance.append(dispatch.imbalance([mask]))
    ratios = [a / b for a, b in zip(moved["banded"], moved["min_heap"], strict=True)]
    more = {
        "ranks": ranks,
        "moved_keys_a_row": sum(moved["banded"]) / SEEDS / length,
        "min_heap_moved_keys_a_row": sum(moved["min_heap"]) / SEEDS / length,
        "ratio_of_sums": sum(moved["banded"]) / sum(moved["min_heap"]),
        "median_ratio": statistics.median(ratios),
        "largest_ratio": max(ratios),
        "largest_imbalance": max(imbalance),
    }
    return Row("moved keys", "banded", "document_causal", length, more=more)


def bench_simulated(ranks: int) -> Row:
    mask = document_mask(draw_document_lengths(ROWS_OF_A_RANK * ranks, 0))
    ours, *others = Simulation(mask, Cluster(ranks), Shape(64, 8, 128, 128)).run()
    beside = {p.scheme: p.tflops for p in others if p.tflops is not None}
    return Row(
        "simulated attention",
        "magi_flex",
        "document_causal",
        mask.q_len,
        "64:8",
        128,
        "bfloat16",
        "fwd",
        ms=1e3 * (ours.seconds or 0),
        tflops=ours.tflops,
        beside=beside,
        more={"ranks": ranks, "predicted": True},
    )


def main() -> None:
    torch.set_num_threads(1)
    rows = bench_solvers() + bench_planning() + [bench_rank()] + [bench_moved(ranks) for ranks in (8, 64)]
    rows += [bench_simulated(ranks) for ranks in (8, 16, 32, 64)]
    print(table(rows))
    for row in rows:
        print(row.bench, row.S, row.more)
    print(write_results("dispatch", rows))


if __name__ == "__main__":
    main()
