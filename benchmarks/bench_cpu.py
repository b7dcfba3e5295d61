"""The CPU kernels beside ``scaled_dot_product_attention``: same machine, same run, taking turns.

python -m benchmarks.bench_cpu                 # all cases, both thread counts; writes results/cpu_attention.json
python -m benchmarks.bench_cpu --threads 1 --repeats 5 --no-write
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Row, attention_tflops, interleave, ratio, table, write_results
from benchmarks.workloads import document_lengths
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.cpu import CpuBackend
from magi_flex.kernels.request import AttentionRequest
from magi_flex.mask_plan import MaskPlan

BACKEND = CpuBackend()
HEADS, DIM = 8, 64


def _plan(starts_Q: Tensor, ends_Q: Tensor) -> MaskPlan:
    starts, ends = (x.to(torch.int32).view(1, 1, 1, -1) for x in (starts_Q, ends_Q))
    return MaskPlan(RowIntervals.build(starts, ends, starts.shape[3]))


def causal(length: int) -> MaskPlan:
    position = torch.arange(length)
    return _plan(torch.zeros_like(position), position + 1)


def window_256(length: int) -> MaskPlan:
    position = torch.arange(length)
    return _plan(position - 255, position + 1)


def documents_causal(length: int) -> MaskPlan:
    lengths = torch.tensor(document_lengths(length))
    first = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return _plan(first, torch.arange(length) + 1)


MASKS: dict[str, Callable[[int], MaskPlan]] = {
    "causal": causal,
    "window_256": window_256,
    "documents_causal": documents_causal,
}


def measure(mask: str, length: int, dtype: torch.dtype, backward: bool, threads: int, repeats: int) -> Row:
    """One row: forward, or forward and backward; ``beside`` has SDPA's figure where SDPA knows the mask (causal)."""
    torch.set_num_threads(threads)
    plan = MASKS[mask](length)
    q, k, v, d_out = (torch.randn(1, HEADS, length, DIM).to(dtype) for _ in range(4))
    leaves = [x.clone().requires_grad_(backward) for x in (q, k, v)]
    request = AttentionRequest(q, k, v, plan, DIM**-0.5)

    def ours() -> None:
        output = BACKEND.forward(request)
        if backward:
            BACKEND.backward(request, output.out, output.lse, d_out, None)

    def sdpa() -> None:
        out = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
        if backward:
            torch.autograd.grad(out, leaves, d_out)

    candidates: dict[str, Callable[[], object]] = {"cpu": ours}
    if mask == "causal":
        candidates["sdpa"] = sdpa
    timings = interleave(candidates, repeats=repeats, warmup=1)
    direction = "fwd+bwd" if backward else "fwd"
    rate = {
        name: attention_tflops(plan.area(), HEADS, DIM, DIM, direction, timing.median_ms)
        for name, timing in timings.items()
    }
    row = Row(
        bench="attention",
        backend="cpu",
        mask=mask,
        S=length,
        heads=f"{HEADS}:{HEADS}",
        D=DIM,
        dtype=str(dtype).removeprefix("torch."),
        direction=direction,
        ms=timings["cpu"].median_ms,
        tflops=rate.pop("cpu"),
        beside=rate,
        more={"threads": threads, "min_ms": timings["cpu"].min_ms, "area": plan.area()},
    )
    if "sdpa" in timings:
        row.more["sdpa_min_ms"] = timings["sdpa"].min_ms
        row.more["time_over_sdpa"] = ratio(timings, "cpu", "sdpa")
    return row


def _line(row: Row) -> str:
    beside = f", time / SDPA {row.more['time_over_sdpa']:.2f}" if "time_over_sdpa" in row.more else ""
    what = f"{row.mask} S={row.S} {row.dtype} {row.direction} {row.more['threads']} threads"
    return f"{what}: {row.ms:.1f} ms, {1e3 * (row.tflops or 0):.0f} GFLOP/s{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    missing = BACKEND.missing(torch.device("cpu"))
    if missing is not None:
        raise SystemExit(missing)
    cases = [
        ("causal", 4096, dtype, backward) for dtype in (torch.float32, torch.bfloat16) for backward in (False, True)
    ]
    cases += [
        (mask, length, torch.float32, backward)
        for mask, length in (("window_256", 4096), ("window_256", 16384), ("documents_causal", 16384))
        for backward in (False, True)
    ]
    rows = []
    for threads in sorted(set(options.threads)):
        for mask, length, dtype, backward in cases:
            # Where the other side has no fast bfloat16 product it takes ten seconds a call.
            slow = dtype == torch.bfloat16 and backward and not torch.backends.cpu.get_cpu_capability() == "AVX512"
            rows.append(measure(mask, length, dtype, backward, threads, 2 if slow else options.repeats))
            print(_line(rows[-1]), flush=True)
    print(table(rows))
    if not options.no_write:
        print(write_results("cpu_attention", rows))


if __name__ == "__main__":
    main()
