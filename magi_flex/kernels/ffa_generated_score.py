"""Score mods as CUDA code for the Hopper kernels: from a score program to the header ``generated.cuh``.

    score_math::GeneratedScore::of_head(args, batch, head) -> Head      what depends on batch entry and head alone
    score_math::GeneratedScore::of_row(args, head, row) -> Row          what depends on the row as well
    score_math::GeneratedScore::of_key(args, head, key) -> Key          or on the key
    score_math::GeneratedScore::apply(score, args, head, row, key) -> score
    score_math::GeneratedScore::apply(score, args, head, row, key, slope) -> score; slope *= the derivative

and where captures want gradients, which are sums over all pairs (csrc/cuda/ffa/capture_sums.cuh),

    score_math::GeneratedScore::differentiate(score, args, head, row, key, gradient, values, places) -> gradient of the
        score, from that of the mod's result; what the pair adds to each sum, and where
    score_math::GeneratedScore::place(args, head, row, key, n) -> where, unless that depends on the pair

What a graph computes from its captures alone runs before the kernel as torch operations (score_split.py).  Captured
tensors are read where they lie, by address, sizes and strides; captured numbers are arguments of the launch.  What
depends on q - k, and the head, alone is read from tables by distance (score_distance.py) where that is cheaper.  The
code depends on the mod and on its captures' dtypes and ranks, on whether their offsets fit into 31 bits, on which of
their indices are in bounds for all pairs, and on how tables by distance and head lie; not on captures' values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_flex.fx_program import UnsupportedProgram
from magi_flex.kernels.cuda_emit import KERNEL_DTYPES, RULES, cast, cuda_type, number
from magi_flex.kernels.ffa_score import GeneratedCode, KernelScore
from magi_flex.kernels.ffa_score_inputs import ByDistance, Graph, LaunchArguments, Layout, offset_type
from magi_flex.kernels.request import IndexMap, ScoreProgram
from magi_flex.kernels.score_distance import Lengths
from magi_flex.kernels.score_split import (
    JOINT_ARGUMENTS,
    SCORE_ARGUMENTS,
    capture_gradients,
    split_of,
    wanted_sums,
)
from magi_flex.kernels.score_walk import NO_AXES, ScoreWalk, Value

SUPPORTED = frozenset(RULES) | {"aten::index", "flex_lib::zeros_and_scatter", "sum"}


_ROW, _SCORE = frozenset("q"), frozenset("qk")
_LEVELS = {NO_AXES: "head", _ROW: "row", frozenset("k"): "key", _SCORE: ""}


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


class _Sum(NamedTuple):
    """Code of a sum over all pairs.

    Attributes:
        kind: see CaptureSum.
        memory: the float32 tensor that it is added to.
        place: of the element there, counted from its beginning; negative: there is none.  By distance: of distance 0.
        value: of a pair.
    """

    kind: str
    memory: str
    place: str
    value: str


class _Writer(ScoreWalk):
    """Adds the definitions of one graph."""

    rules, cast = RULES, staticmethod(cast)
    names = ("score", "head.b", "head.h", "row.q", "key.k", "grad")

    def __init__(self, graph: Graph, launch: LaunchArguments, layout: Layout | None, code: _Code) -> None:
        super().__init__(graph.program, graph.arguments)
        self.graph, self.code = graph, code
        self.in_bounds = launch.in_bounds[graph.name]
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
        for step in graph.steps:
            if layout is not None and step in (graph.distances.keys() | graph.readings.keys()):
                self._by_distance(step, launch, graph.table_of(step, layout))
            elif self.program.steps[step][1] == "aten::index":
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

    def _by_distance(self, step: int, launch: LaunchArguments, what: ByDistance) -> None:
        (name, table), (first, _), (distances, _) = (launch.inputs[x] for x in (what, "first", "distances"))
        columns, row = what.pack or 1, f"row.first + static_cast<int>({first})"
        if what.pack:
            block = f"head.first / {columns} * static_cast<int>({distances})"
            row = f"({block} + {row}) * {columns} + head.first % {columns}"
        kinds = {torch.bool: "uint8", torch.bfloat16: "uint16", torch.float16: "uint16"}
        memory = kinds.get(table.dtype, cuda_type(table.dtype))
        of_row = self.code.define("const void*", f"advance<{memory}>({name}, {row})", _ROW)
        # Only the last term differs between a thread's scores, and is part of the instruction.
        at = f"advance<{memory}>({of_row}, key.first * -{columns})"
        code = _load(table.dtype, at, f"(row.offset - key.offset) * {columns}")
        self.define(step, code, torch.empty((1,) * 4, dtype=table.dtype, device="meta"), _SCORE)

    def _index(self, step: int) -> None:
        source, indices = self.program.steps[step][3]
        if source["node"] not in self.tables:
            raise UnsupportedProgram("indexing of what is no captured tensor")
        name, table = self.tables[source["node"]]
        found = self.decode(indices)
        if len(found) < table.dim():
            raise UnsupportedProgram("a captured tensor that is not indexed down to single elements")
        offset, inside, axes = self._offset(step, found, name, offset_type(table))
        code = _load(table.dtype, name, offset)
        if inside:
            # A pair that attends and indexes out of bounds must be seen: its score is NaN.
            other = number(float("nan") if table.is_floating_point() else 0, table.dtype)
            code = f"{inside} ? {code} : {other}"
        self.define(step, code, torch.empty((1,) * 4, dtype=table.dtype, device="meta"), axes)

    def _offset(
        self, step: int, indices: Sequence[Any], name: str, offset: str, first_axis: int = 0
    ) -> tuple[str, str, frozenset[str]]:
        """Where an element of a tensor lies, of the type ``offset``; whether its indices are in bounds (empty: they
        always are); what they depend on.  ``first_axis``: of the tensor's sizes and strides."""
        inside, terms = [], []
        for axis, index in enumerate(indices):
            whole = isinstance(index, Value) and not (
                isinstance(index.meta, Tensor) and (index.meta.dtype == torch.bool or index.meta.is_floating_point())
            )
            if not whole:
                raise UnsupportedProgram("an index that is no whole number")
            size, stride = (f"static_cast<{offset}>({name}_{what}{first_axis + axis})" for what in ("size", "stride"))
            if (step, axis) in self.in_bounds:
                at = f"static_cast<{offset}>({index.code})"
            else:
                at = self.code.define(offset, f"position<{offset}>({index.code}, {size})", index.axes)
                inside.append(self.code.define("bool", f"{at} >= 0", index.axes))
            terms.append(self.code.define(offset, f"{at} * {stride}", index.axes))
        return " + ".join(terms), " && ".join(inside), NO_AXES.union(*(index.axes for index in indices))

    def sums(self, launch: LaunchArguments, place_type: str) -> list[_Sum]:
        """The code of the graph's sums."""
        found = []
        for step, what in self.graph.sums.items():
            name, _ = launch.inputs["sum", step]
            memory = f"static_cast<float*>(const_cast<void*>({name}))"
            if what.kind == "distance":
                head = f"head.first * static_cast<{place_type}>({name}_stride0) + " if None in what.by_distance else ""
                place = f"{head}static_cast<{place_type}>({launch.inputs['first'][0]})"
            elif what.indices:
                place, inside, _ = self._offset(step, self.decode(list(what.indices)), name, place_type, 1)
                if what.kind == "pair":  # the copy of this thread block
                    copy = f"static_cast<int>(blockIdx.x & ({name}_size0 - 1)) * static_cast<int>({name}_stride0)"
                    place = f"{self.code.define('int', copy, NO_AXES)} + {place}"
                place = f"{inside} ? {place} : -1" if inside else place
            else:
                place = "0"
            found.append(_Sum(what.kind, memory, place, cast(self.value(what.value), torch.float32)))
        return found

    def result(self) -> str:
        """The returned score, or its gradient."""
        step = self.graph.split.outputs[0]
        return "0.0f" if step is None else cast(self.value(step), torch.float32)


