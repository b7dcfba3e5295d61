"""Time flash-attn-4's kernels as backend "fa4" uses them, forward and backward, beside what the package does alone.

    python -m benchmarks.bench_fa4 [--lengths 8192,...] [--masks full,...,images] [--rounds 7]

Needs a GPU that flash-attn-4 has kernels for.  Everybody runs on a plan made before.  "host_us" is what a call takes
the host, with an idle GPU.  Sides:

    fa4          the backend as it is: flags, packed documents or interval bits
    bits         the backend with interval bits and block lists for every mask
    flags        the package's own functions with its flags or packed sequences, where it has any for the mask
    elements     the package with an interval mask_mod called score by score, and lists of 128 x 128 blocks
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_ffa import MASKS, Work, bounds, flash_attention_4
from benchmarks.bench_ffa_backward import gradients_of
from benchmarks.harness import RESULTS, Row, attention_tflops, leave, table, write_results
from benchmarks.workloads import document_lengths
from inductor_lowering.to_intervals import plan_from_mask_mod
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import fa4
from magi_flex.kernels.fa4 import Fa4Backend, mask_arguments, score_arguments
from magi_flex.kernels.fa4_masks import KernelMask
from magi_flex.kernels.fa4_tiles import BlockSize, block_lists, padded_bounds
from magi_flex.kernels.request import AttentionRequest
from magi_flex.mask_plan import MaskPlan

CALLS = 4  # of a side in a row
# Masks that the package has no flags for, beside block causal documents.
OTHERS = ("sink_window", "document_prefix_lm", "shared_prefix", "images")


def plan_of(mask: str, length: int) -> MaskPlan:
    """The mask's plan on the GPU."""
    if mask in MASKS:
        lo, hi = (x.cuda().view(1, 1, 1, length) for x in bounds(mask, length))
        return MaskPlan(RowIntervals(lo, hi, length))
    return plan_from_mask_mod(_mask_mod(mask, length), 1, 1, length, length, "cuda")


