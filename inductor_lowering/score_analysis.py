"""Recognising score mods that are a few simple steps, by abstract interpretation of their program.

Every value of the program is described by what it is a function of: the score after some steps, a linear function of
the indices, or something that depends on few enough of them to be tabulated in O(tokens) memory.  ``d`` stands for
q - k: a value that depends on q and k only through their difference is a table over distances.

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
    """

    step: int
    score: tuple[Recipe, ...] | None = None
    linear: Linear | None = None
    distance: tuple[int | None, float, bool] | None = None
    axes: str | None = ""
    terms: tuple[Recipe, ...] | None = None

    @property
    def number(self) -> float | None:
        if self.linear is None or any(self.linear.get(arg) for arg in self.linear if arg != CONSTANT):
            return None
        return self.linear.get(CONSTANT, 0)


def recognise(program: FxProgram, order: str) -> tuple[Recipe, ...] | None:
    """The steps that the score mod ``program`` consists of, or None.  ``order``: which captures are ints ("i")."""
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
                value = _Value(number)
            self.values.append(value)
        raise _Unrecognised

    # ---- operands -----------------------------------------------------------------------------------------------

    def _argument(self, number: int, position: int) -> _Value:
        if position == SCORE:
            return _Value(number, score=(), axes=None)
        if position in _INDEX_NAMES:
            return _Value(number, linear={position: 1}, axes=_INDEX_NAMES[position])
        if self.order[position - len(_INDEX_NAMES) - 1] == "i":
            return _Value(number, linear={position: 1})
        return _Value(number)

    def _operand(self, x: Any) -> _Value:
        if isinstance(x, dict) and "node" in x:
            return self.values[x["node"]]
        if isinstance(x, dict) and "float" in x:
            x = float(x["float"])
        if isinstance(x, (int, float)):
            return _Value(CONSTANT, linear={CONSTANT: int(x) if isinstance(x, bool) else x})
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
            constant = self._operand(args[1])
            is_number = args[0] == [] and not isinstance(args[1], bool)
            return replace(constant, step=number) if is_number else _Value(number)
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

    def _convert(self, number: int, value: _Value, dtype: Any) -> _Value:
        kept = dtype is None or getattr(torch, dtype["dtype"]).is_floating_point
        integral = value.linear is not None and all(isinstance(c, int) for c in value.linear.values())
        if kept or (integral and dtype["dtype"] in ("int64", "int32")):
            return replace(value, step=number)
        return self._combine(number, "other", [value])

    def _index(self, number: int, args: Any) -> _Value:
        base, indices = self._operand(args[0]), [self._operand(i) for i in args[1]]
        if base.axes != "" or any(i.score is not None for i in indices):
            raise _Unrecognised
        axes = self._union(indices)
        linear = [i.linear for i in indices]
        if any(i is None or not all(isinstance(c, int) for c in i.values()) for i in linear):
            return _Value(number, axes=axes)
        tabulated = None if axes is None else self._table(number, axes)
        read = ("read", self._subprogram(base.step), [sorted(i.items()) for i in linear if i is not None], 1.0)
        return _Value(number, axes=axes, terms=((*read, tabulated),))

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
        value = _Value(number, axes=self._union(operands))
        if name == "aten::abs" and operands[0].distance is not None:
            slope, factor, _ = operands[0].distance
            if slope is None:
                return replace(value, distance=(None, abs(factor), True))
        return value

    def _scaled(self, number: int | None, value: _Value, factor: float) -> _Value:
        """``number``: the step that computes it; None where no step does, as what a difference takes away."""
        if number is None:
            if value.axes is not None:
                value = replace(value, terms=self._terms(value))
            number = value.step
        score = None if value.score is None else _then_multiply(value.score, factor)
        linear = None if value.linear is None else {arg: c * factor for arg, c in value.linear.items()}
        terms = None if value.terms is None else tuple(_scale_term(term, factor) for term in value.terms)
        distance = None
        if value.distance is not None:
            slope, before, absolute = value.distance
            distance = (slope, before * factor, absolute)
        return _Value(number, score, linear, distance, value.axes, terms)

    def _sum(self, number: int, left: _Value, right: _Value) -> _Value:
        if left.score is not None and right.score is not None:
            raise _Unrecognised
        if left.score is not None or right.score is not None:
            score, other = (left, right) if left.score is not None else (right, left)
            assert score.score is not None
            return _Value(number, score=(*score.score, *self._terms(other)), axes=None)
        if left.linear is not None and right.linear is not None:
            linear = {arg: left.linear.get(arg, 0) + right.linear.get(arg, 0) for arg in {*left.linear, *right.linear}}
            return self._linear(number, linear)
        terms = None
        if self._has_terms(left) and self._has_terms(right):
            terms = (*self._terms(left), *self._terms(right))
        return _Value(number, axes=self._union([left, right]), terms=terms)

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
        product = _Value(number, axes=self._union([left, right]))
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
    if factor == 0:
        raise _Unrecognised
    return (*steps, ("softcap", 1 / factor), ("multiply", factor))
