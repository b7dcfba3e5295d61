"""Attention over a sequence that GPUs share: ours beside PyTorch's context parallel, an all-gather and a ring.

    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel [--tokens 8192,32768] [--masks full,causal,...]

NCCL with a GPU a rank, or gloo on CPUs (``--device cpu``, with small ``--tokens``).  Rates are per GPU and count the
mask's exact area; a pass takes as long as its slowest rank.  "one GPU" is the same kernel on one GPU's own tokens (a
mask of that length, no communication); "exposed" is the share of our pass that is not computing, measured against the
same kernel calls with all keys in place; bytes are those that a rank receives, the lower bound counts each remote key
that its rows attend to once.  Writes results/context_parallel.json and, of the first mask, a timeline of both passes as
a Chrome trace and (with matplotlib) a picture.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.context_parallel_sides import Problem, Side, all_gather, computing_only, ours, ring, stock
from benchmarks.harness import RESULTS, Row, Timing, attention_tflops, leave, table, time_once, write_results
from benchmarks.workloads import bounds
from magi_flex.distributed import ContextParallel, Timeline
from magi_flex.distributed.cost_model import Shape
from magi_flex.distributed.timeline import Span, chrome_trace
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.request import AttentionRequest
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_plan import MaskPlan

MASKS = ("full", "causal", "varlen_causal", "varlen_block_causal")
SAMPLE_SECONDS, MOST_CALLS = 0.03, 16
OURS, COMPUTING, ALONE = "ours", "computing only", "one GPU"
STOCK, NATIVE = "stock context parallel", "ours, native collectives"


def intervals(mask: str, length: int, device: torch.device) -> RowIntervals:
    starts, ends = (x.to(device).view(1, 1, 1, length) for x in bounds(mask, length))
    return RowIntervals(starts, ends, length)


def operands(
    mask: RowIntervals, mesh: DeviceMesh, args: argparse.Namespace, dtype: torch.dtype, **options: Any
) -> Problem:
    """Random rows on every rank; which ones they are does not matter to anybody's time."""
    cp = ContextParallel(mesh, mask, **options)
    heads, kv_heads = args.heads
    sizes = [(1, n, len(cp.rows), args.dim) for n in (heads, kv_heads, kv_heads, heads)]
    tensors = [torch.randn(size, device=cp.device, dtype=dtype) for size in sizes]
    return Problem(mesh, mask, cp, *tensors)


def alone(problem: Problem, mask: str) -> Side:
    """This GPU's own tokens under a mask of their number."""
    length = problem.q.shape[2]
    plan = MaskPlan(intervals(mask, length, problem.q.device))
    request = AttentionRequest(*problem.tensors, plan, problem.scale, max_score=False)
    kernel = route(facts_of(request, True))
    result = kernel.forward(request)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        grads = kernel.backward(request, result.out, result.lse, problem.d_out, None)
        return grads.dq, grads.dk, grads.dv

    return Side(lambda: kernel.forward(request).out, backward)


def slowest(works: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, Timing]:
    """As harness.interleave, each time that of the slowest rank.

    Sides come in another order in each round.  Short passes follow each other for at least SAMPLE_SECONDS, as layers
    do, so that a sample is the time that the GPUs take and not that of the first launch after an idle GPU.
    """
    most = torch.zeros(1, dtype=torch.float64, device=device)
    for work in works.values():
        work()
        most = torch.maximum(most, torch.tensor(time_once(work, device), dtype=most.dtype, device=device))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    calls = max(1, min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / most.item())))

    def several(work: Callable[[], object]) -> None:
        for _ in range(calls):
            work()

    samples = {name: torch.zeros(repeats, dtype=torch.float64) for name in works}
    order = Random(0)  # the same on every rank; what ran before counts on GPUs at their power limit
    for i in range(repeats):
        for name, work in order.sample(list(works.items()), len(works)):
            dist.barrier()
            samples[name][i] = time_once(functools.partial(several, work), device) / calls
    for taken in samples.values():
        on_device = taken.to(device)
        dist.all_reduce(on_device, dist.ReduceOp.MAX)
        taken.copy_(on_device)
    return {name: Timing(tuple(taken.tolist())) for name, taken in samples.items()}


def attended_keys(mask: RowIntervals, rows: Tensor) -> Tensor:
    """bool ``[K]``: keys that any of the rows attends to."""
    of_rows = mask.take_rows(rows.to(mask.starts.device))
    change = torch.zeros(mask.kv_len + 1, dtype=torch.int64)
    used = (of_rows.starts < of_rows.ends).cpu()
    for bound, sign in ((of_rows.starts, 1), (of_rows.ends, -1)):
        at = bound.cpu()[used].long()
        change.index_add_(0, at, torch.full_like(at, sign))
    return change.cumsum(0)[:-1] > 0


