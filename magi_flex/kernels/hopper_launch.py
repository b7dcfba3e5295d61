from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from magi_flex.kernels.hopper_forward import forward_kernel
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.request import AttentionOutput
from magi_flex.kernels.triton_configs import padded
from magi_flex.kernels.triton_launch import (
    _index_maps, _like, _mask, _mask_constants, _on, _replicas, _strides, multiprocessors, unit_stride,
)
from magi_flex.kernels.triton_schedule import schedule_for


def tensor_map(x, rows):
    box = [1, 1, rows, padded(x.shape[3])]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    strides = [x.stride(axis) if x.shape[axis] > 1 else 8 for axis in range(3)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], box, layout)


def forward(request, score, scale, N=128, stages=2, persistent=True):
    q, k, v = (unit_stride(x) for x in (request.q, request.k, request.v))
    plan, device = request.plan, q.device
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    schedule = schedule_for(plan, 128, N)
    replicas, replica_heads = _replicas(plan, batch, heads)
    items = schedule.row_tiles * replicas
    out = empty_in_order(q, (batch, heads, q_len, v.shape[3]), fill_order(request.q), torch.float32 if request.wide_results else q.dtype)
    lse, max_score = (torch.empty((batch, heads, q_len), dtype=torch.float32, device=device) for _ in range(2))
    with _on(device):
        forward_kernel[(min(items, multiprocessors(device)) if persistent else items,)](
            tensor_map(q, 64), tensor_map(k, N), tensor_map(v, N), out, lse, max_score, _strides(out),
            _mask(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, _index_maps(request.score.index_map),
            schedule.row_tiles, items, q_len, heads, group, *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, **_mask_constants(plan), V_DIM=v.shape[3], STAGES=stages, POSITIVE_SCALE=scale > 0,
            num_warps=4,
        )  # fmt: skip
    return AttentionOutput(out, lse, max_score)


def backward_kv(request, score, scale, d_out, lse, delta, M=64, stages=3, persistent=True):
    from magi_flex.kernels.hopper_backward import kv_kernel

    q, k, v, d_out = (unit_stride(x) for x in (request.q, request.k, request.v, d_out))
    plan = request.plan
    batch, heads, q_len, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    schedule = schedule_for(plan, M, 128, transposed=True)
    replicas, replica_heads = _replicas(plan, batch, kv_heads)
    items = schedule.row_tiles * replicas
    dk, dv = _like(request, request.k), _like(request, request.v)
    with _on(q.device):
        kv_kernel[(min(items, multiprocessors(q.device)) if persistent else items,)](
            tensor_map(q, M), tensor_map(k, 64), tensor_map(v, 64), tensor_map(d_out, M), lse, delta, dk, dv,
            _strides(dk), _strides(dv), _mask(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, score.d_args, _index_maps(request.score.index_map),
            schedule.row_tiles, items, q_len, heads, group, *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, D_SCORE=score.d_score, **_mask_constants(plan), HEAD_DIM=q.shape[3], V_DIM=v.shape[3],
            STAGES=stages, num_warps=4,
        )  # fmt: skip
    return dk, dv


def backward_q(request, score, scale, d_out, lse, delta, N=64, stages=4, persistent=True):
    from magi_flex.kernels.hopper_backward import q_kernel

    q, k, v, d_out = (unit_stride(x) for x in (request.q, request.k, request.v, d_out))
    plan = request.plan
    batch, heads, q_len, _ = q.shape
    schedule = schedule_for(plan, 128, N)
    replicas, replica_heads = _replicas(plan, batch, heads)
    items = schedule.row_tiles * replicas
    dq = _like(request, request.q)
    with _on(q.device):
        q_kernel[(min(items, multiprocessors(q.device)) if persistent else items,)](
            tensor_map(q, 64), tensor_map(k, N), tensor_map(v, N), tensor_map(d_out, 64), lse, delta, dq,
            _strides(dq), _mask(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, score.d_args, score.grads, _index_maps(request.score.index_map),
            schedule.row_tiles, items, q_len, heads, heads // k.shape[1], *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, D_SCORE=score.d_score, D_CAPTURES=score.d_captures, **_mask_constants(plan),
            HEAD_DIM=q.shape[3], STAGES=stages, num_warps=4,
        )  # fmt: skip
    return dq
