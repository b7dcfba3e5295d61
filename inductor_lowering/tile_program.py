"""From a traced score mod (or its joint graph) to a program that gives the same values on whole tiles.

A mod is written for one score: its leading arguments (score, b, h, q, k, ...) are 0-d when the graph is traced.  A
kernel runs it on a tile, where these arguments broadcast against each other.  That is the same function only if every
value that depends on them is 0-d in the traced graph and made by elementwise ops, in the dtype that the trace has; the
program is brought into that form here, or refused with the reason.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from magi_flex.fx_program import FxProgram, InvalidMod, ProgramBuilder, UnsupportedProgram, used_nodes

SCORE_SCALARS = 5  # score, b, h, q, k
JOINT_SCALARS = 6  # and the gradient of the result

_ELEMENTWISE_WITHOUT_TAG = {
    "aten::floor_divide",
    "aten::hardshrink_backward",
    "aten::masked_fill",
    "aten::rsub",
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
    "aten::softshrink_backward",
    "prims::convert_element_type",
}
_ONE_OPERAND = {"aten::masked_fill", "aten::bucketize", "aten::searchsorted"}  # others do not decide on its dtype
_SHAPE_ONLY = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::expand", "aten::detach", "aten::squeeze"}


def score_program(module: GraphModule) -> FxProgram:
    """(score, b, h, q, k, *captures) -> score.  Raises UnsupportedProgram, or InvalidMod where the mod is wrong."""
    return _TileProgramBuilder(module, SCORE_SCALARS, None).build()


def joint_program(module: GraphModule) -> FxProgram:
    """(score, b, h, q, k, d result, *captures) -> (d score, None, None, None, None, *d captures).

    The captures' gradients are sums over the tile.  Raises as :func:`score_program`.
    """
    return _TileProgramBuilder(module, JOINT_SCALARS, JOINT_SCALARS - 1).build()


class _TileProgramBuilder(ProgramBuilder):
    """Keeps track of which values depend on the scalar arguments."""

    def __init__(self, module: GraphModule, scalars: int, grad_arg: int | None):
        super().__init__(module)
        self.scalars = scalars
        self.grad_arg = grad_arg
        self.work = torch.float32  # the least dtype that kernels hold scores in
        self.tiled: set[Node] = set()  # 0-d in the graph, one value per score in a kernel
        self.from_grad: set[Node] = set()  # linear in the gradient of the result
        self.partly_indexed: dict[Node, tuple[Node, list[Any]]] = {}  # captures indexed in their leading dims only

    def build(self) -> FxProgram:
        self._check_result()
        args = 0
        for node in used_nodes(self.graph):
            if node.op == "placeholder":
                if args < self.scalars:
                    self.tiled.add(node)
                if args == 0 and _is_tensor(node):
                    self.work = torch.promote_types(node.meta["val"].dtype, self.work)
                if args == self.grad_arg:
                    self.from_grad.add(node)
                args += 1
            if node.op == "output":
                self.append(["return", self._returned(node)])
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                self._call(node, node.target)
            else:
                self.add(node)
        return self.program()

    def _check_result(self) -> None:
        (output,) = self.graph.find_nodes(op="output")
        if self.grad_arg is None and _rank(output.args[0]) > 0:
            shape = tuple(output.args[0].meta["val"].shape)
            raise InvalidMod(f"score_mod: returns a tensor of shape {shape}; one score (a 0-d tensor) is needed")

    def _call(self, node: Node, op: torch._ops.OpOverload) -> None:
        name = op._schema.name
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise InvalidMod(f"score_mod: {name} is random; the same arguments must always give the same score")
        if name == "aten::index":
            return self._index(node, op)
        if name == "flex_lib::zeros_and_scatter":
            return self._scatter(node, op)
        if any(x in self.partly_indexed for x in node.all_input_nodes):
            raise UnsupportedProgram(
                f"{name} of a part of a captured tensor: index all its dimensions at once, as in table[h, q]"
            )
        tiled_inputs = [x for x in node.all_input_nodes if x in self.tiled]
        if tiled_inputs and _rank(node) > 0:
            return self._linear_in_gradient(node, op, tiled_inputs)
        if any(x in self.from_grad for x in node.all_input_nodes):
            self.from_grad.add(node)
        if not tiled_inputs:
            return self.append_call(node, op, node.args, node.kwargs)
        self.tiled.add(node)
        if name in _SHAPE_ONLY:  # of a 0-d value
            return self.append_call(node, torch.ops.aten.alias.default, node.args[:1])
        searches = name in ("aten::bucketize", "aten::searchsorted") and len(tiled_inputs) == 1
        if not searches and torch.Tag.pointwise not in op.tags and name not in _ELEMENTWISE_WITHOUT_TAG:
            raise InvalidMod(
                f"score_mod: {name} is no function of single elements; a score_mod sees one score, so reductions, "
                f"sorting and top-k over queries or keys must be done before, and their result captured"
            )
        return self._append_elementwise(node, op, tiled_inputs)

    def _append_elementwise(self, node: Node, op: torch._ops.OpOverload, tiled_inputs: list[Node]) -> None:
        """The step of an op on tiles, which are converted where only the trace does that: among 0-d tensors all dtypes
        count for the result's, while a 0-d tensor beside a tile of the same category does not."""
        of_trace = dict(self.ids)
        if op._schema.name not in _ONE_OPERAND:
            known = [x for x in node.all_input_nodes if x not in self.tiled and _is_tensor(x)]
            for x in tiled_inputs:
                wanted = self._wanted_dtype(x, known)
                if wanted is not None:
                    converted = ["call", "aten::_to_copy", "", [self.encode(x)], {"dtype": self.encode(wanted)}]
                    self.ids[x] = self.append(converted, dtype=wanted)
        self.append_call(node, op, node.args, node.kwargs)
        self.ids = {**of_trace, node: self.ids[node]}

    def _wanted_dtype(self, tile: Node, known: list[Node]) -> torch.dtype | None:
        """The dtype that ``tile`` has to have beside the 0-d tensors ``known``, if it is not its own."""
        if not _is_tensor(tile):
            return None
        own = tile.meta["val"].dtype
        others = [x.meta["val"].dtype for x in known]
        others = [x for x in others if _category(x) == _category(own) != "bool"]
        wanted = functools.reduce(torch.promote_types, others, own)
        if wanted == torch.float64 and self.work != torch.float64:
            wanted = torch.promote_types(own, torch.float32)  # what kernels compute in
        return None if wanted == own else wanted

    def _index(self, node: Node, op: torch._ops.OpOverload) -> None:
        source, indices = node.args[0], list(node.args[1])
        if source not in self.partly_indexed and not any(x in self.tiled for x in node.all_input_nodes):
            return self.append_call(node, op, node.args)
        if source in self.partly_indexed:
            source, leading = self.partly_indexed[source]
            indices = leading + indices
        if source in self.tiled or any(i is None or _rank(i) > 0 for i in indices):
            raise UnsupportedProgram("indexing that does not pick single elements of a captured tensor")
        if _rank(node) > 0:
            self.partly_indexed[node] = (source, indices)
            return None
        self.tiled.add(node)
        return self.append_call(node, op, (source, indices))

    def _scatter(self, node: Node, op: torch._ops.OpOverload) -> None:
        """The gradient of an index op; of two in a row (table[h][q]) where ``values`` is one itself."""
        shape, indices, values = node.args[0], list(node.args[1]), node.args[2]
        if values in self.partly_indexed:
            values, trailing = self.partly_indexed[values]
            indices = indices + trailing
        if values not in self.tiled or any(_rank(i) > 0 for i in indices):
            raise UnsupportedProgram("the gradient of an index that does not pick single elements")
        self.from_grad.add(node)
        scattered_again = [user.target is op for user in node.users]
        if scattered_again and all(scattered_again):
            self.partly_indexed[node] = (values, indices)
        else:
            self.append_call(node, op, (shape, indices, values))

    def _linear_in_gradient(self, node: Node, op: torch._ops.OpOverload, tiled_inputs: list[Node]) -> None:
        """A 0-d gradient brought into a capture's shape: summed over the scores first, as the op is linear in it."""
        if len(tiled_inputs) != 1 or tiled_inputs[0] not in self.from_grad:
            shape = tuple(node.meta["val"].shape)
            raise UnsupportedProgram(f"{op._schema.name} makes a tensor of shape {shape} of one score")
        self.from_grad.add(node)
        gradient = tiled_inputs[0]
        one_per_score = self.ids[gradient]
        self.append(["sum", {"node": one_per_score}], gradient)
        self.append_call(node, op, node.args, node.kwargs)
        self.ids[gradient] = one_per_score

    def _returned(self, node: Node) -> Any:
        results = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        if any(x in self.partly_indexed for x in results):
            raise UnsupportedProgram("the result is a part of a captured tensor, not one value")
        if self.grad_arg is None:
            return self.encode(node.args[0])
        encoded = []
        for position, x in enumerate(results):
            if position >= SCORE_SCALARS and x in self.tiled:  # the gradient of a 0-d capture
                encoded.append({"node": self.append(["sum", self.encode(x)])})
            else:
                encoded.append(self.encode(x))
        return encoded


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _category(dtype: torch.dtype) -> str:
    """What type promotion tells apart before sizes of dtypes count."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"


def _rank(node: Any) -> int:
    """Dimensions of a node's value in the traced graph (0 for numbers)."""
    if not isinstance(node, Node):
        return 0
    if "val" not in node.meta:
        raise UnsupportedProgram(f"node {node.name} was traced without shapes")
    value = node.meta["val"]
    return value.dim() if isinstance(value, Tensor) else 0
