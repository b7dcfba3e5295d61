"""Masks as formulas: and, or, not over atoms that compare a value of the query with a value of the key.

Negation is pushed to the atoms when it is applied, so a formula is a tree of And and Or over atoms.

Shape legend: B batch, H query heads (1 where it does not matter), Q query rows, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from inductor_lowering.key_values import KeyValues


class Formula:
    """Base of all formulas."""


@dataclass(frozen=True)
class Constant(Formula):
    value: bool


@dataclass(frozen=True, eq=False)
class RowTerm(Formula):
    """Depends on the query, batch and head alone: bool ``[B, H, Q or 1, 1]``."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Compare(Formula):
    """``keys <op> rows`` with op one of "le", "ge", "eq"; whole numbers.

    rows: int64 ``[B, H, Q or 1, 1]``; keys: int64 ``[B, H, 1, K]``.
    """

    op: str
    keys: KeyValues
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Outside(Formula):
    """The complement of an "eq" comparison."""

    inside: Compare


@dataclass(frozen=True)
class Opaque(Formula):
    """A bool step of the program (negated or not) that no rule splits into a value of the query and one of the key."""

    step: int
    negated: bool
    reason: str


@dataclass(frozen=True)
class And(Formula):
    parts: tuple[Formula, ...]


@dataclass(frozen=True)
class Or(Formula):
    parts: tuple[Formula, ...]


def all_of(parts: Sequence[Formula]) -> Formula:
    """The conjunction, without parts that change nothing."""
    flat: list[Formula] = []
    for part in parts:
        if part == Constant(False):
            return part
        if part != Constant(True):
            flat.extend(part.parts if isinstance(part, And) else (part,))
    return flat[0] if len(flat) == 1 else And(tuple(flat)) if flat else Constant(True)


def any_of(parts: Sequence[Formula]) -> Formula:
    """The disjunction, without parts that change nothing."""
    flat: list[Formula] = []
    for part in parts:
        if part == Constant(True):
            return part
        if part != Constant(False):
            flat.extend(part.parts if isinstance(part, Or) else (part,))
    return flat[0] if len(flat) == 1 else Or(tuple(flat)) if flat else Constant(False)


def negation(formula: Formula) -> Formula:
    if isinstance(formula, Constant):
        return Constant(not formula.value)
    if isinstance(formula, RowTerm):
        return RowTerm(~formula.values)
    if isinstance(formula, Compare):
        if formula.op == "eq":
            return Outside(formula)
        # Whole numbers: not (keys <= rows) is keys >= rows + 1.
        step = 1 if formula.op == "le" else -1
        return Compare("ge" if formula.op == "le" else "le", formula.keys, formula.rows + step)
    if isinstance(formula, Outside):
        return formula.inside
    if isinstance(formula, Opaque):
        return Opaque(formula.step, not formula.negated, formula.reason)
    if isinstance(formula, And):
        return any_of([negation(part) for part in formula.parts])
    if isinstance(formula, Or):
        return all_of([negation(part) for part in formula.parts])
    raise TypeError(f"formula: {type(formula).__name__} has no negation")
