"""A mod's FX graph as a small serialisable program that can be run on tensors of any broadcastable shape.

Ops carry the program as a JSON string, so that a compiled graph (and a cached one) holds everything the kernel needs.

A mod is written for one score: its first ``scalars`` arguments (score, b, h, q, k, ...) are 0-d when the graph is
traced.  A kernel runs it on whole tiles, where these arguments broadcast against each other.  That is the same function
only if every value that depends on them is 0-d in the traced graph and made by elementwise ops, so the program is
brought into that form when it is built, or refused with the reason.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

LARGEST_LITERAL = 4096  # elements of a constant tensor that is stored inside the program

_ELEMENTWISE_WITHOUT_TAG = {
    "aten::floor_divide",
    "aten::_to_copy",
    "aten::alias",
    "aten::lift_fresh_copy",
    "aten::lift_fresh",
    "aten::__and__",
    "aten::__or__",
    "aten::__xor__",
    "aten::full_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::empty_like",
    "aten::new_full",
    "aten::new_zeros",
    "aten::new_ones",
    "prims::convert_element_type",
}
_SHAPE_ONLY = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::expand", "aten::detach", "aten::squeeze"}
_PYTHON_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.pow)
} | {"sym_max": torch.sym_max, "sym_min": torch.sym_min}
_PYTHON_NAMES = {f: name for name, f in _PYTHON_FUNCTIONS.items()}


class UnsupportedProgram(Exception):
    """The graph holds something that cannot be run tile by tile; the message says what."""


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
    device of the inputs.  The first ``scalars`` args are the ones that a kernel passes as broadcastable tiles.
    """

    steps: tuple[Any, ...]
    scalars: int = 4

    @staticmethod
    def from_graph(module: GraphModule, scalars: int = 4, grad_arg: int | None = None) -> FxProgram:
        """From a traced mod (nodes carry ``meta["val"]``).

        ``scalars`` counts the leading 0-d arguments: 4 for a mask_mod (b, h, q, k), 5 for a score_mod, 6 for its joint
        graph, where argument number ``grad_arg`` is the gradient of the result.  Raises UnsupportedProgram.
        """
        return _Builder(module, scalars, grad_arg).build()

    @staticmethod
    def from_json(text: str) -> FxProgram:
        record = json.loads(text)
        return FxProgram(tuple(record["steps"]), record["scalars"])

    def to_json(self) -> str:
        return json.dumps({"scalars": self.scalars, "steps": list(self.steps)}, separators=(",", ":"))

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
            attended: bool tile; scores elsewhere add nothing to the gradients of captures, not even NaN.
        """
        values: list[Any] = []
        remaining = iter(args)

        def decode(x: Any, dense: bool = True) -> Any:
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
            return [decode(y, dense) for y in x] if isinstance(x, list) else x

        def keep(tile: Tensor) -> Tensor:
            return tile if attended is None else torch.where(attended, tile, 0)

        for step in self.steps:
            kind = step[0]
            if kind == "arg":
                values.append(next(remaining))
            elif kind == "return":
                return decode(step[1], dense=False)
            elif kind == "python":
                values.append(_PYTHON_FUNCTIONS[step[1]](*decode(step[2])))
            elif kind == "literal":
                values.append(torch.tensor(decode(step[1]), dtype=getattr(torch, step[2]), device=device))
            elif kind == "sum":
                values.append(keep(decode(step[1])).sum())
            elif step[1] == "flex_lib::zeros_and_scatter":
                shape, indices, scattered = decode(step[3])
                values.append(ScatterAdd(tuple(shape), [i.expand(scattered.shape) for i in indices], keep(scattered)))
            else:
                namespace, name = step[1].split("::")
                op = getattr(getattr(getattr(torch.ops, namespace), name), step[2])
                kwargs = {k: decode(v) for k, v in step[4].items() if not (isinstance(v, dict) and "omit" in v)}
                values.append(op(*decode(step[3]), **kwargs))
        raise UnsupportedProgram("the graph has no output")


class _Builder:
    """Turns a graph into steps, keeping track of which values depend on the scalar arguments."""

    def __init__(self, module: GraphModule, scalars: int, grad_arg: int | None):
        self.module = module
        self.scalars = scalars
        self.grad_arg = grad_arg
        self.steps: list[Any] = []
        self.ids: dict[Node, int] = {}
        self.tiled: set[Node] = set()  # values that become tiles: 0-d in the graph, one per score in a kernel
        self.from_grad: set[Node] = set()  # values that are linear in the gradient of the result
        self.rows: dict[Node, tuple[Node, list[Any]]] = {}  # captured tensors indexed only in their leading dims

    def build(self) -> FxProgram:
        used = _used_nodes(self.module)
        args = 0
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                if args < self.scalars:
                    self.tiled.add(node)
                if args == self.grad_arg:
                    self.from_grad.add(node)
                args += 1
                self._append(node, ["arg"])
            elif node not in used:
                continue
            elif node.op == "output":
                self.steps.append(["return", self._returned(node)])
            elif node.op == "get_attr":
                self._append(node, self._literal(node))
            elif node.op != "call_function":
                raise UnsupportedProgram(f"node {node.name} ({node.op})")
            elif isinstance(node.target, torch._ops.OpOverload):
                self._call(node)
            elif node.target in _PYTHON_NAMES:
                self._append(node, ["python", _PYTHON_NAMES[node.target], self._encode(node.args)])
            else:
                raise UnsupportedProgram(f"a call of {node.target}")
        return FxProgram(tuple(self.steps), self.scalars)

    # ---- nodes --------------------------------------------------------------------------------------------------

    def _append(self, node: Node, step: Any) -> None:
        self.ids[node] = len(self.steps)
        self.steps.append(step)

    def _append_call(self, node: Node, name: str, overload: str, args: Any, kwargs: Any = None) -> None:
        self._append(node, ["call", name, overload, self._encode(args), self._encode(kwargs or {})])

    def _call(self, node: Node) -> None:
        op = node.target
        name, overload = op._schema.name, op._overloadname
        if op._schema.is_mutable:
            raise UnsupportedProgram(f"{name} writes to its input: a mod may have no side effects")
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise UnsupportedProgram(f"{name} is random: a mod must give the same value whenever it is called")
        if name == "aten::index":
            return self._index(node)
        if name == "flex_lib::zeros_and_scatter":
            return self._scatter(node)
        tiled_inputs = [x for x in node.all_input_nodes if x in self.tiled]
        for x in node.all_input_nodes:
            if x in self.rows:
                raise UnsupportedProgram(
                    f"{name} of a part of a captured tensor: index all its dimensions at once, as in table[h, q]"
                )
        if not tiled_inputs:
            if any(x in self.from_grad for x in node.all_input_nodes):
                self.from_grad.add(node)
            return self._append_call(node, name, overload, node.args, node.kwargs)
        if _rank(node) > 0:
            return self._linear_in_gradient(node, tiled_inputs)
        if name in _SHAPE_ONLY:
            name, overload, args, kwargs = "aten::alias", "", node.args[:1], {}
        elif name == "aten::bucketize" and node.args[1] not in self.tiled:
            args, kwargs = node.args, node.kwargs
        elif torch.Tag.pointwise in op.tags or name in _ELEMENTWISE_WITHOUT_TAG:
            args, kwargs = node.args, node.kwargs
        else:
            raise UnsupportedProgram(f"{name} is not elementwise: a mod sees one score, not a row of them")
        self.tiled.add(node)
        if any(x in self.from_grad for x in node.all_input_nodes):
            self.from_grad.add(node)
        self._append_call(node, name, overload, args, kwargs)

    def _index(self, node: Node) -> None:
        source, indices = node.args[0], list(node.args[1])
        if not any(isinstance(i, Node) and i in self.tiled for i in [source, *indices]) and source not in self.rows:
            return self._append_call(node, "aten::index", "Tensor", (source, indices))
        if source in self.rows:
            source, first = self.rows[source]
            indices = first + indices
        if source in self.tiled or any(i is None or _rank(i) > 0 for i in indices):
            raise UnsupportedProgram("indexing that does not pick single elements of a captured tensor")
        if _rank(node) > 0:
            self.rows[node] = (source, indices)
            return None
        self.tiled.add(node)
        return self._append_call(node, "aten::index", "Tensor", (source, indices))

    def _scatter(self, node: Node) -> None:
        shape, indices, values = node.args[0], list(node.args[1]), node.args[2]
        if values in self.rows:  # a gradient that passed through a partial index
            values, later = self.rows[values]
            indices = indices + later
        if values not in self.tiled or any(_rank(i) > 0 for i in indices):
            raise UnsupportedProgram("the gradient of an index that does not pick single elements")
        self.from_grad.add(node)
        inner = [user for user in node.users if user.target == node.target]
        if inner and len(inner) == len(node.users):
            self.rows[node] = (values, indices)
        else:
            self._append_call(node, node.target._schema.name, node.target._overloadname, (shape, indices, values))

    def _linear_in_gradient(self, node: Node, tiled_inputs: list[Node]) -> None:
        """Reshaping a 0-d gradient into a capture's shape: summed over the scores first, as the op is linear."""
        if len(tiled_inputs) != 1 or tiled_inputs[0] not in self.from_grad:
            raise UnsupportedProgram(
                f"{node.target._schema.name} makes a tensor of shape {tuple(node.meta['val'].shape)} of one score"
            )
        one_per_score = self.ids[tiled_inputs[0]]
        self.steps.append(["sum", {"node": one_per_score}])
        self.ids[tiled_inputs[0]] = len(self.steps) - 1
        self._append_call(node, node.target._schema.name, node.target._overloadname, node.args, node.kwargs)
        self.ids[tiled_inputs[0]] = one_per_score
        self.from_grad.add(node)

    def _literal(self, node: Node) -> Any:
        value = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, Tensor):
            raise UnsupportedProgram(f"a constant of type {type(value).__name__}")
        if value.numel() > LARGEST_LITERAL:
            raise UnsupportedProgram(f"a constant tensor of {value.numel()} elements inside the graph")
        data = json.loads(json.dumps(value.tolist()), parse_constant=lambda text: {"float": text})
        return ["literal", data, str(value.dtype).removeprefix("torch.")]

    # ---- values -------------------------------------------------------------------------------------------------

    def _returned(self, node: Node) -> Any:
        for x in node.all_input_nodes:
            if x in self.rows or (_rank(x) > 0 and self.grad_arg is None):
                raise UnsupportedProgram(f"the mod returns a tensor of shape {tuple(x.meta['val'].shape)}, not one value")
        if self.grad_arg is None:
            return self._encode(node.args[0])
        gradients = []
        for position, x in enumerate(node.args[0]):
            if position >= self.grad_arg and x in self.tiled:  # of a 0-d capture
                self.steps.append(["sum", self._encode(x)])
                gradients.append({"node": len(self.steps) - 1})
            else:
                gradients.append(self._encode(x))
        return gradients

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Node):
            return {"node": self.ids[value]}
        if isinstance(value, (list, tuple)):
            return [self._encode(x) for x in value]
        if isinstance(value, dict):
            return {k: self._encode(x) for k, x in value.items()}
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


def _rank(node: Any) -> int:
    """Dimensions of a node's value in the traced graph (0 for numbers)."""
    if not isinstance(node, Node):
        return 0
    if "val" not in node.meta:
        raise UnsupportedProgram(f"node {node.name} was traced without shapes")
    value = node.meta["val"]
    return value.dim() if isinstance(value, Tensor) else 0


def _used_nodes(module: GraphModule) -> set[Node]:
    used: set[Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op == "output" or node in used:
            used.add(node)
            used.update(node.all_input_nodes)
    return used
