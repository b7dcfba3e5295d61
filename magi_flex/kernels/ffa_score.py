"""Score steps in the form the Hopper kernels take: kinds for the compiler, values for the launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from magi_flex.kernels.request import Bias, Distance, Multiply, ScoreStep, Softcap

# ScoreStepParams of csrc/cuda/ffa/score.cuh.
STEP = struct.Struct("<2fQ4q")
_BIAS_KINDS = {torch.float32: "bias_f32", torch.bfloat16: "bias_bf16", torch.float16: "bias_fp16"}


class GeneratedCode(NamedTuple):
    """A score mod as source code (:mod:`magi_flex.kernels.ffa_generated_score`).

    ``text``: of generated.cuh; ``format``: of its parameters, for the struct module; ``has_sums``: it adds up gradients
    of captures.
    """

    text: str
    format: str
    has_sums: bool = False


@dataclass(frozen=True)
class KernelScore:
    """Attributes:
    kinds: of each step, names of the kernel's ``ScoreStep``.
    values: the fields of each step's parameters, one after the other.
    tables: what the values point into, to be kept until the launch.
    factor: product of the constant factors among the steps (the kernels leave it out of the derivative).
    generated: code in the place of steps; then the values are its parameters.
    gradients: of what the mod captures, behind the launch that adds them up; None of what is not wanted.
    """

    kinds: tuple[str, ...]
    values: tuple[int | float, ...]
    tables: tuple[Tensor, ...]
    factor: float = 1.0
    generated: GeneratedCode | None = None
    gradients: Callable[[], tuple[Tensor | None, ...]] = tuple


def kernel_score(steps: Sequence[ScoreStep]) -> KernelScore:
    """Kinds and values of ``steps`` (all on the device of the launch)."""
    kinds: list[str] = []
    values: list[int | float] = []
    tables: list[Tensor] = []
    for step in steps:
        value, inverse, address, strides = 0.0, 0.0, 0, (0, 0, 0, 0)
        match step:
            case Multiply(factor):
                kind, value = "multiply", factor
            case Softcap(cap):
                kind, value, inverse = "softcap", cap, 1 / cap
            case Distance(slopes, absolute):
                kind = "absolute_distance" if absolute else "distance"
                slopes = slopes.to(torch.float32).contiguous()
                tables.append(slopes)
                address, strides = slopes.data_ptr(), (0, int(slopes.numel() > 1), 0, 0)
            case Bias(table, strides, offset, value):
                table = table.contiguous() if table.dtype in _BIAS_KINDS else table.to(torch.float32).contiguous()
                tables.append(table)
                kind, address = _BIAS_KINDS[table.dtype], table.data_ptr() + offset * table.element_size()
        kinds.append(kind)
        values += [value, inverse, address, *strides]
    factor = math.prod(step.factor for step in steps if isinstance(step, Multiply))
    return KernelScore(tuple(kinds), tuple(values), tuple(tables), factor)


def score_defines(kinds: tuple[str, ...], generated: GeneratedCode | None) -> dict[str, object]:
    """The macros that select the score mod."""
    steps = ",".join(f"ScoreStep::{kind}" for kind in kinds or ("none",))
    return {"FFA_SCORE_STEPS": steps, "FFA_GENERATED_SCORE": generated is not None}


def score_format(kinds: tuple[str, ...], generated: GeneratedCode | None) -> str:
    """The score mod's part of a kernel's parameters, for the struct module."""
    return STEP.format.lstrip("<") * max(1, len(kinds)) if generated is None else generated.format


def score_text(generated: GeneratedCode | None) -> str:
    """The header generated.cuh."""
    return "" if generated is None else generated.text
