"""Masks whose number of intervals a row follows from the program alone, whatever the captured tensors hold.

Their intervals are computed without reading anything back from the device: a fixed sequence of tensor operations, which
can be captured in a CUDA graph.  These are the programs made of and, or, not over

- anything that does not depend on the key (a row attends or does not);
- comparisons of a value of the key, known from its index alone and monotone, with a value of the query, batch or head,
  also a captured one: ``k <= q``, ``k >= first_key[q]``, ``q - k < window[h]``, ``k // 64 == q // 64``;
- conditions on the key's index alone;

and the canonical mask_mod without bit tiles, whose captures are the intervals.  What compares captured values of the
*keys* (document ids, padding masks) has as many intervals as the data says; such masks take
:func:`inductor_lowering.to_intervals.plan_with_report`, which looks.

Shape legend: B batch, H query heads (1 where it does not matter), Q query rows, K keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_lowering.canonical import find_canonical
from inductor_lowering.mask_program import MaskProgram, Ref, Step, refs_of
from inductor_lowering.solve import MAX_SLOTS
from magi_flex.fx_program import FxProgram
from magi_flex.intervals import RowIntervals

_COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne"}
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
AND_NAMES = {"bitwise_and", "logical_and", "__and__"}
_OR = {"bitwise_or", "logical_or", "__or__"}
_NOT = {"bitwise_not", "logical_not"}
_SAME = {"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"}
_SMALL_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.uint8}
_LARGEST = 1 << 61  # sums of two stay inside int64


class NotStatic(Exception):
    """The number of intervals depends on data; the message says on what."""


@dataclass(frozen=True)
class _Side:
    """A whole number as a sum of values of the row and values of the key's index; ``low``, ``high`` bound it.

    ``unbounded``: a single captured value of the row of which no bounds are known.
    """

    rows: tuple[tuple[int, int], ...] = ()  # (sign, step)
    keys: tuple[tuple[int, int], ...] = ()
    constant: int = 0
    low: int = 0
    high: int = 0
    unbounded: bool = False


def static_intervals(
    program: FxProgram,
    captures: Sequence[Any],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str,
) -> RowIntervals:
    """The mask's intervals; B (H) is 1 where the mask does not depend on b (h).

    Reads no tensor's contents, so fake tensors will do.  Raises NotStatic where the number of intervals depends on
    them, UnsupportedMask where the program is no mask.
    """
    if not all(isinstance(size, int) for size in (batch, heads, q_len, kv_len)):
        raise NotStatic("a length that is not known")
    canonical = find_canonical(program, captures)
    if canonical is not None:
        if canonical.cols is not None:
            raise NotStatic("bit tiles")
        starts, ends = (captures[i][..., :q_len] for i in (canonical.starts, canonical.ends))
        if starts.shape[3] != q_len or any(a not in (1, b) for a, b in zip(starts.shape, (batch, heads), strict=False)):
            raise NotStatic("a mask made for other sizes")
        return RowIntervals.build(starts, ends, kv_len)
    solver = solver_of(program, captures, batch, heads, q_len, kv_len, device)
    return RowIntervals.empty(q_len, kv_len, device) if solver is None else solver.solve(solver.mask.result)


def solver_of(
    program: FxProgram,
    captures: Sequence[Any],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str,
) -> Solver | None:
    """For the conditions of a mask; None where there are no rows or no keys.

    Raises NotStatic where a size is not known, UnsupportedMask where the program is no mask.
    """
    for capture in captures:
        if isinstance(capture, torch.SymInt):
            raise NotStatic("a captured size that is not known")
        if isinstance(capture, Tensor) and capture.device.type != torch.device(device).type:
            raise NotStatic("a captured tensor on another device")
    if any(step[0] == "literal" and isinstance(step[1], list) for step in program.steps):
        raise NotStatic("a table inside the mask_mod")
    if not q_len or not kv_len:
        return None
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in captures)
    indices = _indices(program.to_json(), shapes, q_len, kv_len)
    return Solver(MaskProgram(program, captures, batch, heads, q_len, kv_len, device), indices)


@dataclass(frozen=True)
class _Keys:
    """A sum of the keys' values: ``sign`` times it ascends from ``first`` to ``last``, ``consecutive``: by ones."""

    sign: int
    first: int
    last: int
    consecutive: bool


