"""Time score mods, bit tiles and plans with unused capacity in the Hopper kernels (backend "ffa").

    python -m benchmarks.bench_ffa_mods [--length 8192] [--dim 128] [--beside]

Every mod is run as generated code, and as steps where it has them; a plain call stands beside all of them, and with
``--beside`` PyTorch's compiled FlexAttention and our Triton kernels with the same mod.  Times are
of the backend's forward and backward with plans made before, causal, in turns; the figure is the median over rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.bench_ffa_backward import gradients_of
from benchmarks.harness import RESULTS, Row, attention_tflops, interleave, leave, table, write_results
from inductor_lowering.tile_program import joint_program, score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa import FfaBackend, forward_instance, forward_schedule
from magi_flex.kernels.ffa_forward import ForwardInstance, ForwardLaunch
from magi_flex.kernels.request import AttentionRequest, Distance, ScoreProgram, Softcap
from magi_flex.kernels.tile_plans import choose_builder
from magi_flex.kernels.triton_backend import TritonBackend
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


def user_mods(length: int) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """name -> (function from captured tensors to a score mod, captured tensors)."""
    buckets = torch.randn(HEADS, 32, device="cuda")
    document = torch.arange(length, device="cuda").div(700, rounding_mode="floor").int()
    relative = torch.randn(HEADS, 2 * length, device="cuda").bfloat16()

    def soft_documents(document: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: torch.where(document[q] == document[k], s, s - 3.0)

    return {
        "softcap": (lambda: mods.softcap(20.0), ()),
        "alibi": (mods.alibi, (mods.alibi_slopes(HEADS, "cuda"),)),
        "t5": (mods.t5_bias, (buckets,)),
        "relative_table": (lambda table: mods.relative_table(table, length), (relative,)),
        "soft_documents": (soft_documents, (document,)),
    }


def score_programs(length: int) -> dict[str, ScoreProgram]:
    slopes = mods.alibi_slopes(HEADS, "cuda")
    return {
        "none": ScoreProgram(),
        "softcap_steps": ScoreProgram(steps=(Softcap(20.0),)),
        "alibi_steps": ScoreProgram(steps=(Distance(-slopes, True),)),
        **{name: general(mod, *captures) for name, (mod, captures) in user_mods(length).items()},
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


def others(asked: dict[str, AttentionRequest], d_out: Tensor) -> dict[str, dict[str, dict[str, Any]]]:
    """direction -> who -> mod -> the same work by others; everybody has run once."""
    q, k, v = asked["none"].q, asked["none"].k, asked["none"].v
    length = q.shape[2]
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")
    found: dict[str, dict[str, Any]] = {direction: {"flex": {}, "triton": {}} for direction in ("fwd", "bwd")}
    triton = TritonBackend()
    for name, (mod, captures) in {"none": (lambda: None, ()), **user_mods(length)}.items():
        torch._dynamo.reset()
        flex = torch.compile(flex_attention, fullgraph=True)
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        score_mod = mod(*captures)

        def stock(*operands: Tensor, flex: Any = flex, score_mod: Any = score_mod) -> Tensor:
            return flex(*operands, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)

        result = triton.forward(asked[name])
        found["fwd"]["flex"][name] = lambda stock=stock: stock(q, k, v)
        found["bwd"]["flex"][name] = gradients_of(lambda stock=stock, x=leaves: stock(*x), leaves, d_out)
        found["fwd"]["triton"][name] = partial(triton.forward, asked[name])
        found["bwd"]["triton"][name] = partial(triton.backward, asked[name], result.out, result.lse, d_out, None)
        for direction in found:
            for who in found[direction]:
                found[direction][who][name]()
        torch.cuda.synchronize()
        print(f"{name}: others are ready", flush=True)
    return found


def measure(length: int, dim: int, rounds: int, beside: bool) -> list[Row]:
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
    more = others(asked, d_out) if beside else {direction: {} for direction in directions}
    for direction, work in directions.items():
        candidates = {f"ffa {name}": work(name) for name in asked}
        candidates |= {f"{who} {name}": x for who, named in more[direction].items() for name, x in named.items()}
        timings = interleave(candidates, repeats=rounds, device="cuda")
        area = asked["none"].plan.area()  # half of it for the bit tiles, all of which is computed
        rates = {
            key: attention_tflops(area, HEADS, dim, dim, direction, timing.median_ms) for key, timing in timings.items()
        }
        for name in asked:
            mod = name.removesuffix("_steps")
            same = {who: rates[f"{who} {mod}"] for who in more[direction] if f"{who} {mod}" in rates}
            rows.append(
                Row(
                    *("score_mod", "ffa", name, length, f"{HEADS}:{KV_HEADS}", dim, "bfloat16", direction),
                    *(timings[f"ffa {name}"].median_ms, rates[f"ffa {name}"]),
                    {"no score mod": rates["ffa none"]} | same,
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

    def work(kind: ForwardInstance) -> Callable[[], object]:
        launch = ForwardLaunch(kind, q, k, v, out, plan.intervals, schedule, dim**-0.5)
        return lambda: [launch(q, k, v, out, lse, None) for _ in range(max(1, 8192 // length) ** 2)]

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
    parser.add_argument("--beside", action="store_true", help="also time others with the same mods")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where ffa_mods.json is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a Hopper GPU")
    rows = [measure_capacity(length, args.dim, args.rounds) for length in (2048, args.length)]
    print(table(rows), flush=True)
    rows += measure(args.length, args.dim, args.rounds, args.beside)
    print(table(rows))
    print("written:", write_results("ffa_mods", rows, args.directory))


if __name__ == "__main__":
    main()
