"""Run the Hopper kernels (backend "ffa") under compute-sanitizer's memcheck, racecheck and synccheck, at small sizes.

    python -m tests.gpu.sanitize_ffa [--tools memcheck,racecheck,synccheck] [--variants causal,wide_heads,...]
                                     [--jobs 4] [--seconds 100] [--logs FOLDER]

Needs a Hopper GPU and compute-sanitizer (of the CUDA toolkit) on the path.  Every variant is forward and backward, in a
process of its own for each tool; what a tool had to say is printed, and the exit status is 1 unless all found nothing.
Results are compared with float64 as well, since kernels that run so slowly interleave otherwise than usual.  For
racecheck every lane of a warp arrives at barriers, instead of one on behalf of all (csrc/cuda/ffa/arrive.cuh).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import leave
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.ffa import FfaBackend
from magi_flex.kernels.ffa_backward import BackwardInstance
from magi_flex.kernels.ffa_forward import ForwardInstance
from magi_flex.kernels.ffa_gradient_q import GradientQInstance
from magi_flex.kernels.request import AttentionRequest, ScoreProgram, Softcap
from magi_flex.kernels.tile_plans import choose_builder
from magi_flex.mask_plan import MaskPlan
from tests.cases.reference import dense_attention_with_gradients
from tests.cases.score_mods import ScoreMod
from tests.cases.score_programs import traced_score
from tests.test_ffa_emulated import all_kinds

TOOLS = ("memcheck", "racecheck", "synccheck")


@dataclass(frozen=True)
class Variant:
    """Sizes and options of a forward and backward pass.

    Attributes:
        mask: "documents" (causal ones, of many lengths), "causal", "scattered" (three intervals a row, some rows
            without keys), "bits" (random pairs).
        dims: of q and k, of v; heads: of q, of k and v; lengths: of q, of k and v.
        score: "", "softcap" (as a step of the kernels), "generated" or "learned" (with gradients of its captures).
        counted: plans are built on the device, with room to spare.
    """

    mask: str
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (8, 2)
    lengths: tuple[int, int] = (150, 150)
    score: str = ""
    deterministic: bool = False
    wide_results: bool = False
    counted: bool = False


VARIANTS = {
    "documents": Variant("documents"),
    "causal": Variant("causal"),
    "scattered": Variant("scattered", dims=(64, 64), lengths=(150, 197)),
    "counted": Variant("documents", counted=True),
    "deterministic": Variant("documents", heads=(8, 1), deterministic=True),
    "wide_heads": Variant("causal", dims=(256, 256)),
    "unequal_heads": Variant("documents", dims=(192, 128)),
    "split_keys": Variant("causal", lengths=(3, 2100)),
    "wide_results": Variant("causal", wide_results=True),
    "softcap": Variant("causal", score="softcap"),
    "generated": Variant("documents", score="generated"),
    "learned": Variant("documents", score="learned"),
    "learned_wide_heads": Variant("causal", dims=(256, 256), lengths=(70, 150), score="learned"),
    "bits": Variant("bits"),
}


def mask_of(variant: Variant) -> Tensor:
    """bool ``[1, 1, Q, K]``."""
    q_len, kv_len = variant.lengths
    torch.manual_seed(0)
    row, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
    causal = key <= row + kv_len - q_len
    if variant.mask == "documents":
        document = torch.bucketize(torch.arange(max(variant.lengths)), torch.tensor([1, 4, 40, 41, 90]), right=True)
        mask = causal & (document[:q_len, None] == document[:kv_len])
    elif variant.mask == "scattered":
        starts, ends = torch.randint(0, kv_len + 1, (2, 1, 1, 3, q_len), dtype=torch.int32).sort(0).values
        ends[..., torch.rand(q_len) < 0.2] = 0
        mask = RowIntervals.build(starts, ends, kv_len).to_dense()[0, 0]
    elif variant.mask == "bits":
        mask = torch.rand(q_len, kv_len) < 0.5
    else:
        mask = causal
    return mask[None, None]


def _bias(slope: Tensor) -> ScoreMod:
    return lambda s, b, h, q, k: torch.tanh(s) + slope[h] * (q - k)


def run(variant: Variant) -> None:
    """Forward and backward on the GPU; raises AssertionError where a result is far from float64's."""
    choose_builder("device" if variant.counted else "torch")
    mask = mask_of(variant)
    (heads, kv_heads), (head_dim, v_dim), (q_len, kv_len) = variant.heads, variant.dims, variant.lengths
    shapes = ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_dim), (heads, q_len, v_dim))
    q, k, v, d_out = (torch.randn(1, *shape).bfloat16() for shape in shapes)
    on_gpu = mask.cuda()
    plan = MaskPlan.from_dense(on_gpu) if variant.mask == "bits" else MaskPlan(RowIntervals.from_dense(on_gpu))
    slope, captures = torch.linspace(-0.1, 0.1, heads), list[Tensor]()
    score, mod = ScoreProgram(), None
    if variant.score == "softcap":
        score = ScoreProgram(steps=(Softcap(5.0),))

        def mod(s: Tensor, *_: Tensor) -> Tensor:
            return 5 * torch.tanh(s / 5)

    elif variant.score == "generated":
        score, mod = traced_score(_bias, (slope.cuda(),)), _bias(slope.double())
    elif variant.score == "learned":
        shapes_of_captures = (
            (heads,),
            (heads, 16),
            (max(q_len, kv_len),),
            (1, 1, q_len, kv_len),
            (1, heads, kv_len),
            (13,),
        )
        captures = [torch.rand(shape).double().requires_grad_() for shape in shapes_of_captures]
        on_device = [x.detach().float().cuda().requires_grad_() for x in captures]
        score, mod = traced_score(all_kinds, on_device, learned=True), all_kinds(*captures)
    wanted = dense_attention_with_gradients(q, k, v, d_out, None, mask, mod, captures, 0.1)
    request = AttentionRequest(
        *(x.cuda() for x in (q, k, v)), plan, 0.1, score, variant.deterministic, variant.wide_results
    )
    out = FfaBackend().forward(request)
    found = FfaBackend().backward(request, out.out, out.lse, d_out.cuda(), None)
    results = {"out": out.out, "dq": found.dq, "dk": found.dk, "dv": found.dv}
    pairs = {name: (x, getattr(wanted, name)) for name, x in results.items()}
    pairs |= {f"capture {n}": x for n, x in enumerate(zip(found.captures, wanted.captures, strict=False)) if captures}
    for name, (result, exact) in pairs.items():
        error = float((result.cpu().double() - exact).norm() / exact.norm())
        assert error < 2e-2, f"{name}: relative error {error:.3g}"


