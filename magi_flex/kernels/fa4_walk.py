"""The steps of a score mod's graph, taken one by one on the values of a kernel that is being traced.

CuTe DSL traces Python functions into kernels, so a program needs no source text: each step is an operation on the
values of a few scores ("lanes").  Floating point values are float32, as FxProgram.run keeps them for kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from magi_flex.fx_program import PYTHON_FUNCTIONS, UnsupportedProgram

Lane = Any  # a kernel's value of one dtype for a few scores
_LOW = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.int32, torch.int64, torch.bool)


class Lanes(Protocol):
    """Operations on a kernel's values.  Operands of one call have one dtype, except where it says otherwise."""

    def unary(self, name: str, x: Lane) -> Lane:
        """One of FLOAT_UNARY (float32), or "neg", "abs" (numbers), "not" (bools; flips all bits of whole numbers)."""

    def binary(self, name: str, x: Lane, y: Lane) -> Lane:
        """One of BINARY, or of COMPARE, which give bools.

        "div" and "pow" are for float32, "floordiv" (rounds down) and "mod" (has the sign of ``y``) for whole numbers,
        "and", "or", "xor" for both bools and whole numbers, "max" and "min" of a NaN are NaN.
        """

    def where(self, condition: Lane, x: Lane, y: Lane) -> Lane: ...

    def cast(self, x: Lane, dtype: torch.dtype) -> Lane:
        """A conversion as torch makes it (to whole numbers: towards zero; to bool: is not zero), from another dtype."""

    def constant(self, value: float | int | bool, dtype: torch.dtype, like: Lane) -> Lane:
        """The number, for as many scores as ``like`` (of any dtype) has."""

    def load(self, table: Any, indices: Sequence[Lane], dtype: torch.dtype) -> Lane:
        """``table[indices]``, converted to ``dtype``; whole numbers of either size.

        Indices below zero count from the end; further outside anything may be read that belongs to the table, since
        only pairs that do not attend get there.
        """