def shape_of(problem: Problem) -> Shape:
    q, k, v = problem.tensors
    return Shape(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.shape[0], q.element_size())


def cut_of(problem: Problem, backward: bool) -> str:
    cut = problem.cp.masks[0].cut(shape_of(problem), backward)
    return f"{cut.by} in {cut.parts}"


def traffic(problem: Problem, backward: bool) -> dict[str, float]:
    """Bytes that the rank with the most receives (keys, and gradients of its own keys), and the lower bound."""
    group, cp = problem.group, problem.cp
    shape = shape_of(problem)
    plan, rank = cp.masks[0].plan(shape, backward), group.rank()
    keys = sum(int(hop.recv_counts.sum() - hop.recv_counts[rank]) for hop in plan.hops)
    copies = sum(int(hop.send_counts.sum() - hop.send_counts[rank]) for hop in plan.hops)
    owner = torch.empty(problem.mask.kv_len, dtype=torch.int64)
    for other in range(group.size()):
        owner[cp.dispatch.rows(other)] = other
    least_keys, least_copies = 0, 0
    for other in range(group.size()):
        wanted = owner[attended_keys(problem.mask, cp.dispatch.rows(other))]
        least_keys += int((wanted != rank).sum()) if other == rank else 0
        least_copies += int((wanted == rank).sum()) if other != rank else 0
    sizes = torch.tensor([[keys, copies], [least_keys, least_copies]], dtype=torch.float64)
    gradient = shape.key_gradient_bytes() if backward else 0
    moved = (sizes @ torch.tensor([shape.key_bytes(), gradient], dtype=torch.float64)).to(problem.q.device)
    dist.all_reduce(moved, dist.ReduceOp.MAX, group=group)
    received, least = moved.tolist()
    return {"MiB received": received / 2**20, "MiB lower bound": least / 2**20}


