"""Launching the Hopper kernels: what they serve, their tensor maps and constants.

Shape legend: B batch, H query heads, G key/value heads, Q query rows, K keys, D query/key head dim, E value head dim.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from magi_flex.kernels.cuda_driver import is_tma_ready, multiprocessors, on_device
from magi_flex.kernels.hopper_backward import kv_kernel, q_kernel
from magi_flex.kernels.hopper_forward import forward_kernel
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.request import AttentionOutput, AttentionRequest
from magi_flex.kernels.triton_configs import HOPPER_HEAD_DIM, padded
from magi_flex.kernels.triton_launch import (
    gradient_of,
    has_unit_stride,
    index_maps,
    mask_constants,
    mask_tensors,
    replicas_of,
    row_strides,
    unit_stride,
)
from magi_flex.kernels.triton_schedule import schedule_for
from magi_flex.kernels.triton_score import KernelScore

_ROWS = 64  # of a warp group, queries or keys; a tile has two of them


def serves(request: AttentionRequest, *others: Tensor) -> bool:
    """Whether these kernels take a request on a Hopper GPU; ``others`` are read as q, k and v are."""
    q, k, v = request.q, request.k, request.v
    return (
        q.dtype.itemsize == 2
        and max(q.shape[3], v.shape[3]) <= HOPPER_HEAD_DIM
        and (request.score.is_identity or request.score.steps is not None)
        # Of heads that share keys, masks that differ would need the fixed grid.
        and (request.plan.starts.shape[1] == 1 or q.shape[1] == k.shape[1])
        and pays(q)
        and all(_is_ready(x) for x in (q, k, v, *others))
    )


def _is_ready(x: Tensor) -> bool:
    """Whether TMA takes ``x``, or the copy that :func:`unit_stride` makes of it."""
    if has_unit_stride(x):
        return is_tma_ready(x)
    return x.shape[-1] * x.element_size() % 16 == 0


def pays(q: Tensor) -> bool:
    """Whether there are rows enough; the plain kernels pack few queries, and split keys where programs are few."""
    batch, heads, q_len, _ = q.shape
    return q_len >= 2 * _ROWS and batch * heads * q_len > _ROWS * multiprocessors(q.device)


@functools.cache
def _layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], gl.float16)  # the same for bfloat16


def _tensor_map(x: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of ``rows`` rows of a head, their columns padded with zeros."""
    box = [1, 1, rows, padded(x.shape[3], x.dtype.itemsize)]
    # An axis of one element is never stepped along; its stride must be valid all the same.
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], box, _layout(*box[2:]))


def _programs(items: int, device: torch.device) -> tuple[int]:
    return (min(items, multiprocessors(device)),)


def forward(request: AttentionRequest, score: KernelScore, scale: float) -> AttentionOutput:
    """As that of triton_launch."""
    q, k, v = (unit_stride(x) for x in (request.q, request.k, request.v))
    plan, device = request.plan, q.device
    batch, heads, q_len, _ = q.shape
    keys, stages = 128, 2
    schedule = schedule_for(plan, 2 * _ROWS, keys)
    replicas, replica_heads = replicas_of(plan, batch, heads)
    items = schedule.row_tiles * replicas
    shape = (batch, heads, q_len, v.shape[3])
    out = empty_in_order(q, shape, fill_order(request.q), torch.float32 if request.wide_results else q.dtype)
    lse, max_score = (torch.empty(shape[:3], dtype=torch.float32, device=device) for _ in range(2))
    with on_device(device):
        forward_kernel[_programs(items, device)](
            _tensor_map(q, _ROWS), _tensor_map(k, keys), _tensor_map(v, keys), out, lse, max_score, row_strides(out),
            mask_tensors(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, index_maps(request.score.index_map),
            replicas, items, q_len, heads, heads // k.shape[1], *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, **mask_constants(plan), V_DIM=v.shape[3], STAGES=stages, POSITIVE_SCALE=scale > 0,
            num_warps=4,
        )  # fmt: skip
    return AttentionOutput(out, lse, max_score)


def backward_kv(
    request: AttentionRequest, score: KernelScore, scale: float, d_out: Tensor, lse: Tensor, delta_BHQ: Tensor
) -> tuple[Tensor, Tensor]:
    """As that of triton_launch."""
    q, k, v, d_out = (unit_stride(x) for x in (request.q, request.k, request.v, d_out))
    plan = request.plan
    batch, heads, q_len, _ = q.shape
    kv_heads = k.shape[1]
    rows, stages = 64, 3
    schedule = schedule_for(plan, rows, 2 * _ROWS, transposed=True)
    replicas, replica_heads = replicas_of(plan, batch, kv_heads)
    items = schedule.row_tiles * replicas
    dk, dv = gradient_of(request, request.k), gradient_of(request, request.v)
    with on_device(q.device):
        kv_kernel[_programs(items, q.device)](
            _tensor_map(q, rows), _tensor_map(k, _ROWS), _tensor_map(v, _ROWS), _tensor_map(d_out, rows), lse,
            delta_BHQ, dk, dv, row_strides(dk), row_strides(dv),
            mask_tensors(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, score.d_args, index_maps(request.score.index_map),
            replicas, items, q_len, heads, heads // kv_heads, *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, D_SCORE=score.d_score, **mask_constants(plan),
            HEAD_DIM=q.shape[3], V_DIM=v.shape[3], STAGES=stages, num_warps=4,
        )  # fmt: skip
    return dk, dv


def backward_q(
    request: AttentionRequest, score: KernelScore, scale: float, d_out: Tensor, lse: Tensor, delta_BHQ: Tensor
) -> Tensor:
    """As that of triton_launch."""
    q, k, v, d_out = (unit_stride(x) for x in (request.q, request.k, request.v, d_out))
    plan = request.plan
    batch, heads, q_len, _ = q.shape
    keys, stages = 64, 4
    schedule = schedule_for(plan, 2 * _ROWS, keys)
    replicas, replica_heads = replicas_of(plan, batch, heads)
    items = schedule.row_tiles * replicas
    dq = gradient_of(request, request.q)
    with on_device(q.device):
        q_kernel[_programs(items, q.device)](
            _tensor_map(q, _ROWS), _tensor_map(k, keys), _tensor_map(v, keys), _tensor_map(d_out, _ROWS), lse,
            delta_BHQ, dq, row_strides(dq),
            mask_tensors(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, score.d_args, index_maps(request.score.index_map),
            replicas, items, q_len, heads, heads // k.shape[1], *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, D_SCORE=score.d_score, **mask_constants(plan),
            HEAD_DIM=q.shape[3], STAGES=stages, num_warps=4,
        )  # fmt: skip
    return dq
