"""What a score mod's code reads in the Hopper kernels: captures, what torch computes from them, tables by distance."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_flex.fx_program import FxProgram, UnsupportedProgram, references
from magi_flex.kernels.ffa_capture_sums import CaptureSum, Indices, SumMemory, find_sums
from magi_flex.kernels.score_distance import Lengths, by_distance, distance_costs, function_of_distance, gather
from magi_flex.kernels.score_ranges import Range, ranges
from magi_flex.kernels.score_split import Split, split_of, sum_shape
from magi_flex.kernels.score_walk import kernel_inputs

_CONSTANTS = ("aten::full", "aten::scalar_tensor")
_READ_COST = 6  # cheap operations that take as long as reading a table by distance
_TABLE_BYTES = 64 << 20  # the largest table by distance and head


@dataclass(frozen=True)
class Layout:
    """Of the tables by distance that a launch may have.

    Attributes:
        lengths: of the request.
        head_offset: what the mod sees is the head plus this.
        pack: tables are ``[H / pack, D, pack]``; how many heads a warp of the kernel has of each row.
    """

    lengths: Lengths
    head_offset: int
    pack: int

    @property
    def has_heads(self) -> bool:
        """Whether there is room for a table by distance and head."""
        return 4 * self.lengths.distances * self.lengths.heads <= _TABLE_BYTES


class ByDistance(NamedTuple):
    """Tells tables by distance apart.

    Attributes:
        what: of which values.
        pack: of a table by distance and head, see :class:`Layout`; else 0.
    """

    what: Hashable
    pack: int


class Reading(NamedTuple):
    """A captured tensor that is read by distance and, perhaps, head.

    Attributes:
        source: the step that is the tensor.
        what: tells such tensors apart.
        indices: of each of its axes: a function of the distance, a number, or None for the head.
    """

    source: int
    what: Hashable
    indices: Indices


class LaunchArguments:
    """What a launch passes: the fields of ``Params`` and their values.  Equal inputs are passed once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fields: list[str] = []
        self.format = ""
        self.values: list[int | float] = []
        self.tables: list[Tensor] = []
        self.inputs: dict[Hashable, tuple[str, Any]] = {}  # name in the code, value
        # By graph: steps that read a captured tensor and the axes whose index is in bounds for all pairs.
        self.in_bounds: dict[str, frozenset[tuple[int, int]]] = {}

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
            if isinstance(what, ByDistance):
                return
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
            (what, x.dtype, x.dim(), offset_type(x)) if isinstance(x, Tensor) else (what, type(x))
            for what, (_, x) in self.inputs.items()
        )