def rates(
    problem: Problem, sides: dict[str, Side], mask: str, direction: str, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """(milliseconds, TFLOP/s of a GPU) of each side that has this direction, in turn."""
    works = {name: side.forward if direction == "fwd" else side.backward for name, side in sides.items()}
    timings = slowest({name: work for name, work in works.items() if work is not None}, args.device, args.repeats)
    ms = {name: timing.median_ms for name, timing in timings.items()}
    shared, own = problem.mask.area() / problem.group.size(), 0
    if ALONE in sides:
        own = intervals(mask, problem.q.shape[2], args.device).area()
    heads, dim = args.heads[0], args.dim
    rate = {
        name: attention_tflops(own if name == ALONE else shared, heads, dim, dim, direction, ms[name]) for name in ms
    }
    return ms, rate


def measure(mask: str, tokens: int, mesh: DeviceMesh, args: argparse.Namespace, dtype: torch.dtype) -> list[Row]:
    """Ours beside what uses our kernels, forward and backward."""
    length = tokens * mesh.size()
    problem = operands(intervals(mask, length, args.device), mesh, args, dtype)
    sides = {OURS: ours(problem), COMPUTING: computing_only(problem), ALONE: alone(problem, mask)}
    sides |= {"all-gather": all_gather(problem), "ring": ring(problem)}
    for by, parts in args.cuts:
        cp = ContextParallel(mesh, problem.mask, cut=by, forward_stages=parts, backward_stages=parts)
        sides[f"ours, {by} in {parts}"] = ours(replace(problem, cp=cp))
    heads = f"{args.heads[0]}:{args.heads[1]}"
    rows = []
    for direction in ("fwd", "bwd"):
        ms, rate = rates(problem, sides, mask, direction, args)
        more: dict[str, Any] = {"ranks": mesh.size(), "transport": dist.get_backend(problem.group)}
        more |= {"imbalance": problem.cp.imbalance, "share of one GPU": rate[OURS] / rate[ALONE]}
        more |= {"exposed share": max(0.0, 1 - ms[COMPUTING] / ms[OURS])}
        more |= traffic(problem, direction == "bwd") | {"cut": cut_of(problem, direction == "bwd")}
        own = MaskPlan(intervals(mask, problem.q.shape[2], args.device))
        backend = route(facts_of(AttentionRequest(*problem.tensors, own, problem.scale), True)).name
        beside = {name: value for name, value in rate.items() if name not in (OURS, COMPUTING)}
        rows.append(
            Row(
                *("context parallel", backend, mask, length, heads, args.dim, str(dtype).removeprefix("torch.")),
                *(direction, ms[OURS], rate[OURS], beside, more),
            )
        )
    if args.timeline is not None:
        draw_timeline(problem, args.timeline)
        args.timeline = None
    return rows


def measure_beside(
    name: str, mask: str, rows: list[Row], mesh: DeviceMesh, args: argparse.Namespace, dtype: torch.dtype
) -> None:
    """Adds another side to a cell's rows, measured in turn with ours."""
    problem = operands(intervals(mask, rows[0].S, args.device), mesh, args, dtype)
    sides = {OURS: ours(problem)}
    if name == STOCK:
        sides[name] = stock(problem, mask)
    else:
        sides[name] = ours(operands(problem.mask, mesh, args, dtype, native=True))
    for row in rows:
        assert row.direction is not None
        _, rate = rates(problem, sides, mask, row.direction, args)
        if name in rate:
            row.beside[name] = rate[name]
            row.more[f"ours beside {name}"] = rate[OURS]


# ---- the timeline ---------------------------------------------------------------------------------------------------


def draw_timeline(problem: Problem, folder: Path) -> None:
    """Both passes of every rank: timeline.json for chrome://tracing, timeline.png if matplotlib is there."""
    problem.cp.timeline = Timeline(problem.q.device)
    side = ours(problem)
    problem.cp.timeline = Timeline(problem.q.device)
    side = ours(problem)  # the forward pass, recorded by the second timeline
    assert side.backward is not None
    side.backward()
    spans: list[list[Span] | None] = [None] * problem.group.size()
    dist.all_gather_object(spans, problem.cp.timeline.spans(), group=problem.group)
    problem.cp.timeline = None
    if dist.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "timeline.json").write_text(json.dumps(chrome_trace(dict(enumerate(spans)))))  # type: ignore[arg-type]
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        print("no picture of the timeline: matplotlib is not installed")
        return
    lanes = sorted({span.lane for one in spans for span in one or ()})
    figure, axes = plt.subplots(figsize=(12, 1 + 0.5 * len(lanes) * len(spans)))
    labels = []
    for rank, one in enumerate(spans):
        for i, lane in enumerate(lanes):
            height = len(labels)
            labels.append(f"rank {rank}: {lane}")
            for span in one or ():
                if span.lane == lane:
                    bar = (span.begin / 1e3, (span.end - span.begin) / 1e3)
                    axes.broken_barh([bar], (height - 0.4, 0.8), color=f"C{i}")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("ms")
    figure.savefig(folder / "timeline.png", bbox_inches="tight", dpi=120)
    plt.close(figure)


# ---- the run --------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,32768", help="tokens of each rank")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--heads", default="64:8", help="query heads:key heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--cuts", default="", help="ours cut otherwise, too: keys:1,heads:2,...")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--native", action="store_true", help="native group collectives, too")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave out PyTorch's context parallel")
    parser.add_argument("--timeline", type=Path, help="folder for the timeline of the first mask")
    parser.add_argument("--directory", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.heads = [int(x) for x in args.heads.split(":")]
    cuts = [cut.split(":") for cut in args.cuts.split(",") if cut]
    args.cuts = [(by, int(parts)) for by, parts in cuts]
    return args


def main() -> None:
    args = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        leave("start it with torchrun --nproc-per-node N -m benchmarks.bench_context_parallel")
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        args.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(args.device)
        dist.init_process_group("nccl", device_id=args.device)  # without it the first barrier may hang
    else:
        args.device = torch.device("cpu")
        dist.init_process_group("gloo")
    mesh = init_device_mesh(args.device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    cells: dict[tuple[int, str], list[Row]] = {}

    def report(rows: list[Row]) -> None:
        if dist.get_rank() == 0:
            print(table(rows), *(row.more for row in rows), sep="\n", flush=True)
            write_results("context_parallel", [row for rows in cells.values() for row in rows], args.directory)

    for tokens in map(int, args.tokens.split(",")):
        for mask in args.masks.split(","):
            cells[tokens, mask] = measure(mask, tokens, mesh, args, dtype)
            report(cells[tokens, mask])
    # What may take long to compile comes when the rest is written.
    for name, wanted in ((NATIVE, args.native), (STOCK, args.stock)):
        for (_, mask), rows in cells.items() if wanted else ():
            measure_beside(name, mask, rows, mesh, args, dtype)
            report(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