def let_every_lane_arrive() -> None:
    """At barriers at which one lane of a warp does."""
    kinds: tuple[Any, ...] = (ForwardInstance, BackwardInstance, GradientQInstance)
    for kind in kinds:
        defines = kind.defines
        kind.defines = lambda self, defines=defines: defines(self) | {"FFA_EVERY_LANE_ARRIVES": True}


def sanitize(tool: str, name: str, seconds: float, logs: Path | None) -> tuple[str, bool]:
    """What the tool says of a variant, in a line, and whether it is clean."""
    command = [
        "compute-sanitizer", "--tool", tool, "--kernel-name", "kns=ffa_", "--error-exitcode", "3",
        sys.executable, "-m", "tests.gpu.sanitize_ffa", "--here", name,
        *(["--every-lane-arrives"] if tool == "racecheck" else []),
    ]  # fmt: skip
    # Each tensor an allocation of its own, so that what is written behind one is seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        parts = [x.decode() if isinstance(x, bytes) else x or "" for x in (error.stdout, error.stderr)]
        text, code = "".join(parts), -1
    if logs is not None:
        (logs / f"{tool}-{name}.log").write_text(text)
    summary = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
    verdict = "took too long" if code < 0 else "clean" if code == 0 else f"exit {code}"
    return f"{tool} {name}: {verdict}; {'; '.join(summary)}", code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=100, help="the most that one may take")
    parser.add_argument("--logs", type=Path, help="folder for what the tools say")
    parser.add_argument("--here", choices=VARIANTS, help="run a variant in this process, without a tool")
    parser.add_argument("--every-lane-arrives", action="store_true", help="with --here: at barriers")
    options = parser.parse_args()
    if not torch.cuda.is_available() or FfaBackend().missing(torch.device("cuda")):
        leave("needs a Hopper GPU")
    if options.here:
        if options.every_lane_arrives:
            let_every_lane_arrive()
        run(VARIANTS[options.here])
        return 0
    if shutil.which("compute-sanitizer") is None:
        leave("needs compute-sanitizer")
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    jobs = [(tool, name) for tool in options.tools.split(",") for name in options.variants.split(",")]
    clean = True
    with ThreadPoolExecutor(options.jobs) as pool:
        for line, good in pool.map(lambda job: sanitize(*job, options.seconds, options.logs), jobs):
            print(line, flush=True)
            clean &= good
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
