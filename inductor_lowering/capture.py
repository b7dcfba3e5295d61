"""Tracing a user's mask_mod into a small aten program, without evaluating it on any index.

The four index arguments are symbols: wrapper tensors that carry a shape and a dtype but no data.  Operators that touch
a symbol are recorded; operators on plain tensors alone run at once, and their results join the captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from inductor_lowering.op_result import result_like
from magi_flex.fx_program import FxProgram

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")


class MaskModError(ValueError):
    """The mask_mod does something that a mask over single (query, key) pairs cannot do."""


class _Symbol(Tensor):
    """A tensor without data that stands for a node of the graph being recorded."""

    node: Node

    @staticmethod
    def __new__(cls, like: Tensor, node: Node, device: torch.device) -> _Symbol:
        symbol = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        symbol.node = node
        return symbol

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MaskModError(
            f"mask_mod: {func} reached a traced index outside of the trace; do not keep the index arguments after "
            "the call"
        )


class _Recorder(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.graph = Graph()
        self.captures: list[Tensor] = []
        self._originals: list[Tensor] = []  # keeps the ids below alive
        self._capture_nodes: dict[int, Node] = {}
        self._anchor: Node | None = None

    def placeholder(self, name: str) -> _Symbol:
        node = self.graph.placeholder(name)
        self._anchor = node
        return _Symbol(torch.empty((), dtype=torch.int64), node, self.device)

    def capture_node(self, tensor: Tensor) -> Node:
        """The placeholder of a plain tensor; one for each tensor object."""
        node = self._capture_nodes.get(id(tensor))
        if node is None:
            assert self._anchor is not None
            with self.graph.inserting_after(self._anchor):
                node = self.graph.placeholder(f"capture_{len(self.captures)}")
            self._anchor = node
            self._originals.append(tensor)
            self.captures.append(tensor.detach())
            self._capture_nodes[id(tensor)] = node
        return node

    def number(self, value: int) -> _Symbol:
        """A constant of the program, in the form that compiled graphs have it."""
        options: dict[str, Any] = {"dtype": torch.int64, "device": self.device}
        node = self.graph.call_function(torch.ops.aten.full.default, ([], value), options)
        return _Symbol(torch.empty((), dtype=torch.int64), node, self.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise MaskModError(
                f"mask_mod: {func} writes in place; a mask_mod must be free of side effects, so use the out-of-place "
                "form and write to no tensor"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise MaskModError(
                f"mask_mod: {func} draws random numbers; a mask must give the same answer each time, so draw a table "
                "before and index it"
            )
        leaves, _ = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, _Symbol) for leaf in leaves):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise MaskModError(
                "mask_mod: a Python value of an index was asked for (if, while, and, or, not, int(), .item(), a list's "
                "index); a mask_mod cannot branch on data, so use &, |, ~ and torch.where, and tensors for tables"
            )

        def to_node(x: Any) -> Any:
            if isinstance(x, _Symbol):
                return x.node
            return self.capture_node(x) if isinstance(x, Tensor) else x

        try:
            like = result_like(func, args, kwargs)
        except (RuntimeError, IndexError, TypeError) as error:
            raise MaskModError(f"mask_mod: {func}: {error}") from error
        if not isinstance(like, Tensor):
            raise MaskModError(
                f"mask_mod: {func} returns {type(like).__name__}; only operators that return one tensor are allowed, "
                "so write the mask with comparisons, &, |, ~, torch.where, arithmetic and indexing"
            )
        node = self.graph.call_function(func, tree_map(to_node, args), tree_map(to_node, kwargs))
        return _Symbol(like, node, self.device)


class _GetItem(TorchFunctionMode):
    """``table[q_idx, 0]`` as one gather: stock indexing would ask a 0-d index for its value."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__array__ and isinstance(args[0], _Symbol):
            raise MaskModError(
                "mask_mod: NumPy asked for an index as an array; use torch's operators, and tensors for tables"
            )
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        table, index = args
        parts = list(index) if isinstance(index, (tuple, list)) else [index]
        if not any(isinstance(x, _Symbol) for x in [table, *parts]) or not any(isinstance(x, Tensor) for x in parts):
            return func(*args)
        if any(x is Ellipsis for x in parts):
            at = next(i for i, x in enumerate(parts) if x is Ellipsis)
            parts[at : at + 1] = [slice(None)] * (table.dim() - len(parts) + 1)
        indices: list[Tensor | None] = []
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, (int, Tensor, slice)):
                raise MaskModError(
                    f"mask_mod: an index of type {type(part).__name__}; allowed are integers, integer tensors and ':'"
                )
            if isinstance(part, slice):
                if part != slice(None):
                    raise MaskModError(f"mask_mod: the slice {part} beside an index tensor; only ':' is allowed")
                indices.append(None)
            else:
                indices.append(part if isinstance(part, Tensor) else self.recorder.number(part))
        if len(indices) > table.dim():
            raise MaskModError(
                f"mask_mod: {len(indices)} indices for a tensor of shape {tuple(table.shape)}; at most "
                f"{table.dim()} are allowed"
            )
        return torch.ops.aten.index.Tensor(table, indices)


def trace_mask_mod(mask_mod: MaskMod, device: torch.device | str = "cpu") -> tuple[FxProgram, tuple[Any, ...]]:
    """Trace ``mask_mod(b, h, q_idx, kv_idx)`` into a program over (b, h, q, k, *captures).

    Args:
        mask_mod: any callable of four 0-d integer tensors that returns a 0-d bool tensor.
        device: what the index arguments claim to live on (new tensors that the mask_mod makes go there).
    Returns:
        The program and the tensors it captures, in order.  Python numbers are constants of the program.
    Raises:
        MaskModError: for side effects, random numbers, control flow that depends on data, and a result that is not
            one bool.
    """
    if not callable(mask_mod):
        raise MaskModError(f"mask_mod: got {type(mask_mod).__name__}; a callable (b, h, q_idx, kv_idx) is needed")
    recorder = _Recorder(torch.device(device))
    symbols = [recorder.placeholder(name) for name in INDEX_NAMES]
    with torch.no_grad(), recorder, _GetItem(recorder):
        out = mask_mod(*symbols)
    if isinstance(out, bool):
        out = torch.tensor(out, device=device)
    if not isinstance(out, Tensor) or out.dtype != torch.bool or out.dim() != 0:
        got = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise MaskModError(
            f"mask_mod: returned {got}; a bool for one (query, key) pair is needed (a 0-d bool tensor), so finish "
            "with a comparison"
        )
    recorder.graph.output(out.node if isinstance(out, _Symbol) else recorder.capture_node(out))
    # The same object for equal programs: what was found out about one holds for the masks of later steps.
    program = FxProgram.from_json(FxProgram.from_graph(recorder.graph).to_json())
    return program, tuple(recorder.captures)
