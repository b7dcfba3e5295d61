"""A walk over a score program's steps that prints them as code: what the printers for several languages share.

Every value's torch dtype is known (from running the operator on meta tensors), so operands are converted before and not
guessed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram, UnsupportedProgram

NAMES = ("score", "b", "h", "q", "k", "grad")
_AXES = (frozenset("qk"), frozenset[str](), frozenset[str](), frozenset("q"), frozenset("k"), frozenset("qk"))
NO_AXES: frozenset[str] = frozenset()
LOW_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Value:
    """An expression.

    Attributes:
        code: a name or a literal.
        meta: the value as a meta tensor, or a Python number.
        axes: which indices it may differ over inside a tile: a subset of "qk".
        constant: it is the number ``meta`` in every call.
    """

    code: str
    meta: Any
    axes: frozenset[str] = NO_AXES
    constant: bool = False


def wide(dtype: torch.dtype) -> torch.dtype:
    """What arithmetic of ``dtype`` is done in."""
    return torch.float32 if dtype in LOW_DTYPES else dtype


Cast = Callable[[Value, torch.dtype], str]


@dataclass(frozen=True)
class Call:
    """An operator's arguments and its result; ``cast`` is the language's conversion."""

    args: list[Any]  # Value, None, or what is no number
    kwargs: dict[str, Any]
    result: Tensor  # meta
    cast: Cast

    @property
    def dtype(self) -> torch.dtype:
        return self.result.dtype

    def arg(self, position: int, name: str = "", default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def operand(self, position: int) -> str:
        """In the dtype that arithmetic is done in."""
        return self.cast(self.args[position], wide(self.dtype))

    def number(self, position: int, name: str, default: Any) -> Any:
        value = self.arg(position, name, default)
        if isinstance(value, Value):
            if not value.constant:
                raise UnsupportedProgram(f"a {name} that is not a constant")
            return value.meta
        return value

    def compared(self) -> tuple[str, str]:
        """The first two operands in what they are compared in; of 16-bit floats, numbers and others are rounded first,
        as torch does it."""
        first, second = self.args[:2]
        dtype = torch.result_type(first.meta, second.meta)
        if dtype == torch.bool:
            dtype = torch.int32
        return self._as_compared(first, dtype), self._as_compared(second, dtype)

    def _as_compared(self, x: Value, dtype: torch.dtype) -> str:
        if dtype in LOW_DTYPES and not (isinstance(x.meta, Tensor) and x.meta.dtype == dtype):
            x = Value(self.cast(x, dtype), torch.empty((), dtype=dtype, device="meta"), x.axes)
        return self.cast(x, wide(dtype))


Rule = Callable[[Call], tuple[str, torch.dtype]]  # the expression, and its dtype


class ScoreWalk:
    """Lines of code.  A language gives its rules, conversions, literals, definitions and names of the arguments."""

    rules: Mapping[str, Rule]
    cast: Cast
    names: Sequence[str] = NAMES

    def __init__(self, program: FxProgram, arguments: int) -> None:
        self.program = program
        self.values: dict[int, Value] = {}
        singles = [n for n, step in enumerate(program.steps) if step[0] == "arg"][:arguments]
        for number, name, argument, axes in zip(singles, self.names, NAMES, _AXES, strict=False):
            dtype = torch.float32 if argument in ("score", "grad") else torch.int32
            self.values[number] = Value(name, torch.empty((1,) * 4, dtype=dtype, device="meta"), axes)

    def define(self, number: int, code: str, meta: Tensor, axes: frozenset[str]) -> None:
        """``code`` as the value of step ``number``."""
        raise NotImplementedError

    def literal(self, number: bool | int | float) -> str:
        raise NotImplementedError

    def decode(self, x: Any) -> Any:
        if isinstance(x, dict):
            if "node" in x:
                return self.value(x["node"])
            if "dtype" in x:
                return wide(getattr(torch, x["dtype"]))
            if "float" in x:
                return self._constant(float(x["float"]))
            return torch.device("meta")
        if isinstance(x, list):
            return [self.decode(y) for y in x]
        return self._constant(x) if isinstance(x, (int, float)) else x

    def value(self, number: int) -> Value:
        return self.values[number]

    def _constant(self, x: bool | int | float) -> Value:
        return Value(self.literal(x), x, constant=True)

    def call(self, number: int) -> None:
        """The step ``number``, an operator's."""
        step = self.program.steps[number]
        name = step[1]
        if step[0] != "call" or name not in self.rules:
            raise UnsupportedProgram(f"{name} in a score mod")
        args = self.decode(step[3])
        kwargs = {k: self.decode(v) for k, v in step[4].items() if not (isinstance(v, dict) and "omit" in v)}
        namespace, _, short = name.partition("::")
        op = getattr(getattr(getattr(torch.ops, namespace), short), step[2])
        meta = op(*_metas(args), **{k: _metas(v) for k, v in kwargs.items()})
        axes = NO_AXES.union(*(x.axes for x in args if isinstance(x, Value)))
        code, dtype = self.rules[name](Call(args, kwargs, meta, type(self).cast))
        self.define(number, code, torch.empty_like(meta, dtype=dtype), axes)
        if dtype != meta.dtype:
            self.define(number, type(self).cast(self.values[number], meta.dtype), meta, axes)


def _metas(x: Any) -> Any:
    if isinstance(x, Value):
        return x.meta
    return [_metas(y) for y in x] if isinstance(x, list) else x


def kernel_inputs(
    program: FxProgram, steps: tuple[int, ...], arguments: int, captures: Sequence[Any], device: torch.device
) -> list[Any]:
    """The values of ``steps`` (inputs of the program's split), computed from the captures."""
    if not steps:
        return []
    known = [n for n, step in enumerate(program.steps) if step[0] == "arg"]
    before = program.recall(("before", steps), lambda: program.part(known, steps))
    return before.run([*(None,) * arguments, *captures], device, torch.float32)


def kind_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What generated code depends on."""
    return tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else type(x) for x in inputs)
