"""Time the kernels of the native group collectives alone, on one GPU that plays both ranks.

    python -m benchmarks.bench_native_collectives [--rows 65536] [--multiprocessors 4,8,16,32,64]

Half of a rank's key and value rows go to the other rank, and their float32 gradients come back.  Staging buffers are
ordinary memory of the same GPU, so this is the rate of the kernels and not of a link: a kernel that moves more here
than the link can carry takes no more multiprocessors than it needs.  Beside it, the copies that an all-to-all needs at
either end: gathering rows into a message (index_select), and putting them in their places (index_copy_, index_add_).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, Row, interleave, leave, table, write_results
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.native_exchange import build_native, push_rows, sum_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65536, help="key rows of a rank; half of them are sent")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--multiprocessors", default="4,8,16,32,64")
    parser.add_argument("--directory", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a GPU")
    sent, device = args.rows // 2, torch.device("cuda")
    plan = GroupPlan.from_splits([sent, args.rows - sent], [[1], []], [sent], [1], 2)
    plan = build_native(plan, torch.tensor([[0, sent], [sent, 0]]), 0, device)
    native = plan.native
    assert native is not None
    keys_BGKD = torch.randn(1, args.heads, args.rows, args.dim, device=device).bfloat16()
    rows_KBGD = keys_BGKD.movedim(2, 0)
    gradients = torch.randn(sent, 1, args.heads, args.dim, device=device)
    total = torch.zeros(args.rows, 1, args.heads, args.dim, device=device)
    staging = torch.empty(2, gradients.nbytes, dtype=torch.uint8, device=device)
    peers = torch.tensor([x.data_ptr() for x in staging], device=device)
    arrived = staging[0].view(torch.float32).view(gradients.shape).zero_()
    message = torch.empty(sent, 1, args.heads, args.dim, dtype=torch.bfloat16, device=device)
    received = torch.empty_like(message)
    result = torch.empty_like(message)
    counts = [int(x) for x in args.multiprocessors.split(",")]
    works = {
        "gather rows": lambda: torch.index_select(rows_KBGD, 0, plan.send_index, out=message),
        "place rows": lambda: result.index_copy_(0, plan.recv_index, received),
        "add rows": lambda: total.index_add_(0, plan.send_index, arrived),
    }
    for count in counts:
        works[f"push {count}"] = lambda n=count: push_rows(rows_KBGD, plan.send_index, native.cast_routes, peers, 0, n)
        works[f"push gradients {count}"] = lambda n=count: push_rows(
            gradients, plan.recv_index, native.reduce_routes, peers, 0, n
        )
        works[f"sum {count}"] = lambda n=count: sum_rows(total, arrived, native.copies, native.row_ptr, n)
    timings = interleave(works, repeats=15, device=device)
    moved = {"push": message.nbytes, "gather": message.nbytes, "place": message.nbytes}
    rows = []
    for name, timing in timings.items():
        words = name.split()
        payload = moved.get(words[0], gradients.nbytes) if "gradients" not in name else gradients.nbytes
        more = {"MiB": payload / 2**20, "us per MiB": 1e3 * timing.median_ms / (payload / 2**20)}
        more["payload GB/s"] = payload / timing.median_ms / 1e6
        ours = words[-1].isdigit()
        if ours:
            more["multiprocessors"] = int(words[-1])
        kind = " ".join(words[:-1]) if ours else name
        rows.append(
            Row("group collective", "native" if ours else "torch", kind, args.rows, ms=timing.median_ms, more=more)
        )
        print(
            f"{name:22} {timing.median_ms:8.4f} ms {more['payload GB/s']:8.0f} GB/s of {more['MiB']:.0f} MiB",
            flush=True,
        )
    print(table(rows))
    print(write_results("native_collectives", rows, args.directory))


if __name__ == "__main__":
    main()
