"""A score mod's graph made ready to be traced into a kernel.

What does not depend on a score or its place is computed by torch before the launch, and becomes one more table; the
rest are steps that :mod:`magi_flex.kernels.fa4_walk` takes on a kernel's values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram, UnsupportedProgram
from magi_flex.kernels.fa4_walk import Examples, Lane, Lanes, Walk

_TABLE_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8),
)


@dataclass(frozen=True)
class TracedScore:
    """A score mod, or its gradient, ready to be traced.

    Attributes:
        steps: what depends on the place of a score: FxProgram steps, and ["table", n], ["number", x].
        result: the step to return; -1: zero.
        lead: how many arguments come before the captures.
        tables: tensors that are read.
        key: names everything that the traced code depends on.
    """

    steps: tuple[Any, ...]
    result: int
    lead: int
    tables: tuple[Tensor, ...]
    key: str

    def __call__(self, lanes: Lanes, arguments: Sequence[Lane], tables: Sequence[Any]) -> Lane:
        """The result on a kernel's values; ``arguments``: those before the captures (score, b, h, q, k, d result)."""
        if self.result < 0:
            return lanes.constant(0.0, torch.float32, arguments[0])
        walk = Walk(lanes, arguments, tables, [(x.dtype, x.dim()) for x in self.tables])
        result = walk.run(self.steps, self.result)
        return lanes.cast(result, torch.float32)


def trace_forward(program: FxProgram, captures: Sequence[Any]) -> TracedScore:
    """(score, b, h, q, k) -> score."""
    return _prepare(program, captures, 5)


def trace_backward(joint: FxProgram, captures: Sequence[Any]) -> TracedScore:
    """(score, b, h, q, k, d result) -> d score."""
    return _prepare(joint, captures, 6)


def _prepare(program: FxProgram, captures: Sequence[Any], lead: int) -> TracedScore:
    """Fold what does not depend on the leading arguments; raises UnsupportedProgram for what cannot be traced."""
    returned = program.steps[-1][1]
    returned = returned[0] if isinstance(returned, list) else returned
    if returned is None:
        return TracedScore((), -1, lead, (), "zero")
    if not isinstance(returned, dict) or "node" not in returned:
        raise UnsupportedProgram("the result is no tensor")
    numbers = _Fold(program, captures, lead)
    steps, result = numbers.fold(returned["node"])
    tables = tuple(numbers.tables)
    for x in tables:
        if x.dtype not in _TABLE_DTYPES:
            raise UnsupportedProgram(f"a table of {x.dtype}")
    content = json.dumps([steps, result, lead, [(str(x.dtype), x.dim()) for x in tables]])
    traced = TracedScore(tuple(steps), result, lead, tables, hashlib.sha256(content.encode()).hexdigest())
    traced(Examples(), [Examples.of(torch.float32), *[Examples.of(torch.int32)] * 4, *_grad(lead)], tables)
    return traced


def _grad(lead: int) -> list[Tensor]:
    return [Examples.of(torch.float32)] * (lead - 5)


class _Fold:
    """Runs by torch whatever no leading argument reaches, and renumbers the rest."""

    def __init__(self, program: FxProgram, captures: Sequence[Any], lead: int):
        self.program, self.captures, self.lead = program, captures, lead
        self.device = next((x.device for x in captures if isinstance(x, Tensor)), torch.device("cpu"))
        self.arg_number = {at: n for n, at in enumerate(i for i, s in enumerate(program.steps) if s[0] == "arg")}
        self.tables: list[Tensor] = []
        self.steps: list[Any] = []
        self.new_number: dict[int, int] = {}

    def fold(self, result: int) -> tuple[list[Any], int]:
        needed = self._needed(result)
        placed: set[int] = set()  # depend on the leading arguments
        for at in sorted(needed):
            step = self.program.steps[at]
            if self.arg_number.get(at, self.lead) < self.lead or any(n in placed for n in _references(step)):
                placed.add(at)
        for at in sorted(needed):
            if at in placed:
                step = self.program.steps[at]
                entry = ["arg", self.arg_number[at]] if step[0] == "arg" else self._renumbered(step)
                self._append(at, entry)
        if result not in self.new_number:
            self._constant(result)
        return self.steps, self.new_number[result]

    def _needed(self, result: int) -> set[int]:
        needed = {result}
        for at in range(result, -1, -1):
            if at in needed:
                needed.update(_references(self.program.steps[at]))
        return needed

    def _append(self, at: int, entry: Any) -> None:
        self.steps.append(entry)
        self.new_number[at] = len(self.steps) - 1

    def _renumbered(self, x: Any) -> Any:
        if isinstance(x, dict) and "node" in x:
            if x["node"] not in self.new_number:
                self._constant(x["node"])
            return {"node": self.new_number[x["node"]]}
        return [self._renumbered(y) for y in x] if isinstance(x, list) else x

    def _constant(self, at: int) -> None:
        args = [*[torch.zeros((), device=self.device)] * self.lead, *self.captures]
        value = self.program.ending_at(at).run(args, self.device, torch.float32)
        if not isinstance(value, Tensor):
            self._append(at, ["number", value])
        elif at in self.arg_number or value.dim() or value.device.type != "cpu":
            is_bool = value.dtype == torch.bool
            self.tables.append(value.detach().to(torch.uint8) if is_bool else value.detach())
            self._append(at, ["table", len(self.tables) - 1, is_bool])
        else:  # made inside the graph, once for all places
            self._append(at, ["number", value.item()])


def _references(x: Any) -> list[int]:
    if isinstance(x, dict):
        return [x["node"]] if "node" in x else [n for y in x.values() for n in _references(y)]
    return [n for y in x for n in _references(y)] if isinstance(x, (list, tuple)) else []
