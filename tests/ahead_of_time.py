"""Compile the Triton kernels for a GPU that is not there, and print what came out.

    python -m tests.ahead_of_time 90 [--head-dim 128] [--dtype float16] [--general | --features | --hopper]    # for 9.0

Prints a JSON line a kernel: name, seconds, shared memory, what :func:`usage` says, and counts of instructions.
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
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from inductor_lowering.tile_program import joint_program, score_program
from magi_flex.kernels import triton_backend, triton_launch
from magi_flex.kernels.request import AttentionRequest, Bias, Distance, IndexMap, ScoreProgram, Softcap
from magi_flex.kernels.triton_backend import TritonBackend
from magi_flex.kernels.triton_configs import Tiles
from magi_flex.kernels.triton_score import backward_score
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
    """Registers, spilled bytes, and how many matrix products of warp groups there are, in how many groups: the compiler
    may make each a group of its own and wait for it, which is slow."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    products = {"hgmma": code.count("HGMMA"), "hgmma_groups": code.count("WARPGROUP.ARRIVE")}
    return {"registers": int(found[1]), "spilled": int(found[2]), **products}


def softened(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table: Tensor, rate: Tensor) -> Tensor:
    near = torch.where((q - k) % 3 == 0, torch.tanh(score), score * torch.exp(-0.1 * (q // 2 - k).abs()))
    return near * rate + table[h, k % 7]


def general_score(heads: int) -> ScoreProgram:
    """With gradients of a table and of a number."""
    table, rate = torch.zeros(heads, 7), torch.ones(())
    indices = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    scalars = [torch.zeros(()), *indices]

    def joint(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor, *captures: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (score, *captures)]
        out = softened(leaves[0], b, h, q, k, *leaves[1:])
        d_score, *d_captures = torch.autograd.grad(out, leaves, grad)
        return [d_score, None, None, None, None, *d_captures]

    with TransformGetItemToIndex():
        forward = make_fx(softened, tracing_mode="fake")(*scalars, table, rate)
        backward = make_fx(joint, tracing_mode="fake")(*scalars, torch.zeros(()), table, rate)
    return ScoreProgram(None, score_program(forward), joint_program(backward), (table, rate), needs_grad=(True, True))


def attention_request(dtype: torch.dtype, head_dim: int, score: ScoreProgram, dense: Tensor) -> AttentionRequest:
    heads, (q_len, kv_len) = 8, dense.shape[2:]
    q, k, v = (
        torch.zeros(dense.shape[0], h, n, head_dim, dtype=dtype) for h, n in ((heads, q_len), (2, kv_len), (2, kv_len))
    )
    return AttentionRequest(q, k, v, MaskPlan.from_dense(dense), 0.1, score)


def both_ways(request: AttentionRequest) -> None:
    result = TritonBackend().forward(request)
    TritonBackend().backward(request, result.out, result.lse, torch.zeros_like(result.out), result.lse)


def hopper_kernels(request: AttentionRequest) -> None:
    from magi_flex.kernels import hopper_launch

    score = backward_score(request.score, request.q.device)
    result = hopper_launch.forward(request, score, request.scale)
    arguments = (request, score, request.scale, torch.zeros_like(result.out), result.lse, result.lse)
    hopper_launch.backward_kv(*arguments)
    hopper_launch.backward_q(*arguments)


def every_feature(dtype: torch.dtype) -> None:
    """What makes a kernel's code another one, in tiles so small that they compile fast."""
    sizes = {"forward": Tiles(16, 32, 4, 2), "kv": Tiles(32, 16, 4, 2), "q": Tiles(16, 32, 4, 2)}
    triton_backend.tiles_for = lambda direction, *others: sizes[direction]  # type: ignore[assignment]
    causal = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    both_ways(attention_request(dtype, 20, general_score(8), causal))
    steps = (Softcap(2.0), Distance(torch.ones(8), True), Bias(torch.zeros(64), (0, 0, 0, 1), 0, 0.5))
    positions = IndexMap(1, 0, torch.arange(64), torch.arange(64))
    both_ways(attention_request(dtype, 16, ScoreProgram(steps, index_map=positions), causal))
    random = torch.rand(1, 8, 64, 200, generator=torch.Generator().manual_seed(0)) < 0.4
    both_ways(attention_request(dtype, 16, ScoreProgram(), random))
    triton_launch.multiprocessors = lambda device: 132  # type: ignore[assignment]
    TritonBackend().forward(attention_request(dtype, 16, ScoreProgram(), torch.ones(2, 1, 1, 2000) > 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--general", action="store_true", help="with a general score mod")
    parser.add_argument("--features", action="store_true", help="everything that changes the code, in small tiles")
    parser.add_argument("--hopper", action="store_true", help="the Gluon kernels, too")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)

    def report(name: str, compiled: Any, seconds: float) -> None:
        counts = {name: compiled.asm["ptx"].count(name) for name in _INSTRUCTIONS}
        used = {"shared": compiled.metadata.shared, **usage(compiled.asm["cubin"])}
        print(json.dumps({"kernel": name, "seconds": round(seconds, 1), **used, **counts}), flush=True)

    compile_only(args.capability, report)
    if args.features:
        every_feature(dtype)
    else:
        causal = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
        score = general_score(8) if args.general else ScoreProgram()
        request = attention_request(dtype, args.head_dim, score, causal)
        both_ways(request)
        if args.hopper:
            hopper_kernels(request)


if __name__ == "__main__":
    main()
