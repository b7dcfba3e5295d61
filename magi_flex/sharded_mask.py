"""The mask of a sequence that ranks share, as a mask_mod, and how it is known again in a graph.

A graph sees a mask only as a mask_mod and the tensors that it captures.  This one compares a number in its first
capture, the handle, with a constant: by that comparison it is known, not by the shape of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from magi_flex.canonical_mask import CanonicalMaskMod

HANDLE_SHAPE = (1, 1, 4)
HANDLE_MAGIC = 0x6D6167695F6370  # a handle's first number
INDICES = 4  # arguments of a mask_mod before its captures: b, h, q, k


class ShardedMaskMod:
    """mask_mod in dispatch order: row and key indices are places in the dispatch order of the whole sequence.

    A plain function of its captures, so that it is right on any backend.

    Attributes:
        handle: int64 HANDLE_SHAPE; its contents name the plans (magi_flex/distributed/context_mask.py).
        q_position, kv_position: int32 ``[Q]``, ``[K]``, places in the sequence by places in dispatch order.
        mask_mod: the mask in the order of the sequence.
    """

    def __init__(self, handle: Tensor, q_position: Tensor, kv_position: Tensor, mask_mod: CanonicalMaskMod) -> None:
        self.handle = handle
        self.q_position = q_position
        self.kv_position = kv_position
        self.mask_mod = mask_mod

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_ours = self.handle[0, 0, 0] == HANDLE_MAGIC
        return is_ours & self.mask_mod(b, h, self.q_position[q_idx], self.kv_position[kv_idx])


def find_handle(mask_mod: GraphModule, captures: Sequence[Any]) -> int | None:
    """Which of ``captures`` is the handle of a :class:`ShardedMaskMod` in this graph, alone or combined with others.

    None if there is none.  The graph may be one of Python's operators (torch 2.11 writes comparisons as methods) or of
    aten's.
    """
    operations = ("call_function", "call_method")
    arguments = [node for node in mask_mod.graph.nodes if node.op == "placeholder"]
    for node in mask_mod.graph.nodes:
        if node.op not in operations or not any(type(x) is int and x == HANDLE_MAGIC for x in node.args):
            continue
        source = node.args[0]
        while isinstance(source, Node) and source.op in operations and source.args:
            source = source.args[0]
        if source in arguments[INDICES : INDICES + len(captures)]:
            return arguments.index(source) - INDICES
    return None
