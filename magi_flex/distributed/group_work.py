"""The moving parts of group_cast and group_reduce: start a hop, finish it, go on with the next one.

No gradients here (see group_ops.py); the attention stages use this directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from magi_flex.distributed import native_exchange
from magi_flex.distributed.group_plan import GroupPlan
from magi_flex.distributed.native_exchange import NativeExchange
from magi_flex.distributed.row_copies import copy_rows
from magi_flex.distributed.transport import RowExchange
from magi_flex.kernels.merge import merge_lse_

Reduction = Literal["sum", "lse"]
Plans = GroupPlan | Sequence[GroupPlan]
Finish = Callable[[list[Tensor]], list[Tensor]]
Exchange = RowExchange | NativeExchange
Step = Callable[[list[Tensor]], tuple[Exchange, Finish]]


class GroupWork:
    """A cast or reduction that is under way.

    A plan with two hops needs :meth:`advance` between them: it finishes the first hop and starts the second one.
    Call it, and :meth:`wait`, in the same order on every rank.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        data: list[Tensor],
        on_done: Callable[[], None] | None = None,
        finish: Finish | None = None,
    ):
        """
        Args:
            on_done: called when the last hop has arrived (on a GPU: on a stream that waits for it).
            finish: what :meth:`wait` makes of the last hop's result.
        """
        self._steps = list(steps)
        self._data = data
        self._on_done = on_done
        self._finish_all = finish
        self._pending: tuple[Exchange, Finish] | None = None
        self._start()

    def _start(self) -> None:
        if self._steps:
            self._pending = exchange, _ = self._steps.pop(0)(self._data)
            if isinstance(exchange, NativeExchange):  # its memory is soon needed again; all of it is only queued
                self._finish()
                exchange.done()
                if not self._steps and self._on_done is not None:
                    self._on_done()
            elif not self._steps and self._on_done is not None:
                exchange.notify(self._on_done)

    def advance(self) -> None:
        """Finish the hop under way and start the next one; does nothing on the last hop."""
        if self._steps:
            self._finish()
            self._start()

    def _finish(self) -> None:
        if self._pending is not None:
            exchange, finish = self._pending
            self._data = finish(exchange.wait())
            self._pending = None

    def wait(self) -> list[Tensor]:
        """The result, one tensor for each that was given."""
        while self._steps:
            self.advance()
        self._finish()
        if self._finish_all is not None:
            self._data, self._finish_all = self._finish_all(self._data), None
        return self._data


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group itself, the default one for None."""
    return dist.group.WORLD if group is None else group


def hops_of(plan: Plans) -> tuple[GroupPlan, ...]:
    return (plan,) if isinstance(plan, GroupPlan) else tuple(plan)


def check_rows(tensors: Sequence[Tensor], rows: int, ranks: int, group: dist.ProcessGroup, what: str) -> None:
    if not tensors:
        raise ValueError("tensors: is empty; give at least one")
    for i, x in enumerate(tensors):
        if x.dim() == 0 or x.shape[0] != rows:
            raise ValueError(
                f"tensors[{i}]: has shape {tuple(x.shape)}; the plan's {what} has {rows} rows (dimension 0)"
            )
    if ranks != group.size():
        raise ValueError(f"plan: is for {ranks} ranks, but the group has {group.size()}; plan for this group")


# ---- casts ----------------------------------------------------------------------------------------------------------


def _start_cast(tensors: Sequence[Tensor], plan: GroupPlan, group: dist.ProcessGroup) -> Exchange:
    if plan.native is not None and native_exchange.serves(tensors):
        most = int(plan.native.most_rows[0])
        arriving = len(plan.recv_index)
        return NativeExchange(tensors, plan.send_index, plan.native.cast_routes, arriving, most, group)
    return RowExchange(tensors, plan.send_index, plan.send_splits, plan.recv_splits, group)


def _finish_cast(received: Sequence[Tensor], plan: GroupPlan, into: Sequence[Tensor] | None = None) -> list[Tensor]:
    if into is None:
        everywhere = plan.out_rows == plan.recv_index.shape[0]
        into = [(x.new_empty if everywhere else x.new_zeros)(plan.out_rows, *x.shape[1:]) for x in received]
    copy_rows(received, into, target_index=plan.recv_index)
    return list(into)


def start_group_cast(
    tensors: Sequence[Tensor],
    plan: Plans,
    group: dist.ProcessGroup | None = None,
    on_done: Callable[[], None] | None = None,
    into: Sequence[Tensor] | None = None,
) -> GroupWork:
    """``group_cast`` that returns at once; not differentiable.

    ``into``: tensors ``[out_rows, ...]`` that what arrives is written to, and that are the result.
    """
    group, hops = group_of(group), hops_of(plan)
    check_rows(tensors, hops[0].in_rows, len(hops[0].send_splits), group, "input")
    own = list(tensors)

    def step(index: int) -> Step:
        hop = hops[index]
        target = into if index == len(hops) - 1 else None

        def start(data: list[Tensor]) -> tuple[Exchange, Finish]:
            rows = data if index == 0 else [torch.cat(pair) for pair in zip(own, data, strict=True)]
            return _start_cast(rows, hop, group), lambda received: _finish_cast(received, hop, target)

        return start

    return GroupWork([step(i) for i in range(len(hops))], own, on_done)


# ---- reductions -----------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _start_reduce(tensors: Sequence[Tensor], plan: GroupPlan, group: dist.ProcessGroup) -> Exchange:
    tensors = [_wide(x) for x in tensors]
    if plan.native is not None and native_exchange.serves(tensors):
        rows, most = len(plan.send_index), int(plan.native.most_rows[1])
        return NativeExchange(tensors, plan.recv_index, plan.native.reduce_routes, rows, most, group)
    return RowExchange(tensors, plan.recv_index, plan.recv_splits, plan.send_splits, group)


def _join(accumulators: list[Tensor], received: Sequence[Tensor], plan: GroupPlan, op: Reduction) -> list[Tensor]:
    """Add what came back to the accumulators, source by source: the order never depends on timing."""
    if plan.native is not None and native_exchange.can_join([*accumulators, *received]):
        native_exchange.join_rows(accumulators, received, plan.native, op)
        return accumulators
    indices = plan.send_index.split(plan.send_splits)
    parts = [x.split(plan.send_splits) for x in received]
    for source, index in enumerate(indices):
        if len(index) == 0:
            continue
        if op == "lse":
            out, lse = (acc.index_select(0, index) for acc in accumulators[:2])
            merge_lse_(out, lse, parts[0][source], parts[1][source])
            accumulators[0].index_copy_(0, index, out)
            accumulators[1].index_copy_(0, index, lse)
            for acc, part in zip(accumulators[2:], parts[2:], strict=True):
                acc.index_copy_(0, index, torch.maximum(acc.index_select(0, index), part[source]))
        else:
            for acc, part in zip(accumulators, parts, strict=True):
                acc.index_add_(0, index, part[source])
    return accumulators


def _accumulators(like: Sequence[Tensor], rows: int, op: Reduction) -> list[Tensor]:
    out = [_wide(x[:0]).new_zeros(rows, *x.shape[1:]) for x in like]
    if op == "lse":
        for x in out[1:]:
            x.fill_(-torch.inf)
    return out


def start_group_reduce(
    tensors: Sequence[Tensor],
    plan: Plans,
    group: dist.ProcessGroup | None = None,
    op: Reduction = "sum",
    initial: Sequence[Tensor] | None = None,
    on_done: Callable[[], None] | None = None,
    finish: Finish | None = None,
) -> GroupWork:
    """``group_reduce`` that returns at once; not differentiable.

    ``op="lse"`` also takes a third tensor, largest scores, which are joined by maximum (plans of one hop).
    ``initial``: rows ``[in_rows, ...]`` to add to, in place (float32, or float64 for float64 inputs).
    """
    group, hops = group_of(group), hops_of(plan)
    check_reduce(tensors, hops, group, op)
    results = _accumulators(tensors, hops[0].in_rows, op) if initial is None else list(initial)
    own_rows = hops[0].in_rows

    def first_of_two(data: list[Tensor]) -> tuple[Exchange, Finish]:
        """Inside the node; what belongs to this rank's own rows is done, the rest goes on."""
        within = hops[1]

        def finish(received: list[Tensor]) -> list[Tensor]:
            joined = _join(_accumulators(received, within.in_rows, op), received, within, op)
            if op == "lse":
                merge_lse_(results[0], results[1], joined[0][:own_rows], joined[1][:own_rows])
            else:
                for result, part in zip(results, joined, strict=True):
                    result += part[:own_rows]
            return [x[own_rows:] for x in joined]

        return _start_reduce(data, within, group), finish

    def last(data: list[Tensor]) -> tuple[Exchange, Finish]:
        def finish(received: list[Tensor]) -> list[Tensor]:
            return _join(results, received, hops[0], op)

        return _start_reduce(data, hops[0], group), finish

    return GroupWork([last] if len(hops) == 1 else [first_of_two, last], list(tensors), on_done, finish)


def check_reduce(tensors: Sequence[Tensor], hops: tuple[GroupPlan, ...], group: dist.ProcessGroup, op: str) -> None:
    check_rows(tensors, hops[-1].out_rows, len(hops[-1].send_splits), group, "output (a reduction's input)")
    for i, x in enumerate(tensors):
        if not x.dtype.is_floating_point:
            raise ValueError(f"tensors[{i}]: has dtype {x.dtype}; reductions take floating point tensors")
    if op == "lse" and hops[-1].out_rows > len(hops[-1].recv_index):
        raise ValueError('op: "lse" takes plans whose output rows all arrive; this one has others among them')
    if op == "lse" and (len(tensors) not in (2, 3) or any(tensors[0].shape[:-1] != x.shape for x in tensors[1:])):
        shapes = [tuple(x.shape) for x in tensors]
        raise ValueError(f'tensors: have shapes {shapes}; op "lse" takes out [rows, ..., E] and lse [rows, ...]')
