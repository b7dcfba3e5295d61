"""Triton expressions for the operators that a score mod applies to single scores, with torch's meaning.

Every value's torch dtype is known (from running the operator on meta tensors), so operands are converted before and not
guessed afterwards.  Arithmetic of 16-bit floats is done in float32 and rounded, as torch does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import UnsupportedProgram
from magi_flex.kernels.score_walk import Call, Rule, Value, wide

DTYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}


def literal(x: bool | int | float) -> str:
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    return f"({x!r})"


def triton_dtype(dtype: torch.dtype) -> str:
    if dtype not in DTYPES:
        raise UnsupportedProgram(f"{dtype} in a score mod")
    return DTYPES[dtype]


def cast(x: Value, dtype: torch.dtype) -> str:
    """``x`` as ``dtype``."""
    if x.constant:
        if dtype == torch.bool:
            return literal(bool(x.meta))
        # Rounded first, as torch does it: a number that is compared with a float16 is one.
        return literal(torch.tensor(x.meta, dtype=dtype).item() if dtype.is_floating_point else int(x.meta))
    if not isinstance(x.meta, Tensor):
        return f"tl.cast({x.code}, {triton_dtype(dtype)})"
    if x.meta.dtype == dtype:
        return x.code
    if dtype == torch.bool:
        return f"({x.code} != 0)"
    return f"{x.code}.to({triton_dtype(dtype)})"


RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[f"aten::{name}" if "::" not in name else name] = rule
        return rule

    return register


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _sum(call: Call, first: int, second: int, sign: str) -> tuple[str, torch.dtype]:
    alpha = call.number(2, "alpha", 1)
    if call.dtype == torch.bool:
        if sign == "-" or alpha not in (1, True):
            raise UnsupportedProgram("sums of bools with a factor")
        return f"{call.operand(first)} | {call.operand(second)}", call.dtype
    other = call.operand(second) if alpha == 1 else f"{literal(alpha)} * {call.operand(second)}"
    return f"{call.operand(first)} {sign} {other}", wide(call.dtype)


RULES["aten::add"] = lambda call: _sum(call, 0, 1, "+")
RULES["aten::sub"] = lambda call: _sum(call, 0, 1, "-")
RULES["aten::rsub"] = lambda call: _sum(call, 1, 0, "-")


@_rule("mul")
def _mul(call: Call) -> tuple[str, torch.dtype]:
    sign = "&" if call.dtype == torch.bool else "*"
    return f"{call.operand(0)} {sign} {call.operand(1)}", wide(call.dtype)


def _exact_quotient(a: str, b: str, dtype: torch.dtype) -> str:
    return f"tl.div_rn({a}, {b})" if dtype == torch.float32 else f"{a} / {b}"


def _quotient(call: Call, mode: str | None) -> tuple[str, torch.dtype]:
    a, b, dtype = call.operand(0), call.operand(1), wide(call.dtype)
    if dtype.is_floating_point:
        if mode == "floor":
            return f"floor_divide_float({a}, {b})", dtype
        code = _exact_quotient(a, b, dtype)
        return (f"trunc({code})" if mode == "trunc" else code), dtype
    return (f"floor_divide_int({a}, {b})" if mode == "floor" else f"{a} // {b}"), dtype


RULES["aten::div"] = lambda call: _quotient(call, call.kwargs.get("rounding_mode"))
RULES["aten::true_divide"] = lambda call: _quotient(call, None)
RULES["aten::floor_divide"] = lambda call: _quotient(call, "floor")


@_rule("remainder")
def _remainder(call: Call) -> tuple[str, torch.dtype]:
    kind = "float" if call.dtype.is_floating_point else "int"
    return f"remainder_{kind}({call.operand(0)}, {call.operand(1)})", wide(call.dtype)


@_rule("pow")
def _pow(call: Call) -> tuple[str, torch.dtype]:
    base, exponent, dtype = call.args[0], call.args[1], wide(call.dtype)
    power = exponent.meta if exponent.constant else None
    if power is not None and power == int(power) and 0 < power <= 8:
        return " * ".join([call.operand(0)] * int(power)), dtype
    if not dtype.is_floating_point:
        raise UnsupportedProgram("a power of whole numbers")
    if power == 0.5:
        return f"tl.sqrt_rn({call.operand(0)})", dtype
    if power in (-1, -0.5):
        root = call.operand(0) if power == -1 else f"tl.sqrt_rn({call.operand(0)})"
        return f"tl.div_rn(1.0, {root})", dtype
    code = [
        f"tl.full([1, 1], {call.operand(i)}, {triton_dtype(dtype)})" if x.constant else call.operand(i)
        for i, x in enumerate((base, exponent))
    ]
    return f"power({code[0]}, {code[1]}).to({triton_dtype(dtype)})", dtype


def _extremum(call: Call, function: str) -> tuple[str, torch.dtype]:
    spread = ", propagate_nan=tl.PropagateNan.ALL" if call.dtype.is_floating_point else ""
    return f"tl.{function}({call.operand(0)}, {call.operand(1)}{spread})", wide(call.dtype)


RULES["aten::maximum"] = lambda call: _extremum(call, "maximum")
RULES["aten::minimum"] = lambda call: _extremum(call, "minimum")


@_rule("clamp")
def _clamp(call: Call) -> tuple[str, torch.dtype]:
    return _bounded(call, call.arg(1, "min"), call.arg(2, "max"))


@_rule("clamp_min")
def _clamp_min(call: Call) -> tuple[str, torch.dtype]:
    return _bounded(call, call.arg(1, "min"), None)


@_rule("clamp_max")
def _clamp_max(call: Call) -> tuple[str, torch.dtype]:
    return _bounded(call, None, call.arg(1, "max"))


def _bounded(call: Call, low: Value | None, high: Value | None) -> tuple[str, torch.dtype]:
    code, dtype = call.operand(0), wide(call.dtype)
    for bound, sign in ((low, "<"), (high, ">")):
        if bound is not None:
            limit = cast(bound, dtype)
            code = f"tl.where({code} {sign} {limit}, {limit}, {code})"
    return code, dtype


# ---- comparisons and logic ------------------------------------------------------------------------------------------


def _comparison(sign: str) -> Rule:
    return lambda call: (f" {sign} ".join(call.compared()), torch.bool)


for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    RULES[f"aten::{_name}"] = _comparison(_sign)


def _infix(sign: str, dtype: torch.dtype | None = None) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        kind = dtype or call.dtype
        return f"{cast(call.args[0], kind)} {sign} {cast(call.args[1], kind)}", kind

    return rule


for _name, _sign in {"and": "&", "or": "|", "xor": "^"}.items():
    RULES[f"aten::logical_{_name}"] = _infix(_sign, torch.bool)
    RULES[f"aten::bitwise_{_name}"] = RULES[f"aten::__{_name}__"] = _infix(_sign)
for _name, _sign in {"left": "<<", "right": ">>"}.items():
    RULES[f"aten::bitwise_{_name}_shift"] = RULES[f"aten::__{_name[0]}shift__"] = _infix(_sign)


@_rule("logical_not")
def _logical_not(call: Call) -> tuple[str, torch.dtype]:
    return f"{cast(call.args[0], torch.bool)} == 0", torch.bool


@_rule("bitwise_not")
def _bitwise_not(call: Call) -> tuple[str, torch.dtype]:
    return (f"{call.operand(0)} == 0" if call.dtype == torch.bool else f"~{call.operand(0)}"), call.dtype


@_rule("where")
def _where(call: Call) -> tuple[str, torch.dtype]:
    condition = cast(call.args[0], torch.bool)
    return f"tl.where({condition}, {cast(call.args[1], call.dtype)}, {cast(call.args[2], call.dtype)})", call.dtype


@_rule("masked_fill")
def _masked_fill(call: Call) -> tuple[str, torch.dtype]:
    condition = cast(call.args[1], torch.bool)
    return f"tl.where({condition}, {cast(call.args[2], call.dtype)}, {cast(call.args[0], call.dtype)})", call.dtype


# ---- functions of one value -----------------------------------------------------------------------------------------


def _function(form: str) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        return form.format(x=call.operand(0)), wide(call.dtype)

    return rule


_FUNCTIONS = {
    "exp": "exp({x})",
    "exp2": "tl.exp2({x})",
    "expm1": "expm1({x})",
    "log": "tl.log({x})",
    "log2": "tl.log2({x})",
    "log10": "log10({x})",
    "log1p": "log1p({x})",
    "sqrt": "tl.sqrt_rn({x})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({x}))",
    "reciprocal": "tl.div_rn(1.0, {x})",
    "sin": "tl.sin({x})",
    "cos": "tl.cos({x})",
    "tanh": "tanh({x})",
    "sigmoid": "sigmoid({x})",
    "silu": "{x} * sigmoid({x})",
    "erf": "tl.erf({x})",
    "neg": "-{x}",
    "abs": "tl.abs({x})",
    "square": "{x} * {x}",
    "relu": "tl.where({x} < 0, tl.zeros_like({x}), {x})",
}
for _name, _form in _FUNCTIONS.items():
    RULES[f"aten::{_name}"] = _function(_form)


def _rounding(form: str) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        x = call.operand(0)
        return (form.format(x=x) if call.dtype.is_floating_point else x), wide(call.dtype)

    return rule


for _name, _form in {"floor": "tl.floor", "ceil": "tl.ceil", "trunc": "trunc"}.items():
    RULES[f"aten::{_name}"] = _rounding(_form + "({x})")


@_rule("round")
def _round(call: Call) -> tuple[str, torch.dtype]:
    decimals, dtype = int(call.number(1, "decimals", 0)), wide(call.dtype)
    if decimals == 0 or not dtype.is_floating_point:
        return _rounding("round_even({x})")(call)
    x, power = call.operand(0), f"tl.full([1, 1], {10.0 ** abs(decimals)}, {triton_dtype(dtype)})"
    if decimals > 0:
        return _exact_quotient(f"round_even({x} * {power})", power, dtype), dtype
    return f"round_even({_exact_quotient(x, power, dtype)}) * {power}", dtype


@_rule("sign", "sgn")
def _sign_of(call: Call) -> tuple[str, torch.dtype]:
    return f"sign({call.operand(0)})", torch.int32


def _test(form: str, of_whole: str) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        x = call.args[0]
        code = cast(x, wide(x.meta.dtype))
        return (form if x.meta.dtype.is_floating_point else of_whole).format(x=code), torch.bool

    return rule


RULES["aten::isnan"] = _test("{x} != {x}", "{x} != {x}")
RULES["aten::isinf"] = _test('tl.abs({x}) == float("inf")', "{x} != {x}")
RULES["aten::isfinite"] = _test('tl.abs({x}) < float("inf")', "{x} == {x}")


@_rule("softplus")
def _softplus(call: Call) -> tuple[str, torch.dtype]:
    beta, threshold = call.number(1, "beta", 1), call.number(2, "threshold", 20)
    return f"softplus({call.operand(0)}, {float(beta)}, {float(threshold)})", wide(call.dtype)


# ---- formulas of gradients ------------------------------------------------------------------------------------------


@_rule("tanh_backward")
def _tanh_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, y = call.operand(0), call.operand(1)
    return f"{grad} * (1.0 - {y} * {y})", wide(call.dtype)


@_rule("sigmoid_backward")
def _sigmoid_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, y = call.operand(0), call.operand(1)
    return f"{grad} * (1.0 - {y}) * {y}", wide(call.dtype)


@_rule("silu_backward")
def _silu_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, x = call.operand(0), call.operand(1)
    return f"{grad} * sigmoid({x}) * (1.0 + {x} * (1.0 - sigmoid({x})))", wide(call.dtype)


@_rule("threshold_backward")
def _threshold_backward(call: Call) -> tuple[str, torch.dtype]:
    grad, x, threshold = (call.operand(i) for i in range(3))
    return f"tl.where({x} <= {threshold}, tl.zeros_like({grad}), {grad})", wide(call.dtype)


# ---- constants and conversions --------------------------------------------------------------------------------------


@_rule("alias", "clone", "detach", "lift_fresh_copy", "lift_fresh", "_to_copy", "to", "prims::convert_element_type")
def _convert(call: Call) -> tuple[str, torch.dtype]:
    return cast(call.args[0], call.dtype), call.dtype


def _constant(value: Callable[[Call], Any]) -> Rule:
    def rule(call: Call) -> tuple[str, torch.dtype]:
        number = value(call)
        if not isinstance(number, Value):
            number = Value("", number, constant=True)
        if not number.constant:
            return f"{cast(number, call.dtype)} + tl.zeros([1, 1], {triton_dtype(call.dtype)})", call.dtype
        return f"tl.full([1, 1], {cast(number, call.dtype)}, {triton_dtype(call.dtype)})", call.dtype

    return rule


RULES["aten::full_like"] = _constant(lambda call: call.args[1])
RULES["aten::new_full"] = _constant(lambda call: call.args[2])
RULES["aten::zeros_like"] = RULES["aten::new_zeros"] = _constant(lambda call: 0)
RULES["aten::ones_like"] = RULES["aten::new_ones"] = _constant(lambda call: 1)