def _load(dtype: torch.dtype, name: str, offset: str) -> str:
    if dtype == torch.bool:
        return f"load<uint8>({name}, {offset}) != 0"
    return f"load<{KERNEL_DTYPES.get(dtype, cuda_type(dtype))}>({name}, {offset})"


class NoCode(ValueError):
    """The score mod has no code; the message says why and what to do."""


def generated_score(
    score: ScoreProgram, device: torch.device, backward: bool, lengths: Lengths, pack: int
) -> KernelScore:
    """The score program for the forward or for the backward kernels.

    ``pack``: how tables by distance and head lie in memory, see :class:`Layout`.

    Raises NoCode for a graph that no code can be made of.
    """
    assert score.forward is not None
    layout = Layout(lengths, score.index_map.h_offset, pack)
    in_order = score.index_map.q_index is None and score.index_map.k_index is None
    try:
        return _generate(score, device, backward, layout, in_order)
    except UnsupportedProgram as error:
        raise NoCode(f"score_mod: the ffa kernels cannot run it ({error}); choose another backend") from error


def _generate(score: ScoreProgram, device: torch.device, backward: bool, layout: Layout, in_order: bool) -> KernelScore:
    assert score.forward is not None
    launch, by_distance = LaunchArguments(device), layout if in_order else None
    graphs = [Graph.of(score.forward, SCORE_ARGUMENTS, "v", by_distance)]
    wanted = wanted_sums(score) if backward and any(score.needs_grad) else ()
    if backward:
        assert score.joint is not None
        graphs.append(Graph.of(score.joint, JOINT_ARGUMENTS, "d", by_distance, wanted))
    places = _places(launch, score.index_map)
    for graph in graphs:
        graph.add_inputs(launch, score.captures, by_distance)
    memory = graphs[-1].add_sums(launch, score.captures, layout.lengths, by_distance) if wanted else None

    def generate() -> tuple[GeneratedCode | str, list[Graph]]:
        """The code, or why there is none; and the graphs, so that they live as long as their ids."""
        try:
            text = _text(launch, by_distance, places, graphs)
            return GeneratedCode(text, launch.format or "q", bool(wanted)), graphs
        except UnsupportedProgram as error:
            return str(error), graphs

    key = ("code", *map(id, graphs), launch.kinds(), tuple(launch.in_bounds.items()))
    code, _ = score.forward.recall(key, generate)
    if isinstance(code, str):
        raise UnsupportedProgram(code)

    def gradients() -> tuple[Tensor | None, ...]:
        assert score.joint is not None
        sums = split_of(score.joint, JOINT_ARGUMENTS).sums
        return capture_gradients(score, memory.totals(sums) if memory else [None] * len(sums), device)

    return KernelScore((), tuple(launch.values) or (0,), tuple(launch.tables), generated=code, gradients=gradients)


