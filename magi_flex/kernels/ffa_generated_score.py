"""Score mods as CUDA code for the Hopper kernels: from a score program to the header ``generated.cuh``.

    score_math::GeneratedScore::of_head(args, batch, head) -> Head      what depends on batch entry and head alone
    score_math::GeneratedScore::of_row(args, head, row) -> Row          what depends on the row as well
    score_math::GeneratedScore::of_key(args, head, key) -> Key          or on the key
    score_math::GeneratedScore::apply(score, args, head, row, key) -> score
    score_math::GeneratedScore::apply(score, args, head, row, key, slope) -> score; slope *= the derivative

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
from magi_flex.kernels.score_walk import NO_AXES, ScoreWalk, Value, kernel_inputs

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


_SCORE = frozenset("qk")
_LEVELS = {NO_AXES: "head", frozenset("q"): "row", frozenset("k"): "key", _SCORE: ""}


class _Code:
    """Definitions by what they depend on: fields of Head, Row and Key, and variables of single scores.

    Equal expressions are one definition, so that a gradient's code shares what it can with the score's.
    """

    def __init__(self) -> None:
        self.fields: dict[str, list[str]] = {level: [] for level in _LEVELS.values()}
        self.lines: dict[str, list[str]] = {level: [] for level in _LEVELS.values()}
        self._names: dict[tuple[str, str, frozenset[str]], str] = {}

    def define(self, kind: str, code: str, axes: frozenset[str]) -> str:
        """How ``code``, of the C++ type ``kind``, is called from now on."""
        key = (kind, code, axes)
        if key not in self._names:
            level, name = _LEVELS[axes], f"v{len(self._names)}"
            if level:
                self.fields[level].append(f"{kind} {name};")
                self.lines[level].append(f"{level}.{name} = {code};")
            else:
                self.lines[level].append(f"const {kind} {name} = {code};")
            self._names[key] = f"{level}.{name}" if level else name
        return self._names[key]


class _Writer(ScoreWalk):
    """Adds the definitions of one graph."""

    rules, cast = RULES, staticmethod(cast)
    names = ("score", "head.b", "head.h", "row.q", "key.k", "grad")

    def __init__(self, graph: _Graph, launch: _Arguments, code: _Code) -> None:
        super().__init__(graph.program, graph.arguments)
        self.split, self.code = graph.split, code
        self.tables: dict[int, tuple[str, Tensor]] = {}  # with their names
        for step, (x, dtype) in graph.constants.items():
            self.define(step, number(x, dtype), torch.empty((), dtype=dtype, device="meta"), NO_AXES)
        for step, what in graph.inputs.items():
            name, x = launch.inputs[what]
            if not isinstance(x, Tensor):
                self.values[step] = Value(name, x)
            elif x.dim() == 0:
                self.define(step, _load(x.dtype, name, "0"), x.to("meta"), NO_AXES)
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
        self.values[step] = Value(self.code.define(cuda_type(meta.dtype), code, axes), meta, axes)

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
            size, stride = (f"static_cast<{offset}>({name}_{what}{axis})" for what in ("size", "stride"))
            at = self.code.define(offset, f"position<{offset}>({index.code}, {size})", index.axes)
            inside.append(self.code.define("bool", f"{at} >= 0", index.axes))
            terms.append(self.code.define(offset, f"{at} * {stride}", index.axes))
        # A pair that attends and indexes out of bounds must be seen: its score is NaN.
        other = number(float("nan") if table.is_floating_point() else 0, table.dtype)
        code = f"{' && '.join(inside)} ? {_load(table.dtype, name, ' + '.join(terms))} : {other}"
        axes = NO_AXES.union(*(index.axes for index in found))
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
        code = GeneratedCode(_text(launch, places, graphs), launch.format or "q")
        return code, graphs  # the graphs, so that they live as long as their ids

    key = ("code", *map(id, graphs), launch.kinds())
    code, _ = per_program(score.forward, key, generate)
    return KernelScore((), tuple(launch.values) or (0,), tuple(launch.tables), generated=code)


def _places(launch: _Arguments, index_map: IndexMap) -> dict[str, str]:
    """b, h, q and k, as the mod sees them."""
    found = {"b": "batch", "h": "head_index", "q": "row_index", "k": "key_index"}
    for name, offset in (("b", index_map.b_offset), ("h", index_map.h_offset)):
        if offset:
            launch.add(name, offset)
            found[name] += f" + static_cast<int>({launch.inputs[name][0]})"
    for name, index in (("q", index_map.q_index), ("k", index_map.k_index)):
        if index is not None:
            launch.add(name, index.to(torch.int32).contiguous())
            found[name] = f"load<int>({launch.inputs[name][0]}, {found[name]})"
    return found


def _text(launch: _Arguments, places: dict[str, str], graphs: Sequence[_Graph]) -> str:
    """The header, from the score's graph and, for the backward kernels, that of its gradient."""
    code = _Code()
    result = _Writer(graphs[0], launch, code).result()
    apply = list(code.lines[""])
    derivative = _Writer(graphs[1], launch, code).result() if len(graphs) > 1 else None

    def level(name: str, places_here: dict[str, str], parameters: str) -> list[str]:
        kind = name.capitalize()
        return [
            f"    struct {kind} {{",
            *(f"        int {place};" for place in places_here),
            *(f"        {field}" for field in code.fields[name]),
            "    };",
            f"    FFA_DEVICE static {kind} of_{name}(const Params& args, {parameters}) {{",
            f"        {kind} {name};",
            *(f"        {name}.{place} = {value};" for place, value in places_here.items()),
            *(f"        {line}" for line in code.lines[name]),
            f"        return {name};",
            "    }",
        ]

    def function(parameter: str, lines: Sequence[str]) -> list[str]:
        parameters = f"float score, const Params& args, const Head& head, const Row& row, const Key& key{parameter}"
        head = f"    FFA_DEVICE static float apply({parameters}) {{"
        return [head, *(f"        {line}" for line in lines), f"        return {result};", "    }"]

    text = [
        "// Generated by magi_flex from a score mod; see magi_flex/kernels/ffa_generated_score.py.",
        "namespace score_math {",
        "struct GeneratedScore {",
        "    static constexpr int kCount = 1;",
        "    static constexpr bool kSlopes = true;",
        "    struct Params {",
        *(f"        {field}" for field in launch.fields or ["int64 unused;"]),
        "    };",
        *level("head", {"b": places["b"], "h": places["h"]}, "int batch, int head_index"),
        *level("row", {"q": places["q"]}, "const Head& head, int row_index"),
        *level("key", {"k": places["k"]}, "const Head& head, int key_index"),
        *function("", apply),
    ]
    if derivative is not None:
        text += function(", float& slope", ["const float grad = 1.0f;", *code.lines[""], f"slope *= {derivative};"])
    return "\n".join([*text, "};", "}  // namespace score_math", ""])
