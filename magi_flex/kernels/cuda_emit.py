"""CUDA C++ expressions for the operators that a score mod applies to single scores, with torch's meaning.

They call the functions of ``csrc/cuda/ffa/score_math.cuh``.  16-bit floats are held as floats that were rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import UnsupportedProgram
from magi_flex.kernels.score_walk import LOW_DTYPES, Call, Rule, Value, wide

TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.int64: "int64",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
KERNEL_DTYPES = {torch.float16: "DType::fp16", torch.bfloat16: "DType::bf16"}


def cuda_type(dtype: torch.dtype) -> str:
    """The type that holds values of ``dtype``."""
    if dtype not in TYPES:
        raise UnsupportedProgram(f"{dtype} in a score mod")
    return TYPES[dtype]


def number(x: bool | int | float, dtype: torch.dtype) -> str:
    """A literal of ``cuda_type(dtype)``."""
    kind = cuda_type(dtype)
    if dtype == torch.bool:
        return "true" if x else "false"
    if not dtype.is_floating_point:
        least = x == -(1 << 63)  # has no literal
        return "(-9223372036854775807ll - 1)" if least else f"static_cast<{kind}>({int(x)}ll)"
    value = torch.tensor(x, dtype=dtype).item()
    if math.isnan(value):
        return f"static_cast<{kind}>(not_a_number())"
    if math.isinf(value):
        return f"static_cast<{kind}>({'-' if value < 0 else ''}kInfinity)"
    return f"{value.hex()}{'f' if kind == 'float' else ''}"


def cast(x: Value, dtype: torch.dtype) -> str:
    """``x`` as ``dtype``."""
    if x.constant:
        return number(x.meta, dtype)
    kind = cuda_type(dtype)
    if isinstance(x.meta, Tensor) and x.meta.dtype == dtype:
        return x.code
    if dtype == torch.bool:
        return f"({x.code} != 0)"
    code = f"convert<{kind}>({x.code})"
    return f"round_to<{KERNEL_DTYPES[dtype]}>({code})" if dtype in LOW_DTYPES else code


RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name if "::" in name else f"aten::{name}"] = rule
        return rule

    return register


def _function(name: str, operands: int) -> Rule:
    """A function of operands in the dtype that arithmetic is done in, which is also the result's."""

    def rule(call: Call) -> tuple[str, torch.dtype]:
        if len(call.args) > operands or any(x is not None for x in call.kwargs.values()):
            raise UnsupportedProgram(f"more arguments of {name} than code is generated for")
        return f"{name}({', '.join(call.operand(i) for i in range(operands))})", wide(call.dtype)

    return rule


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _sum(call: Call, first: int, second: int, name: str) -> tuple[str, torch.dtype]:
    alpha = call.number(2, "alpha", 1)
    dtype = wide(call.dtype)
    if dtype == torch.bool:
        if name != "add" or alpha not in (1, True):
            raise UnsupportedProgram("sums of bools with a factor")
        return f"{call.operand(first)} || {call.operand(second)}", dtype
    other = call.operand(second)
    if alpha != 1:
        other = f"multiply({number(alpha, dtype)}, {other})"
    return f"{name}({call.operand(first)}, {other})", dtype


RULES["aten::add"] = lambda call: _sum(call, 0, 1, "add")
RULES["aten::sub"] = lambda call: _sum(call, 0, 1, "subtract")
RULES["aten::rsub"] = lambda call: _sum(call, 1, 0, "subtract")


@_rule("mul")
def _mul(call: Call) -> tuple[str, torch.dtype]:
    if call.dtype == torch.bool:
        return f"{call.operand(0)} && {call.operand(1)}", call.dtype
    return f"multiply({call.operand(0)}, {call.operand(1)})", wide(call.dtype)


@_rule("div", "true_divide")
def _div(call: Call) -> tuple[str, torch.dtype]:
    names = {None: "divide", "trunc": "truncating_divide", "floor": "floor_divide"}
    name, by, dtype = names[call.kwargs.get("rounding_mode")], call.args[1], wide(call.dtype)
    if name == "divide" and by.constant and dtype == torch.float32 and 2.0**-64 < abs(by.meta) < 2.0**64:
        inverse = number(1 / by.meta, dtype)
        if call.args[0].meta.is_floating_point():  # as torch does on a GPU
            return f"{call.operand(0)} * {inverse}", dtype
        return f"divide_by({call.operand(0)}, {call.operand(1)}, {inverse})", dtype
    return f"{name}({call.operand(0)}, {call.operand(1)})", dtype