def offset_type(x: Tensor) -> str:
    """For positions in ``x``, counted in elements."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return "int" if reach < 1 << 31 and max(x.shape, default=0) < 1 << 31 else "int64"


@dataclass(frozen=True)
class Graph:
    """A score program as the code takes it.

    Attributes:
        arguments: how many of its arguments are single numbers.
        name: tells the graphs of a mod apart.
        steps: those of single scores that the result needs, in order.
        constants: steps that are a number, whatever the captures are: value and dtype.
        inputs: the other steps before the kernel that the code reads, with what tells them apart.
        distances: of ``steps`` those whose values are read from a table by distance, as functions of the distance.
        readings: of ``steps`` those that are such a table of a captured tensor.
        sums: by their steps, the sums over all pairs that are wanted.
    """

    program: FxProgram
    arguments: int
    name: str
    split: Split
    steps: tuple[int, ...]
    constants: dict[int, tuple[bool | int | float, torch.dtype]]
    inputs: dict[int, Hashable]
    distances: dict[int, str]
    readings: dict[int, Reading]
    sums: dict[int, CaptureSum]

    @staticmethod
    def of(program: FxProgram, arguments: int, name: str, layout: Layout | None, sums: tuple[int, ...] = ()) -> Graph:
        """``layout``: of tables by distance, where these are possible; ``sums``: steps that are wanted sums."""
        has_heads = layout is not None and layout.has_heads
        key = ("cuda", arguments, name, layout is not None, has_heads, sums)
        return program.recall(key, lambda: _graph(program, arguments, name, layout is not None, has_heads, sums))

    def add_inputs(self, launch: LaunchArguments, captures: Sequence[Any], layout: Layout | None) -> None:
        sources = tuple(dict.fromkeys((*self.inputs, *(reading.source for reading in self.readings.values()))))
        found = kernel_inputs(self.program, sources, self.arguments, captures, launch.device)
        values = dict(zip(sources, found, strict=True))
        for step, what in self.inputs.items():
            launch.add(what, values[step])
        launch.in_bounds[self.name] = frozenset() if layout is None else self._in_bounds(self._read(values), layout)
        if layout is None or not (self.distances or self.readings):
            return
        launch.add("first", layout.lengths.first)
        launch.add("distances", layout.lengths.distances)
        for function in self.distances.values():
            launch.add(ByDistance(function, 0), by_distance(function, layout.lengths, launch.device))
        for step, reading in self.readings.items():
            source, what = values[reading.source].to(launch.device), self.table_of(step, layout)
            if source.dim() != len(reading.indices):
                raise UnsupportedProgram("a captured tensor that is not indexed down to single elements")
            if what not in launch.inputs:
                where = (tuple(source.shape), layout.lengths, layout.head_offset, layout.pack, launch.device)
                launch.add(what, gather(reading.indices, *where).of(source))

    def add_sums(
        self, launch: LaunchArguments, captures: Sequence[Any], lengths: Lengths, layout: Layout | None
    ) -> SumMemory:
        """Memory for the sums; the launch gets its addresses."""
        steps = {number: self.program.steps[number] for number in self.sums}
        scatters = [step for step in steps.values() if step[0] != "sum"]
        sizes = tuple(dict.fromkeys(n for step in scatters for n in references(step[3][0])))
        found = kernel_inputs(self.program, sizes, self.arguments, captures, launch.device)
        values = dict(zip(sizes, found, strict=True))
        shapes = {number: tuple(sum_shape(step, values)) for number, step in steps.items()}
        gathers = {}
        for number, what in self.sums.items():
            if what.kind == "distance":
                assert layout is not None
                where = (shapes[number], lengths, layout.head_offset, layout.pack, launch.device)
                gathers[number] = gather(what.by_distance, *where)
                launch.add("first", lengths.first)
        memory = SumMemory.of(self.sums, shapes, gathers, lengths, launch.device)
        for number, buffer in memory.buffers.items():
            launch.add(("sum", number), buffer)
        if layout is not None:
            written = [(number, shapes[number], what.indices) for number, what in self.sums.items()]
            launch.in_bounds[self.name] |= self._in_bounds(written, layout)
        return memory

    def _read(self, values: dict[int, Any]) -> Iterator[tuple[int, tuple[int, ...], Sequence[Any]]]:
        """Steps that read a captured tensor where it lies, with its shape and their indices."""
        for step in self.steps:
            if self.program.steps[step][1] == "aten::index" and step not in self.readings:
                source, indices = self.program.steps[step][3]
                table = values.get(source["node"])
                if isinstance(table, Tensor):
                    yield step, tuple(table.shape), indices

    def _in_bounds(
        self, accesses: Iterable[tuple[int, tuple[int, ...], Sequence[Any]]], layout: Layout
    ) -> frozenset[tuple[int, int]]:
        """Of steps, with shapes and indices, the axes whose index needs no check."""
        bounds = self.program.recall(("bounds", layout.lengths, layout.head_offset), lambda: self._bounds(layout))
        found = set()
        for step, shape, indices in accesses:
            for axis, (index, size) in enumerate(zip(indices, shape, strict=False)):
                low, high = bounds.get(index["node"], (-1, 0)) if isinstance(index, dict) else (index, index)
                if 0 <= low and high < size:
                    found.add((step, axis))
        return frozenset(found)

    def _bounds(self, layout: Layout) -> dict[int, Range]:
        _, _, h, q, k = [number for number, step in enumerate(self.program.steps) if step[0] == "arg"][:5]
        heads, q_len, kv_len = layout.lengths
        least = layout.head_offset
        return ranges(self.program, {h: (least, least + heads - 1), q: (0, q_len - 1), k: (0, kv_len - 1)})

    def table_of(self, step: int, layout: Layout) -> ByDistance:
        """The table that a step of ``distances`` or ``readings`` is read from."""
        if step in self.distances:
            return ByDistance(self.distances[step], 0)
        reading = self.readings[step]
        return ByDistance((reading.what, reading.indices), layout.pack if None in reading.indices else 0)


def _graph(
    program: FxProgram, arguments: int, name: str, by_distance: bool, by_head: bool, wanted: tuple[int, ...]
) -> Graph:
    split = split_of(program, arguments)
    given = [number for number, step in enumerate(program.steps) if step[0] == "arg"]
    costs = distance_costs(program, arguments) if by_distance else {}
    tile, distances, readings = set(split.tile) - set(split.sums), {}, {}

    def name_of(step: int) -> Hashable:
        return ("capture", given.index(step) - arguments) if step in given else (name, step)

    def functions(indices: Sequence[Any]) -> Indices | None:
        found = _functions_of_distance(program, indices, given[2], costs)
        return found if found is not None and (by_head or None not in found) else None

    sums = find_sums(program, split, arguments, wanted, functions)
    used: set[int] = set()
    open_steps = [step for step in split.outputs[:1] if step is not None]
    for what in sums.values():
        open_steps += [what.value, *(references(what.indices) if what.kind != "distance" else ())]
    while open_steps:
        step = open_steps.pop()
        if step in used:
            continue
        used.add(step)
        if step not in tile:
            continue
        is_index = program.steps[step][1] == "aten::index"
        source, indices = program.steps[step][3] if is_index else ({}, ())
        read = functions(indices) if is_index and source["node"] in split.inputs else None
        if read is not None:
            readings[step] = Reading(source["node"], name_of(source["node"]), read)
        elif costs.get(step, 0) > _READ_COST:
            distances[step] = function_of_distance(program, step)
        else:
            open_steps += program.references(step)
    constants, inputs = {}, {}
    for step in split.inputs:
        if step in used:
            constant = _constant(program, step)
            if constant is not None:
                constants[step] = constant
            else:
                inputs[step] = name_of(step)
    steps = tuple(step for step in split.tile if step in used)
    distances, readings = ({step: found[step] for step in steps if step in found} for found in (distances, readings))
    return Graph(program, arguments, name, split, steps, constants, inputs, distances, readings, sums)


def _constant(program: FxProgram, step: int) -> tuple[bool | int | float, torch.dtype] | None:
    """Value and dtype of a step that is one number in every call."""
    if program.steps[step][0] != "call" or program.steps[step][1] not in _CONSTANTS or program.references(step):
        return None
    value = program.ending_at(step).run([None] * len(program.steps), torch.device("cpu"), torch.float32)
    return (value.item(), value.dtype) if value.dim() == 0 else None


def _functions_of_distance(
    program: FxProgram, indices: Sequence[Any], head: int, costs: dict[int, int]
) -> Indices | None:
    """See :attr:`Reading.indices`; None where the indices are no such thing."""
    found: list[str | int | None] = []
    for index in indices:
        node = index["node"] if isinstance(index, dict) and "node" in index else None
        if type(index) is int:
            found.append(index)
        elif node == head and None not in found:
            found.append(None)
        elif node in costs:
            found.append(function_of_distance(program, node))
        else:
            return None
    return tuple(found) if any(isinstance(x, str) for x in found) else None
