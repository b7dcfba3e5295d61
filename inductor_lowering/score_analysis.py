"""Recognising score mods that are a few simple steps, by abstract interpretation of their program.

Every value of the program is described by what it is a function of: the score after some steps, a linear function of
the indices, or something that depends on few enough of them to be tabulated in O(tokens) memory.  ``d`` stands for
q - k: a value that depends on q and k only through their difference is a table over distances.

Steps are sums and products of float32 numbers.  Floats of a score mod stand for real numbers, so theirs may be taken
apart into steps; whole numbers wrap around in their dtype (and True + True is True), or are too long for a float32, so
theirs are taken apart only where their bounds exclude that, and are one table otherwise.  Index arithmetic is done in
64 bits, as by eager calls.

The result is a recipe (score_steps.py) of which the kernels' steps are made when the lengths and captures are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from magi_flex.fx_program import FxProgram
from magi_flex.score_steps import Recipe

SCORE, BATCH, HEAD, QUERY, KEY = range(5)  # positions of the arguments; captures follow
_INDEX_NAMES = {BATCH: "b", HEAD: "h", QUERY: "q", KEY: "k"}
CONSTANT = -1

Bounds = tuple[int, int]  # least, most
_NARROW: dict[torch.dtype | None, Bounds] = {
    torch.bool: (0, 1),
    **{x: (torch.iinfo(x).min, torch.iinfo(x).max) for x in (torch.uint8, torch.int8, torch.uint16, torch.int16)},
}
_FLOAT32_WHOLE = 1 << 24  # whole numbers up to here are exact
_MODEST = 1e30  # factors and caps up to here, and down to its inverse, are float32 numbers as well

Linear = dict[int, float]  # coefficient of each argument (an index or a captured int), CONSTANT for the constant


class _Unrecognised(Exception):
    """The program is no sequence of simple steps."""


@dataclass(frozen=True)
class _Value:
    """What is known about one value.

    Attributes:
        step: its number in the program; CONSTANT for a number.
        score: the steps that lead from the score to it, if it depends on the score.
        linear: it is this linear function of the indices and captured ints.
        distance: it is (slope step or None, factor, absolute): slope[h] * factor * (k - q) or its absolute value.
        axes: letters of "bhqkd" it depends on (at most one of q, k, d); None if it cannot be tabulated.
        terms: it is the sum of these recipe steps.
        bounds: it is a whole number within these; None if not known.
    """

    step: int
    score: tuple[Recipe, ...] | None = None
    linear: Linear | None = None
    distance: tuple[int | None, float, bool] | None = None
    axes: str | None = ""
    terms: tuple[Recipe, ...] | None = None
    bounds: Bounds | None = None

    @property
    def number(self) -> float | None:
        if self.linear is None or any(self.linear.get(arg) for arg in self.linear if arg != CONSTANT):
            return None
        return self.linear.get(CONSTANT, 0)


def recognise(program: FxProgram, order: str) -> tuple[Recipe, ...] | None:
    """The steps that the score mod ``program`` consists of, or None.  ``order``: which captures are ints ("i").

    ``program`` knows the dtypes of its trace.
    """
    try:
        return _Analysis(program, order).result()
    except _Unrecognised:
        return None


class _Analysis:
    def __init__(self, program: FxProgram, order: str):
        self.program = program
        self.order = order
        self.values: list[_Value] = []

    def result(self) -> tuple[Recipe, ...]:
        args = 0
        for number, step in enumerate(self.program.steps):
            if step[0] == "return":
                score = self._operand(step[1]).score
                if score is None:
                    raise _Unrecognised
                return score
            if step[0] == "arg":
                value = self._argument(number, args)
                args += 1
            elif step[0] == "python":
                value = self._combine(number, f"aten::{step[1]}", [self._operand(x) for x in step[2]])
            elif step[0] == "call":
                value = self._call(number, step)
            else:
                value = self._value(number)
            self.values.append(value)
        raise _Unrecognised

    def _value(self, number: int, axes: str | None = "", terms: tuple[Recipe, ...] | None = None) -> _Value:
        """What is known of a step's value by its dtype and by what it depends on."""
        return _Value(number, axes=axes, terms=terms, bounds=_NARROW.get(self.program.dtypes[number]))

    def _is_float(self, number: int) -> bool:
        dtype = self.program.dtypes[number]
        return dtype is not None and dtype.is_floating_point

    def _is_index(self, number: int, value: _Value) -> bool:
        """Whether a step is arithmetic of indices as ``value`` is, in a dtype that holds indices."""
        return (value.linear is not None or value.distance is not None) and not self._is_narrow(number)

    def _is_narrow(self, number: int) -> bool:
        return self.program.dtypes[number] in _NARROW

    def _holds(self, number: int, bounds: Bounds | None) -> bool:
        """Whether the dtype of a step, and float32, hold all whole numbers within ``bounds``."""
        least, most = _NARROW.get(self.program.dtypes[number], (-_FLOAT32_WHOLE, _FLOAT32_WHOLE))
        return bounds is not None and least <= bounds[0] and bounds[1] <= most

    # ---- operands -----------------------------------------------------------------------------------------------

    def _argument(self, number: int, position: int) -> _Value:
        if position == SCORE:
            return _Value(number, score=(), axes=None)
        if position in _INDEX_NAMES:
            return _Value(number, linear={position: 1}, axes=_INDEX_NAMES[position])
        if self.order[position - len(_INDEX_NAMES) - 1] == "i":
            return _Value(number, linear={position: 1})
        return self._value(number)

    def _operand(self, x: Any) -> _Value:
        if isinstance(x, dict) and "node" in x:
            return self.values[x["node"]]
        if isinstance(x, dict) and "float" in x:
            x = float(x["float"])
        if isinstance(x, (int, float)):
            return _constant(int(x) if isinstance(x, bool) else x)
        return _Value(CONSTANT)

    def _union(self, values: Sequence[_Value]) -> str | None:
        """Axes of a function of these values."""
        axes: set[str] = set()
        for value in values:
            if value.axes is None:
                return None
            axes |= set(value.axes)
        return "".join(sorted(axes)) if len(axes & set("qkd")) <= 1 else None

    def _call(self, number: int, step: Any) -> _Value:
        _, name, _, args, kwargs = step
        if name == "aten::index":
            return self._index(number, args)
        if name == "aten::full":
            return self._full(number, *args)
        if name in ("aten::_to_copy", "prims::convert_element_type"):
            dtype = kwargs.get("dtype") if name == "aten::_to_copy" else args[1]
            return self._convert(number, self._operand(args[0]), dtype)
        operands = [self._operand(x) for x in args]
        if name in ("aten::add", "aten::sub", "aten::rsub"):  # the scalar overloads take alpha by position
            *operands, alpha = operands if len(operands) == 3 else [*operands, self._operand(kwargs.get("alpha", 1))]
            scaled = 0 if name == "aten::rsub" else 1
            if alpha.number is None:
                raise _Unrecognised
            if alpha.number != 1:
                operands[scaled] = self._scaled(None, operands[scaled], alpha.number)
        elif any(isinstance(x, dict) and "node" in x for x in kwargs.values()) or "rounding_mode" in kwargs:
            name = "other"
        return self._combine(number, name, operands)

    def _full(self, number: int, size: Any, x: Any) -> _Value:
        constant = self._operand(x)
        whole = _is_whole(constant) and not self._is_narrow(number)
        kept = constant.linear is not None and (whole or self._is_float(number) or self._holds(number, constant.bounds))
        return replace(constant, step=number) if kept and size == [] else self._value(number)

    def _convert(self, number: int, value: _Value, dtype: Any) -> _Value:
        """16-bit floats are what the score was traced in; kernels compute in float32, so nothing is rounded to them."""
        kept = dtype is None or getattr(torch, dtype["dtype"]).is_floating_point
        whole = _is_whole(value) and dtype is not None and dtype["dtype"] in ("int64", "int32")
        if kept or whole or self._holds(number, value.bounds):
            return replace(value, step=number)
        return self._combine(number, "other", [value])

    def _index(self, number: int, args: Any) -> _Value:
        base, indices = self._operand(args[0]), [self._operand(i) for i in args[1]]
        if base.axes != "" or any(i.score is not None for i in indices):
            raise _Unrecognised
        axes = self._union(indices)
        linear = [i.linear for i in indices]
        if not all(_is_whole(i) for i in indices):
            return self._value(number, axes)
        tabulated = None if axes is None else self._table(number, axes)
        read = ("read", self._subprogram(base.step), [sorted(i.items()) for i in linear if i is not None], 1.0)
        return self._value(number, axes, ((*read, tabulated),))

    # ---- operators ----------------------------------------------------------------------------------------------

    def _combine(self, number: int, name: str, operands: list[_Value]) -> _Value:
        if name == "aten::neg":
            return self._scaled(number, operands[0], -1)
        if name in ("aten::add", "aten::sub"):
            other = operands[1] if name == "aten::add" else self._scaled(None, operands[1], -1)
            return self._sum(number, operands[0], other)
        if name == "aten::rsub":
            return self._sum(number, operands[1], self._scaled(None, operands[0], -1))
        if name == "aten::mul":
            return self._product(number, *operands)
        if name == "aten::div" and operands[1].number:
            return self._scaled(number, operands[0], 1 / operands[1].number)
        if name == "aten::tanh" and operands[0].score is not None:
            return _Value(number, score=_softcap(operands[0].score), axes=None)
        if any(x.score is not None for x in operands):
            raise _Unrecognised
        value = self._value(number, self._union(operands))
        if name == "aten::abs" and operands[0].distance is not None:
            slope, factor, _ = operands[0].distance
            if slope is None:
                return replace(value, distance=(None, abs(factor), True))
        return value

    def _scaled(self, number: int | None, value: _Value, factor: float) -> _Value:
        """``number``: the step that computes it; None where no step does, as what a difference takes away.

        Whole numbers are then those of a sum, which says whether its dtype holds them.
        """
        if not math.isfinite(factor):
            raise _Unrecognised
        bounds = None
        if value.bounds is not None and isinstance(factor, int):
            bounds = (min(x * factor for x in value.bounds), max(x * factor for x in value.bounds))
        if number is None:
            if value.axes is not None:
                value = replace(value, terms=self._terms(value))
            number = value.step
        elif not (self._is_float(number) or self._holds(number, bounds) or self._is_index(number, value)):
            return self._value(number, value.axes)
        score = None if value.score is None else _then_multiply(value.score, factor)
        linear = None if value.linear is None else {arg: c * factor for arg, c in value.linear.items()}
        terms = None if value.terms is None else tuple(_scale_term(term, factor) for term in value.terms)
        distance = None
        if value.distance is not None:
            slope, before, absolute = value.distance
            distance = (slope, before * factor, absolute)
        return _Value(number, score, linear, distance, value.axes, terms, bounds)

    def _sum(self, number: int, left: _Value, right: _Value) -> _Value:
        if left.score is not None and right.score is not None:
            raise _Unrecognised
        if left.score is not None or right.score is not None:
            score, other = (left, right) if left.score is not None else (right, left)
            assert score.score is not None
            return _Value(number, score=(*score.score, *self._terms(other)), axes=None)
        if left.linear is not None and right.linear is not None and not self._is_narrow(number):
            linear = {arg: left.linear.get(arg, 0) + right.linear.get(arg, 0) for arg in {*left.linear, *right.linear}}
            return self._linear(number, linear)
        value = self._value(number, self._union([left, right]))
        bounds = None
        if left.bounds is not None and right.bounds is not None:
            bounds = (left.bounds[0] + right.bounds[0], left.bounds[1] + right.bounds[1])
        # Of float64, what remains of large numbers that cancel out would be lost.
        real = self._is_float(number) and self.program.dtypes[number] != torch.float64
        if not ((real or self._holds(number, bounds)) and self._has_terms(left) and self._has_terms(right)):
            return value
        return replace(value, terms=(*self._terms(left), *self._terms(right)), bounds=bounds)

    def _linear(self, number: int, linear: Linear) -> _Value:
        present = {arg for arg, c in linear.items() if c}
        names = {_INDEX_NAMES[arg] for arg in present if arg in _INDEX_NAMES}
        distance = None
        if {"q", "k"} <= names and linear[QUERY] == -linear[KEY]:
            names = (names - {"q", "k"}) | {"d"}
            if present == {QUERY, KEY}:
                distance = (None, float(linear[KEY]), False)
        axes = "".join(sorted(names)) if len(names & set("qkd")) <= 1 else None
        return _Value(number, linear=linear, distance=distance, axes=axes)

    def _product(self, number: int, left: _Value, right: _Value) -> _Value:
        for value, factor in ((left, right), (right, left)):
            if factor.number is not None:
                return self._scaled(number, value, factor.number)
        if left.score is not None or right.score is not None:
            raise _Unrecognised
        product = self._value(number, self._union([left, right]))
        for slope, value in ((left, right), (right, left)):
            if slope.axes in ("", "h") and value.distance is not None and value.distance[0] is None:
                _, factor, absolute = value.distance
                return replace(product, distance=(slope.step, factor, absolute))
        return product

    # ---- recipe steps -------------------------------------------------------------------------------------------

    def _has_terms(self, value: _Value) -> bool:
        return value.terms is not None or value.distance is not None or value.axes is not None

    def _terms(self, value: _Value) -> tuple[Recipe, ...]:
        """Recipe steps whose sum is ``value``."""
        if value.number is not None:
            return (("constant", value.number),)
        if value.distance is not None:
            slope, factor, absolute = value.distance
            return (("distance", None if slope is None else self._subprogram(slope), factor, absolute),)
        if value.terms is not None:
            return value.terms
        if value.axes is None:
            raise _Unrecognised
        return (self._table(value.step, value.axes),)

    def _table(self, step: int, axes: str) -> Recipe:
        return ("table", self._subprogram(step), axes, 1.0)

    def _subprogram(self, step: int) -> str:
        return self.program.ending_at(step).to_json()


