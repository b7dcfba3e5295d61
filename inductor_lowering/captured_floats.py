"""Python floats that a score mod captures and that change between calls, in training.

Dynamo passes such a float as a float64 tensor whose value the mod's graph asks for (``item``), and FlexAttention's
trace of the gradients fails on that.  Here the graph reads the tensor itself instead.  Where it meets other tensors it
is converted to the dtype that a Python float would have there: theirs if they are floating, else the default.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound

from inductor_lowering.torch_compat import tracing_alone
from magi_flex.remember import remembered

_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.pos}
_MOST_KINDS = 32  # of calls, whose gradients' graphs a mod keeps
_MARK = "magi_flex_serves"  # in the graph's meta: Dynamo traced it while our kernels took the calls

_higher_order = sys.modules["torch._higher_order_ops.flex_attention"]  # the package's attribute is the operator
_stock_create_fw_bw_graph = _higher_order.create_fw_bw_graph  # type: ignore[attr-defined]


def install(serving: Callable[[], bool]) -> None:
    """Wrap FlexAttention's trace of gradients; it does what it did where ``serving`` is false."""

    def trace(*call: Any) -> Any:
        with tracing_alone():
            return _stock_create_fw_bw_graph(*call)[1]

    def create_fw_bw_graph(score_mod: Any, index_values: Any, other_buffers: Any) -> Any:
        known: dict[Hashable, Any] = {}
        kind = None
        if isinstance(score_mod, GraphModule) and (score_mod.meta.get(_MARK) or serving()):
            score_mod.meta[_MARK] = True
            known, kind = _joint_graphs.setdefault(score_mod, {}), _kind_of_call(index_values, other_buffers)
            score_mod = floats_as_tensors(score_mod)
        try:
            if kind is None:
                return score_mod, trace(score_mod, index_values, other_buffers)
            joint = functools.partial(trace, score_mod, index_values, other_buffers)
            return score_mod, remembered(known, kind, joint, _MOST_KINDS)
        except PendingUnbackedSymbolNotFound as error:
            raise RuntimeError(
                "score_mod: does more with a captured Python float that changes between calls than arithmetic; capture "
                "a 0-d tensor instead, such as torch.tensor(value)"
            ) from error

    _higher_order.create_fw_bw_graph = create_fw_bw_graph  # type: ignore[attr-defined]


# Of eager calls, which bring the same graphs again and again and would trace the gradients in each call.
_joint_graphs: WeakKeyDictionary[GraphModule, dict[Hashable, Any]] = WeakKeyDictionary()


def _kind_of_call(index_values: Sequence[Any], other_buffers: Sequence[Any]) -> Hashable | None:
    """Equal for eager calls whose gradients have the same graph; None while something else traces the call."""
    described: list[Hashable] = []
    for x in (*index_values, *other_buffers):
        if type(x) in (torch.Tensor, torch.nn.Parameter):
            described.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad))
        elif type(x) in (int, float, bool):
            described.append((type(x), x))
        else:
            return None
    if torch._C._len_torch_dispatch_stack():
        return None
    device = index_values[0].device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return *described, cast, torch.get_default_dtype(), torch.get_default_device()


def floats_as_tensors(score_mod: GraphModule) -> GraphModule:
    """The mod without ``item``; itself where it captures no float that changes."""
    if not any(_is_float(node) for node in score_mod.graph.nodes):
        return score_mod
    graph = Graph()
    copies: dict[Node, Node] = {}
    numbers: set[Node] = set()  # float64 tensors in place of Python floats
    converted: dict[tuple[Node, torch.dtype], Node] = {}

    def as_operand(node: Node, dtype: torch.dtype) -> Node:
        if node not in numbers:
            return copies[node]
        if (node, dtype) not in converted:
            converted[node, dtype] = graph.call_method("to", (copies[node], dtype))
        return converted[node, dtype]

    for node in score_mod.graph.nodes:
        if _is_float(node):
            numbers.add(node)
            copies[node] = copies[node.args[0]]
        elif node.target in _ARITHMETIC and node.all_input_nodes and numbers.issuperset(node.all_input_nodes):
            numbers.add(node)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            dtype = _dtype_beside(x for x in node.all_input_nodes if x not in numbers)
            copies[node] = graph.node_copy(node, functools.partial(as_operand, dtype=dtype))
    return GraphModule(score_mod, graph)


def _dtype_beside(operands: Iterable[Node]) -> torch.dtype:
    """The dtype that a Python float takes on in an operation with these tensors."""
    values = (node.meta.get("example_value") for node in operands)
    floating = [x.dtype for x in values if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
    return functools.reduce(torch.promote_types, floating) if floating else torch.get_default_dtype()


def _is_float(node: Node) -> bool:
    return node.target == "item" and isinstance(node.meta.get("example_value"), torch.SymFloat)
