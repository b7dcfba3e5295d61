"""Masks by labels (document ids): a pair attends iff its labels are equal and it is in other, known intervals.

Where every label that a row asks for stands in one run of keys, as the ids of packed documents do, such a mask is those
intervals cut down to the row's run, which a sort and two binary searches find without reading anything from the device.
Whether it is so comes along as a tensor; where it is not, the two halves are still exact: see
:class:`LabelledIntervals`.

Shape legend: B batch, H query heads (1 where it does not matter), Q query rows, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_lowering.mask_program import MaskProgram, Ref
from inductor_lowering.static_intervals import AND_NAMES, NotStatic, solver_of, static_intervals
from magi_flex.fx_program import FxProgram
from magi_flex.intervals import RowIntervals
from magi_flex.kernels import device_plans
from magi_flex.kernels.cuda_driver import on_device

_LANES = 256


@dataclass(frozen=True)
class LabelledIntervals:
    """Row q attends to key k iff k is in ``rest`` of q and ``row_labels[q] == key_labels[k]``.

    Attributes:
        rest: intervals of ``[B, H]``, as all of the mask has them.
        row_labels, key_labels: int64 ``[B, H, Q]`` and ``[B, H, K]``.
    """

    rest: RowIntervals
    row_labels: Tensor
    key_labels: Tensor

    def packed(self) -> tuple[RowIntervals, Tensor]:
        """(intervals, whether they are the mask, a bool tensor): they hold more where a label returns."""
        if self.key_labels.is_cuda and device_plans.missing() is None:
            return self.packed_by_kernel()
        kv_len = self.rest.kv_len
        labels_BHK, order_BHK = self.key_labels.sort(dim=-1, stable=True)
        rows_BHQ = self.row_labels
        first_BHQ = torch.searchsorted(labels_BHK, rows_BHQ)
        after_BHQ = torch.searchsorted(labels_BHK, rows_BHQ, right=True)
        count_BHQ = after_BHQ - first_BHQ
        begin_BHQ = order_BHK.gather(2, first_BHQ.clamp(max=kv_len - 1))
        end_BHQ = order_BHK.gather(2, (after_BHQ - 1).clamp(min=0)) + 1
        missing_BHQ = count_BHQ == 0
        begin_BHQ, end_BHQ = begin_BHQ.masked_fill(missing_BHQ, kv_len), end_BHQ.masked_fill(missing_BHQ, 0)
        starts = torch.maximum(self.rest.starts, begin_BHQ[:, :, None].to(torch.int32))
        ends = torch.minimum(self.rest.ends, end_BHQ[:, :, None].to(torch.int32))
        intervals = RowIntervals.build(starts, ends, kv_len)
        returns_BHQ = (end_BHQ - begin_BHQ != count_BHQ) & ~missing_BHQ
        attends_BHQ = (intervals.starts < intervals.ends).any(2)
        return intervals, ~(returns_BHQ & attends_BHQ).any()

    def packed_by_kernel(self) -> tuple[RowIntervals, Tensor]:
        """:meth:`packed` in a few launches, without tables of the rows' runs."""
        from magi_flex.kernels.label_runs_triton import rows_in_runs

        kv_len, rows_BHQ = self.rest.kv_len, self.row_labels.contiguous()
        rest = [x.contiguous() for x in (self.rest.starts, self.rest.ends)]
        starts, ends = (torch.empty_like(x) for x in rest)
        returns = torch.zeros((), dtype=torch.int32, device=starts.device)
        batch, heads, slots, q_len = starts.shape
        if starts.numel():
            labels_BHK, order_BHK = self.key_labels.sort(dim=-1, stable=True)
            grid = (-(-q_len // _LANES), batch * heads)
            with on_device(starts.device):
                rows_in_runs[grid](
                    *(labels_BHK, order_BHK, rows_BHQ, *rest, starts, ends, returns),
                    *(q_len, kv_len, slots, kv_len.bit_length(), _LANES),
                )
        return RowIntervals(starts, ends, kv_len), returns == 0


def labelled_intervals(
    program: FxProgram,
    captures: Sequence[Any],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str,
) -> LabelledIntervals:
    """The mask as one equality of labels AND intervals whose number is known.

    Reads no tensor's contents, so fake tensors will do.  Raises NotStatic where the mask has not that form,
    UnsupportedMask where the program is no mask.
    """
    solver = solver_of(program, captures, batch, heads, q_len, kv_len, device)
    if solver is None:
        raise NotStatic("no labels: there is nothing to compare")
    mask = solver.mask
    pairs, others = [], []
    for at in _conjuncts(mask, mask.result):
        pair = _labels(mask, at)
        if pair is not None and solver.indices.is_pure(pair[1]):
            pair = None  # known from the key's index
        pairs.append(pair) if pair is not None else others.append(at)
    if len(pairs) != 1:
        raise NotStatic(f"{len(pairs)} equalities of labels, where one is allowed")
    rest = RowIntervals.full(q_len, kv_len, mask.device)
    for at in others:
        rest = solver.checked(rest.intersect(solver.solve(at)))
    row, key = pairs[0]
    rows_BHQ, keys_BHK = mask.axis_value(row)[..., 0].long(), mask.axis_value(key)[:, :, 0].long()
    shape_BH = torch.broadcast_shapes(rest.starts.shape[:2], rows_BHQ.shape[:2], keys_BHK.shape[:2])
    return LabelledIntervals(
        rest.expand(*shape_BH),
        rows_BHQ.expand(*shape_BH, q_len).contiguous(),
        keys_BHK.expand(*shape_BH, kv_len).contiguous(),
    )


def quick_intervals(
    program: FxProgram,
    captures: Sequence[Any],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str,
) -> tuple[RowIntervals, str] | None:
    """The mask by a fixed sequence of operations, with at most two numbers read back, and the rule that gave it.

    None where its number of intervals depends on data in another way than by labels that stand in one run each.
    Raises UnsupportedMask where the program is no mask.
    """
    args = (program, captures, batch, heads, q_len, kv_len, device)
    kinds = tuple((x.dtype, x.shape, x.device) if isinstance(x, Tensor) else x for x in captures)
    refused = ("no quick intervals", kinds, *args[2:])  # contents do not matter
    if refused in program.memo:
        return None
    try:
        return static_intervals(*args).trim(), "static"
    except NotStatic:
        pass
    try:
        intervals, holds = labelled_intervals(*args).packed()
    except NotStatic:
        program.recall(refused, lambda: None)
        return None
    return (intervals.trim(), "packed labels") if bool(holds) else None


def _conjuncts(mask: MaskProgram, at: int) -> list[int]:
    step = mask.steps[at]
    parts = step.args[:2]
    if step.name.rpartition("::")[2] in AND_NAMES and all(
        isinstance(x, Ref) and mask.steps[x.step].dtype == torch.bool for x in parts
    ):
        return [i for x in parts for i in _conjuncts(mask, x.step)]
    return [at]


def _labels(mask: MaskProgram, at: int) -> tuple[int, int] | None:
    """The steps of a row's and a key's whole numbers that ``at`` says are equal; None where it says something else."""
    step = mask.steps[at]
    if step.name.rpartition("::")[2] != "eq" or not all(isinstance(x, Ref) for x in step.args[:2]):
        return None
    left, right = (x.step for x in step.args[:2])
    if "k" in mask.steps[left].depends:
        left, right = right, left
    row, key = mask.steps[left], mask.steps[right]
    if "k" in row.depends or "k" not in key.depends or "q" in key.depends:
        return None
    for x in (row, key):
        if x.dtype is None or x.shape or x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.uint64:
            return None
    return left, right
