"""Hard masks inside score mods: ``where(condition, score, -inf)`` is a mask and belongs into the plan.

A score mod is read backwards from its result.  Selections between a score and minus infinity are taken out as long as
what comes after them keeps minus infinity, whatever the inputs are: further selections, conversions, a positive factor,
a finite constant.  So ``score mod = rest where the condition holds, else -inf``, exactly, for NaN and infinite inputs
too.  A sum with anything that is not known when the graph is compiled is not taken apart: it might be NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from magi_flex.fx_program import FxProgram, references

SCORE = 0  # the first argument; b, h, q, k and captures follow
_INDICES = 4
_CONVERSIONS = {"aten::_to_copy", "prims::convert_element_type"}
_FLOATS = {"float64", "float32", "bfloat16", "float16"}
# Where constants have their size (None: that of a score) and their value.
_CONSTANTS = {
    "aten::full": (0, 1),
    "aten::new_full": (1, 2),
    "aten::full_like": (None, 1),
    "aten::scalar_tensor": (None, 0),
}
_MODEST = 1e30  # factors and terms up to here (and factors down to its inverse) are finite in every dtype of a score


@dataclass(frozen=True)
class Selection:
    """A score mod split in two.

    Attributes:
        condition: (b, h, q, k, *some captures) -> bool.
        captures: which captures of the score mod these are.
        rest: (score, b, h, q, k, *all captures) -> the score where the condition holds.
        conditions: whose conjunction the condition is: (score, b, h, q, k, *all captures) -> bool as JSON, and whether
            it has to be false.
    """

    condition: FxProgram
    captures: tuple[int, ...]
    rest: FxProgram
    conditions: tuple[tuple[str, bool], ...]

    @property
    def reads_tables(self) -> bool:
        return any(step[0] == "call" and step[1] == "aten::index" for step in self.condition.steps)


def split_selection(program: FxProgram) -> Selection | None:
    """The score mod ``program`` as a selection; None where it is not provably one."""
    reader = _Reader(program)
    result = program.steps[-1][1]
    if not _is_node(result):
        return None
    reader.visit(result["node"])
    if not reader.conditions:
        return None
    rest = program
    for selection, kept in reader.kept.items():
        rest = rest.with_reference(selection, kept)
    condition, captures = _condition(program, reader.conditions)
    parts = tuple((program.ending_at(number).to_json(), negated) for number, negated in reader.conditions)
    return Selection(condition, captures, rest.ending_at(rest.steps[-1][1]["node"]), parts)


class _Reader:
    """``conditions``: (step, negated), which must all hold; ``kept``: selection -> the score that it selects from."""

    def __init__(self, program: FxProgram):
        self.steps = program.steps
        self.conditions: list[tuple[int, bool]] = []
        self.kept: dict[int, int] = {}
        self.from_score = {SCORE}
        for number, step in enumerate(self.steps[:-1]):
            if any(n in self.from_score for n in references(step[1:])):
                self.from_score.add(number)

    def visit(self, number: int) -> None:
        """Take out the selections through which minus infinity would reach step ``number``."""
        step = self.steps[number]
        if step[0] != "call":
            return
        _, name, _, args, kwargs = step
        if name in _CONVERSIONS and self._to_float(args, kwargs):
            self.visit(args[0]["node"])
        elif name in ("aten::where", "aten::masked_fill") and len(args) == 3:
            self._select(number, name, args)
        elif name in ("aten::mul", "aten::add", "aten::sub", "aten::div") and len(args) == 2 and not kwargs:
            self._arithmetic(name, *args)

    def _select(self, number: int, name: str, args: list[Any]) -> None:
        if name == "aten::where":
            condition, score, other = args
            negated = self._constant(score) == -math.inf
            score, other = (other, score) if negated else (score, other)
        else:
            score, condition, other = args
            negated = True
        if self._constant(other) != -math.inf or not _is_node(score) or not _is_node(condition):
            return
        if condition["node"] in self.from_score:
            return
        self.conditions.append((condition["node"], negated))
        self.kept[number] = score["node"]
        self.visit(score["node"])

    def _arithmetic(self, name: str, left: Any, right: Any) -> None:
        if name in ("aten::mul", "aten::add") and self._constant(left) is not None:
            left, right = right, left
        number = self._constant(right)
        if number is None or not _is_node(left):
            return
        least = -_MODEST if name in ("aten::add", "aten::sub") else 1 / _MODEST
        if least <= number <= _MODEST:
            self.visit(left["node"])

    def _to_float(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        dtype = kwargs.get("dtype") if len(args) == 1 else args[1]
        return dtype is None or dtype["dtype"] in _FLOATS

    def _constant(self, x: Any) -> float | None:
        """The number that an operand is known to be."""
        if isinstance(x, dict) and "float" in x:
            return float(x["float"])
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return float(x)
        step = self.steps[x["node"]] if _is_node(x) else [None]
        if step[0] != "call":
            return None
        _, name, _, args, kwargs = step
        if name in _CONSTANTS:
            size_at, value_at = _CONSTANTS[name]
            value = self._constant(args[value_at]) if size_at is None or args[size_at] == [] else None
            dtype = (kwargs.get("dtype") or {"dtype": None})["dtype"]
            keeps_fractions = dtype in _FLOATS or (dtype is None and name in ("aten::full", "aten::scalar_tensor"))
            if value is not None and math.isfinite(value) and not (keeps_fractions or value.is_integer()):
                return None  # a whole number, in a dtype that is not known here, perhaps
            return value
        if name in _CONVERSIONS and self._to_float(args, kwargs):
            return self._constant(args[0])
        return None


def _condition(program: FxProgram, conditions: list[tuple[int, bool]]) -> tuple[FxProgram, tuple[int, ...]]:
    """All conditions as one program without the score and without captures that it does not read."""
    steps = list(program.steps[:-1])

    def call(name: str, *operands: int) -> int:
        steps.append(["call", name, "default" if len(operands) == 1 else "Tensor", [{"node": n} for n in operands], {}])
        return len(steps) - 1

    both = None
    for number, negated in conditions:
        part = call("aten::bitwise_not", number) if negated else number
        both = part if both is None else call("aten::bitwise_and", both, part)
    assert both is not None
    whole = FxProgram((*steps, ["return", {"node": both}])).ending_at(both)
    used = {n for step in whole.steps for n in references(step[1:])}
    arguments = [n for n, step in enumerate(whole.steps) if step[0] == "arg"]
    captures = tuple(i for i, n in enumerate(arguments[1 + _INDICES :]) if n in used)
    kept = {*arguments[1 : 1 + _INDICES], *(arguments[1 + _INDICES + i] for i in captures)}
    return whole.without_arguments([n for n in arguments if n not in kept]), captures


def _is_node(x: Any) -> bool:
    return isinstance(x, dict) and "node" in x
