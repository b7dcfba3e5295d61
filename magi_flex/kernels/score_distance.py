"""What of a score mod depends on the distance q - k alone: kernels read it from a table by distance, which torch fills.

A T5 bucket, for one, is a logarithm and a quotient of the distance; there are at most Q + K distances, but Q * K pairs.

Shape legend: D distances, H query heads, P heads that lie together.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram, UnsupportedProgram, constant_on, kept_for_graphs
from magi_flex.kernels.score_split import split_of

# Kernels may ask for pairs this far outside of the lengths, which are masked.
PADDING = 256
_CHEAP = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "rsub", "neg", "abs", "mul", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or"),
        *("_to_copy", "to", "alias", "clone", "detach", "full_like", "zeros_like", "ones_like"),
    )
)
_KEPT = 32  # tables on a device
_DEAR = 8  # what another step costs, counted in cheap ones


class Lengths(NamedTuple):
    """Sizes of a request that tables by distance depend on."""

    heads: int
    q_len: int
    kv_len: int

    @property
    def first(self) -> int:
        """Index of distance 0 in a table."""
        return self.kv_len - 1 + PADDING

    @property
    def distances(self) -> int:
        """Entries of a table."""
        return self.q_len + self.kv_len - 1 + 2 * PADDING


def distance_costs(program: FxProgram, arguments: int) -> dict[int, int]:
    """The steps of single scores whose value depends on q - k alone, and in how many operations of a thread."""
    return program.recall(("distances", arguments), lambda: _distance_costs(program, arguments))


def _distance_costs(program: FxProgram, arguments: int) -> dict[int, int]:
    q, k = _places(program)
    tile = set(split_of(program, arguments).tile)
    linear = {q: (1, 0), k: (0, 1)}  # coefficients of q and k, where the rest is constant
    constants: set[int] = set()
    costs: dict[int, int] = {}
    for number, step in enumerate(program.steps):
        read = program.references(number)
        if step[0] in ("literal", "call") and all(n in constants for n in read):
            constants.add(number)
        if step[0] != "call" or number not in tile:
            continue
        form = _linear_form(step, linear)
        if form is not None:
            linear[number] = form
        by_form = form is not None and form[0] == -form[1] != 0
        if by_form or (read and all(n in costs or n in constants for n in read) and step[1] != "aten::index"):
            own = 1 if step[1] in _CHEAP else _DEAR
            costs[number] = own + sum(costs.get(n, 0) for n in read)
    return costs


def _linear_form(step: list[Any], linear: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
    """Coefficients of q and k in the step's value; None: it is no such sum."""
    forms = []
    for x in step[3]:
        known = linear.get(x["node"]) if isinstance(x, dict) and "node" in x else (0, 0) if type(x) is int else None
        if known is None:
            return None
        forms.append(known)
    if any("omit" not in x for x in step[4].values() if isinstance(x, dict)) or step[4].get("alpha", 1) != 1:
        return None
    match step[1], forms:
        case "aten::add", [a, b]:
            return a[0] + b[0], a[1] + b[1]
        case "aten::sub", [a, b]:
            return a[0] - b[0], a[1] - b[1]
        case "aten::rsub", [a, b]:
            return b[0] - a[0], b[1] - a[1]
        case "aten::neg", [a]:
            return -a[0], -a[1]
    return None


def _places(program: FxProgram) -> tuple[int, int]:
    """The steps that are q and k."""
    _, _, _, q, k = [number for number, step in enumerate(program.steps) if step[0] == "arg"][:5]
    return q, k


def function_of_distance(program: FxProgram, step: int) -> str:
    """A step that :func:`distance_costs` names as a program of q and k, for :func:`by_distance`.

    The same text for steps of any programs that are the same function.
    """
    return program.part(_places(program), [step]).to_json()


