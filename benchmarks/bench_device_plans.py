"""Tile plans on a GPU: built by our kernels beside torch operations, with peak memory; needs a GPU and Triton.

    python -m benchmarks.bench_device_plans [--lengths 8192,32768,1048576] [--directory OUT]

A row is one plan: ``fwd`` ragged tiles of 24 x 80 (query positions of a packed tile), ``bwd`` ragged key tiles of 128
with steps of 64; ``fwd from ids`` is all of it, from document ids to tiles.  ``ms`` is our kernels launched one by one,
``graph_ms`` the same inside a CUDA graph, ``peak_mib`` what planning allocates at most, intervals included.  Beside:
torch's builder, and (documents, causal at 32K at most) stock ``create_block_mask``, compiled, which also stands beside
the plan of a dense table (``--stream``).  Targets: documents, causal in 0.15 ms at 32K and in 5 ms and 32 MiB at 1M.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask

import magi_flex.ops  # noqa: F401  (the operators)
from benchmarks.bench_tiles import plans
from benchmarks.harness import RESULTS, Row, interleave, leave, table, write_results
from benchmarks.workloads import document_lengths
from inductor_lowering.capture import trace_mask_mod
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import device_plans
from magi_flex.kernels.device_plans import build_device_plan
from magi_flex.mask_plan import MaskPlan
from magi_flex.op_specs import MaskSpec, split_captures
from magi_flex.tiles import build_tile_plan

DIRECTIONS = {"fwd": (24, 80, False, 1), "bwd": (64, 128, True, 8)}
STOCK_LONGEST = 32768


def graph_of(work: Callable[[], object]) -> Callable[[], object]:
    """``work`` captured, to be replayed."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    return lambda: (graph.replay(), kept)


def peak_mib(work: Callable[[], object]) -> float:
    """Most memory that is allocated while ``work`` runs, beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = work()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def stock_block_mask(size: int) -> Callable[[], object]:
    """Stock FlexAttention's own plan of the documents, compiled."""
    ids = mods.documents_from_lengths(document_lengths(size), device="cuda")[0]
    compiled = torch.compile(create_block_mask)
    return lambda: compiled(mods.document_causal(ids), None, None, size, size, "cuda")


def plan_from_ids(size: int) -> Callable[[], object]:
    """The whole way of packed documents, causal: from a tensor of document ids to tiles of the forward pass."""
    ids = mods.documents_from_lengths(document_lengths(size), device="cuda")[0]
    program, captures = trace_mask_mod(mods.document_causal(ids), "cuda")
    order, tensors, ints = split_captures(captures)
    spec = MaskSpec(program.to_json(), order).to_json()

    def build() -> object:
        starts, ends, *rest = torch.ops.magi_flex.plan_labels(tensors, ints, spec, 1, 1, size, size, ids.device)
        return rest, build_device_plan(RowIntervals(starts, ends, size), *DIRECTIONS["fwd"][:2], False, True)

    return build


def streamed(size: int, rounds: int) -> Row:
    """The plan of a random table, which has no structure, beside stock ``create_block_mask``, compiled and not."""
    allowed = torch.rand(size, size, device="cuda") < 0.5

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return allowed[q, k]

    program, captures = trace_mask_mod(mask_mod, "cuda")
    order, tensors, ints = split_captures(captures)
    spec = MaskSpec(program.to_json(), order)
    arguments = (mask_mod, None, None, size, size, "cuda")
    compiled = torch.compile(create_block_mask)
    work: dict[str, Callable[[], object]] = {
        "ours": lambda: spec.build(tensors, ints, 1, 1, size, size, allowed.device),
        "stock_create_block_mask": lambda: compiled(*arguments),
        "stock_create_block_mask_uncompiled": lambda: create_block_mask(*arguments),
    }
    timings = interleave(work, repeats=min(rounds, 5), warmup=1, device="cuda")
    beside = {name: timing.median_ms for name, timing in timings.items() if name != "ours"}
    more = {name: peak_mib(one) for name, one in work.items()}
    more = {"peak_mib": more.pop("ours"), **{f"{name}_peak_mib": mib for name, mib in more.items()}}
    return Row("plan", "stream", "dense table", size, ms=timings["ours"].median_ms, beside=beside, more=more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="8192,32768,1048576")
    parser.add_argument("--masks", default="causal;documents, causal;window 1024, causal")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help="nothing beside")
    parser.add_argument("--stream", type=int, default=0, help="also the plan of a dense table of that many tokens")
    parser.add_argument("--directory", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        leave("a GPU is needed")
    missing = device_plans.missing()
    if missing:
        leave(missing)
    device = torch.device("cuda")
    rows = []
    for size in (int(x) for x in options.lengths.split(",")):
        for mask, host_plan in plans(size).items():
            if mask not in options.masks.split(";"):
                continue
            intervals = RowIntervals(host_plan.starts.cuda(), host_plan.ends.cuda(), size)
            for direction, (q_tile, kv_tile, transposed, align) in DIRECTIONS.items():

                def ours(a: object = (intervals, q_tile, kv_tile, transposed, True, align)) -> object:
                    return build_device_plan(*a)  # type: ignore[misc]

                def torchs(a: object = (MaskPlan(intervals), q_tile, kv_tile, transposed, True, align)) -> object:
                    return build_tile_plan(*a)  # type: ignore[misc]

                work = {"device": ours, "graph": graph_of(ours)}
                if not options.alone:
                    work["torch"] = torchs
                if not options.alone and mask == "documents, causal" and direction == "fwd" and size <= STOCK_LONGEST:
                    work["stock_create_block_mask"] = stock_block_mask(size)
                timings = interleave(work, repeats=options.rounds, warmup=3, device=device)
                tiles = ours()
                more: dict[str, float | int] = {
                    "graph_ms": timings["graph"].median_ms,
                    "peak_mib": peak_mib(ours) + intervals.nbytes / 2**20,
                    "plan_bytes": tiles.nbytes,  # type: ignore[attr-defined]
                    "q_tile": q_tile,
                    "kv_tile": kv_tile,
                }
                if not options.alone:
                    more["torch_peak_mib"] = peak_mib(torchs) + intervals.nbytes / 2**20
                beside = {name: timing.median_ms for name, timing in timings.items() if name not in ("device", "graph")}
                ms = timings["device"].median_ms
                rows.append(Row("plan", "device", mask, size, direction=direction, ms=ms, beside=beside, more=more))
                print(f"{mask}, {size}, {direction}: {more}", flush=True)
                write_results("device_plans", rows, options.directory)
        ids = plan_from_ids(size)
        timings = interleave({"device": ids, "graph": graph_of(ids)}, repeats=options.rounds, warmup=3, device=device)
        more = {"graph_ms": timings["graph"].median_ms, "peak_mib": peak_mib(ids)}
        ms = timings["device"].median_ms
        rows.append(Row("plan", "device", "documents, causal", size, direction="fwd from ids", ms=ms, more=more))
        print(f"from ids, {size}: {ms:.3f} ms, {more}", flush=True)
        write_results("device_plans", rows, options.directory)
    if options.stream:
        rows.append(streamed(options.stream, options.rounds))
        print(rows[-1], flush=True)
        write_results("device_plans", rows, options.directory)
    print(table(rows))


if __name__ == "__main__":
    main()
