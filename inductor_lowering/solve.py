"""Formulas solved for the keys: which key intervals of each row satisfy a formula, inside a given domain.

The domain makes it exact and cheap to take one condition after the other: inside a row's document, a position in the
document is monotone, though it is not over all keys.

Shape legend: B batch, H query heads (1 where it does not matter), G = B * H, R intervals of a row, S segments, Q query
rows (a part of them), K keys, U row classes, N key runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from inductor_lowering.formula import And, Compare, Constant, Formula, Opaque, Or, Outside, RowTerm
from inductor_lowering.key_values import KeyValues
from inductor_lowering.mask_program import MaskProgram
from magi_flex.intervals import RowIntervals

MAX_SLOTS = 16  # intervals of a row that a formula may need before the rows are evaluated pair by pair
_GRID_ELEMENTS = 1 << 24  # most elements of a reduced grid for one part of the rows
_GRID_GAIN = 16  # and at least this many times fewer than there are pairs
_MIRRORED = {"le": "ge", "ge": "le", "eq": "eq"}


class TooManyIntervals(Exception):
    """The rows need more intervals than MAX_SLOTS, or no rule applies; the message says where."""


class Solver:
    """Solves formulas of one program; ``rules`` collects which rules were used."""

    def __init__(self, program: MaskProgram) -> None:
        self.program = program
        self.q_len, self.kv_len = program.sizes["q"], program.sizes["k"]
        self.rules: dict[str, None] = {}
        self._key_runs: dict[int, tuple[Tensor, Tensor]] = {}

    def solve(self, formula: Formula, domain: RowIntervals, first_row: int) -> tuple[RowIntervals, list[str]]:
        """``domain`` (rows ``first_row``, ...) AND the parts of the formula that could be solved.

        The second result is empty if that was all of it, else it says why the rest could not be.
        """
        pending = list(formula.parts) if isinstance(formula, And) else [formula]
        pending.sort(key=_rank)
        reasons: list[str] = []
        while pending:
            failed, reasons = [], []
            for part in pending:
                try:
                    domain = self._inside(part, domain, first_row)
                except TooManyIntervals as error:
                    failed.append(part)
                    reasons.append(str(error))
            if len(failed) == len(pending):
                break
            pending = failed
        return domain, reasons

    def _inside(self, formula: Formula, domain: RowIntervals, first_row: int) -> RowIntervals:
        """``domain`` AND ``formula``; raises TooManyIntervals."""
        if isinstance(formula, Constant):
            return domain if formula.value else RowIntervals.empty(domain.q_len, self.kv_len, self.program.device)
        if isinstance(formula, RowTerm):
            self.rules["rows"] = None
            return _keep_rows(domain, self._rows(formula.values, first_row, domain.q_len))
        if isinstance(formula, Compare):
            return self._compare(formula, domain, first_row)
        if isinstance(formula, Outside):
            inside = self._compare(formula.inside, domain, first_row)
            return _checked(domain.intersect(inside.complement()))
        if isinstance(formula, And):
            for part in sorted(formula.parts, key=_rank):
                domain = self._inside(part, domain, first_row)
            return domain
        if isinstance(formula, Or):
            either = self._inside(formula.parts[0], domain, first_row)
            for part in formula.parts[1:]:
                either = _checked(either.union(self._inside(part, domain, first_row)))
            return either
        if isinstance(formula, Opaque):
            return self._grid(formula, domain, first_row)
        raise TypeError(f"formula: {type(formula).__name__} cannot be solved")

    def _rows(self, values_BHQ1: Tensor, first_row: int, rows: int) -> Tensor:
        """The part of a row value for these rows, ``[B, H, Q or 1]``."""
        values_BHQ = values_BHQ1[..., 0]
        return values_BHQ[:, :, first_row : first_row + rows] if values_BHQ.shape[2] == self.q_len else values_BHQ

    # ---- comparisons ----------------------------------------------------------------------------------------------

    def _compare(self, formula: Compare, domain: RowIntervals, first_row: int) -> RowIntervals:
        rows_BHQ = self._rows(formula.rows, first_row, domain.q_len)
        shapes = (domain.starts.shape[:2], rows_BHQ.shape[:2], formula.keys.shape_BH)
        batch, heads = torch.broadcast_shapes(*shapes)
        keys, op = formula.keys.expand(batch, heads), formula.op
        if keys.is_ascending or keys.is_descending:
            self.rules["separable"] = None
            begin, end = bounds_in_monotone(keys, op, rows_BHQ)
            return _clip(domain, begin, end)
        domain, rows_BHQ = domain.trim().expand(batch, heads), rows_BHQ.expand(batch, heads, -1)
        if op == "eq":
            first_GQ, last_GQ = keys.equal_run_range(rows_BHQ.flatten(0, 1))
            # A label that returns often does not matter in rows that attend to nothing anyway.
            attends_BHQ = (domain.ends > domain.starts).any(2)
            count_BHQ = (last_GQ - first_GQ).view(rows_BHQ.shape) * attends_BHQ
            repeats = int(count_BHQ.max()) if count_BHQ.numel() else 0
            if repeats <= 1 or repeats <= self._segments_inside(keys, domain):
                return self._labels(keys, first_GQ, repeats, count_BHQ, domain)
        if keys.negated.segments < keys.segments:
            keys, op, rows_BHQ = keys.negated, _MIRRORED[op], -rows_BHQ
        return self._segments(keys, op, rows_BHQ, domain)

    def _labels(
        self, keys: KeyValues, first_GQ: Tensor, repeats: int, count_BHQ: Tensor, domain: RowIntervals
    ) -> RowIntervals:
        """Keys whose label is the row's: the runs first, first + 1, ... of the label."""
        self._check_slots(repeats + domain.max_intervals, f"a label returns in {repeats} runs")
        self.rules["labels"] = None
        batch, heads, rows = count_BHQ.shape
        slot_R1 = torch.arange(max(1, repeats), device=first_GQ.device)[:, None]
        run_GRQ = (first_GQ[:, None] + slot_R1).expand(-1, -1, rows)
        begin, end = (x.view(batch, heads, -1, rows) for x in keys.runs_at(run_GRQ))
        end = torch.where(slot_R1 < count_BHQ[:, :, None], end, 0)
        runs = RowIntervals.build(begin, end, self.kv_len)
        if rows != domain.q_len:
            runs = runs.take_rows(torch.zeros(domain.q_len, dtype=torch.int64, device=end.device))
        return _checked(domain.intersect(runs))

    def _segments_inside(self, keys: KeyValues, domain: RowIntervals) -> int:
        """Most ascending segments in a row's interval."""
        first, last = self._segment_range(keys, domain)
        return int((last - first + 1).max()) if first.numel() else 0

    def _segment_range(self, keys: KeyValues, domain: RowIntervals) -> tuple[Tensor, Tensor]:
        """First and last segment of each interval, int64 ``[G, R, Q]``; for an empty one the last comes before."""
        starts, ends = (x.flatten(0, 1).long() for x in (domain.starts, domain.ends))
        empty = ends <= starts
        first = _look_up(keys.drops_GK, starts.masked_fill(empty, 0))
        last = _look_up(keys.drops_GK, (ends - 1).masked_fill(empty, 0))
        return first, torch.where(empty, first - 1, last)

    def _segments(self, keys: KeyValues, op: str, rows_BHQ: Tensor, domain: RowIntervals) -> RowIntervals:
        """Cut the row's intervals where the keys' values drop, and search each piece."""
        first_GRQ, last_GRQ = self._segment_range(keys, domain)
        most = int((last_GRQ - first_GRQ + 1).max()) if first_GRQ.numel() else 0
        self._check_slots(most * domain.max_intervals, f"the keys' values rise and fall {most} times in a row's keys")
        self.rules["piecewise"] = None
        most = max(1, most)
        segment = first_GRQ[:, :, None] + torch.arange(most, device=first_GRQ.device)[:, None]  # [G, R, S, Q]
        valid = segment <= last_GRQ[:, :, None]
        segment = segment.clamp(max=keys.segments - 1)
        begin, end = _look_up(keys.drop_keys_GN, segment), _look_up(keys.drop_keys_GN, segment + 1)
        target = rows_BHQ.flatten(0, 1)[:, None, None].expand(segment.shape)
        try:
            if op != "le":
                begin = torch.maximum(begin, keys.count_in_segment(target, segment, or_equal=False))
            if op != "ge":
                end = torch.minimum(end, keys.count_in_segment(target, segment, or_equal=True))
        except OverflowError as error:
            raise TooManyIntervals(str(error)) from error
        starts, ends = (x.flatten(0, 1)[:, :, None].long() for x in (domain.starts, domain.ends))
        begin, end = torch.maximum(begin, starts), torch.where(valid, torch.minimum(end, ends), 0)
        shape = (*domain.starts.shape[:2], -1, domain.q_len)
        return _checked(RowIntervals.build(begin.reshape(shape), end.reshape(shape), self.kv_len))

    @staticmethod
    def _check_slots(slots: int, reason: str) -> None:
        if slots > MAX_SLOTS:
            raise TooManyIntervals(reason)

    # ---- piecewise constant -----------------------------------------------------------------------------------------

    def _grid(self, formula: Opaque, domain: RowIntervals, first_row: int) -> RowIntervals:
        """Evaluate once for each run of rows and run of keys over which all operands are constant."""
        operands = self.program.axis_operands(formula.step)
        if operands is None:
            raise TooManyIntervals(f"{formula.reason}, which holds whole tensors")
        indices = {self.program.steps[i].args[0] for i in operands if self.program.steps[i].kind == "index"}
        if indices >= {"q", "k"}:  # no two rows and no two keys are alike
            raise TooManyIntervals(f"{formula.reason}, which is not constant over runs of queries and keys")
        values = {i: self.program.axis_value(i) for i in operands}
        by_row = {i: x for i, x in values.items() if "k" not in self.program.steps[i].depends}
        by_key = {i: x for i, x in values.items() if i not in by_row}
        rows = slice(first_row, first_row + domain.q_len)
        by_row = {i: x[:, :, rows] if x.shape[2] == self.q_len else x for i, x in by_row.items()}
        row_begin, row_number = constant_runs(by_row.values(), 2, domain.q_len, self.program.device)
        if formula.step not in self._key_runs:
            self._key_runs[formula.step] = constant_runs(by_key.values(), 3, self.kv_len, self.program.device)
        key_begin, _ = self._key_runs[formula.step]
        batch, heads = torch.broadcast_shapes(domain.starts.shape[:2], *(x.shape[:2] for x in values.values()))
        size = len(row_begin) * len(key_begin) * batch * heads
        if size > _GRID_ELEMENTS or size * _GRID_GAIN > domain.q_len * self.kv_len * batch * heads:
            raise TooManyIntervals(f"{formula.reason}, which is not constant over runs of queries and keys")
        known = {i: x[:, :, row_begin] if x.shape[2] != 1 else x for i, x in by_row.items()}
        known |= {i: x[:, :, :, key_begin] if x.shape[3] != 1 else x for i, x in by_key.items()}
        grid_BHUN = self.program.value_from(formula.step, known)
        grid_BHUN = grid_BHUN.expand(-1, -1, len(row_begin), len(key_begin))
        classes = RowIntervals.from_dense(~grid_BHUN if formula.negated else grid_BHUN)
        self._check_slots(classes.max_intervals, f"{formula.reason}, of {classes.max_intervals} intervals a row")
        self.rules["grid"] = None
        key_bound = torch.cat((key_begin, key_begin.new_tensor([self.kv_len])))
        starts, ends = key_bound[classes.starts.long()], key_bound[classes.ends.long()]
        in_keys = RowIntervals.build(starts, ends.masked_fill(classes.ends == 0, 0), self.kv_len)
        return _checked(domain.intersect(in_keys.take_rows(row_number)))


