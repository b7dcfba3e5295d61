"""From a program to a formula: every comparison split into a value of the query and a value of the key.

A whole number that depends on query and key is held as cases ``row + key``, each under a guard: |x| is x where x >= 0
and -x elsewhere, and ⌊x / d⌋ or x mod d of a sum is one of two sums, by whether the remainders carry over.  A
comparison of two such sums is a comparison of the keys' part with the rows' part.

Shape legend: B batch, H query heads (1 where it does not matter), Q query rows, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_lowering.formula import Compare, Constant, Formula, Opaque, RowTerm, all_of, any_of, negation
from inductor_lowering.key_values import KeyValues
from inductor_lowering.mask_program import MaskProgram, Ref, Step

MAX_CASES = 16
_LARGEST = 1 << 62  # sums of two stay inside int64
_COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne"}
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
_AND = {"bitwise_and", "logical_and", "__and__"}
_OR = {"bitwise_or", "logical_or", "__or__"}
_XOR = {"bitwise_xor", "logical_xor", "__xor__"}
_NOT = {"bitwise_not", "logical_not"}
_CONVERSIONS = {"_to_copy", "convert_element_type"}
# Whole numbers up to these are exact in the floating type.
_EXACT_UP_TO = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.float32: 1 << 24, torch.float64: 1 << 53}


class NotSeparable(Exception):
    """No rule applies; the message says to what."""


@dataclass(frozen=True, eq=False)
class Sum:
    """``row + key``: int64 ``[B, H, Q or 1, 1]`` and ``[B, H, 1, K or 1]``."""

    row: Tensor
    key: Tensor

    def bounds(self) -> tuple[int, int]:
        """Numbers that the sum does not leave."""
        row_low, row_high = _bounds(self.row)
        key_low, key_high = _bounds(self.key)
        return row_low + key_low, row_high + key_high


Case = tuple[Formula, Sum]
Cases = list[Case]


def separate(program: MaskProgram) -> Formula:
    """The program's result as a formula; parts that no rule covers become Opaque."""
    if 0 in program.sizes.values():
        return Constant(False)
    return _Separator(program).formula(program.result)