def _constant(x: int | float) -> _Value:
    return _Value(CONSTANT, linear={CONSTANT: x}, bounds=(x, x) if isinstance(x, int) else None)


def _is_whole(value: _Value) -> bool:
    return value.linear is not None and all(isinstance(c, int) for c in value.linear.values())


def _scale_term(term: Recipe, factor: float) -> Recipe:
    kind = term[0]
    if kind == "constant":
        return (kind, term[1] * factor)
    if kind == "distance":
        return (kind, term[1], term[2] * factor, term[3])
    if kind == "table":
        return (*term[:3], term[3] * factor)
    tabulated = None if term[4] is None else _scale_term(term[4], factor)
    return (*term[:3], term[3] * factor, tabulated)


def _then_multiply(steps: tuple[Recipe, ...], factor: float) -> tuple[Recipe, ...]:
    if steps and steps[-1][0] == "multiply":
        factor, steps = factor * steps[-1][1], steps[:-1]
    return steps if math.isclose(factor, 1, rel_tol=1e-12) else (*steps, ("multiply", factor))


def _softcap(steps: tuple[Recipe, ...]) -> tuple[Recipe, ...]:
    """tanh(f s) is Softcap(1 / f) times f."""
    factor = 1.0
    if steps and steps[-1][0] == "multiply":
        factor, steps = steps[-1][1], steps[:-1]
    if not 1 / _MODEST <= abs(factor) <= _MODEST:
        raise _Unrecognised
    return (*steps, ("softcap", 1 / factor), ("multiply", factor))
