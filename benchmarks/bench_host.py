"""Host time of one attention call on a GPU: what the processor spends before it can enqueue the next one.

    python -m benchmarks.bench_host [--size 1024] [--ways kernel,op,...] [--directory OUT]

``ms`` is the wall time of one of many calls, with the device far from being the bottleneck; ``device_ms`` the time
between CUDA events around the same calls, which is more where launches are late.  The ways to call, each forward and
with the backward pass:

- ``kernel``: Backend.forward (or backward alone) with a cached plan;
- ``request``: what comes before it, the request with its checks and routing;
- ``op``: the operator by PyTorch's dispatcher (compiled graphs call our function), with the handle of a cached plan;
- ``plan``: the operator that gives the handle, for a mask that is the same as before;
- ``eager``: flex_attention as it is; ``compiled``; ``graph`` (mode="reduce-overhead"); beside the last two the same
  call left to PyTorch's own kernels;
- ``new mask``: ``compiled`` with other documents in every call, the BlockMask made beforehand.

For calls of flex_attention, ``inside`` has the time that each part of ours takes in them (more than alone: in between
the processor does other things, and a backward pass runs in another thread): ``plan`` (finding the mask's plan),
``lookup`` (of plan and score program by an operator), ``forward`` and ``backward`` (request, routing, kernel).

Target: 0.06 ms for a forward whose plan is cached.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import magi_flex
from benchmarks.harness import RESULTS, Row, leave, table, write_results
from inductor_lowering.capture import trace_mask_mod
from magi_flex import mods, ops, plan_memo
from magi_flex.kernels.request import AttentionRequest
from magi_flex.kernels.route import facts_of, route
from magi_flex.op_specs import CallSpec, MaskSpec, ScoreSpec, split_captures

HEADS, KV_HEADS, DIM = 32, 8, 128
WARM_UPS = 10
WAYS = ("kernel", "request", "op", "plan", "eager", "compiled", "graph", "new mask")
Work = Callable[[], object]


def host_and_device_ms(work: Work, calls: int, rounds: int) -> tuple[float, float]:
    """Medians over the rounds, a call: wall time of enqueueing, and time between events."""
    for _ in range(WARM_UPS):
        work()
    wall, device = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wall.append(1e3 * (time.perf_counter() - start) / calls)
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end) / calls)
    return statistics.median(wall), statistics.median(device)


@contextlib.contextmanager
def parts_timed() -> Iterator[dict[str, float]]:
    """Fills in, at the end, the median time in ms of a call of each part of ours."""
    parts = {
        "plan": (plan_memo, "expected"),
        "lookup": (ops, "CallMods"),
        "forward": (ops, "run_forward"),
        "backward": (ops, "run_backward"),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            times[name].append(1e3 * (time.perf_counter() - start))
            return result

        return call

    medians: dict[str, float] = {}
    with contextlib.ExitStack() as patches:
        for name, (module, function) in parts.items():
            patches.enter_context(mock.patch.object(module, function, timed(name, getattr(module, function))))
        yield medians
    medians.update({name: statistics.median(values) for name, values in times.items() if values})


def mask_of(size: int, documents: int) -> Any:
    ids = torch.arange(size, device="cuda") * documents // size
    return magi_flex.create_block_mask(mods.document_causal(ids), None, None, size, size, "cuda")


def flex_call(leaves: list[Tensor], masks: Iterator[Any], mode: str | None, backward: bool, backend: str) -> Work:
    """A call of flex_attention with the next mask; ``mode``: "eager", or of torch.compile."""
    options = {"magi_backend": backend}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)

    function = attend if mode == "eager" else torch.compile(attend, fullgraph=True, dynamic=False, mode=mode)
    d_out = torch.randn_like(leaves[0])

    def once() -> object:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        out = function(*leaves, next(masks))
        return torch.autograd.grad(out, leaves, d_out) if backward else out

    return once


def repeated(mask: Any) -> Iterator[Any]:
    while True:
        yield mask


def parts_of_a_call(leaves: list[Tensor], mask: Any, backward: bool, backend: str) -> dict[str, Work]:
    """What a call is made of."""
    q, k, v = (x.detach() for x in leaves)
    size, d_out = q.shape[2], torch.randn_like(q)
    plan = magi_flex.plan(mask)
    request = AttentionRequest(q, k, v, plan=plan, scale=DIM**-0.5, max_score=False)
    kernel = route(facts_of(request, True), backend)
    program, captures = trace_mask_mod(mask.mask_mod, q.device)
    order, tensors, ints = split_captures(captures)
    spec = MaskSpec(program.to_json(), order).to_json()
    plan_arguments = (tensors, ints, spec, 1, HEADS, size, size, q.device)
    handle = torch.ops.magi_flex.plan_handle.default(*plan_arguments)
    carried = (handle, tensors, ints, spec)
    order = (3, 2, 1, 0)
    forward = kernel.forward(request)

    def request_and_route() -> object:
        again = AttentionRequest(q, k, v, plan=plan, scale=DIM**-0.5, max_score=False)
        return route(facts_of(again, True), backend)

    if backward:
        given = (q, k, v, forward.out, forward.lse, d_out, None)
        call = CallSpec(ScoreSpec(), backend, (order, order, order)).to_json()
        return {
            "kernel": lambda: kernel.backward(request, forward.out, forward.lse, d_out, None),
            "op": lambda: torch.ops.magi_flex.attention_backward.default(*given, *carried, call, DIM**-0.5),
        }
    call = CallSpec(ScoreSpec(), backend, (order,)).to_json()
    return {
        "kernel": lambda: kernel.forward(request),
        "request": request_and_route,
        "op": lambda: torch.ops.magi_flex.attention.default(q, k, v, *carried, call, DIM**-0.5),
        "plan": lambda: torch.ops.magi_flex.plan_handle.default(*plan_arguments),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--directory", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        leave("a GPU is needed")
    size, backend, rows = options.size, options.backend, []
    with magi_flex.enable(plans="device"):
        mask = mask_of(size, 3)
        for backward in (False, True):
            shapes = ((1, heads, size, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for s in shapes]
            parts = parts_of_a_call(leaves, mask, backward, backend)
            for name in options.ways.split(","):
                calls, rounds, masks = options.calls, options.rounds, repeated(mask)
                if name == "new mask":
                    calls, rounds = 20, 3
                    masks = iter([mask_of(size, 2 + i) for i in range(calls * (rounds + 1) + 2 * WARM_UPS)])
                mode = {"graph": "reduce-overhead", "eager": "eager"}.get(name)
                if name not in ("eager", "compiled", "graph", "new mask") and name not in parts:
                    continue
                ours = parts.get(name) or flex_call(leaves, masks, mode, backward, backend)
                host, device = host_and_device_ms(ours, calls, rounds)
                beside = {}
                if name in ("compiled", "graph"):
                    stock = flex_call(leaves, masks, mode, backward, "stock")
                    beside["stock"] = host_and_device_ms(stock, calls, rounds)[0]
                more: dict[str, Any] = {"call": name, "device_ms": device}
                if name not in parts and name != "graph":  # whose replays run none of ours
                    with parts_timed() as inside:
                        host_and_device_ms(ours, calls, 1)
                    more["inside"] = inside
                direction = "fwd" if not backward else "bwd" if name in parts else "fwd+bwd"
                rows.append(
                    Row(
                        *("host", backend, "documents, causal", size, f"{HEADS}:{KV_HEADS}", DIM, "bfloat16"),
                        *(direction, host),
                        beside=beside,
                        more=more,
                    )
                )
                print(name, direction, f"{1e3 * host:.1f} us host, {1e3 * device:.1f} us device", beside, end=" ")
                print({part: f"{1e3 * ms:.1f} us" for part, ms in more.get("inside", {}).items()}, flush=True)
                write_results("host", rows, options.directory)
    print(table(rows))


if __name__ == "__main__":
    main()