def _by_distance(function: str, lengths: Lengths) -> Tensor:
    least, most = 1 - lengths.kv_len, lengths.q_len - 1
    distance = torch.arange(least - PADDING, most + PADDING + 1, dtype=torch.int32, device="cpu").clamp(least, most)
    zero = torch.zeros((), dtype=torch.int32, device="cpu")
    (values,) = FxProgram.from_json(function).run([distance, zero], distance.device, torch.float32)
    return values.expand(distance.shape).contiguous()


def by_distance(function: str, lengths: Lengths, device: torch.device) -> Tensor:
    """The values ``[D]`` of a function of the distance; outside of the lengths any."""
    return kept_for_graphs(device, _table(function, lengths, device))


@functools.lru_cache(maxsize=_KEPT)
def _table(function: str, lengths: Lengths, device: torch.device) -> Tensor:
    return constant_on(device, _by_distance(function, lengths))


class Gather(NamedTuple):
    """Reads a captured tensor for all distances, and heads if it is indexed by head as well.

    Attributes:
        indices: of each axis of the captured tensor; together they have the shape of the result: ``[D]``, or
            ``[H / P, D, P]``.
        outside: where one of them is out of bounds (there they are 0), or None.
    """

    indices: tuple[Tensor, ...]
    outside: Tensor | None

    def of(self, captured: Tensor) -> Tensor:
        found = captured[self.indices]
        if self.outside is None:
            return found
        return found.masked_fill(self.outside, float("nan") if found.is_floating_point() else 0)

    def adjoint(self, gradient: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The gradient of the captured tensor, of ``sizes``, from that of :meth:`of` for one head after the other.

        Args:
            gradient: ``[H, D]``; or ``[1, D]`` where no axis is indexed by head.
        """
        place = torch.zeros((), dtype=torch.int64, device=gradient.device)
        for index, size in zip(self.indices, sizes, strict=True):
            place = place * size + index % size
        gradient = gradient[..., None] if place.dim() == 3 else gradient[0]
        if self.outside is not None:
            gradient = gradient.masked_fill(self.outside, 0)
        total = gradient.new_zeros(math.prod(sizes))
        total.index_add_(0, place.expand(gradient.shape).flatten(), gradient.flatten())
        return total.view(sizes)


def gather(
    indices: tuple[str | int | None, ...],
    sizes: tuple[int, ...],
    lengths: Lengths,
    head_offset: int,
    pack: int,
    device: torch.device,
) -> Gather:
    """How to read a tensor of ``sizes`` at ``indices``.

    Args:
        indices: for each axis a function of the distance, a number, or None for the head.
        head_offset: what the mod sees is the head plus this.
        pack: heads that lie together, P; a divisor of their number.
    """
    return kept_for_graphs(device, _gather(indices, sizes, lengths, head_offset, pack, device))


@functools.lru_cache(maxsize=_KEPT)
def _gather(
    indices: tuple[str | int | None, ...],
    sizes: tuple[int, ...],
    lengths: Lengths,
    head_offset: int,
    pack: int,
    device: torch.device,
) -> Gather:
    by_head = None in indices
    found, outside = [], torch.zeros((), dtype=torch.bool, device="cpu")
    for index, size in zip(indices, sizes, strict=True):
        if index is None:
            x = torch.arange(lengths.heads, device="cpu") + head_offset
        elif isinstance(index, str):
            x = _by_distance(index, lengths)
            if x.dtype == torch.bool or x.is_floating_point():
                raise UnsupportedProgram("an index that is no whole number")
            x = x.long()
        else:
            x = torch.tensor(index, device="cpu")
        if index is None:
            x = x.view(-1, 1, pack)
        elif by_head and x.dim():
            x = x.view(1, -1, 1)
        inside = (x >= -size) & (x < size)
        found.append(torch.where(inside, x, 0))
        outside = outside | ~inside
    on_device = tuple(constant_on(device, x) for x in found)
    return Gather(on_device, constant_on(device, outside) if bool(outside.any()) else None)