FLOAT_UNARY = frozenset(
    {"exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "floor", "ceil", "trunc"}
)
BINARY = frozenset({"add", "sub", "mul", "div", "floordiv", "mod", "max", "min", "and", "or", "xor", "pow"})
COMPARE = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

# aten name -> operation; operands and results as the op's own type promotion says.
_UNARY = {name: name for name in FLOAT_UNARY} | {"neg": "neg", "abs": "abs", "bitwise_not": "not"}
_BINARY = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "maximum": "max",
    "minimum": "min",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
    "remainder": "mod",
    "floor_divide": "floordiv",
}
_COMPARE = {name: name for name in COMPARE}
_SAME = {"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "view", "expand", "squeeze"}
_CASTS = {"_to_copy", "convert_element_type"}
_FILLED = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_OTHER = {
    *("where", "div", "rsub", "pow", "reciprocal", "square", "sigmoid", "relu", "sign", "clamp", "clamp_min"),
    *("clamp_max", "logical_and", "logical_or", "logical_not", "logical_xor", "index", "full_like", "new_full"),
    *("full", "scalar_tensor", "tanh_backward", "sigmoid_backward", "threshold_backward", "masked_fill"),
}
_KNOWN = {*_UNARY, *_BINARY, *_COMPARE, *_SAME, *_CASTS, *_FILLED, *_OTHER}


def unknown_operators(operators: frozenset[str]) -> list[str]:
    """Those of a score mod's operators (FxProgram.operators) that no kernel can be made of."""
    fine = {"python", "literal", "sum", "flex_lib::zeros_and_scatter"}  # the last two are gradients of captures
    return sorted(op for op in operators - fine if op.rpartition("::")[2] not in _KNOWN)


class _Table:
    """A table that is not read yet; bools are kept as bytes."""

    def __init__(self, number: int, is_bool: bool, dtype: torch.dtype, dims: int):
        self.number, self.is_bool, self.dtype, self.dims = number, is_bool, dtype, dims


class _Value:
    """A lane value and its dtype; a plain number has none, as in torch's type promotion."""

    def __init__(self, lane: Any, dtype: torch.dtype | None):
        self.lane, self.dtype = lane, dtype


class Walk:
    """One run over the steps."""

    def __init__(
        self, lanes: Lanes, arguments: Sequence[Lane], tables: Sequence[Any], kinds: Sequence[tuple[torch.dtype, int]]
    ):
        self.lanes, self.arguments, self.tables, self.kinds = lanes, arguments, tables, kinds
        self.values: list[Any] = []

    def run(self, steps: Sequence[Any], result: int) -> Lane:
        for step in steps:
            self.values.append(self._step(step))
        value = self.values[result]
        return self._as(self._read(value), torch.float32)

    def _step(self, step: Any) -> Any:
        kind = step[0]
        if kind == "arg":
            number = step[1]
            is_index = 0 < number < 5
            return _Value(self.arguments[number], torch.int32 if is_index else torch.float32)
        if kind == "number":
            return _Value(step[1], None)
        if kind == "table":
            return _Table(step[1], step[2], *self.kinds[step[1]])
        if kind == "python":
            operands = [self._decode(x) for x in step[2]]
            if any(isinstance(x, _Value) and x.dtype is not None for x in operands):
                raise UnsupportedProgram(f"{step[1]} of sizes that depend on a score's place")
            return _Value(PYTHON_FUNCTIONS[step[1]](*(x.lane if isinstance(x, _Value) else x for x in operands)), None)
        if kind != "call":
            raise UnsupportedProgram(f"a step of kind {kind!r} that depends on a score's place")
        return self._call(step[1].rpartition("::")[2], [self._decode(x) for x in step[3]], step[4])

    def _decode(self, x: Any) -> Any:
        if isinstance(x, dict):
            if "node" in x:
                return self.values[x["node"]]
            if "float" in x:
                return float(x["float"])
            if "dtype" in x:
                return getattr(torch, x["dtype"])
            return None
        return [self._decode(y) for y in x] if isinstance(x, list) else x

    # ---- operands -----------------------------------------------------------------------------------------------

    def _read(self, x: Any) -> _Value:
        """An operand as a value; a table of one number is loaded."""
        if isinstance(x, _Table):
            if x.dims:
                raise UnsupportedProgram(f"a captured tensor of {x.dims} dimensions that is used as a whole")
            return self._load(x, [])
        return x if isinstance(x, _Value) else _Value(x, None)

    def _load(self, table: _Table, indices: list[Lane]) -> _Value:
        dtype = torch.float32 if table.dtype.is_floating_point else table.dtype
        dtype = dtype if dtype in _DTYPES else torch.int32
        zero = [self.lanes.constant(0, torch.int32, self.arguments[0])] if not indices else indices
        lane = self.lanes.load(self.tables[table.number], zero, dtype)
        return _Value(self.lanes.cast(lane, torch.bool), torch.bool) if table.is_bool else _Value(lane, dtype)

    def _as(self, x: _Value, dtype: torch.dtype) -> Lane:
        if x.dtype is None:
            value = x.lane
            number = bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)
            return self.lanes.constant(number, dtype, self.arguments[0])
        return x.lane if x.dtype == dtype else self.lanes.cast(x.lane, dtype)

    def _promoted(self, *operands: Any) -> tuple[list[Lane], torch.dtype]:
        values = [self._read(x) for x in operands]
        examples = [x.lane if x.dtype is None else torch.empty((), dtype=x.dtype) for x in values]
        dtype = examples[0].dtype if isinstance(examples[0], Tensor) else torch.result_type(examples[0], examples[0])
        for example in examples[1:]:
            dtype = torch.result_type(torch.empty((), dtype=dtype) if values[0].dtype else examples[0], example)
        if all(x.dtype is None for x in values):
            raise UnsupportedProgram("an operation on plain numbers")
        dtype = torch.float32 if dtype in _LOW else dtype
        if dtype not in _DTYPES:
            raise UnsupportedProgram(f"arithmetic in {dtype}")
        return [self._as(x, dtype) for x in values], dtype

    def _floats(self, *operands: Any) -> list[Lane]:
        return [self._as(self._read(x), torch.float32) for x in operands]

    def _bools(self, *operands: Any) -> list[Lane]:
        return [self._as(self._read(x), torch.bool) for x in operands]

    def _float(self, lane: Lane) -> _Value:
        return _Value(lane, torch.float32)

    def _number(self, value: float) -> Lane:
        return self.lanes.constant(value, torch.float32, self.arguments[0])

    # ---- operators ------------------------------------------------------------------------------------------------

    def _call(self, name: str, args: list[Any], options: dict[str, Any]) -> _Value:
        handler: Callable[..., _Value] | None = getattr(self, f"_op_{name}", None)
        if name not in _KNOWN or (handler is None and name in _OTHER):
            raise UnsupportedProgram(name)
        if handler is not None:
            return handler(*args, **{k: self._decode(v) for k, v in options.items() if not _is_layout(v)})
        if name in _SAME:
            return self._read(args[0])
        if name in _CASTS:
            return self._converted(args, options)
        if name in _FILLED:
            return self._filled(args[0], _FILLED[name], options)
        if name in _COMPARE:
            operands, dtype = self._promoted(*args[:2])
            if dtype == torch.bool and name not in ("eq", "ne"):
                raise UnsupportedProgram(f"{name} of bools")
            return _Value(self.lanes.binary(name, *operands), torch.bool)
        if name in _BINARY:
            return self._binary(_BINARY[name], args, options)
        operation = _UNARY[name]
        if operation in FLOAT_UNARY and not (operation in ("floor", "ceil", "trunc") and self._is_whole(args[0])):
            return self._float(self.lanes.unary(operation, *self._floats(args[0])))
        if operation in FLOAT_UNARY:
            return self._read(args[0])
        (lane,), dtype = self._promoted(args[0])
        if dtype == torch.bool and operation != "not":
            raise UnsupportedProgram(f"{operation} of a bool")
        return _Value(self.lanes.unary(operation, lane), dtype)

    def _is_whole(self, x: Any) -> bool:
        dtype = self._read(x).dtype
        return dtype is not None and not dtype.is_floating_point

    def _binary(self, name: str, args: list[Any], options: dict[str, Any]) -> _Value:
        first, second = args[:2]
        alpha = self._decode(options.get("alpha", 1))
        if alpha != 1:
            second = self._binary("mul", [second, alpha], {})
        operands, dtype = self._promoted(first, second)
        if dtype == torch.bool and name in ("add", "sub", "mul", "mod", "floordiv"):
            if name not in ("add", "mul"):
                raise UnsupportedProgram(f"{name} of bools")
            name = "or" if name == "add" else "and"
        if dtype == torch.float32 and name in ("mod", "floordiv"):
            raise UnsupportedProgram(f"{name} of floating point numbers")
        return _Value(self.lanes.binary(name, *operands), dtype)

    def _converted(self, args: list[Any], options: dict[str, Any]) -> _Value:
        dtype = args[1] if len(args) > 1 else self._decode(options.get("dtype"))
        value = self._read(args[0])
        if dtype is None or value.dtype is None:
            return value
        dtype = torch.float32 if dtype in _LOW else dtype
        if dtype not in _DTYPES:
            raise UnsupportedProgram(f"a conversion to {dtype}")
        return _Value(self._as(value, dtype), dtype)

    def _filled(self, like: Any, value: Any, options: dict[str, Any]) -> _Value:
        dtype = self._decode(options.get("dtype")) or self._read(like).dtype or torch.float32
        dtype = torch.float32 if dtype in _LOW else dtype
        if dtype not in _DTYPES:
            raise UnsupportedProgram(f"numbers of {dtype}")
        return _Value(self._as(_Value(value, None), dtype), dtype)

    def _op_full_like(self, like: Any, value: Any, **options: Any) -> _Value:
        dtype = options.get("dtype") or self._read(like).dtype
        return self._filled(like, value, {} if dtype is None else {"dtype": {"dtype": str(dtype)[6:]}})

    def _op_new_full(self, like: Any, size: Any, value: Any, **options: Any) -> _Value:
        return self._op_full_like(like, value, **options)

    def _op_index(self, table: Any, indices: list[Any]) -> _Value:
        if not isinstance(table, _Table) or len(indices) != table.dims:
            raise UnsupportedProgram(
                "an index into something else than a captured tensor, or not in all its dimensions"
            )
        lanes = []
        for index in indices:
            value = self._read(index)
            if value.dtype == torch.bool or (value.dtype is not None and value.dtype.is_floating_point):
                raise UnsupportedProgram(f"an index of {value.dtype}")
            lanes.append(self._as(value, value.dtype or torch.int32))
        return self._load(table, lanes)

    def _op_where(self, condition: Any, x: Any, y: Any) -> _Value:
        operands, dtype = self._promoted(x, y)
        (chosen,) = self._bools(condition)
        return _Value(self.lanes.where(chosen, operands[0], operands[1]), dtype)

    def _op_masked_fill(self, x: Any, condition: Any, value: Any) -> _Value:
        (lane,), dtype = self._promoted(x)
        return _Value(self.lanes.where(*self._bools(condition), self._as(self._read(value), dtype), lane), dtype)

    def _op_div(self, x: Any, y: Any, rounding_mode: str | None = None) -> _Value:
        if rounding_mode == "floor":
            return self._binary("floordiv", [x, y], {})
        quotient = self.lanes.binary("div", *self._floats(x, y))
        if rounding_mode == "trunc":
            if self._is_whole(x) or self._is_whole(y):
                raise UnsupportedProgram("a division of whole numbers that rounds towards zero")
            quotient = self.lanes.unary("trunc", quotient)
        return self._float(quotient)

    def _op_rsub(self, x: Any, y: Any, alpha: Any = 1) -> _Value:
        return self._binary("sub", [y, x if alpha == 1 else self._binary("mul", [x, alpha], {})], {})

    def _op_pow(self, x: Any, y: Any) -> _Value:
        exponent = self._read(y)
        if exponent.dtype is None and exponent.lane in (2, 3):
            square = self._binary("mul", [x, x], {})
            return square if exponent.lane == 2 else self._binary("mul", [square, x], {})
        if exponent.dtype is None and exponent.lane in (0.5, -0.5):
            return self._float(self.lanes.unary("sqrt" if exponent.lane > 0 else "rsqrt", *self._floats(x)))
        if self._is_whole(x) and (exponent.dtype is None or not exponent.dtype.is_floating_point):
            raise UnsupportedProgram("a power of a whole number")
        return self._float(self.lanes.binary("pow", *self._floats(x, y)))

    def _op_reciprocal(self, x: Any) -> _Value:
        return self._float(self.lanes.binary("div", self._number(1.0), *self._floats(x)))

    def _op_square(self, x: Any) -> _Value:
        return self._binary("mul", [x, x], {})

    def _op_sigmoid(self, x: Any) -> _Value:
        (lane,) = self._floats(x)
        one = self._number(1.0)
        decay = self.lanes.unary("exp", self.lanes.unary("neg", lane))
        return self._float(self.lanes.binary("div", one, self.lanes.binary("add", one, decay)))

    def _op_relu(self, x: Any) -> _Value:
        return self._binary("max", [x, 0], {})

    def _op_sign(self, x: Any) -> _Value:
        (lane,), dtype = self._promoted(x)
        zero, one, minus = (self._as(_Value(n, None), dtype) for n in (0, 1, -1))
        above = self.lanes.where(self.lanes.binary("gt", lane, zero), one, zero)
        return _Value(self.lanes.where(self.lanes.binary("lt", lane, zero), minus, above), dtype)

    def _op_clamp(self, x: Any, min: Any = None, max: Any = None) -> _Value:
        value = self._read(x)
        value = value if min is None else self._binary("max", [value, min], {})
        return value if max is None else self._binary("min", [value, max], {})

    def _op_clamp_min(self, x: Any, min: Any) -> _Value:
        return self._op_clamp(x, min)

    def _op_clamp_max(self, x: Any, max: Any) -> _Value:
        return self._op_clamp(x, None, max)

    def _op_logical_and(self, x: Any, y: Any) -> _Value:
        return _Value(self.lanes.binary("and", *self._bools(x, y)), torch.bool)

    def _op_logical_or(self, x: Any, y: Any) -> _Value:
        return _Value(self.lanes.binary("or", *self._bools(x, y)), torch.bool)

    def _op_logical_xor(self, x: Any, y: Any) -> _Value:
        return _Value(self.lanes.binary("xor", *self._bools(x, y)), torch.bool)

    def _op_logical_not(self, x: Any) -> _Value:
        return _Value(self.lanes.unary("not", *self._bools(x)), torch.bool)

    def _op_tanh_backward(self, grad: Any, tanh: Any) -> _Value:
        grad_lane, lane = self._floats(grad, tanh)
        slope = self.lanes.binary("sub", self._number(1.0), self.lanes.binary("mul", lane, lane))
        return self._float(self.lanes.binary("mul", grad_lane, slope))

    def _op_sigmoid_backward(self, grad: Any, sigmoid: Any) -> _Value:
        grad_lane, lane = self._floats(grad, sigmoid)
        rest = self.lanes.binary("sub", self._number(1.0), lane)
        return self._float(self.lanes.binary("mul", grad_lane, self.lanes.binary("mul", rest, lane)))

    def _op_threshold_backward(self, grad: Any, x: Any, threshold: Any) -> _Value:
        grad_lane, lane = self._floats(grad, x)
        below = self.lanes.binary("le", lane, *self._floats(threshold))
        return self._float(self.lanes.where(below, self._number(0.0), grad_lane))


def _is_layout(option: Any) -> bool:
    return isinstance(option, dict) and ("omit" in option or "device" in option)


class Examples:
    """Lanes of nothing: what is left of a walk is whether it can be walked, and in which dtypes."""

    @staticmethod
    def of(dtype: torch.dtype) -> Tensor:
        return torch.empty((), dtype=dtype, device="meta")

    def unary(self, name: str, x: Tensor) -> Tensor:
        return x

    def binary(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == y.dtype, (name, x.dtype, y.dtype)
        return self.of(torch.bool) if name in COMPARE else x

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        assert condition.dtype == torch.bool and x.dtype == y.dtype
        return x

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.of(dtype)

    def constant(self, value: float | int | bool, dtype: torch.dtype, like: Tensor) -> Tensor:
        return self.of(dtype)

    def load(self, table: Any, indices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.of(dtype)
