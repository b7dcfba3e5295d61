"""A mask's program, analysed: what each value depends on, and its values on any part of the (b, h, q, k) grid.

A program computes one bool for one (b, h, q, k).  Here the same steps run on whole axes at once: values that depend on
one index alone take memory for that axis alone, because every value keeps the layout ``[B, H, Q, K]`` with size 1 in
the dimensions it does not depend on.

Shape legend: B batch, H query heads, Q query rows, K keys (each the full axis, a part of it, or 1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from inductor_lowering.op_result import result_like
from magi_flex.fx_program import PYTHON_FUNCTIONS, FxProgram, references
from magi_flex.remember import remembered

AXES = "bhqk"
_aten = torch.ops.aten
_MOST_KINDS = 64  # of captures, shapes and numbers, for which a program remembers its calls

# New tensors of a constant value: only the shape and dtype of the tensor argument matter.
_CREATION = {
    "aten::new_ones",
    "aten::new_zeros",
    "aten::new_full",
    "aten::ones_like",
    "aten::zeros_like",
    "aten::full_like",
}
# One element in, one element out, though torch does not tag them as pointwise.
_ELEMENTWISE = {
    "aten::_to_copy",
    "aten::floor_divide",
    "prims::convert_element_type",
}
_REDUCTIONS = {
    "aten::sum",
    "aten::prod",
    "aten::mean",
    "aten::any",
    "aten::all",
    "aten::max",
    "aten::min",
    "aten::amax",
    "aten::amin",
    "aten::argmax",
    "aten::argmin",
    "aten::count_nonzero",
    "aten::logsumexp",
    "aten::std",
    "aten::var",
    "aten::norm",
}
_ORDERING = {
    "aten::sort",
    "aten::argsort",
    "aten::topk",
    "aten::kthvalue",
    "aten::median",
    "aten::mode",
    "aten::cumsum",
    "aten::cumprod",
    "aten::cummax",
    "aten::cummin",
    "aten::unique_dim",
    "aten::_unique2",
}


class UnsupportedMask(ValueError):
    """The program is no mask over single (query, key) pairs; the message says what and what to do."""


@dataclass(frozen=True)
class Step:
    """One value of the program.

    Attributes:
        kind: "index" (one of b, h, q, k), "capture" or "call".
        op: the operator, for calls; name: its qualified name without overload.
        args, kwargs: operands; a ``Ref`` stands for an earlier step.
        depends: subset of "bhqk".
        dtype, shape: of the value for one (b, h, q, k); None for plain numbers.
        on_grid: can run on the ``[B, H, Q, K]`` layout directly (else through vmap).
    """

    kind: str
    op: Any = None
    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    depends: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    on_grid: bool = True

    @property
    def mixed(self) -> bool:
        """Depends on the query and on the key."""
        return "q" in self.depends and "k" in self.depends


@dataclass(frozen=True)
class Ref:
    step: int


def refs_of(value: Any) -> list[int]:
    """The steps that an operand refers to."""
    if isinstance(value, Ref):
        return [value.step]
    if isinstance(value, dict):
        return [i for x in value.values() for i in refs_of(x)]
    return [i for x in value for i in refs_of(x)] if isinstance(value, (list, tuple)) else []


class MaskProgram:
    """Raises UnsupportedMask for reductions of a single pair, sorting, and results that are not one bool."""

    def __init__(
        self,
        program: FxProgram,
        captures: Sequence[Any],
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        device: torch.device | str,
    ) -> None:
        self.sizes = {"b": batch, "h": heads, "q": q_len, "k": kv_len}
        self.device = torch.empty(0, device=device).device  # "cuda" becomes the current one, as tensors have it
        for i, capture in enumerate(captures):
            if isinstance(capture, Tensor) and capture.device != self.device and capture.dim() > 0:
                raise UnsupportedMask(
                    f"mask_mod: captured tensor {i} of shape {tuple(capture.shape)} is on {capture.device}, but the "
                    f"mask is built on {self.device}; move it there or pass that device"
                )
        self.captures = [c.to(self.device) if isinstance(c, Tensor) else c for c in captures]
        self.steps: list[Step] = []
        self._values: dict[int, Any] = {}  # values of steps that do not depend on both q and k
        self.result = self._read(program)

    # ---- reading ------------------------------------------------------------------------------------------------

    def _read(self, program: FxProgram) -> int:
        needed = _needed_steps(program)
        calls = self._known_calls(program)
        args = 0
        for at, raw in enumerate(program.steps):
            if raw[0] == "arg":
                self.steps.append(self._argument(args))
                args += 1
            elif raw[0] == "return":
                return self._checked_result(raw[1])
            elif at not in needed:
                self.steps.append(Step("unused"))
            elif raw[0] == "literal":
                value = self._literal(raw[1], getattr(torch, raw[2]))
                self.steps.append(Step("capture", args=(value,), dtype=value.dtype, shape=tuple(value.shape)))
            elif raw[0] == "python":
                numbers = [self._stand_in(self._decode(x)) for x in raw[2]]
                self.steps.append(Step("capture", args=(PYTHON_FUNCTIONS[raw[1]](*numbers),)))
            else:
                if at not in calls:
                    calls[at] = self._call(raw)
                self.steps.append(calls[at])
        raise UnsupportedMask("mask_mod: the program has no result")

    def _known_calls(self, program: FxProgram) -> dict[int, Step]:
        """Steps that call operators, by number; the program remembers them for captures of this kind, as finding out
        what an operator returns takes longer than the operator."""
        kinds = [(c.dtype, c.shape) if isinstance(c, Tensor) else c for c in self.captures]
        if any(isinstance(x, torch.SymInt) for x in kinds):
            return {}
        known: dict[Hashable, dict[int, Step]] = program.recall("calls", dict)
        return remembered(known, (self.device, *kinds), dict, _MOST_KINDS)

    def _literal(self, value: Any, dtype: torch.dtype) -> Tensor:
        """Numbers are written by the device itself, so that nothing has to be copied to it."""
        if isinstance(value, list):
            return torch.tensor(value, dtype=dtype, device=self.device)
        return torch.full((), value, dtype=dtype, device=self.device)

    def _argument(self, position: int) -> Step:
        if position < 4:
            return Step("index", args=(AXES[position],), depends=frozenset(AXES[position]), dtype=torch.int64)
        if position - 4 >= len(self.captures):
            raise UnsupportedMask(f"captures: {len(self.captures)} were given, but the program reads more")
        capture = self.captures[position - 4]
        if isinstance(capture, Tensor):
            return Step("capture", args=(capture,), dtype=capture.dtype, shape=tuple(capture.shape))
        return Step("capture", args=(capture,))

    def _call(self, raw: Any) -> Step:
        _, name, overload, raw_args, raw_kwargs = raw
        namespace, op_name = name.split("::")
        op = getattr(getattr(getattr(torch.ops, namespace), op_name), overload)
        args = tuple(self._decode(x) for x in raw_args)
        kwargs = {k: self._decode(v) for k, v in raw_kwargs.items() if not (isinstance(v, dict) and "omit" in v)}
        operands = [self.steps[i] for i in refs_of((args, kwargs))]
        if op._schema.is_mutable:
            raise UnsupportedMask(f"mask_mod: {name} writes in place; use the out-of-place form")
        depends = frozenset().union(*(x.depends for x in operands))
        if depends:
            self._refuse(name, operands[0])
        if name in _CREATION:
            depends = frozenset()
        like = result_like(op, tree_map(self._stand_in, args), tree_map(self._stand_in, kwargs))
        if not isinstance(like, Tensor):
            raise UnsupportedMask(f"mask_mod: {name} returns {type(like).__name__}; only single tensors are allowed")
        if name == "aten::index":
            on_grid = (
                not operands[0].depends
                and len(args[1]) == len(operands[0].shape)
                and all(isinstance(i, Ref) and not self.steps[i.step].shape for i in args[1])
            )
        else:
            on_grid = (torch.Tag.pointwise in op.tags or name in _ELEMENTWISE) and not any(x.shape for x in operands)
        return Step("call", op, name, args, kwargs, depends, like.dtype, tuple(like.shape), on_grid or not depends)

    @staticmethod
    def _refuse(name: str, operand: Step) -> None:
        if name in _ORDERING or (name in _REDUCTIONS and not operand.shape):
            raise UnsupportedMask(
                f"mask_mod: {name} was given a value for one (query, key) pair; a mask_mod sees one pair at a time, so "
                "reductions, sorting and top-k over queries or keys must be done before, and their result captured"
            )

    def _decode(self, x: Any) -> Any:
        if isinstance(x, dict):
            if "node" in x:
                return Ref(x["node"])
            if "dtype" in x:
                return getattr(torch, x["dtype"])
            return self.device if "device" in x else float(x["float"])
        return [self._decode(y) for y in x] if isinstance(x, list) else x

    def _stand_in(self, x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        step = self.steps[x.step]
        if step.dtype is None:
            return step.args[0]
        return torch.empty((), dtype=step.dtype).expand(step.shape)

    def _checked_result(self, raw: Any) -> int:
        raw = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
        if not isinstance(raw, dict) or "node" not in raw:
            raise UnsupportedMask("mask_mod: the result is no tensor; a bool for one (query, key) pair is needed")
        step = self.steps[raw["node"]]
        if step.dtype != torch.bool or step.shape:
            raise UnsupportedMask(
                f"mask_mod: the result is {step.dtype} of shape {step.shape}; a 0-d bool tensor is needed, so finish "
                "with a comparison"
            )
        return raw["node"]

    @functools.cached_property
    def element_cost(self) -> int:
        """Most numbers that a step holds for one (b, h, q, k)."""
        return max([1, *(math.prod(step.shape) for step in self.steps if step.mixed)])

    # ---- values -------------------------------------------------------------------------------------------------

    def constant(self, at: int) -> Any:
        """The value (tensor or number) of a step that depends on no index."""
        if at not in self._values:
            step = self.steps[at]
            if step.kind == "capture":
                self._values[at] = step.args[0]
            else:
                self._values[at] = self._run_scalar(step, lambda x: self.constant(x.step))
        return self._values[at]

    def _run_scalar(self, step: Step, value_of: Any) -> Any:
        def get(x: Any) -> Any:
            if isinstance(x, Ref):
                if step.name in _CREATION:
                    source = self.steps[x.step]
                    return torch.zeros((), dtype=source.dtype, device=self.device).expand(source.shape)
                return value_of(x)
            return x

        return step.op(*tree_map(get, step.args), **tree_map(get, step.kwargs))

    def axis_value(self, at: int) -> Tensor:
        """A step that does not depend on both q and k, on the whole grid: ``[B, H, Q, 1]`` or ``[B, H, 1, K]``."""
        key = ~at  # constants keep their own entry
        if key not in self._values:
            ranges = {axis: (0, self.sizes[axis]) for axis in AXES}
            step = self.steps[at]
            if step.mixed:
                raise AssertionError("a value that depends on q and k has no axis")
            self._values[key] = self._evaluate(at, ranges)
        return self._values[key]

    def tile_value(self, at: int, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Any step on rows [begin, end) and keys [begin, end): a tensor that broadcasts to ``[B, H, rows, keys]``."""
        ranges = {"b": (0, self.sizes["b"]), "h": (0, self.sizes["h"]), "q": rows, "k": keys}
        return self._evaluate(at, ranges, part=True)

    def axis_operands(self, at: int) -> list[int] | None:
        """The largest parts of a step that do not depend on both q and k; None if it cannot run on the grid."""
        found: dict[int, None] = {}
        open_steps = [at]
        while open_steps:
            number = open_steps.pop()
            step = self.steps[number]
            if step.depends and not step.mixed and not step.shape:
                found[number] = None
            elif step.depends:
                if not step.on_grid:
                    return None
                open_steps += reversed(refs_of((step.args, step.kwargs)))
        return list(found)

    def value_from(self, at: int, operands: dict[int, Tensor]) -> Tensor:
        """A step from the values of its ``axis_operands``."""
        return self._evaluate(at, {}, known=operands)

    def _evaluate(
        self,
        at: int,
        ranges: dict[str, tuple[int, int]],
        part: bool = False,
        known: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run on the grid; ``part`` reads values of single axes from the whole axis and slices them."""
        values: dict[int, Any] = dict(known or {})

        def is_axis(step: Step) -> bool:
            return part and not step.mixed and not step.shape and step.on_grid

        for number in self._needed(at, lambda i, step: i in values or not step.on_grid or is_axis(step)):
            step = self.steps[number]
            if number in values:
                continue
            if not step.depends:
                constant = self.constant(number)
                scalar = isinstance(constant, Tensor) and constant.dim() == 0
                values[number] = constant.view(1, 1, 1, 1) if scalar else constant
            elif is_axis(step):
                values[number] = _slice_axes(self.axis_value(number), ranges, self.sizes)
            elif step.kind == "index":
                axis = step.args[0]
                shape = [1, 1, 1, 1]
                shape[AXES.index(axis)] = -1
                values[number] = torch.arange(*ranges[axis], device=self.device).view(shape)
            elif not step.on_grid:
                values[number] = self._vmapped(number, ranges)
            elif step.name == "aten::index":
                indices = [_as_index(values[x.step]) for x in step.args[1]]
                values[number] = step.op(self.constant(step.args[0].step), indices)
            else:
                args, kwargs = tree_map(lambda x: values[x.step] if isinstance(x, Ref) else x, (step.args, step.kwargs))
                values[number] = step.op(*args, **kwargs)
        out = values[at]
        if not isinstance(out, Tensor):
            out = torch.full((1, 1, 1, 1), out, device=self.device)
        return out

    def _needed(self, at: int, is_known: Callable[[int, Step], bool]) -> list[int]:
        """``at`` and the steps that it is computed from, operands first; constants and what is known need no others.

        No function that calls itself: that is a reference cycle, which keeps all that it sees until Python's next
        garbage collection, and memory of a CUDA graph longer than it may be kept.
        """
        needed: set[int] = set()
        open_steps = [at]
        while open_steps:
            number = open_steps.pop()
            step = self.steps[number]
            if number not in needed and step.depends and not is_known(number, step):
                open_steps += refs_of((step.args, step.kwargs))
            needed.add(number)
        return sorted(needed)

    def _vmapped(self, at: int, ranges: dict[str, tuple[int, int]]) -> Tensor:
        """Run the steps that ``at`` needs with torch.vmap over the axes it depends on (tensors of any rank inside)."""
        axes = [axis for axis in AXES if axis in self.steps[at].depends]
        needed = self._needed(at, lambda i, step: False)

        def single(*indices: Tensor) -> Tensor:
            index_of = dict(zip(axes, indices, strict=True))
            values: dict[int, Any] = {}
            for number in needed:
                step = self.steps[number]
                if not step.depends:
                    values[number] = self.constant(number)
                elif step.kind == "index":
                    values[number] = index_of[step.args[0]]
                else:
                    values[number] = self._run_scalar(step, lambda x: values[x.step])
            return values[at]

        mapped = single
        for position in reversed(range(len(axes))):
            in_dims = tuple(0 if i == position else None for i in range(len(axes)))
            mapped = torch.vmap(mapped, in_dims=in_dims)
        out = mapped(*(torch.arange(*ranges[axis], device=self.device) for axis in axes))
        lead = [out.shape[axes.index(axis)] if axis in axes else 1 for axis in AXES]
        return out.reshape(lead + list(out.shape[len(axes) :]))


def _needed_steps(program: FxProgram) -> set[int]:
    needed: set[int] = set()
    for at in reversed(range(len(program.steps))):
        step = program.steps[at]
        if step[0] == "return" or at in needed:
            needed.update(references(step[1:]))
    return needed


def _as_index(index: Tensor) -> Tensor:
    """Indices as torch takes them; a bool index of one pair would be a mask, which has another meaning."""
    if index.dtype == torch.bool:
        raise UnsupportedMask("mask_mod: a bool was used as an index; convert it with .long() to look up a table")
    return index.long()


def _slice_axes(x: Tensor, ranges: dict[str, tuple[int, int]], sizes: dict[str, int]) -> Tensor:
    for dim, axis in ((2, "q"), (3, "k")):
        if x.shape[dim] == sizes[axis] and sizes[axis] > 1:
            x = x[(slice(None),) * dim + (slice(*ranges[axis]),)]
    return x
