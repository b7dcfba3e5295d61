"""Score mods as CUDA code for the Hopper kernels: from a score program to the header ``generated.cuh``.

    score_math::GeneratedScore::apply(score, args, at) -> score
    score_math::GeneratedScore::apply(score, args, at, slope) -> the same; slope is multiplied by the derivative

What a graph computes from its captures alone runs before the kernel as torch operations (score_split.py).  Captured
tensors are read where they lie, by address, sizes and strides; captured numbers are arguments of the launch.  The code
depends on the mod and on its captures' dtypes and ranks (and on whether their offsets fit into 31 bits), not on their
values or sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram, UnsupportedProgram
from magi_flex.kernels.cuda_emit import KERNEL_DTYPES, RULES, cast, cuda_type, number
from magi_flex.kernels.ffa_score import GeneratedCode, KernelScore
from magi_flex.kernels.request import IndexMap, ScoreProgram
from magi_flex.kernels.score_split import JOINT_ARGUMENTS, SCORE_ARGUMENTS, Split, per_program, split_of
from magi_flex.kernels.score_walk import ScoreWalk, Value, kernel_inputs

SUPPORTED = frozenset(RULES) | {"aten::index", "flex_lib::zeros_and_scatter", "sum"}


_CONSTANTS = ("aten::full", "aten::scalar_tensor")


class _Arguments:
    """What a launch passes: the fields of ``Params`` and their values.  Equal inputs are passed once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fields: list[str] = []
        self.format = ""
        self.values: list[int | float] = []
        self.tables: list[Tensor] = []
        self.inputs: dict[Hashable, tuple[str, Any]] = {}  # name in the code, value

    def add(self, what: Hashable, x: Any) -> None:
        """``what`` tells inputs apart."""
        if what in self.inputs:
            return
        name = f"x{len(self.inputs)}"
        self.inputs[what] = f"args.{name}", x
        if isinstance(x, Tensor):
            x = x.to(self.device)  # single numbers may lie on the CPU
            self.tables.append(x)
            self._field("const void*", "Q", name, x.data_ptr())
            for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
                self._field("int64", "q", f"{name}_size{axis}", size)
                self._field("int64", "q", f"{name}_stride{axis}", stride)
        elif isinstance(x, float):
            self._field("double", "d", name, x)
        else:
            self._field("int64", "q", name, int(x))

    def _field(self, kind: str, code: str, name: str, value: int | float) -> None:
        self.fields.append(f"{kind} {name};")
        self.format += code
        self.values.append(value)

    def kinds(self) -> tuple[Any, ...]:
        """What of the inputs the code depends on."""
        return tuple(
            (what, x.dtype, x.dim(), _offset_type(x)) if isinstance(x, Tensor) else (what, type(x))
            for what, (_, x) in self.inputs.items()
        )


