"""Time the Triton kernels (backend "triton") on the benchmark masks, beside PyTorch's compiled FlexAttention.

    python -m benchmarks.bench_triton [--lengths 2048,8192,32768] [--masks full,causal,...] [--dims 128,64] [--decode]

Needs a GPU.  Rates count the mask's exact area (backward: 2.5 times the forward's operations).  Plans and block masks
are made before; a backward is everything from ready inputs to the three gradients.  The sides take turns, and the
figure is the median over the rounds.  ``--decode`` adds one query of every head over all keys.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.bench_ffa_backward import gradients_of
from benchmarks.harness import RESULTS, Row, Work, attention_tflops, call_ms, leave, table, write_results
from benchmarks.workloads import BLOCK, MASKS, WINDOW, attention_tensors, document_lengths, mask_plan
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.request import AttentionRequest
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.mask_plan import MaskPlan

KERNEL = TritonBackend()


def stock_mask(mask: str, length: int) -> BlockMask | None:
    """The mask as a user of FlexAttention states it."""
    lengths = torch.tensor(document_lengths(length), device="cuda")
    document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    first = (lengths.cumsum(0) - lengths)[document]
    mods: dict[str, Any] = {
        "causal": lambda b, h, q, k: q >= k,
        "varlen_full": lambda b, h, q, k: document[q] == document[k],
        "varlen_causal": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "sw_causal": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "varlen_block_causal": lambda b, h, q, k: (
            (document[q] == document[k]) & ((q - first[q]) // BLOCK >= (k - first[q]) // BLOCK)
        ),
    }
    if mask == "full":
        return None
    return create_block_mask(mods[mask], None, None, length, length, device="cuda")


def measure(mask: str, length: int, heads: int, kv_heads: int, head_dim: int, rounds: int) -> list[Row]:
    """Forward and backward."""
    q, k, v, d_out = attention_tensors(length, heads, kv_heads, (head_dim, head_dim))
    plan = mask_plan(mask, length)
    request = AttentionRequest(q, k, v, plan, head_dim**-0.5)
    block_mask = stock_mask(mask, length)
    flex = torch.compile(flex_attention, fullgraph=True)

    def stock(*operands: Tensor) -> Tensor:
        out = flex(*operands, block_mask=block_mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    ours = KERNEL.forward(request)
    torch.testing.assert_close(ours.out, stock(q, k, v), atol=2e-2, rtol=2e-2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sides: dict[str, dict[str, Work | None]] = {
        "fwd": {"triton": lambda: KERNEL.forward(request), "flex": lambda: stock(q, k, v)},
        "bwd": {
            "triton": lambda: KERNEL.backward(request, ours.out, ours.lse, d_out, None),
            "flex": gradients_of(lambda: stock(*leaves), leaves, d_out),
        },
    }
    rows = []
    for direction, works in sides.items():
        ms = call_ms(works, max(1, 32768 // length), rounds, "cuda")
        rate = {
            name: attention_tflops(plan.area(), heads, head_dim, head_dim, direction, value)
            for name, value in ms.items()
        }
        rows.append(
            Row(
                "attention", "triton", mask, length, f"{heads}:{kv_heads}", head_dim, "bfloat16", direction,
                ms["triton"], rate["triton"], {"flex": rate["flex"]},
            )
        )  # fmt: skip
    return rows


def measure_decoding(length: int, heads: int, kv_heads: int, head_dim: int, rounds: int) -> Row:
    kind: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, heads, 1, head_dim, **kind)
    k, v = (torch.randn(1, kv_heads, length, head_dim, **kind) for _ in range(2))
    request = AttentionRequest(q, k, v, MaskPlan(RowIntervals.full(1, length, "cuda")), head_dim**-0.5)
    flex = torch.compile(flex_attention, fullgraph=True)
    works: dict[str, Work | None] = {
        "triton": lambda: KERNEL.forward(request),
        "flex": lambda: flex(q, k, v, enable_gqa=True),
    }
    ms = call_ms(works, 20, rounds, "cuda")
    gigabytes = (k.nbytes + v.nbytes) / 1e9
    return Row(
        "decoding", "triton", "full", length, f"{heads}:{kv_heads}", head_dim, "bfloat16", "fwd", ms["triton"],
        beside={"flex": ms["flex"]}, more={"GB/s": gigabytes / ms["triton"] * 1e3},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--dims", default="128")
    parser.add_argument("--heads", default="64:8")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where triton.json is written")
    args = parser.parse_args()
    if not torch.cuda.is_available() or KERNEL.missing(torch.device("cuda")) is not None:
        leave("needs a GPU with Triton")
    heads, kv_heads = map(int, args.heads.split(":"))
    rows: list[Row] = []
    for head_dim in map(int, args.dims.split(",")):
        for length in map(int, args.lengths.split(",")):
            for mask in args.masks.split(","):
                torch._dynamo.reset()
                rows += measure(mask, length, heads, kv_heads, head_dim, args.rounds)
                print("\n".join(table(rows[-2:]).splitlines()[-2:]), flush=True)
            if args.decode:
                rows.append(measure_decoding(length, heads, kv_heads, head_dim, args.rounds))
    print(table(rows))
    print("written:", write_results("triton", rows, args.directory))


if __name__ == "__main__":
    main()
