"""Masks to plans: time and peak memory from a mask_mod to its plan and BlockMask, beside torch's create_block_mask.

    python -m benchmarks.bench_plan                       # all lengths
    python -m benchmarks.bench_plan --seqlens 16384 --stock-up-to 0

"ms" is a step's whole cost: tracing the mask_mod and solving it, in one thread; "cpu_ms" is the processor time of that,
which other work on the machine does not inflate.  Stock create_block_mask evaluates every pair, so it runs up to
--stock-up-to tokens only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as stock

from benchmarks.harness import Row, interleave, table, write_results
from benchmarks.workloads import document_lengths
from inductor_lowering.capture import MaskMod, trace_mask_mod
from inductor_lowering.to_intervals import plan_from_mask_mod, plan_with_report
from magi_flex.block_mask import create_block_mask

DOCUMENTS = 32
STATM = Path("/proc/self/statm")


def mask_mods(size: int) -> dict[str, MaskMod]:
    """The benchmark masks; label tensors as a data loader makes them."""
    lengths = torch.tensor(document_lengths(size))
    doc = torch.repeat_interleave(torch.arange(len(lengths)), lengths).int()
    position = torch.arange(size) - (lengths.cumsum(0) - lengths)[doc]
    image = torch.where(doc % 2 == 1, doc, -1)

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    return {
        "causal": causal,
        "documents, causal": lambda b, h, q, k: (doc[q] == doc[k]) & (k <= q),
        "window 1024, causal": lambda b, h, q, k: (k <= q) & (q - k < 1024),
        "documents, block causal": lambda b, h, q, k: (doc[q] == doc[k]) & (position[k] // 2048 <= position[q] // 2048),
        "image blocks in causal text": lambda b, h, q, k: (k <= q) | ((image[q] == image[k]) & (image[q] >= 0)),
    }


def new_documents(size: int) -> MaskMod:
    """Document-causal with DOCUMENTS documents of new random lengths."""
    cuts = torch.randperm(size - 1)[: DOCUMENTS - 1].sort().values + 1
    doc = torch.bucketize(torch.arange(size), cuts, right=True)
    return lambda b, h, q, k: (doc[q] == doc[k]) & (k <= q)


def peak_bytes(work: Callable[[], object]) -> int:
    """How far the process's resident memory rises above where it stood while ``work`` runs (Linux)."""
    page, done, highest = 4096, threading.Event(), [0]

    def resident() -> int:
        return int(STATM.read_text().split()[1]) * page

    def watch() -> None:
        while not done.is_set():
            highest[0] = max(highest[0], resident())
            time.sleep(2e-4)

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what earlier work has freed would hide what this one takes
    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    done.set()
    watcher.join()
    del kept
    return max(0, highest[0] - before)


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """Median processor time of one call."""
    samples = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        samples.append(1e3 * (time.process_time() - start))
    return statistics.median(samples)


def measure(mask: str, mask_mod: MaskMod, size: int, with_stock: bool, repeats: int) -> Row:
    sizes = (1, 1, size, size)
    candidates: dict[str, Callable[[], object]] = {
        "plan": lambda: plan_from_mask_mod(mask_mod, *sizes),
        "create_block_mask": lambda: create_block_mask(mask_mod, *sizes, "cpu"),
    }
    candidates["plan"]()  # loads what is loaded once
    more: dict[str, object] = {"peak_bytes": peak_bytes(candidates["plan"])}
    if with_stock:
        candidates["stock create_block_mask"] = lambda: stock.create_block_mask(mask_mod, *sizes, "cpu")
        more["stock_peak_bytes"] = peak_bytes(candidates["stock create_block_mask"])
    timings = interleave(candidates, repeats=repeats, warmup=1)
    program, captures = trace_mask_mod(mask_mod)
    plan, report = plan_with_report(program, captures, *sizes)
    more |= {"plan_bytes": plan.nbytes, "cpu_ms": cpu_ms(candidates["plan"], repeats), "rules": ", ".join(report.rules)}
    beside = {name: timing.median_ms for name, timing in timings.items() if name != "plan"}
    return Row("plan", report.path, mask, size, ms=timings["plan"].median_ms, beside=beside, more=more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", default="4096,16384,65536,262144,1048576")
    parser.add_argument("--stock-up-to", type=int, default=8192, help="tokens; stock needs about 10 bytes a pair")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [int(x) for x in args.seqlens.split(",")]
    rows = []
    for size in lengths:
        for mask, mask_mod in mask_mods(size).items():
            rows.append(measure(mask, mask_mod, size, size <= args.stock_up_to, args.repeats))
    rows.append(measure("causal", mask_mods(96000)["causal"], 96000, False, args.repeats))
    rows.append(measure(f"{DOCUMENTS} new documents, causal", new_documents(800_000), 800_000, False, args.repeats))
    print(table(rows))
    for row in rows:
        more = row.more
        print(
            f"{row.mask}, {row.S}: cpu {more['cpu_ms']:.1f} ms, peak {more['peak_bytes'] / 1e6:.1f} MB, {more['rules']}"
        )
    if not args.no_save:
        print(write_results("plan", rows))


if __name__ == "__main__":
    main()