class _Separator:
    def __init__(self, program: MaskProgram) -> None:
        self.program = program
        self._formulas: dict[int, Formula] = {}
        self._cases: dict[int, Cases] = {}
        self._keys: dict[int, tuple[Tensor, KeyValues]] = {}

    def step(self, x: Any) -> Step | None:
        return self.program.steps[x.step] if isinstance(x, Ref) else None

    # ---- bools --------------------------------------------------------------------------------------------------

    def formula(self, at: int) -> Formula:
        if at not in self._formulas:
            try:
                self._formulas[at] = self._formula(at)
            except NotSeparable as error:
                self._formulas[at] = Opaque(at, False, str(error))
        return self._formulas[at]

    def _formula(self, at: int) -> Formula:
        step = self.program.steps[at]
        if not step.mixed:
            values = self.program.axis_value(at)
            if "k" in step.depends:
                return Compare("ge", self.key_values(values.long()), torch.ones_like(values[:, :, :, :1]).long())
            return RowTerm(values) if step.depends else Constant(bool(values))
        name = step.name.rpartition("::")[2]
        if name in _COMPARISONS:
            return self.compare(name, step.args[0], step.args[1])
        if name in _AND | _OR | _XOR | {"mul"}:
            left, right = (self.truth(x) for x in step.args[:2])
            if name in _AND or name == "mul":
                return all_of((left, right))
            return any_of((left, right)) if name in _OR else _differ(left, right)
        if name in _NOT:
            return negation(self.truth(step.args[0]))
        if name == "where":
            condition, left, right = (self.truth(x) for x in step.args)
            return any_of((all_of((condition, left)), all_of((negation(condition), right))))
        if name in _CONVERSIONS:
            return self.truth(step.args[0])
        raise NotSeparable(f"{step.name} of the query and the key")

    def truth(self, x: Any) -> Formula:
        """An operand as a bool: itself, or "is not zero"."""
        if not isinstance(x, Ref):
            return Constant(bool(x))
        if self.program.steps[x.step].dtype == torch.bool:
            return self.formula(x.step)
        return self.compare("ne", x, 0)

    # ---- comparisons --------------------------------------------------------------------------------------------

    def compare(self, op: str, left: Any, right: Any) -> Formula:
        if self._is_bool(left) and self._is_bool(right) and op in ("eq", "ne"):
            differ = _differ(self.truth(left), self.truth(right))
            return differ if op == "ne" else negation(differ)
        if self._is_float(left) or self._is_float(right):
            return self._compare_floats(op, left, right)
        parts = []
        for left_guard, a in self.cases(left):
            for right_guard, b in self.cases(right):
                parts.append(all_of((left_guard, right_guard, self._compare_sums(op, a, b))))
        return any_of(parts)

    def _compare_sums(self, op: str, a: Sum, b: Sum) -> Formula:
        return self._atom(op, _exact(a.key, b.key, -1), _exact(b.row, a.row, -1))

    def _atom(self, op: str, key: Tensor, row: Tensor) -> Formula:
        """``key <op> row`` for whole numbers, as an atom."""
        keys = self.key_values(key)
        low, high = keys.bounds
        if max(abs(low), abs(high)) > _LARGEST:
            raise NotSeparable("numbers too large for exact arithmetic")
        row = row.clamp(low - 1, high + 1)  # beyond, the answer does not change
        if op in ("lt", "gt"):
            op, row = ("le", row - 1) if op == "lt" else ("ge", row + 1)
        if key.shape[3] == 1 and self.program.sizes["k"] != 1:
            return RowTerm({"le": key <= row, "ge": key >= row, "eq": key == row, "ne": key != row}[op])
        return negation(Compare("eq", keys, row)) if op == "ne" else Compare(op, keys, row)

    def key_values(self, key: Tensor) -> KeyValues:
        """One KeyValues for each tensor object, so that what is found out about it is found out once."""
        if id(key) not in self._keys:
            self._keys[id(key)] = (key, KeyValues(key))
        return self._keys[id(key)][1]

    def _is_bool(self, x: Any) -> bool:
        step = self.step(x)
        return isinstance(x, bool) if step is None else step.dtype == torch.bool

    def _is_float(self, x: Any) -> bool:
        step = self.step(x)
        if step is None or step.dtype is None:
            return isinstance(x if step is None else step.args[0], float)
        return step.dtype.is_floating_point

    # ---- floating point -----------------------------------------------------------------------------------------

    def _compare_floats(self, op: str, left: Any, right: Any) -> Formula:
        dtype = torch.result_type(*(self._sample(x) for x in (left, right)))
        if dtype not in _EXACT_UP_TO:
            raise NotSeparable(f"a comparison in {dtype}")
        left_mixed, right_mixed = (bool((s := self.step(x)) and s.mixed) for x in (left, right))
        if not left_mixed and not right_mixed:
            values = [self._axis(x).to(dtype) for x in (left, right)]
            if (right_step := self.step(right)) and "k" in right_step.depends:
                return self._rank_compare(_MIRRORED[op], values[1], values[0])
            return self._rank_compare(op, values[0], values[1])
        if left_mixed and right_mixed or self._is_float(left if left_mixed else right):
            raise NotSeparable("a floating-point value of the query and the key")
        if right_mixed:
            op, left, right = _MIRRORED[op], right, left
        threshold = self._axis(right).to(dtype)
        parts = []
        for guard, total in self.cases(left):
            low, high = total.bounds()
            if max(abs(low), abs(high)) > _EXACT_UP_TO[dtype]:
                raise NotSeparable(f"whole numbers beyond those that {dtype} holds exactly")
            parts.append(all_of((guard, self._compare_to_threshold(op, total, threshold, low, high))))
        return any_of(parts)

    def _compare_to_threshold(self, op: str, total: Sum, threshold: Tensor, low: int, high: int) -> Formula:
        """``total <op> threshold`` with a floating-point threshold of the query or of the key."""
        bounded = threshold.double().nan_to_num(0.0, high + 1.0, low - 1.0).clamp(low - 1, high + 1)
        rounded = bounded.ceil() if op in ("ge", "lt") else bounded.floor()
        whole = rounded.long()
        if threshold.shape[3] == 1:
            atom = self._atom(op, total.key, whole - total.row)
        else:
            atom = self._atom(op, _exact(total.key, whole, -1), -total.row)
        is_number = self._axis_term(~threshold.isnan())
        if op in ("eq", "ne"):
            # A threshold between whole numbers, or outside of the sum's range, equals none.
            possible = self._axis_term(bounded == rounded)
            atom = all_of((possible, atom)) if op == "eq" else any_of((negation(possible), atom))
        return any_of((negation(is_number), atom)) if op == "ne" else all_of((is_number, atom))

    def _rank_compare(self, op: str, key: Tensor, row: Tensor) -> Formula:
        """``key <op> row`` for floating-point values, by their ranks among the values of the keys."""
        values = key[~key.isnan()].unique()
        key_rank = torch.searchsorted(values, key.contiguous())
        first = torch.searchsorted(values, row.contiguous())
        past = torch.searchsorted(values, row.contiguous(), right=True)
        numbers = all_of((self._axis_term(~key.isnan()), self._axis_term(~row.isnan())))
        if op in ("eq", "ne"):
            equal = all_of((numbers, self._atom("eq", key_rank, torch.where(past > first, first, -1))))
            return equal if op == "eq" else negation(equal)
        rank = {"le": past - 1, "lt": first - 1, "ge": first, "gt": past}[op]
        return all_of((numbers, self._atom("le" if op in ("le", "lt") else "ge", key_rank, rank)))

    def _axis_term(self, values: Tensor) -> Formula:
        if bool(values.all()):
            return Constant(True)
        if values.shape[3] == 1:
            return RowTerm(values)
        return Compare("ge", self.key_values(values.long()), torch.ones_like(values[:, :, :, :1]).long())

    def _axis(self, x: Any) -> Tensor:
        if isinstance(x, Ref):
            return self.program.axis_value(x.step)
        dtype = torch.float64 if isinstance(x, float) else None
        return torch.tensor(x, dtype=dtype, device=self.program.device).view(1, 1, 1, 1)

    def _sample(self, x: Any) -> Any:
        step = self.step(x)
        if step is None:
            return x
        return torch.empty((), dtype=step.dtype) if step.dtype is not None else step.args[0]

    # ---- whole numbers --------------------------------------------------------------------------------------------

    def cases(self, x: Any) -> Cases:
        """An integer or bool operand as cases whose guards exclude one another and cover everything."""
        step = self.step(x)
        if step is None or not step.mixed:
            return [(Constant(True), self._axis_sum(x))]
        if x.step not in self._cases:
            found = self._find_cases(x.step, step)
            if len(found) > MAX_CASES:
                raise NotSeparable(f"{step.name}: more than {MAX_CASES} cases")
            if step.dtype is not None and step.dtype != torch.bool:
                info = torch.iinfo(step.dtype)
                for _, total in found:
                    low, high = total.bounds()
                    if low < info.min or high > info.max:
                        raise NotSeparable(f"{step.name}: the value may not fit into {step.dtype}")
            self._cases[x.step] = found
        return self._cases[x.step]

    def _axis_sum(self, x: Any) -> Sum:
        values = self._axis(x)
        if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.uint64:
            raise NotSeparable(f"a value of dtype {values.dtype} in whole-number arithmetic")
        values = values.long()
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=values.device)
        step = self.step(x)
        return Sum(zero, values) if step is not None and "k" in step.depends else Sum(values, zero)

    def _find_cases(self, at: int, step: Step) -> Cases:
        if step.dtype == torch.bool:
            return self._bool_cases(at)
        if step.dtype is None or step.dtype.is_floating_point or step.dtype == torch.uint64:
            raise NotSeparable(f"{step.name}: a value of dtype {step.dtype} of the query and the key")
        name = step.name.rpartition("::")[2]
        rule = getattr(self, f"_cases_{name.strip('_')}", None)
        if rule is None:
            raise NotSeparable(f"{step.name} of the query and the key")
        return rule(step)

    def _bool_cases(self, at: int) -> Cases:
        formula = self.formula(at)
        one = torch.ones(1, 1, 1, 1, dtype=torch.int64, device=self.program.device)
        return [(formula, Sum(one, one * 0)), (negation(formula), Sum(one * 0, one * 0))]

    def _both(self, left: Any, right: Any, combine: Callable[[Sum, Sum], Cases]) -> Cases:
        out: Cases = []
        for left_guard, a in self.cases(left):
            for right_guard, b in self.cases(right):
                guard = all_of((left_guard, right_guard))
                if guard != Constant(False):
                    out.extend((all_of((guard, more)), total) for more, total in combine(a, b))
        return [case for case in out if case[0] != Constant(False)]

    def _cases_add(self, step: Step, sign: int = 1) -> Cases:
        factor = sign * _whole((step.kwargs or {}).get("alpha", 1))
        return self._both(step.args[0], step.args[1], lambda a, b: _always(_add(a, b, factor)))

    def _cases_sub(self, step: Step) -> Cases:
        return self._cases_add(step, -1)

    def _cases_rsub(self, step: Step) -> Cases:
        factor = _whole((step.kwargs or {}).get("alpha", 1))
        return self._both(step.args[1], step.args[0], lambda a, b: _always(_add(a, b, -factor)))

    def _cases_neg(self, step: Step) -> Cases:
        return [(guard, _scale(total, -1)) for guard, total in self.cases(step.args[0])]

    def _cases_mul(self, step: Step) -> Cases:
        def product(a: Sum, b: Sum) -> Cases:
            for total, other in ((a, b), (b, a)):
                if other.row.numel() == 1 and other.key.numel() == 1:
                    return _always(_scale(total, int(other.row) + int(other.key)))
            raise NotSeparable("a product of two values that vary")

        return self._both(step.args[0], step.args[1], product)

    def _cases_abs(self, step: Step) -> Cases:
        out: Cases = []
        for guard, total in self.cases(step.args[0]):
            positive = self._compare_sums("ge", total, _zero_like(total))
            out.append((all_of((guard, positive)), total))
            out.append((all_of((guard, negation(positive))), _scale(total, -1)))
        return out

    def _cases_minimum(self, step: Step, op: str = "le") -> Cases:
        def choose(a: Sum, b: Sum) -> Cases:
            first = self._compare_sums(op, a, b)
            return [(first, a), (negation(first), b)]

        return self._both(step.args[0], step.args[1], choose)

    def _cases_maximum(self, step: Step) -> Cases:
        return self._cases_minimum(step, "ge")

    def _cases_clamp(self, step: Step) -> Cases:
        bounds = (*step.args[1:], None, None)[:2]
        bounds = tuple((step.kwargs or {}).get(n, x) for n, x in zip(("min", "max"), bounds, strict=True))
        return self._clamped(step.args[0], *bounds)

    def _cases_clamp_min(self, step: Step) -> Cases:
        return self._clamped(step.args[0], step.args[1], None)

    def _cases_clamp_max(self, step: Step) -> Cases:
        return self._clamped(step.args[0], None, step.args[1])

    def _clamped(self, x: Any, low: Any, high: Any) -> Cases:
        out = self.cases(x)
        for bound, op in ((low, "ge"), (high, "le")):
            if bound is None:
                continue
            bounded: Cases = []
            for guard, total in out:
                for bound_guard, limit in self.cases(bound):
                    inside = self._compare_sums(op, total, limit)
                    bounded.append((all_of((guard, bound_guard, inside)), total))
                    bounded.append((all_of((guard, bound_guard, negation(inside))), limit))
            out = [case for case in bounded if case[0] != Constant(False)]
        return out

    def _cases_where(self, step: Step) -> Cases:
        condition = self.truth(step.args[0])
        out = [(all_of((condition, guard)), total) for guard, total in self.cases(step.args[1])]
        out += [(all_of((negation(condition), guard)), total) for guard, total in self.cases(step.args[2])]
        return [case for case in out if case[0] != Constant(False)]

    def _cases_to_copy(self, step: Step) -> Cases:
        source = self.step(step.args[0])
        if source is None or source.dtype is None or source.dtype.is_floating_point:
            raise NotSeparable(f"{step.name}: rounding of a floating-point value of the query and the key")
        return self.cases(step.args[0])

    _cases_convert_element_type = _cases_to_copy

    # ---- division -------------------------------------------------------------------------------------------------

    def _cases_floor_divide(self, step: Step) -> Cases:
        divisor = self._divisor(step)
        return self._divide(self.cases(step.args[0]), lambda total: _floor_parts(total, divisor)[0])

    def _cases_remainder(self, step: Step) -> Cases:
        divisor = self._divisor(step)
        return self._divide(self.cases(step.args[0]), lambda total: _floor_parts(total, divisor)[1])

    def _cases_div(self, step: Step) -> Cases:
        rounding = (step.kwargs or {}).get("rounding_mode", step.args[2] if len(step.args) > 2 else None)
        if rounding == "floor":
            return self._cases_floor_divide(step)
        if rounding != "trunc":
            raise NotSeparable(f"{step.name}: a quotient that is not rounded")
        return self._truncated(step, lambda parts: parts[0])

    def _cases_fmod(self, step: Step) -> Cases:
        return self._truncated(step, lambda parts: parts[1])

    def _truncated(self, step: Step, pick: Callable[[tuple[Cases2, Cases2]], Cases2]) -> Cases:
        """Towards zero: as floor division where the value is not negative, mirrored elsewhere."""
        divisor = self._divisor(step)
        out: Cases = []
        for guard, total in self.cases(step.args[0]):
            positive = self._compare_sums("ge", total, _zero_like(total))
            for side, sign in ((positive, 1), (negation(positive), -1)):
                parts = self._divide([(side, _scale(total, sign))], lambda x: pick(_floor_parts(x, divisor)))
                out.extend((all_of((guard, more)), _scale(x, sign)) for more, x in parts)
        return [case for case in out if case[0] != Constant(False)]

    def _divide(self, cases: Cases, parts: Callable[[Sum], Cases2]) -> Cases:
        """Each case in two: the remainders of row and key add up to less than the divisor, or carry over."""
        out: Cases = []
        for guard, total in cases:
            for carry_key, carry_row, carries, x in parts(total):
                carry = self._atom("ge" if carries else "lt", carry_key, carry_row)
                out.append((all_of((guard, carry)), x))
        return [case for case in out if case[0] != Constant(False)]

    def _divisor(self, step: Step) -> int:
        cases = self.cases(step.args[1])
        total = cases[0][1]
        if len(cases) > 1 or total.row.numel() != 1 or total.key.numel() != 1:
            raise NotSeparable(f"{step.name}: a divisor that varies")
        divisor = int(total.row) + int(total.key)
        if divisor <= 0:
            raise NotSeparable(f"{step.name}: a divisor that is not positive")
        return divisor


