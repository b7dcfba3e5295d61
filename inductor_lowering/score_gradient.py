"""Whether the steps of a score mod have the gradient that the mod has.

A mod's joint graph says what its gradient is: not the derivative of what it computes where it detaches something or
holds an autograd function of its own.  Kernels with steps use the derivative of the steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inductor_lowering.score_analysis import Analysis, Unrecognised, Value, constant
from inductor_lowering.score_select import Selection
from magi_flex.fx_program import FxProgram
from magi_flex.score_steps import Recipe

_GRADIENT = 5  # the argument of a joint graph that is the gradient of the mod's result
_ZEROS = ("aten::zeros_like", "aten::new_zeros")

Steps = tuple[Recipe, ...]


@dataclass(frozen=True)
class _Slope:
    """factor * the product of the derivatives of tanh where ``tanhs``, steps from the score, end.

    ``incoming``: times the gradient of the result.  ``square``: instead, the square of that one tanh.
    """

    factor: float = 1.0
    tanhs: tuple[Steps, ...] = ()
    incoming: bool = False
    square: bool = False


def has_gradient_of(recipe: Steps, joint: FxProgram, order: str, selection: Selection | None) -> bool:
    """Whether ``joint`` gives the derivative of the steps, where the pairs of ``selection`` are concerned.

    False where that cannot be seen.
    """
    first = joint.steps[-1][1][0]
    if first is None:  # no gradient at all
        return False
    try:
        slope = _GradientAnalysis(joint.ending_at(first["node"]), order, selection).result().slope
    except Unrecognised:
        return False
    if slope is None or not slope.incoming:
        return False
    factor = math.prod(step[1] for step in recipe if step[0] == "multiply")
    tanhs = [recipe[: i + 1] for i, step in enumerate(recipe) if step[0] == "softcap"]
    # (Recipes are what they are as text: they hold lists.)
    same = Counter(map(repr, tanhs)) == Counter(map(repr, slope.tanhs))
    return same and math.isclose(factor, slope.factor, rel_tol=1e-6)


class _GradientAnalysis(Analysis):
    def __init__(self, program: FxProgram, order: str, selection: Selection | None):
        super().__init__(program, order)
        self.conditions = () if selection is None else selection.conditions

    def _argument(self, number: int, position: int) -> Value:
        if position == _GRADIENT:
            return Value(number, axes=None, slope=_Slope(incoming=True))
        return super()._argument(number, position if position < _GRADIENT else position - 1)

    def _combine(self, number: int, name: str, operands: list[Value]) -> Value:
        slope = self._slope(name, operands)
        if slope is not None:
            return Value(number, axes=None, slope=slope)
        return replace(constant(0), step=number) if name in _ZEROS else super()._combine(number, name, operands)

    def _scaled(self, number: int | None, value: Value, factor: float) -> Value:
        scaled = super()._scaled(number, value, factor)
        if value.slope is None:
            return scaled
        return replace(scaled, slope=replace(value.slope, factor=value.slope.factor * factor))

    def _slope(self, name: str, operands: Sequence[Value]) -> _Slope | None:
        """The part of a derivative that an operator makes of its operands, if it does more than scale one."""
        match name, *operands:
            case "aten::mul", Value(slope=_Slope(square=False) as a), Value(slope=_Slope(square=False) as b):
                both = a.incoming and b.incoming
                return None if both else _Slope(a.factor * b.factor, (*a.tanhs, *b.tanhs), a.incoming or b.incoming)
            case ("aten::mul", x, y) if x.step == y.step:
                return self._square(x)
            case ("aten::pow", x, exponent) if exponent.number == 2:
                return self._square(x)
            case ("aten::sub", one, Value(slope=_Slope(factor=1.0, square=True) as square)) if one.number == 1:
                return replace(square, square=False)
            case ("aten::rsub", Value(slope=_Slope(factor=1.0, square=True) as square), one) if one.number == 1:
                return replace(square, square=False)
            case "aten::tanh_backward", Value(slope=_Slope(square=False) as slope), y:
                of_tanh = self._square(y)
                return None if of_tanh is None else replace(slope, tanhs=(*slope.tanhs, *of_tanh.tanhs))
            case "aten::where", condition, kept, other if other.number == 0:
                return self._selected(condition, kept, negated=False)
            case "aten::where", condition, other, kept if other.number == 0:
                return self._selected(condition, kept, negated=True)
            case "aten::masked_fill", kept, condition, other if other.number == 0:
                return self._selected(condition, kept, negated=True)
        return None

    def _square(self, value: Value) -> _Slope | None:
        """Of a value that is a tanh: steps that end in a soft cap and undo its factor."""
        steps = value.score or ()
        factor = 1.0
        if steps and steps[-1][0] == "multiply":
            factor, steps = steps[-1][1], steps[:-1]
        is_tanh = steps and steps[-1][0] == "softcap" and math.isclose(factor * steps[-1][1], 1, rel_tol=1e-9)
        return _Slope(tanhs=(steps,), square=True) if is_tanh else None

    def _selected(self, condition: Value, kept: Value, negated: bool) -> _Slope | None:
        """The gradient where the selection's condition holds, and nothing elsewhere."""
        if kept.slope is None or condition.step < 0:
            return None
        return kept.slope if (self._subprogram(condition.step), negated) in self.conditions else None

    def _subprogram(self, step: int) -> str:
        """As the mod's own graph has it, whose arguments do not include the gradient."""
        part = self.program.ending_at(step)
        gradient = [n for n, x in enumerate(part.steps) if x[0] == "arg"][_GRADIENT]
        if any(gradient in part.references(n) for n in range(len(part.steps))):
            raise Unrecognised
        return part.without_arguments([gradient]).to_json()
