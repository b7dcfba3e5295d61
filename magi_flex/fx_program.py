"""A mod's FX graph as a small serialisable program that can be run on tensors of any broadcastable shape.

Ops carry the program as a JSON string, so that a compiled graph (and a cached one) holds everything the kernel needs.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from magi_flex.remember import remembered

T = TypeVar("T")
_MOST_FOUND = 512  # of what is remembered about a program
LARGEST_LITERAL = 4096  # elements of a constant tensor that is stored inside the program

_DETACH_IN_PLACE = torch.ops.aten.detach_.default  # how tracing leaves torch.tensor(number); it writes nothing
_IDENTITIES = {
    _DETACH_IN_PLACE,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
}
PYTHON_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv)},
    **{f.__name__: f for f in (operator.mod, operator.neg, operator.pow, abs)},
    **{"sym_max": torch.sym_max, "sym_min": torch.sym_min},
}
_PYTHON_NAMES = {**{f: name for name, f in PYTHON_FUNCTIONS.items()}, operator.abs: "abs"}  # a function of its own


class UnsupportedProgram(Exception):
    """The graph holds something that cannot be serialised or run tile by tile; the message says what."""


class InvalidMod(ValueError):
    """The mod breaks FlexAttention's rules (it sees one score, has no side effects); the message says how."""


@dataclass(frozen=True)
class ScatterAdd:
    """A capture's gradient as contributions: zeros(shape) with ``values`` added at ``indices``."""

    shape: tuple[int, ...]
    indices: list[Tensor]
    values: Tensor

    def add_to(self, total: Tensor) -> None:
        total.index_put_(tuple(self.indices), self.values.to(total.dtype), accumulate=True)

    def to_dense(self) -> Tensor:
        total = self.values.new_zeros(self.shape)
        self.add_to(total)
        return total


