"""torch.library ops of group_cast and group_reduce (one hop), with fakes and gradients.

The plan travels as tensors and row counts, so that a compiled graph serves any plan: new contents do not recompile,
new row counts only until they have become dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.distributed.distributed_c10d import _resolve_process_group

from magi_flex.distributed.group_plan import GroupPlan, NativePlan
from magi_flex.distributed.group_work import start_group_cast, start_group_reduce

LN_2 = math.log(2)
INDICES = 4  # index tensors and counts of a plan
_READS_COUNTS = (torch.Tag.cudagraph_unsafe,)  # of rows, which a replay would not do again


def cast(tensors: list[Tensor], plan: GroupPlan, group_name: str) -> list[Tensor]:
    return _cast(
        tensors,
        plan.send_index,
        plan.send_counts,
        plan.recv_counts,
        plan.recv_index,
        [] if plan.native is None else plan.native.tensors(),
        plan.in_rows,
        plan.out_rows,
        group_name,
    )


def reduce(tensors: list[Tensor], plan: GroupPlan, op: str, group_name: str) -> list[Tensor]:
    return _reduce(
        tensors,
        plan.send_index,
        plan.send_counts,
        plan.recv_counts,
        plan.recv_index,
        [] if plan.native is None else plan.native.tensors(),
        plan.in_rows,
        plan.out_rows,
        op,
        group_name,
    )


def _plan(in_rows: int, out_rows: int, *tensors: Any) -> GroupPlan:
    *indices, native = tensors
    return GroupPlan(in_rows, out_rows, *indices, native=NativePlan(*native) if native else None)


@torch.library.custom_op("magi_flex::group_cast", mutates_args=(), tags=_READS_COUNTS)
def _cast(
    tensors: Sequence[Tensor],
    send_index: Tensor,
    send_counts: Tensor,
    recv_counts: Tensor,
    recv_index: Tensor,
    native: Sequence[Tensor],
    in_rows: int,
    out_rows: int,
    group_name: str,
) -> list[Tensor]:
    plan = _plan(in_rows, out_rows, send_index, send_counts, recv_counts, recv_index, native)
    return start_group_cast(tensors, plan, _resolve_process_group(group_name)).wait()


@_cast.register_fake
def _(tensors, send_index, send_counts, recv_counts, recv_index, native, in_rows, out_rows, group_name):
    return [x.new_empty(out_rows, *x.shape[1:]) for x in tensors]


@torch.library.custom_op("magi_flex::group_reduce", mutates_args=(), tags=_READS_COUNTS)
def _reduce(
    tensors: Sequence[Tensor],
    send_index: Tensor,
    send_counts: Tensor,
    recv_counts: Tensor,
    recv_index: Tensor,
    native: Sequence[Tensor],
    in_rows: int,
    out_rows: int,
    op: str,
    group_name: str,
) -> list[Tensor]:
    plan = _plan(in_rows, out_rows, send_index, send_counts, recv_counts, recv_index, native)
    return start_group_reduce(tensors, plan, _resolve_process_group(group_name), op).wait()


@_reduce.register_fake
def _(tensors, send_index, send_counts, recv_counts, recv_index, native, in_rows, out_rows, op, group_name):
    def result(x: Tensor) -> Tensor:
        dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        return x.new_empty(in_rows, *x.shape[1:], dtype=dtype)

    return [result(x) for x in tensors]


def _save_plan(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *plan = inputs
    native = plan[INDICES]
    ctx.dtypes = [x.dtype for x in tensors]
    ctx.scalars = plan[INDICES + 1 :]
    ctx.native = len(native)
    saved = [*plan[:INDICES], *native]
    if len(ctx.scalars) == 4 and ctx.scalars[2] == "lse":
        saved += [*tensors, *output]
    ctx.save_for_backward(*saved)


def _saved(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """(the plan's tensors as the ops take them, what else was saved)."""
    saved = list(ctx.saved_tensors)
    last = INDICES + ctx.native
    return [*saved[:INDICES], saved[INDICES:last]], saved[last:]


def _no_grads(ctx: Any) -> list[Any]:
    """Of all arguments after the tensors."""
    return [*[None] * INDICES, [None] * ctx.native, *[None] * len(ctx.scalars)]


def _cast_backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    plan, _ = _saved(ctx)
    in_rows, out_rows, group_name = ctx.scalars
    sums = _reduce([g.contiguous() for g in grads], *plan, in_rows, out_rows, "sum", group_name)
    return [g.to(dtype) for g, dtype in zip(sums, ctx.dtypes, strict=True)], *_no_grads(ctx)


def _reduce_backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    plan, rest = _saved(ctx)
    in_rows, out_rows, op, group_name = ctx.scalars
    sent = [g.contiguous() for g in grads]
    if op == "lse":
        part_out, part_lse, out, lse = rest
        # d part_out = w d_out;  d part_lse = w (ln 2 d_out . (part_out - out) + d_lse),  w = 2^(part_lse - lse)
        d_out, out, d_lse, lse = _cast([sent[0], out, sent[1], lse], *plan, in_rows, out_rows, group_name)
        weight = torch.exp2(part_lse.to(lse.dtype) - lse).masked_fill(part_lse == -torch.inf, 0)
        d_part_out = weight[..., None] * d_out
        d_part_lse = weight * (LN_2 * (d_out * (part_out - out)).sum(-1) + d_lse)
        received = [d_part_out, d_part_lse]
    else:
        received = _cast(sent, *plan, in_rows, out_rows, group_name)
    return [g.to(dtype) for g, dtype in zip(received, ctx.dtypes, strict=True)], *_no_grads(ctx)


# Where a rank has no rows Inductor would drop the op, and the other ranks would wait for it.
for _op in (torch.ops.magi_flex.group_cast.default, torch.ops.magi_flex.group_reduce.default):
    _register_effectful_op(_op, _EffectType.ORDERED)

_cast.register_autograd(_cast_backward, setup_context=_save_plan)
_reduce.register_autograd(_reduce_backward, setup_context=_save_plan)
