"""Time the Hopper backward (backend "ffa") on the benchmark masks, beside cuDNN and FlashAttention-4 where they can.

    python -m benchmarks.bench_ffa_backward [--lengths 2048,8192,32768] [--masks full,causal,...] [--dims 128,192:128]
                                            [--split 8,2,1] [--deterministic] [--softcap] [--many]

Needs a Hopper GPU.  Rates count the mask's exact area and 2.5 times the forward's operations; times hold everything
from ready inputs to the three gradients (plans are made before).  The sides take turns, and the figure is the median
over the rounds.  ``--split`` adds sides with a given number of query heads a work item ("ffa2"), for the cost model;
``--deterministic`` one with a fixed order of sums ("ffa_fixed"), ``--softcap`` one with that score mod.  ``--many``
adds 1,000 causal documents and some 50,000 intervals of shared prefixes in 128K tokens, forward and backward, each
beside one causal triangle of the same area.
"""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.bench_fa4 import alone, package_masks
from benchmarks.bench_ffa import cudnn
from benchmarks.harness import RESULTS, Row, Work, attention_tflops, call_ms, leave, table, write_results
from benchmarks.workloads import MASKS, attention_tensors, many_documents, mask_plan, shared_prefixes
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.cuda_driver import multiprocessors
from magi_flex.kernels.fa4 import Fa4Backend
from magi_flex.kernels.ffa import FfaBackend, backward_instance, forward_schedule, gradient_q_instance
from magi_flex.kernels.ffa_backward import BackwardLaunch, GradientQ
from magi_flex.kernels.ffa_backward_schedule import BackwardSchedule, make_backward_schedule, plan_backward
from magi_flex.kernels.request import AttentionRequest, ScoreProgram, Softcap
from magi_flex.mask_plan import MaskPlan


def gradients_of(work: Work | None, inputs: list[Tensor], d_out: Tensor) -> Work | None:
    """The backward alone of what ``work`` computes from ``inputs`` (which want gradients); None: it cannot do these."""
    if work is None:
        return None

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, d_out, retain_graph=True)

    try:
        out = work()
        out = out[0] if isinstance(out, tuple) else out
        assert isinstance(out, Tensor)
        d_out = d_out if out.shape == d_out.shape else d_out.transpose(1, 2).contiguous().view(out.shape)
        backward()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        print(f"left out: {error}")
        return None
    return backward


