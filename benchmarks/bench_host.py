"""Host time of one attention call on a GPU: what the processor spends before it can enqueue the next one.

    python -m benchmarks.bench_host [--size 1024] [--directory OUT]

``ms`` is the wall time of one of many calls, with the device far from being the bottleneck; ``device_ms`` the time
between CUDA events around the same calls, which is more where launches are late.  The ways to call: ``kernel``
(Backend.forward with a cached plan), ``eager`` (flex_attention as it is), ``compiled``, ``graph``
(mode="reduce-overhead"); beside each the same call left to PyTorch's own kernels.  Target: 0.06 ms for a forward whose
plan is cached.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import magi_flex
from benchmarks.harness import RESULTS, Row, leave, table, write_results
from magi_flex import mods
from magi_flex.kernels.request import AttentionRequest
from magi_flex.kernels.route import facts_of, route

HEADS, KV_HEADS, DIM = 32, 8, 128


def host_and_device_ms(work: Callable[[], object], calls: int, rounds: int) -> tuple[float, float]:
    """Medians over the rounds, a call: wall time of enqueueing, and time between events."""
    for _ in range(10):
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


def ways_to_call(
    leaves: list[Tensor], mask: Any, backward: bool, backend: str
) -> dict[str, tuple[Callable[[], object], Callable[[], object] | None]]:
    """Name -> (one call, the same left to PyTorch's own kernels)."""
    q, k, v = leaves
    d_out = torch.randn_like(q)

    def call(mode: str | None, options: dict[str, str]) -> Callable[[], object]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)

        function = attend if mode == "eager" else torch.compile(attend, fullgraph=True, dynamic=False, mode=mode)

        def once() -> object:
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            out = function(q, k, v)
            return torch.autograd.grad(out, leaves, d_out) if backward else out

        return once

    ours, stock = {"magi_backend": backend}, {"magi_backend": "stock"}
    plan = magi_flex.plan(mask)
    request = AttentionRequest(*(x.detach() for x in leaves), plan=plan, scale=DIM**-0.5, max_score=False)
    kernel = route(facts_of(request, backward), backend)
    found = {}
    if not backward:
        found["kernel"] = lambda: kernel.forward(request), None
        found["eager"] = call("eager", ours), None
    found["compiled"] = call(None, ours), call(None, stock)
    found["graph"] = call("reduce-overhead", ours), call("reduce-overhead", stock)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--directory", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        leave("a GPU is needed")
    size, rows = options.size, []
    ids = torch.arange(size, device="cuda") // (size // 3 + 1)
    with magi_flex.enable(plans="device"):
        mask = magi_flex.create_block_mask(mods.document_causal(ids), None, None, size, size, "cuda")
        for backward in (False, True):
            shapes = ((1, heads, size, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for s in shapes]
            direction = "fwd+bwd" if backward else "fwd"
            for name, (ours, stock) in ways_to_call(leaves, mask, backward, options.backend).items():
                host, device = host_and_device_ms(ours, options.calls, options.rounds)
                beside = {}
                if stock is not None:
                    beside["stock"] = host_and_device_ms(stock, options.calls, options.rounds)[0]
                rows.append(
                    Row(
                        "host",
                        options.backend,
                        "documents, causal",
                        size,
                        f"{HEADS}:{KV_HEADS}",
                        DIM,
                        "bfloat16",
                        direction,
                        ms=host,
                        beside=beside,
                        more={"call": name, "device_ms": device},
                    )
                )
                print(name, direction, f"{1e3 * host:.1f} us host, {1e3 * device:.1f} us device", beside, flush=True)
                write_results("host", rows, options.directory)
    print(table(rows))


if __name__ == "__main__":
    main()
