"""Attention over a sharded sequence, as the magi_flex attention ops (and their eager form) call it.

They give the rank's own rows and keys, and the handle of the mask (context_mask.py); everything else about the
exchange stays out of the graph, which is the same on every rank.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from magi_flex.distributed import context_mask
from magi_flex.distributed.attention_plan import SharedAttention
from magi_flex.distributed.context_mask import ContextMask
from magi_flex.distributed.cost_model import Shape
from magi_flex.distributed.head_groups import GroupedAttention
from magi_flex.distributed.stages import StagedAttention
from magi_flex.kernels.layout import in_order
from magi_flex.kernels.request import IndexMap, ScoreProgram
from magi_flex.ops import provide_sharded_attention, stats_dtype

_library = torch.library.Library("magi_flex", "FRAGMENT")  # noqa: TOR901

_MESH_ARGS = "int[] mesh_ranks, int[] mesh_shape"
_library.define(
    "localize_handle(Tensor handle, SymInt batch, SymInt heads, "
    f"{_MESH_ARGS}, int[] batch_dims, int[] head_dims, int[] sequence_dims) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.define(f"shard_offset(Tensor like, SymInt size, {_MESH_ARGS}, int[] mesh_dims) -> Tensor")


# ---- batch and heads sharded too ------------------------------------------------------------------------------------
# The ops get the mesh as numbers, not the names of its process groups: those differ from rank to rank, and ranks that
# share a compile cache may run each other's graphs.


def mesh_arguments(mesh: DeviceMesh) -> tuple[list[int], list[int]]:
    """(mesh_ranks, mesh_shape) as the ops take them: the ranks in row-major order, none where they are 0, 1, 2, ..."""
    with _disable_current_modes():  # the mesh has a real tensor, also where a graph is traced
        ranks = mesh.mesh.flatten().tolist()
    return ([] if ranks == list(range(len(ranks))) else ranks), list(mesh.shape)


def _coordinates(mesh_ranks: Sequence[int], mesh_shape: Sequence[int]) -> list[int]:
    """Where this rank is on the mesh."""
    rank = dist.get_rank()
    place = list(mesh_ranks).index(rank) if mesh_ranks else rank
    coordinates = []
    for extent in reversed(mesh_shape):
        place, coordinate = divmod(place, extent)
        coordinates.insert(0, coordinate)
    return coordinates


def _ranks_along(mesh_ranks: Sequence[int], mesh_shape: Sequence[int], dim: int) -> list[int]:
    """The ranks that differ from this one in their place along one mesh dimension alone, itself included."""
    coordinates = _coordinates(mesh_ranks, mesh_shape)
    coordinates[dim] = 0
    first = 0
    for coordinate, extent in zip(coordinates, mesh_shape, strict=True):
        first = first * extent + coordinate
    places = [first + i * math.prod(mesh_shape[dim + 1 :]) for i in range(mesh_shape[dim])]
    return [mesh_ranks[place] for place in places] if mesh_ranks else places


def _shard_offset(size: int, mesh_ranks: Sequence[int], mesh_shape: Sequence[int], mesh_dims: Sequence[int]) -> int:
    """First index of this rank's part of a dimension that DTensor cuts over each of the mesh dimensions in turn."""
    coordinates = _coordinates(mesh_ranks, mesh_shape)
    offset = 0
    for dim in mesh_dims:
        step = -(-size // mesh_shape[dim])
        begin = min(size, coordinates[dim] * step)
        offset += begin
        size = min(size, begin + step) - begin
    return offset


@torch.library.impl(_library, "shard_offset", "CompositeExplicitAutograd")
def shard_offset(
    like: Tensor, size: int, mesh_ranks: Sequence[int], mesh_shape: Sequence[int], mesh_dims: Sequence[int]
) -> Tensor:
    """int64 ``[]`` on the device of ``like``: :func:`_shard_offset`, found when a graph runs."""
    offset = _shard_offset(size, mesh_ranks, mesh_shape, mesh_dims)
    return torch.full((), offset, dtype=torch.int64, device=like.device)  # not copied there: CUDA graphs may hold it


@torch.library.register_fake("magi_flex::shard_offset", lib=_library)
def _(like, size, mesh_ranks, mesh_shape, mesh_dims):  # type: ignore[no-untyped-def]
    return torch.empty((), dtype=torch.int64, device=like.device)


@torch.library.impl(_library, "localize_handle", "CompositeExplicitAutograd")
def localize_handle(
    handle: Tensor,
    batch: int,
    heads: int,
    mesh_ranks: Sequence[int],
    mesh_shape: Sequence[int],
    batch_dims: Sequence[int],
    head_dims: Sequence[int],
    sequence_dims: Sequence[int],
) -> Tensor:
    """A handle of the same mask that knows which batch entries and heads (of so many) this rank holds."""
    mask, _, _ = context_mask.find(handle)
    sharing = sorted(_ranks_along(mesh_ranks, mesh_shape, sequence_dims[0]))
    planned = sorted(dist.get_process_group_ranks(mask.group))
    if sharing != planned:
        raise ValueError(
            f"query: ranks {sharing} share its sequence, but the block_mask's ContextParallel was made for ranks "
            f"{planned}; shard the sequence over the mesh dimension that ContextParallel was given"
        )
    mask_batch, mask_heads = mask.mask.starts.shape[:2]
    if mask_batch not in (1, batch) or mask_heads not in (1, heads):
        raise ValueError(
            f"block_mask: is for {mask_batch} batch entries and {mask_heads} heads, but the query has {batch} and "
            f"{heads}; they must be equal, or 1 in the mask (with attend_local no mask may depend on entries or heads "
            "that other ranks hold: give flex_attention DTensors)"
        )
    offsets = (
        _shard_offset(size, mesh_ranks, mesh_shape, dims) for size, dims in ((batch, batch_dims), (heads, head_dims))
    )
    return context_mask.new_handle(mask, *offsets)


@torch.library.register_fake("magi_flex::localize_handle", lib=_library)
def _(handle, batch, heads, mesh_ranks, mesh_shape, batch_dims, head_dims, sequence_dims):  # type: ignore[no-untyped-def]
    return torch.empty_like(handle)


# ---- attention ------------------------------------------------------------------------------------------------------


def _staged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: Tensor,
    score: ScoreProgram,
    scale: float,
    backend: str,
    backward: bool,
    max_score: bool = False,
) -> tuple[ContextMask, SharedAttention]:
    mask, batch_offset, head_offset = context_mask.find(handle)
    if not score.is_identity:
        indices = IndexMap(b_offset=batch_offset, h_offset=head_offset)
        score = replace(score, index_map=indices)
    shape = Shape(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.shape[0], q.element_size())
    plan = mask.plan(shape, backward, batch_offset, head_offset)
    kind = StagedAttention if plan.joined is None else GroupedAttention
    return mask, kind(plan, mask.group, scale, score, backend, mask.timeline, mask.options.prefetch, max_score)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: Tensor,
    score: ScoreProgram,
    scale: float,
    backend: str,
    needs_backward: bool,
    out_order: Sequence[int],
    max_score: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_score) of the rank's rows."""
    mask, staged = _staged(q, k, v, handle, score, scale, backend, False, max_score)
    keep = mask.options.keep_keys and needs_backward
    result, kept = staged.forward(q, k, v, needs_backward, keep)
    if keep:
        _keep(result.lse, kept)
    return in_order(result.out, out_order), result.lse, result.max_score


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    handle: Tensor,
    score: ScoreProgram,
    scale: float,
    backend: str,
    q_order: Sequence[int],
    k_order: Sequence[int],
    v_order: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(dq, dk, dv, gradients of the captures that want one, summed over the mask's group)."""
    mask, staged = _staged(q, k, v, handle, score, scale, backend, True)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    kept = _take_kept(lse) if mask.options.keep_keys else None
    grads = staged.backward(q, k, v, out, lse, d_out, d_lse, kept)
    captured = []
    for capture, needed, grad in zip(score.captures, score.needs_grad, grads.captures, strict=False):
        if needed:
            # the same dtype and layout on every rank, also on those without a gradient
            wide = torch.zeros(capture.shape, dtype=stats_dtype(capture.dtype), device=capture.device)
            if grad is not None:
                wide.copy_(grad)
            dist.all_reduce(wide, group=mask.group)
            captured.append(wide.to(capture.dtype))
    return in_order(grads.dq, q_order), in_order(grads.dk, k_order), in_order(grads.dv, v_order), captured


# ---- keys kept between the passes -----------------------------------------------------------------------------------

_kept: dict[int, tuple[StorageWeakRef, list[list[Tensor]]]] = {}
_kept_lock = threading.Lock()


def _keep(lse: Tensor, keys: list[list[Tensor]]) -> None:
    """Keep remote keys until the forward's lse is freed."""
    storage = lse.untyped_storage()
    with _kept_lock:
        _forget_expired()
        _kept[storage._cdata] = (StorageWeakRef(storage), keys)


def _take_kept(lse: Tensor) -> list[list[Tensor]] | None:
    """What was kept for this lse, once; None (fetch again) if there is nothing, as after recomputation."""
    with _kept_lock:
        _forget_expired()
        entry = _kept.pop(lse.untyped_storage()._cdata, None)
    return None if entry is None else entry[1]


def _forget_expired() -> None:
    """Passes that were never followed by a backward one leave nothing behind for long."""
    for old in [key for key, (owner, _) in _kept.items() if owner.expired()]:
        del _kept[old]


provide_sharded_attention(sys.modules[__name__])