def flash_attention_4(plan: MaskPlan, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> dict[str, Work]:
    """The package's backward alone, by its own flags and with a mask_mod; tensors are ``[1, rows, heads, dim]``."""
    if Fa4Backend().missing(q.device) is not None:
        return {}
    masks = package_masks(plan, q)
    return {name: alone(pair, q, k, v, d_out)[1].work for name, pair in masks.items()}


def measure(
    mask: str,
    length: int,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    splits: list[int],
    variants: list[str],
    rounds: int,
) -> Row:
    head_dim, v_dim = dims
    q, k, v, d_out = attention_tensors(length, heads, kv_heads, dims)
    plan = mask_plan(mask, length)
    instance = backward_instance(q.dtype, head_dim, v_dim)
    scale = head_dim**-0.5
    forward = FfaBackend().forward(AttentionRequest(q, k, v, plan, scale))
    results = [torch.empty_like(x) for x in (q, k, v)]
    of_q = None
    if not instance.sum_dq:
        variant = gradient_q_instance(instance)
        of_q = GradientQ(variant, forward_schedule(plan, variant))

    def ffa(schedule: BackwardSchedule) -> Work:
        given = (q, k, v, forward.out, d_out, *results)
        launch = BackwardLaunch(instance, *given, plan.intervals, schedule, scale, gradient_q=of_q)
        return lambda: launch(q, k, v, forward.out, forward.lse, d_out, None, *results)

    def whole(deterministic: bool, score: ScoreProgram) -> Work:
        request = AttentionRequest(q, k, v, plan, scale, score, deterministic)
        given = forward if score.is_identity else FfaBackend().forward(request)
        return lambda: FfaBackend().backward(request, given.out, given.lse, d_out, None)

    sizes = (instance.rows, instance.keys, 1, heads, kv_heads, multiprocessors(q.device))
    chosen = plan_backward(plan, *sizes, row_bytes=instance.row_bytes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sides: dict[str, Work | None] = {"ffa": whole(False, ScoreProgram())}
    for split in splits:
        sides[f"ffa{split}"] = ffa(make_backward_schedule(chosen.plan, 1, split))
    if "deterministic" in variants:
        sides["ffa_fixed"] = whole(True, ScoreProgram())
    if "softcap" in variants:
        sides["ffa_softcap"] = whole(False, ScoreProgram(steps=(Softcap(30.0),)))
    sides["cudnn"] = gradients_of(cudnn(leaves[0], leaves[1], leaves[2], mask), leaves, d_out)
    sides |= flash_attention_4(plan, *(x.transpose(1, 2).contiguous() for x in (q, k, v, d_out)))
    ms = call_ms(sides, max(1, 8192 // length) ** 2, rounds, q.device)
    area = plan.area()
    rate = {name: attention_tflops(area, heads, head_dim, v_dim, "bwd", value) for name, value in ms.items()}
    beside = {name: value for name, value in rate.items() if name != "ffa"}
    return Row(
        "attention", "ffa", mask, length, f"{heads}:{kv_heads}", head_dim, "bfloat16", "bwd", ms["ffa"], rate["ffa"],
        beside, {"heads_an_item": chosen.heads} | ({"v_dim": v_dim} if v_dim != head_dim else {}),
    )  # fmt: skip


def measure_many(name: str, rows: RowIntervals, heads: int, kv_heads: int, rounds: int) -> list[Row]:
    """Very many intervals beside one causal triangle of the same area, forward and backward."""
    on_gpu = RowIntervals(rows.starts.cuda(), rows.ends.cuda(), rows.kv_len)
    head_dim, plans = 128, [MaskPlan(on_gpu).with_outline()]
    triangle = math.isqrt(2 * plans[0].area())
    plans.append(mask_plan("causal", triangle))
    works: dict[str, list[Work]] = {"fwd": [], "bwd": []}
    for plan in plans:
        q, k, v, d_out = attention_tensors(plan.q_len, heads, kv_heads, (head_dim, head_dim))
        request = AttentionRequest(q, k, v, plan, head_dim**-0.5)
        given = FfaBackend().forward(request)
        works["fwd"].append(functools.partial(FfaBackend().forward, request))
        works["bwd"].append(functools.partial(FfaBackend().backward, request, given.out, given.lse, d_out, None))
    found = []
    for direction, pair in works.items():
        ms = call_ms(dict(zip(("ffa", "triangle"), pair, strict=True)), 1, rounds, "cuda")
        rate = {
            side: attention_tflops(plan.area(), heads, head_dim, head_dim, direction, ms[side])
            for side, plan in zip(("ffa", "triangle"), plans, strict=True)
        }
        found.append(
            Row(
                "attention",
                "ffa",
                name,
                plans[0].q_len,
                f"{heads}:{kv_heads}",
                head_dim,
                "bfloat16",
                direction,
                ms["ffa"],
                rate["ffa"],
                {"triangle": rate["triangle"]},
                {"triangle_rows": triangle},
            )  # fmt: skip
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--dims", default="128", help="head dims, or pairs like 192:128")
    parser.add_argument("--deterministic", action="store_true", help="a side with a fixed order of sums")
    parser.add_argument("--softcap", action="store_true", help="a side with a softcap")
    parser.add_argument("--many", action="store_true", help="very many documents and intervals in 128K tokens")
    parser.add_argument("--heads", default="64:8")
    parser.add_argument("--split", default="", help="query heads a work item, comma separated: further sides")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where ffa_backward.json is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a Hopper GPU")
    heads, kv_heads = map(int, args.heads.split(":"))
    splits = [int(x) for x in args.split.split(",") if x]
    rows = []
    variants = [name for name in ("deterministic", "softcap") if getattr(args, name)]
    for pair in args.dims.split(","):
        head_dim, _, v_dim = pair.partition(":")
        dims = (int(head_dim), int(v_dim or head_dim))
        for length in map(int, args.lengths.split(",")):
            for mask in args.masks.split(","):
                rows.append(measure(mask, length, heads, kv_heads, dims, splits, variants, args.rounds))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    if args.many:
        tokens = 128 << 10
        cases = {"many_documents": many_documents(tokens, 1000), "many_prefixes": shared_prefixes(tokens, 512, 112, 4)}
        for name, intervals in cases.items():
            rows += measure_many(name, intervals, heads, kv_heads, args.rounds)
            print(*table(rows[-2:]).splitlines()[1:], sep="\n", flush=True)
    print(table(rows))
    print("written:", write_results("ffa_backward", rows, args.directory))


if __name__ == "__main__":
    main()
