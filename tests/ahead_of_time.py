"""Compile the Triton kernels for a GPU that is not there, and print what came out.

    python -m tests.ahead_of_time 90 [head_dim dtype general]      # compute capability 9.0

Prints a JSON line a kernel: name, seconds, shared memory, registers, spilled bytes, and counts of instructions.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from inductor_lowering.tile_program import score_program
from magi_flex.kernels.request import AttentionRequest, ScoreProgram
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.mask_plan import MaskPlan

_INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "cp.async", "ld.global.v4", "ld.local", "st.local")


class AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(capability: int, report: Any) -> None:
    """From now on launches compile, and call ``report(name, compiled kernel, seconds)``."""
    driver.set_active(AbsentGpu(capability))

    def bind(kernel: JITFunction, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            report(kernel.__name__, compiled, time.perf_counter() - start)

        return launch

    JITFunction.__getitem__ = bind  # type: ignore[method-assign]


def usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "spilled": int(found[2])}


def softened(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((q - k) % 3 == 0, torch.tanh(score), score * torch.exp(-0.1 * (q // 2 - k).abs()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int)
    parser.add_argument("head_dim", type=int, nargs="?", default=64)
    parser.add_argument("dtype", nargs="?", default="bfloat16")
    parser.add_argument("general", nargs="?", help="with a general score mod, forward only")
    args = parser.parse_args()

    def report(name: str, compiled: Any, seconds: float) -> None:
        ptx = compiled.asm["ptx"]
        counts = {name: ptx.count(name) for name in _INSTRUCTIONS}
        shared = compiled.metadata.shared
        print(json.dumps({"kernel": name, "seconds": round(seconds, 1), "shared": shared,
                          **usage(compiled.asm["cubin"]), **counts}), flush=True)  # fmt: skip

    compile_only(args.capability, report)
    length = 256
    q, k, v, d_out = (torch.zeros(1, h, length, args.head_dim, dtype=getattr(torch, args.dtype)) for h in (8, 2, 2, 8))
    plan = MaskPlan.from_dense(torch.ones(1, 1, length, length, dtype=torch.bool).tril())
    score = ScoreProgram()
    if args.general:
        from torch.fx.experimental.proxy_tensor import make_fx

        zero = [torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in range(4))]
        score = ScoreProgram(None, score_program(make_fx(softened, tracing_mode="fake")(*zero)))
    request = AttentionRequest(q, k, v, plan, 0.1, score)
    result = TritonBackend().forward(request)
    if not args.general:
        TritonBackend().backward(request, result.out, result.lse, d_out, None)


if __name__ == "__main__":
    main()
