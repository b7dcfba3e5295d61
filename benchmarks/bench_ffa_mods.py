"""Time score mods, bit tiles and plans with unused capacity in the Hopper kernels (backend "ffa").

    python -m benchmarks.bench_ffa_mods [--length 8192] [--dim 128]

Every mod is run as generated code, and as steps where it has them; a plain call stands beside all of them.  Times are
of the backend's forward and backward with plans made before, causal, in turns; the figure is the median over rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.harness import RESULTS, Row, attention_tflops, interleave, leave, table, write_results
from inductor_lowering.tile_program import joint_program, score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa import FfaBackend, forward_instance, forward_schedule
from magi_flex.kernels.ffa_forward import launch_forward
from magi_flex.kernels.request import AttentionRequest, Distance, ScoreProgram, Softcap
from magi_flex.kernels.tile_plans import choose_builder
from magi_flex.mask_plan import MaskPlan

HEADS, KV_HEADS = 64, 8


def general(mod: Callable[..., Tensor], *captures: Tensor) -> ScoreProgram:
    """The program of ``mod(*captures)``, of a score and its place, whose captures want no gradients."""

    def forward(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captures: Tensor) -> Tensor:
        return mod(*captures)(score, b, h, q, k)

    def joint(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor, *captures: Tensor) -> list:
        leaf = score.detach().requires_grad_()
        (d_score,) = torch.autograd.grad(forward(leaf, b, h, q, k, *captures), leaf, grad)
        return [d_score, None, None, None, None, *[None] * len(captures)]

    score = torch.zeros((), device="cuda")
    places = [torch.zeros((), dtype=torch.int32, device="cuda") for _ in range(4)]
    with item_access_as_index():
        programs = make_fx(forward)(score, *places, *captures), make_fx(joint)(score, *places, score, *captures)
    needs_grad = (False,) * len(captures)
    return ScoreProgram(None, score_program(programs[0]), joint_program(programs[1]), captures, needs_grad)


def score_programs(length: int) -> dict[str, ScoreProgram]:
    slopes = mods.alibi_slopes(HEADS, "cuda")
    buckets = torch.randn(HEADS, 32, device="cuda")
    document = torch.arange(length, device="cuda").div(700, rounding_mode="floor").int()
    relative = torch.randn(HEADS, 2 * length, device="cuda").bfloat16()
    return {
        "none": ScoreProgram(),
        "softcap_steps": ScoreProgram(steps=(Softcap(20.0),)),
        "softcap": general(lambda: mods.softcap(20.0)),
        "alibi_steps": ScoreProgram(steps=(Distance(-slopes, True),)),
        "alibi": general(mods.alibi, slopes),
        "t5": general(mods.t5_bias, buckets),
        "relative_table": general(lambda table: mods.relative_table(table, length), relative),
        "soft_documents": general(lambda d: lambda s, b, h, q, k: torch.where(d[q] == d[k], s, s - 3.0), document),
    }


def tensors(length: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    q, k, v, d_out = (
        torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return q, k, v, d_out


def causal(length: int) -> MaskPlan:
    ends = torch.arange(1, length + 1, dtype=torch.int32, device="cuda").view(1, 1, 1, -1)
    return MaskPlan(RowIntervals(torch.zeros_like(ends), ends, length))


def requests(length: int, dim: int) -> dict[str, AttentionRequest]:
    q, k, v, _ = tensors(length, dim)
    found = {
        name: AttentionRequest(q, k, v, causal(length), dim**-0.5, score)
        for name, score in score_programs(length).items()
    }
    row = torch.arange(length, device="cuda")
    half = (row <= row[:, None]) & (torch.rand(length, length, device="cuda") < 0.5)
    found["bit_tiles"] = replace(found["none"], plan=MaskPlan.from_dense(half[None, None]))
    return found


def measure(length: int, dim: int, rounds: int) -> list[Row]:
    backend, d_out = FfaBackend(), tensors(length, dim)[3]
    asked = requests(length, dim)
    with ThreadPoolExecutor(8) as pool:  # compile side by side
        results = dict(zip(asked, pool.map(backend.forward, asked.values()), strict=True))

    def backward(name: str) -> object:
        return backend.backward(asked[name], results[name].out, results[name].lse, d_out, None)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(backward, asked))
    torch.cuda.synchronize()
    rows = []
    directions = {"fwd": lambda name: lambda: backend.forward(asked[name]), "bwd": lambda name: lambda: backward(name)}
    for direction, work in directions.items():
        timings = interleave({name: work(name) for name in asked}, repeats=rounds, device="cuda")
        area = asked["none"].plan.area()  # half of it for the bit tiles, all of which is computed
        rates = {
            name: attention_tflops(area, HEADS, dim, dim, direction, timing.median_ms)
            for name, timing in timings.items()
        }
        for name, rate in rates.items():
            rows.append(
                Row(
                    *("score_mod", "ffa", name, length, f"{HEADS}:{KV_HEADS}", dim, "bfloat16", direction),
                    *(timings[name].median_ms, rate, {"no score mod": rates["none"]}),
                )
            )
    return rows


def measure_capacity(length: int, dim: int, rounds: int) -> Row:
    """One schedule with unused capacity, walked to its end or to the number that is read on the device."""
    q, k, v, _ = tensors(length, dim)
    plan = causal(length)
    instance = forward_instance(q.dtype, dim, dim, HEADS // KV_HEADS, 1, rows=HEADS * length)
    before = choose_builder("device")
    try:
        schedule = forward_schedule(plan, instance)
    finally:
        choose_builder(before)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    counted = replace(instance, counted=True)

    def work(kind: object) -> Callable[[], object]:
        arguments = (q, k, v, plan.intervals, schedule, dim**-0.5, out, lse, None)
        return lambda: [launch_forward(kind, *arguments) for _ in range(max(1, 8192 // length) ** 2)]  # type: ignore[arg-type]

    timings = interleave({"whole": work(instance), "counted": work(counted)}, repeats=rounds, device="cuda")
    repeat = max(1, 8192 // length) ** 2
    ms = {name: timing.median_ms / repeat for name, timing in timings.items()}
    rate = {name: attention_tflops(plan.area(), HEADS, dim, dim, "fwd", value) for name, value in ms.items()}
    room = {"row tiles": int(schedule.count), "room": schedule.row_tiles}
    return Row(
        *("capacity", "ffa", "causal", length, f"{HEADS}:{KV_HEADS}", dim, "bfloat16", "fwd"),
        *(ms["counted"], rate["counted"], {"walks all of its room": rate["whole"]}, room),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where ffa_mods.json is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a Hopper GPU")
    rows = [measure_capacity(length, args.dim, args.rounds) for length in (2048, args.length)]
    print(table(rows), flush=True)
    rows += measure(args.length, args.dim, args.rounds)
    print(table(rows))
    print("written:", write_results("ffa_mods", rows, args.directory))


if __name__ == "__main__":
    main()