def _power_of_two(call: Call) -> int | None:
    """The exponent where whole numbers are divided by a power of two that their dtype holds."""
    by = call.args[1]
    if not by.constant or call.dtype.is_floating_point or type(by.meta) is not int or by.meta <= 0:
        return None
    exponent = by.meta.bit_length() - 1
    return exponent if by.meta == 1 << exponent <= torch.iinfo(call.dtype).max else None


@_rule("floor_divide")
def _floor_divide(call: Call) -> tuple[str, torch.dtype]:
    exponent = _power_of_two(call)
    return _function("floor_divide", 2)(call) if exponent is None else (f"{call.operand(0)} >> {exponent}", call.dtype)


@_rule("remainder")
def _remainder(call: Call) -> tuple[str, torch.dtype]:
    if _power_of_two(call) is None:
        return _function("remainder_of", 2)(call)
    return f"{call.operand(0)} & {number(call.args[1].meta - 1, call.dtype)}", call.dtype


RULES["aten::fmod"] = _function("fmod_of", 2)
RULES["aten::maximum"] = _function("larger", 2)
RULES["aten::minimum"] = _function("smaller", 2)
RULES["aten::atan2"] = _function("atan2", 2)


@_rule("pow")
def _pow(call: Call) -> tuple[str, torch.dtype]:
    exponent, dtype = call.args[1], wide(call.dtype)
    if exponent.constant and dtype.is_floating_point:
        x = call.operand(0)
        simple = {1: x, 2: f"{x} * {x}", 3: f"{x} * {x} * {x}", 0.5: f"sqrt({x})", -1: f"divide(decltype({x})(1), {x})"}
        if exponent.meta in simple:
            return simple[exponent.meta], dtype
    return f"power({call.operand(0)}, {call.operand(1)})", dtype


def _bounded(call: Call, low: Value | None, high: Value | None) -> tuple[str, torch.dtype]:
    code, dtype = call.operand(0), wide(call.dtype)
    for bound, name in ((low, "larger"), (high, "smaller")):
        if bound is not None:
            code = f"{name}({code}, {cast(bound, dtype)})"
    return code, dtype


RULES["aten::clamp"] = lambda call: _bounded(call, call.arg(1, "min"), call.arg(2, "max"))
RULES["aten::clamp_min"] = lambda call: _bounded(call, call.arg(1, "min"), None)
RULES["aten::clamp_max"] = lambda call: _bounded(call, None, call.arg(1, "max"))


# ---- comparisons and logic ------------------------------------------------------------------------------------------


def _comparison(sign: str) -> Rule:
    return lambda call: (f" {sign} ".join(call.compared()), torch.bool)


def _infix(sign: str, operands: Callable[[Call], torch.dtype], result: torch.dtype | None = None) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        dtype = operands(call)
        return f"{cast(call.args[0], dtype)} {sign} {cast(call.args[1], dtype)}", result or call.dtype

    return rule


for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    RULES[f"aten::{_name}"] = _comparison(_sign)
for _name, _sign in {"and": "&", "or": "|", "xor": "^"}.items():
    RULES[f"aten::logical_{_name}"] = _infix(_sign, lambda call: torch.bool, torch.bool)
    RULES[f"aten::bitwise_{_name}"] = RULES[f"aten::__{_name}__"] = _infix(_sign, lambda call: call.dtype)
for _name in ("left", "right"):
    RULES[f"aten::bitwise_{_name}_shift"] = RULES[f"aten::__{_name[0]}shift__"] = _function(f"shift_{_name}", 2)


@_rule("logical_not")
def _logical_not(call: Call) -> tuple[str, torch.dtype]:
    return f"!{cast(call.args[0], torch.bool)}", torch.bool


@_rule("bitwise_not")
def _bitwise_not(call: Call) -> tuple[str, torch.dtype]:
    return f"{'!' if call.dtype == torch.bool else '~'}{call.operand(0)}", call.dtype


