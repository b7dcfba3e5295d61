"""Formulas on a part of the grid as packed bits: 32 keys in each operation.

What compares with a monotone sequence of the keys is an interval, which costs a few operations a word.  Other parts are
evaluated pair by pair, once for each run of rows that share their operands.

Shape legend: B batch, H query heads (1 where it does not matter), Q query rows (a part of them, or 1), K keys (a part),
W words of 32 keys, U runs of rows, R intervals of a row.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from inductor_lowering.formula import And, Compare, Constant, Formula, Opaque, Or, Outside, RowTerm
from inductor_lowering.key_values import KeyValues
from inductor_lowering.mask_program import MaskProgram
from inductor_lowering.solve import bounds_in_monotone, constant_runs
from magi_flex.bit_tiles import pack_bits
from magi_flex.intervals import RowIntervals

Range = tuple[int, int]


class WordEvaluator:
    """Evaluates formulas of one program."""

    def __init__(self, program: MaskProgram) -> None:
        self.program = program

    def evaluate(self, formula: Formula, rows: Range, keys: Range) -> Tensor:
        """Bits of rows [begin, end) and keys [begin, end): int32, broadcasts to ``[B, H, Q, W]``.

        Bits past the last key, which fill up the last word, are undefined.
        """
        if isinstance(formula, Constant):
            return torch.full((1, 1, 1, 1), -1 if formula.value else 0, dtype=torch.int32, device=self.program.device)
        if isinstance(formula, RowTerm):
            return -self._rows(formula.values, rows).to(torch.int32)[..., None]
        if isinstance(formula, Compare):
            return self._compare(formula, rows, keys)
        if isinstance(formula, Outside):
            return ~self._compare(formula.inside, rows, keys)
        if isinstance(formula, (And, Or)):
            combine = operator.and_ if isinstance(formula, And) else operator.or_
            return functools.reduce(combine, (self.evaluate(part, rows, keys) for part in formula.parts))
        if isinstance(formula, Opaque):
            words = self._opaque(formula.step, rows, keys)
            return ~words if formula.negated else words
        raise TypeError(f"formula: {type(formula).__name__} cannot be evaluated")

    def _rows(self, values_BHQ1: Tensor, rows: Range) -> Tensor:
        values_BHQ = values_BHQ1[..., 0]
        return values_BHQ[:, :, slice(*rows)] if values_BHQ.shape[2] == self.program.sizes["q"] else values_BHQ

    def _compare(self, formula: Compare, rows: Range, keys: Range) -> Tensor:
        rows_BHQ = self._rows(formula.rows, rows)
        if formula.keys.is_ascending or formula.keys.is_descending:
            begin, end = bounds_in_monotone(formula.keys, formula.op, rows_BHQ)
            return interval_words(begin, end, keys)
        return self._compare_pairs(formula.keys, formula.op, rows_BHQ, keys)

    def _compare_pairs(self, values: KeyValues, op: str, rows_BHQ: Tensor, keys: Range) -> Tensor:
        keys_BH1K = values.values_GK.view(*values.shape_BH, 1, values.length)[..., slice(*keys)]
        first_U, number_Q = constant_runs([rows_BHQ], 2, rows_BHQ.shape[2], rows_BHQ.device)
        rows_BHU1 = rows_BHQ[:, :, first_U, None]
        compare = {"le": torch.le, "ge": torch.ge, "eq": torch.eq}[op]
        return pack_keys(compare(keys_BH1K, rows_BHU1))[:, :, number_Q]

    def _opaque(self, step: int, rows: Range, keys: Range) -> Tensor:
        program = self.program
        operands = program.axis_operands(step)
        if operands is None:
            tile = program.tile_value(step, rows, keys)
            return pack_keys(tile.expand(-1, -1, -1, keys[1] - keys[0]))
        known = {}
        for i in operands:
            value = program.axis_value(i)
            if "k" in program.steps[i].depends:
                known[i] = value[..., slice(*keys)]
            else:
                known[i] = self._rows(value, rows)[..., None]
        by_row = [known[i] for i in operands if "k" not in program.steps[i].depends]
        first_U, number_Q = constant_runs(by_row, 2, rows[1] - rows[0], program.device)
        known = {i: x[:, :, first_U] if x.shape[2] == rows[1] - rows[0] else x for i, x in known.items()}
        tile = program.value_from(step, known).expand(-1, -1, len(first_U), keys[1] - keys[0])
        return pack_keys(tile)[:, :, number_Q]


def pack_keys(mask_BHQK: Tensor) -> Tensor:
    """Bool ``[..., K]`` to words ``[..., W]``; the last word is filled up with zeros."""
    missing = -mask_BHQK.shape[-1] % 32
    return pack_bits(torch.nn.functional.pad(mask_BHQK, (0, missing)) if missing else mask_BHQK)


def interval_words(begin_BHQ: Tensor, end_BHQ: Tensor, keys: Range) -> Tensor:
    """Bits of the keys in [begin, end) of each row, for the words of keys [keys[0], keys[1]): ``[B, H, Q, W]``."""
    words = -(-(keys[1] - keys[0]) // 32)
    base_W = torch.arange(keys[0], keys[0] + 32 * words, 32, dtype=torch.int32, device=begin_BHQ.device)
    not_below_begin, not_below_end = (_bits_from(x.to(torch.int32)[..., None] - base_W) for x in (begin_BHQ, end_BHQ))
    return not_below_begin & ~not_below_end


def _bits_from(first: Tensor) -> Tensor:
    """Words with the bits ``first``, ``first + 1``, ... set (all for negative numbers, none from 32 on)."""
    return (-1 << first.clamp(0, 31)).masked_fill_(first >= 32, 0)


def intervals_words(intervals: RowIntervals, keys: Range) -> Tensor:
    """Bits of row intervals on keys [begin, end): ``[B, H, Q, W]``."""
    slots = (
        interval_words(intervals.starts[:, :, r], intervals.ends[:, :, r], keys) for r in range(intervals.max_intervals)
    )
    return functools.reduce(operator.or_, slots)
