"""Gradients of what a score mod captures in the Hopper backward: which sums over all pairs they are, and their memory.

The kernel's part is ``csrc/cuda/ffa/capture_sums.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram, UnsupportedProgram
from magi_flex.kernels.score_distance import Gather, Lengths
from magi_flex.kernels.score_split import Split

# Of a tensor whose elements many pairs add to at once, so that they do not wait for each other: at most so many copies,
# a power of two, of together at most so many elements.
_COPIES, _COPIED_ELEMENTS = 128, 1 << 20

Indices = tuple[str | int | None, ...]  # as in Reading.indices (ffa_score_inputs.py)


class CaptureSum(NamedTuple):
    """A gradient of a captured tensor or number, or a part of one.

    Attributes:
        value: the step that is each pair's share.
        indices: of the element that it is added to, as the program has them; empty: it is one number.
        kind: what they depend on, a name of the kernel's ``SumKind``.
        by_distance: where that is the distance, the indices as functions of it.
    """

    value: int
    indices: tuple[Any, ...]
    kind: str
    by_distance: Indices = ()


_KINDS = {frozenset[str](): "head", frozenset("q"): "row", frozenset("k"): "key", frozenset("qk"): "pair"}


def find_sums(
    program: FxProgram, split: Split, arguments: int, sums: Sequence[int], by_distance: Callable[[Any], Indices | None]
) -> dict[int, CaptureSum]:
    """``sums`` (steps of :attr:`Split.sums`) as the kernel sums them.

    Args:
        by_distance: indices of the program as functions of the distance, or None where they are none.
    """
    places = [number for number, step in enumerate(program.steps) if step[0] == "arg"][:arguments]
    axes = dict(zip(places, ("qk", "", "", "q", "k", "qk"), strict=False))
    for step in split.tile:
        axes[step] = "".join(axes.get(n, "") for n in program.references(step))

    def find(step: list[Any]) -> CaptureSum:
        indices, value = ([], step[1]) if step[0] == "sum" else step[3][1:]
        if not isinstance(value, dict) or "node" not in value:
            raise UnsupportedProgram("a sum of constants")
        functions = by_distance(indices)
        if functions is not None:
            return CaptureSum(value["node"], tuple(indices), "distance", functions)
        depends = frozenset("".join(axes.get(x["node"], "") for x in indices if isinstance(x, dict)))
        return CaptureSum(value["node"], tuple(indices), _KINDS[depends])

    return {number: find(program.steps[number]) for number in sums}


@dataclass(frozen=True)
class SumMemory:
    """Float32 zeros for the sums of one launch.

    Attributes:
        shapes: of the tensors that the sums are, by their steps.
        buffers: where the kernel adds: ``[copies, *shape]``; of sums by distance ``[heads or 1, distances]``.
        gathers: of sums by distance, how what they belong to is read.
    """

    shapes: Mapping[int, tuple[int, ...]]
    buffers: Mapping[int, Tensor]
    gathers: Mapping[int, Gather]

    @staticmethod
    def of(
        sums: Mapping[int, CaptureSum],
        shapes: Mapping[int, tuple[int, ...]],
        gathers: Mapping[int, Gather],
        lengths: Lengths,
        device: torch.device,
    ) -> SumMemory:
        def size(step: int, found: CaptureSum) -> tuple[int, ...]:
            if found.kind == "distance":
                return (lengths.heads if None in found.by_distance else 1, lengths.distances)
            return (_copies(math.prod(shapes[step])) if found.kind == "pair" else 1, *shapes[step])

        # Each has memory of its own, since it may become a result.
        buffers = {step: torch.zeros(size(step, found), device=device) for step, found in sums.items()}
        return SumMemory(shapes, buffers, gathers)

    def totals(self, steps: Sequence[int]) -> list[Tensor | None]:
        """The sums behind the launch; None of steps that are not summed."""
        return [self._total(step) if step in self.buffers else None for step in steps]

    def _total(self, step: int) -> Tensor:
        buffer = self.buffers[step]
        if step in self.gathers:
            return self.gathers[step].adjoint(buffer, self.shapes[step])
        return buffer[0] if buffer.shape[0] == 1 else buffer.sum(0)


def _copies(elements: int) -> int:
    fitting = _COPIED_ELEMENTS // max(1, elements)
    return min(_COPIES, 1 << (fitting.bit_length() - 1)) if fitting else 1