Cases2 = list[tuple[Tensor, Tensor, bool, Sum]]  # carry iff key >= row: key, row, the carrying case?, its value


def _floor_parts(total: Sum, divisor: int) -> tuple[Cases2, Cases2]:
    """⌊total / divisor⌋ and total mod divisor, each as the case without and the case with a carry."""
    row_rest, key_rest = total.row % divisor, total.key % divisor
    row_part, key_part = total.row // divisor, total.key // divisor
    need = divisor - row_rest
    quotient = [
        (key_rest, need, False, Sum(row_part, key_part)),
        (key_rest, need, True, Sum(row_part + 1, key_part)),
    ]
    remainder = [
        (key_rest, need, False, Sum(row_rest, key_rest)),
        (key_rest, need, True, Sum(row_rest - divisor, key_rest)),
    ]
    return quotient, remainder


def _always(total: Sum) -> Cases:
    return [(Constant(True), total)]


def _differ(left: Formula, right: Formula) -> Formula:
    return any_of((all_of((left, negation(right))), all_of((negation(left), right))))


def _whole(x: Any) -> int:
    if not isinstance(x, int):
        raise NotSeparable("a factor that is not a whole number")
    return x


def _bounds(x: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(x)
    return int(low), int(high)


def _exact(a: Tensor, b: Tensor, factor: int) -> Tensor:
    """``a + factor * b``, refused where it could leave int64."""
    if b.numel() == 1 and int(b) == 0:
        return a
    if a.numel() == 1 and int(a) == 0 and factor == 1:
        return b
    low, high = _bounds(a)
    b_low, b_high = _bounds(b)
    if max(abs(low), abs(high)) + abs(factor) * max(abs(b_low), abs(b_high)) > _LARGEST:
        raise NotSeparable("numbers too large for exact arithmetic")
    return a + b * factor


def _add(a: Sum, b: Sum, factor: int) -> Sum:
    return Sum(_exact(a.row, b.row, factor), _exact(a.key, b.key, factor))


def _scale(total: Sum, factor: int) -> Sum:
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=total.row.device)
    return _add(Sum(zero, zero), total, factor)


def _zero_like(total: Sum) -> Sum:
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=total.row.device)
    return Sum(zero, zero)