def _mask_mod(mask: str, length: int) -> mods.MaskMod:
    lengths = torch.tensor(document_lengths(length), device="cuda")
    number = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    if mask == "sink_window":
        return mods.sink_window(64, 1024)
    if mask == "document_prefix_lm":
        positions = torch.arange(length, device="cuda") - (lengths.cumsum(0) - lengths)[number]
        return mods.document_prefix_lm(number, positions, lengths // 4)
    if mask == "shared_prefix":
        prompt = torch.arange(length, device="cuda") < length // 4
        response = torch.arange(length, device="cuda") // max(1, length // 16)
        return mods.shared_prefix(torch.where(prompt, -1, response))
    # Images of 576 tokens in text of as many.
    place = torch.arange(length, device="cuda") // 576
    return mods.image_blocks(torch.where(place % 2 == 1, place, -1))


def elements(plan: MaskPlan, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Work, Work]:
    """Forward and backward with the mask_mod called score by score; tensors are ``[B, rows, heads, dim]``."""
    interface, arch = fa4.package().interface, fa4.architecture(q.device)
    arguments: list[dict[str, Any]] = []
    for backward in (False, True):
        block = BlockSize(128 if arch // 10 == 9 or backward else 256, 128)
        lists = block_lists(plan, block, transposed=backward)
        mask = KernelMask({}, None, padded_bounds(plan.intervals), False, lists, block)
        of_mask = mask_arguments(mask, arch, backward, as_bits=False)
        of_tables = score_arguments(mask, None, q.transpose(1, 2), backward)
        arguments.append(of_mask | of_tables | {"softmax_scale": q.shape[3] ** -0.5})
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **arguments[0])
    return (
        lambda: interface._flash_attn_fwd(q, k, v, return_lse=True, **arguments[0]),
        lambda: interface._flash_attn_bwd(q, k, v, out, d_out, lse, **arguments[1]),
    )


def backend(plan: MaskPlan, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Work, Work]:
    """Forward and backward through the backend; ``[B, heads, rows, dim]``, rows before heads in memory."""
    request = AttentionRequest(q, k, v, plan, q.shape[3] ** -0.5, max_score=False)
    result = Fa4Backend().forward(request)
    return (
        lambda: Fa4Backend().forward(request),
        lambda: Fa4Backend().backward(request, result.out, result.lse, d_out, None),
    )


def without_structure(plan: MaskPlan) -> MaskPlan:
    """The same mask, of which nobody finds out that flags would do."""
    rows = plan.intervals
    unknown: Any = object()
    return MaskPlan(RowIntervals(rows.starts.clone(), rows.ends.clone(), rows.kv_len), structure=unknown)


def timed(sides: dict[str, Work], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of the GPU and microseconds of the host for a call of each side, medians over ``rounds``.

    A call goes ahead of those that are timed, and the host is ahead of the GPU from then on.
    """
    gpu: dict[str, list[float]] = {name: [] for name in sides}
    host: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds + 1):
        for name, work in sides.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                work()
            taken = 1e6 * (time.perf_counter() - start) / CALLS
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                work()
            end.record()
            end.synchronize()
            if round_number:
                host[name].append(taken)
                gpu[name].append(begin.elapsed_time(end) / CALLS)
    return ({name: statistics.median(x) for name, x in of.items()} for of in (gpu, host))  # type: ignore[return-value]


def measure(mask: str, length: int, heads: tuple[int, int], dims: tuple[int, int], rounds: int) -> list[Row]:
    torch.manual_seed(0)
    plan = plan_of(mask, length)
    if plan.bit_tiles is not None:
        print(f"left out: {mask} has bit tiles")
        return []
    sizes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1]))
    by_row = [torch.randn(1, length, n, dim, device="cuda", dtype=torch.bfloat16) for n, dim in sizes]
    by_head = [x.transpose(1, 2) for x in by_row]
    leaves = [x.detach().clone().requires_grad_() for x in by_row[:3]]
    sides: dict[str, tuple[Work | None, Work | None]] = {
        "fa4": backend(plan, by_head[0], by_head[1], by_head[2], by_head[3]),
        "elements": elements(plan, by_row[0], by_row[1], by_row[2], by_row[3]),
    }
    if mask in MASKS:
        sides["bits"] = backend(without_structure(plan), by_head[0], by_head[1], by_head[2], by_head[3])
        flags = flash_attention_4(by_head[0], by_head[1], by_head[2], mask)
        with_leaves = flash_attention_4(*(x.transpose(1, 2) for x in leaves), mask)
        sides["flags"] = (flags, gradients_of(with_leaves, leaves, by_head[3]))
    rows = []
    for number, direction in enumerate(("fwd", "bwd")):
        works = {name: pair[number] for name, pair in sides.items()}
        ms, host = timed({name: work for name, work in works.items() if work is not None}, rounds)
        area = plan.area()
        rate = {name: attention_tflops(area, heads[0], *dims, direction, value) for name, value in ms.items()}
        beside = {name: value for name, value in rate.items() if name != "fa4"}
        more: dict[str, Any] = {
            "intervals": plan.intervals.max_intervals,
            "host_us": {name: round(value, 1) for name, value in host.items()},
        }
        more |= {"v_dim": dims[1]} if dims[0] != dims[1] else {}
        given = (f"{heads[0]}:{heads[1]}", dims[0], "bfloat16", direction)
        rows.append(Row("attention", "fa4", mask, length, *given, ms["fa4"], rate["fa4"], beside, more))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="8192,1024,2048,32768")
    parser.add_argument("--masks", default=",".join((*MASKS, *OTHERS)))
    parser.add_argument("--dims", default="128:128")
    parser.add_argument("--heads", default="64:8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where fa4_attention.json is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a GPU of compute capability 9, 10 or 11")
    reason = Fa4Backend().missing(torch.device("cuda", 0))
    if reason is not None:
        leave(reason)
    heads, kv_heads = map(int, args.heads.split(":"))
    rows: list[Row] = []
    for pair in args.dims.split(","):
        head_dim, v_dim = map(int, pair.split(":"))
        for length in map(int, args.lengths.split(",")):
            for mask in args.masks.split(","):
                rows += measure(mask, length, (heads, kv_heads), (head_dim, v_dim), args.rounds)
                for row in rows[-2:]:
                    print(table([row]).splitlines()[-1], row.more, flush=True)
                write_results("fa4_attention", rows, args.directory)  # what a killed run has seen is kept
    print(table(rows))
    print("written:", write_results("fa4_attention", rows, args.directory))


if __name__ == "__main__":
    main()
