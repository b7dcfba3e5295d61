"""Which tiles of a mask are empty or full for sure, by interval arithmetic on the program's values.

Every value of the program is bounded on a tile of queries and keys, from the smallest and largest values of its parts
that depend on queries alone or keys alone.  Bounds are float64 and never too narrow: what whole numbers beyond 2^53,
overflow, NaN or operators without a rule could make wrong is unbounded.

Shape legend: B batch, H query heads (1 where it does not matter), T tiles of queries, C tiles of keys (1 where it does
not matter), Q query rows, K keys.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_lowering.formula import And, Compare, Constant, Formula, Opaque, Or, Outside, RowTerm
from inductor_lowering.key_values import KeyValues
from inductor_lowering.mask_program import MaskProgram, Ref, Step

_EXACT = float(1 << 53)
# Relative error of an operation in each floating type, several units in the last place.
_ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne"}
_MIRRORED = {"ge": "le", "gt": "lt"}


@dataclass(frozen=True)
class Bounds:
    """``low <= value <= high`` on every tile, ``[B, H, T, C]``; of bools, 0 and 1."""

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Verdict:
    """``possible``: some pair of the tile may attend; ``certain``: all of them do.  Bool ``[B, H, T, C]``."""

    possible: Tensor
    certain: Tensor

    def __invert__(self) -> Verdict:
        return Verdict(~self.certain, ~self.possible)

    def __and__(self, other: Verdict) -> Verdict:
        return Verdict(self.possible & other.possible, self.certain & other.certain)

    def __or__(self, other: Verdict) -> Verdict:
        return Verdict(self.possible | other.possible, self.certain | other.certain)


class TileBounds:
    """Bounds of one program on a grid of tiles of ``q_tile`` rows and ``kv_tile`` keys."""

    def __init__(self, program: MaskProgram, q_tile: int, kv_tile: int) -> None:
        self.program = program
        self.q_tile, self.kv_tile = q_tile, kv_tile
        self._axes: dict[int, Bounds] = {}
        self._parts: dict[int, Bounds] = {}  # by the identity of tensors in the formula, which outlives this object

    def classify(self, formula: Formula, rows: tuple[int, int]) -> Verdict:
        """Verdicts for the tiles of rows [begin, end), where begin is a multiple of ``q_tile``, broadcastable."""
        return _OnRows(self, slice(rows[0] // self.q_tile, -(-rows[1] // self.q_tile))).formula(formula)

    def axis(self, step: int) -> Bounds:
        """Of a value that does not depend on both q and k: its extremes in every tile."""
        if step not in self._axes:
            self._axes[step] = self.extremes(self.program.axis_value(step))
        return self._axes[step]

    def part(self, values: Tensor) -> Bounds:
        """Of a tensor that the formula holds."""
        if id(values) not in self._parts:
            self._parts[id(values)] = self.extremes(values)
        return self._parts[id(values)]

    def keys(self, keys: KeyValues) -> Bounds:
        if id(keys) not in self._parts:
            self._parts[id(keys)] = self.extremes(keys.values_GK.view(*keys.shape_BH, 1, keys.length))
        return self._parts[id(keys)]

    def extremes(self, values: Tensor) -> Bounds:
        low = high = values
        for dim, size, tile in ((2, self.program.sizes["q"], self.q_tile), (3, self.program.sizes["k"], self.kv_tile)):
            if values.shape[dim] == size and size > 1:
                low, high = (_by_tile(x, dim, tile, least) for x, least in ((low, True), (high, False)))
        limit = math.inf if values.dtype.is_floating_point else _EXACT
        return _checked(Bounds(low.double(), high.double()), -limit, limit)


class _OnRows:
    """One walk over a formula, on some tiles of rows."""

    def __init__(self, tiles: TileBounds, rows: slice) -> None:
        self.tiles, self.program = tiles, tiles.program
        self.row_slice = rows
        self.row_tiles = -(-self.program.sizes["q"] // tiles.q_tile)
        self._verdicts: dict[int, Verdict] = {}
        self._numbers: dict[int, Bounds] = {}

    def formula(self, formula: Formula) -> Verdict:
        if isinstance(formula, Constant):
            value = torch.full((1, 1, 1, 1), formula.value, device=self.program.device)
            return Verdict(value, value)
        if isinstance(formula, RowTerm):
            return _truth(self._take(self.tiles.part(formula.values)))
        if isinstance(formula, Compare):
            return _compare(formula.op, self.tiles.keys(formula.keys), self._take(self.tiles.part(formula.rows)))
        if isinstance(formula, Outside):
            return ~self.formula(formula.inside)
        if isinstance(formula, (And, Or)):
            combine = operator.and_ if isinstance(formula, And) else operator.or_
            return functools.reduce(combine, (self.formula(part) for part in formula.parts))
        if isinstance(formula, Opaque):
            verdict = self.verdict(formula.step)
            return ~verdict if formula.negated else verdict
        raise TypeError(f"formula: {type(formula).__name__} has no bounds")

    def _take(self, bounds: Bounds) -> Bounds:
        if bounds.low.shape[2] != self.row_tiles:
            return bounds
        return Bounds(bounds.low[:, :, self.row_slice], bounds.high[:, :, self.row_slice])

    # ---- bools --------------------------------------------------------------------------------------------------

    def verdict(self, at: int) -> Verdict:
        if at not in self._verdicts:
            step = self.program.steps[at]
            self._verdicts[at] = self._verdict(step) if step.mixed else _truth(self.number(at))
        return self._verdicts[at]

    def _verdict(self, step: Step) -> Verdict:
        name = step.name.rpartition("::")[2]
        if step.shape or step.kind != "call":
            return self._any()
        if name in _COMPARISONS:
            dtype = self._compared_in(step.args[:2])
            return _compare(name, *(self.operand(x, dtype) for x in step.args[:2]))
        bools = [self._truth_of(x) for x in step.args if isinstance(x, (Ref, bool))]
        if name in ("bitwise_not", "logical_not"):
            return ~bools[0]
        if name in ("logical_and", "bitwise_and", "__and__"):
            return bools[0] & bools[1]
        if name in ("logical_or", "bitwise_or", "__or__"):
            return bools[0] | bools[1]
        if name in ("logical_xor", "bitwise_xor", "__xor__"):
            return (bools[0] & ~bools[1]) | (~bools[0] & bools[1])
        if name == "where" and len(bools) == 3:
            condition, chosen, other = bools
            return (condition & chosen) | (~condition & other)
        if name in ("_to_copy", "convert_element_type"):
            return bools[0]
        return self._any()

    def _truth_of(self, x: Any) -> Verdict:
        if isinstance(x, bool):
            return self.formula(Constant(x))
        if self.program.steps[x.step].dtype == torch.bool:
            return self.verdict(x.step)
        return _truth(self.operand(x))

    def _any(self) -> Verdict:
        true = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.program.device)
        return Verdict(true, ~true)

    # ---- numbers ------------------------------------------------------------------------------------------------

    def operand(self, x: Any, dtype: torch.dtype | None = None) -> Bounds:
        """Of an operand of an operation in ``dtype``, to which it is rounded first if that is a floating type."""
        own = self._dtype(x)
        bounds = self.number(x.step) if isinstance(own, torch.dtype) else self._constant(x)
        if dtype is None or not dtype.is_floating_point or own == dtype:
            return bounds
        return _rounded(bounds, dtype)

    def _constant(self, x: Any) -> Bounds:
        number = self.program.steps[x.step].args[0] if isinstance(x, Ref) else x
        if not isinstance(number, (bool, int, float)):
            return self._unbounded()
        value = torch.full((1, 1, 1, 1), float(number), dtype=torch.float64, device=self.program.device)
        return _checked(Bounds(value, value), -_EXACT, _EXACT)

    def _dtype(self, x: Any) -> torch.dtype | type:
        """Of a tensor, or the type of a number."""
        if not isinstance(x, Ref):
            return type(x)
        step = self.program.steps[x.step]
        return type(step.args[0]) if step.dtype is None else step.dtype

    def _compared_in(self, operands: Sequence[Any]) -> torch.dtype | None:
        """The floating type in which operands are compared, or a less exact one; None for whole numbers."""
        dtypes = [torch.get_default_dtype() if x is float else x for x in map(self._dtype, operands)]
        floats = [x for x in dtypes if isinstance(x, torch.dtype) and x.is_floating_point]
        return max(floats, key=lambda x: _ROUNDING.get(x, math.inf), default=None)

    def number(self, at: int) -> Bounds:
        if at not in self._numbers:
            step = self.program.steps[at]
            if step.shape or (step.mixed and not step.on_grid):
                self._numbers[at] = self._unbounded()
            elif not step.mixed:
                self._numbers[at] = self._take(self.tiles.axis(at))
            elif step.dtype == torch.bool:
                verdict = self.verdict(at)
                self._numbers[at] = Bounds(verdict.certain.double(), verdict.possible.double())
            else:
                self._numbers[at] = self._call(step)
        return self._numbers[at]

    def _unbounded(self) -> Bounds:
        infinite = torch.full((1, 1, 1, 1), math.inf, dtype=torch.float64, device=self.program.device)
        return Bounds(-infinite, infinite)

    def _call(self, step: Step) -> Bounds:
        assert step.dtype is not None
        rule = _RULES.get(step.name.rpartition("::")[2])
        bounds = None if rule is None else rule(self, step)
        if bounds is None:
            return self._unbounded()
        if step.dtype.is_floating_point:
            return _rounded(bounds, step.dtype)
        info = torch.iinfo(step.dtype)
        return _checked(bounds, max(-_EXACT, info.min - 1.0), min(_EXACT, info.max + 1.0))


def _rounded(bounds: Bounds, dtype: torch.dtype) -> Bounds:
    """Of the results of an operation in ``dtype``, from those of exact arithmetic."""
    largest = torch.maximum(bounds.low.abs(), bounds.high.abs())
    error = largest * _ROUNDING.get(dtype, math.inf) + torch.finfo(dtype).tiny
    limit = torch.finfo(dtype).max / 2
    low, high = bounds.low - error, bounds.high + error
    low = torch.where(bounds.low >= 0, low.clamp(min=0), low)  # no rounding changes a sign
    high = torch.where(bounds.high <= 0, high.clamp(max=0), high)
    return _checked(Bounds(low, high), -limit, limit)


def _by_tile(values: Tensor, dim: int, tile: int, least: bool) -> Tensor:
    """Smallest or largest values of every ``tile`` places along ``dim``."""
    reduce = torch.amin if least else torch.amax
    whole = values.shape[dim] // tile * tile
    parts = []
    if whole:
        parts.append(reduce(values.narrow(dim, 0, whole).unflatten(dim, (-1, tile)), dim + 1))
    if whole < values.shape[dim]:
        parts.append(reduce(values.narrow(dim, whole, values.shape[dim] - whole), dim, keepdim=True))
    return torch.cat(parts, dim)


def _checked(bounds: Bounds, least: float, most: float) -> Bounds:
    """Unbounded where a bound is NaN or not between these two."""
    inside = (bounds.low > least) & (bounds.high < most)
    return Bounds(bounds.low.where(inside, -math.inf), bounds.high.where(inside, math.inf))


def _truth(bounds: Bounds) -> Verdict:
    zero = torch.zeros_like(bounds.low)
    return _compare("ne", bounds, Bounds(zero, zero))


def _compare(op: str, left: Bounds, right: Bounds) -> Verdict:
    if op in _MIRRORED:
        op, left, right = _MIRRORED[op], right, left
    if op in ("le", "lt"):
        strict = op == "lt"
        never = left.low >= right.high if strict else left.low > right.high
        always = left.high < right.low if strict else left.high <= right.low
        return Verdict(~never, always & _finite(left, right))
    apart = (left.high < right.low) | (left.low > right.high)
    same = (left.low == left.high) & (right.low == right.high) & (left.low == right.low) & _finite(left, right)
    return Verdict(~apart, same) if op == "eq" else Verdict(~same, apart)


def _finite(*bounds: Bounds) -> Tensor:
    return functools.reduce(operator.and_, (x.low.isfinite() & x.high.isfinite() for x in bounds))


_EXACT_QUOTIENTS = float(1 << 50)

# ---- operators ------------------------------------------------------------------------------------------------------

_Rule = Callable[[_OnRows, Step], "Bounds | None"]


def _plain(step: Step, count: int) -> bool:
    """Whether the step has these operands and no option that changes what it does."""
    return len(step.args) == count and not step.kwargs


def _add(on: _OnRows, step: Step) -> Bounds | None:
    if not _plain(step, 2):
        return None
    a, b = (on.operand(x, step.dtype) for x in step.args)
    return Bounds(a.low + b.low, a.high + b.high)


def _sub(on: _OnRows, step: Step) -> Bounds | None:
    if not _plain(step, 2):
        return None
    a, b = (on.operand(x, step.dtype) for x in step.args)
    if step.name == "aten::rsub":
        a, b = b, a
    return Bounds(a.low - b.high, a.high - b.low)


def _neg(on: _OnRows, step: Step) -> Bounds:
    a = on.operand(step.args[0], step.dtype)
    return Bounds(-a.high, -a.low)


def _abs(on: _OnRows, step: Step) -> Bounds:
    a = on.operand(step.args[0], step.dtype)
    return Bounds(torch.maximum(a.low, -a.high).clamp(min=0), torch.maximum(-a.low, a.high))


def _square(a: Bounds) -> Bounds:
    nearest = torch.maximum(a.low, -a.high).clamp(min=0)
    return Bounds(nearest * nearest, torch.maximum(a.low * a.low, a.high * a.high))


def _mul(on: _OnRows, step: Step) -> Bounds:
    a, b = (on.operand(x, step.dtype) for x in step.args)
    if step.args[0] == step.args[1]:
        return _square(a)
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Bounds(functools.reduce(torch.minimum, corners), functools.reduce(torch.maximum, corners))


def _pow(on: _OnRows, step: Step) -> Bounds | None:
    exponent = step.args[1]
    return _square(on.operand(step.args[0], step.dtype)) if isinstance(exponent, int) and exponent == 2 else None


def _sqrt(on: _OnRows, step: Step) -> Bounds:
    a = on.operand(step.args[0], step.dtype)
    return Bounds(a.low.sqrt(), a.high.sqrt())  # NaN, which is unbounded, where it may be negative


def _extreme(on: _OnRows, step: Step) -> Bounds:
    a, b = (on.operand(x, step.dtype) for x in step.args)
    pick = torch.minimum if step.name.endswith("minimum") else torch.maximum
    return Bounds(pick(a.low, b.low), pick(a.high, b.high))


def _clamp(on: _OnRows, step: Step) -> Bounds:
    names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[step.name.rpartition("::")[2]]
    limits = dict(zip(names, step.args[1:], strict=False)) | (step.kwargs or {})
    result = a = on.operand(step.args[0], step.dtype)
    finite = _finite(a)
    for name, pick in (("min", torch.maximum), ("max", torch.minimum)):
        if limits.get(name) is not None:
            limit = on.operand(limits[name], step.dtype)
            finite = finite & _finite(limit)
            result = Bounds(pick(result.low, limit.low), pick(result.high, limit.high))
    if step.dtype is None or step.dtype.is_floating_point:  # what is not bounded may be NaN, which no limit changes
        return Bounds(result.low.where(finite, -math.inf), result.high.where(finite, math.inf))
    return result


def _divisor(on: _OnRows, x: Any) -> float | None:
    """A positive number, the same everywhere, or None."""
    bounds = on.operand(x)
    if bounds.low.numel() != 1 or bounds.high.numel() != 1:
        return None
    low, high = float(bounds.low), float(bounds.high)
    return low if low == high and 0 < low < math.inf else None


def _quotients(a: Bounds, divisor: float) -> Bounds:
    """Of whole numbers, near enough for their floors to be right; unbounded where float64 could round across one."""
    exact = (a.low.abs() <= _EXACT_QUOTIENTS) & (a.high.abs() <= _EXACT_QUOTIENTS)
    return Bounds((a.low / divisor).where(exact, -math.inf), (a.high / divisor).where(exact, math.inf))


def _div(on: _OnRows, step: Step) -> Bounds | None:
    mode = (step.kwargs or {}).get("rounding_mode", step.args[2] if len(step.args) > 2 else None)
    divisor = _divisor(on, step.args[1])
    if divisor is None:
        return None
    if step.name == "aten::floor_divide":
        mode = "floor"
    a = on.operand(step.args[0], step.dtype)
    if mode is None:
        if step.dtype is None or float(torch.tensor(divisor, dtype=step.dtype)) != divisor:
            return None  # a divisor that the operation rounds, to 0 perhaps
        return Bounds(a.low / divisor, a.high / divisor)
    if step.dtype is None or step.dtype.is_floating_point:
        return None  # rounding before the floor could cross a whole number
    bounds = _quotients(a, divisor)
    whole = torch.floor if mode == "floor" else torch.trunc
    return Bounds(whole(bounds.low), whole(bounds.high))


def _remainder(on: _OnRows, step: Step) -> Bounds | None:
    divisor = _divisor(on, step.args[1])
    if divisor is None or step.dtype is None or step.dtype.is_floating_point:
        return None
    a = on.operand(step.args[0], step.dtype)
    quotients = _quotients(a, divisor)
    low, high = quotients.low.floor(), quotients.high.floor()
    same = low == high
    return Bounds((a.low - low * divisor).where(same, 0.0), (a.high - low * divisor).where(same, divisor - 1))


def _where(on: _OnRows, step: Step) -> Bounds:
    condition = on._truth_of(step.args[0])
    a, b = (on.operand(x, step.dtype) for x in step.args[1:])
    low, high = torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
    for sure, x in ((condition.certain, a), (~condition.possible, b)):
        low, high = torch.where(sure, x.low, low), torch.where(sure, x.high, high)
    return Bounds(low, high)


def _convert(on: _OnRows, step: Step) -> Bounds:
    a = on.operand(step.args[0], step.dtype)
    if step.dtype is not None and not step.dtype.is_floating_point:
        return Bounds(a.low.trunc(), a.high.trunc())
    return a


_RULES: dict[str, _Rule] = {
    "add": _add,
    "sub": _sub,
    "rsub": _sub,
    "neg": _neg,
    "abs": _abs,
    "mul": _mul,
    "pow": _pow,
    "square": lambda on, step: _square(on.operand(step.args[0], step.dtype)),
    "sqrt": _sqrt,
    "minimum": _extreme,
    "maximum": _extreme,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "div": _div,
    "floor_divide": _div,
    "remainder": _remainder,
    "where": _where,
    "_to_copy": _convert,
    "convert_element_type": _convert,
}
