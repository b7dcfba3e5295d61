"""group_cast and group_reduce: rows to any set of ranks, and partial results of rows back to their owners.

``group_cast`` sends each row to every rank that asks for it, once; ``group_reduce`` is its transpose: every copy comes
back and the copies of a row are joined by sum, mean or, for attention outputs, by their log-sum-exp.  The names and
the idea are MagiAttention's.  Plans with two hops go over the network once per node and spread inside it; on the way
back partial results are joined inside a node before they cross.

Both are differentiable, run on any torch.distributed backend with all-to-all (gloo, NCCL), and stay in the graph under
torch.compile.  Reductions send and add up in float32 (float64 for float64 inputs), in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed import group_ops
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.group_work import (
    GroupWork,
    Plans,
    check_reduce,
    check_rows,
    group_of,
    hops_of,
    start_group_cast,
    start_group_reduce,
)
from magi_flex.distributed.native_buffers import why_not
from magi_flex.distributed.native_exchange import gather_counts, with_native
from magi_flex.kernels.merge import merge_lse


@overload
def group_cast(
    tensors: Sequence[Tensor], plan: Plans, group: dist.ProcessGroup | None = None, *, async_op: Literal[False] = False
) -> list[Tensor]: ...
@overload
def group_cast(
    tensors: Sequence[Tensor], plan: Plans, group: dist.ProcessGroup | None = None, *, async_op: Literal[True]
) -> GroupWork: ...
def group_cast(
    tensors: Sequence[Tensor], plan: Plans, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Any:
    """Send rows (dimension 0) to every rank that needs them; several tensors travel in one message.

    Args:
        tensors: ``[in_rows, ...]`` each, any dtypes, contiguous or not.
        plan: one :class:`GroupPlan`, or the two hops of a two-level plan (the second one's input is this rank's own
            rows followed by what the first one brought).
        group: default: the default group.
        async_op: return a :class:`GroupWork`; not differentiable.

    Returns:
        ``[out_rows, ...]`` for each tensor.

    Raises:
        ValueError: rows that do not match the plan, a plan for another number of ranks, no tensor; a tensor that wants
            a gradient with ``async_op``.
    """
    group, hops = group_of(group), hops_of(plan)
    if async_op:
        _refuse_gradients(tensors)
        return start_group_cast(tensors, hops, group)
    check_rows(tensors, hops[0].in_rows, len(hops[0].send_counts), group, "input")
    rows = group_ops.cast(list(tensors), hops[0], group.group_name)
    if len(hops) == 2:
        rows = group_ops.cast([torch.cat(pair) for pair in zip(tensors, rows, strict=True)], hops[1], group.group_name)
    return rows


@overload
def group_reduce(
    tensors: Sequence[Tensor],
    plan: Plans,
    group: dist.ProcessGroup | None = None,
    op: Literal["sum", "mean", "lse"] = "sum",
    *,
    async_op: Literal[False] = False,
) -> list[Tensor]: ...
@overload
def group_reduce(
    tensors: Sequence[Tensor],
    plan: Plans,
    group: dist.ProcessGroup | None = None,
    op: Literal["sum", "mean", "lse"] = "sum",
    *,
    async_op: Literal[True],
) -> GroupWork: ...
def group_reduce(
    tensors: Sequence[Tensor],
    plan: Plans,
    group: dist.ProcessGroup | None = None,
    op: Literal["sum", "mean", "lse"] = "sum",
    *,
    async_op: bool = False,
) -> Any:
    """Bring partial results of rows back to the ranks that hold the rows and join them: the transpose of group_cast.

    Args:
        tensors: ``[out_rows, ...]`` each, floating point; for ``op="lse"`` two: out ``[out_rows, ..., E]`` and lse
            ``[out_rows, ...]`` in the log2 domain.
        plan: of the cast that brought the rows (one or two hops).
        op: "sum"; "mean" over all copies of a row; "lse": sum of ``2^(lse_i - lse) out_i`` with
            ``lse = log2(sum of 2^lse_i)``, which joins attention over disjoint sets of keys.
        async_op: return a :class:`GroupWork`; not differentiable.

    Returns:
        ``[in_rows, ...]`` for each tensor, float32 (float64 for float64).  A row that no rank got is 0 (lse -inf).

    Raises:
        ValueError: as in :func:`group_cast`; tensors that do not suit the operation.
    """
    group, hops = group_of(group), hops_of(plan)
    if op not in ("sum", "mean", "lse"):
        raise ValueError(f'op: got {op!r}, allowed are "sum", "mean" and "lse"')
    check_reduce(tensors, hops, group, op)
    if op == "lse" and len(tensors) != 2:
        raise ValueError(f'tensors: are {len(tensors)}; op "lse" takes out [rows, ..., E] and lse [rows, ...]')
    if async_op:
        _refuse_gradients(tensors)
    if op == "mean":
        sums = [*tensors, torch.ones(len(tensors[0]), device=tensors[0].device)]
        if async_op:
            return start_group_reduce(sums, hops, group, finish=_divide_by_last)
        return _divide_by_last(group_reduce(sums, hops, group))
    if async_op:
        return start_group_reduce(tensors, hops, group, op)
    name = group.group_name
    if len(hops) == 1:
        return group_ops.reduce(list(tensors), hops[0], op, name)
    own_rows = hops[0].in_rows
    joined = group_ops.reduce(list(tensors), hops[1], op, name)
    own, passed = [x[:own_rows] for x in joined], [x[own_rows:] for x in joined]
    crossed = group_ops.reduce(passed, hops[0], op, name)
    if op == "lse":
        return list(merge_lse(own[0], own[1], crossed[0], crossed[1]))
    return [a + b for a, b in zip(own, crossed, strict=True)]


def _divide_by_last(sums: list[Tensor]) -> list[Tensor]:
    """The means: the last tensor has the number of copies that each row is the sum of."""
    *totals, copies = sums
    return [x / copies.clamp(min=1).view(-1, *[1] * (x.dim() - 1)) for x in totals]


def _refuse_gradients(tensors: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("async_op: works only on tensors without gradient; detach them, or call without async_op")


def verify_group_plan(plan: GroupPlan, group: dist.ProcessGroup | None = None) -> None:
    """Compare all ranks' plans (a collective): raises ValueError on every rank unless the counts of each pair agree."""
    gather_counts(plan, group_of(group))


def native_plan(plan: Plans, device: torch.device, group: dist.ProcessGroup | None = None) -> Plans:
    """The plan for native collectives: rows are written straight into the memory of the other GPUs of a machine.

    ``group_cast`` and ``group_reduce`` do so wherever they are given such a plan and tensors on the GPU: no packing, no
    copies on the way, the same results as by all-to-all (sums bit for bit, log-sum-exp within rounding).  Calls are
    queued on the current stream as a whole, with ``async_op`` too: take a stream of your own to overlap them.  Every
    rank has to call this, and use what it returns, alike (it is a collective).

    Raises:
        RuntimeError: on every rank, with the reason, where the ranks cannot reach each other's memory.
        ValueError: on every rank, if the counts of some pair of ranks do not agree.
    """
    group = group_of(group)
    reason = why_not(group, device)
    if reason is not None:
        raise RuntimeError(f"native collectives are not available ({reason}); use the plan as it is: all-to-all")
    if isinstance(plan, GroupPlan):
        return with_native(plan, group, device)
    return tuple(with_native(hop, group, device) for hop in plan)