@_rule("where")
def _where(call: Call) -> tuple[str, torch.dtype]:
    condition = cast(call.args[0], torch.bool)
    return f"{condition} ? {cast(call.args[1], call.dtype)} : {cast(call.args[2], call.dtype)}", call.dtype


@_rule("masked_fill")
def _masked_fill(call: Call) -> tuple[str, torch.dtype]:
    condition = cast(call.args[1], torch.bool)
    return f"{condition} ? {cast(call.args[2], call.dtype)} : {cast(call.args[0], call.dtype)}", call.dtype


# ---- functions of one value -----------------------------------------------------------------------------------------

for _name in (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "erf", "erfc", "sigmoid"),
):
    RULES[f"aten::{_name}"] = _function(_name, 1)
for _name, _code in {"neg": "negate", "abs": "absolute", "sign": "sign_of", "sgn": "sign_of"}.items():
    RULES[f"aten::{_name}"] = _function(_code, 1)


def _form(form: str) -> Rule:
    return lambda call: (form.format(x=call.operand(0)), wide(call.dtype))


for _name, _code in {
    "rsqrt": "rsqrt({x})",
    "reciprocal": "divide(decltype({x})(1), {x})",
    "square": "multiply({x}, {x})",
    "silu": "{x} * sigmoid({x})",
    "relu": "{x} < 0 ? 0 : {x}",
}.items():
    RULES[f"aten::{_name}"] = _form(_code)


def _rounding(name: str) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        if call.number(1, "decimals", 0):
            raise UnsupportedProgram("rounding to decimals")
        code = call.operand(0)
        return (f"{name}({code})" if call.dtype.is_floating_point else code), wide(call.dtype)

    return rule


for _name, _code in {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}.items():
    RULES[f"aten::{_name}"] = _rounding(_code)


def _test(form: str, of_whole: str) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        x = call.args[0]
        return (form.format(x=x.code) if x.meta.dtype.is_floating_point else of_whole), torch.bool

    return rule


RULES["aten::isnan"] = _test("{x} != {x}", "false")
RULES["aten::isinf"] = _test("absolute({x}) == kInfinity", "false")
RULES["aten::isfinite"] = _test("absolute({x}) < kInfinity", "true")


@_rule("softplus")
def _softplus(call: Call) -> tuple[str, torch.dtype]:
    dtype = wide(call.dtype)
    options = (number(call.number(i, name, value), dtype) for i, name, value in ((1, "beta", 1), (2, "threshold", 20)))
    return f"softplus({call.operand(0)}, {', '.join(options)})", dtype


# ---- formulas of gradients ------------------------------------------------------------------------------------------


@_rule("tanh_backward")
def _tanh_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, y = call.operand(0), call.operand(1)
    return f"{grad} * (1 - {y} * {y})", wide(call.dtype)


@_rule("sigmoid_backward")
def _sigmoid_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, y = call.operand(0), call.operand(1)
    return f"{grad} * (1 - {y}) * {y}", wide(call.dtype)


@_rule("silu_backward")
def _silu_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, x = call.operand(0), call.operand(1)
    return f"{grad} * sigmoid({x}) * (1 + {x} * (1 - sigmoid({x})))", wide(call.dtype)


@_rule("threshold_backward")
def _threshold_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, x, threshold = (call.operand(i) for i in range(3))
    return f"{x} <= {threshold} ? 0 : {grad}", wide(call.dtype)


# ---- constants and conversions --------------------------------------------------------------------------------------


@_rule("alias", "clone", "detach", "lift_fresh_copy", "lift_fresh", "_to_copy", "to", "prims::convert_element_type")
def _convert(call: Call) -> tuple[str, torch.dtype]:
    return cast(call.args[0], call.dtype), call.dtype


def _constant(value: Callable[[Call], Any]) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        x = value(call)
        return (cast(x, call.dtype) if isinstance(x, Value) else number(x, call.dtype)), call.dtype

    return rule


RULES["aten::full_like"] = _constant(lambda call: call.args[1])
RULES["aten::new_full"] = _constant(lambda call: call.args[2])
RULES["aten::zeros_like"] = RULES["aten::new_zeros"] = _constant(lambda call: 0)
RULES["aten::ones_like"] = RULES["aten::new_ones"] = _constant(lambda call: 1)
