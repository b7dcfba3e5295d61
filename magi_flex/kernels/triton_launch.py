"""Launching the Triton kernels: from a request to grids, strides and compile-time constants.

Shape legend: B batch, H query heads, G key/value heads (H = G * group), Q query rows, K keys, D query/key head dim,
E value head dim, S splits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from magi_flex.kernels.cuda_driver import multiprocessors, on_device
from magi_flex.kernels.layout import empty_in_order, fill_order
from magi_flex.kernels.request import AttentionOutput, AttentionRequest, IndexMap
from magi_flex.kernels.triton_backward import delta_kernel, kv_kernel, q_kernel
from magi_flex.kernels.triton_configs import Tiles, packing, padded, split_count
from magi_flex.kernels.triton_forward import forward_kernel, merge_kernel
from magi_flex.kernels.triton_schedule import schedule_for
from magi_flex.kernels.triton_score import KernelScore
from magi_flex.mask_plan import MaskPlan

_ROW_BYTES = 1 << 13  # of a block of rows in the kernels that only read and add


def has_unit_stride(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] == 1


def unit_stride(x: Tensor) -> Tensor:
    """``x``, or a copy whose last dimension is contiguous, which is all that the kernels ask for."""
    return x if has_unit_stride(x) else x.contiguous()


def row_strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def mask_tensors(plan: MaskPlan) -> tuple[Any, ...]:
    """The kernels' ``mask`` argument."""
    intervals = plan.intervals
    bounds = (intervals.starts.contiguous(), intervals.ends.contiguous(), intervals.max_intervals)
    bits = plan.bit_tiles
    if bits is None:
        return *bounds, None, None, None, None
    return *bounds, bits.row_ptr.contiguous(), bits.cols, bits.slot, bits.bits.contiguous()


def mask_constants(plan: MaskPlan) -> dict[str, Any]:
    bits = plan.bit_tiles
    return {
        "SLOTS": 1 << (plan.intervals.max_intervals - 1).bit_length(),
        "BIT_TILES": () if bits is None else (bits.q_tile, bits.kv_tile),
    }


def index_maps(index_map: IndexMap) -> tuple[Any, ...]:
    def tensor(index: Tensor | None) -> Tensor | None:
        return None if index is None else index.to(torch.int32).contiguous()

    return index_map.b_offset, index_map.h_offset, tensor(index_map.q_index), tensor(index_map.k_index)


def replicas_of(plan: MaskPlan, batch: int, heads: int) -> tuple[int, int]:
    """(programs that walk the same row tile, those of them that belong to one batch entry)."""
    mask_batch, mask_heads = plan.starts.shape[:2]
    replica_heads = heads if mask_heads == 1 else 1
    return replica_heads * (batch if mask_batch == 1 else 1), replica_heads


def _dims(request: AttentionRequest) -> dict[str, int]:
    head_dim, v_dim = request.q.shape[3], request.v.shape[3]
    size = request.q.dtype.itemsize
    return {"HEAD_DIM": head_dim, "V_DIM": v_dim, "D": padded(head_dim, size), "E": padded(v_dim, size)}


# ---- forward --------------------------------------------------------------------------------------------------------