def _places(launch: LaunchArguments, index_map: IndexMap) -> dict[str, str]:
    """b, h, q and k, as the mod sees them."""
    found = {"b": "batch", "h": "first", "q": "min(first + offset, last)", "k": "min(first + offset, last)"}
    for name, offset in (("b", index_map.b_offset), ("h", index_map.h_offset)):
        if offset:
            launch.add(name, offset)
            found[name] += f" + static_cast<int>({launch.inputs[name][0]})"
    for name, index in (("q", index_map.q_index), ("k", index_map.k_index)):
        if index is not None:
            launch.add(name, index.to(torch.int32).contiguous())
            found[name] = f"load<int>({launch.inputs[name][0]}, {found[name]})"
    return found


def _text(launch: LaunchArguments, layout: Layout | None, places: dict[str, str], graphs: Sequence[Graph]) -> str:
    """The header, from the score's graph and, for the backward kernels, that of its gradient."""
    code, derivative, sums = _Code(), "grad", list[_Sum]()
    buffers = (launch.inputs["sum", step][1] for step in graphs[-1].sums)
    place_type = "int64" if "int64" in map(offset_type, buffers) else "int"
    result = _Writer(graphs[0], launch, layout, code).result()
    apply = list(code.lines[""])
    if len(graphs) > 1:
        writer = _Writer(graphs[1], launch, layout, code)
        derivative, sums = writer.result(), writer.sums(launch, place_type)

    def level(name: str, places_here: dict[str, str], parameters: str) -> list[str]:
        kind = name.capitalize()
        places_here = {x: x for x in ("first", "offset") if f"int {x}" in parameters} | places_here
        return [
            f"    struct {kind} {{",
            *(f"        int {field};" for field in places_here),
            *(f"        {field}" for field in code.fields[name]),
            "    };",
            f"    FFA_DEVICE static {kind} of_{name}(const Params& args, {parameters}) {{",
            f"        {kind} {name};",
            *(f"        {name}.{field} = {value};" for field, value in places_here.items()),
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
        f"    static constexpr bool kSlopes = {'false' if derivative == 'grad' else 'true'};",
        f"    static constexpr int kSums = {len(sums)};",
        "    struct Params {",
        *(f"        {field}" for field in launch.fields or ["int64 unused;"]),
        "    };",
        *level("head", {"b": places["b"], "h": places["h"]}, "int batch, int first"),
        *level("row", {"q": places["q"]}, "const Head& head, int first, int offset, int last"),
        *level("key", {"k": places["k"]}, "const Head& head, int first, int offset, int last"),
        *function("", apply),
    ]
    if len(graphs) > 1:
        text += function(", float& slope", ["const float grad = 1.0f;", *code.lines[""], f"slope *= {derivative};"])
    if sums:
        lines = [*apply, f"const float grad = gradient({result});", *code.lines[""][len(apply) :]]
        text += _sums_text(sums, place_type, lines, derivative)
    return "\n".join([*text, "};", "}  // namespace score_math", ""])


def _sums_text(sums: Sequence[_Sum], place_type: str, lines: Sequence[str], derivative: str) -> list[str]:
    def by_number(values: Sequence[str]) -> str:
        return " : ".join([*(f"n == {n} ? {value}" for n, value in enumerate(values[:-1])), values[-1]])

    of_pair = [n for n, x in enumerate(sums) if x.kind == "pair"]
    places = by_number([f"static_cast<Place>({'-1' if n in of_pair else x.place})" for n, x in enumerate(sums)])
    parameters = "const Params& args, const Head& head, const Row& row, const Key& key"
    kinds, memories = by_number([f"SumKind::{x.kind}" for x in sums]), by_number([x.memory for x in sums])
    return [
        f"    using Place = {place_type};",
        f"    FFA_DEVICE static constexpr SumKind sum_kind(int n) {{ return {kinds}; }}",
        f"    FFA_DEVICE static float* sum(const Params& args, int n) {{ return {memories}; }}",
        f"    FFA_DEVICE static Place place({parameters}, int n) {{ return {places}; }}",
        "    template <class Gradient>",
        f"    FFA_DEVICE static float differentiate(float score, {parameters}, const Gradient& gradient,",
        "                                          float (&values)[kSums], Place (&places)[kSums]) {",
        *(f"        {line}" for line in lines),
        *(f"        values[{n}] = {x.value};" for n, x in enumerate(sums)),
        *(f"        places[{n}] = {sums[n].place};" for n in of_pair),
        f"        return {derivative};",
        "    }",
    ]
