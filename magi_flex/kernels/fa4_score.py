"""Score programs for flash-attn-4: a function of a score and its place, its derivative, and the tables both read.

Shape legend: B batch, H query heads, Q query rows, K keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import UnsupportedProgram
from magi_flex.kernels.fa4_trace import trace_backward, trace_forward
from magi_flex.kernels.fa4_walk import Lane, Lanes
from magi_flex.kernels.request import Bias, Distance, Multiply, ScoreProgram, ScoreStep, Softcap

_TABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Places = Sequence[Lane]  # b, h, q, k
Forward = Callable[[Lanes, Lane, Places, Sequence[Any]], Lane]  # (score, places, tables) -> score
Backward = Callable[[Lanes, Lane, Lane, Places, Sequence[Any]], Lane]  # (d result, score, places, tables) -> d score


@dataclass(frozen=True)
class KernelScore:
    """Attributes:
    forward, backward: traced into kernels; backward is None where it was not asked for.
    tables: what they read, in the order of their last argument.
    key: names everything that the traced code depends on.
    reads_place: more than the score is read.
    relative: of q and k, only their difference is read, so that documents may be counted from anywhere.
    """

    forward: Forward
    backward: Backward | None
    tables: tuple[Tensor, ...]
    key: str
    reads_place: bool
    relative: bool


def kernel_score(
    score: ScoreProgram, steps: Sequence[ScoreStep] | None, sizes: tuple[int, int, int, int], backward: bool
) -> KernelScore | None:
    """The score program, or None where it is the identity.

    Args:
        steps: what is left of the program's steps; None where it has none.
        sizes: batch, query heads, queries, keys.
    Raises ValueError for a graph that no kernel can be made of.
    """
    if steps is not None:
        return _of_steps(steps, sizes) if steps else None
    assert score.forward is not None
    try:
        forward = trace_forward(score.forward, score.captures)
        if not backward:
            return KernelScore(
                lambda lanes, x, places, tables: forward(lanes, [x, *places], tables),
                *(None, forward.tables, forward.key, True, False),
            )
        assert score.joint is not None
        joint = trace_backward(score.joint, score.captures)
    except UnsupportedProgram as error:
        raise ValueError(
            f"score_mod: flash-attn-4's kernels cannot run it ({error}); choose another backend"
        ) from error
    split = len(forward.tables)
    return KernelScore(
        lambda lanes, x, places, tables: forward(lanes, [x, *places], tables[:split]),
        lambda lanes, grad, x, places, tables: joint(lanes, [x, *places, grad], tables[split:]),
        (*forward.tables, *joint.tables),
        forward.key + joint.key,
        True,
        False,
    )


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A step as it is traced: its numbers, and where its table is among all tables.

    ``flips``: which of (b, h, q, k) count from a table's end.
    """

    kind: str
    number: float = 0.0
    table: int = -1
    flips: tuple[bool, ...] = ()
    shared: bool = False  # one slope for all heads


def _of_steps(steps: Sequence[ScoreStep], sizes: tuple[int, int, int, int]) -> KernelScore:
    traced: list[_Step] = []
    tables: list[Tensor] = []
    for step in steps:
        match step:
            case Multiply(factor):
                traced.append(_Step("multiply", factor))
            case Softcap(cap):
                traced.append(_Step("softcap", cap))
            case Distance(slopes, absolute):
                kind = "absolute_distance" if absolute else "distance"
                traced.append(_Step(kind, table=len(tables), shared=slopes.numel() == 1))
                tables.append(slopes.to(torch.float32).flatten())
            case Bias(table, strides, offset, factor):
                view, flips = _table_view(table, strides, offset, sizes)
                traced.append(_Step("bias", factor, len(tables), flips))
                tables.append(view)
    kinds = {step.kind for step in traced}
    content = f"{traced} {[(x.dtype, x.dim()) for x in tables]}"

    def forward(lanes: Lanes, x: Lane, places: Places, kernel_tables: Sequence[Any]) -> Lane:
        return _values(lanes, traced, x, places, kernel_tables)[-1]

    def backward(lanes: Lanes, grad: Lane, x: Lane, places: Places, kernel_tables: Sequence[Any]) -> Lane:
        values = _values(lanes, traced, x, places, kernel_tables)
        for step, value in zip(reversed(traced), reversed(values[:-1]), strict=True):
            grad = _derivative(lanes, step, grad, value)
        return grad

    return KernelScore(
        forward,
        backward,
        tuple(tables),
        hashlib.sha256(content.encode()).hexdigest(),
        reads_place=not kinds <= {"multiply", "softcap"},
        relative="bias" not in kinds,
    )


def _table_view(
    table: Tensor, strides: tuple[int, int, int, int], offset: int, sizes: tuple[int, int, int, int]
) -> tuple[Tensor, tuple[bool, ...]]:
    """``[B, H, Q, K]`` over the table's memory, and which dimensions are read from the end, as no view of torch is."""
    flat = (table if table.dtype in _TABLE_DTYPES else table.float()).contiguous()
    flips = tuple(stride < 0 for stride in strides)
    first = offset + sum(stride * (size - 1) for stride, size in zip(strides, sizes, strict=True) if stride < 0)
    return flat.as_strided(sizes, [abs(stride) for stride in strides], flat.storage_offset() + first), flips


def _values(lanes: Lanes, steps: Sequence[_Step], x: Lane, places: Places, tables: Sequence[Any]) -> list[Lane]:
    """The score before each step, and after the last one."""
    values = [x]
    for step in steps:
        values.append(_value(lanes, step, values[-1], places, tables))
    return values


def _value(lanes: Lanes, step: _Step, x: Lane, places: Places, tables: Sequence[Any]) -> Lane:
    def number(value: float) -> Lane:
        return lanes.constant(value, torch.float32, x)

    _, h, q, k = places
    if step.kind == "multiply":
        return lanes.binary("mul", x, number(step.number))
    if step.kind == "softcap":
        return lanes.binary("mul", _capped(lanes, step, x), number(step.number))
    if step.kind == "bias":
        minus_one = lanes.constant(-1, torch.int32, x)
        indices = [lanes.binary("sub", minus_one, i) if flip else i for i, flip in zip(places, step.flips, strict=True)]
        term = lanes.load(tables[step.table], indices, torch.float32)
        term = term if step.number == 1 else lanes.binary("mul", term, number(step.number))
    else:
        slope = lanes.load(tables[step.table], [lanes.constant(0, torch.int32, x) if step.shared else h], torch.float32)
        distance = lanes.cast(lanes.binary("sub", k, q), torch.float32)
        if step.kind == "absolute_distance":
            distance = lanes.unary("abs", distance)
        term = lanes.binary("mul", slope, distance)
    return lanes.binary("add", x, term)


def _capped(lanes: Lanes, step: _Step, x: Lane) -> Lane:
    """tanh(x / cap)"""
    return lanes.unary("tanh", lanes.binary("mul", x, lanes.constant(1 / step.number, torch.float32, x)))


def _derivative(lanes: Lanes, step: _Step, grad: Lane, x: Lane) -> Lane:
    if step.kind == "multiply":
        return lanes.binary("mul", grad, lanes.constant(step.number, torch.float32, x))
    if step.kind == "softcap":
        tanh = _capped(lanes, step, x)
        slope = lanes.binary("sub", lanes.constant(1.0, torch.float32, x), lanes.binary("mul", tanh, tanh))
        return lanes.binary("mul", grad, slope)
    return grad