def forward(request: AttentionRequest, score: KernelScore, scale: float, tiles: Tiles) -> AttentionOutput:
    """Neither queries nor keys may be empty."""
    q, k, v = (unit_stride(x) for x in (request.q, request.k, request.v))
    plan, device = request.plan, q.device
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    rows, pack = packing(q_len, group, plan.starts.shape[1], tiles.rows)
    schedule = schedule_for(plan, rows // pack, tiles.keys)
    replicas, replica_heads = replicas_of(plan, batch, heads // pack)
    programs = schedule.row_tiles * replicas
    splits = split_count(programs, k.shape[2], tiles.keys, multiprocessors(device))

    shape = (batch, heads, q_len, v.shape[3])
    out = empty_in_order(q, shape, fill_order(request.q), torch.float32 if request.wide_results else q.dtype)
    lse, max_score = (torch.empty(shape[:3], dtype=torch.float32, device=device) for _ in range(2))
    parts = (out, lse, max_score)
    if splits > 1:
        parts = tuple(torch.empty((splits, *x.shape), dtype=torch.float32, device=device) for x in parts)
    with on_device(device):
        forward_kernel[(programs, splits)](
            q, k, v, *parts,
            row_strides(q), row_strides(k), row_strides(v), row_strides(parts[0][0] if splits > 1 else out),
            (math.prod(shape), math.prod(shape[:3])),
            mask_tensors(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, index_maps(request.score.index_map),
            schedule.row_tiles, q_len, heads, group, *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, **mask_constants(plan), **_dims(request),
            M=rows, N=tiles.keys, PACK=pack, SPLIT=splits > 1, POSITIVE_SCALE=scale > 0,
            num_warps=tiles.warps if rows >= 64 else 4, num_stages=tiles.stages,
        )  # fmt: skip
        if splits > 1:
            total = batch * heads * q_len
            padded_dim = padded(shape[3], 4)
            block = max(1, _ROW_BYTES // (8 * padded_dim))
            merge_kernel[(-(-total // block),)](
                *parts, out, lse, max_score, row_strides(out), splits, total, q_len, heads,
                V_DIM=shape[3], E=padded_dim, M=block,
            )  # fmt: skip
    return AttentionOutput(out, lse, max_score)


# ---- backward -------------------------------------------------------------------------------------------------------


def row_statistics(out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """(LSE, delta), float32 ``[B, H, Q]`` contiguous: see delta_kernel."""
    out, d_out = unit_stride(out), unit_stride(d_out)
    batch, heads, q_len, v_dim = out.shape
    kept_lse, delta = (torch.empty((batch, heads, q_len), dtype=torch.float32, device=out.device) for _ in range(2))
    padded_dim = padded(v_dim, 4)
    block = max(1, _ROW_BYTES // (4 * padded_dim))
    with on_device(out.device):
        delta_kernel[(-(-delta.numel() // block),)](
            out, d_out, lse, d_lse, delta, kept_lse,
            row_strides(out), row_strides(d_out), row_strides(lse), (0, 0, 0) if d_lse is None else row_strides(d_lse),
            delta.numel(), q_len, heads, V_DIM=v_dim, E=padded_dim, M=block,
        )  # fmt: skip
    return kept_lse, delta


def gradient_of(request: AttentionRequest, x: Tensor) -> Tensor:
    """An uninitialised gradient of ``x``."""
    return empty_in_order(x, x.shape, fill_order(x), torch.float32 if request.wide_results else x.dtype)


def backward_kv(
    request: AttentionRequest,
    score: KernelScore,
    scale: float,
    d_out: Tensor,
    lse: Tensor,
    delta_BHQ: Tensor,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """(dk, dv); ``lse`` and ``delta_BHQ`` come from row_statistics, nothing is empty."""
    q, k, v, d_out = (unit_stride(x) for x in (request.q, request.k, request.v, d_out))
    plan = request.plan
    batch, heads, q_len, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    mask_heads = plan.starts.shape[1]
    apart = mask_heads > 1 and group > 1  # the heads of a group have different masks
    schedule = schedule_for(plan, tiles.rows, tiles.keys, transposed=True, aligned=apart)
    col_tiles = schedule.row_tiles // group if apart else schedule.row_tiles
    replicas, replica_heads = replicas_of(plan, batch, kv_heads)
    dk, dv = gradient_of(request, request.k), gradient_of(request, request.v)
    with on_device(q.device):
        kv_kernel[(col_tiles * replicas,)](
            q, k, v, d_out, lse, delta_BHQ, dk, dv,
            row_strides(q), row_strides(k), row_strides(v), row_strides(d_out), row_strides(dk), row_strides(dv),
            mask_tensors(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, score.d_args, index_maps(request.score.index_map),
            col_tiles, -(-k.shape[2] // tiles.keys) if apart else 0,
            q_len, heads, group, *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, D_SCORE=score.d_score, **mask_constants(plan), TAILS=schedule.bounded,
            **_dims(request), M=tiles.rows, N=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return dk, dv


def backward_q(
    request: AttentionRequest,
    score: KernelScore,
    scale: float,
    d_out: Tensor,
    lse: Tensor,
    delta_BHQ: Tensor,
    tiles: Tiles,
) -> Tensor:
    """dq; adds to ``score.grads``.  ``lse`` and ``delta_BHQ`` come from row_statistics, nothing is empty."""
    q, k, v, d_out = (unit_stride(x) for x in (request.q, request.k, request.v, d_out))
    plan = request.plan
    batch, heads, q_len, _ = q.shape
    schedule = schedule_for(plan, tiles.rows, tiles.keys)
    replicas, replica_heads = replicas_of(plan, batch, heads)
    dq = gradient_of(request, request.q)
    with on_device(q.device):
        q_kernel[(schedule.row_tiles * replicas,)](
            q, k, v, d_out, lse, delta_BHQ, dq,
            row_strides(q), row_strides(k), row_strides(v), row_strides(d_out), row_strides(dq),
            mask_tensors(plan), schedule.records, schedule.partial_runs, schedule.full_runs,
            score.args, score.d_args, score.grads, index_maps(request.score.index_map),
            schedule.row_tiles, q_len, heads, heads // k.shape[1], *plan.starts.shape[:2], replica_heads, scale,
            SCORE=score.score, D_SCORE=score.d_score, D_CAPTURES=score.d_captures,
            **mask_constants(plan), TAILS=schedule.bounded,
            **_dims(request), M=tiles.rows, N=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return dq