def _offset_type(x: Tensor) -> str:
    """For positions in ``x``, counted in elements."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return "int" if reach < 1 << 31 and max(x.shape, default=0) < 1 << 31 else "int64"


@dataclass(frozen=True)
class _Graph:
    """A score program as the code takes it.

    Attributes:
        arguments: how many of its arguments are single numbers.
        prefix: of the names that its code defines.
        constants: steps that are a number, whatever the captures are: value and dtype.
        inputs: the other steps before the kernel that it reads, with what tells them apart.
    """

    program: FxProgram
    arguments: int
    prefix: str
    split: Split
    constants: dict[int, tuple[bool | int | float, torch.dtype]]
    inputs: dict[int, Hashable]

    @staticmethod
    def of(program: FxProgram, arguments: int, prefix: str) -> _Graph:
        def build() -> _Graph:
            split = split_of(program, arguments)
            constants = {}
            for step in split.inputs:
                if (
                    program.steps[step][0] == "call"
                    and program.steps[step][1] in _CONSTANTS
                    and not program.references(step)
                ):
                    value = program.ending_at(step).run([None] * len(program.steps), torch.device("cpu"), torch.float32)
                    if value.dim() == 0:
                        constants[step] = value.item(), value.dtype
            captures = [n for n, step in enumerate(program.steps) if step[0] == "arg"][arguments:]
            inputs: dict[int, Hashable] = {
                step: ("capture", captures.index(step)) if step in captures else (prefix, step)
                for step in split.inputs
                if step not in constants
            }
            return _Graph(program, arguments, prefix, split, constants, inputs)

        return per_program(program, ("cuda", arguments, prefix), build)

    def add_inputs(self, launch: _Arguments, captures: Sequence[Any]) -> None:
        values = kernel_inputs(self.program, tuple(self.inputs), self.arguments, captures, launch.device)
        for what, x in zip(self.inputs.values(), values, strict=True):
            launch.add(what, x)


class _Writer(ScoreWalk):
    """The lines of one graph."""

    rules, cast = RULES, staticmethod(cast)

    def __init__(self, graph: _Graph, launch: _Arguments) -> None:
        super().__init__(graph.program, graph.arguments)
        self.prefix, self.split = graph.prefix, graph.split
        self.tables: dict[int, tuple[str, Tensor]] = {}  # with their names
        for step, (x, dtype) in graph.constants.items():
            self.define(step, number(x, dtype), torch.empty((), dtype=dtype, device="meta"), frozenset())
        for step, what in graph.inputs.items():
            name, x = launch.inputs[what]
            if not isinstance(x, Tensor):
                self.values[step] = Value(name, x)
            elif x.dim() == 0:
                self.define(step, _load(x.dtype, name, "0"), x.to("meta"), frozenset())
            else:
                self.tables[step] = (name, x)
        for step in self.split.tile:
            if step in self.split.sums:
                continue
            if self.program.steps[step][1] == "aten::index":
                self._index(step)
            else:
                self.call(step)

    def literal(self, x: bool | int | float) -> str:
        dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float32
        return number(x, dtype)

    def define(self, step: int, code: str, meta: Tensor, axes: frozenset[str]) -> None:
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"const {cuda_type(meta.dtype)} {name} = {code};")
        self.values[step] = Value(name, meta, axes)

    def value(self, step: int) -> Value:
        if step not in self.values:
            raise UnsupportedProgram("a captured tensor that is not indexed down to single elements")
        return self.values[step]

    def _index(self, step: int) -> None:
        source, indices = self.program.steps[step][3]
        if source["node"] not in self.tables:
            raise UnsupportedProgram("indexing of what is no captured tensor")
        name, table = self.tables[source["node"]]
        found = self.decode(indices)
        for index in found:
            whole = isinstance(index, Value) and not (
                isinstance(index.meta, Tensor) and (index.meta.dtype == torch.bool or index.meta.is_floating_point())
            )
            if not whole:
                raise UnsupportedProgram("an index that is no whole number")
        if len(found) < table.dim():
            raise UnsupportedProgram("a captured tensor that is not indexed down to single elements")
        offset = _offset_type(table)
        inside, terms = [], []
        for axis, index in enumerate(found):
            at = f"{self.prefix}{len(self.lines)}"
            size, stride = (f"static_cast<{offset}>({name}_{what}{axis})" for what in ("size", "stride"))
            self.lines.append(f"{offset} {at};")
            self.lines.append(f"const bool {at}_inside = locate<{offset}>({index.code}, {size}, {at});")
            inside.append(f"{at}_inside")
            terms.append(f"{at} * {stride}")
        # A pair that attends and indexes out of bounds must be seen: its score is NaN.
        other = number(float("nan") if table.is_floating_point() else 0, table.dtype)
        code = f"{' && '.join(inside)} ? {_load(table.dtype, name, ' + '.join(terms))} : {other}"
        axes = frozenset[str]().union(*(index.axes for index in found))
        self.define(step, code, torch.empty((1,) * 4, dtype=table.dtype, device="meta"), axes)

    def result(self) -> str:
        """The returned score, or its gradient."""
        step = self.split.outputs[0]
        return "0.0f" if step is None else cast(self.value(step), torch.float32)


def _load(dtype: torch.dtype, name: str, offset: str) -> str:
    if dtype == torch.bool:
        return f"load<uint8>({name}, {offset}) != 0"
    return f"load<{KERNEL_DTYPES.get(dtype, cuda_type(dtype))}>({name}, {offset})"


def generated_score(score: ScoreProgram, device: torch.device, backward: bool) -> KernelScore:
    """The score program for the forward or for the backward kernels.

    Raises ValueError for a graph that no code can be made of.
    """
    assert score.forward is not None
    try:
        return _generate(score, device, backward)
    except UnsupportedProgram as error:
        raise ValueError(f"score_mod: the ffa kernels cannot run it ({error}); choose another backend") from error


def _generate(score: ScoreProgram, device: torch.device, backward: bool) -> KernelScore:
    assert score.forward is not None
    launch = _Arguments(device)
    graphs = [_Graph.of(score.forward, SCORE_ARGUMENTS, "v")]
    if backward:
        assert score.joint is not None
        graphs.append(_Graph.of(score.joint, JOINT_ARGUMENTS, "d"))
    places = _places(launch, score.index_map)
    for graph in graphs:
        graph.add_inputs(launch, score.captures)

    def generate() -> tuple[GeneratedCode, list[_Graph]]:
        writers = [_Writer(graph, launch) for graph in graphs]
        text = _text(launch.fields, places, [(writer.lines, writer.result()) for writer in writers])
        return GeneratedCode(text, launch.format or "q"), graphs  # the graphs, so that they live as long as their ids

    key = ("code", *map(id, graphs), launch.kinds())
    code, _ = per_program(score.forward, key, generate)
    return KernelScore((), tuple(launch.values) or (0,), tuple(launch.tables), generated=code)


def _places(launch: _Arguments, index_map: IndexMap) -> list[str]:
    """Definitions of b, h, q and k, as the mod sees them."""
    found = {"b": "at.batch", "h": "at.head", "q": "at.row", "k": "at.key"}
    for name, offset in (("b", index_map.b_offset), ("h", index_map.h_offset)):
        if offset:
            launch.add(name, offset)
            found[name] += f" + static_cast<int>({launch.inputs[name][0]})"
    for name, index in (("q", index_map.q_index), ("k", index_map.k_index)):
        if index is not None:
            launch.add(name, index.to(torch.int32).contiguous())
            found[name] = f"load<int>({launch.inputs[name][0]}, {found[name]})"
    return [f"const int {name} = {code};" for name, code in found.items()]


def _text(fields: Sequence[str], places: Sequence[str], bodies: Sequence[tuple[list[str], str]]) -> str:
    def function(parameter: str, lines: Sequence[str], end: Sequence[str]) -> list[str]:
        body = [*places, *lines, *end]
        head = f"    FFA_DEVICE static float apply(float score, const Params& args, const ScoreIndex& at{parameter}) {{"
        return [head, *(f"        {line}" for line in body), "    }"]

    lines, result = bodies[0]
    text = [
        "// Generated by magi_flex from a score mod; see magi_flex/kernels/ffa_generated_score.py.",
        "namespace score_math {",
        "struct GeneratedScore {",
        "    static constexpr int kCount = 1;",
        "    static constexpr bool kSlopes = true;",
        "    struct Params {",
        *(f"        {field}" for field in fields or ["int64 unused;"]),
        "    };",
        *function("", lines, [f"return {result};"]),
    ]
    if len(bodies) > 1:
        of_gradient, derivative = bodies[1]
        end = ["const float grad = 1.0f;", *of_gradient, f"slope *= {derivative};", f"return {result};"]
        text += function(", float& slope", lines, end)
    return "\n".join([*text, "};", "}  // namespace score_math", ""])
