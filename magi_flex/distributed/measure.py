"""Measures this machine's figures for the cost model, once: links by all-to-alls, kernels by a square of attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from magi_flex.distributed.agreement import device_types
from magi_flex.distributed.cost_model import Costs, Shape, kernel_seconds
from magi_flex.intervals import RowIntervals
from magi_flex.kernels.request import AttentionRequest
from magi_flex.kernels.route import facts_of, route
from magi_flex.mask_outline import Outline
from magi_flex.mask_plan import MaskPlan

_REPEATS = 3


def measure_costs(
    shape: Shape,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    rows: int = 4096,
    message_bytes: int = 1 << 24,
    costs: Costs | None = None,
    device: torch.device | None = None,
) -> Costs:
    """Figures for :class:`Costs`, the same on every rank (the slowest rank's).  A collective.

    The all-to-all goes to every rank of the group alike; its rate is taken for both bandwidths, so give the figures of
    a machine whose links differ by hand where they matter.

    Nothing calls this by itself.  The figures decide into how many stages a pass is cut, and so the order in which
    partial results are added up: measured anew in each run, they would make runs differ in their last bits.  Measure
    once, and keep the figures with the run's other settings.

    Args:
        shape, dtype: of the attention that will run.
        rows: of the square of full attention that is timed.
        message_bytes: what each rank sends; memory is measured by a sum of so many float32 numbers.
        costs: whose other figures are kept (default: ``Costs()``).
        device: where attention runs (default: the current GPU if there is one and the group serves it, else the CPU).
    """
    group = dist.group.WORLD if group is None else group
    device = _attention_device(group) if device is None else device
    q, k, v = (
        torch.randn(shape.batch, heads, rows, dim, dtype=dtype, device=device)
        for heads, dim in (
            (shape.q_heads, shape.head_dim),
            (shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.v_head_dim),
        )
    )
    mask = RowIntervals.full(rows, rows, device)
    request = AttentionRequest(q, k, v, MaskPlan(mask), shape.head_dim**-0.5)
    kernel = route(facts_of(request, True))
    result = kernel.forward(request)
    forward = _seconds(lambda: kernel.forward(request), device)
    backward = _seconds(lambda: kernel.backward(request, result.out, result.lse, result.out, None), device)
    small, large = (_all_to_all_seconds(size, group, device) for size in (group.size(), message_bytes))
    total, part = torch.zeros(2, message_bytes, device=device)
    memory = _seconds(lambda: total.add_(part), device)
    slowest = torch.tensor([forward, backward, small, large, memory], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    forward, backward, small, large, memory = slowest.tolist()
    spread, at_one = Outline.of(mask).spread(), Costs(forward_flops=1.0, backward_flops=1.0)
    bandwidth = message_bytes / max(large - small, 1e-9)
    return replace(
        costs or Costs(),
        forward_flops=kernel_seconds(at_one, shape, False, spread) / forward,
        backward_flops=kernel_seconds(at_one, shape, True, spread) / backward,
        node_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        latency=small,
        memory_bandwidth=3 * total.nbytes / memory,
    )


def _attention_device(group: dist.ProcessGroup) -> torch.device:
    if torch.cuda.is_available() and "cuda" in device_types(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _all_to_all_seconds(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    size -= size % group.size()
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    return _seconds(lambda: dist.all_to_all_single(received, sent, group=group), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs after a first one."""
    best = float("inf")
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
