"""Time the Hopper kernels (backend "ffa") on the benchmark masks, beside cuDNN and FlashAttention-4 where they can.

    python -m benchmarks.bench_ffa [--lengths 2048,8192,32768] [--masks full,causal,...] [--dims 128:128,64:64]

Needs a Hopper GPU.  FlashAttention-4 is there twice: by its own flags ("fa4"), where it has any for the mask, and with
a mask_mod that is called score by score and block lists ("fa4_mask_mod").  Rates count the mask's exact area.
Everybody's time is that of a launch on ready inputs (plans are made before); the sides take turns, and the figure is
the median over the rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bench_fa4 import forward_alone, package_masks
from benchmarks.harness import RESULTS, Row, Work, attention_tflops, call_ms, leave, table, write_results
from benchmarks.workloads import MASKS, attention_tensors, mask_plan
from magi_flex.kernels.cuda_driver import multiprocessors
from magi_flex.kernels.fa4 import Fa4Backend
from magi_flex.kernels.ffa import forward_instance, forward_schedule
from magi_flex.kernels.ffa_forward import ForwardLaunch
from magi_flex.kernels.tile_plans import has_room
from magi_flex.mask_plan import MaskPlan


def cudnn(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Work | None:
    if mask not in ("full", "causal"):
        return None

    def work() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=mask == "causal", enable_gqa=True
            )

    return work


def flash_attention_4(plan: MaskPlan, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Work]:
    """The package's forward alone, by its own flags and with a mask_mod; tensors are ``[1, rows, heads, dim]``."""
    if Fa4Backend().missing(q.device) is not None:
        return {}
    _, rows, heads, _ = q.shape
    out, lse = q.new_empty(1, rows, heads, v.shape[3]), torch.empty(1, heads, rows, device=q.device)
    masks = package_masks(plan, q)
    return {name: forward_alone(pair[0], q, k, v, out, lse).work for name, pair in masks.items()}


def measure(mask: str, length: int, heads: int, kv_heads: int, dims: tuple[int, int], rounds: int) -> Row:
    head_dim, v_dim = dims
    q, k, v, out = attention_tensors(length, heads, kv_heads, dims)
    plan = mask_plan(mask, length)
    instance = forward_instance(
        q.dtype, head_dim, v_dim, heads // kv_heads, 1,
        rows=heads * length, multiprocessors=multiprocessors(q.device), counted=has_room(plan),
    )  # fmt: skip
    schedule = forward_schedule(plan, instance)
    lse = torch.empty(1, heads, length, device="cuda")
    launch = ForwardLaunch(instance, q, k, v, out, plan.intervals, schedule, head_dim**-0.5)
    sides: dict[str, Work | None] = {
        "ffa": lambda: launch(q, k, v, out, lse, None),
        "cudnn": cudnn(q, k, v, mask),
        **flash_attention_4(plan, *(x.transpose(1, 2).contiguous() for x in (q, k, v))),
    }
    ms = call_ms(sides, max(1, 8192 // length) ** 2, rounds, q.device)
    area = plan.area()
    rate = {name: attention_tflops(area, heads, head_dim, v_dim, "fwd", value) for name, value in ms.items()}
    beside = {name: value for name, value in rate.items() if name != "ffa"}
    return Row(
        "attention", "ffa", mask, length, f"{heads}:{kv_heads}", head_dim, "bfloat16", "fwd", ms["ffa"], rate["ffa"],
        beside, {"v_dim": v_dim} if v_dim != head_dim else {},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--dims", default="128:128")
    parser.add_argument("--heads", default="64:8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where ffa_forward.json is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a Hopper GPU")
    heads, kv_heads = map(int, args.heads.split(":"))
    rows = []
    for pair in args.dims.split(","):
        head_dim, v_dim = map(int, pair.split(":"))
        for length in map(int, args.lengths.split(",")):
            for mask in args.masks.split(","):
                rows.append(measure(mask, length, heads, kv_heads, (head_dim, v_dim), args.rounds))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    print("written:", write_results("ffa_forward", rows, args.directory))


if __name__ == "__main__":
    main()