class _Indices:
    """What follows from indices and numbers alone, found out once: the program on the CPU, without captured tensors."""

    def __init__(self, program: FxProgram, captures: Sequence[Any], q_len: int, kv_len: int) -> None:
        self.program = MaskProgram(program, captures, 1, 1, q_len, kv_len, "cpu")
        self._captured = {at for at, step in enumerate(program.steps) if step[0] == "arg"}
        self._pure: dict[int, bool] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._keys: dict[tuple[tuple[int, int], ...], _Keys] = {}
        self._runs: dict[int, tuple[list[int], list[int]]] = {}

    def is_pure(self, at: int) -> bool:
        if at not in self._pure:
            step = self.program.steps[at]
            if step.kind == "capture":
                self._pure[at] = at not in self._captured or not isinstance(step.args[0], Tensor)
            else:
                self._pure[at] = all(self.is_pure(i) for i in refs_of((step.args, step.kwargs)))
        return self._pure[at]

    def values(self, at: int) -> Tensor:
        return self.program.axis_value(at)

    def bounds(self, at: int) -> tuple[int, int]:
        if at not in self._bounds:
            low, high = torch.aminmax(self.values(at).long())
            self._bounds[at] = int(low), int(high)
        return self._bounds[at]

    def runs(self, at: int) -> tuple[list[int], list[int]]:
        """Begins and ends of the keys for which a condition on them alone holds."""
        if at not in self._runs:
            intervals = RowIntervals.from_dense(self.values(at).expand(1, 1, 1, self.program.sizes["k"]))
            self._runs[at] = intervals.starts.flatten().tolist(), intervals.ends.flatten().tolist()
        return self._runs[at]

    def keys(self, terms: tuple[tuple[int, int], ...]) -> _Keys:
        """Raises NotStatic where the sum is not monotone."""
        if terms not in self._keys:
            values_K = torch.stack([sign * self.values(at).long().flatten() for sign, at in terms]).sum(0)
            step_K = values_K.diff()
            sign = 1 if bool((step_K >= 0).all()) else -1
            if not bool((sign * step_K >= 0).all()):
                raise NotStatic("a value of the keys that rises and falls")
            consecutive = bool((sign * step_K == 1).all())
            self._keys[terms] = _Keys(sign, sign * int(values_K[0]), sign * int(values_K[-1]), consecutive)
        return self._keys[terms]


@functools.lru_cache(maxsize=64)
def _indices(program: str, captures: tuple[Any, ...], q_len: int, kv_len: int) -> _Indices:
    """``captures``: ints, and (shape, dtype) of tensors."""
    like = [torch.empty((), dtype=x[1], device="cpu").expand(x[0]) if isinstance(x, tuple) else x for x in captures]
    return _Indices(FxProgram.from_json(program), like, q_len, kv_len)


