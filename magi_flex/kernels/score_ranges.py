"""Bounds of the whole numbers in a score program, from those of its places: what shows that an index is in bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from magi_flex.fx_program import FxProgram

Range = tuple[int, int]  # least, most
_INT32 = (-(1 << 31), (1 << 31) - 1)


def _product(a: Range, b: Range) -> Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _remainder(a: Range, b: Range) -> Range | None:
    if b[0] <= 0:
        return None
    return a if 0 <= a[0] and a[1] < b[0] else (0, b[1] - 1)


def _quotient(a: Range, b: Range) -> Range | None:
    if b[0] <= 0:
        return None
    corners = [x // y for x in a for y in b]
    return min(corners), max(corners)


def _absolute(a: Range) -> Range:
    return (max(0, a[0], -a[1]), max(abs(a[0]), abs(a[1])))


# Of operands that are all whole numbers with known bounds.
_RULES: dict[str, Callable[..., Range | None]] = {
    "aten::add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "aten::sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "aten::rsub": lambda a, b: (b[0] - a[1], b[1] - a[0]),
    "aten::neg": lambda a: (-a[1], -a[0]),
    "aten::abs": _absolute,
    "aten::mul": _product,
    "aten::remainder": _remainder,
    "aten::floor_divide": _quotient,
    "aten::maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "aten::minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
}


def ranges(program: FxProgram, places: Mapping[int, Range]) -> dict[int, Range]:
    """Bounds of steps that are whole numbers, where they are known and fit into 32 bits (so that nothing wraps around).

    Args:
        places: bounds of argument steps.
    """
    found = dict(places)

    def operand(x: Any) -> Range | None:
        if isinstance(x, dict):
            return found.get(x.get("node", -1))
        return (x, x) if type(x) is int else None

    for number, step in enumerate(program.steps):
        if step[0] != "call":
            continue
        args = [operand(x) for x in step[3]]
        bounds: Range | None = None
        if step[1] == "aten::clamp" and args[0] is not None and all(x is None or type(x) is int for x in step[3][1:]):
            low, high = (*step[3][1:], None)[:2]
            bounds = args[0]
            if low is not None:
                bounds = max(bounds[0], low), max(bounds[1], low)
            if high is not None:
                bounds = min(bounds[0], high), min(bounds[1], high)
        elif step[1] in _RULES and not step[4] and None not in args:
            bounds = _RULES[step[1]](*args)
        if bounds is not None and _INT32[0] <= bounds[0] <= bounds[1] <= _INT32[1]:
            found[number] = bounds
    return found
