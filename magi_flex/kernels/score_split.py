"""What of a score program a kernel has to do for each score, and what torch does once before and behind it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram, UnsupportedProgram
from magi_flex.kernels.request import Multiply, ScoreProgram, ScoreStep

SCORE_ARGUMENTS, JOINT_ARGUMENTS = 5, 6  # score, b, h, q, k and, in the joint graph, the gradient of the result
SCATTER = "flex_lib::zeros_and_scatter"


@dataclass(frozen=True)
class Split:
    """Numbers of a program's steps.

    Attributes:
        inputs: steps before the kernel whose values it reads, in order.
        tile: steps of single scores, and sums over all of them.
        sums: those of ``tile`` that are such sums, to one number or scattered into a tensor.
        outputs: for each returned value its step, or None.
    """

    inputs: tuple[int, ...]
    tile: tuple[int, ...]
    sums: tuple[int, ...]
    outputs: tuple[int | None, ...]


def score_ops(program: FxProgram, arguments: int) -> frozenset[str]:
    """Names of what the program does to single scores; its first ``arguments`` arguments are single ones.

    Where it cannot be split, the reason stands for a name that no kernel knows.
    """

    def find() -> frozenset[str]:
        try:
            steps = [program.steps[number] for number in split_of(program, arguments).tile]
        except UnsupportedProgram as error:
            return frozenset((str(error),))
        return frozenset(step[1] if step[0] == "call" else step[0] for step in steps)

    return program.recall(("ops", arguments), find)


def has_linear_gradient(joint: FxProgram) -> bool:
    """Whether the gradient of the score is a multiple of the gradient that comes in, as derivatives are; a custom
    autograd function might do anything.  False where that cannot be seen."""
    return joint.recall("linear", lambda: _has_linear_gradient(joint))


_ZEROS = ("aten::zeros_like", "aten::new_zeros")
_KEEPING = frozenset(f"aten::{name}" for name in ("neg", "alias", "clone", "detach", "_to_copy", "to"))
_FIRST = frozenset(f"aten::{name}" for name in ("div", "true_divide")) | {
    f"aten::{name}_backward" for name in ("tanh", "sigmoid", "silu", "threshold")
}


def _has_linear_gradient(joint: FxProgram) -> bool:
    try:
        split = split_of(joint, JOINT_ARGUMENTS)
    except UnsupportedProgram:
        return False
    arguments = [number for number, step in enumerate(joint.steps) if step[0] == "arg"]
    linear, zero = {arguments[JOINT_ARGUMENTS - 1]}, set[int]()

    def is_linear(x: Any) -> bool:
        return x["node"] in linear | zero if isinstance(x, dict) and "node" in x else x == 0

    for number, step in enumerate(joint.steps):
        if step[0] != "call":
            continue
        name, args = step[1], step[3]
        if name in _ZEROS or (name in ("aten::full", "aten::scalar_tensor") and args[-1] == 0):
            zero.add(number)
        reads = [n for n in joint.references(number) if n in linear]
        if not reads or number not in split.tile or number in split.sums:
            continue
        given = [is_linear(x) for x in args]
        if name in ("aten::add", "aten::sub", "aten::rsub"):
            follows = given[0] and given[1]
        elif name == "aten::mul":
            follows = len(reads) == 1
        elif name == "aten::where":
            follows = not given[0] and given[1] and given[2]
        elif name == "aten::masked_fill":
            follows = len(reads) == 1 and given[0] and args[2] == 0
        elif name in _FIRST:
            follows = given[0] and len(reads) == 1 and not step[4].get("rounding_mode")
        else:
            follows = number in zero or name in _KEEPING or name == "prims::convert_element_type"
        if not follows:
            return False
        linear.add(number)
    result = split.outputs[0]
    return result is None or result in linear or result in zero


def split_of(program: FxProgram, arguments: int) -> Split:
    """Raises UnsupportedProgram where the steps cannot be told apart."""
    return program.recall(("split", arguments), lambda: _split(program, arguments))


def _split(program: FxProgram, arguments: int) -> Split:
    where: dict[int, str] = {}  # "before", "tile" or "behind" the kernel
    inputs: set[int] = set()
    tile: list[int] = []
    sums: list[int] = []
    outputs: list[int | None] = []
    seen_arguments = 0
    for number, step in enumerate(program.steps):
        read = program.references(number)
        if step[0] == "arg":
            where[number] = "tile" if seen_arguments < arguments else "before"
            seen_arguments += 1
        elif step[0] == "return":
            for x in step[1] if isinstance(step[1], list) else [step[1]]:
                if x is not None and not isinstance(x, dict):
                    raise UnsupportedProgram("a result that is no tensor")
                outputs.append(None if x is None else x["node"])
            first = outputs[0]
            if first is not None and where[first] == "before":
                inputs.add(first)
            if first is not None and where[first] == "behind":
                raise UnsupportedProgram("a score that is a sum over all scores")
        elif all(where[n] == "before" for n in read):
            where[number] = "before"
        elif any(where[n] == "behind" for n in read):
            if any(where[n] == "tile" for n in read):
                raise UnsupportedProgram("a sum over all scores that is used for single ones")
            where[number] = "behind"
        else:
            tile.append(number)
            inputs.update(n for n in read if where[n] == "before")
            is_sum = step[0] == "sum" or step[1] == SCATTER
            where[number] = "behind" if is_sum else "tile"
            if is_sum:
                sums.append(number)
    return Split(tuple(sorted(inputs)), tuple(tile), tuple(sums), tuple(outputs))


# ---- gradients of captures ------------------------------------------------------------------------------------------


def sum_shape(step: Any, inputs: Mapping[int, Any]) -> list[int]:
    """Of the tensor that a step of :attr:`Split.sums` makes; ``inputs`` has the values of steps before the kernel."""
    if step[0] == "sum":
        return []
    return [inputs[x["node"]] if isinstance(x, dict) else x for x in step[3][0]]


def wanted_sums(score: ScoreProgram) -> tuple[int, ...]:
    """The steps of :attr:`Split.sums` of the joint graph that the wanted gradients of captures are made of."""
    assert score.joint is not None
    wanted = _wanted(score)
    joint = score.joint
    return joint.recall(("wanted sums", wanted), lambda: _wanted_sums(joint, wanted))


def _wanted(score: ScoreProgram) -> tuple[int | None, ...]:
    """The steps that are gradients of captures; None where it is not wanted, or zero."""
    assert score.joint is not None
    outputs = split_of(score.joint, JOINT_ARGUMENTS).outputs[SCORE_ARGUMENTS:]
    needed = (*score.needs_grad, *(False,) * len(outputs))
    return tuple(n if x else None for n, x in zip(outputs, needed, strict=False))


def _wanted_sums(joint: FxProgram, wanted: Sequence[int | None]) -> tuple[int, ...]:
    sums = split_of(joint, JOINT_ARGUMENTS).sums
    used = {n for n in wanted if n is not None}
    for number in range(len(joint.steps) - 1, -1, -1):
        if number in used and number not in sums:
            used.update(joint.references(number))
    return tuple(n for n in sums if n in used)


def capture_gradients(
    score: ScoreProgram, totals: Sequence[Tensor | None], device: torch.device
) -> tuple[Tensor | None, ...]:
    """The gradients of the captures, in their dtypes and shapes; None where it is not wanted.

    Args:
        totals: of each step of :attr:`Split.sums` its sum over all pairs, float32; None where nothing wanted needs it.
    """
    joint = score.joint
    assert joint is not None
    known = [n for n, step in enumerate(joint.steps) if step[0] == "arg"]
    wanted, sums = _wanted(score), split_of(joint, JOINT_ARGUMENTS).sums
    behind = joint.recall(("behind", wanted), lambda: joint.part([*known, *sums], wanted))
    values = behind.run([*(None,) * JOINT_ARGUMENTS, *score.captures, *totals], device, torch.float32)
    gradients: list[Tensor | None] = []
    for position, capture in enumerate(score.captures):
        needed = position < len(score.needs_grad) and score.needs_grad[position]
        value = values[position] if position < len(values) else None
        if not needed:
            gradients.append(None)
        elif value is None:
            gradients.append(torch.zeros_like(capture))
        else:
            gradients.append(value.to(capture.dtype).expand(capture.shape).contiguous())
    return tuple(gradients)


# ---- scale ----------------------------------------------------------------------------------------------------------


def leading_factors(scale: float, steps: tuple[ScoreStep, ...]) -> tuple[float, tuple[ScoreStep, ...]]:
    """The scale with the factors that the steps begin with, and the steps that remain."""
    factors = list(itertools.takewhile(lambda step: isinstance(step, Multiply), steps))
    scale = math.prod((step.factor for step in factors if isinstance(step, Multiply)), start=scale)
    return scale, steps[len(factors) :]
