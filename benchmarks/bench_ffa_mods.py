"""Time score mods, bit tiles and plans with unused capacity in the Hopper kernels (backend "ffa").

    python -m benchmarks.bench_ffa_mods [--length 8192] [--dim 128] [--mods softcap,t5] [--masks causal,varlen_causal]
                                        [--beside flex,triton] [--learned]

Every mod is run as the steps that it is recognised as, where there are such, and as generated code; a plain call stands
beside all of them, and with ``--beside`` PyTorch's compiled FlexAttention and our Triton kernels with the same mod.
With ``--learned`` the backward also gives the gradients of what the mods capture (ffa_mods_learned.json).  Times are of
the backend's forward and backward with plans made before, in turns; the figure is the median over rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
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
from benchmarks.workloads import bounds, document_lengths
from inductor_lowering.tile_program import joint_program, score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex import mods
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa import FfaBackend, forward_instance, forward_schedule
from magi_flex.kernels.ffa_forward import ForwardInstance, ForwardLaunch
from magi_flex.kernels.request import AttentionRequest, Backend, Bias, Distance, ScoreProgram, Softcap
from magi_flex.kernels.tile_plans import choose_builder
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.mask_plan import MaskPlan

HEADS, KV_HEADS = 64, 8
MODS = (
    *("none", "softcap", "alibi", "t5", "relative_table", "query_temperature", "soft_documents"),
    *("log_gates", "pair_bias", "separable"),
    "bit_tiles",  # no mod, but timed like one: half of the mask's pairs, at random
)


def general(mod: Callable[..., Tensor], *captures: Tensor, learned: bool) -> ScoreProgram:
    """The program of ``mod(*captures)``, of a score and its place; ``learned``: captured floats want gradients."""
    needs_grad = tuple(learned and x.is_floating_point() for x in captures)

    def forward(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captures: Tensor) -> Tensor:
        return mod(*captures)(score, b, h, q, k)

    def joint(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor, *captures: Tensor) -> list:
        leaf = score.detach().requires_grad_()
        captures = tuple(x.detach().requires_grad_(y) for x, y in zip(captures, needs_grad, strict=True))
        wanted = [leaf, *(x for x in captures if x.requires_grad)]
        d_score, *grads = torch.autograd.grad(forward(leaf, b, h, q, k, *captures), wanted, grad)
        return [d_score, None, None, None, None, *(grads.pop(0) if y else None for y in needs_grad)]

    score = torch.zeros((), device="cuda")
    places = [torch.zeros((), dtype=torch.int32, device="cuda") for _ in range(4)]
    with item_access_as_index():
        programs = make_fx(forward)(score, *places, *captures), make_fx(joint)(score, *places, score, *captures)
    return ScoreProgram(None, score_program(programs[0]), joint_program(programs[1]), captures, needs_grad)


Mod = tuple[Callable[..., Any], tuple[Tensor, ...]]  # a function from captured tensors to a score mod; captured tensors


def user_mods(length: int) -> dict[str, Mod]:
    def soft_documents(document: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: torch.where(document[q] == document[k], s, s - 3.0)

    document = torch.arange(length, device="cuda").div(700, rounding_mode="floor").int()
    relative = torch.randn(HEADS, 2 * length, device="cuda").bfloat16()
    scaling = torch.arange(1, length + 1, device="cuda").log()
    return {
        "softcap": (lambda: mods.softcap(20.0), ()),
        "alibi": (mods.alibi, (mods.alibi_slopes(HEADS, "cuda"),)),
        "t5": (mods.t5_bias, (torch.randn(HEADS, 32, device="cuda"),)),
        "relative_table": (lambda table: mods.relative_table(table, length), (relative,)),
        "query_temperature": (mods.query_temperature, (scaling,)),
        "soft_documents": (soft_documents, (document,)),
        "log_gates": (mods.log_gates, (torch.rand(HEADS, length, device="cuda"),)),
        "pair_bias": (mods.pair_bias, (torch.randn(1, 1, length, length, device="cuda").bfloat16(),)),
        "separable": (
            lambda *x: mods.separable_bias((length // 64, 64), *x),
            (torch.randn(length // 32 - 1, device="cuda"), torch.randn(127, device="cuda")),
        ),
    }


def step_programs(length: int) -> dict[str, ScoreProgram]:
    """The mods that are recognised as steps, as those."""
    _, (relative,) = user_mods(length)["relative_table"]
    return {
        "none": ScoreProgram(),
        "softcap": ScoreProgram(steps=(Softcap(20.0),)),
        "alibi": ScoreProgram(steps=(Distance(-mods.alibi_slopes(HEADS, "cuda"), True),)),
        "relative_table": ScoreProgram(steps=(Bias(relative, (0, 2 * length, 1, -1), length),)),
    }


def tensors(length: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    q, k, v, d_out = (
        torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return q, k, v, d_out


def plan_of(mask: str, length: int) -> MaskPlan:
    starts, ends = (x.cuda().view(1, 1, 1, -1) for x in bounds(mask, length))
    return MaskPlan(RowIntervals(starts, ends, length))


def mask_mod_of(mask: str, length: int) -> Callable[..., Tensor]:
    if mask == "causal":
        return mods.causal()
    assert mask == "varlen_causal", "the masks that are timed beside others"
    return mods.document_causal(mods.documents_from_lengths(document_lengths(length), device="cuda")[0])


def requests(mod: str, mask: str, length: int, dim: int, learned: bool) -> dict[str, AttentionRequest]:
    """How a backend can be asked: "plain" without the mod, "steps", "code", "learned", "bit tiles"."""
    q, k, v, _ = tensors(length, dim)
    plain = AttentionRequest(q, k, v, plan_of(mask, length), dim**-0.5)
    if mod == "bit_tiles":
        row = torch.arange(length, device="cuda")
        half = (row <= row[:, None]) & (torch.rand(length, length, device="cuda") < 0.5)
        return {"plain": plain, "bit tiles": replace(plain, plan=MaskPlan.from_dense(half[None, None]))}
    found = {"plain": plain}
    steps, code = step_programs(length), user_mods(length)
    if mod in steps:
        found["steps"] = replace(plain, score=steps[mod])
    if mod in code:
        found["code"] = replace(plain, score=general(code[mod][0], *code[mod][1], learned=False))
    if learned and mod in code:
        found["learned"] = replace(plain, score=general(code[mod][0], *code[mod][1], learned=True))
    return found


Sides = dict[str, dict[str, Callable[[], object]]]  # direction -> who -> the work


def of_backend(backend: Backend, request: AttentionRequest, d_out: Tensor) -> tuple[Callable[[], object], ...]:
    """Forward and backward; both have run once."""
    result = backend.forward(request)
    works = partial(backend.forward, request), partial(backend.backward, request, result.out, result.lse, d_out, None)
    works[1]()
    return works


def of_stock(
    mod: str, mask: str, length: int, request: AttentionRequest, d_out: Tensor, learned: bool
) -> tuple[Any, ...]:
    bind, captures = user_mods(length).get(mod, (lambda: None, ()))
    captures = tuple(x.requires_grad_(learned and x.is_floating_point()) for x in captures)
    block_mask = create_block_mask(mask_mod_of(mask, length), None, None, length, length, device="cuda")
    torch._dynamo.reset()
    flex, score_mod = torch.compile(flex_attention, fullgraph=True), bind(*captures)
    leaves = [x.detach().clone().requires_grad_() for x in (request.q, request.k, request.v)]
    wanted = [*leaves, *(x for x in captures if x.requires_grad)]

    def stock(*operands: Tensor) -> Tensor:
        return flex(*operands, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)

    forward = partial(stock, request.q, request.k, request.v)
    forward()
    return forward, gradients_of(lambda: stock(*leaves), wanted, d_out)


def sides(mod: str, mask: str, length: int, dim: int, beside: Sequence[str], learned: bool) -> Sides:
    """All that is timed for a mod; everybody has run once."""
    asked, d_out = requests(mod, mask, length, dim, learned), tensors(length, dim)[3]
    with ThreadPoolExecutor(4) as pool:  # compile side by side
        works = dict(zip(asked, pool.map(lambda x: of_backend(FfaBackend(), x, d_out), asked.values()), strict=True))
    last = asked[next(reversed(asked))]
    if "triton" in beside:
        works["triton"] = of_backend(TritonBackend(), last, d_out)
    if "flex" in beside:
        works["flex"] = of_stock(mod, mask, length, asked["plain"], d_out, learned)
    torch.cuda.synchronize()
    return {direction: {who: work[i] for who, work in works.items()} for i, direction in enumerate(("fwd", "bwd"))}


def measure(mod: str, mask: str, length: int, dim: int, found: Sides, rounds: int) -> list[Row]:
    area, rows = plan_of(mask, length).area(), []  # bit tiles: the area that is computed, of which they attend to half
    for direction, works in found.items():
        timings = interleave(works, repeats=rounds, device="cuda")
        rates = {
            who: attention_tflops(area, HEADS, dim, dim, direction, timing.median_ms) for who, timing in timings.items()
        }
        ours = ("plain",) if mod == "none" else ("steps", "code", "learned", "bit tiles")
        for how in (x for x in ours if x in rates):
            kind = ("score_mod", "ffa", mask, length, f"{HEADS}:{KV_HEADS}", dim, "bfloat16", direction)
            beside = {who: rate for who, rate in rates.items() if who != how}
            more = {"score mod": mod, "as": how}
            rows.append(Row(*kind, timings[how].median_ms, rates[how], beside, more))
    return rows


def measure_capacity(length: int, dim: int, rounds: int) -> Row:
    """One schedule with unused capacity, walked to its end or to the number that is read on the device."""
    q, k, v, _ = tensors(length, dim)
    plan = plan_of("causal", length)
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
    parser.add_argument("--mods", default=",".join(MODS))
    parser.add_argument("--masks", default="causal,varlen_causal")
    parser.add_argument("--beside", default="", help="flex, triton or both: others with the same mods")
    parser.add_argument("--learned", action="store_true", help="with the gradients of what the mods capture")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the results are written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        leave("needs a Hopper GPU")
    rows = [measure_capacity(length, args.dim, args.rounds) for length in (2048, args.length)]
    for mask in args.masks.split(","):
        for mod in args.mods.split(","):
            beside = () if mod == "bit_tiles" else args.beside.split(",")
            work = sides(mod, mask, args.length, args.dim, beside, args.learned)
            found = measure(mod, mask, args.length, args.dim, work, args.rounds)
            print(f"{mask}, {mod}:\n{table(found)}", flush=True)
            rows += found
    print("written:", write_results("ffa_mods_learned" if args.learned else "ffa_mods", rows, args.directory))


if __name__ == "__main__":
    main()
