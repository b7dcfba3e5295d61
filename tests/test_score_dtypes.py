"""Whole numbers, bools and floats of all dtypes in score mods: steps and programs on tiles give what torch gives.

Shape legend: B batch, H query heads, Q query rows, K keys.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_lowering.score_analysis import recognise
from inductor_lowering.tile_program import score_program
from inductor_lowering.torch_compat import item_access_as_index
from magi_flex.fx_program import FxProgram
from magi_flex.score_steps import build_steps
from tests.cases.score_steps import steps_mod

SIZES = BATCH, HEADS, Q_LEN, KV_LEN = 1, 2, 3, 4
WHOLE = {
    "bool": (0, 1),
    "uint8": (0, 255),
    "int8": (-128, 127),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 44), 1 << 44),
}
FLOAT = ("float16", "bfloat16", "float32", "float64")
TABLE, SCALAR = 8, "scalar"  # entries of a captured table; a captured tensor of one


def captured(name: str) -> Tensor:
    """The tensor "table DTYPE" or "scalar DTYPE": long whole numbers of each dtype, or modest floats."""
    kind, dtype = name.split()
    generator = torch.Generator().manual_seed(3)
    shape = () if kind == SCALAR else (TABLE,)
    if dtype in WHOLE:
        low, high = WHOLE[dtype]
        values = torch.randint(low, high + 1, shape, generator=generator)
    else:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    return values.to(getattr(torch, dtype))


def captures_of(expression: Any) -> dict[str, Tensor]:
    return {name: captured(name) for name in sorted(names_in(expression)) if " " in name}


# An expression is a name, a number, or (operator, operands...).
OPERATORS: dict[str, Any] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "add twice": lambda x, y: torch.add(x, y, alpha=2),
    "neg": lambda x: -x,
    "abs": lambda x: abs(x),
    "greater": lambda x, y: x > y,
    "and": lambda x, y: x & y,
    "shift": lambda x: (x + 0) << 3,  # bools cannot be shifted
    "half": lambda x: x / 2,
    "third": lambda x: x // 3,
    "remainder": lambda x: x % 5,
    "at least": lambda x: x.clamp(min=2),
    "choose": lambda x, y, z: torch.where(x > 0, y, z),
    **{f"to {dtype}": lambda x, dtype=dtype: x.to(getattr(torch, dtype)) for dtype in (*WHOLE, *FLOAT)},
}
LOW = ("to float16", "to bfloat16")


def evaluate(x: Any, names: dict[str, Any], operators: dict[str, Any]) -> Any:
    if isinstance(x, str):
        return names[x]
    if not isinstance(x, tuple):
        return x
    if x[0] == "read":
        return names[x[1]][evaluate(x[2], names, operators)]
    return operators[x[0]](*(evaluate(y, names, operators) for y in x[1:]))


def expressions() -> st.SearchStrategy[Any]:
    dtypes = st.sampled_from([*WHOLE, *FLOAT])
    tables = dtypes.map(lambda dtype: f"table {dtype}")
    index = st.sampled_from(["b", "h", "q", "k", ("add", ("sub", "q", "k"), 3)])
    reads = st.tuples(st.just("read"), tables, index)
    numbers = st.sampled_from([True, 2, -1, 3, 0.5, 2.0])
    scalars = dtypes.map(lambda dtype: f"{SCALAR} {dtype}")
    leaves = reads | reads | st.sampled_from(["h", "q", "k", ("sub", "q", "k")]) | numbers | scalars

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        sums = st.tuples(st.sampled_from(["add", "sub", "mul", "add twice"]), inner, inner)
        others = st.tuples(st.sampled_from(["greater", "and"]), inner, inner)
        single = [x for x in OPERATORS if x not in ("add", "sub", "mul", "add twice", "greater", "and", "choose")]
        return (
            sums
            | sums
            | others
            | st.tuples(st.sampled_from(single), inner)
            | st.tuples(st.just("choose"), inner, inner, inner)
        )

    return st.recursive(leaves, grown, max_leaves=5)


def names_in(x: Any) -> set[str]:
    if isinstance(x, str):
        return {x}
    return set().union(*(names_in(y) for y in x[1:])) if isinstance(x, tuple) else set()


def traced(expression: Any, captures: dict[str, Tensor]) -> FxProgram:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Any:
        names = {"b": b, "h": h, "q": q, "k": k, **dict(zip(captures, tensors, strict=True))}
        return (score + evaluate(expression, names, OPERATORS)).float()

    scalars = [torch.zeros(()), *(torch.zeros((), dtype=torch.int32) for _ in range(4))]
    with item_access_as_index():
        graph = make_fx(score_mod, tracing_mode="fake")(*scalars, *captures.values())
    return score_program(graph)


def added(expression: Any, captures: dict[str, Tensor], work: torch.dtype) -> Tensor:
    """The expression ``[B, H, Q, K]``, one score after the other, as eager FlexAttention defines it.

    In float64 all floats are; in float32 captured ones keep their dtype.  Nothing is rounded to 16 bits in either: in a
    mod that was traced with such scores, conversions mean that.
    """
    operators = OPERATORS | dict.fromkeys(LOW, lambda x: x.to(work))
    result = torch.empty(SIZES, dtype=work)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(work)  # of whole numbers times a Python float
        widened = work == torch.float64
        names = {n: x.to(work) if x.is_floating_point() and widened else x for n, x in captures.items()}
        for place in itertools.product(*map(range, SIZES)):
            indices = dict(zip("bhqk", (torch.tensor(i) for i in place), strict=True))
            value = evaluate(expression, {**names, **indices}, operators)
            result[place] = torch.zeros((), dtype=work) + value
    finally:
        torch.set_default_dtype(before)
    return result


def grid() -> list[Tensor]:
    ranges = [torch.arange(size) for size in SIZES]
    return [x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(ranges)]


def check(expression: Any) -> bool:
    """Compares program and steps with the expression; returns whether there were steps."""
    captures = captures_of(expression)
    exact, near = (added(expression, captures, work) for work in (torch.float64, torch.float32))
    program = traced(expression, captures)
    tile = program.run([torch.zeros(()), *grid(), *captures.values()], torch.device("cpu"), torch.float32)
    results = [tile.expand(SIZES).double()]
    recipe = recognise(program, "t" * len(captures))
    steps = None if recipe is None else build_steps(recipe, list(captures.values()), SIZES, torch.device("cpu"))
    if steps is not None:
        results.append(steps_mod(steps)(torch.zeros(()), *grid()).expand(SIZES).double())
    error = (near.double() - exact).abs().max()
    for result in results:
        assert ((result - exact).abs() <= 8 * error + 2e-6 * (1 + exact.abs().max())).all(), (result, exact)
    return steps is not None


@settings(max_examples=80, deadline=None)
@given(expressions())
def test_random_sums(expression: Any) -> None:
    try:
        assume(bool(added(expression, captures_of(expression), torch.float32).isfinite().all()))
    except (RuntimeError, TypeError, AttributeError):  # torch has no such operation, say minus a bool
        assume(False)
    check(expression)


def read(dtype: str, index: Any = "q") -> Any:
    return "read", f"table {dtype}", index


KEPT = {
    "comparison": ("greater", "q", 1),
    "one table": read("int64"),
    "half of a table": ("half", read("uint8")),
    "bool as a number": ("mul", ("add", read("bool"), 0), 2.0),
    "bounds that fit": ("add", ("to int16", read("int8")), ("mul", ("to int16", read("uint8", "k")), 2)),
    "floats": ("add", read("float16"), ("mul", read("bfloat16", "k"), 2)),
    "promoted": ("sub", read("uint8"), ("add", read("float32", "k"), read("bool", "h"))),
    "of one axis": ("mul", ("add", read("int8"), ("neg", read("uint8"))), 3),
    "indices": ("sub", ("mul", "k", 2), ("to int64", ("mul", ("add", "q", True), 2))),
}
REFUSED = {
    "or": ("mul", ("add", read("bool"), read("bool", "k")), 2.0),
    "or of comparisons": ("mul", ("add", ("greater", "q", 1), ("greater", "k", 2)), 3),
    "bytes": ("add", read("uint8"), read("uint8", "k")),
    "bounds that do not fit": ("add", ("to int16", read("int16")), ("to int16", read("uint8", "k"))),
    "long": ("half", ("sub", read("int64"), read("int64", "k"))),
    "long in float64": ("sub", ("to float64", read("int64")), ("to float64", read("int64", "k"))),
}


@pytest.mark.parametrize("name", sorted(KEPT | REFUSED))
def test_what_is_taken_apart(name: str) -> None:
    """Nothing is that would wrap around, or lose what remains of long numbers; everything else is."""
    assert check((KEPT | REFUSED)[name]) == (name in KEPT)


def test_dtypes_beside_a_single_number() -> None:
    """Beside a tile a captured number does not decide on the dtype; in the mod, where all are single, it does."""
    for table, number in (("int8", "int64"), ("float16", "float32"), ("int32", "int64"), ("bfloat16", "float64")):
        check(("mul", ("mul", read(table), f"{SCALAR} {number}"), 0.5))
