"""From a recipe (found when the graph is compiled) to the steps that kernels run (needs lengths and captures).

A recipe step is one of
    ("multiply", factor), ("softcap", cap), ("constant", added),
    ("distance", program of the slopes or None, factor, absolute): + slope[h] * factor * (k - q), or its absolute value
    ("table", program, axes, factor): + factor * value, a function of ``axes`` only (letters of "bhqkd", d = q - k)
    ("read", program of a table, indices, factor, table step or None): + factor * table[indices], which are linear:
        (argument, coefficient) pairs, argument -1 for the constant; the last part is the same as a "table" step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram
from magi_flex.kernels.request import Bias, Distance, Multiply, ScoreStep, Softcap

Recipe = tuple[Any, ...]
Sizes = tuple[int, int, int, int]  # batch, query heads, queries, keys that the score mod sees

BATCH, HEAD, QUERY, KEY = 1, 2, 3, 4
_TABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_STEP_TYPES: dict[str, type[ScoreStep]] = {
    "multiply": Multiply,
    "softcap": Softcap,
    "constant": Bias,
    "distance": Distance,
    "table": Bias,
    "read": Bias,
}


def step_types(recipe: Sequence[Recipe]) -> tuple[type[ScoreStep], ...]:
    """Which kinds of steps the recipe becomes."""
    return tuple(_STEP_TYPES[step[0]] for step in recipe)


class _OutOfRange(Exception):
    """A table would, or might, be read outside of its bounds for a pair that is masked; steps cannot leave it out."""


def build_steps(
    recipe: Sequence[Recipe], captures: Sequence[Any], sizes: Sizes, device: torch.device
) -> tuple[ScoreStep, ...] | None:
    """The kernels' steps, or None where they would not be the score mod (see _OutOfRange)."""
    if 0 in sizes:
        return None
    try:
        return tuple(_step(recipe_step, captures, sizes, device) for recipe_step in recipe)
    except (_OutOfRange, IndexError):
        return None


def _step(step: Recipe, captures: Sequence[Any], sizes: Sizes, device: torch.device) -> ScoreStep:
    kind, first = step[0], step[1]
    if kind == "multiply":
        return Multiply(first)
    if kind == "softcap":
        return Softcap(first)
    if kind == "constant":
        return Bias(torch.full((1,), float(first), device=device), (0, 0, 0, 0), 0)
    if kind == "distance":
        _, program, factor, absolute = step
        if program is None:
            return Distance(torch.full((1,), float(factor), device=device), absolute)
        return Distance(_run(program, "h", captures, sizes, device).float().flatten() * factor, absolute)
    if kind == "table":
        return _tabulated(step, captures, sizes, device)
    try:
        return _read(step, captures, sizes, device)
    except _OutOfRange:
        if step[4] is None:
            raise
        return _tabulated(step[4], captures, sizes, device)


def _run(program: str, axes: str, captures: Sequence[Any], sizes: Sizes, device: torch.device) -> Tensor:
    """The value for all of its axes, broadcastable to [B, H, Q, K]; d runs along Q.  Without axes, the value itself."""
    batch, heads, q_len, kv_len = sizes
    ranges = {
        BATCH: torch.arange(batch if "b" in axes else 1, device=device).view(-1, 1, 1, 1),
        HEAD: torch.arange(heads if "h" in axes else 1, device=device).view(1, -1, 1, 1),
        QUERY: torch.arange(q_len if "q" in axes else 1, device=device).view(1, 1, -1, 1),
        KEY: torch.arange(kv_len if "k" in axes else 1, device=device).view(1, 1, 1, -1),
    }
    if "d" in axes:
        ranges[QUERY] = torch.arange(1 - kv_len, q_len, device=device).view(1, 1, -1, 1)
    score = torch.zeros((), device=device)
    value = FxProgram.from_json(program).run([score, *ranges.values(), *captures], device, torch.float32)
    return torch.as_tensor(value, device=device).detach()


def _tabulated(step: Recipe, captures: Sequence[Any], sizes: Sizes, device: torch.device) -> Bias:
    _, program, axes, factor = step
    if device.type != "cpu" and "aten::index" in program:
        raise _OutOfRange  # elsewhere an index error cannot be caught
    value = _run(program, axes, captures, sizes, device)
    value = value.reshape((1,) * (4 - value.dim()) + value.shape).float().contiguous()
    sb, sh, sq, sk = (stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    offset = 0
    if "d" in axes:
        sk, offset = -sq, (sizes[3] - 1) * sq
    return Bias(value, (sb, sh, sq, sk), offset, factor)


def _read(step: Recipe, captures: Sequence[Any], sizes: Sizes, device: torch.device) -> Bias:
    _, program, indices, factor, _ = step
    table = _run(program, "", captures, sizes, device).contiguous()
    if table.dtype not in _TABLE_DTYPES:
        table = table.float()
    strides, offset = [0, 0, 0, 0], 0
    for linear, size, stride in zip(indices, table.shape, table.stride(), strict=True):
        low = high = 0
        for argument, coefficient in linear:
            if argument in (BATCH, HEAD, QUERY, KEY):
                strides[argument - 1] += coefficient * stride
                reach = coefficient * (sizes[argument - 1] - 1)
                low, high = low + min(0, reach), high + max(0, reach)
            else:
                constant = coefficient * (1 if argument < 0 else captures[argument - KEY - 1])
                offset += constant * stride
                low, high = low + constant, high + constant
        if low < 0 or high >= size:
            raise _OutOfRange
    return Bias(table, (strides[0], strides[1], strides[2], strides[3]), offset, factor)