@dataclass(frozen=True)
class FxProgram:
    """Steps in order.

    ["arg"], ["call", op, overload, args, kwargs], ["python", function, args] (arithmetic on sizes),
    ["literal", values, dtype], ["sum", value] (a gradient's sum over all scores), or last ["return", values].

    ``steps`` refer to earlier ones by number ({"node": i}).  Devices are not stored: tensor creation runs on the
    device of the inputs.  ``dtypes`` are those of the steps' values when the graph was traced (None: no tensor, or not
    known), empty for a program that was made in another way.  ``memo`` holds what was found out about the program, by
    whoever found it.
    """

    steps: tuple[Any, ...]
    dtypes: tuple[torch.dtype | None, ...] = field(default=(), repr=False, compare=False)
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @functools.cached_property
    def _literals(self) -> dict[tuple[int, torch.device], Tensor]:
        """Constant tensors that were made, by step and device."""
        return {}

    def recall(self, what: Hashable, build: Callable[[], T]) -> T:
        """``build()``, or what it gave earlier for the same ``what``."""
        return remembered(self.memo, what, build, _MOST_FOUND)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are without the memo."""
        return FxProgram, (self.steps, self.dtypes)

    @staticmethod
    def from_graph(graph: Graph | GraphModule) -> FxProgram:
        """``graph``: a module where the graph reads constants, which it holds.

        Raises UnsupportedProgram for anything but placeholders, small constants, aten calls and size arithmetic.
        """
        builder = ProgramBuilder(graph)
        for node in used_nodes(builder.graph):
            builder.add(node)
        return builder.program()

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> FxProgram:
        """The same object for the same text, so that what was found out about it is kept."""
        return FxProgram(tuple(json.loads(text)))

    def to_json(self) -> str:
        return json.dumps(list(self.steps), separators=(",", ":"))

    def ending_at(self, step: int) -> FxProgram:
        """The program, of the same arguments, that returns the value of ``step``."""
        needed = {step}
        for number in range(step, -1, -1):
            if number in needed:
                needed.update(self.references(number))
        kept = [n for n, s in enumerate(self.steps) if n in needed or s[0] == "arg"]
        renumbered = {old: new for new, old in enumerate(kept)}
        steps = [_renumber(self.steps[n], renumbered) for n in kept]
        dtypes = (*(self.dtypes[n] for n in kept), None) if self.dtypes else ()
        return FxProgram((*steps, ["return", {"node": renumbered[step]}]), dtypes)

    def references(self, step: int) -> list[int]:
        """The steps whose values ``step`` reads."""
        return references(self.steps[step][1:])

    def part(self, known: Sequence[int], outputs: Sequence[int | None]) -> FxProgram:
        """The program that takes the values of the steps ``known`` as arguments and returns those of ``outputs``."""
        needed = {x for x in outputs if x is not None}
        for number in range(len(self.steps) - 1, -1, -1):
            if number in needed and number not in known:
                needed.update(self.references(number))
        rest = [n for n in range(len(self.steps)) if n in needed and n not in known]
        renumbered = {old: new for new, old in enumerate([*known, *rest])}
        steps = [["arg"] for _ in known] + [_renumber(self.steps[n], renumbered) for n in rest]
        returned = [None if x is None else {"node": renumbered[x]} for x in outputs]
        return FxProgram((*steps, ["return", returned]))

    def with_reference(self, step: int, instead: int) -> FxProgram:
        """The program in which the value of step ``instead`` is used wherever that of ``step`` was."""
        numbers = {n: instead if n == step else n for n in range(len(self.steps))}
        return FxProgram(tuple(_renumber(s, numbers) for s in self.steps), self.dtypes)

    def without_arguments(self, unused: Collection[int]) -> FxProgram:
        """The program without these argument steps, which nothing refers to."""
        kept = [n for n in range(len(self.steps)) if n not in unused]
        renumbered = {old: new for new, old in enumerate(kept)}
        return FxProgram(tuple(_renumber(self.steps[n], renumbered) for n in kept))

    def run(
        self,
        args: Sequence[Any],
        device: torch.device,
        low_precision: torch.dtype | None = None,
        attended: Tensor | None = None,
    ) -> Any:
        """Run on ``args`` (tensors, ints); returns what the graph returns.

        The gradient of a capture is its sum over all scores, as a tensor of the capture's shape or as a
        :class:`ScatterAdd`.

        Args:
            low_precision: the dtype to use where the graph converts to bfloat16 or float16 (a mod is traced with
                scores in the query's dtype, while kernels hold them in float32).
            attended: bool tile; elsewhere captures may be indexed out of bounds, and nothing, not even NaN, is added
                to their gradients.
        """
        values: list[Any] = []
        remaining = iter(args)

        def decode(x: Any) -> Any:
            return _decoded(x, values, device, low_precision, dense=True)

        def keep(tile: Tensor) -> Tensor:
            return tile if attended is None else torch.where(attended, tile, 0)

        for number, step in enumerate(self.steps):
            kind = step[0]
            if kind == "arg":
                values.append(next(remaining))
            elif kind == "return":
                return _decoded(step[1], values, device, low_precision, dense=False)
            elif kind == "python":
                values.append(PYTHON_FUNCTIONS[step[1]](*decode(step[2])))
            elif kind == "literal":
                if (number, device) not in self._literals:
                    data = torch.tensor(decode(step[1]), dtype=getattr(torch, step[2]), device="cpu")
                    self._literals[number, device] = constant_on(device, data)
                values.append(kept_for_graphs(device, self._literals[number, device]))
            elif kind == "sum":
                values.append(keep(decode(step[1])).sum())
            elif step[1] == "flex_lib::zeros_and_scatter":
                shape, indices, tile = decode(step[3])
                values.append(ScatterAdd(tuple(shape), [keep(i).expand(tile.shape) for i in indices], keep(tile)))
            elif step[1] == "aten::index":
                values.append(_index(*decode(step[3]), attended))
            else:
                namespace, name = step[1].split("::")
                op = getattr(getattr(getattr(torch.ops, namespace), name), step[2])
                kwargs = {k: decode(v) for k, v in step[4].items() if not (isinstance(v, dict) and "omit" in v)}
                values.append(op(*decode(step[3]), **kwargs))
        raise UnsupportedProgram("the graph has no output")


def _decoded(
    x: Any, values: Sequence[Any], device: torch.device, low_precision: torch.dtype | None, dense: bool
) -> Any:
    """An operand of :meth:`FxProgram.run`; ``values``: of the steps so far.

    No function inside of ``run``: one that calls itself is a reference cycle, which would keep all the values until
    Python's next garbage collection.
    """
    if isinstance(x, dict):
        if "node" in x:
            value = values[x["node"]]
            return value.to_dense() if dense and isinstance(value, ScatterAdd) else value
        if "dtype" in x:
            dtype = getattr(torch, x["dtype"])
            low = dtype in (torch.bfloat16, torch.float16)
            return low_precision if low and low_precision is not None else dtype
        if "device" in x:
            return device
        if "float" in x:
            return float(x["float"])
    return [_decoded(y, values, device, low_precision, dense) for y in x] if isinstance(x, list) else x


def constant_on(device: torch.device, data: Tensor) -> Tensor:
    """A copy of ``data``, which lies on the CPU, for as long as anybody keeps it.

    Raises RuntimeError while a CUDA graph is captured, which could not hold the copy.
    """
    if device.type != "cuda":
        with torch.inference_mode(False):
            return data.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "score_mod, mask_mod: a constant tensor has to be copied to the GPU, which a CUDA graph cannot hold; run "
            "the same call once before the graph is captured"
        )
    stream = torch.cuda.current_stream(device)

    def copy() -> Tensor:
        with torch.cuda.stream(stream):
            return data.to(device)

    # A thread that warms up a CUDA graph allocates in the graph's pool, where nothing may be kept; others do not.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy).result()


_of_graphs: dict[int, object] = {}


def kept_for_graphs(device: torch.device, constant: T) -> T:
    """``constant`` itself, tensors on ``device``: kept for ever if a CUDA graph that is being captured reads them, as
    it has their addresses and may be replayed at any time."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _of_graphs[id(constant)] = constant
    return constant


def _index(source: Tensor, indices: list[Tensor], attended: Tensor | None) -> Tensor:
    """``source[indices]``, where bounds matter for attended scores only."""
    if attended is not None and source.device.type != "cpu":  # elsewhere an index error cannot be caught
        indices = [torch.where(attended, i, 0) for i in indices]
    try:
        return torch.ops.aten.index.Tensor(source, indices)
    except IndexError:
        if attended is None:
            raise
        return torch.ops.aten.index.Tensor(source, [torch.where(attended, i, 0) for i in indices])


def references(x: Any) -> list[int]:
    """The steps that an operand, or part of a step, refers to."""
    if isinstance(x, dict):
        return [x["node"]] if "node" in x else [n for y in x.values() for n in references(y)]
    return [n for y in x for n in references(y)] if isinstance(x, (list, tuple)) else []


def _renumber(x: Any, numbers: dict[int, int]) -> Any:
    if isinstance(x, dict):
        return {"node": numbers[x["node"]]} if "node" in x else {k: _renumber(y, numbers) for k, y in x.items()}
    return [_renumber(y, numbers) for y in x] if isinstance(x, (list, tuple)) else x


class ProgramBuilder:
    """Collects steps; nodes refer to the step that was made for them."""

    def __init__(self, graph: Graph | GraphModule):
        self.module, self.graph = (None, graph) if isinstance(graph, Graph) else (graph, graph.graph)
        self.steps: list[Any] = []
        self.dtypes: list[torch.dtype | None] = []
        self.ids: dict[Node, int] = {}

    def program(self) -> FxProgram:
        return FxProgram(tuple(self.steps), tuple(self.dtypes))

    def add(self, node: Node) -> None:
        """The step of ``node`` as it is."""
        if node.op == "placeholder":
            self.append(["arg"], node)
        elif node.op == "output":
            self.append(["return", self.encode(node.args[0])])
        elif node.op == "get_attr":
            self.append(self._literal(node), node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            self.append_call(node, node.target, node.args, node.kwargs)
        elif node.op == "call_function" and node.target in _PYTHON_NAMES:
            self.append(["python", _PYTHON_NAMES[node.target], self.encode(node.args)], node)
        else:
            raise UnsupportedProgram(f"node {node.name} ({node.op} {node.target})")

    def append(self, step: Any, node: Node | None = None, dtype: torch.dtype | None = None) -> int:
        """Returns the step's number, by which ``node`` is known from now on.  ``dtype``: of what has no node."""
        self.steps.append(step)
        value = None if node is None else node.meta.get("val")
        self.dtypes.append(value.dtype if isinstance(value, Tensor) else dtype)
        if node is not None:
            self.ids[node] = len(self.steps) - 1
        return len(self.steps) - 1

    def append_call(self, node: Node, op: torch._ops.OpOverload, args: Any, kwargs: Any = None) -> None:
        """An op's step; an op that only passes its argument on needs none."""
        if op in _IDENTITIES:
            self.ids[node] = self.ids[args[0]]
            return
        encoded = {k: self.encode(x) for k, x in (kwargs or {}).items()}
        self.append(["call", op._schema.name, op._overloadname, self.encode(args), encoded], node)

    def encode(self, value: Any) -> Any:
        if isinstance(value, Node):
            return {"node": self.ids[value]}
        if isinstance(value, (list, tuple)):
            return [self.encode(x) for x in value]
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": 1}
        if isinstance(value, (torch.layout, torch.memory_format)):
            return {"omit": 1}
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return {"float": repr(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UnsupportedProgram(f"an argument of type {type(value).__name__}")

    def _literal(self, node: Node) -> Any:
        value: Any = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, Tensor):
            raise UnsupportedProgram(f"a constant of type {type(value).__name__}")
        if value.numel() > LARGEST_LITERAL:
            raise UnsupportedProgram(f"a constant tensor of {value.numel()} elements inside the graph")
        with unset_fake_temporarily():  # while a graph is compiled; reading a GPU's constant runs an operation
            content = value.tolist()
        if value.dim() == 0:  # as compiled graphs have it
            options = {"dtype": self.encode(value.dtype), "device": self.encode(value.device)}
            return ["call", "aten::full", "", [[], self.encode(content)], options]
        data = json.loads(json.dumps(content), parse_constant=lambda text: {"float": text})
        return ["literal", data, str(value.dtype).removeprefix("torch.")]


def used_nodes(graph: Graph) -> list[Node]:
    """The graph's nodes in order, without those that nothing depends on; all placeholders.

    Raises InvalidMod where a node writes to a tensor, used or not.
    """
    used: set[Node] = set()
    for node in reversed(graph.nodes):
        op = node.target
        if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable and op is not _DETACH_IN_PLACE:
            raise InvalidMod(f"{op._schema.name} writes to a tensor; a score_mod or mask_mod may have no side effects")
        if node.op in ("output", "placeholder") or node in used:
            used.add(node)
            used.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in used]