class Solver:
    """Intervals of a mask's conditions."""

    def __init__(self, mask: MaskProgram, indices: _Indices) -> None:
        self.mask, self.indices = mask, indices
        self.q_len, self.kv_len = mask.sizes["q"], mask.sizes["k"]

    def solve(self, at: int) -> RowIntervals:
        """The intervals of a step that is a condition.  Raises NotStatic where their number depends on data."""
        step = self.mask.steps[at]
        if "k" not in step.depends:
            return self._keep_rows(self._rows(at))
        if step.depends == {"k"} and self.indices.is_pure(at):
            return self._constant_keys(at)
        name = step.name.rpartition("::")[2]
        if name in AND_NAMES | _OR:
            left, right = (self._condition(x) for x in step.args[:2])
            return self.checked(left.intersect(right) if name in AND_NAMES else left.union(right))
        if name in _NOT:
            return self.checked(self._condition(step.args[0]).complement())
        if name in _SAME:
            return self._condition(step.args[0])
        if name == "where":
            condition, left, right = (self._condition(x) for x in step.args)
            return self.checked(condition.intersect(left).union(condition.complement().intersect(right)))
        if name in _COMPARISONS:
            return self._compare(name, *step.args[:2])
        raise NotStatic(f"{step.name} of the query and the key")

    def _condition(self, x: Any) -> RowIntervals:
        if not isinstance(x, Ref):
            full = RowIntervals.full if x else RowIntervals.empty
            return full(self.q_len, self.kv_len, self.mask.device)
        if self.mask.steps[x.step].dtype != torch.bool:
            raise NotStatic("a number used as a condition")
        return self.solve(x.step)

    @staticmethod
    def checked(intervals: RowIntervals) -> RowIntervals:
        if intervals.max_intervals > MAX_SLOTS:
            raise NotStatic(f"up to {intervals.max_intervals} intervals a row")
        return intervals

    # ---- values -------------------------------------------------------------------------------------------------

    def _rows(self, at: int) -> Tensor:
        """Values of a step that does not depend on the key, ``[B, H, Q or 1]``, on the mask's device."""
        return self.mask.axis_value(at)[..., 0]

    def _keep_rows(self, keep_BHQ: Tensor) -> RowIntervals:
        keep_BHRQ = keep_BHQ[:, :, None].expand(-1, -1, 1, self.q_len)
        starts = torch.zeros_like(keep_BHRQ, dtype=torch.int32)
        return RowIntervals.build(starts, torch.where(keep_BHRQ, self.kv_len, starts), self.kv_len)

    def _constant_keys(self, at: int) -> RowIntervals:
        slots = [
            [torch.full((1, 1, 1, self.q_len), x, dtype=torch.int32, device=self.mask.device) for x in bounds]
            for bounds in self.indices.runs(at)
        ]
        return self.checked(RowIntervals.build(*(torch.cat(bounds, 2) for bounds in slots), self.kv_len))

    # ---- comparisons ----------------------------------------------------------------------------------------------

    def _side(self, x: Any) -> _Side:
        """A whole number as a sum of the row's and the key's values."""
        if not isinstance(x, Ref):
            if isinstance(x, bool) or not isinstance(x, int):
                raise NotStatic(f"a comparison with {x!r}")
            return _Side(constant=x, low=x, high=x)
        step = self.mask.steps[x.step]
        if step.dtype is None:
            return self._side(step.args[0])
        if step.dtype.is_floating_point or step.dtype.is_complex or step.dtype == torch.uint64 or step.shape:
            raise NotStatic(f"a comparison of {step.dtype} values")
        if not step.mixed and "k" in step.depends:
            if step.depends != {"k"} or not self.indices.is_pure(x.step):
                raise NotStatic("captured values of the keys")
            low, high = self.indices.bounds(x.step)
            return _Side(keys=((1, x.step),), low=low, high=high)
        if not step.mixed:
            return self._row_side(x.step, step)
        name = step.name.rpartition("::")[2]
        if name in _SAME or (name in ("_to_copy", "convert_element_type") and step.dtype == torch.int64):
            return self._side(step.args[0])
        if name not in ("add", "sub", "neg", "rsub") or (step.kwargs or {}).get("alpha", 1) != 1 or step.args[2:]:
            raise NotStatic(f"{step.name} of the query and the key")
        if step.dtype != torch.int64:
            raise NotStatic(f"{step.name} in {step.dtype}, which may overflow")
        if name == "neg":
            return _sum(_Side(), self._side(step.args[0]), -1)
        left, right = (self._side(y) for y in (step.args[:2] if name != "rsub" else step.args[1::-1]))
        return _sum(left, right, 1 if name == "add" else -1)

    def _row_side(self, at: int, step: Step) -> _Side:
        if self.indices.is_pure(at) and not step.depends & {"b", "h"}:
            low, high = self.indices.bounds(at)
            return _Side(rows=((1, at),), low=low, high=high)
        if step.dtype in _SMALL_INTEGERS or step.dtype == torch.bool:
            info = (0, 1) if step.dtype == torch.bool else (torch.iinfo(step.dtype).min, torch.iinfo(step.dtype).max)
            return _Side(rows=((1, at),), low=info[0], high=info[1])
        return _Side(rows=((1, at),), unbounded=True)

    def _compare(self, op: str, left: Any, right: Any) -> RowIntervals:
        a, b = self._side(left), self._side(right)
        if a.unbounded:
            op, a, b = _MIRRORED[op], b, a
        if a.unbounded:
            raise NotStatic("numbers that may be too large for exact arithmetic")
        # a's keys <op> b - a's rows: what lies beyond a's bounds need not be told apart.
        row_BHQ = self._row_sum(b)
        if b.unbounded:
            row_BHQ = row_BHQ.clamp(a.low - 1, a.high + 1)
        row_BHQ = row_BHQ - self._row_sum(a)
        terms = (*a.keys, *((-sign, at) for sign, at in b.keys))
        keys = self.indices.keys(terms)
        if keys.sign < 0:
            terms, row_BHQ, op = tuple((-sign, at) for sign, at in terms), -row_BHQ, _MIRRORED[op]
        below, up_to = self._counts(terms, keys, row_BHQ)
        zero, most = torch.zeros_like(below), torch.full_like(below, self.kv_len)
        begin, end = {
            "lt": (zero, below),
            "le": (zero, up_to),
            "ge": (below, most),
            "gt": (up_to, most),
            "eq": (below, up_to),
            "ne": (below, up_to),
        }[op]
        shape = (*begin.shape[:2], 1, self.q_len)
        bounds = (x[:, :, None].expand(shape) for x in (begin, end))
        intervals = RowIntervals.build(*bounds, self.kv_len)
        return self.checked(intervals.complement()) if op == "ne" else intervals

    def _row_sum(self, side: _Side) -> Tensor:
        total = torch.full((1, 1, 1), side.constant, dtype=torch.int64, device=self.mask.device)
        for sign, at in side.rows:
            total = total + sign * self._rows(at).long()
        return total

    def _counts(self, terms: Sequence[tuple[int, int]], keys: _Keys, row_BHQ: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the ascending key values are below the row's value, and how many at most that."""
        row_BHQ = row_BHQ.clamp(keys.first - 1, keys.last + 1)
        if keys.consecutive:
            below = row_BHQ - keys.first
            return below.clamp(0, self.kv_len), (below + 1).clamp(0, self.kv_len)
        values_K = torch.stack([sign * self.mask.axis_value(at).long().flatten() for sign, at in terms]).sum(0)
        row_BHQ = row_BHQ.contiguous()
        return torch.searchsorted(values_K, row_BHQ), torch.searchsorted(values_K, row_BHQ, right=True)


def _sum(a: _Side, b: _Side, sign: int) -> _Side:
    if a.unbounded or b.unbounded:
        raise NotStatic("numbers that may be too large for exact arithmetic")
    low, high = (b.low, b.high) if sign > 0 else (-b.high, -b.low)
    low, high = a.low + low, a.high + high
    if max(abs(low), abs(high)) > _LARGEST:
        raise NotStatic("numbers too large for exact arithmetic")
    rows, keys = ((*x, *((sign * s, at) for s, at in y)) for x, y in ((a.rows, b.rows), (a.keys, b.keys)))
    return _Side(rows, keys, a.constant + sign * b.constant, low, high)
