"""Recognising the canonical mask_mod in a program: its captures are the plan already.

Two programs are the same mask if they compute the same expression, whatever the order of their steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_lowering.capture import trace_mask_mod
from magi_flex.bit_tiles import BitTiles
from magi_flex.canonical_mask import CanonicalMaskMod, without_padding
from magi_flex.fx_program import FxProgram
from magi_flex.intervals import RowIntervals
from magi_flex.mask_plan import MaskPlan, MaskPlanBuilder

_IGNORED_OPTIONS = {"layout", "device", "pin_memory"}
# Which of the two is recorded depends on the dispatcher's state.
_SAME_OPERATION = {"aten::__and__": "aten::bitwise_and", "aten::__or__": "aten::bitwise_or"}


@dataclass(frozen=True)
class CanonicalCaptures:
    """Which captures (positions among the program's captures) are the plan's tensors."""

    starts: int
    ends: int
    row_ptr: int | None = None
    cols: int | None = None
    slot: int | None = None
    bits: int | None = None

    def plan(self, captures: Sequence[Any], kv_len: int) -> MaskPlan:
        """The plan that these captures are."""
        intervals = RowIntervals(captures[self.starts], captures[self.ends], kv_len)
        if self.row_ptr is None or self.cols is None or self.slot is None or self.bits is None:
            return MaskPlan(intervals)
        q_tile, kv_tile = MaskPlanBuilder.q_tile, MaskPlanBuilder.kv_tile
        tensors = (captures[i] for i in (self.row_ptr, self.cols, self.slot, self.bits))
        return MaskPlan(intervals, without_padding(BitTiles(q_tile, kv_tile, *tensors)))


def find_canonical(program: FxProgram, captures: Sequence[Any]) -> CanonicalCaptures | None:
    """The roles of ``captures`` if ``program`` is a CanonicalMaskMod, else None.

    Only shapes of captures are looked at, so fake tensors will do; other captures that the program does not use (sizes
    in graphs with dynamic shapes) do not matter.
    """
    computed, used = expression(program)
    if len(used) not in (2, 6) or not all(isinstance(captures[i], Tensor) for i in used):
        return None
    found = form(computed, captures[used[0]], captures[used[1]], len(used) == 6)
    return CanonicalCaptures(*used) if found is not None and computed == _template(*found) else None


def form(computed: Sequence[Any], starts: Tensor, ends: Tensor, bits: bool) -> tuple[bool, bool, int, int] | None:
    """(one batch, one head, R, steps of the search for a bit tile or -1) if starts and ends can be a plan's."""
    if starts.dim() != 4 or starts.shape != ends.shape or starts.dtype != torch.int32 or ends.dtype != torch.int32:
        return None
    # Each interval is one such comparison; R itself may be a symbol, in graphs with dynamic shapes.
    slots = sum(entry[0] == "aten::ge" for entry in computed)
    if not slots or (isinstance(starts.shape[2], int) and starts.shape[2] != slots):
        return None
    # Each step of the search for a bit tile is two selections, the last one a single one.
    selections = sum(entry[0] == "aten::where" for entry in computed)
    # A shared dimension has size 1 also in graphs with dynamic shapes; symbolic sizes must not be compared here.
    one_batch, one_head = (isinstance(size, int) and size == 1 for size in starts.shape[:2])
    return one_batch, one_head, slots, (selections + 1) // 2 if bits else -1


@functools.lru_cache(maxsize=64)
def _template(one_batch: bool, one_head: bool, slots: int, searches: int) -> tuple[Any, ...]:
    """The expression of a CanonicalMaskMod; ``searches`` is -1 without bit tiles."""
    return expression(trace_mask_mod(example_of(one_batch, one_head, slots, searches))[0])[0]


def example_of(one_batch: bool, one_head: bool, slots: int, searches: int) -> CanonicalMaskMod:
    """A CanonicalMaskMod of this :func:`form`."""
    starts = torch.zeros(1 if one_batch else 2, 1 if one_head else 2, slots, 1, dtype=torch.int32)
    bits = None
    if searches >= 0:
        q_tile, kv_tile = MaskPlanBuilder.q_tile, MaskPlanBuilder.kv_tile
        row_ptr, cols, slot = (torch.zeros(size, dtype=torch.int32) for size in ((*starts.shape[:2], 2), 1, 1))
        bits = BitTiles(q_tile, kv_tile, row_ptr, cols, slot, torch.zeros(1, q_tile, kv_tile // 32, dtype=torch.int32))
    mask_mod = CanonicalMaskMod(starts, torch.zeros_like(starts), 1, bits)
    mask_mod.search_steps = max(0, searches)
    return mask_mod


def expression(program: FxProgram) -> tuple[tuple[Any, ...], list[int]]:
    """The result as a list of distinct operations, operands first, and the captures in the order of their first use."""
    return program.recall("expression", lambda: _expression(program))


def _expression(program: FxProgram) -> tuple[tuple[Any, ...], list[int]]:
    argument_of = {at: n for n, at in enumerate(i for i, step in enumerate(program.steps) if step[0] == "arg")}
    entries: dict[Any, int] = {}
    used: list[int] = []
    seen: dict[int, int] = {}

    def visit(at: int) -> int:
        if at in seen:
            return seen[at]
        step = program.steps[at]
        entry = _argument(argument_of[at], used) if at in argument_of else _operation(step, operand)
        seen[at] = entries.setdefault(entry, len(entries))
        return seen[at]

    def operand(x: Any) -> Any:
        if isinstance(x, dict):
            return ("entry", visit(x["node"])) if "node" in x else tuple(sorted(x.items()))
        return tuple(operand(y) for y in x) if isinstance(x, list) else x

    result = operand(program.steps[-1][1])
    return (*entries, ("return", result[0] if isinstance(result[0], tuple) else result)), used


def _argument(number: int, used: list[int]) -> tuple[Any, ...]:
    if number < 4:
        return ("index", number)
    if number - 4 not in used:
        used.append(number - 4)
    return ("capture", used.index(number - 4))


def _operation(step: Any, operand: Any) -> tuple[Any, ...]:
    if step[0] != "call":
        return tuple(operand(x) for x in step)
    _, name, overload, args, kwargs = step
    options = tuple((k, operand(v)) for k, v in sorted(kwargs.items()) if k not in _IGNORED_OPTIONS)
    operands = operand(args)
    name, overload = _SAME_OPERATION.get(name, name), overload or "default"
    if name == "aten::floor_divide":  # compiled graphs have the decomposed form of these two
        name, overload, options = "aten::div", "Tensor_mode", (("rounding_mode", "floor"),)
    elif name == "aten::clamp" and len(operands) == 2:
        name = "aten::clamp_min"
    return (name, overload, operands, options)
