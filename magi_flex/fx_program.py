"""A mod's FX graph as a small serialisable program that can be run on tensors of any broadcastable shape.

Ops carry the program as a JSON string, so that a compiled graph (and a cached one) holds everything the kernel needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node


class UnsupportedProgram(Exception):
    """The graph holds something that cannot be serialised; the message says what."""


def _encode(value: Any, ids: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"node": ids[value]}
    if isinstance(value, (list, tuple)):
        return [_encode(x, ids) for x in value]
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


@dataclass(frozen=True)
class FxProgram:
    """Steps in order: ["arg"], ["call", op, overload, args, kwargs], or last ["return", values].

    ``steps`` refer to earlier ones by number ({"node": i}).  Devices are not stored: tensor creation runs on the
    device of the inputs.
    """

    steps: tuple[Any, ...]

    @staticmethod
    def from_graph(module: GraphModule) -> FxProgram:
        """Raises UnsupportedProgram for anything but placeholders and aten calls."""
        ids: dict[Node, int] = {}
        steps: list[Any] = []
        for node in module.graph.nodes:
            ids[node] = len(ids)
            if node.op == "placeholder":
                steps.append(["arg"])
            elif node.op == "output":
                steps.append(["return", _encode(node.args[0], ids)])
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                kwargs = {k: _encode(v, ids) for k, v in node.kwargs.items()}
                steps.append(
                    ["call", node.target._schema.name, node.target._overloadname, _encode(node.args, ids), kwargs]
                )
            else:
                raise UnsupportedProgram(f"node {node.name} ({node.op} {node.target})")
        return FxProgram(tuple(steps))

    @staticmethod
    def from_json(text: str) -> FxProgram:
        return FxProgram(tuple(json.loads(text)))

    def to_json(self) -> str:
        return json.dumps(list(self.steps), separators=(",", ":"))

    def run(self, args: Sequence[Any], device: torch.device) -> Any:
        """Run on ``args`` (tensors, ints); returns what the graph returns."""
        values: list[Any] = []
        remaining = iter(args)

        def decode(x: Any) -> Any:
            if isinstance(x, dict):
                if "node" in x:
                    return values[x["node"]]
                if "dtype" in x:
                    return getattr(torch, x["dtype"])
                if "device" in x:
                    return device
                if "float" in x:
                    return float(x["float"])
            return [decode(y) for y in x] if isinstance(x, list) else x

        for step in self.steps:
            if step[0] == "arg":
                values.append(next(remaining))
            elif step[0] == "return":
                return decode(step[1])
            else:
                namespace, name = step[1].split("::")
                op = getattr(getattr(getattr(torch.ops, namespace), name), step[2])
                kwargs = {k: decode(v) for k, v in step[4].items() if not (isinstance(v, dict) and "omit" in v)}
                values.append(op(*decode(step[3]), **kwargs))
        raise UnsupportedProgram("the graph has no output")