def bounds_in_monotone(keys: KeyValues, op: str, rows_BHQ: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and end of the keys of a monotone sequence for which ``keys <op> rows``, int64 ``[B, H, Q or 1]``."""
    if keys.shape_BH != (1, 1) and keys.shape_BH != rows_BHQ.shape[:2]:
        batch, heads = torch.broadcast_shapes(keys.shape_BH, rows_BHQ.shape[:2])
        keys, rows_BHQ = keys.expand(batch, heads), rows_BHQ.expand(batch, heads, -1)
    if not keys.is_ascending:
        keys, op, rows_BHQ = keys.negated, _MIRRORED[op], -rows_BHQ
    rows_GQ = rows_BHQ.flatten(0, 1)
    begin = keys.count_below(rows_GQ, or_equal=False) if op != "le" else torch.zeros_like(rows_GQ)
    end = keys.count_below(rows_GQ, or_equal=True) if op != "ge" else torch.full_like(rows_GQ, keys.length)
    return begin.view(rows_BHQ.shape), end.view(rows_BHQ.shape)


def _rank(formula: Formula) -> int:
    """Order in which the parts of a conjunction are taken: first those that leave one interval."""
    if isinstance(formula, (Constant, RowTerm)):
        return 0
    if isinstance(formula, Compare):
        if formula.keys.is_ascending or formula.keys.is_descending:
            return 1
        return 2 if formula.op == "eq" else 4
    if isinstance(formula, Outside):
        return max(3, _rank(formula.inside))
    if isinstance(formula, (And, Or)):
        return max([3, *(_rank(part) for part in formula.parts)])
    return 5


def _checked(intervals: RowIntervals) -> RowIntervals:
    intervals = intervals.trim()
    if intervals.max_intervals > MAX_SLOTS:
        raise TooManyIntervals(f"a row has {intervals.max_intervals} key intervals")
    return intervals


def _keep_rows(domain: RowIntervals, keep_BHQ: Tensor) -> RowIntervals:
    drop = ~keep_BHQ[:, :, None]
    shape = torch.broadcast_shapes(domain.starts.shape, drop.shape)
    starts, ends = domain.starts.expand(shape), domain.ends.expand(shape)
    return RowIntervals(starts.masked_fill(drop, domain.kv_len), ends.masked_fill(drop, 0), domain.kv_len)


def _clip(domain: RowIntervals, begin_BHQ: Tensor, end_BHQ: Tensor) -> RowIntervals:
    starts = torch.maximum(domain.starts, begin_BHQ[:, :, None].to(torch.int32))
    ends = torch.minimum(domain.ends, end_BHQ[:, :, None].to(torch.int32))
    if domain.max_intervals > 1:
        return RowIntervals.build(starts, ends, domain.kv_len)
    empty = ends <= starts
    return RowIntervals(starts.masked_fill_(empty, domain.kv_len), ends.masked_fill_(empty, 0), domain.kv_len)


def _look_up(table_GN: Tensor, index: Tensor) -> Tensor:
    """``table[g, index[g, ...]]``; either G may be 1."""
    if len(table_GN) == 1:
        return table_GN[0][index]
    groups = torch.arange(len(table_GN), device=index.device).view(-1, *[1] * (index.dim() - 1))
    return table_GN[groups, index]


def constant_runs(values: Iterable[Tensor], dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Runs along ``dim`` over which all values are constant: where each run begins, and the run of each place."""
    changes = torch.zeros(length, dtype=torch.bool, device=device)
    changes[:1] = True
    for value in values:
        if value.shape[dim] == length and length > 1:
            flat = value.movedim(dim, 0).flatten(1)
            changes[1:] |= (flat[1:] != flat[:-1]).any(1)
    return changes.nonzero()[:, 0], changes.cumsum(0) - 1
